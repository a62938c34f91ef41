// Backward pass of causal grouped-query attention for packed whole sequences, on tensor cores.
//
// Memory stays linear: weights are recomputed from the saved logarithms of the softmax denominators. Two
// kernels share the work so that every gradient has one owner and is summed in a fixed order: one block owns
// 64 keys (and sums over the query heads that share them, then over queries), another owns 64 queries of one
// head (and sums over keys). That costs seven matmuls instead of five, and no atomic additions.
//
// A query sees the `window` keys that end with its own: key <= query < key + window. With numbers that wrap
// around that is query - key < window: where the key comes later, the difference is huge. Steps in which no
// pair of a block is that close are left out. Without a window it is longer than any sequence.
//
// Operands are bf16, made once by the first kernel together with delta = out . dout; sums are f32. These
// kernels run everywhere; on Hopper those of flash_backward_hopper.cu take their place after the first.
#include "common.cuh"
#include "mma.cuh"

struct BackwardArgs {
    const u16* qkv;      // [rows, stride] bf16
    const u16* dout;     // [rows, heads * head_dim] bf16
    const float4* facts;  // [rows, heads]
    const Span* spans;
    const u32* work;     // pairs of span and first position, in steps of 64
    float* dqkv;         // [rows, stride]
    int stride, heads, kv_heads;
    u32 window;
    float scale;
};

// One block per row: bf16 copies, and the facts of a row and head: the logarithm in base 2 of its softmax
// denominator, the dot product of its output and that one's gradient, and nothing twice (the TMA takes 16
// bytes).
extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS) flash_backward_prepare(
    const float* qkv, const float* out, const float* dout, const float* lse, u32* qkv_to, u32* dout_to,
    float4* facts, int stride, int heads, int head_dim
) {
    u64 row = blockIdx.x;
    u32 width = heads * head_dim;
    const float2* from = reinterpret_cast<const float2*>(qkv + row * stride);
    for (u32 i = threadIdx.x; i < stride / 2; i += BACKWARD_THREADS)
        qkv_to[row * (stride / 2) + i] = bf16_two(from[i].x, from[i].y);
    const float2* o = reinterpret_cast<const float2*>(out + row * width);
    const float2* d = reinterpret_cast<const float2*>(dout + row * width);
    for (u32 i = threadIdx.x; i < width / 2; i += BACKWARD_THREADS)
        dout_to[row * (width / 2) + i] = bf16_two(d[i].x, d[i].y);
    for (u32 head = threadIdx.x / WARP; head < heads; head += 4) {
        float sum = 0.0f;
        for (u32 i = threadIdx.x % WARP; i < head_dim / 2; i += WARP) {
            float2 x = o[head * head_dim / 2 + i], y = d[head * head_dim / 2 + i];
            sum = __fmaf_rn(x.x, y.x, sum);
            sum = __fmaf_rn(x.y, y.y, sum);
        }
        sum = warp_sum(sum);
        u64 at = row * heads + head;
        if (threadIdx.x % WARP == 0) facts[at] = make_float4(__fmul_rn(lse[at], LOG2E), sum, 0.0f, 0.0f);
    }
}

// ---- tiles in shared memory: rows of HD numbers, chunks of 16 bytes swizzled ------------------------------

template <int HD>
__device__ __forceinline__ u32 chunk_at(u32 row, u32 chunk) {
    return row * HD * 2 + ((chunk ^ (row & 7)) * 16);
}

// Copies rows [first, first + ROWS) of a sequence, zeros beyond its end.
template <int HD, int ROWS>
__device__ __forceinline__ void fetch_rows(u32 to, const u16* from, u64 stride, u32 first, u32 end) {
    const int CHUNKS = HD / 8;
#pragma unroll
    for (int at = threadIdx.x; at < ROWS * CHUNKS; at += BACKWARD_THREADS) {
        u32 row = at / CHUNKS, chunk = at % CHUNKS;
        bool valid = first + row < end;
        copy_16(
            to + chunk_at<HD>(row, chunk), from + (valid ? first + row : first) * stride + chunk * 8, valid
        );
    }
}

// The left operand: 16 rows from `row` on, 16 columns of step k.
template <int HD>
__device__ __forceinline__ void left_operand(u32 (&a)[4], u32 tile, u32 row, int k) {
    u32 lane = threadIdx.x % WARP;
    load_matrices(a, tile + chunk_at<HD>(row + lane % 16, k * 2 + lane / 16));
}

// The right operand of an MMA with the transpose of a tile: 16 of its rows (columns of the result), step k.
template <int HD>
__device__ __forceinline__ void right_transposed(u32 (&b)[4], u32 tile, u32 row, int k) {
    u32 lane = threadIdx.x % WARP;
    load_matrices(b, tile + chunk_at<HD>(row + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
}

// The right operand of an MMA with a tile itself: 16 rows from `row` on, columns 16 t and following.
template <int HD>
__device__ __forceinline__ void right_operand(u32 (&b)[4], u32 tile, u32 row, int t) {
    u32 lane = threadIdx.x % WARP;
    load_transposed(b, tile + chunk_at<HD>(row + lane % 16, t * 2 + lane / 16));
}

// d[j] = 16 rows of `a` . 8 rows of `b` each.
template <int HD>
__device__ __forceinline__ void scores(float (&d)[BACKWARD_PASSING / 8][4], u32 a, u32 a_row, u32 b) {
#pragma unroll
    for (int j = 0; j < BACKWARD_PASSING / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) d[j][e] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < HD / 16; ++k) {
        u32 left[4];
        left_operand<HD>(left, a, a_row, k);
#pragma unroll
        for (int j = 0; j < BACKWARD_PASSING / 8; j += 2) {
            u32 right[4];
            right_transposed<HD>(right, b, j * 8, k);
            mma_bf16(d[j], left[0], left[1], left[2], left[3], right[0], right[1]);
            mma_bf16(d[j + 1], left[0], left[1], left[2], left[3], right[2], right[3]);
        }
    }
}

// sum += p . tile, where p are 16 x BACKWARD_PASSING numbers as `scores` has them.
template <int HD>
__device__ __forceinline__ void accumulate(
    float (&sum)[HD / 8][4], const float (&p)[BACKWARD_PASSING / 8][4], u32 tile
) {
#pragma unroll
    for (int k = 0; k < BACKWARD_PASSING / 16; ++k) {
        u32 a0 = bf16_two(p[2 * k][0], p[2 * k][1]), a1 = bf16_two(p[2 * k][2], p[2 * k][3]);
        u32 a2 = bf16_two(p[2 * k + 1][0], p[2 * k + 1][1]), a3 = bf16_two(p[2 * k + 1][2], p[2 * k + 1][3]);
#pragma unroll
        for (int t = 0; t < HD / 16; ++t) {
            u32 b[4];
            right_operand<HD>(b, tile, k * 16, t);
            mma_bf16(sum[2 * t], a0, a1, a2, a3, b[0], b[1]);
            mma_bf16(sum[2 * t + 1], a0, a1, a2, a3, b[2], b[3]);
        }
    }
}

template <int HD>
__device__ __forceinline__ void clear(float (&sum)[HD / 8][4]) {
#pragma unroll
    for (int t = 0; t < HD / 8; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[t][e] = 0.0f;
    }
}

// Writes 16 rows of HD numbers, times a factor.
template <int HD>
__device__ __forceinline__ void write_rows(
    const float (&sum)[HD / 8][4], float* to, u64 stride, u32 row, u32 end, float factor
) {
    u32 lane = threadIdx.x % WARP;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        u32 r = row + lane / 4 + 8 * h;
        if (r >= end) continue;
        float* out = to + r * stride + lane % 4 * 2;
#pragma unroll
        for (int t = 0; t < HD / 8; ++t) {
            float2 pair = {__fmul_rn(sum[t][2 * h], factor), __fmul_rn(sum[t][2 * h + 1], factor)};
            *reinterpret_cast<float2*>(out + t * 8) = pair;
        }
    }
}

// ---- gradients of keys and values -------------------------------------------------------------------------

template <int HD>
__device__ __forceinline__ void backward_keys(const BackwardArgs& a) {
    const u32 OWN_BYTES = BACKWARD_TILE * HD * 2, OTHER_BYTES = BACKWARD_PASSING * HD * 2;
    extern __shared__ __align__(1024) u8 smem[];
    u32 keys = smem_address(smem), values = keys + OWN_BYTES,
        passing = values + OWN_BYTES;  // [2][queries, dout]
    float4* facts =
        reinterpret_cast<float4*>(smem + 2 * OWN_BYTES + 4 * OTHER_BYTES);  // [2][BACKWARD_PASSING]
    u32 lane = threadIdx.x % WARP, quad = lane % 4, own = threadIdx.x / WARP * 16;
    u32 kv_head = blockIdx.y, group = a.heads / a.kv_heads;
    Span span = a.spans[a.work[2 * blockIdx.x]];
    u32 first = a.work[2 * blockIdx.x + 1];
    const u16* qkv = a.qkv + (u64)span.row * a.stride;
    u32 key_column = (a.heads + kv_head) * HD, value_column = (a.heads + a.kv_heads + kv_head) * HD;
    u64 out_stride = (u64)a.heads * HD;

    // Steps: query heads of the group, and for each the queries from the first key on, as far as they see the
    // last one.
    u32 queries_seeing = min(span.rows - first, a.window + BACKWARD_TILE - 1);
    u32 blocks = (queries_seeing + BACKWARD_PASSING - 1) / BACKWARD_PASSING, steps = blocks * group;
    auto fetch = [&](u32 step) {
        if (step < steps) {
            u32 head = kv_head * group + step / blocks, query = first + step % blocks * BACKWARD_PASSING;
            u32 to = passing + step % 2 * 2 * OTHER_BYTES;
            fetch_rows<HD, BACKWARD_PASSING>(to, qkv + head * HD, a.stride, query, span.rows);
            fetch_rows<HD, BACKWARD_PASSING>(
                to + OTHER_BYTES, a.dout + span.row * out_stride + head * HD, out_stride, query, span.rows
            );
            if (threadIdx.x < BACKWARD_PASSING) {
                u32 q = query + threadIdx.x;
                const float4* from = a.facts + (u64)(span.row + min(q, span.rows - 1)) * a.heads + head;
                copy_16(smem_address(facts + step % 2 * BACKWARD_PASSING + threadIdx.x), from, q < span.rows);
            }
        }
        copies_commit();
    };
    fetch_rows<HD, BACKWARD_TILE>(keys, qkv + key_column, a.stride, first, span.rows);
    fetch_rows<HD, BACKWARD_TILE>(values, qkv + value_column, a.stride, first, span.rows);
    fetch(0);
    float dk[HD / 8][4], dv[HD / 8][4];
    clear<HD>(dk);
    clear<HD>(dv);
    float log_scale = __fmul_rn(a.scale, LOG2E);
    for (u32 step = 0; step < steps; ++step) {
        fetch(step + 1);
        copies_wait<1>();
        __syncthreads();
        u32 queries = passing + step % 2 * 2 * OTHER_BYTES, douts = queries + OTHER_BYTES;
        const float4* known = facts + step % 2 * BACKWARD_PASSING;
        u32 query = first + step % blocks * BACKWARD_PASSING;
        float p[BACKWARD_PASSING / 8][4], dp[BACKWARD_PASSING / 8][4];
        scores<HD>(p, keys, own, queries);
        scores<HD>(dp, values, own, douts);
#pragma unroll
        for (int j = 0; j < BACKWARD_PASSING / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                u32 column = j * 8 + quad * 2 + e % 2, key = first + own + lane / 4 + e / 2 * 8;
                bool seen = query + column - key < a.window && query + column < span.rows;
                float weight = exp2_fast(__fmaf_rn(p[j][e], log_scale, -known[column].x));
                p[j][e] = seen ? weight : 0.0f;
                dp[j][e] = __fmul_rn(p[j][e], __fsub_rn(dp[j][e], known[column].y));
            }
        }
        accumulate<HD>(dv, p, douts);
        accumulate<HD>(dk, dp, queries);
        __syncthreads();
    }
    float* to = a.dqkv + (u64)span.row * a.stride;
    write_rows<HD>(dk, to + key_column, a.stride, first + own, span.rows, a.scale);
    write_rows<HD>(dv, to + value_column, a.stride, first + own, span.rows, 1.0f);
}

// ---- gradients of queries ---------------------------------------------------------------------------------

template <int HD>
__device__ __forceinline__ void backward_queries(const BackwardArgs& a) {
    const u32 OWN_BYTES = BACKWARD_TILE * HD * 2, OTHER_BYTES = BACKWARD_PASSING * HD * 2;
    extern __shared__ __align__(1024) u8 smem[];
    u32 queries = smem_address(smem), douts = queries + OWN_BYTES,
        passing = douts + OWN_BYTES;  // [2][keys, values]
    u32 lane = threadIdx.x % WARP, quad = lane % 4, own = threadIdx.x / WARP * 16;
    u32 head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads);
    Span span = a.spans[a.work[2 * blockIdx.x]];
    u32 first = a.work[2 * blockIdx.x + 1];
    const u16* qkv = a.qkv + (u64)span.row * a.stride;
    const u16* key_rows = qkv + (a.heads + kv_head) * HD;
    const u16* value_rows = key_rows + a.kv_heads * HD;
    u64 out_stride = (u64)a.heads * HD;
    // From the first key that the first query sees.
    u32 first_step = (first + 1 - min(first + 1, a.window)) / BACKWARD_PASSING;
    u32 steps = (min(first + BACKWARD_TILE, span.rows) + BACKWARD_PASSING - 1) / BACKWARD_PASSING;
    auto fetch = [&](u32 step) {
        if (step < steps) {
            u32 to = passing + step % 2 * 2 * OTHER_BYTES;
            fetch_rows<HD, BACKWARD_PASSING>(to, key_rows, a.stride, step * BACKWARD_PASSING, span.rows);
            fetch_rows<HD, BACKWARD_PASSING>(
                to + OTHER_BYTES, value_rows, a.stride, step * BACKWARD_PASSING, span.rows
            );
        }
        copies_commit();
    };
    fetch_rows<HD, BACKWARD_TILE>(queries, qkv + head * HD, a.stride, first, span.rows);
    fetch_rows<HD, BACKWARD_TILE>(
        douts, a.dout + span.row * out_stride + head * HD, out_stride, first, span.rows
    );
    fetch(first_step);
    float log[2], delta[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float4 known =
            a.facts[(u64)(span.row + min(first + own + lane / 4 + 8 * h, span.rows - 1)) * a.heads + head];
        log[h] = known.x;
        delta[h] = known.y;
    }
    float dq[HD / 8][4];
    clear<HD>(dq);
    float log_scale = __fmul_rn(a.scale, LOG2E);
    for (u32 step = first_step; step < steps; ++step) {
        fetch(step + 1);
        copies_wait<1>();
        __syncthreads();
        u32 keys = passing + step % 2 * 2 * OTHER_BYTES, values = keys + OTHER_BYTES;
        // Keys that come after all queries of the warp, or that none of them sees any more, add nothing.
        u32 key_first = step * BACKWARD_PASSING, query_first = first + own;
        if (key_first <= query_first + 15 && query_first < key_first + BACKWARD_PASSING - 1 + a.window) {
            float p[BACKWARD_PASSING / 8][4], dp[BACKWARD_PASSING / 8][4];
            scores<HD>(p, queries, own, keys);
            scores<HD>(dp, douts, own, values);
#pragma unroll
            for (int j = 0; j < BACKWARD_PASSING / 8; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    u32 key = step * BACKWARD_PASSING + j * 8 + quad * 2 + e % 2,
                        query = first + own + lane / 4 + e / 2 * 8;
                    float weight = exp2_fast(__fmaf_rn(p[j][e], log_scale, -log[e / 2]));
                    bool seen = query - key < a.window;
                    dp[j][e] = seen ? __fmul_rn(weight, __fsub_rn(dp[j][e], delta[e / 2])) : 0.0f;
                }
            }
            accumulate<HD>(dq, dp, keys);
        }
        __syncthreads();
    }
    write_rows<HD>(
        dq, a.dqkv + (u64)span.row * a.stride + head * HD, a.stride, first + own, span.rows, a.scale
    );
}

#define KERNELS(hd)                                                                                \
    extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS, 2) flash_backward_keys_##hd(    \
        const u16* qkv, const u16* dout, const float4* facts, const Span* spans, const u32* work,  \
        float* dqkv, int stride, int heads, int kv_heads, u32 window, float scale                  \
    ) {                                                                                            \
        BackwardArgs args = {qkv,    dout,  facts,    spans,  work, dqkv,                          \
                             stride, heads, kv_heads, window, scale};                              \
        backward_keys<hd>(args);                                                                   \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS, 2) flash_backward_queries_##hd( \
        const u16* qkv, const u16* dout, const float4* facts, const Span* spans, const u32* work,  \
        float* dqkv, int stride, int heads, int kv_heads, u32 window, float scale                  \
    ) {                                                                                            \
        BackwardArgs args = {qkv,    dout,  facts,    spans,  work, dqkv,                          \
                             stride, heads, kv_heads, window, scale};                              \
        backward_queries<hd>(args);                                                                \
    }
KERNELS(64)
KERNELS(128)
