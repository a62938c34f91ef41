// Inline assembly: the instructions that the kernels use, as the PTX manual has them.
//
// A text is parsed once. What a warp does together (MMAs, matrices from shared memory) is done by the last of
// its lanes to come, with everybody's operands. Barriers in shared memory are 64 bits of our own: 0 phase,
// 1..15 arrivals of a phase, 16..31 those missing, 32..63 bytes missing.
#include <immintrin.h>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include "block.h"

namespace emu {

struct Item {
    enum { OPERAND, LOCAL, NUMBER, NOTHING } kind;
    int64_t value;
};
struct Env;
struct Statement {
    std::string name;
    std::vector<Item> items;
    int guard = -1;  // a local
    bool negated = false;
    int target = -1;  // of a branch
    void (*run)(Env&, const Statement&) = nullptr;
};
struct Code {
    std::string text;
    std::vector<Statement> statements;
};

struct Env {
    const Operand* operands;
    uint64_t locals[8] = {};

    uint64_t get(const Item& item) const {
        if (item.kind == Item::LOCAL) return locals[item.value];
        if (item.kind == Item::NUMBER) return item.value;
        const Operand& o = operands[item.value];
        uint64_t bits = o.bits;
        if (o.at) bits = 0, std::memcpy(&bits, o.at, o.size);
        return bits;
    }
    float real(const Item& item) const {
        uint32_t bits = get(item);
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }
    void set(const Item& item, uint64_t bits) {
        if (item.kind == Item::LOCAL) locals[item.value] = bits;
        if (item.kind == Item::OPERAND) std::memcpy(operands[item.value].at, &bits, operands[item.value].size);
    }
    void set(const Item& item, float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        set(item, (uint64_t)bits);
    }
};

// ---- numbers ----------------------------------------------------------------------------------------------

static float from_bf16(uint32_t bits) {
    bits = (bits & 0xffff) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// To the nearest, ties to even.
static uint32_t to_bf16(double x) {
    if (x != x) return 0x7fff;
    uint32_t sign = std::signbit(x) ? 0x8000 : 0;
    double m = std::fabs(x);
    if (m == 0) return sign;
    if (m >= 0x1p-126 && m < 0x1p127) {
        uint64_t b;
        std::memcpy(&b, &m, 8);
        b = (b + 0x0fffffffffff + (b >> 45 & 1)) >> 45 << 45;
        std::memcpy(&m, &b, 8);
        float f = (float)m;
        uint32_t bits;
        std::memcpy(&bits, &f, 4);
        return sign | bits >> 16;
    }
    int exponent;
    std::frexp(m, &exponent);  // m = f * 2^exponent, f in [1/2, 1)
    int step = std::max(exponent - 8, -133);
    double rounded = std::ldexp(std::nearbyint(std::ldexp(m, -step)), step);
    float f = (float)rounded;  // exact, or infinite
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return sign | bits >> 16;
}

static float from_f16(uint32_t bits) { return _cvtsh_ss((unsigned short)bits); }
static uint32_t to_f16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

static float e4m3_value(uint32_t code) {
    uint32_t m = code & 7, e = code >> 3 & 15;
    if ((code & 0x7f) == 0x7f) return NAN;
    float x = e ? std::ldexp(8.0f + m, (int)e - 10) : std::ldexp((float)m, -9);
    return code & 128 ? -x : x;
}

static float from_e4m3(uint32_t code) {
    static const std::vector<float> values = [] {
        std::vector<float> all;
        for (uint32_t code = 0; code < 256; ++code) all.push_back(e4m3_value(code));
        return all;
    }();
    return values[code];
}

static uint32_t to_e4m3(float x) {
    if (x != x) return 0x7f;
    uint32_t sign = std::signbit(x) ? 128 : 0;
    float m = std::fmin(std::fabs(x), 448.0f);
    int exponent;
    std::frexp(m, &exponent);
    int step = std::max(exponent - 4, -9);
    float rounded = std::ldexp(std::nearbyint(std::ldexp(m, -step)), step);
    for (uint32_t code = 0; code < 0x7f; ++code)
        if (from_e4m3(code) == rounded) return sign | code;
    return sign | 0x7e;
}

// ---- MMAs -------------------------------------------------------------------------------------------------

enum Kind { KIND_BF16, KIND_F16, KIND_S8, KIND_E4M3 };

static Kind kind_of(const std::string& name) {
    if (name.find(".bf16.bf16") != std::string::npos) return KIND_BF16;
    if (name.find(".f16.f16") != std::string::npos) return KIND_F16;
    if (name.find(".s8.s8") != std::string::npos) return KIND_S8;
    if (name.find(".e4m3.e4m3") != std::string::npos) return KIND_E4M3;
    fail("no numbers of %s", name.c_str());
}

static double number(Kind kind, uint32_t word, int i) {
    switch (kind) {
        case KIND_BF16: return from_bf16(word >> (16 * i));
        case KIND_F16: return from_f16(word >> (16 * i) & 0xffff);
        case KIND_S8: return (int8_t)(word >> (8 * i));
        default: return from_e4m3(word >> (8 * i) & 255);
    }
}
static int per_word(Kind kind) { return kind == KIND_BF16 || kind == KIND_F16 ? 2 : 4; }

// d[row][column] += sum of a[row][i] b[column][i]; sums of products are exact, and rounded once.
static void add_product(Kind kind, Env& lane, const Item& to, const double* a, const double* b, int count, bool adds) {
    double sum = 0;
    for (int i = 0; i < count; ++i) sum += a[i] * b[i];
    if (kind == KIND_S8) {
        int32_t before = adds ? (int32_t)lane.get(to) : 0;
        lane.set(to, (uint64_t)(uint32_t)(before + (int32_t)sum));
    } else {
        lane.set(to, (float)(adds ? lane.real(to) + sum : sum));
    }
}

static void mma(Gather& g, const Statement& s) {
    Kind kind = kind_of(s.name);
    int each = per_word(kind), k = 8 * each;
    double a[16][32], b[8][32];
    for (int lane = 0; lane < 32; ++lane) {
        const Env& e = *(Env*)g.items[lane];
        for (int i = 0; i < 4; ++i) {
            uint32_t word = e.get(s.items[4 + i]);
            for (int j = 0; j < each; ++j)
                a[lane / 4 + i % 2 * 8][i / 2 * 4 * each + lane % 4 * each + j] = number(kind, word, j);
        }
        for (int i = 0; i < 2; ++i) {
            uint32_t word = e.get(s.items[8 + i]);
            for (int j = 0; j < each; ++j)
                b[lane / 4][i * 4 * each + lane % 4 * each + j] = number(kind, word, j);
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        Env& e = *(Env*)g.items[lane];
        for (int i = 0; i < 4; ++i)
            add_product(kind, e, s.items[i], a[lane / 4 + i / 2 * 8], b[lane % 4 * 2 + i % 2], k, true);
    }
}

// An operand of wgmma in shared memory: rows of 128 bytes in groups of eight, swizzled over 128 bytes.
static const uint8_t* operand_row(uint64_t descriptor, int row, int byte) {
    if (descriptor >> 62 != 1) fail("an operand of wgmma that is not swizzled over 128 bytes");
    uint32_t stride = (descriptor >> 32 & 0x3fff) << 4;
    uint32_t low = (descriptor & 0x3fff) << 4, begin = DYNAMIC_AT + now->block->launch->function->module->skew;
    uint32_t address = begin + ((low - begin) & 0x3ffff);
    address += row / 8 * stride + row % 8 * 128 + byte;
    // What is swizzled are the bits of addresses.
    address ^= (address >> 7 & 7) << 4;
    return shared(address, 1);
}

// A warp's part of a wgmma: 16 of 64 rows, all columns.
static void wgmma(const std::vector<Env*>& lanes, unsigned warp, const Statement& s) {
    Kind kind = kind_of(s.name);
    int each = per_word(kind), k = 8 * each, columns = std::atoi(s.name.c_str() + s.name.find('n', 28) + 1);
    // Left operands in registers: four words, a descriptor, a predicate, scale-a, scale-b, transpose-b.
    int sums = columns / 2, left = s.items.size() == (size_t)sums + 9 ? 4 : 1;
    double a[16][32];
    std::vector<double> b(columns * k);
    const Env& first = *lanes[0];
    auto from_shared = [&](uint64_t descriptor, int row, double* to) {
        for (int i = 0; i < k / each; ++i) {
            uint32_t word;
            std::memcpy(&word, operand_row(descriptor, row, i * 4), 4);
            for (int j = 0; j < each; ++j) to[i * each + j] = number(kind, word, j);
        }
    };
    if (left == 4) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                uint32_t word = lanes[lane]->get(s.items[sums + i]);
                for (int j = 0; j < each; ++j)
                    a[lane / 4 + i % 2 * 8][i / 2 * 4 * each + lane % 4 * each + j] = number(kind, word, j);
            }
    } else {
        for (int row = 0; row < 16; ++row)
            from_shared(first.get(s.items[sums]), warp % 4 * 16 + row, a[row]);
    }
    for (int column = 0; column < columns; ++column)
        from_shared(first.get(s.items[sums + left]), column, &b[column * k]);
    bool adds = first.get(s.items[sums + left + 1]);
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < sums; ++i)
            add_product(kind, *lanes[lane], s.items[i], a[lane / 4 + i / 2 % 2 * 8],
                        &b[(i / 4 * 8 + lane % 4 * 2 + i % 2) * k], k, adds);
}

// ---- matrices of 8 x 8 ------------------------------------------------------------------------------------

static void load_matrices(Gather& g, const Statement& s) {
    bool turned = s.name.find(".trans") != std::string::npos;
    uint16_t m[4][8][8];
    for (int lane = 0; lane < 32; ++lane)
        std::memcpy(m[lane / 8][lane % 8], shared(((Env*)g.items[lane])->get(s.items[4]), 16), 16);
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            int r = lane / 4, c = lane % 4 * 2;
            uint32_t low = turned ? m[i][c][r] : m[i][r][c], high = turned ? m[i][c + 1][r] : m[i][r][c + 1];
            ((Env*)g.items[lane])->set(s.items[i], (uint64_t)(low | high << 16));
        }
}

static void store_matrices(Gather& g, const Statement& s) {
    bool turned = s.name.find(".trans") != std::string::npos;
    uint16_t m[4][8][8];
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            int r = lane / 4, c = lane % 4 * 2;
            uint32_t word = ((Env*)g.items[lane])->get(s.items[1 + i]);
            (turned ? m[i][c][r] : m[i][r][c]) = word;
            (turned ? m[i][c + 1][r] : m[i][r][c + 1]) = word >> 16;
        }
    for (int lane = 0; lane < 32; ++lane)
        std::memcpy(shared(((Env*)g.items[lane])->get(s.items[0]), 16), m[lane / 8][lane % 8], 16);
}

static void move_matrix(Gather& g, const Statement& s) {
    uint16_t m[8][8];
    for (int lane = 0; lane < 32; ++lane) {
        uint32_t word = ((Env*)g.items[lane])->get(s.items[1]);
        m[lane / 4][lane % 4 * 2] = word;
        m[lane / 4][lane % 4 * 2 + 1] = word >> 16;
    }
    for (int lane = 0; lane < 32; ++lane) {
        int r = lane / 4, c = lane % 4 * 2;
        ((Env*)g.items[lane])->set(s.items[0], (uint64_t)(m[c][r] | (uint32_t)m[c + 1][r] << 16));
    }
}

static void reduce_max(Gather& g, const Statement& s) {
    uint32_t most = 0;
    unsigned mask = g.mask & now->warp->live;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) most = std::max(most, (uint32_t)((Env*)g.items[lane])->get(s.items[1]));
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) ((Env*)g.items[lane])->set(s.items[0], (uint64_t)most);
}

// ---- barriers in shared memory and bulk copies ------------------------------------------------------------

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
    if (to % 16 || bytes % 16 || (uint64_t)from % 16) fail("a bulk copy that is not in multiples of 16 bytes");
    auto lock = locked();
    arrive_later(*now->block, barrier, [=] {
        std::memcpy(shared(to, bytes), from, bytes);
        Phases(barrier).change(0, -(int64_t)bytes);
    });
    if (!settings().late) arrive_now(barrier);
}

// A matrix as cuTensorMapEncodeTiled (driver.cpp) describes it.
struct Map {
    uint64_t at, width, height, stride;  // of elements, rows, bytes
    uint32_t box_width, box_height, size, swizzled;
};

// Calls `each` for every 16 bytes of a box: where they are in shared memory, and in the matrix (null outside).
template <typename F>
static void each_chunk(const Map& map, int column, int row, uint32_t address, F each) {
    int64_t bytes = map.box_width * map.size, width = map.width * map.size, first = (int64_t)column * map.size;
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
        if (settings().late) continue;
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
    if (settings().late) {
        now->block->bulk[now->number].open.push_back(store);
    } else {
        store();
    }
}

// ---- the table --------------------------------------------------------------------------------------------

typedef void (*Run)(Env&, const Statement&);

// An instruction of a whole warp.
template <void (*DO)(Gather&, const Statement&)>
void together(Env& e, const Statement& s) {
    gather(0xffffffffu, &s, &e, [](Gather& g) { DO(g, *(const Statement*)g.what); });
}

static void start_wgmma(Env& e, const Statement& s) {
    gather(0xffffffffu, &s, &e, [](Gather& g) {
        const Statement& s = *(const Statement*)g.what;
        unsigned warp = now->number / 32;
        std::vector<Env*> lanes;
        for (void* item : g.items) lanes.push_back((Env*)item);
        if (!settings().late) return wgmma(lanes, warp, s);
        // The operands stay where they are; their list goes with this call.
        struct Kept {
            std::vector<std::vector<Operand>> operands;
            std::vector<Env> envs;
        };
        auto kept = std::make_shared<Kept>();
        size_t count = 0;
        for (const Item& item : s.items)
            if (item.kind == Item::OPERAND) count = std::max(count, (size_t)item.value + 1);
        for (Env* lane : lanes) {
            kept->operands.emplace_back(lane->operands, lane->operands + count);
            kept->envs.push_back(*lane);
        }
        const Statement* statement = &s;
        now->warp->mmas.open.push_back([kept, warp, statement] {
            std::vector<Env*> lanes;
            for (size_t i = 0; i < 32; ++i) {
                kept->envs[i].operands = kept->operands[i].data();
                lanes.push_back(&kept->envs[i]);
            }
            wgmma(lanes, warp, *statement);
        });
    });
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
    if (settings().late) {
        now->block->copies[now->number].open.push_back(copy);
    } else {
        copy();
    }
}

// Words from shared memory or to it, one after the other.
template <bool STORES>
void shared_words(Env& e, const Statement& s) {
    size_t count = s.items.size() - 1;
    const Item& address = STORES ? s.items[0] : s.items[count];
    uint8_t* at = shared(e.get(address), count * 4);
    for (size_t i = 0; i < count; ++i) {
        if (STORES) {
            uint32_t word = e.get(s.items[1 + i]);
            std::memcpy(at + 4 * i, &word, 4);
        } else {
            uint32_t word;
            std::memcpy(&word, at + 4 * i, 4);
            e.set(s.items[i], (uint64_t)word);
        }
    }
}

static void global_load(Env& e, const Statement& s) {
    size_t count = s.items.size() - 1;
    uint32_t* at = (uint32_t*)e.get(s.items[count]);
    if ((uint64_t)at % (4 * count)) fail("%s from an address that is not aligned", s.name.c_str());
    for (size_t i = 0; i < count; ++i) e.set(s.items[i], (uint64_t)__atomic_load_n(at + i, __ATOMIC_SEQ_CST));
}

static void global_store(Env& e, const Statement& s) {
    size_t count = s.items.size() - 1;
    uint32_t* at = (uint32_t*)e.get(s.items[0]);
    if ((uint64_t)at % (4 * count)) fail("%s to an address that is not aligned", s.name.c_str());
    bool adds = s.name.rfind("red.", 0) == 0;
    for (size_t i = 0; i < count; ++i) {
        uint32_t word = e.get(s.items[1 + i]);
        if (adds) {
            float x;
            std::memcpy(&x, at + i, 4);
            x += e.real(s.items[1 + i]);
            std::memcpy(&word, &x, 4);
        }
        __atomic_store_n(at + i, word, __ATOMIC_SEQ_CST);
    }
}

static uint32_t lane_of(uint64_t word, int i) { return word >> (16 * i) & 0xffff; }

#define RUN [](Env & e, const Statement& s)
#define ITEM(i) (s.items[i])
static const std::vector<std::pair<const char*, Run>> INSTRUCTIONS = {
    {"mma.sync", together<mma>},
    {"ldmatrix", together<load_matrices>},
    {"stmatrix", together<store_matrices>},
    {"movmatrix", together<move_matrix>},
    {"redux.sync.max.u32", together<reduce_max>},
    {"wgmma.mma_async", start_wgmma},
    {"wgmma.fence", RUN {}},
    {"wgmma.commit_group", together<[](Gather&, const Statement&) { now->warp->mmas.commit(); }>},
    {"wgmma.wait_group", together<[](Gather& g, const Statement& s) {
         now->warp->mmas.finish(((Env*)g.items[now->lane])->get(ITEM(0)));
     }>},
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
         auto lock = locked();
         Phases(e.get(ITEM(1))).change(1, 0);
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
    {"fence.", RUN {}},
    {"griddepcontrol.", RUN {}},
    {"setmaxnreg.", RUN {}},
    {"createpolicy.", RUN { e.set(ITEM(0), (uint64_t)0); }},
    {"ld.shared", shared_words<false>},
    {"st.shared", shared_words<true>},
    {"ld.relaxed.gpu.global", RUN {
         global_load(e, s);
         poll();
     }},
    {"st.relaxed.gpu.global", global_store},
    {"st.global", global_store},
    {"red.global.add", global_store},
    {"setp.ne.b32", RUN { e.set(ITEM(0), (uint64_t)((uint32_t)e.get(ITEM(1)) != (uint32_t)e.get(ITEM(2)))); }},
    {"fma.rn.bf16x2", RUN {
         uint64_t x = e.get(ITEM(1)), y = e.get(ITEM(2)), z = e.get(ITEM(3)), r = 0;
         for (int i = 0; i < 2; ++i) {
             double product = std::fma((double)from_bf16(lane_of(x, i)), (double)from_bf16(lane_of(y, i)),
                                       (double)from_bf16(lane_of(z, i)));
             r |= (uint64_t)to_bf16(product) << (16 * i);
         }
         e.set(ITEM(0), r);
     }},
    {"sub.rn.f16x2", RUN {
         uint64_t x = e.get(ITEM(1)), y = e.get(ITEM(2)), r = 0;
         for (int i = 0; i < 2; ++i)
             r |= (uint64_t)to_f16(from_f16(lane_of(x, i)) - from_f16(lane_of(y, i))) << (16 * i);
         e.set(ITEM(0), r);
     }},
    {"mul.rn.f16x2", RUN {
         uint64_t x = e.get(ITEM(1)), y = e.get(ITEM(2)), r = 0;
         for (int i = 0; i < 2; ++i)
             r |= (uint64_t)to_f16(from_f16(lane_of(x, i)) * from_f16(lane_of(y, i))) << (16 * i);
         e.set(ITEM(0), r);
     }},
    {"cvt.rn.bf16x2.f32", RUN {
         e.set(ITEM(0), (uint64_t)(to_bf16(e.real(ITEM(1))) << 16 | to_bf16(e.real(ITEM(2)))));
     }},
    {"cvt.rn.f16x2.f32", RUN {
         e.set(ITEM(0), (uint64_t)(to_f16(e.real(ITEM(1))) << 16 | to_f16(e.real(ITEM(2)))));
     }},
    {"cvt.rn.satfinite.e4m3x2.f32", RUN {
         e.set(ITEM(0), (uint64_t)(to_e4m3(e.real(ITEM(1))) << 8 | to_e4m3(e.real(ITEM(2)))));
     }},
    {"cvt.rn.f16x2.e4m3x2", RUN {
         uint32_t x = e.get(ITEM(1));
         e.set(ITEM(0), (uint64_t)(to_f16(from_e4m3(x >> 8 & 255)) << 16 | to_f16(from_e4m3(x & 255))));
     }},
    {"cvt.rni.s32.f32", RUN {
         float x = e.real(ITEM(1));
         double r = x != x ? 0.0 : std::fmin(std::fmax(std::nearbyint((double)x), -2147483648.0), 2147483647.0);
         e.set(ITEM(0), (uint64_t)(uint32_t)(int32_t)r);
     }},
    {"cvt.pack.sat.s8.s32.b32", RUN {
         auto saturated = [](int32_t x) { return (uint32_t)std::min(std::max(x, -128), 127) & 255; };
         uint32_t high = saturated(e.get(ITEM(1))), low = saturated(e.get(ITEM(2)));
         e.set(ITEM(0), (uint64_t)(high << 8 | low | (uint32_t)e.get(ITEM(3)) << 16));
     }},
    {"ex2.approx.ftz.f32", RUN { e.set(ITEM(0), std::exp2(e.real(ITEM(1)))); }},
    {"rcp.approx.ftz.f32", RUN { e.set(ITEM(0), 1.0f / e.real(ITEM(1))); }},
    {"mov.b32", RUN {
         // One to one, two halves from one, or one from two halves.
         if (s.items.size() == 2) return e.set(ITEM(0), e.get(ITEM(1)));
         bool splits = s.name == "mov.b32{";
         if (splits) {
             uint64_t x = e.get(ITEM(2));
             e.set(ITEM(0), x & 0xffff);
             return e.set(ITEM(1), x >> 16 & 0xffff);
         }
         e.set(ITEM(0), (e.get(ITEM(1)) & 0xffff) | e.get(ITEM(2)) << 16);
     }},
    {"mov.b64", RUN { e.set(ITEM(0), (e.get(ITEM(1)) & 0xffffffff) | e.get(ITEM(2)) << 32); }},
    {"mov.u32 %tid.x", RUN { e.set(ITEM(0), (uint64_t)now->thread.x); }},
    {"mov.u32 %ctaid.x", RUN { e.set(ITEM(0), (uint64_t)block_index().x); }},
};

// ---- texts ------------------------------------------------------------------------------------------------

static std::string word_at(const std::string& t, size_t& i) {
    size_t from = i;
    while (i < t.size() && (std::isalnum((unsigned char)t[i]) || t[i] == '_' || t[i] == '$' || t[i] == '.' ||
                            (t[i] == ':' && i + 1 < t.size() && t[i + 1] == ':') || (i > from && t[i - 1] == ':' && t[i] == ':')))
        ++i;
    return t.substr(from, i - from);
}

Site::Site(const char* text) : code(nullptr) {
    Code* c = new Code{text, {}};
    code = c;
    std::string t = text;
    std::map<std::string, int> locals, labels;
    std::vector<std::pair<size_t, std::string>> branches;
    auto skip = [&](size_t& i) {
        while (i < t.size() && (std::isspace((unsigned char)t[i]) || t[i] == ';')) ++i;
    };
    for (size_t i = 0; skip(i), i < t.size();) {
        if (t[i] == '{' || t[i] == '}') {
            ++i;
            continue;
        }
        Statement s;
        if (t[i] == '@') {
            s.negated = t[++i] == '!';
            if (s.negated) ++i;
            std::string name = word_at(t, i);
            if (!locals.count(name)) fail("no register %s in: %s", name.c_str(), text);
            s.guard = locals[name];
            skip(i);
        }
        std::string name = word_at(t, i);
        if (t[i] == ':' && name.back() != ':') {
            labels[name] = c->statements.size();
            ++i;
            continue;
        }
        size_t end = t.find(';', i);
        if (end == std::string::npos) end = t.size();
        std::string rest = t.substr(i, end - i);
        i = end;
        if (name == ".reg") {
            size_t at = rest.find_first_of(" \t", rest.find('.'));
            for (size_t k = at; k < rest.size();) {
                if (std::isalpha((unsigned char)rest[k])) {
                    std::string local = word_at(rest, k);
                    int next = locals.size();
                    locals[local] = next;
                } else {
                    ++k;
                }
            }
            if (locals.size() > 8) fail("more registers than expected in: %s", text);
            continue;
        }
        s.name = name;
        if (name == "bra") {
            size_t k = rest.find_first_not_of(" \t");
            branches.emplace_back(c->statements.size(), word_at(rest, k));
            c->statements.push_back(s);
            continue;
        }
        if (name == "mov.b32" && rest.find('{') < rest.find(',')) s.name += "{";
        for (size_t k = 0; k < rest.size();) {
            char ch = rest[k];
            if (ch == '%' && k + 1 < rest.size() && std::isdigit((unsigned char)rest[k + 1])) {
                size_t length;
                s.items.push_back({Item::OPERAND, std::stoll(rest.substr(k + 1), &length)});
                k += 1 + length;
            } else if (ch == '%') {
                k += rest[k + 1] == '%' ? 2 : 1;
                s.name += " %" + word_at(rest, k);
            } else if (std::isdigit((unsigned char)ch)) {
                size_t length;
                bool real = rest.find('.', k) != std::string::npos && s.name.rfind("createpolicy", 0) == 0;
                int64_t value = real ? (std::stod(rest.substr(k), &length), 0)
                                     : (int64_t)std::stoull(rest.substr(k), &length, 0);
                s.items.push_back({Item::NUMBER, value});
                k += length;
            } else if (ch == '_' && !std::isalnum((unsigned char)rest[k + 1])) {
                s.items.push_back({Item::NOTHING, 0});
                ++k;
            } else if (std::isalpha((unsigned char)ch)) {
                std::string local = word_at(rest, k);
                if (!locals.count(local)) fail("no register %s in: %s", local.c_str(), text);
                s.items.push_back({Item::LOCAL, locals[local]});
            } else {
                ++k;
            }
        }
        for (auto& [prefix, run] : INSTRUCTIONS)
            if (s.name.rfind(prefix, 0) == 0) {
                s.run = run;
                break;
            }
        if (!s.run) fail("an instruction that is not known: %s", s.name.c_str());
        c->statements.push_back(s);
    }
    for (auto& [at, label] : branches) {
        if (!labels.count(label)) fail("no label %s in: %s", label.c_str(), text);
        c->statements[at].target = labels[label];
    }
}

void ptx(const Site& site, std::initializer_list<Operand> operands) {
    Env env;
    env.operands = operands.begin();
    const std::vector<Statement>& all = site.code->statements;
    for (size_t i = 0; i < all.size(); ++i) {
        const Statement& s = all[i];
        if (s.guard >= 0 && (env.locals[s.guard] != 0) == s.negated) continue;
        if (s.target >= 0) {
            i = s.target - 1;
            continue;
        }
        s.run(env, s);
    }
}

}  // namespace emu
