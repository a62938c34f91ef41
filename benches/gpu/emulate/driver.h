// What the parts of libcuda share: its numbers, who may call what, and work on streams.
#pragma once
#include "block.h"

namespace emu {

typedef void* Handle;
typedef uint64_t Address;
typedef std::function<void()> Run;
struct Work {
    Run run;
    bool kernel = false;
    // Of a kernel that may begin before the one before it has ended: begins it, and gives the rest.
    std::function<Run()> begin = nullptr;
};

enum Status {
    OK = 0,
    INVALID = 1,
    OUT_OF_MEMORY = 2,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    TOO_MANY_RESOURCES = 701,
    CONTEXT_IS_DESTROYED = 709,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_ISOLATION = 905,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
};

// Says what the driver has against a call (callers often keep it to themselves), and gives the status.
int refuse(int status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Whether this thread may call a function: its context is current, and the call is not of those that a thread
// must not make while it captures a stream (CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).
enum Kind { HARMLESS, UNSAFE };
int may_call(const char* name, Kind kind);

// Copies and launches: recorded, done now, or done when somebody waits for the stream.
int issue(const char* name, Handle stream, Work work);
// All that was issued on any stream is done.
void finish_all_streams();

// Whether bytes of an allocation on the device, or of page-locked memory, are there.
bool on_device(Address at, size_t bytes);
bool page_locked(const void* at, size_t bytes);

}  // namespace emu

#define EXPORT extern "C" __attribute__((visibility("default")))
#define MAY_CALL(kind) \
    if (int status = may_call(__func__, kind)) return status
