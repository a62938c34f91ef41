// What all products share: the formats of their operands, and the sums that they are kept in on the way.
#pragma once

enum Format { BF16, INT8, FP8 };

template <int FORMAT>
struct Sum {
    typedef float type;
};
template <>
struct Sum<INT8> {
    typedef int type;
};

// A sum of either kind as a word in shared memory.
__device__ __forceinline__ float sum_bits(float x) { return x; }
__device__ __forceinline__ float sum_bits(int x) { return __int_as_float(x); }
__device__ __forceinline__ void from_bits(float& to, float x) { to = x; }
__device__ __forceinline__ void from_bits(int& to, float x) { to = __float_as_int(x); }
