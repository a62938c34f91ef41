// Causal grouped-query attention over paged keys and values: prefill (many queries) and decode (one per
// sequence).
//
// The query heads that share a key/value head go together, so the keys are read once for all of them. Scores,
// softmax and weighted values of a tile of 64 keys are computed on their own (m, l, o) and folded into a
// running state. In prefill a warp takes 16 rows, of all heads of a group; decode has its own way through a
// tile (flash_tile.cuh).
//
// Order of summation. Tiles count from position 0 and are folded in order within a split of 512 positions;
// splits are folded in order. Both kernels use the same steps, written so that the compiler cannot contract
// them differently, and a tile that a row does not see changes nothing. So a row's bits depend neither on the
// kernel nor on its neighbours.
//
// Windows. A row at position p sees the `window` keys that end with its own; where it sees all, the window is
// longer than any sequence. Tiles and splits keep their places. What is hidden from all rows of a block is
// left out; what is hidden from one of them has no weight in it: its state is empty (m = -inf, l = o = 0),
// and to fold an empty state in, or to fold into one, changes nothing (factors of exactly 1 and 0).
//
// MMAs are bf16 (with values of eight bits f16, which holds them exactly) with f32 sums; the scale of a key
// multiplies its score, that of a value its weight. In bf16 the steps of a score's MMA take its dimensions in
// order, 16 each, as wgmma does. With eight bits each lane takes HD / 4 neighbouring numbers of a key (and of
// the query) through all steps, which makes its loads 16 bytes wide.
#pragma once
#include "common.cuh"
#include "mma.cuh"

struct FlashArgs {
    const float* qkv;  // [rows, stride]: queries of all heads first
    const u8* keys;    // [page][kv_head][slot][head_dim]
    const u8* values;
    const float* key_scales;  // [page][kv_head][slot], 8-bit formats
    const float* value_scales;
    const Span* spans;
    const u32* pages;
    const u32* work;    // prefill: pairs of span and first packed row
    float* out;         // [rows, heads * head_dim]
    float* lse;         // [rows, heads], or null
    float* partials;    // decode: [span][eight heads of a group][split it sees][8][head_dim + 4]
    u32* counters;      // decode: one per span and eight heads, zero between kernels
    int stride, heads, kv_heads, page_shift, splits;  // pages of 2^page_shift tokens
    float scale;        // of scores, times log2(e)
    u32 window;         // keys that a row sees, its own included
    // decode: with these, queries and keys are rotated here, and the new keys and values stored in their
    // pages.
    const float* cos;   // [position][head_dim / 2], or null
    const float* sin;
    int output;         // decode: what `out` holds, DECODED_*
    float* out_scales;  // decode: one per row, for eight bits
    u32* absmax;        // decode, for eight bits: [row][block to][block from], EMPTY between kernels
};

template <int FORMAT, int HD>
struct Row {
    static const int BYTES = FORMAT == KV_BF16 ? HD * 2 : HD;
    static const int CHUNKS = BYTES / 16;
};

// Where the 16-byte chunk of a row lies in shared memory, so that lanes that read together have no bank
// conflicts: for matrices of eight rows, and for lanes that read chunks of their own (keys of eight bits).
template <int BYTES>
__device__ __forceinline__ u32 matrix_chunk(u32 row, u32 chunk) {
    return row * BYTES + (chunk ^ (row & 7)) * 16;
}

template <int BYTES>
__device__ __forceinline__ u32 key_chunk(u32 row, u32 chunk) {
    if (BYTES == 256) return row * 256 + ((chunk ^ (chunk >> 3) ^ (row & 1) * 2) * 16);
    if (BYTES == 128) return row * 128 + ((chunk ^ (row & 1)) * 16);
    return row * BYTES + chunk * 16;
}

// Two codes of a word, the first two or the last two (HALF), as f16 side by side; `biased` words are those of
// `bias_codes`.
template <int FORMAT, int HALF>
__device__ __forceinline__ u32 codes_f16(u32 biased) {
    if (FORMAT == KV_INT8) return f16_of_bytes(__byte_perm(biased, 0x64646464u, HALF ? 0x4342 : 0x4140));
#if __CUDA_ARCH__ >= 890
    u32 r;
    if (HALF) {
        asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\ncvt.rn.f16x2.e4m3x2 %0, b;\n}" : "=r"(r) : "r"(biased));
    } else {
        asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\ncvt.rn.f16x2.e4m3x2 %0, a;\n}" : "=r"(r) : "r"(biased));
    }
    return r;
#else
    // Selector 4 is a zero byte.
    return f16_of_e4m3(__byte_perm(biased, 0, HALF ? 0x3424 : 0x1404));
#endif
}

template <int FORMAT>
__device__ __forceinline__ u32 bias_codes(u32 word) {
    return FORMAT == KV_INT8 ? word ^ 0x80808080u : word;
}

// MMAs of a format.
template <bool F16>
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (F16) {
        mma_f16(d, a[0], a[1], a[2], a[3], b0, b1);
    } else {
        mma_bf16(d, a[0], a[1], a[2], a[3], b0, b1);
    }
}

template <bool F16>
__device__ __forceinline__ u32 two(float low, float high) {
    return F16 ? f16_two(low, high) : bf16_two(low, high);
}

// ---- one tile of one warp ---------------------------------------------------------------------------------

// The queries of 16 rows as left operands.
template <int HD>
struct Queries {
    u32 a[HD / 16][4];
};

template <int HD, bool F16>
__device__ __forceinline__ void load_queries(Queries<HD>& q, const float* row0, const float* row8) {
    u32 quad = threadIdx.x % 4;
    // The lane's numbers of a step: two neighbours and two more, in order or in its own quarter.
    auto four = [&](const float* row, int s) {
        float4 x = {0, 0, 0, 0};
        if (row && F16) x = *reinterpret_cast<const float4*>(row + quad * (HD / 4) + 4 * s);
        if (row && !F16) {
            float2 low = *reinterpret_cast<const float2*>(row + 16 * s + 2 * quad);
            float2 high = *reinterpret_cast<const float2*>(row + 16 * s + 8 + 2 * quad);
            x = make_float4(low.x, low.y, high.x, high.y);
        }
        return x;
    };
#pragma unroll
    for (int s = 0; s < HD / 16; ++s) {
        float4 x = four(row0, s), y = four(row8, s);
        q.a[s][0] = two<F16>(x.x, x.y);
        q.a[s][1] = two<F16>(y.x, y.y);
        q.a[s][2] = two<F16>(x.z, x.w);
        q.a[s][3] = two<F16>(y.z, y.w);
    }
}

struct Softmax {
    float m[2], l[2];
};

// Hides keys from `limit` on and before the `window` keys that end there; the first of J x 8 keys has
// position
// `first`.
template <int J>
__device__ __forceinline__ void hide_scores(
    float (&s)[J][4], const u32 (&limit)[2], u32 window, u32 first
) {
    // Keys that a row sees, and the offset of the lane's first key from the first of them, which wraps
    // around to a huge number where it comes before it.
    u32 seen[2], offset[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        seen[h] = min(limit[h], window);
        offset[h] = first + threadIdx.x % 4 * 2 - (limit[h] - seen[h]);
    }
#pragma unroll
    for (int j = 0; j < J; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
            s[j][e] = offset[e / 2] + j * 8 + e % 2 < seen[e / 2] ? s[j][e] : -INFINITY_F;
    }
}

// The largest score of each row.
template <int J>
__device__ __forceinline__ void largest_scores(const float (&s)[J][4], Softmax& soft) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float top[4];  // chains that do not wait for each other
#pragma unroll
        for (int j = 0; j < J; ++j) {
            float pair = fmaxf(s[j][2 * h], s[j][2 * h + 1]);
            top[j % 4] = j < 4 ? pair : fmaxf(top[j % 4], pair);
        }
        soft.m[h] = fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        soft.m[h] = fmaxf(soft.m[h], __shfl_xor_sync(FULL, soft.m[h], 1));
        soft.m[h] = fmaxf(soft.m[h], __shfl_xor_sync(FULL, soft.m[h], 2));
    }
}

// Scores of J x 8 keys from position `first` on, in units of log2, masked from `limit` on and before the
// `window` keys that end there, and their largest of each row. Keys are 16-bit numbers in shared memory:
// bf16, at `matrix_chunk`, or values of eight bits (SCALED) as f16, at `key_chunk`.
template <bool SCALED, int HD, int J>
__device__ __forceinline__ void tile_scores(
    const Queries<HD>& q, const u8* keys, const float* key_scales, float scale, const u32 (&limit)[2],
    u32 window, u32 first, float (&s)[J][4], Softmax& soft
) {
    const int BYTES = HD * 2;
    const int CHUNKS = BYTES / 64;  // of a lane
    const int STEPS = 2;            // of the MMA that a chunk is good for
    u32 lane = threadIdx.x % WARP, quad = lane % 4;
    // The next chunk of all keys is loaded while the last one is multiplied. MMAs of different keys follow
    // each other: each waits for nothing.
    u32 words[2][J][4];
    auto load = [&](int c) {
#pragma unroll
        for (int j = 0; j < J; ++j) {
            u32(&w)[4] = words[c % 2][j];
            if (SCALED) {
                u32 from = smem_address(keys) + key_chunk<BYTES>(j * 8 + lane / 4, quad * CHUNKS + c);
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                             : "r"(from)
                             : "memory");
            } else {
                load_matrices(
                    w, smem_address(keys) + matrix_chunk<BYTES>(j * 8 + lane % 8, 4 * c + lane / 8)
                );
            }
        }
    };
    load(0);
#pragma unroll
    for (int j = 0; j < J; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[j][e] = 0.0f;
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (c + 1 < CHUNKS) load(c + 1);
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
#pragma unroll
            for (int j = 0; j < J; ++j) {
                const u32* w = words[c % 2][j];
                mma<SCALED>(s[j], q.a[c * STEPS + k], w[2 * k], w[2 * k + 1]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < J; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float factor = SCALED ? __fmul_rn(scale, key_scales[j * 8 + quad * 2 + e % 2]) : scale;
            s[j][e] = __fmul_rn(s[j][e], factor);
        }
    }
    // Most tiles are seen by all rows.
    bool whole = first + 8 * J <= min(limit[0], limit[1]) && max(limit[0], limit[1]) <= first + window;
    if (!__all_sync(FULL, whole)) hide_scores(s, limit, window, first);
    largest_scores(s, soft);
}

// Scores become weights 2^(s - m), and their sums: of 32 keys every eighth one in order, neighbours of these
// eight sums two by two, and the sums of all 32 in order.
template <int J>
__device__ __forceinline__ void tile_weights(float (&s)[J][4], Softmax& soft) {
    float base[2] = {
        soft.m[0] == -INFINITY_F ? 0.0f : soft.m[0], soft.m[1] == -INFINITY_F ? 0.0f : soft.m[1]
    };
#pragma unroll
    for (int part = 0; part < J; part += 4) {
        float sums[4], l[2];
#pragma unroll
        for (int j = part; j < part + 4; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                s[j][e] = exp2_fast(__fsub_rn(s[j][e], base[e / 2]));
                sums[e] = j == part ? s[j][e] : __fadd_rn(sums[e], s[j][e]);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            l[h] = __fadd_rn(sums[2 * h], sums[2 * h + 1]);
            l[h] = __fadd_rn(l[h], __shfl_xor_sync(FULL, l[h], 1));
            l[h] = __fadd_rn(l[h], __shfl_xor_sync(FULL, l[h], 2));
            soft.l[h] = part == 0 ? l[h] : __fadd_rn(soft.l[h], l[h]);
        }
    }
}

// The weights of 16 keys as a left operand, times the scales of their values.
template <int FORMAT, int J>
__device__ __forceinline__ void weight_operand(
    u32 (&p)[4], const float (&s)[J][4], int k, const float* value_scales
) {
    u32 quad = threadIdx.x % 4;
    float v[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            v[h][e] = s[2 * k + h][e];
            if (FORMAT != KV_BF16)
                v[h][e] = __fmul_rn(v[h][e], value_scales[k * 16 + h * 8 + quad * 2 + e % 2]);
        }
    }
    p[0] = two<FORMAT != KV_BF16>(v[0][0], v[0][1]);
    p[1] = two<FORMAT != KV_BF16>(v[0][2], v[0][3]);
    p[2] = two<FORMAT != KV_BF16>(v[1][0], v[1][1]);
    p[3] = two<FORMAT != KV_BF16>(v[1][2], v[1][3]);
}

// How the states (m, l, o) of two neighbouring stretches of keys become one: factors for the earlier and the
// later.
__device__ __forceinline__ void fold(
    float& m, float& l, float later_m, float later_l, float& keep, float& take
) {
    float top = fmaxf(m, later_m);
    float base = top == -INFINITY_F ? 0.0f : top;
    keep = exp2_fast(__fsub_rn(m, base));
    take = exp2_fast(__fsub_rn(later_m, base));
    l = __fmaf_rn(later_l, take, __fmul_rn(l, keep));
    m = top;
}

__device__ __forceinline__ float folded(float o, float later, float keep, float take) {
    return __fmaf_rn(later, take, __fmul_rn(o, keep));
}

__device__ __forceinline__ float log_sum(float m, float l) {
    return __fmul_rn(__fadd_rn(m, log2f(l)), 0.69314718055994530942f);
}
