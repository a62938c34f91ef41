// Operands of GEMMs: converted to bf16, or scaled per row and rounded to eight bits.
//
// A row is the activations of a token or the weights of an output channel: its absmax gives its scale, its
// quantized values are round(x * (1 / scale)), as on the CPU and with the same bits. RMSNorm and SwiGLU can
// feed the conversion directly: their results then never reach memory in 32 bits.
#include "common.cuh"
#include "mma.cuh"

// Threads of a block: chosen by the width of a row, up to 1024.
#define THREADS blockDim.x
#define MAX_WARPS 32

// Sum and absmax over a block of any number of warps, in a fixed order; buffers hold one value per warp, and
// nobody has used them before.
__device__ __forceinline__ void sum_and_absmax_of_block(float& sum, u32& absmax, float* sums, u32* buffer) {
    sum = warp_sum(sum);
    absmax = warp_max(absmax);
    if (threadIdx.x % WARP == 0) {
        sums[threadIdx.x / WARP] = sum;
        buffer[threadIdx.x / WARP] = absmax;
    }
    __syncthreads();
    u32 lane = threadIdx.x % WARP;
    bool in = lane < blockDim.x / WARP;
    sum = warp_sum(in ? sums[lane] : 0.0f);
    absmax = warp_max(in ? buffer[lane] : 0u);
}

__device__ __forceinline__ float sum_of_block(float x, float* buffer) {
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0) buffer[threadIdx.x / WARP] = x;
    __syncthreads();
    u32 lane = threadIdx.x % WARP;
    return warp_sum(lane < blockDim.x / WARP ? buffer[lane] : 0.0f);
}

__device__ __forceinline__ u32 absmax_of_block(u32 x, u32* buffer) {
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0) buffer[threadIdx.x / WARP] = x;
    __syncthreads();
    u32 lane = threadIdx.x % WARP;
    return warp_max(lane < blockDim.x / WARP ? buffer[lane] : 0u);
}

// What a row is made of.
struct Plain {
    const float* x;
    __device__ __forceinline__ float operator()(u32 i) const { return x[i]; }
    __device__ __forceinline__ float4 four(u32 i) const { return ((const float4*)x)[i]; }
};

struct Normed {
    const float* x;
    const float* gain;
    float scale;
    __device__ __forceinline__ float operator()(u32 i) const {
        return __fmul_rn(__fmul_rn(x[i], gain[i]), scale);
    }
    __device__ __forceinline__ float4 four(u32 i) const {
        float4 v = ((const float4*)x)[i], g = ((const float4*)gain)[i];
        return make_float4(__fmul_rn(__fmul_rn(v.x, g.x), scale), __fmul_rn(__fmul_rn(v.y, g.y), scale),
                           __fmul_rn(__fmul_rn(v.z, g.z), scale), __fmul_rn(__fmul_rn(v.w, g.w), scale));
    }
};

struct Swiglu {
    const float* gate;
    const float* up;
    __device__ __forceinline__ float operator()(u32 i) const { return silu_times(gate[i], up[i]); }
    __device__ __forceinline__ float4 four(u32 i) const {
        float4 g = ((const float4*)gate)[i], u = ((const float4*)up)[i];
        return make_float4(
            silu_times(g.x, u.x), silu_times(g.y, u.y), silu_times(g.z, u.z), silu_times(g.w, u.w)
        );
    }
};

// Formats of eight bits.
struct Int8 {
    typedef i8 Code;
    static constexpr float max = 127.0f;
    static __device__ __forceinline__ u32 code(float x) { return (u8)i8_code(x); }
    static __device__ __forceinline__ u32 codes(float4 x) { return i8_codes(x); }
};

struct E4m3 {
    typedef u8 Code;
    static constexpr float max = 448.0f;
    static __device__ __forceinline__ u32 code(float x) { return e4m3_code(x); }
    static __device__ __forceinline__ u32 codes(float4 x) { return e4m3_codes(x); }
};

template <typename Row>
__device__ __forceinline__ void to_bf16(const Row& row, u32 k, u16* out) {
    if (k % 4 == 0) {
        for (u32 i = threadIdx.x; i < k / 4; i += THREADS) {
            float4 v = row.four(i);
            ((uint2*)out)[i] = make_uint2(bf16_pair(v.x, v.y), bf16_pair(v.z, v.w));
        }
    } else {
        for (u32 i = threadIdx.x; i < k; i += THREADS) out[i] = bf16_bits(row(i));
    }
}

__device__ __forceinline__ u32 absmax_of(u32 absmax, float4 v) {
    u32 a = max(magnitude_bits(v.x), magnitude_bits(v.y)), b = max(magnitude_bits(v.z), magnitude_bits(v.w));
    return max(absmax, max(a, b));
}

template <typename C>
__device__ __forceinline__ u32 four_codes(float4 v, float inverse) {
    return C::codes(make_float4(
        __fmul_rn(v.x, inverse), __fmul_rn(v.y, inverse), __fmul_rn(v.z, inverse), __fmul_rn(v.w, inverse)
    ));
}

// Rows of up to 4 * HELD * THREADS numbers are kept in registers between finding their scale and rounding
// them.
#define HELD 8

template <typename C, typename Row>
__device__ __forceinline__ void to_quantized(const Row& row, u32 k, u8* out, float* scale_out, u32* buffer) {
    u32 absmax = 0, fours = k / 4;
    float4 held[HELD];
    bool holds = k % 4 == 0 && fours <= HELD * THREADS;
    if (holds) {
#pragma unroll
        for (u32 j = 0; j < HELD; ++j) {
            u32 i = j * THREADS + threadIdx.x;
            if (i < fours) {
                held[j] = row.four(i);
                absmax = absmax_of(absmax, held[j]);
            }
        }
    } else {
        for (u32 i = threadIdx.x; i < k; i += THREADS) absmax = max(absmax, magnitude_bits(row(i)));
    }
    float scale = scale_of(absmax_of_block(absmax, buffer), C::max);
    float inverse = __fdiv_rn(1.0f, scale);
    if (threadIdx.x == 0) *scale_out = scale;
    if (holds) {
#pragma unroll
        for (u32 j = 0; j < HELD; ++j) {
            u32 i = j * THREADS + threadIdx.x;
            if (i < fours) ((u32*)out)[i] = four_codes<C>(held[j], inverse);
        }
    } else {
        for (u32 i = threadIdx.x; i < k; i += THREADS) out[i] = (u8)C::code(__fmul_rn(row(i), inverse));
    }
}

__device__ __forceinline__ float inverse_rms(float sum, u32 width, float eps) {
    return reciprocal_root(__fadd_rn(__fdiv_rn(sum, (float)width), eps));
}

__device__ __forceinline__ float add_squares(float sum, float4 v) {
    sum = __fmaf_rn(v.x, v.x, sum);
    sum = __fmaf_rn(v.y, v.y, sum);
    sum = __fmaf_rn(v.z, v.z, sum);
    return __fmaf_rn(v.w, v.w, sum);
}

__device__ __forceinline__ Normed
normed(const float* x, const float* gain, u32 width, float eps, float* buffer) {
    float sum = 0.0f;
    if (width % 4 == 0) {
        for (u32 i = threadIdx.x; i < width / 4; i += THREADS) sum = add_squares(sum, ((const float4*)x)[i]);
    } else {
        for (u32 i = threadIdx.x; i < width; i += THREADS) sum = __fmaf_rn(x[i], x[i], sum);
    }
    return Normed{x, gain, inverse_rms(sum_of_block(sum, buffer), width, eps)};
}

// A row that RMSNorm reads once: it stays in registers, times the gain, which is there before the kernel
// before has ended.
#define NARROW 4
__device__ __forceinline__ bool is_narrow(u32 k) { return k % 4 == 0 && k / 4 <= NARROW * THREADS; }

struct NormedRow {
    float4 v[NARROW];
    float sum;  // of the thread's squares

    __device__ __forceinline__ NormedRow(const float* x, const float* gain, u32 k) : sum(0.0f) {
        float4 g[NARROW];
        each(k, [&](u32 j, u32 i) { g[j] = ((const float4*)gain)[i]; });
        wait_for_previous();
        each(k, [&](u32 j, u32 i) { v[j] = ((const float4*)x)[i]; });
        each(k, [&](u32 j, u32) {
            sum = add_squares(sum, v[j]);
            v[j] = make_float4(
                __fmul_rn(v[j].x, g[j].x), __fmul_rn(v[j].y, g[j].y), __fmul_rn(v[j].z, g[j].z),
                __fmul_rn(v[j].w, g[j].w)
            );
        });
    }

    __device__ __forceinline__ void scale(u32 k, float factor) {
        each(k, [&](u32 j, u32) {
            v[j] = make_float4(
                __fmul_rn(v[j].x, factor), __fmul_rn(v[j].y, factor), __fmul_rn(v[j].z, factor),
                __fmul_rn(v[j].w, factor)
            );
        });
    }

    // Calls `use` with the place of each of the thread's fours, here and in the row.
    template <typename Use>
    static __device__ __forceinline__ void each(u32 k, Use use) {
#pragma unroll
        for (u32 j = 0; j < NARROW; ++j) {
            u32 i = j * THREADS + threadIdx.x;
            if (i < k / 4) use(j, i);
        }
    }
};

template <typename C>
__device__ __forceinline__ void norm_quantized(const float* x, const float* gain, u32 k, float eps, u8* out,
                                           float* scale_out, float* sums, u32* buffer) {
    if (!is_narrow(k)) {
        wait_for_previous();
        to_quantized<C>(normed(x, gain, k, eps, sums), k, out, scale_out, buffer);
        return;
    }
    NormedRow row(x, gain, k);
    u32 absmax = 0;
    row.each(k, [&](u32 j, u32) { absmax = absmax_of(absmax, row.v[j]); });
    sum_and_absmax_of_block(row.sum, absmax, sums, buffer);
    // Rounding keeps the order: the absmax times 1 / rms is the absmax of what follows.
    float inverse_root = inverse_rms(row.sum, k, eps);
    float scale = scale_of(magnitude_bits(__fmul_rn(__uint_as_float(absmax), inverse_root)), C::max);
    float inverse = __fdiv_rn(1.0f, scale);
    if (threadIdx.x == 0) *scale_out = scale;
    row.scale(k, inverse_root);
    row.each(k, [&](u32 j, u32 i) { ((u32*)out)[i] = four_codes<C>(row.v[j], inverse); });
}

#define ROW_OF(width) ((u64)blockIdx.x * (width))
#define BUFFER __shared__ u32 buffer[MAX_WARPS]

extern "C" __global__ void __launch_bounds__(1024) rows_bf16(const float* x, u32 k, u16* out) {
    wait_for_previous();
    to_bf16(Plain{x + ROW_OF(k)}, k, out + ROW_OF(k));
}
extern "C" __global__ void __launch_bounds__(1024) rows_i8(const float* x, u32 k, u8* out, float* scales) {
    BUFFER;
    wait_for_previous();
    to_quantized<Int8>(Plain{x + ROW_OF(k)}, k, out + ROW_OF(k), scales + blockIdx.x, buffer);
}
extern "C" __global__ void __launch_bounds__(1024) rows_e4m3(const float* x, u32 k, u8* out, float* scales) {
    BUFFER;
    wait_for_previous();
    to_quantized<E4m3>(Plain{x + ROW_OF(k)}, k, out + ROW_OF(k), scales + blockIdx.x, buffer);
}

// Rows whose absmax the GEMM that made them has found: a row is shared by blocks that need not know of each
// other, 4 * QUANTIZED_FOURS numbers a thread.

template <typename C>
__device__ __forceinline__ void to_quantized_known(
    const float* x, u32 k, const u32* absmax, u8* out, float* scales
) {
    wait_for_previous();
    u32 row = blockIdx.x, fours = k / 4, first = blockIdx.y * QUANTIZED_FOURS * THREADS + threadIdx.x;
    const float4* from = (const float4*)(x + (u64)row * k);
    u32 found = absmax[row * ABSMAX_STRIDE];
    float4 held[QUANTIZED_FOURS];
#pragma unroll
    for (u32 j = 0; j < QUANTIZED_FOURS; ++j) {
        if (first + j * THREADS < fours) held[j] = from[first + j * THREADS];
    }
    float scale = scale_of(found, C::max), inverse = __fdiv_rn(1.0f, scale);
    if (first == 0) scales[row] = scale;
    u32* to = (u32*)(out + (u64)row * k);
#pragma unroll
    for (u32 j = 0; j < QUANTIZED_FOURS; ++j) {
        if (first + j * THREADS < fours) to[first + j * THREADS] = four_codes<C>(held[j], inverse);
    }
}

extern "C" __global__ void __launch_bounds__(256) known_i8(
    const float* x, u32 k, const u32* absmax, u8* out, float* scales
) {
    to_quantized_known<Int8>(x, k, absmax, out, scales);
}
extern "C" __global__ void __launch_bounds__(256) known_e4m3(
    const float* x, u32 k, const u32* absmax, u8* out, float* scales
) {
    to_quantized_known<E4m3>(x, k, absmax, out, scales);
}

extern "C" __global__ void __launch_bounds__(1024)
    norm_bf16(const float* x, const float* gain, u32 k, float eps, u16* out) {
    __shared__ float sums[MAX_WARPS];
    if (!is_narrow(k)) {
        wait_for_previous();
        to_bf16(normed(x + ROW_OF(k), gain, k, eps, sums), k, out + ROW_OF(k));
        return;
    }
    NormedRow row(x + ROW_OF(k), gain, k);
    row.scale(k, inverse_rms(sum_of_block(row.sum, sums), k, eps));
    row.each(k, [&](u32 j, u32 i) {
        float4 v = row.v[j];
        ((uint2*)(out + ROW_OF(k)))[i] = make_uint2(bf16_pair(v.x, v.y), bf16_pair(v.z, v.w));
    });
}
// `absmax` is cleared for the GEMM that follows.
extern "C" __global__ void __launch_bounds__(1024)
    norm_i8(const float* x, const float* gain, u32 k, float eps, u8* out, float* scales, u32* absmax) {
    __shared__ float sums[MAX_WARPS];
    BUFFER;
    norm_quantized<Int8>(x + ROW_OF(k), gain, k, eps, out + ROW_OF(k), scales + blockIdx.x, sums, buffer);
    if (absmax && threadIdx.x == 0) absmax[blockIdx.x * ABSMAX_STRIDE] = 0;
}
extern "C" __global__ void __launch_bounds__(1024)
    norm_e4m3(const float* x, const float* gain, u32 k, float eps, u8* out, float* scales, u32* absmax) {
    __shared__ float sums[MAX_WARPS];
    BUFFER;
    norm_quantized<E4m3>(x + ROW_OF(k), gain, k, eps, out + ROW_OF(k), scales + blockIdx.x, sums, buffer);
    if (absmax && threadIdx.x == 0) absmax[blockIdx.x * ABSMAX_STRIDE] = 0;
}

__device__ __forceinline__ Swiglu swiglu_row(const float* gate_up, u32 f) {
    const float* row = gate_up + (u64)blockIdx.x * 2 * f;
    return Swiglu{row, row + f};
}
// For training, gate and up projections are kept, rounded.
extern "C" __global__ void __launch_bounds__(1024)
    swiglu_bf16(const float* gate_up, u32 f, u16* kept, u16* out) {
    wait_for_previous();
    to_bf16(swiglu_row(gate_up, f), f, out + ROW_OF(f));
    if (kept) to_bf16(Plain{gate_up + ROW_OF(2 * f)}, 2 * f, kept + ROW_OF(2 * f));
}
extern "C" __global__ void __launch_bounds__(1024) swiglu_i8(
    const float* gate_up, u32 f, u8* out, float* scales
) {
    BUFFER;
    wait_for_previous();
    to_quantized<Int8>(swiglu_row(gate_up, f), f, out + ROW_OF(f), scales + blockIdx.x, buffer);
}
extern "C" __global__ void __launch_bounds__(1024) swiglu_e4m3(
    const float* gate_up, u32 f, u8* out, float* scales
) {
    BUFFER;
    wait_for_previous();
    to_quantized<E4m3>(swiglu_row(gate_up, f), f, out + ROW_OF(f), scales + blockIdx.x, buffer);
}

__device__ __forceinline__ u8 stochastic_i8(float x, u32 random) {
    float whole = floorf(__fadd_rn(x, unit_of(random)));
    return (u8)(i8)(int)fminf(fmaxf(whole, -127.0f), 127.0f);
}

__device__ __forceinline__ u8 stochastic_e4m3(float x, u32 random) {
    float m = fabsf(x);
    m = m < 448.0f ? m : 448.0f;
    u32 code;
    if (m < 0.015625f) {
        code = (u32)floorf(__fadd_rn(m * 512.0f, unit_of(random)));
    } else {
        code = ((__float_as_uint(m) + (random >> 12)) >> 20) - (120u << 3);
    }
    return (u8)(code | (__float_as_uint(x) >> 24 & 0x80u));
}

// The weights of an output channel in eight bits; the first channel with a number that is not finite goes to
// *bad.
template <typename C, u8 (*STOCHASTIC)(float, u32)>
__device__ __forceinline__ void quantize_weights(
    const float* w, u32 k, u32 stochastic, u64 seed, u8* out, float* scales, u32* bad, u32* buffer
) {
    const float* row = w + ROW_OF(k);
    u8* to = out + ROW_OF(k);
    if (!stochastic) {
        to_quantized<C>(Plain{row}, k, to, scales + blockIdx.x, buffer);
    } else {
        u32 absmax = 0;
        for (u32 i = threadIdx.x; i < k; i += THREADS) absmax = max(absmax, magnitude_bits(row[i]));
        float scale = scale_of(absmax_of_block(absmax, buffer), C::max);
        float inverse = __fdiv_rn(1.0f, scale);
        if (threadIdx.x == 0) scales[blockIdx.x] = scale;
        for (u32 i = threadIdx.x; i < k; i += THREADS) {
            to[i] = STOCHASTIC(__fmul_rn(row[i], inverse), random_bits(seed, ROW_OF(k) + i));
        }
    }
    if (threadIdx.x == 0 && scales[blockIdx.x] != scales[blockIdx.x]) atomicMin(bad, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(1024)
    weights_i8(const float* w, u32 k, u32 stochastic, u64 seed, u8* out, float* scales, u32* bad) {
    BUFFER;
    quantize_weights<Int8, stochastic_i8>(w, k, stochastic, seed, out, scales, bad, buffer);
}
extern "C" __global__ void __launch_bounds__(1024)
    weights_e4m3(const float* w, u32 k, u32 stochastic, u64 seed, u8* out, float* scales, u32* bad) {
    BUFFER;
    quantize_weights<E4m3, stochastic_e4m3>(w, k, stochastic, seed, out, scales, bad, buffer);
}
