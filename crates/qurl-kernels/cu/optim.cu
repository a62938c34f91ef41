// AdamW with decoupled weight decay and moments in several formats, and the sum of squares for clipping by
// the global norm.
#include "common.cuh"

struct AdamW {
    float grad_scale, beta1, beta2, rest1, rest2, keep, step_size, root_correction, eps;

    __device__ __forceinline__ void update(float& w, float g, float& m, float& v) const {
        float grad = __fmul_rn(g, grad_scale);
        m = __fmaf_rn(beta1, m, __fmul_rn(rest1, grad));
        v = __fmaf_rn(beta2, v, __fmul_rn(rest2, __fmul_rn(grad, grad)));
        float root = __fmaf_rn(__fsqrt_rn(v), root_correction, eps);
        w = __fmaf_rn(step_size, __fdiv_rn(m, root), __fmul_rn(w, keep));
    }
};

// Four numbers a thread: 28 bytes each go through memory, and fewer, wider accesses keep more of them in
// flight.
extern "C" __global__ void __launch_bounds__(256)
    adamw_f32(float* w, const float* g, float* m, float* v, u8* m_exponents, u8* v_exponents, u64 count, u32 at,
              u32 step, float grad_scale, float beta1, float beta2, float rest1, float rest2, float keep,
              float step_size, float root_correction, float eps) {
    AdamW adamw = {grad_scale, beta1, beta2, rest1, rest2, keep, step_size, root_correction, eps};
    u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x, fours = count / 4;
    for (u64 i = first; i < fours; i += (u64)gridDim.x * blockDim.x) {
        float4 w4 = ((float4*)w)[i], g4 = ((const float4*)g)[i], m4 = ((float4*)m)[i], v4 = ((float4*)v)[i];
        adamw.update(w4.x, g4.x, m4.x, v4.x);
        adamw.update(w4.y, g4.y, m4.y, v4.y);
        adamw.update(w4.z, g4.z, m4.z, v4.z);
        adamw.update(w4.w, g4.w, m4.w, v4.w);
        ((float4*)w)[i] = w4;
        ((float4*)m)[i] = m4;
        ((float4*)v)[i] = v4;
    }
    u64 last = fours * 4 + first;
    if (last < count) adamw.update(w[last], g[last], m[last], v[last]);
}

// Moments in fewer bits, with the values, the thresholds and so the bits of the CPU (cpu/moments.rs).
#define FIRST 0u
#define SECOND 0x5851f42du

__device__ __forceinline__ u32 dither(u32 moment, u32 at, u32 step) {
    u32 hash = at ^ moment;
    hash = (hash ^ hash >> 16) * 0x85ebca6bu;
    hash = (hash ^ hash >> 13) * 0xc2b2ae35u;
    return (hash ^ hash >> 16) + step * 0x9e3779b9u;
}

// The bits of a bf16 next to a number.
__device__ __forceinline__ u16 bf16_dithered(float x, u32 dither) {
    return (u16)((__float_as_uint(x) + (dither >> 16)) >> 16);
}

extern "C" __global__ void __launch_bounds__(256)
    adamw_bf16(float* w, const float* g, u16* m, u16* v, u8* m_exponents, u8* v_exponents, u64 count, u32 at,
               u32 step, float grad_scale, float beta1, float beta2, float rest1, float rest2, float keep,
               float step_size, float root_correction, float eps) {
    AdamW adamw = {grad_scale, beta1, beta2, rest1, rest2, keep, step_size, root_correction, eps};
    auto update = [&](u64 i, float& wi, float gi, u16& mi, u16& vi) {
        float m32 = bf16_value(mi), v32 = bf16_value(vi);
        adamw.update(wi, gi, m32, v32);
        mi = bf16_dithered(m32, dither(FIRST, at + (u32)i, step));
        vi = bf16_dithered(v32, dither(SECOND, at + (u32)i, step));
    };
    u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x, fours = count / 4;
    for (u64 i = first; i < fours; i += (u64)gridDim.x * blockDim.x) {
        float4 w4 = ((float4*)w)[i], g4 = ((const float4*)g)[i];
        ushort4 m4 = ((ushort4*)m)[i], v4 = ((ushort4*)v)[i];
        update(4 * i, w4.x, g4.x, m4.x, v4.x);
        update(4 * i + 1, w4.y, g4.y, m4.y, v4.y);
        update(4 * i + 2, w4.z, g4.z, m4.z, v4.z);
        update(4 * i + 3, w4.w, g4.w, m4.w, v4.w);
        ((float4*)w)[i] = w4;
        ((ushort4*)m)[i] = m4;
        ((ushort4*)v)[i] = v4;
    }
    u64 last = fours * 4 + first;
    if (last < count) update(last, w[last], g[last], m[last], v[last]);
}

#define LOWEST_EXPONENT 40u

// The magnitude of an 8-bit float with BITS bits of mantissa under the exponent of its block.
template <u32 BITS>
__device__ __forceinline__ float decode(u32 value, u32 exponent) {
    if (exponent == 0) return 0.0f;
    u32 lowest = exponent - 14, scale = value >> BITS, mantissa = value & ((1u << BITS) - 1);
    if (scale == 0) return __fmul_rn((float)mantissa, __uint_as_float((lowest - BITS) << 23));
    return __uint_as_float((lowest - 1 + scale) << 23 | mantissa << (23 - BITS));
}

// An 8-bit float next to a magnitude.
template <u32 BITS>
__device__ __forceinline__ u32 encode(float magnitude, u32 exponent, u32 dither) {
    if (exponent == 0) return 0;
    u32 bits = __float_as_uint(magnitude), lowest = exponent - 14, value;
    if (bits >> 23 >= lowest) {
        value = ((bits + (dither >> (9 + BITS))) >> (23 - BITS)) - ((lowest - 1) << BITS);
    } else {
        float units = __fmul_rn(magnitude, __uint_as_float((254 - lowest + BITS) << 23));
        value = ((u32)__fmul_rn(units, 1048576.0f) + (dither >> 12)) >> 20;
    }
    return min(value, (16u << BITS) - 1);
}

// The exponent of the block of MOMENT_BLOCK numbers that sixteen neighbouring threads have four of each.
template <u32 BITS>
__device__ __forceinline__ u32 block_exponent(const float (&magnitudes)[4]) {
    u32 most = 0;
    for (float magnitude : magnitudes) most = max(most, __float_as_uint(magnitude));
    u32 sixteen = 0xffffu << (threadIdx.x & 16);
    for (u32 apart = 8; apart > 0; apart /= 2) most = max(most, __shfl_xor_sync(sixteen, most, apart));
    return most == 0 ? 0 : min(max((most + (1u << (23 - BITS)) - 1) >> 23, LOWEST_EXPONENT), 254u);
}

extern "C" __global__ void __launch_bounds__(256)
    adamw_8bit(float* w, const float* g, u32* m, u32* v, u8* m_exponents, u8* v_exponents, u64 count, u32 at,
               u32 step, float grad_scale, float beta1, float beta2, float rest1, float rest2, float keep,
               float step_size, float root_correction, float eps) {
    static_assert(MOMENT_BLOCK == 64, "sixteen threads of four numbers");
    AdamW adamw = {grad_scale, beta1, beta2, rest1, rest2, keep, step_size, root_correction, eps};
    // Whole blocks, so that the threads of a block stay together; memory of the moments is as long.
    u64 fours = (count + MOMENT_BLOCK - 1) / MOMENT_BLOCK * (MOMENT_BLOCK / 4);
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < fours; i += (u64)gridDim.x * blockDim.x) {
        u64 block = 4 * i / MOMENT_BLOCK;
        u32 m4 = m[i], v4 = v[i], m_exponent = m_exponents[block], v_exponent = v_exponents[block];
        alignas(16) float w32[4], g32[4];
        float m32[4], v32[4], magnitudes[4], roots[4];
        if (4 * i + 4 <= count) {
            *(float4*)w32 = ((float4*)w)[i];
            *(float4*)g32 = ((const float4*)g)[i];
        } else {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                bool there = 4 * i + j < count;
                w32[j] = there ? w[4 * i + j] : 0.0f;
                g32[j] = there ? g[4 * i + j] : 0.0f;
            }
        }
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            u32 first = m4 >> 8 * j & 0xff, second = v4 >> 8 * j & 0xff;
            float magnitude = decode<3>(first & 0x7f, m_exponent), root = decode<4>(second, v_exponent);
            m32[j] = first & 0x80 ? -magnitude : magnitude;
            v32[j] = __fmul_rn(root, root);
            adamw.update(w32[j], g32[j], m32[j], v32[j]);
            magnitudes[j] = fabsf(m32[j]);
            roots[j] = __fsqrt_rn(v32[j]);
        }
        m_exponent = block_exponent<3>(magnitudes);
        v_exponent = block_exponent<4>(roots);
        m4 = v4 = 0;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            u32 place = at + (u32)(4 * i) + j, sign = __float_as_uint(m32[j]) >> 24 & 0x80;
            sign = m_exponent ? sign : 0;
            m4 |= (encode<3>(magnitudes[j], m_exponent, dither(FIRST, place, step)) | sign) << 8 * j;
            v4 |= encode<4>(roots[j], v_exponent, dither(SECOND, place, step)) << 8 * j;
        }
        m[i] = m4;
        v[i] = v4;
        if (4 * i % MOMENT_BLOCK == 0) {
            m_exponents[block] = (u8)m_exponent;
            v_exponents[block] = (u8)v_exponent;
        }
        if (4 * i + 4 <= count) {
            ((float4*)w)[i] = *(float4*)w32;
        } else {
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (4 * i + j < count) w[4 * i + j] = w32[j];
        }
    }
}

// to[i] = the sum of pieces[count, len] in a binary tree (a binary counter of sums of 2^k neighbours), or
// that sum added to it.
extern "C" __global__ void __launch_bounds__(256)
    add_pieces(const float* pieces, u32 count, u64 len, u32 add, float* to) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < len; i += (u64)gridDim.x * blockDim.x) {
        float sums[13];
        u32 depth = 0;
        for (u32 piece = 0; piece < count; ++piece) {
            float sum = pieces[(u64)piece * len + i];
            for (u32 ended = piece + 1; ended % 2 == 0; ended /= 2) sum = __fadd_rn(sums[--depth], sum);
            sums[depth++] = sum;
        }
        to[i] = add ? __fadd_rn(to[i], sums[0]) : sums[0];
    }
}

// partials[block] = sum of the squares of a block of `per` numbers.
extern "C" __global__ void __launch_bounds__(SUM_THREADS) square_partials(
    const float* x, u64 count, u32 per, double* partials
) {
    __shared__ double buffer[SUM_THREADS / WARP];
    u64 first = (u64)blockIdx.x * per, last = min(first + per, count);
    double sum = 0.0;
    for (u64 i = first + threadIdx.x; i < last; i += SUM_THREADS)
        sum = __fma_rn((double)x[i], (double)x[i], sum);
    sum = block_sum<SUM_THREADS>(sum, buffer);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// out[block] = sum of x[starts[block] .. starts[block + 1]].
extern "C" __global__ void __launch_bounds__(SUM_THREADS) sum_doubles(
    const double* x, const u32* starts, double* out
) {
    __shared__ double buffer[SUM_THREADS / WARP];
    double sum = 0.0;
    for (u32 i = starts[blockIdx.x] + threadIdx.x; i < starts[blockIdx.x + 1]; i += SUM_THREADS) sum += x[i];
    sum = block_sum<SUM_THREADS>(sum, buffer);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
