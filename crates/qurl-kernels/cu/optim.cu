// AdamW with decoupled weight decay, and the sum of squares for clipping by the global norm.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    adamw(float* w, const float* g, float* m, float* v, u64 count, float grad_scale, float beta1, float beta2,
          float rest1, float rest2, float keep, float step_size, float root_correction, float eps) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
        float grad = __fmul_rn(g[i], grad_scale);
        float m1 = __fmaf_rn(beta1, m[i], __fmul_rn(rest1, grad));
        float v1 = __fmaf_rn(beta2, v[i], __fmul_rn(rest2, __fmul_rn(grad, grad)));
        float root = __fmaf_rn(__fsqrt_rn(v1), root_correction, eps);
        w[i] = __fmaf_rn(step_size, __fdiv_rn(m1, root), __fmul_rn(w[i], keep));
        m[i] = m1;
        v[i] = v1;
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

extern "C" __global__ void __launch_bounds__(SUM_THREADS) sum_doubles(
    const double* x, u32 count, double* out
) {
    __shared__ double buffer[SUM_THREADS / WARP];
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < count; i += SUM_THREADS) sum += x[i];
    sum = block_sum<SUM_THREADS>(sum, buffer);
    if (threadIdx.x == 0) *out = sum;
}
