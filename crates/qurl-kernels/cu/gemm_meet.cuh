// Ranges of a weight stream that meet in a tile, and how their partial sums come together: see gemm_hopper.cuh.
//
// A matrix is cut into ranges of k-blocks of 256 rows, equal in length whatever the tiles. A range is two blocks of threads,
// one for each half of the rows. The cut depends on (n, k) and the number of ranges alone, and sums are added in order of
// k, so a row's bits do not depend on how many others there are.
#pragma once
#include "gemm_store.cuh"

// ---- the cut of a matrix into ranges -----------------------------------------------------------------------------

const u32 CUT_ROWS = 256;
// Blocks of threads of a range.
const u32 SIDES = 2;

// A unit is one k-block of CUT_ROWS rows. (units * ranges fits into 32 bits: the host sees to it.)
struct Cut {
    u32 units, ranges, k_blocks;
    __device__ u32 begin(u32 range) const { return units * range / ranges; }
    // The range that holds a unit.
    __device__ u32 holder(u32 unit) const { return ((unit + 1) * ranges - 1) / units; }
};

// The ranges that meet in a tile: MOST_MEET at most.
const int MOST_MEET = 4;
struct Meeting {
    u32 first, last;  // all
    u32 second;       // whether the tile is the second that `first` has only a part of
    u32 adders;       // so many, from `first` on, add up the sums of some tokens each

    // A range that goes on to the next tile must not wait for those that end here.
    __device__ Meeting(const Cut& cut, u32 tile) {
        u32 begin = tile * cut.k_blocks, end = begin + cut.k_blocks;
        first = cut.holder(begin);
        last = cut.holder(end - 1);
        second = cut.begin(first) < begin ? 1 : 0;
        adders = last - first + (cut.begin(last + 1) > end ? 0 : 1);
    }
    // Where a warp's lane leaves partial sums of `quads` x 4 numbers.
    template <int WARPS, int QUADS>
    __device__ uint4* place(uint4* partials, u32 range) const {
        u32 slot = (2 * range + (range == first ? second : 0)) * SIDES + blockIdx.x % SIDES;
        return partials + ((u64)slot * WARPS + threadIdx.x / WARP) * QUADS * WARP + threadIdx.x % WARP;
    }
};

// ---- partial sums on their way from block to block ---------------------------------------------------------------

// Sums never have the bits of EMPTY: as integers they are too small for it; as floating-point numbers they would be a
// not-a-number, and another one goes in its place.
__device__ __forceinline__ u32 on_the_way(float x) { return min(__float_as_uint(x), EMPTY - 1); }
__device__ __forceinline__ u32 on_the_way(int x) { return (u32)x ^ 0x80000000u; }
__device__ __forceinline__ void arrived(float& to, u32 bits) { to = __uint_as_float(bits); }
__device__ __forceinline__ void arrived(int& to, u32 bits) { to = (int)(bits ^ 0x80000000u); }

__device__ __forceinline__ void leave(uint4* at, uint4 v) {
    asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ uint4 look(const uint4* at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

// The sums of EIGHTS x 8 tokens that ranges from `range` on have left, RANGES of them (past the last one it is read again).
template <int WARPS, int QUADS, int RANGES, int EIGHTS>
__device__ __forceinline__ void take(
    const Meeting& meeting, uint4* partials, u32 range, u32 first_eight, uint4 (&v)[RANGES][EIGHTS]
) {
    uint4* from[RANGES];
#pragma unroll
    for (int r = 0; r < RANGES; ++r) {
        from[r] = meeting.place<WARPS, QUADS>(partials, min(range + r, meeting.last)) + first_eight * WARP;
    }
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int r = 0; r < RANGES; ++r) {
#pragma unroll
            for (int q = 0; q < EIGHTS; ++q) v[r][q] = look(from[r] + q * WARP);
        }
#pragma unroll
        for (int r = 0; r < RANGES; ++r) {
#pragma unroll
            for (int q = 0; q < EIGHTS; ++q) missing |= max(max(v[r][q].x, v[r][q].y), max(v[r][q].z, v[r][q].w)) == EMPTY;
        }
    } while (__any_sync(FULL, missing));
#pragma unroll
    for (int r = 0; r < RANGES; ++r) {
#pragma unroll
        for (int q = 0; q < EIGHTS; ++q) leave(from[r] + q * WARP, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
    }
}

// ---- coming together ---------------------------------------------------------------------------------------------

// Two ranges meet of which the later goes on to the next tile: the earlier one adds what the other has left long ago to
// what it has, and has the results.
template <int FORMAT, int TOK, int WARPS>
__device__ __forceinline__ void add_left(const GemmArgs& a, const Meeting& meeting, typename Sum<FORMAT>::type (&d)[TOK / 2]) {
    const int QUADS = TOK / 8, EIGHTS = QUADS < 16 ? QUADS : 16;
#pragma unroll
    for (int first = 0; first < QUADS; first += EIGHTS) {
        uint4 part[1][EIGHTS];
        take<WARPS, QUADS>(meeting, a.partials, meeting.last, first, part);
#pragma unroll
        for (int q = 0; q < EIGHTS; ++q) {
            u32 bits[4] = {part[0][q].x, part[0][q].y, part[0][q].z, part[0][q].w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                typename Sum<FORMAT>::type more;
                arrived(more, bits[e]);
                d[4 * (first + q) + e] = d[4 * (first + q) + e] + more;
            }
        }
    }
}

// Every range leaves its sums in memory, and those that end here share the tokens. All blocks run at the same time, and
// those that wait have no other work left.
template <int FORMAT, int TOK, int WARPS>
__device__ __forceinline__ void meet(
    const GemmArgs& a, const Finish<FORMAT, TOK>& finish, const Meeting& meeting, typename Sum<FORMAT>::type (&d)[TOK / 2], u32 range, float* room
) {
    typedef typename Sum<FORMAT>::type S;
    const int QUADS = TOK / 8;
    uint4* mine = meeting.place<WARPS, QUADS>(a.partials, range);
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
        leave(mine + q * WARP, make_uint4(on_the_way(d[4 * q]), on_the_way(d[4 * q + 1]), on_the_way(d[4 * q + 2]), on_the_way(d[4 * q + 3])));
    }
    u32 me = range - meeting.first;
    if (meeting.adders == 1 || me >= meeting.adders) return;
    // Tokens that are added up at a time.
    const int STEP = TOK < 128 ? 16 : 32, STRETCHES = TOK / STEP;
#pragma unroll 1
    for (u32 stretch = STRETCHES * me / meeting.adders; stretch < STRETCHES * (me + 1) / meeting.adders; ++stretch) {
        uint4 part[MOST_MEET][STEP / 8];
        take<WARPS, QUADS>(meeting, a.partials, meeting.first, stretch * (STEP / 8), part);
        S total[STEP / 2];
#pragma unroll
        for (u32 r = 0; r < MOST_MEET; ++r) {
            if (meeting.first + r > meeting.last) break;
#pragma unroll
            for (int q = 0; q < STEP / 8; ++q) {
                u32 bits[4] = {part[r][q].x, part[r][q].y, part[r][q].z, part[r][q].w};
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    S more;
                    arrived(more, bits[e]);
                    total[4 * q + e] = r == 0 ? more : total[4 * q + e] + more;
                }
            }
        }
        __syncwarp();
#pragma unroll
        for (int t = 0; t < STEP; t += 8) turn(room, t, total[t / 2], total[t / 2 + 1], total[t / 2 + 2], total[t / 2 + 3]);
        __syncwarp();
        finish.template flush<STEP>(a, room, stretch * STEP);
    }
}
