// Streams, events and graphs of libcuda, and the contexts of threads.
//
// Work is done when it is issued, or with EMULATE_LATE=4 when somebody waits for it: for its stream, an event
// after it, or memory that is freed. Then everything between is as late as it may be on a GPU.
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <set>
#include <utility>
#include "driver.h"

namespace emu {

namespace {

// Work in its order.
struct Order {
    Run begun;  // the rest of what is next, where that has begun

    // A kernel begins before the one before it has ended, where both agree to it.
    void run(const Work& work, const Work* next) {
        Run rest = begun ? std::exchange(begun, nullptr) : work.run;
        if (work.kernel && next && next->begin && settings().early_kernels) begun = next->begin();
        rest();
    }
};
struct Graph {
    std::vector<Work> work;
};
struct Stream {
    std::deque<Work> pending;
    Order order;
    uint64_t issued = 0;
    std::atomic<uint64_t> done{0};
    // While it is captured: what, by whom, and whether that is still of use.
    Graph* recording = nullptr;
    std::thread::id thread;
    bool invalidated = false;
};
struct Event {
    Stream* stream = nullptr;  // none: not recorded
    uint64_t at = 0;
    bool captured = false;
};

std::mutex mutex;                // of what streams and events are
std::recursive_mutex running;    // of late work: an order of all of it
std::set<void*> streams, events, graphs;
std::atomic<int> contexts{0};
thread_local bool current;
thread_local Stream* capturing;  // by this thread

bool known(const std::set<void*>& handles, Handle handle) {
    std::lock_guard<std::mutex> lock(mutex);
    return handles.count(handle) != 0;
}

// Does what was issued first.
void run_until(Stream* stream, uint64_t number) {
    if (stream->done >= number) return;
    std::lock_guard<std::recursive_mutex> order(running);
    while (stream->done < number) {
        Work work, next;
        {
            std::lock_guard<std::mutex> lock(mutex);
            work = std::move(stream->pending.front());
            stream->pending.pop_front();
            if (stream->done + 1 < number) next = stream->pending.front();
        }
        stream->order.run(work, &next);
        ++stream->done;
    }
}

void invalidate(Stream* stream) { stream->invalidated = true; }

}  // namespace

int refuse(int status, const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::fprintf(stderr, "emulator: refused (%d): ", status);
    std::vfprintf(stderr, format, args);
    std::fprintf(stderr, "\n");
    va_end(args);
    return status;
}

int may_call(const char* name, Kind kind) {
    if (contexts == 0) return refuse(CONTEXT_IS_DESTROYED, "%s without a context", name);
    if (!current) return refuse(INVALID_CONTEXT, "%s in a thread where no context is current", name);
    if (kind == UNSAFE && capturing) {
        invalidate(capturing);
        return refuse(CAPTURE_UNSUPPORTED, "%s while this thread captures a stream", name);
    }
    return OK;
}

int issue(const char* name, Handle handle, Work work) {
    if (int status = may_call(name, HARMLESS)) return status;
    if (!known(streams, handle)) return refuse(INVALID_HANDLE, "%s on no stream", name);
    Stream* stream = (Stream*)handle;
    if (stream->recording) {
        if (stream->invalidated) return refuse(CAPTURE_INVALIDATED, "%s: the capture is invalid", name);
        stream->recording->work.push_back(std::move(work));
        return OK;
    }
    std::unique_lock<std::mutex> lock(mutex);
    ++stream->issued;
    if (settings().late_streams) {
        stream->pending.push_back(std::move(work));
        return OK;
    }
    lock.unlock();
    work.run();
    ++stream->done;
    return OK;
}

void finish_all_streams() {
    std::vector<std::pair<Stream*, uint64_t>> all;
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (void* stream : streams) all.emplace_back((Stream*)stream, ((Stream*)stream)->issued);
    }
    if (settings().late_streams)
        for (auto [stream, issued] : all) run_until(stream, issued);
}

}  // namespace emu

using namespace emu;

EXPORT int cuDevicePrimaryCtxRetain(Handle* context, int) {
    ++contexts;
    return *context = (Handle)1, OK;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int) {
    return --contexts < 0 ? refuse(INVALID_CONTEXT, "a context that was released before") : OK;
}
EXPORT int cuCtxSetCurrent(Handle context) { return current = context != nullptr, OK; }

EXPORT int cuStreamCreate(Handle* stream, unsigned) {
    MAY_CALL(HARMLESS);
    std::lock_guard<std::mutex> lock(emu::mutex);
    return streams.insert(*stream = new Stream), OK;
}
EXPORT int cuStreamDestroy_v2(Handle handle) {
    MAY_CALL(HARMLESS);
    if (!known(streams, handle)) return refuse(INVALID_HANDLE, "destroying no stream");
    Stream* stream = (Stream*)handle;
    if (stream->recording) return refuse(CAPTURE_UNSUPPORTED, "destroying a stream that is captured");
    // It goes when its work has been done; events still know it.
    if (settings().late_streams) run_until(stream, stream->issued);
    std::lock_guard<std::mutex> lock(emu::mutex);
    return streams.erase(handle), OK;
}
EXPORT int cuStreamSynchronize(Handle handle) {
    MAY_CALL(UNSAFE);
    if (!known(streams, handle)) return refuse(INVALID_HANDLE, "waiting for no stream");
    Stream* stream = (Stream*)handle;
    if (stream->recording) {
        invalidate(stream);
        return refuse(CAPTURE_UNSUPPORTED, "waiting for a stream that another thread captures");
    }
    if (settings().late_streams) run_until(stream, stream->issued);
    return OK;
}

EXPORT int cuEventCreate(Handle* event, unsigned) {
    MAY_CALL(HARMLESS);
    std::lock_guard<std::mutex> lock(emu::mutex);
    return events.insert(*event = new Event), OK;
}
EXPORT int cuEventDestroy_v2(Handle event) {
    MAY_CALL(HARMLESS);
    if (!known(events, event)) return refuse(INVALID_HANDLE, "destroying no event");
    std::lock_guard<std::mutex> lock(emu::mutex);
    return events.erase(event), delete (Event*)event, OK;
}
EXPORT int cuEventRecord(Handle event, Handle stream) {
    MAY_CALL(HARMLESS);
    if (!known(events, event) || !known(streams, stream)) return refuse(INVALID_HANDLE, "recording no event");
    std::lock_guard<std::mutex> lock(emu::mutex);
    Stream* s = (Stream*)stream;
    *(Event*)event = {s, s->issued, s->recording != nullptr};
    return OK;
}
// What an event stands for: a stream and how much of it.
static int passed(const char* name, Handle event, Event& found) {
    if (!known(events, event)) return refuse(INVALID_HANDLE, "%s: no event", name);
    std::lock_guard<std::mutex> lock(emu::mutex);
    found = *(Event*)event;
    return found.captured ? refuse(CAPTURED_EVENT, "%s: an event of a stream that is captured", name) : OK;
}
EXPORT int cuStreamWaitEvent(Handle stream, Handle event, unsigned) {
    MAY_CALL(HARMLESS);
    Event found;
    if (int status = passed(__func__, event, found)) return status;
    if (known(streams, stream) && ((Stream*)stream)->recording) {
        invalidate((Stream*)stream);
        return refuse(CAPTURE_ISOLATION, "a captured stream that waits for an event of another");
    }
    // To the driver, one that was never recorded has passed.
    if (!found.stream) return OK;
    return issue(__func__, stream, {[=] { run_until(found.stream, found.at); }});
}
EXPORT int cuEventSynchronize(Handle event) {
    MAY_CALL(UNSAFE);
    Event found;
    if (int status = passed(__func__, event, found)) return status;
    if (found.stream && settings().late_streams) run_until(found.stream, found.at);
    return OK;
}
EXPORT int cuEventQuery(Handle event) {
    MAY_CALL(UNSAFE);
    Event found;
    if (int status = passed(__func__, event, found)) return status;
    if (!found.stream || found.stream->done >= found.at || !settings().late_streams) return OK;
    // Whoever asks again finds that time has gone by.
    run_until(found.stream, found.at);
    return NOT_READY;
}

EXPORT int cuStreamBeginCapture_v2(Handle handle, int mode) {
    MAY_CALL(HARMLESS);
    if (!known(streams, handle)) return refuse(INVALID_HANDLE, "capturing no stream");
    if (mode != 1) return refuse(INVALID, "a mode of capturing that is not emulated");
    Stream* stream = (Stream*)handle;
    if (stream->recording || capturing) return refuse(ILLEGAL_STATE, "a capture inside of a capture");
    stream->recording = new Graph, stream->invalidated = false;
    stream->thread = std::this_thread::get_id();
    return capturing = stream, OK;
}
EXPORT int cuStreamEndCapture(Handle handle, Handle* graph) {
    MAY_CALL(HARMLESS);
    *graph = nullptr;
    if (!known(streams, handle)) return refuse(INVALID_HANDLE, "capturing no stream");
    Stream* stream = (Stream*)handle;
    if (!stream->recording) return refuse(ILLEGAL_STATE, "the end of a capture that was not begun");
    if (stream->thread != std::this_thread::get_id())
        return refuse(CAPTURE_WRONG_THREAD, "the end of a capture in another thread");
    Graph* found = std::exchange(stream->recording, nullptr);
    capturing = nullptr;
    if (stream->invalidated) {
        delete found;
        return refuse(CAPTURE_INVALIDATED, "the end of a capture that is invalid");
    }
    std::lock_guard<std::mutex> lock(emu::mutex);
    return graphs.insert(*graph = found), OK;
}
EXPORT int cuGraphInstantiateWithFlags(Handle* exec, Handle graph, uint64_t) {
    MAY_CALL(HARMLESS);
    if (!known(graphs, graph)) return refuse(INVALID_HANDLE, "instantiating no graph");
    std::lock_guard<std::mutex> lock(emu::mutex);
    return graphs.insert(*exec = new Graph(*(Graph*)graph)), OK;
}
EXPORT int cuGraphLaunch(Handle exec, Handle stream) {
    if (!known(graphs, exec)) return refuse(INVALID_HANDLE, "launching no graph");
    // A graph that is destroyed is kept until it has run.
    return issue(__func__, stream, {[graph = *(Graph*)exec] {
                     Order order;
                     for (size_t i = 0; i < graph.work.size(); ++i)
                         order.run(graph.work[i], i + 1 < graph.work.size() ? &graph.work[i + 1] : nullptr);
                 }});
}
static int destroy_graph(Handle graph) {
    if (!known(graphs, graph)) return refuse(INVALID_HANDLE, "destroying no graph");
    std::lock_guard<std::mutex> lock(emu::mutex);
    return graphs.erase(graph), delete (Graph*)graph, OK;
}
EXPORT int cuGraphExecDestroy(Handle exec) { return destroy_graph(exec); }
EXPORT int cuGraphDestroy(Handle graph) { return destroy_graph(graph); }
