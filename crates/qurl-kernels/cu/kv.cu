// Keys and values of a layer in pages: [page][kv head][slot][head_dim], keys and values apart.
//
// In eight bits the keys of a token and head share a scale, and so do its values.
#include "common.cuh"

__device__ __forceinline__ float kv_scale(const float* x, u32 head_dim, float max_code) {
    u32 absmax = 0;
    for (u32 i = threadIdx.x % WARP; i < head_dim; i += WARP) absmax = max(absmax, magnitude_bits(x[i]));
    return kv_scale(warp_max(absmax), max_code);
}

// Stores the keys or values of a row and head, by one warp.
__device__ __forceinline__ void store_head(
    const float* x, u32 head_dim, u32 format, void* data, float* scales, u64 place
) {
    u32 lane = threadIdx.x % WARP;
    u64 at = place * head_dim;
    if (format == KV_F32) {
        for (u32 i = lane; i < head_dim; i += WARP) ((float*)data)[at + i] = x[i];
    } else if (format == KV_BF16) {
        for (u32 i = lane; i < head_dim; i += WARP) ((u16*)data)[at + i] = bf16_bits(x[i]);
    } else {
        float scale = kv_scale(x, head_dim, format == KV_INT8 ? 127.0f : 448.0f),
              inverse = __fdiv_rn(1.0f, scale);
        if (lane == 0) scales[place] = scale;
        for (u32 i = lane; i < head_dim; i += WARP) {
            float v = __fmul_rn(x[i], inverse);
            ((u8*)data)[at + i] = format == KV_INT8 ? (u8)i8_code(v) : e4m3_code(v);
        }
    }
}

// Rotation of queries and keys, rounding and storing in one: a warp a head of a row.
extern "C" __global__ void __launch_bounds__(128)
    rope_write(float* qkv, u32 rows, u32 width, u32 heads, u32 kv_heads, u32 head_dim, const u32* positions,
               const float* cos, const float* sin, const u32* slots, u32 page_size, u32 format, void* keys,
               void* values, float* key_scales, float* value_scales) {
    wait_for_previous();
    u32 all = heads + 2 * kv_heads;
    u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (warp >= rows * all) return;
    u32 row = warp / all, head = warp % all, lane = threadIdx.x % WARP, half = head_dim / 2;
    float* x = qkv + (u64)row * width + head * head_dim;
    if (head < heads + kv_heads) {
        u64 angle = (u64)positions[row] * half;
        for (u32 i = lane; i < half; i += WARP) {
            float a = x[i], b = x[half + i], c = cos[angle + i], s = sin[angle + i];
            x[i] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
            x[half + i] = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
        }
        __syncwarp();
    }
    if (head < heads) return;
    u32 part = head >= heads + kv_heads, kv_head = (head - heads) % kv_heads;
    u64 place = ((u64)(slots[row] / page_size) * kv_heads + kv_head) * page_size + slots[row] % page_size;
    store_head(x, head_dim, format, part ? values : keys, part ? value_scales : key_scales, place);
    // The row keeps what was stored, for a backward pass.
    if (format == KV_BF16) {
        for (u32 i = lane; i < head_dim; i += WARP) x[i] = bf16_value(bf16_bits(x[i]));
    } else if (format != KV_F32) {
        float scale = kv_scale(x, head_dim, format == KV_INT8 ? 127.0f : 448.0f),
              inverse = __fdiv_rn(1.0f, scale);
        __syncwarp();
        for (u32 i = lane; i < head_dim; i += WARP) {
            float v = __fmul_rn(x[i], inverse);
            x[i] = __fmul_rn(format == KV_INT8 ? (float)i8_code(v) : e4m3_value(e4m3_code(v)), scale);
        }
    }
}
