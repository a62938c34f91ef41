// The checksum of src/checksum.rs: one thread for each chain of a block of values.
#include "common.cuh"


__device__ __forceinline__ u64 rotate_left(u64 x, u32 by) { return (x << by) | (x >> (64 - by)); }

__device__ __forceinline__ u64 mix(u64 a, u64 b) {
    u64 x = (a ^ rotate_left(b, 32)) * 0x9fb21c651e98df25ull;
    x = ((x ^ (x >> 29)) + b) * 0xd6e8feb86659fd93ull;
    return x ^ (x >> 32);
}

// sums[block] of x[count]; a thread block takes several blocks, eight threads each.
extern "C" __global__ void __launch_bounds__(32) block_sums(const u32* x, u64 count, u64* sums) {
    u64 block = (u64)blockIdx.x * (blockDim.x / CHECKSUM_CHAINS) + threadIdx.x / CHECKSUM_CHAINS;
    u32 lane = threadIdx.x % CHECKSUM_CHAINS;
    u64 first = block * CHECKSUM_BLOCK;
    u64 values = first < count ? min(count - first, (u64)CHECKSUM_BLOCK) : 0;
    u64 rows = values / CHECKSUM_CHAINS;
    u64 chain = CHECKSUM_SEED + lane;
    const u32* from = x + first;
#pragma unroll 8
    for (u64 i = 0; i < rows; i++)
        chain = rotate_left((chain ^ (u64)from[i * CHECKSUM_CHAINS + lane]) * 0x9e3779b97f4a7c15ull, 29);
    u64 sum = CHECKSUM_SEED;
    for (u32 i = 0; i < CHECKSUM_CHAINS; i++) sum = mix(sum, __shfl_sync(FULL, chain, i, CHECKSUM_CHAINS));
    for (u64 i = rows * CHECKSUM_CHAINS; i < values; i++) sum = mix(sum, (u64)from[i]);
    if (lane == 0 && values > 0) sums[block] = sum;
}
