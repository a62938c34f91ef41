// The epilogue of a GEMM on Hopper: see gemm_hopper.cuh.
//
// Sums lie in registers as the tensor cores put them, 16 rows of weights by all tokens in a warp. They are
// transposed in a small buffer of the warp in shared memory, scaled, and written in runs of 16 rows.
#pragma once
#include "bits4.cuh"
#include "common.cuh"
#include "gemm_sums.cuh"
#include "mma.cuh"

// Rows may be gate projections, then as many up projections. A block that has gate rows then has their up
// rows, too, and cuts their sums alike; with GATING_SWIGLU they become silu(gate) * up. For training a
// GEMM also keeps the two, rounded to bf16; silu(gate) * up is made of the sums, so its bits are those of the
// engine.

struct GemmArgs {
    const u8* weights;       // [n / 64][k_blocks][64][128 bytes]
    const float* w_scales;   // [n], or one for all (nvfp4), or null
    const float* x_scales;   // [tokens], or null
    const float* bias;       // [n], or null; none with GATING_SWIGLU
    float* out;              // [tokens, n]; with GATING_SWIGLU [tokens, n / 2], in bf16 if the GEMM is
    uint4* partials;         // STREAM: partial sums; EMPTY between kernels
    int tokens, n, k_blocks;
    int ranges;              // STREAM, VIRTUAL: the number of ranges
    int add;                 // out += instead of out =
    int gating;              // what the rows are
    u32* absmax;  // with GATING_SWIGLU: that of every token's results, [tokens][ABSMAX_STRIDE], or null
    u16* kept;    // with GATING_SWIGLU: takes gate and up projections in bf16, [tokens, n], or null
};

// A warp transposes STRETCH tokens in shared memory at a time; the padded length of their rows there.
const int STRETCH_ROW = 20;

template <int TOK>
struct WarpBuffer {
    static const int STEP = TOK < STRETCH ? TOK : STRETCH;
    // A warp's place to transpose sums, the scales of all tokens, and what its 16 rows are finished with.
    static const int TOKEN_SCALES = STEP * STRETCH_ROW, ROW_SCALES = TOKEN_SCALES + TOK,
                     ROW_OTHERS = ROW_SCALES + 16;
    static const int FLOATS = ROW_OTHERS + 16;
};

// Prefetches the scales of a token tile into a warp's buffer.
template <int FORMAT, int TOK>
__device__ __forceinline__ void prefetch_scales(const GemmArgs& a, u32 token, float* buffer) {
    if (!HAS_SCALES(FORMAT)) return;
    __syncwarp();
    for (u32 t = threadIdx.x % WARP; t < TOK; t += WARP) {
        copy_4(
            smem_address(buffer + WarpBuffer<TOK>::TOKEN_SCALES + t), a.x_scales + token + t,
            token + t < a.tokens
        );
    }
}

// Stores or adds four numbers at once; one addition per element, so its order cannot vary. (Left to the
// compiler, stores of four numbers became four stores, each a part of a sector.)
__device__ __forceinline__ void write_four(float* to, float4 v, bool store, bool add) {
    asm volatile(
        "{\n"
        ".reg .pred store, add;\n"
        "setp.ne.b32 store, %5, 0;\n"
        "setp.ne.b32 add, %6, 0;\n"
        "@store st.global.v4.f32 [%0], {%1, %2, %3, %4};\n"
        "@add red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n"
        "}\n" ::"l"(to),
        "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"((int)store), "r"((int)add));
}

__device__ __forceinline__ void write_four_bf16(u16* to, float4 v, bool store) {
    asm volatile(
        "{\n"
        ".reg .pred store;\n"
        "setp.ne.b32 store, %3, 0;\n"
        "@store st.global.v2.b32 [%0], {%1, %2};\n"
        "}\n" ::"l"(to),
        "r"(bf16_two(v.x, v.y)), "r"(bf16_two(v.z, v.w)), "r"((int)store));
}

// What a lane needs to finish results: it takes tokens lane / 4 + {0, 8, ..}, and of the warp's 16 rows four
// neighbours.
template <int FORMAT, int TOK>
struct Finish {
    float ws[4];
    float other[4];  // bias, or the scales of the up rows: with GATING_SWIGLU there is no bias
    u32 width, row;
    int left;  // tokens from the lane's first on, if it has rows
    u64 place;

    // With gating the second warpgroup has the up rows.
    static __device__ __forceinline__ bool is_up() { return threadIdx.x >= 128; }

    // With GATING_SWIGLU `row` is that of the gate projection also for warps that have the up rows.
    static __device__ u32 own_row(const GemmArgs& a, u32 first_row) {
        return a.gating == GATING_SWIGLU && is_up() ? first_row - a.n / 2 : first_row;
    }

    // Prefetches what the rows are finished with, before their sums are there: the scales of 16 rows, and
    // those of their up rows or the bias. `fetch` waits for them, and must before the next tile prefetches,
    // even if nothing of this one is stored. (nvfp4 has one scale for all rows.)
    __device__ void prefetch(const GemmArgs& a, u32 first_row, float* buffer) {
        if (FORMAT == NVFP4) ws[0] = __fmul_rn(*a.w_scales, NVFP4_FACTOR);
        u32 lane = threadIdx.x % WARP, row = own_row(a, first_row) + lane % 16,
            width = a.gating == GATING_SWIGLU ? a.n / 2 : a.n;
        const float* from = lane >= 16 && a.gating != GATING_SWIGLU ? a.bias
                            : HAS_SCALES(FORMAT)                    ? a.w_scales
                                                                    : nullptr;
        if (from)
            copy_4(
                smem_address(buffer + WarpBuffer<TOK>::ROW_SCALES + lane),
                from + (lane >= 16 && a.gating == GATING_SWIGLU ? width : 0) + row, row < width
            );
    }

    __device__ void fetch(const GemmArgs& a, u32 first_row, u32 token, const float* buffer) {
        row = own_row(a, first_row);
        u32 quad = threadIdx.x % 4, eighth = threadIdx.x % WARP / 4;
        width = a.gating == GATING_SWIGLU ? a.n / 2 : a.n;
        if (HAS_SCALES(FORMAT) || a.bias) {
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncwarp();
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (HAS_SCALES(FORMAT)) ws[e] = buffer[WarpBuffer<TOK>::ROW_SCALES + quad * 4 + e];
                other[e] = buffer[WarpBuffer<TOK>::ROW_OTHERS + quad * 4 + e];
            }
        }
        place = (u64)(token + eighth) * width + row + quad * 4;
        left = row + quad * 4 < width ? (int)(a.tokens - token - eighth) : 0;
    }

    // Sums of four rows as numbers.
    static __device__ float4 scaled(float4 sums, const float (&ws)[4], float x_scale) {
        float v[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            typename Sum<FORMAT>::type sum;
            from_bits(sum, v[e]);
            v[e] = (float)sum;
            if (HAS_SCALES(FORMAT)) v[e] = __fmul_rn(v[e], __fmul_rn(x_scale, ws[e]));
            if (FORMAT == NVFP4) v[e] = __fmul_rn(v[e], ws[0]);
        }
        return make_float4(v[0], v[1], v[2], v[3]);
    }

    // Writes tokens from `first` on, which lie in the warp's buffer from its token `at` on: COUNT, or the
    // first `some` of them.
    template <int COUNT>
    __device__ void flush(const GemmArgs& a, float* buffer, u32 first, u32 at = 0, int some = COUNT) const {
        if (a.gating == GATING_SWIGLU) return flush_gated<COUNT>(a, buffer, first, at, some);
        u32 quad = threadIdx.x % 4, eighth = threadIdx.x % WARP / 4;
        const float* from = buffer + (at + eighth) * STRETCH_ROW + quad * 4;
        const float* xs = buffer + WarpBuffer<TOK>::TOKEN_SCALES + first + eighth;
        float* to = a.out + place + (u64)first * width;
        auto result = [&](int t) {
            float4 v = scaled(
                *reinterpret_cast<const float4*>(from + t * STRETCH_ROW), ws, HAS_SCALES(FORMAT) ? xs[t] : 1.0f
            );
            float4 more = make_float4(
                __fadd_rn(v.x, other[0]), __fadd_rn(v.y, other[1]), __fadd_rn(v.z, other[2]),
                __fadd_rn(v.w, other[3])
            );
            return a.bias ? more : v;
        };
        if (a.n % 4 != 0) {
#pragma unroll 1
            for (int t = 0; t < min(COUNT, some) && left > (int)first + t; t += 8, to += 8 * (u64)width) {
                float4 v = result(t);
                float one[4] = {v.x, v.y, v.z, v.w};
                for (int e = 0; e < 4 && row + quad * 4 + e < a.n; ++e)
                    to[e] = a.add ? __fadd_rn(to[e], one[e]) : one[e];
            }
            return;
        }
#pragma unroll
        for (int t = 0; t < COUNT; t += 8, to += 8 * (u64)width) {
            bool has = t < some && left > (int)first + t;
            write_four(to, result(t), has && !a.add, has && a.add);
        }
    }

    // A warp of the first group has the gate rows, the same warp of the second their up rows. Each takes half
    // of the tokens. They come in whole tiles: a token that is there has all 16 rows.
    template <int COUNT>
    __device__ void flush_gated(const GemmArgs& a, float* buffer, u32 first, u32 at, int some) const {
        u32 quad = threadIdx.x % 4, eighth = threadIdx.x % WARP / 4;
        u32 half = is_up() ? COUNT / 2 : 0;
        const float* gate = (is_up() ? buffer - 4 * WarpBuffer<TOK>::FLOATS : buffer) +
                            (at + half + eighth) * STRETCH_ROW + quad * 4;
        const float* xs = buffer + WarpBuffer<TOK>::TOKEN_SCALES + first + half + eighth;
        u64 to = place + (u64)(first + half) * width;
        u32 absmax[COUNT / 16];
        pair_sync();
#pragma unroll
        for (int t = 0; t < COUNT / 2; t += 8, gate += 8 * STRETCH_ROW, to += 8 * (u64)width) {
            bool has = (int)half + t < some && left > (int)(first + half) + t;
            float x_scale = HAS_SCALES(FORMAT) ? xs[t] : 1.0f;
            float4 g = scaled(*reinterpret_cast<const float4*>(gate), ws, x_scale),
                   u = scaled(
                       *reinterpret_cast<const float4*>(gate + 4 * WarpBuffer<TOK>::FLOATS),
                       FORMAT == NVFP4 ? ws : other, x_scale
                   );
            float4 v = make_float4(
                silu_times(g.x, u.x), silu_times(g.y, u.y), silu_times(g.z, u.z), silu_times(g.w, u.w)
            );
            if (!HAS_SCALES(FORMAT)) {
                write_four_bf16(reinterpret_cast<u16*>(a.out) + to, v, has);
            } else {
                write_four(a.out + to, v, has, false);
                absmax[t / 8] =
                    max(max(magnitude_bits(v.x), magnitude_bits(v.y)),
                        max(magnitude_bits(v.z), magnitude_bits(v.w)));
            }
            // Rows of the kept projections are twice as long.
            u16* kept = a.kept + (2 * to - row - quad * 4);
            write_four_bf16(kept, g, has && a.kept);
            write_four_bf16(kept + width, u, has && a.kept);
        }
        if (HAS_SCALES(FORMAT) && a.absmax) {
#pragma unroll
            for (int t = 0; t < COUNT / 2; t += 8) {
                u32 row_absmax = absmax[t / 8];
                row_absmax = max(row_absmax, __shfl_xor_sync(FULL, row_absmax, 1));
                row_absmax = max(row_absmax, __shfl_xor_sync(FULL, row_absmax, 2));
                bool publishes = quad == 0 && (int)half + t < some && left > (int)(first + half) + t;
                if (publishes)
                    atomicMax(
                        a.absmax + (u64)(a.tokens - left + first + half + t) * ABSMAX_STRIDE, row_absmax
                    );
            }
        }
        pair_sync();
    }

    // Waits for the warp of the other group.
    static __device__ __forceinline__ void pair_sync() {
        asm volatile("bar.sync %0, 64;" ::"r"(1 + threadIdx.x / WARP % 4) : "memory");
    }
};

// Turns sums of 8 tokens around: a lane has rows lane / 4 + {0, 8} of tokens 2 (lane % 4) + {0, 1}.
template <typename S>
__device__ __forceinline__ void transpose(float* buffer, int token, S s0, S s1, S s2, S s3) {
    u32 quad = threadIdx.x % 4, eighth = threadIdx.x % WARP / 4;
    float* to = buffer + (token + quad * 2) * STRETCH_ROW + eighth;
    to[0] = sum_bits(s0);
    to[STRETCH_ROW] = sum_bits(s1);
    to[8] = sum_bits(s2);
    to[STRETCH_ROW + 8] = sum_bits(s3);
}

// Stores the sums of 16 rows of one warp. They go through `buffer`, so that memory is written in runs of 16
// rows, in a short loop: writing them from where they are took longer than the GEMM itself, thousands
// of instructions that run once.
template <int FORMAT, int TOK>
__device__ __forceinline__ void store(
    const GemmArgs& a, const Finish<FORMAT, TOK>& finish, typename Sum<FORMAT>::type (&d)[TOK / 2],
    float* buffer
) {
    const int STEP = WarpBuffer<TOK>::STEP;
#pragma unroll(TOK > 64 ? 1 : 2)
    for (int first = 0; first < TOK; first += STEP) {
        __syncwarp();
        // Registers have no addresses: one of these is the stretch.
#pragma unroll
        for (int f = 0; f < TOK; f += STEP) {
            if (f != first) continue;
#pragma unroll
            for (int t = 0; t < STEP; t += 8) {
                int i = (f + t) / 2;
                transpose(buffer, t, d[i], d[i + 1], d[i + 2], d[i + 3]);
            }
        }
        __syncwarp();
        finish.template flush<STEP>(a, buffer, first);
    }
}
