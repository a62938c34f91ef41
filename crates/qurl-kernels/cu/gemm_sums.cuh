// What all GEMMs share: the formats of their operands, and those of their sums.
#pragma once

enum Format { BF16, INT8, FP8, INT4, NVFP4 };

// Weights in four bits: see bits4.cuh. Their tokens are in bf16.
#define IS_BITS4(format) ((format) == INT4 || (format) == NVFP4)
// Whether sums are multiplied by a scale of the token and one of the row.
#define HAS_SCALES(format) ((format) == INT8 || (format) == FP8)

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

// Four sums on their way through the shared memory of a cluster.
#define SEND(kind, c)                                                                                       \
    __device__ __forceinline__ void send(u32 to, kind a, kind b, kind c_, kind d) {                         \
        asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), c(a), c(b), c(c_), c(d) \
                     : "memory");                                                                           \
    }                                                                                                       \
    __device__ __forceinline__ void receive(u32 from, kind(&x)[4]) {                                        \
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"                                             \
                     : "=" c(x[0]), "=" c(x[1]), "=" c(x[2]), "=" c(x[3])                                   \
                     : "r"(from)                                                                            \
                     : "memory");                                                                           \
    }
SEND(float, "f")
SEND(int, "r")
#undef SEND
