// Causal grouped-query attention with plain arithmetic, for any head dimension: the reference of the
// tensor-core kernels, and the way where they do not fit.
//
// A warp takes one query row and head and walks the keys in tiles of 32 positions with a running softmax.
// What a row sums, and in which order, depends on its position alone, so decode gives the bits of prefill.
// A row at position p sees the `window` keys that end with its own; tiles begin at multiples of 32 whatever
// the window, and those that it hides are left out. The backward pass takes a warp per query row and head
// (dq) and a warp per key row and key/value head (dk, dv).
#include "common.cuh"

// Columns of a head that a lane holds.
#define PER_LANE (MAX_HEAD_DIM / WARP)

__device__ __forceinline__ float stored(
    const void* data, const float* scales, u32 format, u64 place, u32 head_dim, u32 i
) {
    u64 at = place * head_dim + i;
    switch (format) {
        case KV_F32: return ((const float*)data)[at];
        case KV_BF16: return bf16_value(((const u16*)data)[at]);
        case KV_INT8: return __fmul_rn((float)((const i8*)data)[at], scales[place]);
        default: return __fmul_rn(e4m3_value(((const u8*)data)[at]), scales[place]);
    }
}

// The span that a row belongs to: spans are sorted by row.
__device__ __forceinline__ Span span_of(const Span* spans, u32 count, u32 row) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (spans[middle].row <= row) low = middle;
        else high = middle;
    }
    return spans[low];
}

extern "C" __global__ void __launch_bounds__(PLAIN_WARPS* WARP) attention_forward(
    const float* qkv, u32 width, u32 heads, u32 group, u32 head_dim, float scale, const Span* spans,
    u32 span_count, const u32* pages, u32 page_size, u32 format, const void* keys, const void* values,
    const float* key_scales, const float* value_scales, u32 rows, u32 window, float* out, float* lse
) {
    __shared__ float queries[PLAIN_WARPS][MAX_HEAD_DIM];
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 task = blockIdx.x * PLAIN_WARPS + warp;
    if (task >= rows * heads) return;
    u32 row = task / heads, head = task % heads, kv_head = head / group, kv_heads = heads / group;
    Span span = span_of(spans, span_count, row);
    if (row < span.row || row >= span.row + span.rows) return;
    const u32* table = pages + span.pages;
    const float* q = qkv + (u64)row * width + head * head_dim;
    for (u32 i = lane; i < head_dim; i += WARP) queries[warp][i] = __fmul_rn(q[i], scale);
    __syncwarp();
    u32 seen = span.position + row - span.row + 1, begin = seen - min(seen, window);
    float largest = -INFINITY_F, total = 0.0f, sums[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) sums[j] = 0.0f;
    for (u32 first = begin / WARP * WARP; first < seen; first += WARP) {
        u32 position = first + lane;
        bool sees = position >= begin && position < seen;
        float score = -INFINITY_F;
        u64 place = 0;
        if (sees) {
            place =
                ((u64)table[position / page_size] * kv_heads + kv_head) * page_size + position % page_size;
            score = 0.0f;
            for (u32 i = 0; i < head_dim; ++i) {
                score =
                    __fmaf_rn(queries[warp][i], stored(keys, key_scales, format, place, head_dim, i), score);
            }
        }
        float tile = warp_max(score);
        float now = tile < largest ? largest : tile;
        float difference = __fsub_rn(largest, now);
        float rescale = difference == 0.0f ? 1.0f : exp_cpu(difference);
        largest = now;
        float weight = sees ? exp_cpu(__fsub_rn(score, largest)) : 0.0f;
        total = __fmaf_rn(total, rescale, warp_sum(weight));
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) sums[j] = __fmul_rn(sums[j], rescale);
        u32 count = min((u32)WARP, seen - first);
        for (u32 key = begin - min(begin, first); key < count; ++key) {
            float w = __shfl_sync(FULL, weight, key);
            u64 at = __shfl_sync(FULL, place, key);
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) {
                u32 i = j * WARP + lane;
                if (i < head_dim)
                    sums[j] = __fmaf_rn(w, stored(values, value_scales, format, at, head_dim, i), sums[j]);
            }
        }
    }
    float inverse = __fdiv_rn(1.0f, total);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        u32 i = j * WARP + lane;
        if (i < head_dim) out[((u64)row * heads + head) * head_dim + i] = __fmul_rn(sums[j], inverse);
    }
    if (lse && lane == 0) lse[(u64)row * heads + head] = __fadd_rn(largest, logf(total));
}

// deltas[row, head] = dout . out.
extern "C" __global__ void __launch_bounds__(PLAIN_WARPS* WARP)
    attention_deltas(const float* out, const float* dout, u32 count, u32 head_dim, float* deltas) {
    u32 task = blockIdx.x * PLAIN_WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (task >= count) return;
    float sum = 0.0f;
    for (u32 i = lane; i < head_dim; i += WARP) {
        u64 at = (u64)task * head_dim + i;
        sum = __fmaf_rn(out[at], dout[at], sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) deltas[task] = sum;
}

// The gradient of the queries: a warp a row and head.
extern "C" __global__ void __launch_bounds__(PLAIN_WARPS* WARP) attention_backward_queries(
    const float* qkv, u32 width, u32 heads, u32 group, u32 head_dim, float scale, const Span* spans,
    u32 span_count, u32 rows, u32 window, const float* dout, const float* lse, const float* deltas,
    float* dqkv
) {
    __shared__ float queries[PLAIN_WARPS][MAX_HEAD_DIM], gradients[PLAIN_WARPS][MAX_HEAD_DIM];
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 task = blockIdx.x * PLAIN_WARPS + warp;
    if (task >= rows * heads) return;
    u32 row = task / heads, head = task % heads, kv_head = head / group, kv_heads = heads / group;
    Span span = span_of(spans, span_count, row);
    if (row < span.row || row >= span.row + span.rows) return;
    for (u32 i = lane; i < head_dim; i += WARP) {
        queries[warp][i] = __fmul_rn(qkv[(u64)row * width + head * head_dim + i], scale);
        gradients[warp][i] = dout[((u64)row * heads + head) * head_dim + i];
    }
    __syncwarp();
    float own_lse = lse[(u64)row * heads + head], delta = deltas[(u64)row * heads + head];
    float sums[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) sums[j] = 0.0f;
    u32 seen = row - span.row + 1, begin = seen - min(seen, window);
    const float* keys = qkv + (u64)span.row * width + (heads + kv_head) * head_dim;
    const float* values = keys + kv_heads * head_dim;
    for (u32 first = begin / WARP * WARP; first < seen; first += WARP) {
        float slope = 0.0f;
        if (first + lane >= begin && first + lane < seen) {
            const float* k = keys + (u64)(first + lane) * width;
            const float* v = values + (u64)(first + lane) * width;
            float score = 0.0f, dp = 0.0f;
            for (u32 i = 0; i < head_dim; ++i) {
                score = __fmaf_rn(queries[warp][i], k[i], score);
                dp = __fmaf_rn(gradients[warp][i], v[i], dp);
            }
            slope = __fmul_rn(exp_cpu(__fsub_rn(score, own_lse)), __fsub_rn(dp, delta));
        }
        u32 count = min((u32)WARP, seen - first);
        for (u32 key = begin - min(begin, first); key < count; ++key) {
            float s = __shfl_sync(FULL, slope, key);
            const float* k = keys + (u64)(first + key) * width;
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) {
                u32 i = j * WARP + lane;
                if (i < head_dim) sums[j] = __fmaf_rn(s, k[i], sums[j]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        u32 i = j * WARP + lane;
        if (i < head_dim) dqkv[(u64)row * width + head * head_dim + i] = __fmul_rn(sums[j], scale);
    }
}

// The gradients of keys and values: a warp a row and key/value head, over the later queries that see it in
// order.
extern "C" __global__ void __launch_bounds__(PLAIN_WARPS* WARP)
    attention_backward_keys(const float* qkv, u32 width, u32 heads, u32 group, u32 head_dim, float scale,
                            const Span* spans, u32 span_count, u32 rows, u32 window, const float* dout,
                            const float* lse, const float* deltas, float* dqkv) {
    __shared__ float keys[PLAIN_WARPS][MAX_HEAD_DIM], values[PLAIN_WARPS][MAX_HEAD_DIM];
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 kv_heads = heads / group, task = blockIdx.x * PLAIN_WARPS + warp;
    if (task >= rows * kv_heads) return;
    u32 row = task / kv_heads, kv_head = task % kv_heads;
    Span span = span_of(spans, span_count, row);
    if (row < span.row || row >= span.row + span.rows) return;
    u64 key_at = (u64)row * width + (heads + kv_head) * head_dim, value_at = key_at + kv_heads * head_dim;
    for (u32 i = lane; i < head_dim; i += WARP) {
        keys[warp][i] = qkv[key_at + i];
        values[warp][i] = qkv[value_at + i];
    }
    __syncwarp();
    float dk[PER_LANE], dv[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) dk[j] = dv[j] = 0.0f;
    u32 end = row + min(span.row + span.rows - row, window);
    for (u32 head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        for (u32 first = row; first < end; first += WARP) {
            float weight = 0.0f, slope = 0.0f;
            if (first + lane < end) {
                u64 other = first + lane;
                const float* q = qkv + other * width + head * head_dim;
                const float* g = dout + (other * heads + head) * head_dim;
                float score = 0.0f, dp = 0.0f;
                for (u32 i = 0; i < head_dim; ++i) {
                    score = __fmaf_rn(__fmul_rn(q[i], scale), keys[warp][i], score);
                    dp = __fmaf_rn(g[i], values[warp][i], dp);
                }
                weight = exp_cpu(__fsub_rn(score, lse[other * heads + head]));
                slope = __fmul_rn(__fmul_rn(weight, __fsub_rn(dp, deltas[other * heads + head])), scale);
            }
            u32 count = min((u32)WARP, end - first);
            for (u32 query = 0; query < count; ++query) {
                float w = __shfl_sync(FULL, weight, query), s = __shfl_sync(FULL, slope, query);
                u64 other = first + query;
#pragma unroll
                for (int j = 0; j < PER_LANE; ++j) {
                    u32 i = j * WARP + lane;
                    if (i < head_dim) {
                        dk[j] = __fmaf_rn(s, qkv[other * width + head * head_dim + i], dk[j]);
                        dv[j] = __fmaf_rn(w, dout[(other * heads + head) * head_dim + i], dv[j]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        u32 i = j * WARP + lane;
        if (i < head_dim) {
            dqkv[key_at + i] = dk[j];
            dqkv[value_at + i] = dv[j];
        }
    }
}
