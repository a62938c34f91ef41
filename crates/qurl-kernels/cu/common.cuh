// What the kernels share: number formats, reductions with a fixed order, the CPU's exponential.
//
// No toolkit headers: the machine that compiles this at run time may have nothing but NVRTC. Conversions are
// made of integer operations that mirror the CPU's, so that quantized values and scales are the same to the
// last bit on every device.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define WARP 32
#define FULL 0xffffffffu
#define INFINITY_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fffffff)

#define LOG2E 1.44269504088896340736f

// Rows of one sequence in a batch.
struct Span {
    u32 row, rows;  // where they begin, and how many
    u32 position;   // of the first, in its sequence
    u32 pages;      // where the numbers of the sequence's pages begin
};

// The first line of kernels that are launched to overlap: lets the next kernel begin (it waits in the same
// way), and waits until everything before is done. What is hidden is the time of launching.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
}

// Words that blocks publish for each other in memory, without flags and fences: a word that is EMPTY has not
// been published. Who has read it makes the place EMPTY again. Only resident blocks may spin-wait for each
// other.
#define EMPTY 0xffffffffu

__device__ __forceinline__ void publish(u32* at, u32 word) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}

__device__ __forceinline__ u32 spin_wait(const u32* at) {
    u32 word;
    do {
        asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
    } while (word == EMPTY);
    return word;
}

// bf16 is kept as its bits.
struct bf16 {
    u16 bits;
};

// To the nearest bf16, ties to even.
__device__ __forceinline__ u16 bf16_bits(float x) {
    u32 b = __float_as_uint(x);
    if (x != x) return (u16)((b >> 16) | 0x40);
    return (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

__device__ __forceinline__ float bf16_value(u16 b) { return __uint_as_float((u32)b << 16); }

// Two neighbours in one word, the first in the low half.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    return (u32)bf16_bits(low) | ((u32)bf16_bits(high) << 16);
}

// The nearest E4M3 code, ties to even, saturating at 448.
__device__ __forceinline__ u8 e4m3_code(float x) {
    float m = fabsf(x);
    m = m < 448.0f ? m : 448.0f;
    u32 code;
    if (m < 0.015625f) {
        code = (u32)rintf(m * 512.0f);
    } else {
        u32 b = __float_as_uint(m);
        code = ((b + 0x7ffff + ((b >> 20) & 1)) >> 20) - (120u << 3);
    }
    return (u8)(code | (__float_as_uint(x) >> 24 & 0x80u));
}

// The same for four neighbours, the first in the lowest byte; a NaN may become another code.
__device__ __forceinline__ u32 e4m3_codes(float4 x) {
#if __CUDA_ARCH__ >= 890
    u32 codes;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(codes)
        : "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w));
    return codes;
#else
    return (u32)e4m3_code(x.x) | (u32)e4m3_code(x.y) << 8 | (u32)e4m3_code(x.z) << 16 |
           (u32)e4m3_code(x.w) << 24;
#endif
}

__device__ __forceinline__ float e4m3_value(u8 code) {
    float v = __uint_as_float((u32)(code & 0x7f) << 20) * __uint_as_float(247u << 23);
    return code & 0x80 ? -v : v;
}

// The nearest signed byte, ties to even, saturating as a Rust cast does (a NaN becomes 0).
__device__ __forceinline__ i8 i8_code(float x) {
    float r = rintf(x);
    if (r != r) return 0;
    return (i8)(int)fminf(fmaxf(r, -128.0f), 127.0f);
}

// The same for four neighbours, the first in the lowest byte.
__device__ __forceinline__ u32 i8_codes(float4 x) {
    int a, b, c, d;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(a) : "f"(x.x));
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(b) : "f"(x.y));
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(c) : "f"(x.z));
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(d) : "f"(x.w));
    u32 high, codes;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(high) : "r"(d), "r"(c));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(codes) : "r"(b), "r"(a), "r"(high));
    return codes;
}

// 1 / sqrt(mean) of a norm; NaN where the squares have overflowed: 0 would silently make zeros of the row.
__device__ __forceinline__ float reciprocal_root(float mean) {
    return __float_as_uint(mean) == 0x7f800000u ? NAN_F : __fdiv_rn(1.0f, __fsqrt_rn(mean));
}

// A number in [0, 1) and random bits that depend on seed and place alone, as on the CPU.
__device__ __forceinline__ u32 random_bits(u64 seed, u64 index) {
    u64 x = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return (u32)((x ^ (x >> 31)) >> 32);
}

__device__ __forceinline__ float unit_of(u32 random) { return (float)(random >> 8) * (1.0f / 16777216.0f); }

// Scale of numbers whose absmax has these bits; NaN where one of them is not finite.
__device__ __forceinline__ float scale_of(u32 absmax_bits, float max) {
    float largest = __uint_as_float(absmax_bits);
    if (absmax_bits >= 0x7f800000u) return NAN_F;
    if (largest < __uint_as_float(27u << 23)) return 1.0f;
    return __fdiv_rn(largest, max);
}

// Scale of the keys or values of a token and head: rounded up to sixteen significant bits, so that rounding
// twice changes nothing.
__device__ __forceinline__ float kv_scale(u32 absmax_bits, float max) {
    float scale = scale_of(absmax_bits, max);
    return scale != scale ? scale : __uint_as_float((__float_as_uint(scale) + 0xffu) & ~0xffu);
}

// The CPU's e^x: within two units in the last place, never 0, a NaN stays.
__device__ __forceinline__ float exp_cpu(float x) {
    x = x > -87.0f || x != x ? x : -87.0f;
    x = x < 88.0f || x != x ? x : 88.0f;
    float n = rintf(__fmul_rn(x, 1.44269504088896340736f));
    float r = __fmaf_rn(n, -0.6933594f, x);
    r = __fmaf_rn(n, 2.1219444e-4f, r);
    float p = 1.9875691e-4f;
    p = __fmaf_rn(p, r, 1.3981999e-3f);
    p = __fmaf_rn(p, r, 8.333452e-3f);
    p = __fmaf_rn(p, r, 4.1665795e-2f);
    p = __fmaf_rn(p, r, 1.6666665e-1f);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(__fmul_rn(r, r), p, __fadd_rn(r, 1.0f));
    return __fmul_rn(p, __uint_as_float((u32)((int)n + 127) << 23));
}

// 2^x, by the special-function unit. For kernels that are bound by their exponentials.
__device__ __forceinline__ float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// Sum over a warp; every lane gets it. The order is fixed.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(FULL, x, d);
    return x;
}

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(FULL, x, d);
    return x;
}

// Maximum over a warp; a NaN wins.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        float y = __shfl_xor_sync(FULL, x, d);
        x = y > x || y != y ? y : x;
    }
    return x;
}

__device__ __forceinline__ u32 warp_max(u32 x) {
    u32 largest;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(x));
    return largest;
}

// Sum over a block of THREADS threads; every thread gets it. `buffer` holds one value per warp.
template <int THREADS, typename T>
__device__ __forceinline__ T block_sum(T x, T* buffer) {
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0) buffer[threadIdx.x / WARP] = x;
    __syncthreads();
    T total = buffer[0];
#pragma unroll
    for (int i = 1; i < THREADS / WARP; ++i) total += buffer[i];
    return total;
}

__device__ __forceinline__ u32 magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Sums over one chunk of a row's scaled logits.
struct Partial {
    float largest;
    u32 argmax;
    // Sum of e^(x - largest), and of e^(x - largest) (x - largest).
    float total;
    float weighted;
};

// A row's whole distribution.
struct Distribution {
    double largest;
    double total;
    double log_total;
    double weighted;
    u32 argmax;
    // Whether every sum is finite.
    bool finite;

    __device__ __forceinline__ float logp(float scaled_logit) const {
        return (float)((double)scaled_logit - largest - log_total);
    }
    __device__ __forceinline__ float entropy() const { return (float)(log_total - weighted / total); }
    __device__ __forceinline__ float lse() const { return (float)(largest + log_total); }
};

// Joins the chunks of a row, by one warp. The order is fixed by the number of chunks.
__device__ __forceinline__ Distribution join_partials(const Partial* partials, u32 chunks) {
    u32 lane = threadIdx.x % WARP;
    float best = -INFINITY_F;
    u32 argmax = 0xffffffffu;
    bool finite = true;
    for (u32 i = lane; i < chunks; i += WARP) {
        Partial p = partials[i];
        finite = finite && fabsf(p.largest) < INFINITY_F && fabsf(p.total) < INFINITY_F &&
                 fabsf(p.weighted) < INFINITY_F;
        if (p.largest > best || p.largest != p.largest) {
            best = p.largest;
            argmax = p.argmax;
        }
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        float other = __shfl_xor_sync(FULL, best, d);
        u32 at = __shfl_xor_sync(FULL, argmax, d);
        if (other > best || (other == best && at < argmax) || (other != other && best == best)) {
            best = other;
            argmax = at;
        }
    }
    double largest = best, total = 0.0, weighted = 0.0;
    for (u32 i = lane; i < chunks; i += WARP) {
        double shift = (double)partials[i].largest - largest, factor = exp(shift);
        total = __dadd_rn(total, __dmul_rn(factor, (double)partials[i].total));
        double inner = __dadd_rn((double)partials[i].weighted, __dmul_rn(shift, (double)partials[i].total));
        weighted = __dadd_rn(weighted, __dmul_rn(factor, inner));
    }
    Distribution d;
    d.largest = largest;
    d.total = warp_sum(total);
    d.weighted = warp_sum(weighted);
    d.log_total = log(d.total);
    d.argmax = argmax;
    d.finite = __all_sync(FULL, finite);
    return d;
}
