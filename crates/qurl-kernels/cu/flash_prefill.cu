// Attention of many queries of a sequence: see flash.cuh.
#include "flash.cuh"

// 128 packed rows of one span and key/value head; tiles of keys and values are shared by eight warps,
// double-buffered.
//
// What the splits before the one at hand have summed up waits in shared memory. With heads of 128 that is
// more than some devices have (99 KB a block on compute capability 8.6, 8.9 and 12.x): there `sums_in_out`
// lets the sums wait in the block's own rows of `out`, from which they are read once per 512 keys.
template <int FORMAT, int HD>
__device__ __forceinline__ void prefill(const FlashArgs& a, bool sums_in_out) {
    const int BYTES = HD * 2;
    const int TILE_BYTES = FLASH_TILE * BYTES;
    extern __shared__ __align__(1024) u8 smem[];
    u8* tiles = smem;  // [2][keys, values]
    float* scales = reinterpret_cast<float*>(smem + 4 * TILE_BYTES);  // [2][keys, values][64]
    float* totals = scales + 4 * FLASH_TILE;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, quad = lane % 4;
    u32 kv_head = blockIdx.y, group = a.heads / a.kv_heads;
    // Without a list of work every span has one row.
    Span span = a.spans[a.work ? a.work[2 * blockIdx.x] : blockIdx.x];
    u32 first_row = a.work ? a.work[2 * blockIdx.x + 1] : 0;

    // The lane's two rows: what they see, and where they come from.
    u32 packed = first_row + warp * 16 + lane / 4;
    u32 limit[2];
    const float* queries[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        u32 query = (packed + 8 * h) / group, head = kv_head * group + (packed + 8 * h) % group;
        bool real = query < span.rows;
        limit[h] = real ? span.position + query + 1 : 0;
        queries[h] = real ? a.qkv + (u64)(span.row + query) * a.stride + head * HD : nullptr;
    }
    Queries<HD> q;
    load_queries<HD, FORMAT != KV_BF16>(q, queries[0], queries[1]);
    u32 last_query = min((first_row + PREFILL_ROWS - 1) / group, span.rows - 1);
    u32 length = span.position + last_query + 1;
    u32 tile_count = (length + FLASH_TILE - 1) / FLASH_TILE;
    // The first tile that the first query has in its window.
    u32 before = span.position + first_row / group + 1;
    u32 first_tile = (before - min(before, a.window)) / FLASH_TILE;
    // What the warp's last row sees.
    u32 warp_query = min((first_row + warp * 16 + 15) / group, span.rows - 1);
    u32 warp_length = (first_row + warp * 16) / group < span.rows ? span.position + warp_query + 1 : 0;

    // Row `r` of a tile in the pages.
    auto source = [&](u32 position) {
        u32 page = a.pages[span.pages + (position >> a.page_shift)];
        return ((u64)(page * a.kv_heads + kv_head) << a.page_shift) + (position & ((1 << a.page_shift) - 1));
    };
    const int COPIES = FLASH_TILE * Row<FORMAT, HD>::CHUNKS /
                       PREFILL_THREADS;  // 16-byte chunks of keys (and of values) per thread
    uint4 codes[FORMAT == KV_BF16 ? 1 : 2 * COPIES];
    float code_scale[2];
    auto fetch = [&](u32 tile) {
#pragma unroll
        for (int c = 0; c < COPIES; ++c) {
            u32 at = c * PREFILL_THREADS + threadIdx.x;
            u32 row = at / Row<FORMAT, HD>::CHUNKS, chunk = at % Row<FORMAT, HD>::CHUNKS;
            u32 position = tile * FLASH_TILE + row;
            bool valid = position < length;
            u64 from = source(min(position, length - 1)) * Row<FORMAT, HD>::BYTES + chunk * 16;
            if (FORMAT == KV_BF16) {
                u8* keys = tiles + tile % 2 * 2 * TILE_BYTES;
                u32 to = smem_address(keys) + matrix_chunk<BYTES>(row, chunk);
                copy_16(to, a.keys + from, valid);
                copy_16(to + TILE_BYTES, a.values + from, valid);
            } else {
                uint4 zero = {0, 0, 0, 0};
                codes[2 * c] = valid ? *reinterpret_cast<const uint4*>(a.keys + from) : zero;
                codes[2 * c + 1] = valid ? *reinterpret_cast<const uint4*>(a.values + from) : zero;
            }
        }
        if (FORMAT != KV_BF16 && threadIdx.x < FLASH_TILE) {
            u32 position = tile * FLASH_TILE + threadIdx.x;
            bool valid = position < length;
            u64 from = source(min(position, length - 1));
            code_scale[0] = valid ? a.key_scales[from] : 0.0f;
            code_scale[1] = valid ? a.value_scales[from] : 0.0f;
        }
    };
    // Values of eight bits become f16 when they are stored in shared memory.
    auto settle = [&](u32 tile) {
        if (FORMAT == KV_BF16) return;
        u8* keys = tiles + tile % 2 * 2 * TILE_BYTES;
#pragma unroll
        for (int c = 0; c < COPIES; ++c) {
            u32 at = c * PREFILL_THREADS + threadIdx.x;
            u32 row = at / Row<FORMAT, HD>::CHUNKS, chunk = at % Row<FORMAT, HD>::CHUNKS;
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                uint4 x = codes[FORMAT == KV_BF16 ? 0 : 2 * c + part];
                auto wider = [](u32 first, u32 second) {
                    first = bias_codes<FORMAT>(first);
                    second = bias_codes<FORMAT>(second);
                    return make_uint4(
                        codes_f16<FORMAT, 0>(first), codes_f16<FORMAT, 1>(first),
                        codes_f16<FORMAT, 0>(second), codes_f16<FORMAT, 1>(second)
                    );
                };
                uint4 low = wider(x.x, x.y), high = wider(x.z, x.w);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    u32 wide = 2 * chunk + h;
                    u32 to = part == 0 ? key_chunk<BYTES>(row, wide)
                                       : TILE_BYTES + matrix_chunk<BYTES>(row, wide);
                    *reinterpret_cast<uint4*>(keys + to) = h ? high : low;
                }
            }
        }
        if (threadIdx.x < FLASH_TILE) {
            scales[tile % 2 * 2 * FLASH_TILE + threadIdx.x] = code_scale[0];
            scales[(tile % 2 * 2 + 1) * FLASH_TILE + threadIdx.x] = code_scale[1];
        }
    };

    Softmax state;
    float o[HD / 8][4];
    // m and l of both rows, then the sums.
    float* total = totals + warp * (sums_in_out ? 4 : HD / 2 + 4) * WARP + lane;
    float* buffer = total + 4 * WARP;
    // A row's place in `out` (in heads), computed again rather than kept over the loop.
    auto place = [&](int h) {
        const volatile u32* work = a.work;
        const volatile u32* again =
            reinterpret_cast<const volatile u32*>(a.spans + (work ? work[2 * blockIdx.x] : blockIdx.x));
        u32 row = (work ? work[2 * blockIdx.x + 1] : 0) + threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4;
        row += 8 * h;
        return (u64)(again[0] + row / group) * a.heads + kv_head * group + row % group;
    };
    auto reset = [&]() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            state.m[h] = -INFINITY_F;
            state.l[h] = 0.0f;
        }
#pragma unroll
        for (int t = 0; t < HD / 8; ++t) {
#pragma unroll
            for (int e = 0; e < 4; ++e) o[t][e] = 0.0f;
        }
    };
    reset();
    u32 folded_splits = 0;
    // Folds the state of a split into the total, which is kept for the next one unless it is the last.
    auto close_split = [&](bool last) {
        float keep[2] = {0.0f, 0.0f}, take[2] = {1.0f, 1.0f};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (folded_splits > 0) {
                float m = total[2 * h * WARP], l = total[(2 * h + 1) * WARP];
                fold(m, l, state.m[h], state.l[h], keep[h], take[h]);
                state.m[h] = m;
                state.l[h] = l;
            }
            total[2 * h * WARP] = state.m[h];
            total[(2 * h + 1) * WARP] = state.l[h];
        }
        if (sums_in_out) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (limit[h] == 0) continue;
                float* own = a.out + place(h) * HD + quad * 2;
#pragma unroll
                for (int t = 0; t < HD / 8; ++t) {
                    float2* at = reinterpret_cast<float2*>(own + t * 8);
                    float &x = o[t][2 * h], &y = o[t][2 * h + 1];
                    if (folded_splits > 0) {
                        float2 before = *at;
                        x = folded(before.x, x, keep[h], take[h]);
                        y = folded(before.y, y, keep[h], take[h]);
                    }
                    if (!last) *at = make_float2(x, y);
                }
            }
        } else {
#pragma unroll
            for (int t = 0; t < HD / 8; ++t) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float* at = buffer + (t * 4 + e) * WARP;
                    if (folded_splits > 0) o[t][e] = folded(*at, o[t][e], keep[e / 2], take[e / 2]);
                    if (!last) *at = o[t][e];
                }
            }
        }
        ++folded_splits;
    };

    fetch(first_tile);
    copies_commit();
    settle(first_tile);
    for (u32 tile = first_tile; tile < tile_count; ++tile) {
        if (tile + 1 < tile_count) fetch(tile + 1);
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        if (tile > first_tile && tile % SPLIT_TILES == 0) {
            close_split(false);
            reset();
        }
        // The warp's first row lies at most 15 positions before its last one: so much longer than a row's is
        // what they see together.
        if (tile * FLASH_TILE < warp_length && warp_length < (tile + 1) * FLASH_TILE + a.window + 15) {
            const u8* keys = tiles + tile % 2 * 2 * TILE_BYTES;
            const float* tile_scales = scales + tile % 2 * 2 * FLASH_TILE;
            float s[8][4];
            Softmax soft;
            tile_scores<FORMAT != KV_BF16, HD>(
                q, keys, tile_scales, a.scale, limit, a.window, tile * FLASH_TILE, s, soft
            );
            tile_weights(s, soft);
            float keep[2], take[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) fold(state.m[h], state.l[h], soft.m[h], soft.l[h], keep[h], take[h]);
            u32 p[4][4];
#pragma unroll
            for (int k = 0; k < 4; ++k) weight_operand<FORMAT>(p[k], s, k, tile_scales + FLASH_TILE);
            u32 values = smem_address(keys + TILE_BYTES) + lane % 16 * BYTES, swizzle = lane % 8;
            // Made anew for every tile: addresses kept over the loop would not fit into the registers.
            asm volatile("" : "+r"(swizzle));
#pragma unroll
            for (int t = 0; t < HD / 8; t += 2) {
                float part[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    u32 b[4];
                    load_transposed(b, values + k * 16 * BYTES + ((t + lane / 16) ^ swizzle) * 16);
                    mma<FORMAT != KV_BF16>(part[0], p[k], b[0], b[1]);
                    mma<FORMAT != KV_BF16>(part[1], p[k], b[2], b[3]);
                }
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    o[t][e] = folded(o[t][e], part[0][e], keep[e / 2], take[e / 2]);
                    o[t + 1][e] = folded(o[t + 1][e], part[1][e], keep[e / 2], take[e / 2]);
                }
            }
        }
        if (tile + 1 < tile_count) settle(tile + 1);
        __syncthreads();
    }
    if (folded_splits > 0) close_split(true);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (limit[h] == 0) continue;
        u64 to = place(h);
        float inverse = __frcp_rn(state.l[h]);
        float* out = a.out + to * HD + quad * 2;
#pragma unroll
        for (int t = 0; t < HD / 8; ++t) {
            float2 pair = {__fmul_rn(o[t][2 * h], inverse), __fmul_rn(o[t][2 * h + 1], inverse)};
            *reinterpret_cast<float2*>(out + t * 8) = pair;
        }
        if (a.lse && quad == 0) a.lse[to] = log_sum(state.m[h], state.l[h]);
    }
}

#define KERNEL(name, format, hd)                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 1) flash_prefill_##name##_##hd(                \
        const float* qkv, const u8* keys, const u8* values, const float* key_scales,                 \
        const float* value_scales, const Span* spans, const u32* pages, const u32* work, float* out, \
        float* lse, int stride, int heads, int kv_heads, int page_shift, float scale, u32 window,    \
        u32 sums_in_out                                                                              \
    ) {                                                                                              \
        FlashArgs args = {qkv,      keys,       values, key_scales, value_scales, spans,   pages,    \
                          work,     out,        lse,    nullptr,    nullptr,      stride,  heads,    \
                          kv_heads, page_shift, 1,      scale,      window,       nullptr, nullptr,  \
                          0,        nullptr};                                                        \
        prefill<format, hd>(args, hd > 64 && sums_in_out);                                           \
    }
KERNEL(bf16, KV_BF16, 64)
KERNEL(bf16, KV_BF16, 128)
KERNEL(int8, KV_INT8, 64)
KERNEL(int8, KV_INT8, 128)
KERNEL(fp8, KV_FP8, 64)
KERNEL(fp8, KV_FP8, 128)
