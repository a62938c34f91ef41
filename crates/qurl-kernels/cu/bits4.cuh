// Weights in four bits: how their tiles lie, and how codes become bf16.
//
// A tile is 64 rows x 128 of k. It lies as the MMAs want their left operand in registers: [2 halves of k][4
// strips of 16 rows][32 lanes][4 words], then its scales. A word is what a lane holds of 16 rows x 16 of k,
// four registers of two neighbours along k: register i has row lane / 4 + 8 (i % 2) and columns 2 (lane % 4)
// + 8 (i / 2) + {0, 1}, those of even columns in the lower half of the word. Bits of a half:
//
//   int4   register i at bits 4 i .. 4 i + 3, 8 too large (never negative)
//   nvfp4  register   sign   magnitude, from its highest bit on: those of 0, 1 and 2 fall into the places of
//          0          15     8 7 6      a bf16 by one shift
//          1          12     5 4 3
//          2          9      2 1 0
//          3          14     13 11 10
//
// Scales of a tile, rows in pairs (r, r + 8) as a lane needs them:
//
//   int4   [4 strips][8 pairs][2] in f32
//   nvfp4  [4 strips][8 pairs][8 sixteens of k][2] bytes: five bits of exponent and three of mantissa, which
//          are the bits of a bf16 (without sign) that is 2^118 too large, from its fourth on
//
// A decoded number of nvfp4 is the product of code and scale, exact in bf16, and 2^8 too small
// (NVFP4_FACTOR).
#pragma once
#include "common.cuh"
#include "gemm_sums.cuh"

// Bytes of the codes of half a tile.
const int HALF_BYTES = TILE_ROWS * BITS4_DEPTH / 4;
const float NVFP4_FACTOR = 256.0f;

template <int FORMAT>
struct Bits4 {
    static constexpr int TILE = FORMAT == INT4 ? INT4_TILE : NVFP4_TILE, SCALES = TILE - 2 * HALF_BYTES;
};

// x * y + z of two neighbours.
__device__ __forceinline__ u32 fma_two(u32 x, u32 y, u32 z) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
    return r;
}

// The four registers of a word of int4: 128 + code are the bits 0x4300 + code, and 136 goes again.
__device__ __forceinline__ void decode_int4(u32 word, u32 (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        a[i] = fma_two(((word >> (4 * i)) & 0x000f000fu) | 0x43004300u, 0x3f803f80u, 0xc308c308u);
}

// Those of a word of nvfp4, times the scales of rows r and r + 8 (each in both halves). A code in the fields
// of a bf16 is 2^126 too small.
__device__ __forceinline__ void decode_nvfp4(u32 word, u32 low, u32 high, u32 (&a)[4]) {
    const u32 FIELDS = 0x81c081c0u, MINUS_ZERO = 0x80008000u;
    a[0] = fma_two(word & FIELDS, low, MINUS_ZERO);
    a[1] = fma_two((word << 3) & FIELDS, high, MINUS_ZERO);
    a[2] = fma_two((word << 6) & FIELDS, low, MINUS_ZERO);
    u32 last = ((word >> 4) & 0x00c000c0u) | ((word >> 5) & 0x01000100u) | ((word << 1) & 0x80008000u);
    a[3] = fma_two(last, high, MINUS_ZERO);
}

// The scales of two sixteens of k: those of row r, then those of row r + 8, the first in the lower half.
__device__ __forceinline__ void nvfp4_scales(u32 bytes, u32& low, u32& high) {
    low = ((bytes << 4) & 0x0ff00ff0u) | 0x70007000u;
    high = ((bytes >> 4) & 0x0ff00ff0u) | 0x70007000u;
}
// One half of a register in both.
__device__ __forceinline__ u32 twice(u32 x, int half) { return __byte_perm(x, 0, half ? 0x3232 : 0x1010); }

__device__ __forceinline__ uint4 shared_words(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ float2 shared_two(u32 address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

// A lane's part of half a tile, 64 of k, as left operands. `words` are its codes; of nvfp4 `scales` are those
// of the half for its rows.
template <int FORMAT>
__device__ __forceinline__ void decode(uint4 words, u32 scales0, u32 scales1, u32 (&a)[4][4]) {
    const u32 w[4] = {words.x, words.y, words.z, words.w};
    if constexpr (FORMAT == INT4) {
#pragma unroll
        for (int step = 0; step < 4; ++step) decode_int4(w[step], a[step]);
    } else {
#pragma unroll
        for (int step = 0; step < 4; step += 2) {
            u32 low, high;
            nvfp4_scales(step == 0 ? scales0 : scales1, low, high);
            decode_nvfp4(w[step], twice(low, 0), twice(high, 0), a[step]);
            decode_nvfp4(w[step + 1], twice(low, 1), twice(high, 1), a[step + 1]);
        }
    }
}
