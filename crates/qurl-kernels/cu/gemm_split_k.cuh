// Ranges of a weight stream that share a tile, and the split-K reduction of their partial sums: see
// gemm_hopper.cuh.
//
// A matrix is cut into ranges of k-blocks of 256 rows, equal in length whatever the tiles. A range is two
// blocks of threads, one for each half of the rows. The cut depends on (n, k) and the number of ranges alone,
// and sums are added in order of k, so a row's bits do not depend on how many others there are.
#pragma once
#include "gemm_store.cuh"

// ---- the cut of a matrix into ranges ----------------------------------------------------------------------

// A unit is one k-block of CUT_ROWS rows. (units * ranges fits into 32 bits: the host sees to it.)
struct Cut {
    u32 units, ranges, k_blocks;
    __device__ u32 begin(u32 range) const { return units * range / ranges; }
    // The range that holds a unit.
    __device__ u32 holder(u32 unit) const { return ((unit + 1) * ranges - 1) / units; }
};

// The ranges that a tile is made of: MAX_PARTS at most.
struct SplitTile {
    u32 first, last;  // all
    u32 second;       // whether the tile is the second that `first` has only a part of
    u32 adders;       // so many, from `first` on, add up the sums of some tokens each

    // A range that continues in the next tile must not wait for those that end here.
    __device__ SplitTile(const Cut& cut, u32 tile) {
        u32 begin = tile * cut.k_blocks, end = begin + cut.k_blocks;
        first = cut.holder(begin);
        last = cut.holder(end - 1);
        second = cut.begin(first) < begin ? 1 : 0;
        adders = last - first + (cut.begin(last + 1) > end ? 0 : 1);
    }
    // Where a warp's lane publishes partial sums of `quads` x 4 numbers.
    template <int WARPS, int QUADS>
    __device__ uint4* place(uint4* partials, u32 range) const {
        u32 slot = (2 * range + (range == first ? second : 0)) * SIDES + blockIdx.x % SIDES;
        return partials + ((u64)slot * WARPS + threadIdx.x / WARP) * QUADS * WARP + threadIdx.x % WARP;
    }
};

// ---- partial sums from block to block ---------------------------------------------------------------------

// Sums never have the bits of EMPTY: as integers they are too small for it; as floating-point numbers they
// would be a NaN, and another NaN goes in its place.
__device__ __forceinline__ u32 published_bits(float x) { return min(__float_as_uint(x), EMPTY - 1); }
__device__ __forceinline__ u32 published_bits(int x) { return (u32)x ^ 0x80000000u; }
__device__ __forceinline__ void received(float& to, u32 bits) { to = __uint_as_float(bits); }
__device__ __forceinline__ void received(int& to, u32 bits) { to = (int)(bits ^ 0x80000000u); }

__device__ __forceinline__ void publish_four(uint4* at, uint4 v) {
    asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ uint4 peek_four(const uint4* at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

// The sums that RANGES ranges from `range` on have published, of EIGHTS x 8 tokens from `first_eight` on, or
// of the first `some` eights; past the last range or eight that one is read again.
template <int WARPS, int QUADS, int RANGES, int EIGHTS>
__device__ __forceinline__ void receive(
    const SplitTile& split, uint4* partials, u32 range, u32 first_eight, u32 some, uint4 (&v)[RANGES][EIGHTS]
) {
    uint4* from[RANGES];
#pragma unroll
    for (int r = 0; r < RANGES; ++r)
        from[r] = split.place<WARPS, QUADS>(partials, min(range + r, split.last));
    auto at = [&](u32 q) { return (first_eight + min(q, some - 1)) * WARP; };
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int r = 0; r < RANGES; ++r) {
#pragma unroll
            for (int q = 0; q < EIGHTS; ++q) v[r][q] = peek_four(from[r] + at(q));
        }
#pragma unroll
        for (int r = 0; r < RANGES; ++r) {
#pragma unroll
            for (int q = 0; q < EIGHTS; ++q)
                missing |= max(max(v[r][q].x, v[r][q].y), max(v[r][q].z, v[r][q].w)) == EMPTY;
        }
    } while (__any_sync(FULL, missing));
#pragma unroll
    for (int r = 0; r < RANGES; ++r) {
#pragma unroll
        for (int q = 0; q < EIGHTS; ++q)
            publish_four(from[r] + at(q), make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
    }
}

// ---- reduction --------------------------------------------------------------------------------------------

// Two ranges share a tile of which the later continues in the next: the earlier one adds what the other
// published long ago to what it has, and has the results.
template <int FORMAT, int TOK, int WARPS>
__device__ __forceinline__ void add_published(
    const GemmArgs& a, const SplitTile& split, typename Sum<FORMAT>::type (&d)[TOK / 2]
) {
    const int QUADS = TOK / 8, EIGHTS = QUADS < 16 ? QUADS : 16;
#pragma unroll
    for (int first = 0; first < QUADS; first += EIGHTS) {
        uint4 part[1][EIGHTS];
        receive<WARPS, QUADS>(split, a.partials, split.last, first, EIGHTS, part);
#pragma unroll
        for (int q = 0; q < EIGHTS; ++q) {
            u32 bits[4] = {part[0][q].x, part[0][q].y, part[0][q].z, part[0][q].w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                typename Sum<FORMAT>::type more;
                received(more, bits[e]);
                d[4 * (first + q) + e] = d[4 * (first + q) + e] + more;
            }
        }
    }
}

// What RANGES ranges have published of EIGHTS x 8 tokens, or the first `some` eights of them, added up in
// order of k and transposed in the warp's buffer.
template <int FORMAT, int TOK, int WARPS, int RANGES, int EIGHTS>
__device__ __forceinline__ void gather(
    const GemmArgs& a, const SplitTile& split, u32 first_eight, u32 some, float* buffer
) {
    typedef typename Sum<FORMAT>::type S;
    uint4 part[RANGES][EIGHTS];
    receive<WARPS, TOK / 8>(split, a.partials, split.first, first_eight, some, part);
    __syncwarp();
#pragma unroll
    for (int q = 0; q < EIGHTS; ++q) {
        S total[4];
#pragma unroll
        for (u32 r = 0; r < RANGES; ++r) {
            if (split.first + r > split.last) break;
            u32 bits[4] = {part[r][q].x, part[r][q].y, part[r][q].z, part[r][q].w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                S more;
                received(more, bits[e]);
                total[e] = r == 0 ? more : total[e] + more;
            }
        }
        transpose(buffer, 8 * q, total[0], total[1], total[2], total[3]);
    }
    __syncwarp();
}

// Every range publishes its sums in memory, and those that end here share the tokens. All blocks run at the
// same time, and those that wait have no other work left.
template <int FORMAT, int TOK, int WARPS>
__device__ __forceinline__ void reduce_split_k(
    const GemmArgs& a, const Finish<FORMAT, TOK>& finish, const SplitTile& split,
    typename Sum<FORMAT>::type (&d)[TOK / 2], u32 range, float* buffer
) {
    const int QUADS = TOK / 8;
    uint4* mine = split.place<WARPS, QUADS>(a.partials, range);
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
        publish_four(
            mine + q * WARP, make_uint4(
                                 published_bits(d[4 * q]), published_bits(d[4 * q + 1]),
                                 published_bits(d[4 * q + 2]), published_bits(d[4 * q + 3])
                             )
        );
    }
    u32 me = range - split.first;
    if (split.adders == 1 || me >= split.adders) return;
    // Tokens that are finished at a time.
    const int STEP = TOK < 128 ? 16 : 32, STRETCHES = TOK / STEP;
    if constexpr (TOK == 64) {
        // All of its tokens in one round trip: up to four eights of two ranges, three of three, two of four.
        // (As many add as share: the ranges of a tile end with it, or one of two continues and the other adds
        // alone.)
        u32 first = QUADS * me / split.adders, some = QUADS * (me + 1) / split.adders - first;
        if (split.last - split.first == 1) {
            gather<FORMAT, TOK, WARPS, 2, 4>(a, split, first, some, buffer);
        } else if (split.last - split.first == 2) {
            gather<FORMAT, TOK, WARPS, 3, 3>(a, split, first, some, buffer);
        } else {
            gather<FORMAT, TOK, WARPS, 4, 2>(a, split, first, some, buffer);
        }
#pragma unroll 1
        for (u32 at = 0; at < 8 * some; at += STEP)
            finish.template flush<STEP>(a, buffer, 8 * first + at, at, 8 * some - at);
    } else {
#pragma unroll 1
        for (u32 stretch = STRETCHES * me / split.adders; stretch < STRETCHES * (me + 1) / split.adders;
             ++stretch) {
            gather<FORMAT, TOK, WARPS, MAX_PARTS, STEP / 8>(a, split, stretch * (STEP / 8), STEP / 8, buffer);
            finish.template flush<STEP>(a, buffer, stretch * STEP);
        }
    }
}
