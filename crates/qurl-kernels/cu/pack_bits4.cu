// Weights in four bits: quantized into rows, packed into the tiles of bits4.cuh, and back as numbers.
//
// Rows are those of the canonical form (src/canonical.rs): codes two a byte, the first in the low half, a row
// of an odd k padded with zero; then scales, in f32 for 128 numbers of a row (int4), or in E4M3 for 16
// (nvfp4), which has a scale of all weights besides. Scales and codes have the CPU's bits.
#include "bits4.cuh"
#include "common.cuh"
#include "mma.cuh"

// Numbers that share a scale.
template <int FORMAT>
struct Group {
    static constexpr u32 SIZE = FORMAT == INT4 ? BITS4_DEPTH : 16;
};

// ---- quantization -----------------------------------------------------------------------------------------

__device__ __forceinline__ u32 int4_code(float x, u32 stochastic, u32 random) {
    float whole = stochastic ? floorf(__fadd_rn(x, unit_of(random))) : rintf(x);
    return (u32)(int)fminf(fmaxf(whole, -7.0f), 7.0f) & 15u;
}

__device__ __forceinline__ u32 e2m1_code(float x, u32 stochastic, u32 random) {
    float m = fabsf(x);
    m = m < 6.0f ? m : 6.0f;
    u32 code;
    if (m < 1.0f) {
        float steps = m * 2.0f;
        code = (u32)(stochastic ? floorf(__fadd_rn(steps, unit_of(random))) : rintf(steps));
    } else {
        u32 bits = __float_as_uint(m), up = stochastic ? random >> 10 : 0x1fffffu + ((bits >> 22) & 1);
        code = ((bits + up) >> 22) - (126u << 1);
    }
    return code | (__float_as_uint(x) >> 28 & 8u);
}

// A block has a row; a warp takes 128 numbers of it at a time, a lane four neighbours.
template <int FORMAT>
__device__ __forceinline__ void quantize(
    const float* w, u32 k, u32 stochastic, u64 seed, u8* out, void* scales, const u32* absmax, float* whole,
    u32* bad
) {
    u64 row = blockIdx.x;
    const float* from = w + row * k;
    u8* to = out + row * ((k + 1) / 2);
    u32 lane = threadIdx.x % WARP, groups = (k + Group<FORMAT>::SIZE - 1) / Group<FORMAT>::SIZE;
    float tensor = 1.0f;
    if (FORMAT == NVFP4) {
        tensor = scale_of(*absmax, 448.0f * 6.0f);
        if (row == 0 && threadIdx.x == 0) *whole = tensor;
    }
    for (u32 first = threadIdx.x / WARP * 128; first < k; first += blockDim.x / WARP * 128) {
        u32 column = first + lane * 4;
        float v[4];
        u32 largest = 0;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            v[j] = column + j < k ? from[column + j] : 0.0f;
            largest = max(largest, magnitude_bits(v[j]));
        }
        float inverse;
        if (FORMAT == INT4) {
            float scale = scale_of(warp_max(largest), 7.0f);
            inverse = __fdiv_rn(1.0f, scale);
            if (lane == 0) ((float*)scales)[row * groups + first / 128] = scale;
            if (scale != scale) atomicMin(bad, (u32)row);
        } else {
            largest = max(largest, __shfl_xor_sync(FULL, largest, 1));
            largest = max(largest, __shfl_xor_sync(FULL, largest, 2));
            u8 code = e4m3_code(__fdiv_rn(__fdiv_rn(__uint_as_float(largest), 6.0f), tensor));
            float scale = __fmul_rn(tensor, e4m3_value(code));
            // A group's scale may round to zero: such weights are zeros.
            inverse = scale == 0.0f ? 0.0f : __fdiv_rn(1.0f, scale);
            if (lane % 4 == 0 && column < k) ((u8*)scales)[row * groups + column / 16] = code;
        }
        u32 codes[4];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            u32 random = stochastic ? random_bits(seed, row * k + column + j) : 0;
            float x = __fmul_rn(v[j], inverse);
            codes[j] = FORMAT == INT4 ? int4_code(x, stochastic, random) : e2m1_code(x, stochastic, random);
            if (column + j >= k) codes[j] = 0;
        }
        if (column < k) to[column / 2] = codes[0] | codes[1] << 4;
        if (column + 2 < k) to[column / 2 + 1] = codes[2] | codes[3] << 4;
    }
}

extern "C" __global__ void __launch_bounds__(256) weights_int4(
    const float* w, u32 k, u32 stochastic, u64 seed, u8* out, float* scales, u32* bad
) {
    quantize<INT4>(w, k, stochastic, seed, out, scales, nullptr, nullptr, bad);
}
// `absmax` are the bits of the largest of all weights; `whole` takes their scale.
extern "C" __global__ void __launch_bounds__(256) weights_nvfp4(
    const float* w, u32 k, u32 stochastic, u64 seed, u8* out, u8* scales, const u32* absmax, float* whole
) {
    quantize<NVFP4>(w, k, stochastic, seed, out, scales, absmax, whole, nullptr);
}

// The bits of the largest of all weights, a block a row; the first row with a number that is not finite goes
// to *bad.
extern "C" __global__ void __launch_bounds__(256) weights_absmax(
    const float* w, u32 k, u32* absmax, u32* bad
) {
    const float* row = w + (u64)blockIdx.x * k;
    u32 largest = 0;
    for (u32 i = threadIdx.x; i < k; i += blockDim.x) largest = max(largest, magnitude_bits(row[i]));
    largest = warp_max(largest);
    if (threadIdx.x % WARP != 0) return;
    atomicMax(absmax, largest);
    if (largest >= 0x7f800000u) atomicMin(bad, blockIdx.x);
}

// ---- packing ----------------------------------------------------------------------------------------------

// A code as register i has it.
template <int FORMAT>
__device__ __forceinline__ u32 placed(u32 code, int i) {
    if (FORMAT == INT4) return (code ^ 8u) << (4 * i);
    u32 sign = code >> 3, m = code & 7u;
    if (i == 3) return sign << 14 | (m >> 2) << 13 | (m & 3u) << 10;
    return sign << (15 - 3 * i) | m << (6 - 3 * i);
}

template <int FORMAT>
__device__ __forceinline__ u32 code_at(u32 half, int i) {
    if (FORMAT == INT4) return (half >> (4 * i) & 15u) ^ 8u;
    if (i == 3) return (half >> 14 & 1u) << 3 | (half >> 13 & 1u) << 2 | (half >> 10 & 3u);
    return (half >> (15 - 3 * i) & 1u) << 3 | (half >> (6 - 3 * i) & 7u);
}

// The byte of a scale in E4M3, as tiles have it: the same number without subnormals, 2^118 too large where it
// lies in a bf16. Zero has only zeros to multiply.
__device__ __forceinline__ u32 scale_byte(u32 e4m3) {
    if (e4m3 >= 8u) return e4m3 + 112u;
    if (e4m3 == 0u) return 0u;
    u32 power = e4m3 >= 4u ? 2u : e4m3 >= 2u ? 1u : 0u;
    return (12u + power) << 3 | (e4m3 << (3u - power) & 7u);
}

__device__ __forceinline__ u32 e4m3_of_byte(u32 byte) {
    if (byte >= 120u) return byte - 112u;
    return byte == 0u ? 0u : (8u | (byte & 7u)) >> (15u - (byte >> 3));
}

// A block has a tile, a thread four words of it.
template <int FORMAT>
__device__ __forceinline__ void pack(const u8* rows, const void* scales, u8* tiles, u32 n, u32 k, u32 k_blocks) {
    const int TILE = Bits4<FORMAT>::TILE;
    u32 first_row = blockIdx.x / k_blocks * TILE_ROWS, first = blockIdx.x % k_blocks * BITS4_DEPTH;
    u8* tile = tiles + (u64)blockIdx.x * TILE;
    u32 thread = threadIdx.x, lane = thread % WARP, strip = thread / WARP % 4, half = thread / 128;
    u32 row_bytes = (k + 1) / 2, groups = (k + Group<FORMAT>::SIZE - 1) / Group<FORMAT>::SIZE;
    u32 words[4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        words[step] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 row = first_row + strip * 16 + lane / 4 + i % 2 * 8;
            u32 column = first + half * 64 + step * 16 + i / 2 * 8 + lane % 4 * 2;
            u32 two = row < n && column < k ? rows[(u64)row * row_bytes + column / 2] : 0u;
            words[step] |= placed<FORMAT>(two & 15u, i) | placed<FORMAT>(two >> 4, i) << 16;
        }
    }
    reinterpret_cast<uint4*>(tile)[thread] = make_uint4(words[0], words[1], words[2], words[3]);
    u8* to = tile + 2 * HALF_BYTES;
    if (FORMAT == INT4) {
        if (thread >= TILE_ROWS) return;
        u32 row = first_row + thread / 16 * 16 + thread % 16 / 2 + thread % 2 * 8;
        float scale = row < n ? ((const float*)scales)[(u64)row * groups + first / BITS4_DEPTH] : 1.0f;
        reinterpret_cast<float*>(to)[thread] = scale;
    } else {
        for (u32 i = thread; i < TILE_ROWS * 8; i += 256) {
            u32 row = first_row + i / 128 * 16 + i / 16 % 8 + i % 2 * 8, group = first / 16 + i / 2 % 8;
            u32 code = row < n && group < groups ? ((const u8*)scales)[(u64)row * groups + group] : 0u;
            to[i] = scale_byte(code);
        }
    }
}

#define PACK(name, format)                                                               \
    extern "C" __global__ void __launch_bounds__(256) pack_##name(                       \
        const u8* rows, const void* scales, u8* tiles, u32 n, u32 k, u32 k_blocks        \
    ) {                                                                                  \
        pack<format>(rows, scales, tiles, n, k, k_blocks);                               \
    }
PACK(int4, INT4)
PACK(nvfp4, NVFP4)

// ---- numbers ----------------------------------------------------------------------------------------------

__device__ __forceinline__ float e2m1_value(u32 code) {
    float v = __fmul_rn(__uint_as_float((code & 7u) << 22), __uint_as_float(253u << 23));
    return code & 8u ? -v : v;
}

// The number of a code, from tiles, or where k_blocks is 0 from rows.
template <int FORMAT>
__device__ __forceinline__ float number(
    const u8* weights, const void* scales, float whole, u32 row, u32 column, u32 k, u32 k_blocks
) {
    u32 code, group = column / Group<FORMAT>::SIZE;
    float scale;
    if (k_blocks) {
        const u8* tile = weights + ((u64)(row / TILE_ROWS) * k_blocks + column / BITS4_DEPTH) * Bits4<FORMAT>::TILE;
        u32 strip = row % TILE_ROWS / 16, pair = strip * 8 + row % 8, high = row % 16 / 8;
        u32 half = column % BITS4_DEPTH / 64, step = column % 64 / 16, lane = row % 8 * 4 + column % 8 / 2;
        u32 word = half * (HALF_BYTES / 4) + (strip * WARP + lane) * 4 + step;
        u32 bits = reinterpret_cast<const u16*>(tile)[word * 2 + column % 2];
        u32 i = column % 16 / 8 * 2 + high;
        // Registers have no addresses.
        code = i == 0 ? code_at<FORMAT>(bits, 0) : i == 1 ? code_at<FORMAT>(bits, 1)
             : i == 2 ? code_at<FORMAT>(bits, 2) : code_at<FORMAT>(bits, 3);
        const u8* of = tile + 2 * HALF_BYTES;
        scale = FORMAT == INT4 ? reinterpret_cast<const float*>(of)[pair * 2 + high]
                               : e4m3_value(e4m3_of_byte(of[(pair * 8 + half * 4 + step) * 2 + high]));
    } else {
        u32 groups = (k + Group<FORMAT>::SIZE - 1) / Group<FORMAT>::SIZE;
        u64 at = (u64)row * groups + group;
        code = weights[(u64)row * ((k + 1) / 2) + column / 2] >> (column % 2 * 4) & 15u;
        scale = FORMAT == INT4 ? ((const float*)scales)[at] : e4m3_value(((const u8*)scales)[at]);
    }
    if (FORMAT == INT4) return __fmul_rn((float)((int)(code << 28) >> 28), scale);
    return __fmul_rn(e2m1_value(code), __fmul_rn(whole, scale));
}

// All numbers as rows[n, k], a thread eight neighbours.
template <int FORMAT, typename T>
__device__ __forceinline__ void unpack(
    const u8* weights, const void* scales, const float* whole, T* rows, u32 n, u32 k, u32 k_blocks
) {
    u32 eights = (k + 7) / 8;
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    u32 row = i / eights, column = i % eights * 8;
    if (row >= n) return;
    float factor = FORMAT == NVFP4 ? *whole : 1.0f;
    for (u32 j = column; j < min(column + 8, k); ++j)
        put(rows + (u64)row * k + j, number<FORMAT>(weights, scales, factor, row, j, k, k_blocks));
}

#define UNPACK(name, type, format, T)                                                              \
    extern "C" __global__ void __launch_bounds__(256) unpack_##name##_##type(                       \
        const u8* weights, const void* scales, const float* whole, T* rows, u32 n, u32 k,          \
        u32 k_blocks                                                                               \
    ) {                                                                                            \
        unpack<format>(weights, scales, whole, rows, n, k, k_blocks);                              \
    }
UNPACK(int4, bf16, INT4, u16)
UNPACK(nvfp4, bf16, NVFP4, u16)
UNPACK(int4, f32, INT4, float)
UNPACK(nvfp4, f32, NVFP4, float)
