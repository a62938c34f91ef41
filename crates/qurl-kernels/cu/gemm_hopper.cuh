// Products with packed weights on Hopper: out[token, n] = x[token, k] . w[n, k], for one token or thousands.
//
// Decoding reads every weight once for a handful of tokens, so the kernel is built around the weight stream. Weights
// lie packed in tiles of 64 rows x 128 bytes of k, already swizzled as the tensor cores want them, so a tile is one
// 8 KB bulk copy. They are the left operand (64 rows of a wgmma), the tokens the right one (16..256 columns): the
// result is computed transposed and no work is padded but to the next token tile. A block is one producer warp, which
// keeps STAGES tiles in flight, and WG consumer warpgroups of 64 rows each. CL blocks of a cluster work on neighbouring
// rows and share the activations by multicast, each loading a part.
//
// Schedules:
//   STREAM  the matrix is cut into equal ranges of k-blocks, one per block of threads, whatever the tiles of 128 rows.
//           Blocks that meet in a tile leave their partial sums in memory; the last one (or each for some tokens) adds
//           them up in order of k. The cut depends on (n, k) and the number of ranges, never on the tokens: neither do the bits.
//   TILES   whole tiles, for many tokens.
//   VIRTUAL whole tiles, but summed with the cuts of STREAM, for the same bits in floating point with many tokens.
//
// Weights do not depend on earlier kernels: launched with programmatic serialization, a block fills its stages with
// them while the kernel before it still runs.
#pragma once
#include "common.cuh"
#include "mma.cuh"

enum Format { BF16, INT8, FP8 };
enum Schedule { STREAM, TILES, VIRTUAL };

const int TILE_ROWS = 64;
const int TILE_BYTES = TILE_ROWS * 128;

struct alignas(64) TensorMap {
    u64 words[16];
};

struct GemmArgs {
    const u8* weights;       // [n / 64][k_blocks][64][128 bytes]
    const float* w_scales;   // [n], or null
    const float* x_scales;   // [tokens], or null
    const float* bias;       // [n], or null
    float* out;              // [tokens, n] (or [tokens, n / 2] with swiglu)
    float4* partials;        // STREAM: partial sums
    u32* counters;           // STREAM: 16 per range, zero between kernels
    int tokens, n, k_blocks;
    int ranges;              // STREAM, VIRTUAL: the number of ranges
    int add;                 // out += instead of out =
    int swiglu;              // rows are gate and up in turns of 8: out = silu(gate) * up
};

// ---- barriers, copies and products -------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Arrives at the barrier of the same address in block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ void copy_weights(u32 to, const u8* from, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(TILE_BYTES), "r"(barrier), "l"(policy)
        : "memory");
}

template <int CL>
__device__ __forceinline__ void copy_tokens(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    if (CL == 1) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
            "l"(map), "r"(column), "r"(row), "r"(barrier)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
            "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
            "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((u16)((1 << CL) - 1))
            : "memory");
    }
}

// Rows of 128 bytes in groups of eight, swizzled over 128 bytes.
__device__ __forceinline__ u64 operand(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

#define TEN(p) "%" p "0, %" p "1, %" p "2, %" p "3, %" p "4, %" p "5, %" p "6, %" p "7, %" p "8, %" p "9"
#define REGS8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGS16 TEN("") ", %10, %11, %12, %13, %14, %15"
#define REGS32 TEN("") ", " TEN("1") ", " TEN("2") ", %30, %31"
#define REGS64 TEN("") ", " TEN("1") ", " TEN("2") ", " TEN("3") ", " TEN("4") ", " TEN("5") ", %60, %61, %62, %63"
#define REGS128                                                                                                \
    TEN("") ", " TEN("1") ", " TEN("2") ", " TEN("3") ", " TEN("4") ", " TEN("5") ", " TEN("6") ", " TEN("7") ", " \
    TEN("8") ", " TEN("9") ", " TEN("10") ", " TEN("11") ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define SUMS8(c, i) SUMS4(c, i), SUMS4(c, i + 4)
#define SUMS16(c, i) SUMS8(c, i), SUMS8(c, i + 8)
#define SUMS32(c, i) SUMS16(c, i), SUMS16(c, i + 16)
#define SUMS64(c, i) SUMS32(c, i), SUMS32(c, i + 32)
#define SUMS128(c, i) SUMS64(c, i), SUMS64(c, i + 64)
#define WGMMA(shape, regs, sums, a, b, go, tail)                                                        \
    asm volatile("{\n.reg .pred go;\nsetp.ne.b32 go, " go ", 0;\n"                                        \
                 "wgmma.mma_async.sync.aligned." shape " {" regs "}, " a ", " b ", go" tail ";\n}\n"      \
                 : sums                                                                                 \
                 : "l"(wa), "l"(xb), "r"(go_on))
#define WGMMA_TOKENS(name, type, c, shape_tail, k, tail)                                                         \
    template <int TOK>                                                                                           \
    __device__ __forceinline__ void name(type(&d)[TOK / 2], u64 wa, u64 xb, int go_on) {                         \
        if constexpr (TOK == 16) WGMMA("m64n16" k shape_tail, REGS8, SUMS8(c, 0), "%8", "%9", "%10", tail);       \
        if constexpr (TOK == 32) WGMMA("m64n32" k shape_tail, REGS16, SUMS16(c, 0), "%16", "%17", "%18", tail);   \
        if constexpr (TOK == 64) WGMMA("m64n64" k shape_tail, REGS32, SUMS32(c, 0), "%32", "%33", "%34", tail);   \
        if constexpr (TOK == 128) WGMMA("m64n128" k shape_tail, REGS64, SUMS64(c, 0), "%64", "%65", "%66", tail); \
        if constexpr (TOK == 256)                                                                                \
            WGMMA("m64n256" k shape_tail, REGS128, SUMS128(c, 0), "%128", "%129", "%130", tail);                 \
    }
WGMMA_TOKENS(wgmma_bf16, float, "+f", ".f32.bf16.bf16", "k16", ", 1, 1, 0, 0")
WGMMA_TOKENS(wgmma_int8, int, "+r", ".s32.s8.s8", "k32", "")
WGMMA_TOKENS(wgmma_fp8, float, "+f", ".f32.e4m3.e4m3", "k32", ", 1, 1")

template <int FORMAT>
struct Sum {
    typedef float type;
};
template <>
struct Sum<INT8> {
    typedef int type;
};

// d += 64 rows of weights . TOK tokens over 128 bytes of k; asynchronous.
template <int FORMAT, int TOK>
__device__ __forceinline__ void multiply(typename Sum<FORMAT>::type (&d)[TOK / 2], u64 wa, u64 xb, int go_on) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        // 32 bytes further along k.
        u64 w = wa + step * 2, x = xb + step * 2;
        if constexpr (FORMAT == BF16) wgmma_bf16<TOK>(d, w, x, go_on | step);
        if constexpr (FORMAT == INT8) wgmma_int8<TOK>(d, w, x, go_on | step);
        if constexpr (FORMAT == FP8) wgmma_fp8<TOK>(d, w, x, go_on | step);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT>
__device__ __forceinline__ void finish_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// ---- the cut of a matrix into ranges -----------------------------------------------------------------------------

const u32 CUT_ROWS = 128;

// A unit is one k-block of 128 rows.
struct Cut {
    u32 units, ranges, k_blocks;
    __device__ u32 begin(u32 range) const { return (u32)((u64)units * range / ranges); }
    // The range that holds a unit.
    __device__ u32 holder(u32 unit) const { return (u32)((((u64)unit + 1) * ranges - 1) / units); }
};

// The ranges that meet in a tile.
struct Meeting {
    u32 range;        // this block's
    u32 first, last;  // all
    u32 second;       // whether the tile is the second that `first` has only a part of
    u32 adders;       // so many, from `first` on, add up the sums of some tokens each

    // A range that goes on to the next tile must not wait for those that end here.
    __device__ Meeting(const Cut& cut, u32 tile, u32 range) : range(range) {
        u32 begin = tile * cut.k_blocks, end = begin + cut.k_blocks;
        first = cut.holder(begin);
        last = cut.holder(end - 1);
        second = cut.begin(first) < begin ? 1 : 0;
        adders = last - first + (cut.begin(last + 1) > end ? 0 : 1);
    }
    // Where a warp's lane keeps partial sums of `quads` x 4 numbers.
    template <int WARPS, int QUADS>
    __device__ float4* place(float4* partials, u32 r) const {
        u32 slot = 2 * r + (r == first ? second : 0);
        return partials + ((u64)slot * WARPS + threadIdx.x / WARP) * QUADS * WARP + threadIdx.x % WARP;
    }
};

// ---- results -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float sum_bits(float x) { return x; }
__device__ __forceinline__ float sum_bits(int x) { return __int_as_float(x); }
__device__ __forceinline__ void from_bits(float& to, float x) { to = x; }
__device__ __forceinline__ void from_bits(int& to, float x) { to = __float_as_int(x); }

// Tokens that a warp turns around in shared memory at a time, and the padded length of their rows there.
const int TURN = 32;
const int TURN_ROW = 20;

template <int TOK>
struct Room {
    static const int STEP = TOK < TURN ? TOK : TURN;
    // A warp's place to turn sums around, and the scales of all tokens.
    static const int FLOATS = STEP * TURN_ROW + TOK;
};

// Brings the scales of a token tile into a warp's room.
template <int FORMAT, int TOK>
__device__ __forceinline__ void load_scales(const GemmArgs& a, u32 token, float* room) {
    if (FORMAT == BF16) return;
    __syncwarp();
    for (u32 t = threadIdx.x % WARP; t < TOK; t += WARP) {
        room[Room<TOK>::STEP * TURN_ROW + t] = token + t < a.tokens ? a.x_scales[token + t] : 0.0f;
    }
    __syncwarp();
}

// What a lane needs to finish results: it takes tokens lane / 4 + {0, 8, ..}, and of the warp's 16 rows four neighbours,
// or with swiglu two gates and their ups.
template <int FORMAT, int TOK>
struct Finish {
    float ws[4], bias[4];
    u32 width, left, row;
    float* out;
    bool in;

    __device__ Finish(const GemmArgs& a, u32 first_row, u32 token) : row(first_row) {
        u32 quad = threadIdx.x % 4, eighth = threadIdx.x % WARP / 4;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            u32 r = row + (a.swiglu ? quad * 2 + e % 2 + e / 2 * 8 : quad * 4 + e);
            ws[e] = FORMAT != BF16 && r < a.n ? __ldg(a.w_scales + r) : 1.0f;
            bias[e] = a.bias && r < a.n ? __ldg(a.bias + r) : 0.0f;
        }
        width = a.swiglu ? a.n / 2 : a.n;
        out = a.out + (u64)(token + eighth) * width + (a.swiglu ? row / 2 + quad * 2 : row + quad * 4);
        left = a.tokens - token - eighth;
        in = row + quad * (a.swiglu ? 2 : 4) < a.n;
    }

    __device__ void scale(const GemmArgs& a, float (&v)[4], float x_scale) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            typename Sum<FORMAT>::type sum;
            from_bits(sum, v[e]);
            v[e] = (float)sum;
            if (FORMAT != BF16) v[e] = __fmul_rn(v[e], __fmul_rn(x_scale, ws[e]));
            if (a.bias) v[e] = __fadd_rn(v[e], bias[e]);
        }
    }

    // Writes the Room::STEP tokens from `first` on that lie in the warp's room.
    __device__ void flush(const GemmArgs& a, const float* room, u32 first) const {
        const int STEP = Room<TOK>::STEP;
        u32 quad = threadIdx.x % 4, eighth = threadIdx.x % WARP / 4;
        const float* from = room + eighth * TURN_ROW;
        const float* xs = room + STEP * TURN_ROW + first + eighth;
        float* to = out + (u64)first * width;
#pragma unroll
        for (int t = 0; t < STEP; t += 8, from += 8 * TURN_ROW, to += 8 * (u64)width) {
            bool store = in && (int)left > (int)first + t;
            float x_scale = FORMAT != BF16 ? xs[t] : 1.0f;
            if (a.swiglu) {
                const float* pair = from + quad * 2;
                float v[4] = {pair[0], pair[1], pair[8], pair[9]};
                scale(a, v, x_scale);
                float2 result = {silu_times(v[0], v[2]), silu_times(v[1], v[3])};
                if (store) *reinterpret_cast<float2*>(to) = result;
                continue;
            }
            float4 four = *reinterpret_cast<const float4*>(from + quad * 4);
            float v[4] = {four.x, four.y, four.z, four.w};
            scale(a, v, x_scale);
            if (!store) continue;
            if (a.n % 4 != 0) {
                for (int e = 0; e < 4 && row + quad * 4 + e < a.n; ++e) to[e] = a.add ? __fadd_rn(to[e], v[e]) : v[e];
            } else if (a.add) {
                // One addition per element: its order cannot vary.
                asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                             : "memory");
            } else {
                float4 result = {v[0], v[1], v[2], v[3]};
                *reinterpret_cast<float4*>(to) = result;
            }
        }
    }
};

// Turns sums of 8 tokens around: a lane has rows lane / 4 + {0, 8} of tokens 2 (lane % 4) + {0, 1}.
template <typename S>
__device__ __forceinline__ void turn(float* room, int token, S s0, S s1, S s2, S s3) {
    u32 quad = threadIdx.x % 4, eighth = threadIdx.x % WARP / 4;
    float* to = room + (token + quad * 2) * TURN_ROW + eighth;
    to[0] = sum_bits(s0);
    to[TURN_ROW] = sum_bits(s1);
    to[8] = sum_bits(s2);
    to[TURN_ROW + 8] = sum_bits(s3);
}

// Stores the sums of 16 rows x TOK tokens of one warp. They go through `room`, so that memory is written in runs of 16
// rows, in a short loop: writing them from where they are took longer than the product itself, thousands
// of instructions that run once.
template <int FORMAT, int TOK>
__device__ __forceinline__ void store(
    const GemmArgs& a, typename Sum<FORMAT>::type (&d)[TOK / 2], u32 row, u32 token, float* room
) {
    const int STEP = Room<TOK>::STEP;
    Finish<FORMAT, TOK> finish(a, row, token);
#pragma unroll(TOK > 64 ? 1 : 2)
    for (int first = 0; first < TOK; first += STEP) {
        __syncwarp();
        // Registers have no addresses: one of these is the stretch.
#pragma unroll
        for (int f = 0; f < TOK; f += STEP) {
            if (f != first) continue;
#pragma unroll
            for (int t = 0; t < STEP; t += 8) {
                int i = (f + t) / 2;
                turn(room, t, d[i], d[i + 1], d[i + 2], d[i + 3]);
            }
        }
        __syncwarp();
        finish.flush(a, room, first);
    }
}

// Leaves a warp's sums of part of k in memory. Of few tokens, the warp that comes last adds up all ranges in order of k
// and stores the results. Of many, the warps wait for each other and share the tokens: reading takes longer than
// waiting then. All blocks run at the same time, and those that wait have no other work left.
template <int FORMAT, int TOK, int WARPS>
__device__ __forceinline__ void meet(
    const GemmArgs& a, const Cut& cut, typename Sum<FORMAT>::type (&d)[TOK / 2], u32 tile, u32 range, u32 row, float* room
) {
    typedef typename Sum<FORMAT>::type S;
    const int STEP = Room<TOK>::STEP;
    const int QUADS = TOK / 8;
    const bool ALONE = TOK <= 16;
    u32 lane = threadIdx.x % WARP;
    Meeting meeting(cut, tile, range);
    float4* mine = meeting.place<WARPS, QUADS>(a.partials, range);
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
        float4 part = {sum_bits(d[4 * q]), sum_bits(d[4 * q + 1]), sum_bits(d[4 * q + 2]), sum_bits(d[4 * q + 3])};
        __stcg(mine + q * WARP, part);
    }
    __threadfence();
    __syncwarp();
    // Arrivals, and adders that are through.
    u32* counters = a.counters + (meeting.first * WARPS + threadIdx.x / WARP) * 2;
    u32 ranges = meeting.last - meeting.first + 1, me = range - meeting.first;
    const u32 STRETCHES = TOK / STEP;
    u32 first_stretch = 0, last_stretch = STRETCHES;
    u32 before = 0;
    if (lane == 0) before = atomicAdd(counters, 1);
    if (ALONE) {
        if (__shfl_sync(FULL, before, 0) != ranges - 1) return;
        if (lane == 0) *counters = 0;
    } else {
        if (me >= meeting.adders) return;
        u32 seen = 0;
        while (lane == 0 && seen != ranges) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counters) : "memory");
        __syncwarp();
        first_stretch = STRETCHES * me / meeting.adders;
        last_stretch = STRETCHES * (me + 1) / meeting.adders;
    }
    __threadfence();
    Finish<FORMAT, TOK> finish(a, row, 0);
#pragma unroll 1
    for (u32 stretch = first_stretch; stretch < last_stretch; ++stretch) {
        const int TOGETHER = 4;
        S total[STEP / 2];
#pragma unroll 1
        for (u32 r = meeting.first; r <= meeting.last; r += TOGETHER) {
            float4 part[TOGETHER][STEP / 8];
#pragma unroll
            for (int t = 0; t < TOGETHER; ++t) {
                const float4* from = meeting.place<WARPS, QUADS>(a.partials, min(r + t, meeting.last)) + stretch * (STEP / 8) * WARP;
#pragma unroll
                for (int q = 0; q < STEP / 8; ++q) part[t][q] = __ldcg(from + q * WARP);
            }
#pragma unroll
            for (int t = 0; t < TOGETHER; ++t) {
                if (r + t > meeting.last) break;
#pragma unroll
                for (int q = 0; q < STEP / 8; ++q) {
                    float bits[4] = {part[t][q].x, part[t][q].y, part[t][q].z, part[t][q].w};
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        S more;
                        from_bits(more, bits[e]);
                        total[4 * q + e] = r + t == meeting.first ? more : total[4 * q + e] + more;
                    }
                }
            }
        }
        __syncwarp();
#pragma unroll
        for (int t = 0; t < STEP; t += 8) turn(room, t, total[t / 2], total[t / 2 + 1], total[t / 2 + 2], total[t / 2 + 3]);
        __syncwarp();
        finish.flush(a, room, stretch * STEP);
    }
    if (!ALONE && lane == 0 && atomicAdd(counters + 1, 1) == meeting.adders - 1) {
        counters[0] = 0;
        counters[1] = 0;
    }
}

// ---- the kernel --------------------------------------------------------------------------------------------------

template <int TOK, int WG>
struct Shape {
    static const int STAGE_BYTES = WG * TILE_BYTES + TOK * 128;
    static const int MOST = 196 * 1024 / STAGE_BYTES;
    static const int STAGES = MOST > 16 ? 16 : MOST;
};

template <int FORMAT, int TOK, int WG, int CL, int SCHEDULE>
__device__ __forceinline__ void gemm(const TensorMap& map, const GemmArgs& a) {
    typedef typename Sum<FORMAT>::type S;
    const int STAGES = Shape<TOK, WG>::STAGES;
    const int STAGE_BYTES = Shape<TOK, WG>::STAGE_BYTES;
    const int WARPS = WG * 4;
    const bool STREAMS = SCHEDULE == STREAM;
    const int PRODUCER_REGISTERS = FORMAT == FP8 ? 40 : STREAMS ? 56 : 88;
    static_assert(!STREAMS || (WG == 2 && CL == 1), "a stream's tiles have 128 rows");

    extern __shared__ u8 dynamic[];
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ float4 rooms[WARPS * Room<TOK>::FLOATS / 4];
    u32 stages = (smem_address(dynamic) + 1023) & ~1023u;
    u32 warp = threadIdx.x / WARP;
    u32 rank = CL > 1 ? blockIdx.x % CL : 0;
    u32 range = blockIdx.x / CL, clusters = gridDim.x / CL;
    u32 tiles = (a.n + TILE_ROWS * WG * CL - 1) / (TILE_ROWS * WG * CL);
    u32 token_tiles = (a.tokens + TOK - 1) / TOK;
    u32 kb = a.k_blocks, strips = (a.n + TILE_ROWS - 1) / TILE_ROWS;
    Cut cut = {(a.n + CUT_ROWS - 1) / CUT_ROWS * kb, (u32)a.ranges, kb};

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(smem_address(&full[s]), 1);
            barrier_init(smem_address(&empty[s]), WARPS * CL);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (CL > 1) {
        cluster_sync();
    } else {
        __syncthreads();
    }
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    // Work is a list of (tile, token tile, first and last k-block); producer and consumers walk it alike.
    struct Walk {
        u32 at, end, tile, token_tile, k0, k1;
    };
    auto start = [&]() {
        Walk w = {range, tiles * token_tiles, 0, 0, 0, kb};
        if (STREAMS) {
            w.at = cut.begin(range);
            w.end = cut.begin(range + 1);
        }
        return w;
    };
    auto next = [&](Walk& w) {
        if (w.at >= w.end) return false;
        if (STREAMS) {
            w.tile = w.at / kb;
            w.k0 = w.at % kb;
            w.k1 = min(kb, w.k0 + (w.end - w.at));
            w.at += w.k1 - w.k0;
        } else {
            w.tile = w.at / token_tiles;
            w.token_tile = w.at % token_tiles;
            w.at += clusters;
        }
        return true;
    };

    if (warp >= WARPS) {
        if (WG > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == WARPS * WARP) {
            u64 policy;
            if (SCHEDULE == STREAM) {
                asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
            } else {
                asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
            }
            auto weights = [&](u32 stage, const Walk& w, u32 k) {
                u32 barrier = smem_address(&full[stage]);
                barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
                for (int g = 0; g < WG; ++g) {
                    // Past the last rows the last ones are read again; nothing of them is stored.
                    u32 strip = min((w.tile * CL + rank) * WG + g, strips - 1);
                    const u8* from = a.weights + ((u64)strip * kb + k) * TILE_BYTES;
                    copy_weights(stages + stage * STAGE_BYTES + g * TILE_BYTES, from, barrier, policy);
                }
            };
            auto tokens = [&](u32 stage, const Walk& w, u32 k) {
                u32 to = stages + stage * STAGE_BYTES + WG * TILE_BYTES + rank * (TOK / CL) * 128;
                copy_tokens<CL>(to, &map, k * 128, w.token_tile * TOK + rank * (TOK / CL), smem_address(&full[stage]));
            };
            // The first stages: weights at once, tokens when the kernel before has written them.
            u32 ahead = 0, done = 0;
            Walk w = start();
            while (ahead < STAGES && next(w)) {
                for (u32 k = w.k0; k < w.k1 && ahead < STAGES; ++k, ++ahead) weights(ahead, w, k);
            }
            asm volatile("griddepcontrol.wait;" ::: "memory");
            w = start();
            while (next(w)) {
                for (u32 k = w.k0; k < w.k1; ++k, ++done) {
                    u32 stage = done % STAGES;
                    if (done >= ahead) {
                        barrier_wait(smem_address(&empty[stage]), (done / STAGES & 1) ^ 1);
                        weights(stage, w, k);
                    }
                    tokens(stage, w, k);
                }
            }
        }
    } else {
        if (WG > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((504 - PRODUCER_REGISTERS) / 2));
        asm volatile("griddepcontrol.wait;" ::: "memory");
        u32 group = warp / 4, lane = threadIdx.x % WARP;
        u32 done = 0;
        // Lane b tells block b of the cluster that this warp is through with a stage.
        auto release = [&](u32 stage) {
            if (lane < CL) barrier_arrive(smem_address(&empty[stage]), lane);
        };
        float* room = reinterpret_cast<float*>(rooms) + warp * Room<TOK>::FLOATS;
        u32 scales_of = ~0u;
        S d[TOK / 2];
        auto sum_up = [&](u32 from, u32 to) {
            for (u32 k = from; k < to; ++k, ++done) {
                u32 stage = done % STAGES;
                barrier_wait(smem_address(&full[stage]), done / STAGES & 1);
                u32 at = stages + stage * STAGE_BYTES;
                u64 wa = operand(at + group * TILE_BYTES), xb = operand(at + WG * TILE_BYTES);
                if constexpr (FORMAT == FP8) {
                    // The tensor cores keep only 14 bits or so of a sum of fp8 products: take it out after every block.
                    S block[TOK / 2];
                    multiply<FORMAT, TOK>(block, wa, xb, 0);
                    finish_products<0>();
                    release(stage);
#pragma unroll
                    for (int i = 0; i < TOK / 2; ++i) d[i] = k > from ? __fadd_rn(d[i], block[i]) : block[i];
                } else {
                    multiply<FORMAT, TOK>(d, wa, xb, k > from);
                    finish_products<1>();
                    if (k > from) release((done - 1) % STAGES);
                }
            }
            if constexpr (FORMAT != FP8) {
                finish_products<0>();
                release((done - 1) % STAGES);
            }
        };
        Walk w = start();
        while (next(w)) {
            u32 row = ((w.tile * CL + rank) * WG + group) * TILE_ROWS + warp % 4 * 16;
            if (w.token_tile != scales_of) load_scales<FORMAT, TOK>(a, w.token_tile * TOK, room);
            scales_of = w.token_tile;
            if (SCHEDULE == VIRTUAL) {
                S total[TOK / 2];
                u32 base = row / CUT_ROWS * kb, from = 0;
                for (u32 r = cut.holder(base); from < kb; ++r) {
                    u32 to = min(kb, cut.begin(r + 1) - base);
                    if (to <= from) continue;
                    sum_up(from, to);
#pragma unroll
                    for (int i = 0; i < TOK / 2; ++i) total[i] = from == 0 ? d[i] : total[i] + d[i];
                    from = to;
                }
                store<FORMAT, TOK>(a, total, row, w.token_tile * TOK, room);
            } else {
                sum_up(w.k0, w.k1);
                if (STREAMS && w.k1 - w.k0 < kb) {
                    meet<FORMAT, TOK, WARPS>(a, cut, d, w.tile, range, row, room);
                } else {
                    store<FORMAT, TOK>(a, d, row, w.token_tile * TOK, room);
                }
            }
        }
    }
    // No block may end while another of its cluster still sends to it.
    if (CL > 1) {
        __syncwarp();
        cluster_sync();
    }
}

// With two consumer warpgroups the producer is a warpgroup too, so that registers can change hands.
#define THREADS(wg) ((wg) > 1 ? (wg) * 128 + 128 : 160)
#define KERNEL(name, format, tok, wg, cl, schedule)                                                                  \
    extern "C" __global__ void __cluster_dims__(cl, 1, 1) __launch_bounds__(THREADS(wg), 1)                          \
        gemm_##name##_##tok##_##wg##_##cl##_##schedule(                                                              \
            const __grid_constant__ TensorMap map, const u8* weights, const float* w_scales, const float* x_scales,  \
            const float* bias, float* out, float4* partials, u32* counters, int tokens, int n, int k_blocks,         \
            int ranges, int add, int swiglu                                                                          \
        ) {                                                                                                          \
        GemmArgs args = {weights, w_scales, x_scales, bias,     out,    partials, counters,                          \
                         tokens,  n,        k_blocks, ranges,   add,    swiglu};                                     \
        gemm<format, tok, wg, cl, schedule>(map, args);                                                              \
    }
