// Packs rows of weights (bf16 or eight bits) into the tiles that the GEMMs read: [n / 64][k-block][64
// rows][128 bytes], the 16-byte chunk c of row r at chunk c ^ (r % 8), rows and columns past the end zero.
#include "common.cuh"

// One thread moves one chunk.
extern "C" __global__ void __launch_bounds__(256) gemm_pack(
    const u8* rows, u8* tiles, int n, int row_bytes, int k_blocks
) {
    u64 chunk = (u64)blockIdx.x * 256 + threadIdx.x;
    u64 chunks = (u64)((n + 63) / 64) * k_blocks * 512;
    if (chunk >= chunks) return;
    u32 place = chunk % 8, row_in_tile = chunk / 8 % 64;
    u64 tile = chunk / 512;
    u32 row = tile / k_blocks * 64 + row_in_tile;
    u32 column = tile % k_blocks * 128 + (place ^ (row_in_tile & 7)) * 16;
    uint4 value = {0, 0, 0, 0};
    if (row < n && column < row_bytes) {
        value = *reinterpret_cast<const uint4*>(rows + (u64)row * row_bytes + column);
    }
    reinterpret_cast<uint4*>(tiles)[chunk] = value;
}
