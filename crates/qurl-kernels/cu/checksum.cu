// The checksum of src/checksum.rs: one thread for each chain of a block of values.
#include "common.cuh"

#define BLOCK 65536
#define CHAINS 8
#define SEED 0x6a09e667f3bcc908ull

__device__ __forceinline__ u64 rotate_left(u64 x, u32 by) { return (x << by) | (x >> (64 - by)); }

__device__ __forceinline__ u64 mix(u64 a, u64 b) {
    u64 x = (a ^ rotate_left(b, 32)) * 0x9fb21c651e98df25ull;
    x = ((x ^ (x >> 29)) + b) * 0xd6e8feb86659fd93ull;
    return x ^ (x >> 32);
}

// sums[block] of x[count]; a thread block takes several blocks, eight threads each.
extern "C" __global__ void __launch_bounds__(32) block_sums(const u32* x, u64 count, u64* sums) {
    u64 block = (u64)blockIdx.x * (blockDim.x / CHAINS) + threadIdx.x / CHAINS;
    u32 lane = threadIdx.x % CHAINS;
    u64 first = block * BLOCK;
    u64 values = first < count ? min(count - first, (u64)BLOCK) : 0;
    u64 rows = values / CHAINS;
    u64 chain = SEED + lane;
    const u32* from = x + first;
#pragma unroll 8
    for (u64 i = 0; i < rows; i++) chain = rotate_left((chain ^ (u64)from[i * CHAINS + lane]) * 0x9e3779b97f4a7c15ull, 29);
    u64 sum = SEED;
    for (u32 i = 0; i < CHAINS; i++) sum = mix(sum, __shfl_sync(FULL, chain, i, CHAINS));
    for (u64 i = rows * CHAINS; i < values; i++) sum = mix(sum, (u64)from[i]);
    if (lane == 0 && values > 0) sums[block] = sum;
}
