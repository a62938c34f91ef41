// RMSNorm over rows and over heads inside rows, forward and backward, a block a row.
//
// y = x * gain / sqrt(mean(x^2) + eps). Threads and order of summation of a row depend on its width alone.
#include "common.cuh"
#include "mma.cuh"


// Where row `i` of a family of rows begins: runs of `per` neighbouring rows, `stride` apart.
__device__ __forceinline__ u64 row_start(u64 start, u32 per, u32 stride, u32 width, u32 i) {
    return start + (u64)(i / per) * stride + (u64)(i % per) * width;
}

__device__ __forceinline__ float inverse_rms(const float* x, u32 width, float eps, float* buffer) {
    float sum = 0.0f;
    if (width % 4 == 0 && ((u64)x & 15) == 0) {
        for (u32 i = threadIdx.x; i < width / 4; i += NORM_THREADS) {
            float4 v = ((const float4*)x)[i];
            sum = __fmaf_rn(v.x, v.x, sum);
            sum = __fmaf_rn(v.y, v.y, sum);
            sum = __fmaf_rn(v.z, v.z, sum);
            sum = __fmaf_rn(v.w, v.w, sum);
        }
    } else {
        for (u32 i = threadIdx.x; i < width; i += NORM_THREADS) sum = __fmaf_rn(x[i], x[i], sum);
    }
    sum = block_sum<NORM_THREADS>(sum, buffer);
    return reciprocal_root(__fadd_rn(__fdiv_rn(sum, (float)width), eps));
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS) norm_forward(
    const float* x, const float* gain, u64 start, u32 per, u32 stride, u32 width, float eps, float* out
) {
    wait_for_previous();
    __shared__ float buffer[NORM_THREADS / WARP];
    u64 at = row_start(start, per, stride, width, blockIdx.x);
    float scale = inverse_rms(x + at, width, eps, buffer);
    for (u32 i = threadIdx.x; i < width; i += NORM_THREADS)
        out[at + i] = __fmul_rn(__fmul_rn(x[at + i], gain[i]), scale);
}

// Dense rows, the same numbers rounded to bf16.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    norm_forward_bf16(const float* x, const float* gain, u32 width, float eps, u16* out) {
    wait_for_previous();
    __shared__ float buffer[NORM_THREADS / WARP];
    x += (u64)blockIdx.x * width;
    out += (u64)blockIdx.x * width;
    float scale = inverse_rms(x, width, eps, buffer);
    auto normed = [&](float v, float by) { return __fmul_rn(__fmul_rn(v, by), scale); };
    if (width % 4 == 0) {
        for (u32 i = threadIdx.x * 4; i < width; i += NORM_THREADS * 4) {
            float4 v = *reinterpret_cast<const float4*>(x + i),
                   by = *reinterpret_cast<const float4*>(gain + i);
            put(out + i,
                make_float4(normed(v.x, by.x), normed(v.y, by.y), normed(v.z, by.z), normed(v.w, by.w)));
        }
    } else {
        for (u32 i = threadIdx.x; i < width; i += NORM_THREADS) put(out + i, normed(x[i], gain[i]));
    }
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    norm_scales(const float* x, u64 start, u32 per, u32 stride, u32 width, float eps, float* scales) {
    __shared__ float buffer[NORM_THREADS / WARP];
    float scale = inverse_rms(x + row_start(start, per, stride, width, blockIdx.x), width, eps, buffer);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

// partials[part][column] = sum over `many` rows of dy * x * scale.
extern "C" __global__ void __launch_bounds__(128) norm_gain_partials(
    const float* x, const float* dy, const float* scales, u64 start, u32 per, u32 stride, u32 width, u32 rows,
    u32 many, float* partials
) {
    u32 column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= width) return;
    u32 first = blockIdx.x * many, last = min(first + many, rows);
    float sum = 0.0f;
    for (u32 row = first; row < last; ++row) {
        u64 at = row_start(start, per, stride, width, row) + column;
        sum = __fmaf_rn(dy[at], __fmul_rn(x[at], scales[row]), sum);
    }
    partials[(u64)blockIdx.x * width + column] = sum;
}

// The gradient of the input: added to dx, or, where dx is dy, in its place. Writes the rows' scales, too.
extern "C" __global__ void __launch_bounds__(NORM_THREADS) norm_backward(
    const float* x, const float* gain, float* scales, u64 start, u32 per, u32 stride, u32 width, float eps,
    const float* dy, float* dx, u32 add
) {
    __shared__ float buffer[NORM_THREADS / WARP];
    u64 at = row_start(start, per, stride, width, blockIdx.x);
    float scale = inverse_rms(x + at, width, eps, buffer);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    float dot = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += NORM_THREADS)
        dot = __fmaf_rn(__fmul_rn(dy[at + i], gain[i]), x[at + i], dot);
    dot = block_sum<NORM_THREADS>(dot, buffer);
    float shared = __fdiv_rn(__fmul_rn(-__fmul_rn(scale, scale), dot), (float)width);
    for (u32 i = threadIdx.x; i < width; i += NORM_THREADS) {
        float v = __fmul_rn(__fmaf_rn(x[at + i], shared, __fmul_rn(dy[at + i], gain[i])), scale);
        dx[at + i] = add ? __fadd_rn(dx[at + i], v) : v;
    }
}

// The same for dense rows of FOURS x 4 x NORM_THREADS numbers at most, whole fours: a block has `many` rows
// one after the other and each of them in registers, so everything is read once. dx is added to; `partials`
// takes the gradients of the gain, [block][column], and `normed` the rows after the norm, rounded, with the
// bits of norm_forward_bf16; either may be null.
template <int FOURS>
__device__ __forceinline__ void norm_backward_rows(
    const float* x, const float* gain, u32 width, float eps, const float* dy, float* dx, u32 rows, u32 many,
    float* partials, u16* normed
) {
    wait_for_previous();
    __shared__ float buffer[NORM_THREADS / WARP];
    auto each = [&](auto use) {
#pragma unroll
        for (u32 j = 0; j < FOURS; ++j) {
            u32 i = j * NORM_THREADS + threadIdx.x;
            if (i < width / 4) use(j, 4 * i);
        }
    };
    float4 dgain[FOURS];
    each([&](u32 j, u32) { dgain[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f); });
    u32 first = blockIdx.x * many, last = min(first + many, rows);
    for (u32 row = first; row < last; ++row) {
        u64 at = (u64)row * width;
        float4 v[FOURS], d[FOURS], old[FOURS];
        each([&](u32 j, u32 i) {
            v[j] = *reinterpret_cast<const float4*>(x + at + i);
            d[j] = *reinterpret_cast<const float4*>(dy + at + i);
            old[j] = *reinterpret_cast<const float4*>(dx + at + i);
        });
        // In the order of inverse_rms.
        float sum = 0.0f, dot = 0.0f;
        each([&](u32 j, u32 i) {
            float4 by = *reinterpret_cast<const float4*>(gain + i);
            sum = __fmaf_rn(v[j].x, v[j].x, sum);
            sum = __fmaf_rn(v[j].y, v[j].y, sum);
            sum = __fmaf_rn(v[j].z, v[j].z, sum);
            sum = __fmaf_rn(v[j].w, v[j].w, sum);
            dot = __fmaf_rn(__fmul_rn(d[j].x, by.x), v[j].x, dot);
            dot = __fmaf_rn(__fmul_rn(d[j].y, by.y), v[j].y, dot);
            dot = __fmaf_rn(__fmul_rn(d[j].z, by.z), v[j].z, dot);
            dot = __fmaf_rn(__fmul_rn(d[j].w, by.w), v[j].w, dot);
        });
        sum = block_sum<NORM_THREADS>(sum, buffer);
        float scale = reciprocal_root(__fadd_rn(__fdiv_rn(sum, (float)width), eps));
        dot = block_sum<NORM_THREADS>(dot, buffer);
        float shared = __fdiv_rn(__fmul_rn(-__fmul_rn(scale, scale), dot), (float)width);
        each([&](u32 j, u32 i) {
            float4 by = *reinterpret_cast<const float4*>(gain + i);
            auto slope = [&](float v, float d, float by, float old, float& dgain) {
                dgain = __fmaf_rn(d, __fmul_rn(v, scale), dgain);
                return __fadd_rn(old, __fmul_rn(__fmaf_rn(v, shared, __fmul_rn(d, by)), scale));
            };
            put(dx + at + i, make_float4(
                                 slope(v[j].x, d[j].x, by.x, old[j].x, dgain[j].x),
                                 slope(v[j].y, d[j].y, by.y, old[j].y, dgain[j].y),
                                 slope(v[j].z, d[j].z, by.z, old[j].z, dgain[j].z),
                                 slope(v[j].w, d[j].w, by.w, old[j].w, dgain[j].w)
                             ));
            auto times = [&](float v, float by) { return __fmul_rn(__fmul_rn(v, by), scale); };
            if (normed)
                put(normed + at + i,
                    make_float4(
                        times(v[j].x, by.x), times(v[j].y, by.y), times(v[j].z, by.z), times(v[j].w, by.w)
                    ));
        });
    }
    if (partials) each([&](u32 j, u32 i) { put(partials + (u64)blockIdx.x * width + i, dgain[j]); });
}

#define NORM_BACKWARD_ROWS(fours)                                                                        \
    extern "C" __global__ void __launch_bounds__(NORM_THREADS) norm_backward_rows_##fours(               \
        const float* x, const float* gain, u32 width, float eps, const float* dy, float* dx, u32 rows,   \
        u32 many, float* partials, u16* normed                                                           \
    ) {                                                                                                  \
        norm_backward_rows<fours>(x, gain, width, eps, dy, dx, rows, many, partials, normed);            \
    }
NORM_BACKWARD_ROWS(1)
NORM_BACKWARD_ROWS(2)
NORM_BACKWARD_ROWS(4)
NORM_BACKWARD_ROWS(8)
