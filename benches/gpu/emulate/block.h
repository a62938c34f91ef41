// Blocks of threads as fibers of one thread of the machine.
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>
#include "runtime.h"

namespace emu {

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// How the emulator is asked to behave (README.md).
struct Settings {
    unsigned architecture, sms, seed, seconds;
    // What runs in the background happens when it is waited for: in kernels, and kernels themselves.
    bool late_copies, late_mmas, late_streams;
    bool early_kernels;  // kernels that may begin before the one before them has ended do
};
const Settings& settings();

// Threads that do something together, such as an MMA: the last to come does it for all.
struct Gather {
    unsigned mask, arrived = 0;
    Fiber* fibers[32];
    void* items[32];
    const void* what = nullptr;
    void (*last)(Gather&) = nullptr;
};

// What happens in the background, in groups that are waited for.
struct Background {
    std::vector<std::function<void()>> open;
    std::vector<std::vector<std::function<void()>>> groups;

    void commit();
    // Until only so many groups are left.
    void finish(size_t left);
};

struct Warp {
    unsigned live = 0;
    std::vector<Gather> gathers;  // one for each set of lanes
    Background mmas;
};

// Blocks with a barrier and each other's shared memory: a cluster.
struct Team {
    std::mutex mutex;  // of everything that blocks do to each other's shared memory
    std::vector<Block*> blocks;
    std::atomic<unsigned> arrived{0}, generation{0}, live{0}, ready{0}, ended{0};
};

struct Barrier {
    unsigned arrived = 0, expected = 0;
    std::vector<Fiber*> waiting;
};

// A copy whose arrival a barrier in shared memory counts.
struct Arrival {
    uint32_t barrier;
    std::function<void()> copy;
};

// Registers of a thread that several texts of inline assembly name.
const size_t NAMED_REGISTERS = 64;

struct Module {
    std::string name;
    void* library;
    uint8_t* (*dynamic)();  // shared memory of this thread of the machine
    unsigned skew;          // of dynamic shared memory, from a multiple of 1024
};

struct Function {
    Module* module;
    std::string name;
    void (*call)(void**);
    size_t (*size)(size_t);
    unsigned count, cluster, bound, shared;
};

struct Launch {
    const Function* function;
    Dim grid, block;
    unsigned shared;
    void** arguments;
    std::atomic<uint64_t> next{0};  // block
    // Whether the kernel before has ended, and where it has not, whether the blocks that run wait for that.
    std::atomic<bool> alone{true}, waits{false};
    std::mutex mutex;
    std::vector<std::thread> helpers;  // beside the thread that launches
};

struct Block {
    Launch* launch;
    Dim index;
    Team* team;
    unsigned rank;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<Background> copies;  // of each thread
    std::vector<Background> bulk;
    std::vector<std::array<uint32_t, NAMED_REGISTERS>> named;  // of each thread
    Barrier barriers[16];
    unsigned live;
    uint8_t* zero;  // where shared address 0 would be
    std::vector<Arrival> arrivals;
    uint64_t polls = 0;
};

// Dynamic shared memory begins here: static variables may lie before it, and in a descriptor of wgmma no bit
// of an address reaches the next field (a GPU's have 18 bits, these 20, of which 16 are kept in 16).
const uint32_t DYNAMIC_AT = 512 << 10;
// From here on addresses are those of block number (bits - 1) of the cluster.
const unsigned RANK_SHIFT = 26;
uint8_t* shared(uint32_t address, size_t bytes);

// After something that others may have waited for: with a seed they come first.
void signalled();
void gather(unsigned mask, const void* what, void* item, void (*last)(Gather&));
void barrier_sync(unsigned number, unsigned threads);
void cluster_arrive();
void cluster_wait();
void run(const Function& function, Dim grid, Dim block, unsigned shared, void** arguments);
// Runs the first blocks of a kernel up to where they wait for the kernel before it; gives the rest.
std::function<void()> begin(const Function& function, Dim grid, Dim block, unsigned shared, void** arguments);
// Until the kernel before has ended.
void wait_for_previous();

}  // namespace emu
