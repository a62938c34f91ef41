// What a warp does together: MMAs, matrices of 8 x 8, a maximum. The last lane to come does it for all.
#include <memory>
#include "numbers.h"
#include "ptx.h"

namespace emu {

enum Kind { KIND_UNKNOWN, KIND_BF16, KIND_F16, KIND_S8, KIND_E4M3 };

// What is multiplied; looked up in a statement's name once.
static Kind kind_of(const Statement& s) {
    if (s.kind == KIND_UNKNOWN) {
        auto has = [&](const char* text) { return s.name.find(text) != std::string::npos; };
        s.kind = has(".bf16.bf16")   ? KIND_BF16
                 : has(".f16.f16")   ? KIND_F16
                 : has(".s8.s8")     ? KIND_S8
                 : has(".e4m3.e4m3") ? KIND_E4M3
                                     : KIND_UNKNOWN;
        if (s.kind == KIND_UNKNOWN) fail("no numbers of %s", s.name.c_str());
    }
    return (Kind)s.kind;
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

// Toward zero, as tensor cores round sums.
static float cut_off(double x) {
    float f = (float)x;
    return std::fabs((double)f) > std::fabs(x) ? std::nextafter(f, 0.0f) : f;
}

// Eight columns of a result, which are computed at once.
typedef double Columns __attribute__((vector_size(64)));

// A row of `a`, times k rows of eight columns; sums of products are exact, in order of k.
static Columns row_times(const double* a, const Columns* b, int k, int stride) {
    Columns sum = {};
    for (int i = 0; i < k; ++i) sum += a[i] * b[i * stride];
    return sum;
}

// d += sum, cut off once.
static void add_sum(Kind kind, Env& lane, const Item& to, double sum, bool adds) {
    if (kind == KIND_S8) {
        int32_t before = adds ? (int32_t)lane.get(to) : 0;
        lane.set(to, (uint64_t)(uint32_t)(before + (int32_t)sum));
    } else {
        lane.set(to, cut_off(adds ? lane.real(to) + sum : sum));
    }
}

static void mma(Gather& g, const Statement& s) {
    Kind kind = kind_of(s);
    int each = per_word(kind), k = 8 * each;
    double a[16][32];
    Columns b[32], d[16];
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
                b[i * 4 * each + lane % 4 * each + j][lane / 4] = number(kind, word, j);
        }
    }
    for (int row = 0; row < 16; ++row) d[row] = row_times(a[row], b, k, 1);
    for (int lane = 0; lane < 32; ++lane) {
        Env& e = *(Env*)g.items[lane];
        for (int i = 0; i < 4; ++i)
            add_sum(kind, e, s.items[i], d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2], true);
    }
}

// An operand of wgmma in shared memory: lines of 128 bytes in groups of eight, swizzled over 128 bytes. Lines
// are rows or columns of the matrix that are summed over (k), or, transposed, have 64 of those that are not.
static const uint8_t* operand_at(uint64_t descriptor, bool transposed, int row, int k, int size) {
    if (descriptor >> 62 != 1) fail("an operand of wgmma that is not swizzled over 128 bytes");
    uint32_t stride = (descriptor >> 32 & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    uint32_t low = (descriptor & 0x3fff) << 4;
    uint32_t begin = DYNAMIC_AT + now->block->launch->function->module->skew;
    uint32_t address = begin + ((low - begin) & 0x3ffff);
    address += transposed ? row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * size
                          : row / 8 * stride + row % 8 * 128 + k * size;
    // What is swizzled are the bits of addresses.
    address ^= (address >> 7 & 7) << 4;
    return shared(address, size);
}

// A warp's part of a wgmma: 16 of 64 rows, all columns.
static void wgmma(const std::vector<Env*>& lanes, unsigned warp, const Statement& s) {
    Kind kind = kind_of(s);
    int each = per_word(kind), k = 8 * each, columns = std::atoi(s.name.c_str() + s.name.find('n', 28) + 1);
    // Left operands in registers: four words, a descriptor, a predicate, scale-a, scale-b, transpose-b.
    int sums = columns / 2, left = s.items.size() == (size_t)sums + 9 ? 4 : 1;
    double a[16][32];
    int eights = columns / 8;
    std::vector<Columns> b(eights * k);
    const Env& first = *lanes[0];
    bool transposed = left == 4 && first.get(s.items[sums + 8]);
    auto from_shared = [&](uint64_t descriptor, bool transposed, int row, double* to) {
        for (int i = 0; i < k; ++i) {
            uint32_t word = 0;
            std::memcpy(&word, operand_at(descriptor, transposed, row, i, 4 / each), 4 / each);
            to[i] = number(kind, word, 0);
        }
    };
    if (left == 1 && s.items.size() == (size_t)sums + 7)
        for (int i : {5, 6})
            if (first.get(s.items[sums + i])) fail("a transposed operand beside a left one in shared memory");
    if (left == 4) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                uint32_t word = lanes[lane]->get(s.items[sums + i]);
                for (int j = 0; j < each; ++j)
                    a[lane / 4 + i % 2 * 8][i / 2 * 4 * each + lane % 4 * each + j] = number(kind, word, j);
            }
    } else {
        for (int row = 0; row < 16; ++row)
            from_shared(first.get(s.items[sums]), false, warp % 4 * 16 + row, a[row]);
    }
    for (int column = 0; column < columns; ++column) {
        double of_column[32];
        from_shared(first.get(s.items[sums + left]), transposed, column, of_column);
        for (int i = 0; i < k; ++i) b[i * eights + column / 8][column % 8] = of_column[i];
    }
    std::vector<Columns> d(16 * eights);
    for (int row = 0; row < 16; ++row)
        for (int i = 0; i < eights; ++i) d[row * eights + i] = row_times(a[row], &b[i], k, eights);
    bool adds = first.get(s.items[sums + left + 1]);
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < sums; ++i)
            add_sum(kind, *lanes[lane], s.items[i],
                    d[(lane / 4 + i / 2 % 2 * 8) * eights + i / 4][lane % 4 * 2 + i % 2], adds);
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

// ---- the table --------------------------------------------------------------------------------------------

static void start_wgmma(Env& e, const Statement& s) {
    gather(0xffffffffu, &s, &e, [](Gather& g) {
        const Statement& s = *(const Statement*)g.what;
        unsigned warp = now->number / 32;
        std::vector<Env*> lanes;
        for (void* item : g.items) lanes.push_back((Env*)item);
        if (!settings().late_mmas) return wgmma(lanes, warp, s);
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

static void commit_mmas(Gather&, const Statement&) { now->warp->mmas.commit(); }

static void wait_for_mmas(Gather& g, const Statement& s) {
    now->warp->mmas.finish(((Env*)g.items[now->lane])->get(s.items[0]));
}

const Instructions& mma_instructions() {
    static const Instructions all = {
        {"mma.sync", together<mma>},
        {"ldmatrix", together<load_matrices>},
        {"stmatrix", together<store_matrices>},
        {"movmatrix", together<move_matrix>},
        {"redux.sync.max.u32", together<reduce_max>},
        {"wgmma.mma_async", start_wgmma},
        {"wgmma.fence", RUN {}},
        {"wgmma.commit_group", together<commit_mmas>},
        {"wgmma.wait_group", together<wait_for_mmas>},
    };
    return all;
}

}  // namespace emu
