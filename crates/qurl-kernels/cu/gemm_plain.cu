// GEMMs of any shape and format with plain arithmetic: the reference, and the way for shapes that the
// tensor-core kernels do not take.
//
// out[m, n] (+)= sum_k a(m, k) b(n, k), operands addressed by strides, so that forward, input gradient and
// weight gradient are one kernel. An element is one chain over k, whatever the tile.
#include "common.cuh"

#define DEPTH 16

template <typename T>
struct Number {
    typedef float Sum;
    static __device__ __forceinline__ float load(const T* p) { return *p; }
    static __device__ __forceinline__ float multiply_add(float a, float b, float c) {
        return __fmaf_rn(a, b, c);
    }
};
template <>
struct Number<u16> {
    typedef float Sum;
    static __device__ __forceinline__ float load(const u16* p) { return bf16_value(*p); }
    static __device__ __forceinline__ float multiply_add(float a, float b, float c) {
        return __fmaf_rn(a, b, c);
    }
};
template <>
struct Number<u8> {
    typedef float Sum;
    static __device__ __forceinline__ float load(const u8* p) { return e4m3_value(*p); }
    static __device__ __forceinline__ float multiply_add(float a, float b, float c) {
        return __fmaf_rn(a, b, c);
    }
};
template <>
struct Number<i8> {
    typedef int Sum;
    static __device__ __forceinline__ int load(const i8* p) { return *p; }
    static __device__ __forceinline__ int multiply_add(int a, int b, int c) { return a * b + c; }
};

// Operands of two kinds have sums of the same type.
template <typename T, typename U>
__device__ __forceinline__ void gemm_plain(
    const T* a, u64 a_m, u64 a_k, const U* b, u64 b_n, u64 b_k, u32 m, u32 n, u32 k, const float* row_scales,
    const float* column_scales, const float* bias, u32 add, float* out
) {
    typedef typename Number<T>::Sum Sum;
    __shared__ Sum left[DEPTH][PLAIN_TILE + 1], right[DEPTH][PLAIN_TILE + 1];
    u32 row0 = blockIdx.y * PLAIN_TILE, column0 = blockIdx.x * PLAIN_TILE;
    u32 tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    Sum acc[4][4] = {};
    for (u32 k0 = 0; k0 < k; k0 += DEPTH) {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < PLAIN_TILE * DEPTH; i += 256) {
            // Neighbouring threads follow the direction in which the operand is dense.
            u32 la = a_k == 1 ? i % DEPTH : i / PLAIN_TILE, lm = a_k == 1 ? i / DEPTH : i % PLAIN_TILE;
            u32 lb = b_k == 1 ? i % DEPTH : i / PLAIN_TILE, ln = b_k == 1 ? i / DEPTH : i % PLAIN_TILE;
            bool in_a = row0 + lm < m && k0 + la < k, in_b = column0 + ln < n && k0 + lb < k;
            left[la][lm] = in_a ? Number<T>::load(a + (row0 + lm) * a_m + (k0 + la) * a_k) : (Sum)0;
            right[lb][ln] = in_b ? Number<U>::load(b + (column0 + ln) * b_n + (k0 + lb) * b_k) : (Sum)0;
        }
        __syncthreads();
        u32 depth = min(DEPTH, k - k0);
        for (u32 d = 0; d < depth; ++d) {
            Sum x[4], y[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[i] = left[d][ty * 4 + i];
                y[i] = right[d][tx + 16 * i];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[i][j] = Number<T>::multiply_add(x[i], y[j], acc[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 row = row0 + ty * 4 + i;
        if (row >= m) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 column = column0 + tx + 16 * j;
            if (column >= n) continue;
            float v = (float)acc[i][j];
            if (column_scales) v = __fmul_rn(v, __fmul_rn(row_scales[row], column_scales[column]));
            if (bias) v = __fadd_rn(v, bias[column]);
            u64 at = (u64)row * n + column;
            out[at] = add ? __fadd_rn(out[at], v) : v;
        }
    }
}

#define GEMM(name, T, U)                                                                            \
    extern "C" __global__ void __launch_bounds__(256) gemm_plain_##name(                            \
        const T* a, u64 a_m, u64 a_k, const U* b, u64 b_n, u64 b_k, u32 m, u32 n, u32 k,            \
        const float* row_scales, const float* column_scales, const float* bias, u32 add, float* out \
    ) {                                                                                             \
        gemm_plain(a, a_m, a_k, b, b_n, b_k, m, n, k, row_scales, column_scales, bias, add, out);   \
    }

GEMM(f32, float, float)
GEMM(bf16, u16, u16)
GEMM(i8, i8, i8)
GEMM(e4m3, u8, u8)
// Tokens in bf16 and weights in four bits, as the numbers that they stand for.
GEMM(bits4, u16, float)
