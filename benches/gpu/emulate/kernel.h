// What NVRTC gives kernels without being asked, for g++. Their rewritten text follows (compiler.cpp).
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>
#include "runtime.h"

#define threadIdx (::emu::now->thread)
#define blockIdx (::emu::block_index())
#define blockDim (::emu::block_size())
#define gridDim (::emu::grid_size())

struct uint2 { unsigned x, y; } __attribute__((aligned(8)));
struct uint4 { unsigned x, y, z, w; } __attribute__((aligned(16)));
struct ushort4 { unsigned short x, y, z, w; } __attribute__((aligned(8)));
struct int4 { int x, y, z, w; } __attribute__((aligned(16)));
struct float2 { float x, y; } __attribute__((aligned(8)));
struct float4 { float x, y, z, w; } __attribute__((aligned(16)));
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From>
To emu_cast(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &x, sizeof to);
    return to;
}
inline float __uint_as_float(unsigned x) { return emu_cast<float>(x); }
inline float __int_as_float(int x) { return emu_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return emu_cast<unsigned>(x); }
inline int __float_as_int(float x) { return emu_cast<int>(x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __fma_rn(double x, double y, double z) { return __builtin_fma(x, y, z); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t both = (uint64_t)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        unsigned s = selector >> (4 * i);
        unsigned byte = both >> (8 * (s & 7)) & 255;
        // The highest bit of a selector spreads the sign.
        if (s & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * i);
    }
    return result;
}

// Integers of two kinds become the wider or the unsigned one; of floats and NaNs the number wins.
template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) {
    typedef std::common_type_t<A, B> T;
    if constexpr (std::is_floating_point_v<T>) return std::fmin((T)a, (T)b);
    return (T)b < (T)a ? (T)b : (T)a;
}
template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) {
    typedef std::common_type_t<A, B> T;
    if constexpr (std::is_floating_point_v<T>) return std::fmax((T)a, (T)b);
    return (T)a < (T)b ? (T)b : (T)a;
}
using std::exp;
using std::log;
using std::sqrt;

inline void __syncthreads() { emu::sync_threads(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emu::sync_warp(mask); }
template <typename T>
T emu_shuffle(unsigned mask, T x, unsigned from) {
    uint64_t bits = emu::shuffle(mask, emu::bits_of(x), from);
    T got;
    std::memcpy(&got, &bits, sizeof got);
    return got;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, unsigned apart) {
    return emu_shuffle(mask, x, emu::now->lane ^ apart);
}
template <typename T>
T __shfl_sync(unsigned mask, T x, unsigned from, unsigned width = 32) {
    return emu_shuffle(mask, x, (emu::now->lane & ~(width - 1)) | (from & (width - 1)));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T x, unsigned up) {
    unsigned lane = emu::now->lane;
    return emu_shuffle(mask, x, lane < up ? lane : lane - up);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) { return emu::ballot(mask, vote); }
inline bool __all_sync(unsigned mask, bool vote) { return emu::ballot(mask, !vote) == 0; }
inline bool __any_sync(unsigned mask, bool vote) { return emu::ballot(mask, vote) != 0; }
inline unsigned __reduce_add_sync(unsigned mask, unsigned x) {
    unsigned sum = 0;
    for (unsigned lane = 0; lane < 32; ++lane) sum += emu_shuffle(mask, x, lane);
    return sum;
}
inline unsigned __cvta_generic_to_shared(const void* p) { return emu::shared_address(p); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __nanosleep(unsigned) { emu::poll(); }

template <typename T, typename F>
T emu_atomic(T* at, F change) {
    T old = __atomic_load_n(at, __ATOMIC_SEQ_CST), next;
    do {
        next = change(old);
    } while (!__atomic_compare_exchange(at, &old, &next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}
template <typename T, typename U>
T atomicAdd(T* at, U x) {
    return emu_atomic(at, [&](T old) { return (T)(old + (T)x); });
}
template <typename T, typename U>
T atomicMax(T* at, U x) {
    return emu_atomic(at, [&](T old) { return std::max(old, (T)x); });
}
template <typename T, typename U>
T atomicMin(T* at, U x) {
    return emu_atomic(at, [&](T old) { return std::min(old, (T)x); });
}
