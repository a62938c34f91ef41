// Memory of libcuda: of the device, and page-locked memory of the host. Allocations end at a page that cannot
// be touched, and begin as NaNs. What has been freed cannot be touched any more either, and its addresses are
// not given again, so whoever still has one is found.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cstdio>
#include <map>
#include "driver.h"

namespace emu {

namespace {

struct Allocation {
    void* base;
    size_t mapped, bytes;
    bool device, freed;
};

std::mutex mutex;
std::map<Address, Allocation> allocations;
const size_t TOTAL = (size_t)16 << 30, PAGE = 4096;
size_t allocated;

// The allocation that an address belongs to, its unused pages included.
std::pair<const Address, Allocation>* owner(Address at) {
    auto after = allocations.upper_bound(at);
    if (after != allocations.end() && (Address)after->second.base <= at) return &*after;
    if (after == allocations.begin()) return nullptr;
    auto& before = *--after;
    return at < (Address)before.second.base + before.second.mapped ? &before : nullptr;
}

bool inside(Address at, size_t bytes, bool device) {
    std::lock_guard<std::mutex> lock(mutex);
    auto* found = owner(at);
    return found && !found->second.freed && found->second.device == device && at >= found->first &&
           at + bytes <= found->first + found->second.bytes;
}

// Names what was touched; the signal's own way on follows.
void faulted(int number, siginfo_t* info, void*) {
    Address at = (Address)info->si_addr;
    if (now && number == SIGILL) fail("an access that is not aligned, or an index or a shift out of bounds");
    if (mutex.try_lock()) {
        if (auto* found = owner(at)) {
            const Allocation& a = found->second;
            const char* what = a.freed ? "that was freed" : a.device ? "of the device" : "of the host";
            std::fprintf(stderr, "emulator: touched byte %lld of an allocation of %zu bytes %s\n",
                         (long long)(at - found->first), a.bytes, what);
        }
        mutex.unlock();
    }
    if (now) fail("address %p cannot be touched", info->si_addr);
    signal(number, SIG_DFL);
}

void watch_faults() {
    static const bool once = [] {
        struct sigaction action = {};
        action.sa_sigaction = faulted;
        action.sa_flags = SA_SIGINFO;
        return sigaction(SIGSEGV, &action, nullptr) == 0 && sigaction(SIGILL, &action, nullptr) == 0;
    }();
    (void)once;
}

Address allocate(size_t bytes, bool device) {
    std::lock_guard<std::mutex> lock(mutex);
    watch_faults();
    if (bytes > TOTAL - allocated) return 0;
    size_t aligned = (bytes + 255) / 256 * 256, pages = (aligned + PAGE - 1) / PAGE * PAGE;
    uint8_t* base = (uint8_t*)mmap(nullptr, pages + PAGE, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return 0;
    mprotect(base + pages, PAGE, PROT_NONE);
    uint8_t* begin = base + pages - aligned;
    std::memset(begin, 0xff, aligned);
    allocations[(Address)begin] = {base, pages + PAGE, bytes, device, false};
    if (device) allocated += pages + PAGE;
    return (Address)begin;
}

int release(Address at, bool device) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = allocations.find(at);
    if (found == allocations.end() || found->second.device != device || found->second.freed)
        return refuse(INVALID, "freeing %#lx, which is not allocated", (unsigned long)at);
    Allocation& a = found->second;
    mmap(a.base, a.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (device) allocated -= a.mapped;
    a.freed = true;
    return OK;
}

}  // namespace

bool on_device(Address at, size_t bytes) { return inside(at, bytes, true); }
bool page_locked(const void* at, size_t bytes) { return inside((Address)at, bytes, false); }

}  // namespace emu

using namespace emu;

EXPORT int cuMemGetInfo_v2(size_t* left, size_t* total) {
    MAY_CALL(HARMLESS);
    std::lock_guard<std::mutex> lock(emu::mutex);
    return *left = TOTAL - allocated, *total = TOTAL, OK;
}
EXPORT int cuMemAlloc_v2(Address* at, size_t bytes) {
    MAY_CALL(UNSAFE);
    if (bytes == 0) return refuse(INVALID, "an allocation of no bytes");
    return (*at = allocate(bytes, true)) ? OK : OUT_OF_MEMORY;
}
// Freeing waits for what has been issued.
EXPORT int cuMemFree_v2(Address at) {
    MAY_CALL(UNSAFE);
    finish_all_streams();
    return release(at, true);
}
EXPORT int cuMemHostAlloc(void** at, size_t bytes, unsigned) {
    MAY_CALL(UNSAFE);
    return (*at = (void*)allocate(bytes, false)) ? OK : OUT_OF_MEMORY;
}
EXPORT int cuMemFreeHost(void* at) {
    MAY_CALL(UNSAFE);
    finish_all_streams();
    return release((Address)at, false);
}

// ---- copies -----------------------------------------------------------------------------------------------

static int copied(const char* name, Handle stream, bool there, bool locked, Run run) {
    if (!there) return refuse(INVALID, "%s outside of any allocation", name);
    // The driver would read pageable memory now or later.
    if (int status = may_call(name, locked ? HARMLESS : UNSAFE)) return status;
    return issue(name, stream, {std::move(run)});
}
EXPORT int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, Handle stream) {
    return copied(__func__, stream, on_device(to, bytes), page_locked(from, bytes),
                  [=] { std::memcpy((void*)to, from, bytes); });
}
EXPORT int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, Handle stream) {
    return copied(__func__, stream, on_device(from, bytes), page_locked(to, bytes),
                  [=] { std::memcpy(to, (void*)from, bytes); });
}
EXPORT int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Handle stream) {
    return copied(__func__, stream, on_device(to, bytes) && on_device(from, bytes), true,
                  [=] { std::memmove((void*)to, (void*)from, bytes); });
}
EXPORT int cuMemsetD8Async(Address at, unsigned char byte, size_t bytes, Handle stream) {
    return copied(__func__, stream, on_device(at, bytes), true, [=] { std::memset((void*)at, byte, bytes); });
}
