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
//           them up in order of k. Where every tile is cut into the same number of ranges and there are few tokens, the
//           blocks of a tile are a cluster and send each other the sums. The cut depends on (n, k) and the number of ranges, never on the tokens: neither do the bits.
//   TILES   whole tiles, for many tokens.
//   VIRTUAL whole tiles, but summed with the cuts of STREAM, for the same bits in floating point with many tokens.
//
// Weights do not depend on earlier kernels: launched with programmatic serialization, a block fills its stages with
// them while the kernel before it still runs.
#pragma once
#include "hopper.cuh"
#include "mma.cuh"

enum Format { BF16, INT8, FP8 };
enum Schedule { STREAM, TILES, VIRTUAL };

struct GemmArgs {
    const u8* weights;       // [n / 64][k_blocks][64][128 bytes]
    const float* w_scales;   // [n], or null
    const float* x_scales;   // [tokens], or null
    const float* bias;       // [n], or null
    float* out;              // [tokens, n]; with swiglu [tokens, n / 2], in bf16 if the product is
    float4* partials;        // STREAM: partial sums
    u32* counters;           // STREAM: 16 per range, zero between kernels
    int tokens, n, k_blocks;
    int ranges;              // STREAM, VIRTUAL: the number of ranges
    int add;                 // out += instead of out =
    int together;            // STREAM: ranges of a tile whose blocks are a cluster, or 1
    int swiglu;              // the first half of the rows are gates, the second ups: out = silu(gate) * up
};

// ---- products -----------------------------------------------------------------------------------------------------

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

// What a lane needs to finish results: it takes tokens lane / 4 + {0, 8, ..}, and of the warp's 16 rows four neighbours.
template <int FORMAT, int TOK>
struct Finish {
    float ws[4], bias[4];
    u32 width, left, row;
    u64 place;
    bool in;

    __device__ Finish(const GemmArgs& a, u32 first_row, u32 token) : row(first_row) {
        u32 quad = threadIdx.x % 4, eighth = threadIdx.x % WARP / 4;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            u32 r = row + quad * 4 + e;
            ws[e] = FORMAT != BF16 && r < a.n ? __ldg(a.w_scales + r) : 1.0f;
            bias[e] = a.bias && r < a.n ? __ldg(a.bias + r) : 0.0f;
        }
        width = a.swiglu ? a.n / 2 : a.n;
        place = (u64)(token + eighth) * width + row + quad * 4;
        left = a.tokens - token - eighth;
        in = row + quad * 4 < a.n;
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

    // Writes `count` tokens (Room::STEP at most, in eights) from `first` on that lie in the warp's room.
    __device__ void flush(const GemmArgs& a, float* room, u32 first, u32 count = Room<TOK>::STEP) const {
        const int STEP = Room<TOK>::STEP;
        u32 quad = threadIdx.x % 4, eighth = threadIdx.x % WARP / 4;
        float* from = room + eighth * TURN_ROW + quad * 4;
        const float* xs = room + STEP * TURN_ROW + first + eighth;
        u64 at = place + (u64)first * width;
        // With swiglu a warp of the second group leaves its ups in its room for the warp of the first that has the gates.
        bool gates = a.swiglu && threadIdx.x < 128, ups = a.swiglu && threadIdx.x >= 128;
        if (gates) pair_sync();
#pragma unroll
        for (int t = 0; t < STEP; t += 8, from += 8 * TURN_ROW, at += 8 * (u64)width) {
            if (t >= count) break;
            bool store = in && (int)left > (int)first + t;
            float x_scale = FORMAT != BF16 ? xs[t] : 1.0f;
            float4 four = *reinterpret_cast<const float4*>(from);
            float v[4] = {four.x, four.y, four.z, four.w};
            scale(a, v, x_scale);
            float4 result = {v[0], v[1], v[2], v[3]};
            float* to = a.out + at;
            if (ups) {
                *reinterpret_cast<float4*>(from) = result;
            } else if (gates) {
                float4 up = *reinterpret_cast<const float4*>(from + 4 * Room<TOK>::FLOATS);
                result = {silu_times(v[0], up.x), silu_times(v[1], up.y), silu_times(v[2], up.z), silu_times(v[3], up.w)};
                if (!store) continue;
                if (FORMAT == BF16) {
                    uint2 halves = {bf16_two(result.x, result.y), bf16_two(result.z, result.w)};
                    *reinterpret_cast<uint2*>(reinterpret_cast<u16*>(a.out) + at) = halves;
                } else {
                    *reinterpret_cast<float4*>(to) = result;
                }
            } else if (!store) {
                continue;
            } else if (a.n % 4 != 0) {
                for (int e = 0; e < 4 && row + quad * 4 + e < a.n; ++e) to[e] = a.add ? __fadd_rn(to[e], v[e]) : v[e];
            } else if (a.add) {
                // One addition per element: its order cannot vary.
                asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                             : "memory");
            } else {
                *reinterpret_cast<float4*>(to) = result;
            }
        }
        if (ups) pair_sync();
        if (a.swiglu) pair_sync();
    }

    // Waits for the warp of the other group.
    static __device__ __forceinline__ void pair_sync() {
        asm volatile("bar.sync %0, 64;" ::"r"(1 + threadIdx.x / WARP % 4) : "memory");
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
    // Gates and ups must be added up in the same block.
    const bool ALONE = TOK <= 16 && !a.swiglu;
    u32 lane = threadIdx.x % WARP;
    Meeting meeting(cut, tile, range);
    if (TOK <= 128 && meeting.adders == 1 && range == meeting.first) {
        // Two meet, and the later part was summed up long ago: this warp adds it to what it has.
        u32* arrived = a.counters + (meeting.first * WARPS + threadIdx.x / WARP) * 2;
        u32 seen = 0;
        while (lane == 0 && seen == 0) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory");
        __syncwarp();
        __threadfence();
        const float4* from = meeting.place<WARPS, QUADS>(a.partials, meeting.last);
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            float4 part = __ldcg(from + q * WARP);
            float bits[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                S more;
                from_bits(more, bits[e]);
                d[4 * q + e] = d[4 * q + e] + more;
            }
        }
        if (lane == 0) *arrived = 0;
        store<FORMAT, TOK>(a, d, row, 0, room);
        return;
    }
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
    if (TOK <= 128 && meeting.adders == 1) return;
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

// Sums of a tile whose ranges are the blocks of a cluster: each block adds up some tokens, in eights.
struct Exchange {
    u32 room;      // shared memory for what comes in: the stages of the weight stream, which all are through with
    u32 through;   // barrier: all warps of the cluster are
    u32 received;  // barrier: all sums have come in

    // The first of the eights that block `rank` of `blocks` adds up.
    static __device__ __forceinline__ u32 first_of(u32 eights, u32 rank, u32 blocks) { return eights * rank / blocks; }
};

template <int FORMAT, int TOK, int WARPS>
__device__ __forceinline__ void meet_in_cluster(
    const GemmArgs& a, typename Sum<FORMAT>::type (&d)[TOK / 2], const Exchange& exchange, u32 rank, u32 row, float* room
) {
    typedef typename Sum<FORMAT>::type S;
    const u32 EIGHTS = TOK / 8, MOST = EIGHTS / 2;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, blocks = a.together;
    // Where the sums of a block's eight lie.
    auto place = [&](u32 from, u32 eight) { return exchange.room + (((from * MOST + eight) * WARPS + warp) * WARP + lane) * 16; };
    if (lane < blocks) barrier_arrive(exchange.through, lane);
    barrier_wait(exchange.through, 0);
#pragma unroll
    for (u32 q = 0; q < EIGHTS; ++q) {
        u32 owner = ((q + 1) * blocks - 1) / EIGHTS;
        if (owner == rank) continue;
        u32 to = place(rank, q - Exchange::first_of(EIGHTS, owner, blocks));
        send(to, exchange.received, owner, sum_bits(d[4 * q]), sum_bits(d[4 * q + 1]), sum_bits(d[4 * q + 2]), sum_bits(d[4 * q + 3]));
    }
    barrier_wait(exchange.received, 0);
    u32 first = Exchange::first_of(EIGHTS, rank, blocks), count = Exchange::first_of(EIGHTS, rank + 1, blocks) - first;
    if (count == 0) return;
    Finish<FORMAT, TOK> finish(a, row, 0);
    __syncwarp();
#pragma unroll
    for (u32 q = 0; q < EIGHTS; ++q) {
        if (q < first || q >= first + count) continue;
        S total[4];
        for (u32 from = 0; from < blocks; ++from) {
            float bits[4] = {sum_bits(d[4 * q]), sum_bits(d[4 * q + 1]), sum_bits(d[4 * q + 2]), sum_bits(d[4 * q + 3])};
            if (from != rank) {
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(bits[0]), "=f"(bits[1]), "=f"(bits[2]), "=f"(bits[3]) : "r"(place(from, q - first)) : "memory");
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                S more;
                from_bits(more, bits[e]);
                total[e] = from == 0 ? more : total[e] + more;
            }
        }
        turn(room, (q - first) * 8, total[0], total[1], total[2], total[3]);
    }
    __syncwarp();
    finish.flush(a, room, first * 8, count * 8);
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
    __shared__ u64 full[STAGES], empty[STAGES], through, received;
    const bool FEW = STREAMS && TOK <= 64;
    bool together = FEW && a.together > 1;
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
        if (together) {
            u32 place = blockIdx.x % a.together;
            u32 eights = Exchange::first_of(TOK / 8, place + 1, a.together) - Exchange::first_of(TOK / 8, place, a.together);
            barrier_init(smem_address(&through), WARPS * a.together);
            barrier_init(smem_address(&received), 1);
            barrier_expect(smem_address(&received), eights * (a.together - 1) * WARPS * WARP * 16);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (CL > 1 || together) {
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
    // The 64 rows of a warpgroup: with swiglu the second takes the ups of the first one's gates.
    auto strip_of = [&](u32 tile, u32 group) {
        u32 at = tile * CL + rank;
        return WG > 1 && a.swiglu ? at + group * (strips / 2) : at * WG + group;
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
                    u32 strip = min(strip_of(w.tile, g), strips - 1);
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
            if (CL == 1 && lane == 0) barrier_arrive(smem_address(&empty[stage]));
            if (CL > 1 && lane < CL) barrier_arrive(smem_address(&empty[stage]), lane);
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
            u32 row = strip_of(w.tile, group) * TILE_ROWS + warp % 4 * 16;
            if (w.token_tile != scales_of) load_scales<FORMAT, TOK>(a, w.token_tile * TOK, room);
            scales_of = w.token_tile;
            if (SCHEDULE == VIRTUAL) {
                S total[TOK / 2];
                u32 base = (WG > 1 ? w.tile * CL + rank : row / CUT_ROWS) * kb, from = 0;
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
                if (together) {
                    if constexpr (FEW) {
                        Exchange exchange = {stages, smem_address(&through), smem_address(&received)};
                        meet_in_cluster<FORMAT, TOK, WARPS>(a, d, exchange, blockIdx.x % a.together, row, room);
                    }
                } else if (STREAMS && w.k1 - w.k0 < kb) {
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
// Of a stream the launch says which blocks are a cluster.
#define CLUSTER_1
#define CLUSTER_2 __cluster_dims__(2, 1, 1)
#define KERNEL(name, format, tok, wg, cl, schedule)                                                                  \
    extern "C" __global__ void CLUSTER_##cl __launch_bounds__(THREADS(wg), 1)                          \
        gemm_##name##_##tok##_##wg##_##cl##_##schedule(                                                              \
            const __grid_constant__ TensorMap map, const u8* weights, const float* w_scales, const float* x_scales,  \
            const float* bias, float* out, float4* partials, u32* counters, int tokens, int n, int k_blocks,         \
            int ranges, int add, int swiglu, int together                                                            \
        ) {                                                                                                          \
        GemmArgs args = {weights, w_scales, x_scales, bias,   out, partials, counters,                               \
                         tokens,  n,        k_blocks, ranges, add, together, swiglu};                                \
        gemm<format, tok, wg, cl, schedule>(map, args);                                                              \
    }
