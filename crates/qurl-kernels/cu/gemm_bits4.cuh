// What gemm_hopper.cuh does with weights in four bits: codes come to shared memory as they lie (bits4.cuh),
// become left operands in registers, and never go back. A k-block is 128 of k, two boxes of tokens. While the
// MMAs of one half of it run, the other half is decoded.
#pragma once
#include "bits4.cuh"
#include "hopper.cuh"

// d += 64 rows of weights . TOK tokens over 64 of k, weights in registers; asynchronous.
template <int TOK>
__device__ __forceinline__ void multiply_half(float (&d)[TOK / 2], const u32 (&a)[4][4], u64 xb, int go_on) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_left<TOK>(d, a[step], xb + step * 2, go_on | step);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// A lane's half of a tile as left operands; `tile` is the tile in shared memory, `warp` the strip of 16 rows.
template <int FORMAT>
__device__ __forceinline__ void load_half(u32 tile, u32 warp, u32 lane, int half, u32 (&a)[4][4]) {
    uint4 words = shared_words(tile + half * HALF_BYTES + (warp * WARP + lane) * 16);
    uint2 scales = {0, 0};
    if constexpr (FORMAT == NVFP4) {
        u32 from = tile + 2 * HALF_BYTES + (warp * 8 + lane / 4) * 16 + half * 8;
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(scales.x), "=r"(scales.y) : "r"(from)
                     : "memory");
    }
    decode<FORMAT>(words, scales.x, scales.y, a);
}

// The scales of a lane's two rows in a tile of int4.
__device__ __forceinline__ float2 row_scales(u32 tile, u32 warp, u32 lane) {
    return shared_two(tile + 2 * HALF_BYTES + (warp * 8 + lane / 4) * 8);
}
