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

// How a byte, or two, of weights is read.
struct Bf16Code {
    static constexpr u32 BYTES = 2;
    static __device__ __forceinline__ float value(const u8* p) { return bf16_value(*(const u16*)p); }
};
struct Int8Code {
    static constexpr u32 BYTES = 1;
    static __device__ __forceinline__ float value(const u8* p) { return (float)(signed char)*p; }
};
struct E4m3Code {
    static constexpr u32 BYTES = 1;
    static __device__ __forceinline__ float value(const u8* p) { return e4m3_value(*p); }
};

// The numbers that weights stand for as rows[n, k] in bf16, from tiles (or, where k_blocks is 0, from rows):
// what the input gradient of weights that are not trained reads. A thread has eight neighbours.
template <class Code> __device__ __forceinline__ void unpack(
    const u8* weights, const float* scales, u16* rows, u32 n, u32 k, u32 k_blocks
) {
    u32 eights = (k + 7) / 8;
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    u32 row = i / eights, column = i % eights * 8;
    if (row >= n) return;
    u32 byte = column * Code::BYTES;
    u64 at = (u64)row * k * Code::BYTES + byte;
    if (k_blocks) {
        u64 tile = (u64)(row / 64) * k_blocks + byte / 128;
        at = tile * 8192 + row % 64 * 128 + ((byte % 128 / 16) ^ (row % 8)) * 16 + byte % 16;
    }
    float scale = scales ? scales[row] : 1.0f;
    u16* out = rows + (u64)row * k + column;
    for (u32 j = 0; j < 8 && column + j < k; ++j)
        out[j] = bf16_bits(__fmul_rn(Code::value(weights + at + j * Code::BYTES), scale));
}

#define UNPACK(name, Code)                                                                                \
    extern "C" __global__ void __launch_bounds__(256) gemm_unpack_##name(                                 \
        const u8* weights, const float* scales, u16* rows, u32 n, u32 k, u32 k_blocks                     \
    ) {                                                                                                   \
        unpack<Code>(weights, scales, rows, n, k, k_blocks);                                              \
    }
UNPACK(bf16, Bf16Code)
UNPACK(i8, Int8Code)
UNPACK(e4m3, E4m3Code)
