// The functions of libcuda that qurl uses (src/cuda/ffi.rs), over ordinary memory and emulated kernels.
//
// Work is done when it is issued, so streams and events have nothing to wait for. Allocations end at a page
// that cannot be touched, and begin as NaNs.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include "block.h"

using namespace emu;

namespace {

typedef void* Handle;
typedef uint64_t Address;
typedef std::function<void()> Work;

const int INVALID = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, TOO_MANY_RESOURCES = 701;

struct Graph {
    std::vector<Work> work;
};
struct Stream {
    Graph* recording = nullptr;
};

// CUlaunchConfig
struct Attribute {
    int id;
    uint32_t value[17];
} __attribute__((aligned(8)));
struct Config {
    unsigned grid[3], block[3], shared;
    Handle stream;
    const Attribute* attributes;
    unsigned count;
};

std::mutex memory_mutex;
std::map<Address, std::pair<void*, size_t>> allocations;
const size_t TOTAL = (size_t)16 << 30, PAGE = 4096;
size_t allocated;

// Shared memory that a block may have.
int shared_of_a_block() {
    switch (settings().architecture) {
        case 80:
        case 87: return 163 << 10;
        case 86:
        case 89:
        case 120: return 99 << 10;
        default: return 227 << 10;
    }
}

int issue(Handle stream, Work work) {
    Graph* recording = stream ? ((Stream*)stream)->recording : nullptr;
    if (recording) {
        recording->work.push_back(std::move(work));
    } else {
        work();
    }
    return 0;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int cuDriverGetVersion(int* version) { return *version = 12080, 0; }
EXPORT int cuInit(unsigned) { return 0; }
EXPORT int cuDeviceGetCount(int* count) { return *count = 1, 0; }
EXPORT int cuDeviceGet(int* device, int number) { return *device = number, number == 0 ? 0 : INVALID; }
EXPORT int cuDeviceGetName(char* name, int size, int) {
    std::snprintf(name, size, "emulated sm_%u with %u SMs", settings().architecture, settings().sms);
    return 0;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 16: return *value = settings().sms, 0;
        case 75: return *value = settings().architecture / 10, 0;
        case 97: return *value = shared_of_a_block(), 0;
        case 76: return *value = settings().architecture % 10, 0;
        default: return INVALID;
    }
}
EXPORT int cuDevicePrimaryCtxRetain(Handle* context, int) { return *context = (Handle)1, 0; }
EXPORT int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
EXPORT int cuCtxSetCurrent(Handle) { return 0; }
EXPORT int cuMemGetInfo_v2(size_t* left, size_t* total) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    return *left = TOTAL - allocated, *total = TOTAL, 0;
}
EXPORT int cuMemAlloc_v2(Address* at, size_t bytes) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    if (bytes > TOTAL - allocated) return OUT_OF_MEMORY;
    size_t aligned = (bytes + 255) / 256 * 256, pages = (aligned + PAGE - 1) / PAGE * PAGE;
    uint8_t* base = (uint8_t*)mmap(nullptr, pages + PAGE, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return OUT_OF_MEMORY;
    mprotect(base + pages, PAGE, PROT_NONE);
    uint8_t* begin = base + pages - aligned;
    std::memset(begin, 0xff, aligned);
    allocations[(Address)begin] = {base, pages + PAGE};
    allocated += pages + PAGE;
    return *at = (Address)begin, 0;
}
EXPORT int cuMemFree_v2(Address at) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto found = allocations.find(at);
    if (found == allocations.end()) return INVALID;
    munmap(found->second.first, found->second.second);
    allocated -= found->second.second;
    allocations.erase(found);
    return 0;
}
EXPORT int cuMemHostAlloc(void** at, size_t bytes, unsigned) {
    return (*at = std::calloc(1, bytes)) ? 0 : OUT_OF_MEMORY;
}
EXPORT int cuMemFreeHost(void* at) { return std::free(at), 0; }
EXPORT int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, Handle stream) {
    return issue(stream, [=] { std::memcpy((void*)to, from, bytes); });
}
EXPORT int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, Handle stream) {
    return issue(stream, [=] { std::memcpy(to, (void*)from, bytes); });
}
EXPORT int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Handle stream) {
    return issue(stream, [=] { std::memmove((void*)to, (void*)from, bytes); });
}
EXPORT int cuMemsetD8Async(Address at, unsigned char byte, size_t bytes, Handle stream) {
    return issue(stream, [=] { std::memset((void*)at, byte, bytes); });
}
EXPORT int cuStreamCreate(Handle* stream, unsigned) { return *stream = new Stream, 0; }
EXPORT int cuStreamDestroy_v2(Handle stream) { return delete (Stream*)stream, 0; }
EXPORT int cuStreamSynchronize(Handle) { return 0; }
EXPORT int cuStreamWaitEvent(Handle, Handle, unsigned) { return 0; }
EXPORT int cuEventCreate(Handle* event, unsigned) { return *event = (Handle)1, 0; }
EXPORT int cuEventRecord(Handle, Handle) { return 0; }
EXPORT int cuEventSynchronize(Handle) { return 0; }
EXPORT int cuEventQuery(Handle) { return 0; }
EXPORT int cuEventDestroy_v2(Handle) { return 0; }

EXPORT int cuStreamBeginCapture_v2(Handle stream, int) { return ((Stream*)stream)->recording = new Graph, 0; }
EXPORT int cuStreamEndCapture(Handle stream, Handle* graph) {
    *graph = ((Stream*)stream)->recording;
    return ((Stream*)stream)->recording = nullptr, 0;
}
EXPORT int cuGraphInstantiateWithFlags(Handle* exec, Handle graph, uint64_t) {
    return *exec = new Graph(*(Graph*)graph), 0;
}
EXPORT int cuGraphLaunch(Handle exec, Handle) {
    for (const Work& work : ((Graph*)exec)->work) work();
    return 0;
}
EXPORT int cuGraphExecDestroy(Handle exec) { return delete (Graph*)exec, 0; }
EXPORT int cuGraphDestroy(Handle graph) { return delete (Graph*)graph, 0; }
EXPORT int cuGetErrorString(int status, const char** text) {
    *text = status == OUT_OF_MEMORY        ? "out of memory"
            : status == TOO_MANY_RESOURCES ? "too many resources requested for launch"
            : status == NOT_FOUND          ? "named symbol not found"
                                           : "invalid argument";
    return 0;
}

// ---- kernels ----------------------------------------------------------------------------------------------

// A compiled file is a shared library after its length in eight bytes (compiler.cpp).
EXPORT int cuModuleLoadData(Handle* handle, const void* image) {
    uint64_t bytes;
    std::memcpy(&bytes, image, 8);
    char path[] = "/tmp/emulated-XXXXXX";
    int file = mkstemp(path);
    bool written = file >= 0 && write(file, (const char*)image + 8, bytes) == (ssize_t)bytes;
    close(file);
    void* library = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (!library) std::fprintf(stderr, "emulator: %s\n", dlerror());
    unlink(path);
    if (!library) return INVALID;
    Module* module = new Module;
    module->library = library;
    module->dynamic = (uint8_t * (*)()) dlsym(library, "emu_dynamic");
    module->skew = *(unsigned*)dlsym(library, "emu_skew");
    return *handle = module, 0;
}
EXPORT int cuModuleUnload(Handle handle) {
    // Functions may still be named by errors: a library stays.
    return delete (Module*)handle, 0;
}
EXPORT int cuModuleGetFunction(Handle* function, Handle handle, const char* name) {
    Module* module = (Module*)handle;
    auto symbol = [&](std::string what) { return dlsym(module->library, (what + name).c_str()); };
    if (!symbol("emu_call_")) return NOT_FOUND;
    Function* f = new Function;
    f->module = module, f->name = name;
    f->call = (void (*)(void**))symbol("emu_call_");
    f->size = (size_t(*)(size_t))symbol("emu_size_");
    f->cluster = *(unsigned*)symbol("emu_cluster_"), f->bound = *(unsigned*)symbol("emu_bound_");
    f->shared = 48 << 10;
    for (f->count = 0; f->size(f->count); ++f->count) {}
    return *function = f, 0;
}
EXPORT int cuFuncSetAttribute(Handle function, int attribute, int value) {
    if (attribute != 8 || value > shared_of_a_block()) return INVALID;
    ((Function*)function)->shared = value;
    return 0;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(
    int* count, Handle function, int threads, size_t shared
) {
    const Function& f = *(Function*)function;
    return *count = (unsigned)threads <= f.bound && shared <= f.shared, 0;
}
EXPORT int cuOccupancyMaxActiveClusters(int* count, Handle, const Config* config) {
    return *count = settings().sms / config->attributes[0].value[1], 0;
}
EXPORT int cuLaunchKernelEx(const Config* config, Handle function, void** arguments, void**) {
    const Function& f = *(Function*)function;
    unsigned threads = config->block[0] * config->block[1] * config->block[2];
    if (threads == 0 || threads > f.bound || config->block[1] != 1 || config->block[2] != 1)
        return TOO_MANY_RESOURCES;
    if (config->shared > f.shared) return INVALID;
    if (config->grid[0] % f.cluster || config->grid[1] > 65535 || config->grid[2] > 65535) return INVALID;
    // The caller's arguments go when this returns.
    struct alignas(64) Place {
        uint8_t bytes[128];
    };
    auto kept = std::make_shared<std::vector<Place>>(f.count);
    for (unsigned i = 0; i < f.count; ++i) std::memcpy((*kept)[i].bytes, arguments[i], f.size(i));
    Dim grid = {config->grid[0], config->grid[1], config->grid[2]}, block = {threads, 1, 1};
    unsigned shared = config->shared;
    return issue(config->stream, [=, &f] {
        std::vector<void*> list;
        for (Place& place : *kept) list.push_back(place.bytes);
        run(f, grid, block, shared, list.data());
    });
}

// What the TMA is told, as ptx.cpp reads it.
EXPORT int cuTensorMapEncodeTiled(
    void* to, int kind, unsigned rank, Address at, const uint64_t* sizes, const uint64_t* strides,
    const unsigned* box, const unsigned*, int, int swizzle, int, int
) {
    unsigned size = kind == 0 ? 1 : kind == 9 ? 2 : kind == 7 ? 4 : 0;
    bool fine = size && rank == 2 && at % 16 == 0 && strides[0] % 16 == 0 && box[0] <= 256 && box[1] <= 256 &&
                box[0] * size % 16 == 0 && (swizzle == 0 || (swizzle == 3 && box[0] * size <= 128));
    if (!fine) return INVALID;
    uint64_t words[16] = {at, sizes[0], sizes[1], strides[0], box[0] | (uint64_t)box[1] << 32,
                          size | (uint64_t)(swizzle == 3) << 32};
    std::memcpy(to, words, sizeof words);
    return 0;
}
