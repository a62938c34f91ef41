// The functions of libcuda that qurl uses (src/cuda/ffi.rs): the device, modules, launches and tensor maps.
// Memory is in memory.cpp, streams and all that belongs to them in streams.cpp.
#include "driver.h"
#include <dlfcn.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>

using namespace emu;

namespace {

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

}  // namespace

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
EXPORT int cuGetErrorString(int status, const char** text) {
    static const std::map<int, const char*> TEXTS = {
        {OUT_OF_MEMORY, "out of memory"},
        {INVALID_CONTEXT, "invalid device context"},
        {INVALID_HANDLE, "invalid resource handle"},
        {ILLEGAL_STATE, "the operation cannot be performed in the present state"},
        {NOT_FOUND, "named symbol not found"},
        {NOT_READY, "device not ready"},
        {TOO_MANY_RESOURCES, "too many resources requested for launch"},
        {CONTEXT_IS_DESTROYED, "context is destroyed"},
        {CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"},
        {CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"},
        {CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"},
        {CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"},
        {CAPTURE_WRONG_THREAD, "attempt to terminate a thread-local capture sequence from another thread"},
    };
    auto found = TEXTS.find(status);
    return *text = found == TEXTS.end() ? "invalid argument" : found->second, OK;
}

// ---- kernels ----------------------------------------------------------------------------------------------

// A compiled file is a shared library after its length in eight bytes (compiler.cpp).
EXPORT int cuModuleLoadData(Handle* handle, const void* image) {
    MAY_CALL(UNSAFE);
    uint64_t bytes;
    std::memcpy(&bytes, image, 8);
    char path[] = "/tmp/emulated-XXXXXX";
    int file = mkstemp(path);
    bool written = file >= 0 && write(file, (const char*)image + 8, bytes) == (ssize_t)bytes;
    close(file);
    // The emulator, whose functions a kernel calls, was not opened for others to see.
    static void* const emulator = [] {
        Dl_info info;
        dladdr((void*)cuInit, &info);
        return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL);
    }();
    void* library = written && emulator ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
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
    MAY_CALL(UNSAFE);
    // Functions may still be named by errors: a library stays.
    return delete (Module*)handle, 0;
}
EXPORT int cuModuleGetFunction(Handle* function, Handle handle, const char* name) {
    MAY_CALL(HARMLESS);
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
    MAY_CALL(HARMLESS);
    Function& f = *(Function*)function;
    if (attribute != 8 || value > shared_of_a_block())
        return refuse(INVALID, "%d bytes of shared memory for %s", value, f.name.c_str());
    return f.shared = value, OK;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(
    int* count, Handle function, int threads, size_t shared
) {
    MAY_CALL(HARMLESS);
    const Function& f = *(Function*)function;
    return *count = (unsigned)threads <= f.bound && shared <= f.shared, OK;
}
EXPORT int cuOccupancyMaxActiveClusters(int* count, Handle, const Config* config) {
    MAY_CALL(HARMLESS);
    return *count = settings().sms / config->attributes[0].value[1], OK;
}

// Bytes of arguments that every driver takes; newer ones take more on newer devices.
const size_t MAX_PARAMETERS = 4096;

// Why a launch is refused, or nothing.
static const char* wrong(const Config& config, const Function& f, size_t parameters) {
    const unsigned *grid = config.grid, *block = config.block;
    uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
    bool new_enough = settings().architecture >= 90;
    if (threads == 0 || block[0] > 1024 || block[1] > 1024 || block[2] > 64) return "the size of a block";
    if (block[1] != 1 || block[2] != 1) return "a block of several dimensions is not emulated";
    if (threads > f.bound) return "more threads than __launch_bounds__ allows";
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return "a grid without blocks";
    if (grid[0] > 0x7fffffffu || grid[1] > 65535 || grid[2] > 65535) return "the size of the grid";
    if (config.shared > f.shared) return "more shared memory than cuFuncSetAttribute was asked for";
    if (f.cluster > 1 && !new_enough) return "clusters before compute capability 9.0";
    if (f.cluster > 8) return "a cluster of more than 8 blocks";
    if (grid[0] % f.cluster) return "a grid that is no whole clusters";
    if (parameters > MAX_PARAMETERS) return "more than 4 KB of arguments";
    for (unsigned i = 0; i < config.count; ++i) {
        if (config.attributes[i].id != 6) return "a launch attribute that is not emulated";
        if (!new_enough) return "launches that overlap, before compute capability 9.0";
    }
    return nullptr;
}

EXPORT int cuLaunchKernelEx(const Config* config, Handle function, void** arguments, void**) {
    MAY_CALL(HARMLESS);
    const Function& f = *(Function*)function;
    size_t parameters = 0;
    for (unsigned i = 0; i < f.count; ++i) {
        // A tensor map lies at a multiple of 64, others at one of their size.
        size_t size = f.size(i), align = size >= 64 ? 64 : size >= 8 ? 8 : size;
        parameters = (parameters + align - 1) / align * align + size;
    }
    if (const char* what = wrong(*config, f, parameters)) {
        int status = config->block[0] > f.bound ? TOO_MANY_RESOURCES : INVALID;
        return refuse(status, "launching %s: %s", f.name.c_str(), what);
    }
    // The caller's arguments go when this returns.
    struct alignas(64) Place {
        uint8_t bytes[128];
    };
    auto kept = std::make_shared<std::vector<Place>>(f.count);
    for (unsigned i = 0; i < f.count; ++i) std::memcpy((*kept)[i].bytes, arguments[i], f.size(i));
    Dim grid = {config->grid[0], config->grid[1], config->grid[2]}, block = {config->block[0], 1, 1};
    unsigned shared = config->shared;
    auto list = [kept] {
        std::vector<void*> list;
        for (Place& place : *kept) list.push_back(place.bytes);
        return list;
    };
    Work work = {[=, &f] { run(f, grid, block, shared, list().data()); }, true};
    if (config->count > 0)
        work.begin = [=, &f] {
            auto arguments = std::make_shared<std::vector<void*>>(list());
            Run rest = begin(f, grid, block, shared, arguments->data());
            return [kept, arguments, rest] { rest(); };
        };
    return issue(__func__, config->stream, std::move(work));
}

// What the TMA is told, as copies.cpp reads it. The rules are those of the driver's manual.
EXPORT int cuTensorMapEncodeTiled(
    void* to, int kind, unsigned rank, Address at, const uint64_t* sizes, const uint64_t* strides,
    const unsigned* box, const unsigned* steps, int interleave, int swizzle, int promotion, int fill
) {
    unsigned size = kind == 0 ? 1 : kind == 9 ? 2 : kind == 7 ? 4 : 0, row = box[0] * size;
    bool emulated = size && rank == 2 && interleave == 0 && fill == 0 && (swizzle == 0 || swizzle == 3) &&
                    steps[0] == 1 && steps[1] == 1;
    bool matrix = at && at % 16 == 0 && strides[0] % 16 == 0 && strides[0] < (uint64_t)1 << 40 &&
                  strides[0] >= sizes[0] * size;
    for (int i = 0; i < 2; ++i) matrix = matrix && sizes[i] && sizes[i] <= (uint64_t)1 << 32;
    bool boxes = box[0] && box[1] && box[0] <= 256 && box[1] <= 256 && row % 16 == 0 &&
                 (swizzle == 0 || row <= 128);
    bool fine = emulated && matrix && boxes && promotion >= 0 && promotion <= 3 && (Address)to % 64 == 0;
    if (settings().architecture < 90 || !fine)
        return refuse(INVALID, "a tensor map of %lu x %lu, %lu bytes a row, boxes of %u x %u, swizzle %d",
                      sizes[1], sizes[0], strides[0], box[1], box[0], swizzle);
    uint64_t words[16] = {at, sizes[0], sizes[1], strides[0], box[0] | (uint64_t)box[1] << 32,
                          size | (uint64_t)(swizzle == 3) << 32};
    std::memcpy(to, words, sizeof words);
    return OK;
}
