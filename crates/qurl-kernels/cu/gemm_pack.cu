// Packs rows of weights (bf16 or eight bits) into the tiles that the GEMMs read: [n / 64][k-block][64
// rows][128 bytes], the 16-byte chunk c of row r at chunk c ^ (r % 8), rows and columns past the end zero.
#include "common.cuh"
#include "mma.cuh"

// A chunk of the tiles: the row it is of, and its first byte there.
struct Chunk {
    u64 at;
    u32 row, byte;
    bool exists;

    // One thread has one chunk.
    __device__ Chunk(u32 n, u32 k_blocks) {
        at = (u64)blockIdx.x * 256 + threadIdx.x;
        u32 place = at % 8, row_in_tile = at / 8 % 64;
        u64 tile = at / 512;
        row = tile / k_blocks * 64 + row_in_tile;
        byte = tile % k_blocks * 128 + (place ^ (row_in_tile & 7)) * 16;
        exists = at < (u64)((n + 63) / 64) * k_blocks * 512;
    }
};

extern "C" __global__ void __launch_bounds__(256) gemm_pack(
    const u8* rows, u8* tiles, u32 n, u32 row_bytes, u32 k_blocks
) {
    Chunk chunk(n, k_blocks);
    if (!chunk.exists) return;
    uint4 value = {0, 0, 0, 0};
    if (chunk.row < n && chunk.byte < row_bytes)
        value = *reinterpret_cast<const uint4*>(rows + (u64)chunk.row * row_bytes + chunk.byte);
    reinterpret_cast<uint4*>(tiles)[chunk.at] = value;
}

// Weights [n, k] in f32 are rounded to bf16 on the way; rows[n, k] takes them, too, unless it is null. A row
// is a number of whole chunks.
extern "C" __global__ void __launch_bounds__(256) gemm_pack_bf16(
    const float* weights, u16* rows, u8* tiles, u32 n, u32 k, u32 k_blocks
) {
    Chunk chunk(n, k_blocks);
    if (!chunk.exists) return;
    u32 column = chunk.byte / 2;
    uint4 value = {0, 0, 0, 0};
    if (chunk.row < n && column < k) {
        u64 at = (u64)chunk.row * k + column;
        const float4* from = reinterpret_cast<const float4*>(weights + at);
        float4 a = from[0], b = from[1];
        value = make_uint4(
            bf16_pair(a.x, a.y), bf16_pair(a.z, a.w), bf16_pair(b.x, b.y), bf16_pair(b.z, b.w)
        );
        if (rows) *reinterpret_cast<uint4*>(rows + at) = value;
    }
    reinterpret_cast<uint4*>(tiles)[chunk.at] = value;
}
