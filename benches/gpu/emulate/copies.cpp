// Copies in the background, the TMA, and barriers: of a block, in shared memory and of a cluster.
//
// Barriers in shared memory are 64 bits of our own: 0 phase, 1..15 arrivals of a phase, 16..31 those missing,
// 32..63 bytes missing.
#include "ptx.h"

namespace emu {

struct Phases {
    uint64_t* word;
    explicit Phases(uint32_t address) : word((uint64_t*)shared(address, 8)) {}
    unsigned phase() const { return *word & 1; }
    void init(unsigned count) { *word = (uint64_t)count << 1 | (uint64_t)count << 16; }
    void change(int arrivals, int64_t bytes) {
        unsigned phase = *word & 1, count = *word >> 1 & 0x7fff, missing = *word >> 16 & 0xffff;
        int32_t left = (int32_t)(*word >> 32) + (int32_t)bytes;
        if (arrivals > (int)missing) fail("a barrier in shared memory: more arrivals than its %u", count);
        missing -= arrivals;
        if (missing == 0 && left == 0) phase ^= 1, missing = count;
        *word = phase | (uint64_t)count << 1 | (uint64_t)missing << 16 | (uint64_t)(uint32_t)left << 32;
    }
};

static std::lock_guard<std::mutex> locked() { return std::lock_guard<std::mutex>(now->block->team->mutex); }

// Brings bytes into the shared memory of a block, now or when somebody waits for them.
static void arrive_later(Block& block, uint32_t barrier, std::function<void()> copy) {
    block.arrivals.push_back({barrier, std::move(copy)});
}

static void arrive_now(uint32_t barrier) {
    auto& arrivals = now->block->arrivals;
    for (size_t i = 0; i < arrivals.size();) {
        if (arrivals[i].barrier != barrier) {
            ++i;
            continue;
        }
        auto copy = std::move(arrivals[i].copy);
        arrivals.erase(arrivals.begin() + i);
        copy();
    }
}

static const uint32_t OWN = (1u << RANK_SHIFT) - 1;

static void bulk_copy(Env& e, const Statement& s) {
    uint32_t to = e.get(s.items[0]), bytes = e.get(s.items[2]), barrier = e.get(s.items[3]);
    const uint8_t* from = (const uint8_t*)e.get(s.items[1]);
    if (to % 16 || bytes % 16 || (uint64_t)from % 16) fail("a bulk copy that is not in multiples of 16");
    auto lock = locked();
    arrive_later(*now->block, barrier, [=] {
        std::memcpy(shared(to, bytes), from, bytes);
        Phases(barrier).change(0, -(int64_t)bytes);
    });
    if (!settings().late_copies) arrive_now(barrier);
}

// A matrix as cuTensorMapEncodeTiled (driver.cpp) describes it.
struct Map {
    uint64_t at, width, height, stride;  // of elements, rows, bytes
    uint32_t box_width, box_height, size, swizzled;
};

// Calls `each` for every 16 bytes of a box: where they are in shared memory, and in the matrix (or null).
template <typename F>
static void each_chunk(const Map& map, int column, int row, uint32_t address, F each) {
    int64_t bytes = map.box_width * map.size, width = map.width * map.size;
    int64_t first = (int64_t)column * map.size;
    for (uint32_t r = 0; r < map.box_height; ++r)
        for (int64_t at = 0; at < bytes; at += 16) {
            uint32_t place = address + r * bytes + at;
            if (map.swizzled) place ^= (place >> 7 & 7) << 4;
            int64_t x = first + at, y = (int64_t)row + r;
            bool inside = x >= 0 && y >= 0 && x + 16 <= width && y < (int64_t)map.height;
            if (!inside && x < width && x + 16 > width) fail("a box that ends inside of 16 bytes");
            each(shared(place, 16), inside ? (uint8_t*)map.at + y * map.stride + x : nullptr);
        }
}

static void bulk_box(Env& e, const Statement& s) {
    uint32_t to = e.get(s.items[0]), barrier = e.get(s.items[4]);
    Map map = *(const Map*)e.get(s.items[1]);
    int column = e.get(s.items[2]), row = e.get(s.items[3]);
    bool many = s.name.find("multicast") != std::string::npos;
    unsigned blocks = many ? (unsigned)e.get(s.items[5]) : 1;
    if (to % 128) fail("a box that does not begin at a multiple of 128 bytes");
    Team& team = *now->block->team;
    auto lock = locked();
    for (unsigned rank = 0; rank < team.blocks.size(); ++rank) {
        if (many ? !(blocks >> rank & 1) : team.blocks[rank] != now->block) continue;
        // In that block the same addresses are its own.
        auto copy = [=] {
            Map here = map;
            each_chunk(here, column, row, to, [](uint8_t* place, const uint8_t* from) {
                from ? std::memcpy(place, from, 16) : std::memset(place, 0, 16);
            });
            Phases(barrier).change(0, -(int64_t)map.box_width * map.box_height * map.size);
        };
        Block* there = team.blocks[rank];
        arrive_later(*there, barrier, copy);
        if (settings().late_copies) continue;
        // By a thread of that block, as far as addresses go.
        Fiber* self = now;
        now = &there->fibers[0];
        arrive_now(barrier);
        now = self;
    }
}

static void store_box(Env& e, const Statement& s, bool adds) {
    const Map map = *(const Map*)e.get(s.items[0]);
    int column = e.get(s.items[1]), row = e.get(s.items[2]);
    uint32_t from = e.get(s.items[3]);
    auto store = [=] {
        each_chunk(map, column, row, from, [&](uint8_t* place, uint8_t* to) {
            if (!to) return;
            float x[4], y[4];
            std::memcpy(x, to, 16), std::memcpy(y, place, 16);
            for (int i = 0; adds && i < 4; ++i) y[i] += x[i];
            std::memcpy(to, adds ? (void*)y : place, 16);
        });
    };
    if (settings().late_copies) {
        now->block->bulk[now->number].open.push_back(store);
    } else {
        store();
    }
}

static void copy_16_or_4(Env& e, const Statement& s) {
    uint32_t to = e.get(s.items[0]), bytes = e.get(s.items[2]), used = e.get(s.items[3]);
    const uint8_t* from = (const uint8_t*)e.get(s.items[1]);
    if ((uint64_t)from % bytes) fail("cp.async from an address that is no multiple of %u", bytes);
    auto copy = [=] {
        uint8_t* place = shared(to, bytes);
        std::memcpy(place, from, used);
        std::memset(place + used, 0, bytes - used);
    };
    if (settings().late_copies) {
        now->block->copies[now->number].open.push_back(copy);
    } else {
        copy();
    }
}

const Instructions& copy_instructions() {
    static const Instructions all = {
        {"cp.async.bulk.commit_group", RUN { now->block->bulk[now->number].commit(); }},
        {"cp.async.bulk.wait_group", RUN { now->block->bulk[now->number].finish(e.get(ITEM(0))); }},
        {"cp.async.bulk.tensor.2d.shared", bulk_box},
        {"cp.async.bulk.tensor.2d.global", RUN { store_box(e, s, false); }},
        {"cp.reduce.async.bulk.tensor.2d.global", RUN { store_box(e, s, true); }},
        {"cp.async.bulk.shared", bulk_copy},
        {"cp.async.commit_group", RUN { now->block->copies[now->number].commit(); }},
        {"cp.async.wait_group", RUN { now->block->copies[now->number].finish(e.get(ITEM(0))); }},
        {"cp.async.wait_all", RUN {
             now->block->copies[now->number].commit();
             now->block->copies[now->number].finish(0);
         }},
        {"cp.async.c", copy_16_or_4},
        {"mbarrier.init", RUN {
             auto lock = locked();
             Phases(e.get(ITEM(0))).init(e.get(ITEM(1)));
         }},
        {"mbarrier.arrive.expect_tx", RUN {
             auto lock = locked();
             Phases(e.get(ITEM(1))).change(1, e.get(ITEM(2)));
         }},
        {"mbarrier.arrive", RUN {
             {
                 auto lock = locked();
                 Phases(e.get(ITEM(1))).change(1, 0);
             }
             signalled();
         }},
        {"mbarrier.try_wait.parity", RUN {
             bool done;
             {
                 auto lock = locked();
                 arrive_now(e.get(ITEM(1)));
                 done = Phases(e.get(ITEM(1))).phase() != (e.get(ITEM(2)) & 1);
             }
             e.set(ITEM(0), (uint64_t)done);
             if (!done) poll();
         }},
        {"mapa.shared::cluster", RUN {
             e.set(ITEM(0), (e.get(ITEM(1)) & OWN) | (uint64_t)(e.get(ITEM(2)) + 1) << RANK_SHIFT);
         }},
        {"barrier.cluster.arrive", RUN { cluster_arrive(); }},
        {"barrier.cluster.wait", RUN { cluster_wait(); }},
        {"bar.sync", RUN { barrier_sync(e.get(ITEM(0)), e.get(ITEM(1))); }},
    };
    return all;
}

}  // namespace emu
