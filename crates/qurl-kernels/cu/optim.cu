// AdamW with decoupled weight decay, and the sum of squares for clipping by the global norm.
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
    adamw(float* w, const float* g, float* m, float* v, u64 count, float grad_scale, float beta1, float beta2,
          float rest1, float rest2, float keep, float step_size, float root_correction, float eps) {
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
