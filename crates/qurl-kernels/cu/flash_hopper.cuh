// What the attention kernels of Hopper share: MMAs of tiles of 64 rows that lie in halves of 64 columns, 128
// bytes a row, swizzled. The same tile is an operand by its rows (scores) and by its columns (weighted sums).
// Left operands of weighted sums come from registers, where the MMA of the scores has left them.
#pragma once
#include "hopper.cuh"
#include "mma.cuh"

const int FLASH_ROWS = 64;
// Bytes of half a tile.
const int HALF = FLASH_ROWS * 128;

// d += left . right: 64 rows in registers by 16 columns, and a tile's N columns of 16 rows. The registers are
// the caller's own, since the MMA still reads them when this returns.
template <int N>
__device__ __forceinline__ void wgmma_across(float (&d)[N / 2], const u32* a, u64 right) {
    if constexpr (N == 64) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" REGS32
                     "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                     : SUMS32("+f", 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REGS64
                     "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                     : SUMS64("+f", 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right));
    }
}

// A tile as an operand whose columns are the result's: halves lie HALF bytes apart.
__device__ __forceinline__ u64 operand_across(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(HALF >> 4) << 16 | (u64)64 << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Nothing that uses these may be moved before this.
template <int COUNT>
__device__ __forceinline__ void pin(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d = 64 rows of one tile . 64 rows of another; asynchronous.
template <int HD>
__device__ __forceinline__ void scores(float (&d)[FLASH_ROWS / 2], u32 left, u32 right) {
#pragma unroll
    for (int k = 0; k < HD / 16; ++k) {
        u32 at = k / 4 * HALF + k % 4 * 32;
        wgmma_bf16<FLASH_ROWS>(d, operand(left + at), operand(right + at), k > 0);
    }
    commit_products();
}

// The numbers of 64 x 64 scores as left operands.
struct Left {
    u32 a[FLASH_ROWS / 4];
    __device__ __forceinline__ void take(const float (&p)[FLASH_ROWS / 2]) {
#pragma unroll
        for (int i = 0; i < FLASH_ROWS / 4; ++i) a[i] = bf16_two(p[2 * i], p[2 * i + 1]);
    }
};

// sum += left . tile; asynchronous.
template <int HD>
__device__ __forceinline__ void accumulate(float (&sum)[HD / 2], const Left& left, u32 tile) {
#pragma unroll
    for (int k = 0; k < FLASH_ROWS / 16; ++k)
        wgmma_across<HD>(sum, left.a + 4 * k, operand_across(tile + k * 16 * 128));
    commit_products();
}

// Brings HD columns of as many rows as the map's boxes have.
template <int HD>
__device__ __forceinline__ void bring(u32 to, const TensorMap* map, u32 column, u32 row, u32 barrier) {
#pragma unroll
    for (int half = 0; half < HD / 64; ++half)
        copy_tokens<1>(to + half * HALF, map, column * 2 + half * 128, row, barrier);
}
