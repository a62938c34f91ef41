// Runs the blocks of a kernel: every block in a thread of the machine, its threads as fibers in turns.
#include "block.h"
#include <dlfcn.h>
#include <link.h>
#include <sched.h>
#include <sys/mman.h>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>

namespace emu {

const size_t STACK = 128 << 10;

__thread Fiber* now;
static __thread void* home;

void fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::fprintf(stderr, "emulator: ");
    std::vfprintf(stderr, format, args);
    if (now) {
        const Block& b = *now->block;
        const Launch& l = *b.launch;
        std::fprintf(stderr, "\n  in %s, block %u %u %u of %u %u %u, thread %u", l.function->name.c_str(),
                     b.index.x, b.index.y, b.index.z, l.grid.x, l.grid.y, l.grid.z, now->number);
    }
    std::fprintf(stderr, "\n");
    std::abort();
}

const Settings& settings() {
    auto number = [](const char* name, unsigned otherwise) {
        const char* text = std::getenv(name);
        return text && *text ? (unsigned)std::strtoul(text, nullptr, 10) : otherwise;
    };
    static const Settings found = {
        number("EMULATE_ARCH", 80), number("EMULATE_SMS", 16), number("EMULATE_SEED", 0),
        number("EMULATE_SECONDS", 300), (number("EMULATE_LATE", 0) & 1) != 0,
        (number("EMULATE_LATE", 0) & 2) != 0, (number("EMULATE_LATE", 0) & 4) != 0,
        (number("EMULATE_LATE", 0) & 8) != 0,
    };
    return found;
}

// ---- fibers -----------------------------------------------------------------------------------------------

extern "C" void emu_switch(void** from, void* to);
asm(R"(
.text
.globl emu_switch
.type emu_switch, @function
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

static void give_way() { emu_switch(&now->stack_pointer, home); }

static void block_until_released() {
    now->blocked = true;
    give_way();
}

void poll() {
    Block& b = *now->block;
    ++b.polls;
    if (b.polls % (1 << 16) == 0) {
        static thread_local const Block* of;
        static thread_local std::chrono::steady_clock::time_point since;
        auto time = std::chrono::steady_clock::now();
        if (of != &b || b.polls == 1 << 16) of = &b, since = time;
        if (time - since > std::chrono::seconds(settings().seconds)) fail("waits for ever");
    }
    give_way();
}

void wait_for_previous() {
    while (!now->block->launch->alone) poll();
}

void signalled() {
    if (settings().seed) give_way();
}

static void release(Fiber* fiber) { fiber->blocked = false; }

// ---- things that threads do together ----------------------------------------------------------------------

static void complete(Gather& g) {
    unsigned mask = g.mask & now->warp->live;
    g.last(g);
    g.arrived = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1 && g.fibers[lane] != now) release(g.fibers[lane]);
}

void gather(unsigned mask, const void* what, void* item, void (*last)(Gather&)) {
    Warp& warp = *now->warp;
    if (!(mask >> now->lane & 1)) fail("a lane that is not in its own mask");
    Gather* g = nullptr;
    for (Gather& one : warp.gathers)
        if (one.mask == mask) g = &one;
    if (!g) {
        if (warp.gathers.capacity() == 0) warp.gathers.reserve(64);
        if (warp.gathers.size() == 64) fail("more sets of lanes than expected");
        warp.gathers.emplace_back();
        g = &warp.gathers.back();
        g->mask = mask;
    }
    if (g->arrived == 0) g->what = what, g->last = last;
    if (g->what != what) fail("lanes of a warp meet in different instructions");
    g->fibers[now->lane] = now;
    g->items[now->lane] = item;
    if (++g->arrived == (unsigned)__builtin_popcount(mask & warp.live)) {
        complete(*g);
    } else {
        block_until_released();
    }
}

void sync_warp(unsigned mask) {
    static const char what = 0;
    gather(mask, &what, nullptr, [](Gather&) {});
}

struct Shuffled {
    uint64_t value, result;
    unsigned from;
};

uint64_t shuffle(unsigned mask, uint64_t value, unsigned from) {
    static const char what = 0;
    Shuffled item = {value, value, from};
    gather(mask, &what, &item, [](Gather& g) {
        unsigned mask = g.mask & now->warp->live;
        for (unsigned lane = 0; lane < 32; ++lane) {
            if (!(mask >> lane & 1)) continue;
            Shuffled* to = (Shuffled*)g.items[lane];
            if (!(mask >> (to->from & 31) & 1)) fail("a shuffle from a lane that is not there");
            to->result = ((Shuffled*)g.items[to->from & 31])->value;
        }
    });
    return item.result;
}

unsigned ballot(unsigned mask, bool vote) {
    static const char what = 0;
    Shuffled item = {vote, 0, 0};
    gather(mask, &what, &item, [](Gather& g) {
        unsigned votes = 0, mask = g.mask & now->warp->live;
        for (unsigned lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1 && ((Shuffled*)g.items[lane])->value) votes |= 1u << lane;
        for (unsigned lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1) ((Shuffled*)g.items[lane])->result = votes;
    });
    return item.result;
}

static void open_barrier(Barrier& barrier) {
    for (Fiber* fiber : barrier.waiting)
        if (fiber != now) release(fiber);
    barrier.waiting.clear();
    barrier.arrived = 0;
}

void barrier_sync(unsigned number, unsigned threads) {
    Block& block = *now->block;
    Barrier& barrier = block.barriers[number];
    if (barrier.arrived > 0 && barrier.expected != threads)
        fail("barrier %u: two numbers of threads", number);
    barrier.expected = threads;
    barrier.waiting.push_back(now);
    unsigned expected = threads ? threads : block.live;
    if (++barrier.arrived > expected) fail("barrier %u: more than its %u threads", number, expected);
    if (barrier.arrived == expected) {
        open_barrier(barrier);
    } else {
        block_until_released();
    }
}

void sync_threads() { barrier_sync(0, 0); }

static void cluster_arrived(Team& team) {
    if (team.arrived == team.live) {
        team.arrived = 0;
        ++team.generation;
    }
}

void cluster_arrive() {
    Team& team = *now->block->team;
    std::lock_guard<std::mutex> lock(team.mutex);
    now->cluster_target = team.generation + 1;
    ++team.arrived;
    cluster_arrived(team);
}

void cluster_wait() {
    Team& team = *now->block->team;
    while (team.generation < now->cluster_target) poll();
}

// Others may have waited only for this one.
static void leave() {
    Block& block = *now->block;
    now->done = true;
    --block.live;
    Warp& warp = *now->warp;
    warp.live &= ~(1u << now->lane);
    for (Gather& g : warp.gathers)
        if (g.arrived > 0 && g.arrived == (unsigned)__builtin_popcount(g.mask & warp.live)) complete(g);
    Barrier& all = block.barriers[0];
    if (all.arrived > 0 && all.expected == 0 && all.arrived == block.live) open_barrier(all);
    std::lock_guard<std::mutex> lock(block.team->mutex);
    --block.team->live;
    if (block.team->arrived > 0) cluster_arrived(*block.team);
}

static void fiber_main() {
    const Launch& launch = *now->block->launch;
    launch.function->call(launch.arguments);
    leave();
    give_way();
    fail("a thread that had ended");
}

void Background::commit() {
    groups.push_back(std::move(open));
    open.clear();
}

void Background::finish(size_t left) {
    for (; groups.size() > left; groups.erase(groups.begin()))
        for (auto& one : groups.front()) one();
}

// ---- blocks -----------------------------------------------------------------------------------------------

Dim block_index() { return now->block->index; }
Dim block_size() { return now->block->launch->block; }
Dim grid_size() { return now->block->launch->grid; }

uint32_t shared_address(const void* p) { return (const uint8_t*)p - now->block->zero; }

uint8_t* shared(uint32_t address, size_t bytes) {
    Block* block = now->block;
    if (unsigned rank = address >> RANK_SHIFT) {
        if (rank > block->team->blocks.size()) fail("shared memory of a block that is not in the cluster");
        block = block->team->blocks[rank - 1];
    }
    address &= (1u << RANK_SHIFT) - 1;
    if (address % bytes != 0 && bytes <= 16) fail("shared address %#x is no multiple of %zu", address, bytes);
    uint32_t begin = DYNAMIC_AT + block->launch->function->module->skew, end = begin + block->launch->shared;
    // Static variables lie elsewhere.
    bool near = address + bytes > begin && address < begin + (256u << 10);
    if (near && (address < begin || address + bytes > end))
        fail("shared address %#x + %zu outside of %#x .. %#x", address, bytes, begin, end);
    return block->zero + address;
}

static std::mutex stacks_mutex;
static std::vector<void*> stacks;

static void* take_stacks(size_t count) {
    if (count <= 1024) {
        std::lock_guard<std::mutex> lock(stacks_mutex);
        if (!stacks.empty()) {
            void* at = stacks.back();
            stacks.pop_back();
            return at;
        }
    }
    void* at = mmap(nullptr, 1024 * STACK, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) fail("no memory for stacks");
    return at;
}

static void give_stacks(void* at) {
    std::lock_guard<std::mutex> lock(stacks_mutex);
    stacks.push_back(at);
}

// What shared memory holds when a block begins is anything: NaNs.
static void spoil_shared(const Launch& launch) {
    std::memset(launch.function->module->dynamic(), 0xff, launch.shared);
}

static void add_worker(Launch& launch);

static void run_block(Launch& launch, Block& block) {
    unsigned threads = launch.block.x;
    block.launch = &launch;
    block.fibers.resize(threads);
    block.warps.resize((threads + 31) / 32);
    block.copies.resize(threads);
    block.bulk.resize(threads);
    block.named.resize(threads);
    for (auto& registers : block.named) registers.fill(0xffffffffu);
    block.live = threads;
    const Module& module = *launch.function->module;
    block.zero = module.dynamic() - DYNAMIC_AT - module.skew;
    spoil_shared(launch);
    // All of a cluster begin together.
    Team& team = *block.team;
    team.blocks[block.rank] = &block;
    team.live += threads;
    ++team.ready;
    while (team.ready < team.blocks.size()) sched_yield();

    uint8_t* stack = (uint8_t*)take_stacks(threads);
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& f = block.fibers[i];
        f = {};
        f.thread = {i, 0, 0};
        f.number = i, f.lane = i % 32;
        f.block = &block, f.warp = &block.warps[i / 32];
        f.warp->live |= 1u << f.lane;
        f.stack = stack + i * STACK;
        void** top = (void**)(stack + (i + 1) * STACK - 64);
        *--top = nullptr;
        *--top = (void*)fiber_main;
        for (int r = 0; r < 6; ++r) *--top = nullptr;
        f.stack_pointer = top;
    }
    unsigned seed = settings().seed, at = 0;
    uint64_t polls = 0;
    while (block.live > 0) {
        // Any order of threads is possible; a seed makes others.
        unsigned start = 0, step = 1;
        if (seed) {
            at = at * 1664525u + 1013904223u + seed * 2654435761u;
            start = at >> 8, step = at >> 4 & 1 ? 1 : threads - 1;
        }
        bool ran = false;
        uint64_t before = block.polls, runs = 0;
        for (unsigned i = 0; i < threads; ++i) {
            Fiber& f = block.fibers[(start + (uint64_t)i * step) % threads];
            if (f.done || f.blocked) continue;
            ran = true;
            ++runs;
            now = &f;
            emu_switch(&home, f.stack_pointer);
        }
        now = nullptr;
        if (!ran && block.live > 0) {
            for (Fiber& f : block.fibers)
                if (!f.done) {
                    now = &f;
                    break;
                }
            fail("all threads that are left wait for each other (barriers: %u %u %u %u arrived)",
                 block.barriers[0].arrived, block.barriers[1].arrived, block.barriers[2].arrived,
                 block.barriers[3].arrived);
        }
        // Whoever waits for other blocks needs them to run.
        polls += block.polls - before;
        bool idle = block.polls - before == runs;
        if (idle && !launch.alone) {
            launch.waits = true;
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        } else if (idle) {
            sched_yield();
        }
        if (polls > 1 << 12) polls = 0, add_worker(launch);
    }
    give_stacks(stack);
    // Nobody's shared memory goes while others may use it.
    ++team.ended;
    while (team.ended < team.blocks.size()) sched_yield();
}

static Dim index_of(const Launch& launch, uint64_t number) {
    return {(unsigned)(number % launch.grid.x), (unsigned)(number / launch.grid.x % launch.grid.y),
            (unsigned)(number / launch.grid.x / launch.grid.y)};
}

static void worker(Launch& launch) {
    uint64_t all = (uint64_t)launch.grid.x * launch.grid.y * launch.grid.z;
    for (uint64_t number; (number = launch.next++) < all;) {
        Team team;
        team.blocks.resize(1);
        Block block;
        block.index = index_of(launch, number);
        block.team = &team, block.rank = 0;
        run_block(launch, block);
    }
}

// One more block at a time, while there are places for it.
static void add_worker(Launch& launch) {
    uint64_t all = (uint64_t)launch.grid.x * launch.grid.y * launch.grid.z;
    std::lock_guard<std::mutex> lock(launch.mutex);
    if (launch.next < all && launch.helpers.size() + 1 < settings().sms)
        launch.helpers.emplace_back([&launch] { worker(launch); });
}

// Clusters: a thread of the machine for every block, as many as fit at once.
static void run_clusters(Launch& launch, unsigned cluster) {
    unsigned all = launch.grid.x, fitting = std::max(1u, settings().sms / cluster) * cluster;
    if (launch.grid.y * launch.grid.z != 1 || all % cluster)
        fail("%s: a grid that is no whole clusters", launch.function->name.c_str());
    // No worker takes them one by one.
    launch.next = all;
    for (unsigned first = 0; first < all; first += fitting) {
        unsigned count = std::min(fitting, all - first);
        std::vector<Team> teams(count / cluster);
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < count; ++i) {
            Team& team = teams[i / cluster];
            if (i % cluster == 0) team.blocks.resize(cluster);
            threads.emplace_back([&launch, &team, i, first, cluster] {
                Block block;
                block.index = {first + i, 0, 0};
                block.team = &team, block.rank = i % cluster;
                run_block(launch, block);
            });
        }
        for (auto& thread : threads) thread.join();
    }
}

static void describe(
    Launch& launch, const Function& function, Dim grid, Dim block, unsigned shared, void** arguments
) {
    launch.function = &function, launch.grid = grid, launch.block = block;
    launch.shared = shared, launch.arguments = arguments;
}

static void run(Launch& launch) {
    if (launch.function->cluster > 1) return run_clusters(launch, launch.function->cluster);
    // Two blocks at a time, where there is some work; blocks that wait for others add workers.
    if ((uint64_t)launch.grid.x * launch.grid.y * launch.grid.z >= 8) add_worker(launch);
    worker(launch);
    // All blocks have begun: nobody adds workers any more.
    for (size_t i = 0;; ++i) {
        std::unique_lock<std::mutex> lock(launch.mutex);
        if (i == launch.helpers.size()) break;
        std::thread helper = std::move(launch.helpers[i]);
        lock.unlock();
        helper.join();
    }
}

void run(const Function& function, Dim grid, Dim block, unsigned shared, void** arguments) {
    Launch launch;
    describe(launch, function, grid, block, shared, arguments);
    run(launch);
}

std::function<void()> begin(
    const Function& function, Dim grid, Dim block, unsigned shared, void** arguments
) {
    auto launch = std::make_shared<Launch>();
    describe(*launch, function, grid, block, shared, arguments);
    launch->alone = false;
    auto thread = std::make_shared<std::thread>([launch] {
        run(*launch);
        launch->waits = true;
    });
    while (!launch->waits) sched_yield();
    return [launch, thread] {
        launch->alone = true;
        thread->join();
    };
}

}  // namespace emu
