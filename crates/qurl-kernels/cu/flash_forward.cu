// Causal grouped-query attention over paged keys and values: prefill (many queries) and decode (one per sequence).
//
// The query heads that share a key/value head count as rows, so the keys are read once for all of them. A warp takes 16
// rows and tiles of 64 keys: scores, softmax and weighted values of a tile are computed on their own (m, l, o) and
// folded into a running state.
//
// Order of summation. Tiles count from position 0 and are folded in order within a split of 512 positions; splits are
// folded in order. Both kernels use the same steps, written without room for the compiler to contract them differently,
// and a tile that a row does not see changes nothing. So a row's bits depend neither on the kernel nor on its neighbours.
//
// Products are bf16 (with codes of eight bits f16, which holds them exactly) with f32 sums; the scale of a key multiplies
// its score, that of a value its weight. Each lane takes HD / 4 neighbouring numbers of a key (and of the query) through all steps of
// the product, which makes its loads 16 bytes wide.
#include "common.cuh"
#include "mma.cuh"

enum KvFormat { KV_BF16, KV_INT8, KV_FP8 };

const int TILE = 64;
const int SPLIT_TILES = 8;

struct Span {
    u32 row, rows, position, pages;
};

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
    float* partials;    // decode: [span][kv_head][split][group][head_dim + 4]
    u32* counters;      // decode: one per span and kv_head, zero between kernels
    int stride, heads, kv_heads, page_shift, splits;  // pages of 2^page_shift tokens
    float scale;        // of scores, times log2(e)
};

template <int FORMAT, int HD>
struct Row {
    static const int BYTES = FORMAT == KV_BF16 ? HD * 2 : HD;
    static const int CHUNKS = BYTES / 16;
};

// Where the 16-byte chunk of a row lies in shared memory, so that no two lanes that read together meet in a bank.
template <int BYTES>
__device__ __forceinline__ u32 key_chunk(u32 row, u32 chunk) {
    if (BYTES == 256) return row * 256 + ((chunk ^ (chunk >> 3) ^ (row & 1) * 2) * 16);
    if (BYTES == 128) return row * 128 + ((chunk ^ (row & 1)) * 16);
    return row * BYTES + chunk * 16;
}

template <int BYTES>
__device__ __forceinline__ u32 value_chunk(u32 row, u32 chunk) {
    if (BYTES == 256) return row * 256 + ((chunk ^ (row >> 1 & 1) ^ (row & 4)) * 16);
    if (BYTES == 128) return row * 128 + ((chunk ^ (row & 6)) * 16);
    return row * BYTES + chunk * 16;
}

// Byte `i` of `low` and byte `j` of `high` as f16, the first in the low half.
template <int FORMAT>
__device__ __forceinline__ u32 codes_f16(u32 low, int i, u32 high, int j) {
    u32 both = __byte_perm(low, high, i | (4 + j) << 4);
    // Selector 4 is a zero byte.
    if (FORMAT == KV_INT8) return f16_of_bytes(__byte_perm(both ^ 0x8080u, 0, 0x4140));
    return f16_of_e4m3(__byte_perm(both, 0, 0x1404));
}

// Products of a format.
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

// ---- one tile of one warp ----------------------------------------------------------------------------------------

// The queries of 16 rows as left operands.
template <int HD>
struct Queries {
    u32 a[HD / 16][4];
};

template <int HD, bool F16>
__device__ __forceinline__ void load_queries(Queries<HD>& q, const float* row0, const float* row8) {
    u32 first = threadIdx.x % 4 * (HD / 4);
#pragma unroll
    for (int s = 0; s < HD / 16; ++s) {
        float4 x = {0, 0, 0, 0}, y = {0, 0, 0, 0};
        if (row0) x = *reinterpret_cast<const float4*>(row0 + first + 4 * s);
        if (row8) y = *reinterpret_cast<const float4*>(row8 + first + 4 * s);
        q.a[s][0] = two<F16>(x.x, x.y);
        q.a[s][1] = two<F16>(y.x, y.y);
        q.a[s][2] = two<F16>(x.z, x.w);
        q.a[s][3] = two<F16>(y.z, y.w);
    }
}

struct Softmax {
    float m[2], l[2];
};

// Scores of a tile in units of log2, masked from `limit` on, and then their weights 2^(s - m) in place.
// FORMAT is that of the keys in shared memory; codes that were widened to f16 on the way there count as KV_BF16, but SCALED.
template <int FORMAT, bool SCALED, int HD>
__device__ __forceinline__ void tile_weights(
    const Queries<HD>& q, const u8* keys, const float* key_scales, float scale, const u32 (&limit)[2], u32 first,
    float (&s)[8][4], Softmax& soft
) {
    const int BYTES = Row<FORMAT, HD>::BYTES;
    const int CHUNKS = BYTES / 64;  // of a lane
    u32 lane = threadIdx.x % WARP, quad = lane % 4;
    // The keys of the next eight are on their way while those of the last eight are multiplied.
    u32 words[2][CHUNKS * 4];
    auto load = [&](int j) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            u32* w = &words[j % 2][4 * c];
            u32 from = smem_address(keys) + key_chunk<BYTES>(j * 8 + lane / 4, quad * CHUNKS + c);
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(from) : "memory");
        }
    };
    load(0);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (j + 1 < 8) load(j + 1);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[j][e] = 0.0f;
#pragma unroll
        for (int k = 0; k < HD / 16; ++k) {
            const u32* w = words[j % 2];
            u32 b0 = FORMAT == KV_BF16 ? w[2 * k] : codes_f16<FORMAT>(w[k], 0, w[k], 1);
            u32 b1 = FORMAT == KV_BF16 ? w[2 * k + 1] : codes_f16<FORMAT>(w[k], 2, w[k], 3);
            mma<SCALED>(s[j], q.a[k], b0, b1);
        }
    }
    soft.m[0] = soft.m[1] = -INFINITY_F;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            u32 key = j * 8 + quad * 2 + e % 2;
            float factor = SCALED ? __fmul_rn(scale, key_scales[key]) : scale;
            s[j][e] = first + key < limit[e / 2] ? __fmul_rn(s[j][e], factor) : -INFINITY_F;
            soft.m[e / 2] = fmaxf(soft.m[e / 2], s[j][e]);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        soft.m[h] = fmaxf(soft.m[h], __shfl_xor_sync(FULL, soft.m[h], 1));
        soft.m[h] = fmaxf(soft.m[h], __shfl_xor_sync(FULL, soft.m[h], 2));
        soft.l[h] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float base = soft.m[e / 2] == -INFINITY_F ? 0.0f : soft.m[e / 2];
            s[j][e] = exp2_fast(__fsub_rn(s[j][e], base));
            soft.l[e / 2] = __fadd_rn(soft.l[e / 2], s[j][e]);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        soft.l[h] = __fadd_rn(soft.l[h], __shfl_xor_sync(FULL, soft.l[h], 1));
        soft.l[h] = __fadd_rn(soft.l[h], __shfl_xor_sync(FULL, soft.l[h], 2));
    }
}

// The weights of 16 keys as a left operand, times the scales of their values.
template <int FORMAT>
__device__ __forceinline__ void weight_operand(u32 (&p)[4], const float (&s)[8][4], int k, const float* value_scales) {
    u32 quad = threadIdx.x % 4;
    float v[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            v[h][e] = s[2 * k + h][e];
            if (FORMAT != KV_BF16) v[h][e] = __fmul_rn(v[h][e], value_scales[k * 16 + h * 8 + quad * 2 + e % 2]);
        }
    }
    p[0] = two<FORMAT != KV_BF16>(v[0][0], v[0][1]);
    p[1] = two<FORMAT != KV_BF16>(v[0][2], v[0][3]);
    p[2] = two<FORMAT != KV_BF16>(v[1][0], v[1][1]);
    p[3] = two<FORMAT != KV_BF16>(v[1][2], v[1][3]);
}

// How the states (m, l, o) of two neighbouring stretches of keys become one: factors for the earlier and the later.
__device__ __forceinline__ void fold(float& m, float& l, float later_m, float later_l, float& keep, float& take) {
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

// ---- prefill -----------------------------------------------------------------------------------------------------

// 128 packed rows of one span and key/value head; tiles of keys and values are shared by eight warps, two in turns.
template <int FORMAT, int HD>
__device__ __forceinline__ void prefill(const FlashArgs& a) {
    const int THREADS = 256;
    const int BYTES = HD * 2;
    const int TILE_BYTES = TILE * BYTES;
    extern __shared__ __align__(1024) u8 smem[];
    u8* tiles = smem;  // [2][keys, values]
    float* scales = reinterpret_cast<float*>(smem + 4 * TILE_BYTES);  // [2][keys, values][64]
    float* totals = scales + 4 * TILE;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, quad = lane % 4;
    u32 kv_head = blockIdx.y, group = a.heads / a.kv_heads;
    Span span = a.spans[a.work[2 * blockIdx.x]];
    u32 first_row = a.work[2 * blockIdx.x + 1];

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
    u32 last_query = min((first_row + 127) / group, span.rows - 1);
    u32 length = span.position + last_query + 1;
    u32 tile_count = (length + TILE - 1) / TILE;
    // What the warp's last row sees.
    u32 warp_query = min((first_row + warp * 16 + 15) / group, span.rows - 1);
    u32 warp_length = (first_row + warp * 16) / group < span.rows ? span.position + warp_query + 1 : 0;

    // Row `r` of a tile in the pages.
    auto source = [&](u32 position) {
        u32 page = a.pages[span.pages + (position >> a.page_shift)];
        return ((u64)(page * a.kv_heads + kv_head) << a.page_shift) + (position & ((1 << a.page_shift) - 1));
    };
    const int COPIES = TILE * Row<FORMAT, HD>::CHUNKS / THREADS;  // 16-byte chunks of keys (and of values) per thread
    uint4 codes[FORMAT == KV_BF16 ? 1 : 2 * COPIES];
    float code_scale[2];
    auto fetch = [&](u32 tile) {
#pragma unroll
        for (int c = 0; c < COPIES; ++c) {
            u32 at = c * THREADS + threadIdx.x;
            u32 row = at / Row<FORMAT, HD>::CHUNKS, chunk = at % Row<FORMAT, HD>::CHUNKS;
            u32 position = tile * TILE + row;
            bool valid = position < length;
            u64 from = source(min(position, length - 1)) * Row<FORMAT, HD>::BYTES + chunk * 16;
            if (FORMAT == KV_BF16) {
                u8* keys = tiles + tile % 2 * 2 * TILE_BYTES;
                copy_16(smem_address(keys + key_chunk<BYTES>(row, chunk)), a.keys + from, valid);
                copy_16(smem_address(keys + TILE_BYTES + row * BYTES + (chunk ^ (row & 7)) * 16), a.values + from, valid);
            } else {
                uint4 zero = {0, 0, 0, 0};
                codes[2 * c] = valid ? *reinterpret_cast<const uint4*>(a.keys + from) : zero;
                codes[2 * c + 1] = valid ? *reinterpret_cast<const uint4*>(a.values + from) : zero;
            }
        }
        if (FORMAT != KV_BF16 && threadIdx.x < TILE) {
            u32 position = tile * TILE + threadIdx.x;
            bool valid = position < length;
            u64 from = source(min(position, length - 1));
            code_scale[0] = valid ? a.key_scales[from] : 0.0f;
            code_scale[1] = valid ? a.value_scales[from] : 0.0f;
        }
    };
    // Codes become f16 on their way into shared memory.
    auto settle = [&](u32 tile) {
        if (FORMAT == KV_BF16) return;
        u8* keys = tiles + tile % 2 * 2 * TILE_BYTES;
#pragma unroll
        for (int c = 0; c < COPIES; ++c) {
            u32 at = c * THREADS + threadIdx.x;
            u32 row = at / Row<FORMAT, HD>::CHUNKS, chunk = at % Row<FORMAT, HD>::CHUNKS;
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                uint4 x = codes[FORMAT == KV_BF16 ? 0 : 2 * c + part];
                auto wider = [](u32 word, int i) { return codes_f16<FORMAT>(word, i, word, i + 1); };
                uint4 low = {wider(x.x, 0), wider(x.x, 2), wider(x.y, 0), wider(x.y, 2)};
                uint4 high = {wider(x.z, 0), wider(x.z, 2), wider(x.w, 0), wider(x.w, 2)};
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    u32 wide = 2 * chunk + h;
                    u32 to = part == 0 ? key_chunk<BYTES>(row, wide) : TILE_BYTES + row * BYTES + (wide ^ (row & 7)) * 16;
                    *reinterpret_cast<uint4*>(keys + to) = h ? high : low;
                }
            }
        }
        if (threadIdx.x < TILE) {
            scales[tile % 2 * 2 * TILE + threadIdx.x] = code_scale[0];
            scales[(tile % 2 * 2 + 1) * TILE + threadIdx.x] = code_scale[1];
        }
    };

    Softmax state;
    float o[HD / 8][4];
    float* room = totals + warp * (HD / 2 + 4) * WARP + lane;
    float* total = room + HD / 2 * WARP;  // m and l of both rows
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
    // Folds the state of a split into the total.
    auto close_split = [&]() {
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
#pragma unroll
        for (int t = 0; t < HD / 8; ++t) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float* at = room + (t * 4 + e) * WARP;
                if (folded_splits > 0) o[t][e] = folded(*at, o[t][e], keep[e / 2], take[e / 2]);
                *at = o[t][e];
            }
        }
        ++folded_splits;
    };

    fetch(0);
    copies_commit();
    settle(0);
    for (u32 tile = 0; tile < tile_count; ++tile) {
        if (tile + 1 < tile_count) fetch(tile + 1);
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        if (tile > 0 && tile % SPLIT_TILES == 0) {
            close_split();
            reset();
        }
        if (tile * TILE < warp_length) {
            const u8* keys = tiles + tile % 2 * 2 * TILE_BYTES;
            const float* tile_scales = scales + tile % 2 * 2 * TILE;
            float s[8][4];
            Softmax soft;
            tile_weights<KV_BF16, FORMAT != KV_BF16, HD>(q, keys, tile_scales, a.scale, limit, tile * TILE, s, soft);
            float keep[2], take[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) fold(state.m[h], state.l[h], soft.m[h], soft.l[h], keep[h], take[h]);
            u32 p[4][4];
#pragma unroll
            for (int k = 0; k < 4; ++k) weight_operand<FORMAT>(p[k], s, k, tile_scales + TILE);
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
    if (folded_splits > 0) close_split();
    // Places are computed again rather than kept over the loop.
    const volatile u32* again = reinterpret_cast<const volatile u32*>(a.spans + const_cast<const volatile u32*>(a.work)[2 * blockIdx.x]);
    u32 span_row = again[0];
    packed = const_cast<const volatile u32*>(a.work)[2 * blockIdx.x + 1] + threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (limit[h] == 0) continue;
        u64 place = (u64)(span_row + (packed + 8 * h) / group) * a.heads + kv_head * group + (packed + 8 * h) % group;
        float inverse = __frcp_rn(state.l[h]);
        float* out = a.out + place * HD + quad * 2;
#pragma unroll
        for (int t = 0; t < HD / 8; ++t) {
            float2 pair = {__fmul_rn(o[t][2 * h], inverse), __fmul_rn(o[t][2 * h + 1], inverse)};
            *reinterpret_cast<float2*>(out + t * 8) = pair;
        }
        if (a.lse && quad == 0) a.lse[place] = log_sum(state.m[h], state.l[h]);
    }
}

// ---- decode ------------------------------------------------------------------------------------------------------

// One split of one sequence and key/value head. Warps take tiles in turns, each with its own stretch of shared memory,
// and copy the next keys while the values are multiplied; after every round the tiles are folded in order.
template <int FORMAT, int HD, int WARPS>
__device__ __forceinline__ void decode(const FlashArgs& a) {
    const int BYTES = Row<FORMAT, HD>::BYTES;
    const int CHUNKS = Row<FORMAT, HD>::CHUNKS;
    const int TILE_BYTES = TILE * BYTES;
    const int THREADS = WARPS * WARP;
    const int COLUMNS = HD / (THREADS < HD ? THREADS : HD);  // of a thread when folding
    extern __shared__ __align__(1024) u8 smem[];
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, quad = lane % 4;
    u32 split = blockIdx.x, kv_head = blockIdx.y, group = a.heads / a.kv_heads;
    Span span = a.spans[blockIdx.z];
    u32 length = span.position + 1;
    u32 first_tile = split * SPLIT_TILES;
    if (first_tile * TILE >= length) return;
    u32 last_tile = min((length + TILE - 1) / TILE, first_tile + SPLIT_TILES);

    u8* keys = smem + warp * 2 * TILE_BYTES;
    u8* values = keys + TILE_BYTES;
    float* scales = reinterpret_cast<float*>(smem + WARPS * 2 * TILE_BYTES) + warp * 2 * TILE;  // keys, values
    float* parts = reinterpret_cast<float*>(smem + WARPS * 2 * TILE_BYTES) + WARPS * 2 * TILE;  // [warp][group][HD + 4]
    u32 part_size = group * (HD + 4);

    // Lane i has the number of the tile's i-th page, known a tile ahead.
    auto page_numbers = [&](u32 tile) {
        u32 page = (tile * TILE >> a.page_shift) + lane;
        return tile < last_tile && page << a.page_shift < length ? a.pages[span.pages + page] : 0;
    };
    // Copies the keys (part 0) or values (1) of a tile.
    auto fetch = [&](u32 tile, int part, u32 numbers) {
        if (tile < last_tile) {
            const u8* from = part ? a.values : a.keys;
            u32 to = smem_address(part ? values : keys);
            u32 first_page = tile * TILE >> a.page_shift, in_page = (1 << a.page_shift) - 1;
            // Where position tile * 64 + row lies.
            auto source = [&](u32 row) {
                u32 position = tile * TILE + row;
                u32 page = __shfl_sync(FULL, numbers, (position >> a.page_shift) - first_page);
                return ((u64)(page * a.kv_heads + kv_head) << a.page_shift) + (position & in_page);
            };
#pragma unroll 8
            for (u32 at = lane; at < TILE * CHUNKS; at += WARP) {
                u32 row = at / CHUNKS, chunk = at % CHUNKS;
                u32 place = part ? value_chunk<BYTES>(row, chunk) : key_chunk<BYTES>(row, chunk);
                copy_16(to + place, from + source(row) * BYTES + chunk * 16, tile * TILE + row < length);
            }
            if (FORMAT != KV_BF16) {
                const float* from = part ? a.value_scales : a.key_scales;
#pragma unroll
                for (u32 row = lane; row < TILE; row += WARP) {
                    copy_4(smem_address(scales + part * TILE + row), from + source(row), tile * TILE + row < length);
                }
            }
        }
        copies_commit();
    };
    u32 numbers = page_numbers(first_tile + warp);
    fetch(first_tile + warp, 0, numbers);
    fetch(first_tile + warp, 1, numbers);
    numbers = page_numbers(first_tile + warp + WARPS);

    Queries<HD> q;
    const float* row = a.qkv + (u64)span.row * a.stride + kv_head * group * HD;
    u32 head = lane / 4;
    load_queries<HD, FORMAT != KV_BF16>(q, head < group ? row + head * HD : nullptr, head + 8 < group ? row + (head + 8) * HD : nullptr);
    u32 limit[2] = {length, length};

    // Thread g keeps m and l of head g; a thread folds columns threadIdx.x, + THREADS, ... of all heads.
    __shared__ float factors[WARPS][16][2];
    float m = -INFINITY_F, l = 0.0f, o[16][COLUMNS];
#pragma unroll
    for (int g = 0; g < 16; ++g) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) o[g][c] = 0.0f;
    }
    for (u32 round = first_tile; round < last_tile; round += WARPS) {
        u32 tile = round + warp;
        copies_wait<1>();
        __syncwarp();
        float s[8][4];
        Softmax soft;
        if (tile < last_tile) tile_weights<FORMAT, FORMAT != KV_BF16, HD>(q, keys, scales, a.scale, limit, tile * TILE, s, soft);
        __syncwarp();
        fetch(tile + WARPS, 0, numbers);
        copies_wait<1>();
        __syncwarp();
        if (tile < last_tile) {
            float part[HD / 8][4];
#pragma unroll
            for (int t = 0; t < HD / 8; ++t) {
#pragma unroll
                for (int e = 0; e < 4; ++e) part[t][e] = 0.0f;
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                u32 p[4];
                weight_operand<FORMAT>(p, s, k, scales + TILE);
                // A lane takes HD / 8 neighbouring columns of four keys: product t has column HD / 8 * (lane / 4) + t.
                const int WORDS = BYTES / 32;
                u32 rows[4][WORDS];
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    u32 key = k * 16 + quad * 2 + r % 2 + r / 2 * 8;
                    if (WORDS >= 4) {
#pragma unroll
                        for (int c = 0; c < WORDS / 4; ++c) {
                            uint4 four = *reinterpret_cast<const uint4*>(values + value_chunk<BYTES>(key, lane / 4 * (WORDS / 4) + c));
                            rows[r][4 * c] = four.x;
                            rows[r][4 * c + 1] = four.y;
                            rows[r][4 * c + 2] = four.z;
                            rows[r][4 * c + 3] = four.w;
                        }
                    } else {
                        uint2 two = *reinterpret_cast<const uint2*>(values + key * BYTES + lane / 4 * 8);
                        rows[r][0] = two.x;
                        rows[r][1] = two.y;
                    }
                }
#pragma unroll
                for (int t = 0; t < HD / 8; ++t) {
                    u32 b[2];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        if (FORMAT == KV_BF16) {
                            b[h] = __byte_perm(rows[2 * h][t / 2], rows[2 * h + 1][t / 2], t % 2 ? 0x7632 : 0x5410);
                        } else {
                            b[h] = codes_f16<FORMAT>(rows[2 * h][t / 4], t % 4, rows[2 * h + 1][t / 4], t % 4);
                        }
                    }
                    mma<FORMAT != KV_BF16>(part[t], p, b[0], b[1]);
                }
            }
            float* to = parts + warp * part_size;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (head + 8 * h >= group) continue;
                float* mine = to + (head + 8 * h) * (HD + 4);
#pragma unroll
                for (int t = 0; t < HD / 8; t += 4) {
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        int i = 2 * h + c;
                        float4 four = {part[t][i], part[t + 1][i], part[t + 2][i], part[t + 3][i]};
                        *reinterpret_cast<float4*>(mine + (quad * 2 + c) * (HD / 8) + t) = four;
                    }
                }
                if (quad == 0) {
                    mine[HD] = soft.m[h];
                    mine[HD + 1] = soft.l[h];
                }
            }
        }
        __syncwarp();
        fetch(tile + WARPS, 1, numbers);
        numbers = page_numbers(tile + 2 * WARPS);
        __syncthreads();
        if (threadIdx.x < group) {
            for (int w = 0; w < WARPS && round + w < last_tile; ++w) {
                const float* from = parts + w * part_size + threadIdx.x * (HD + 4) + HD;
                fold(m, l, from[0], from[1], factors[w][threadIdx.x][0], factors[w][threadIdx.x][1]);
            }
        }
        __syncthreads();
        for (int w = 0; w < WARPS && round + w < last_tile; ++w) {
#pragma unroll
            for (int g = 0; g < 16; ++g) {
                if (g >= group || threadIdx.x >= HD) break;
                const float* from = parts + w * part_size + g * (HD + 4) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) o[g][c] = folded(o[g][c], from[c * THREADS], factors[w][g][0], factors[w][g][1]);
            }
        }
        __syncthreads();
    }

    u32 splits = (length + TILE * SPLIT_TILES - 1) / (TILE * SPLIT_TILES);
    u64 place = (u64)span.row * a.heads + kv_head * group;
    if (splits > 1) {
        // The block that comes last folds the splits in order.
        float* all = a.partials + (u64)(blockIdx.z * a.kv_heads + kv_head) * a.splits * part_size;
#pragma unroll
        for (int g = 0; g < 16; ++g) {
            if (g >= group || threadIdx.x >= HD) break;
            float* to = all + split * part_size + g * (HD + 4) + threadIdx.x;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) __stcg(to + c * THREADS, o[g][c]);
        }
        if (threadIdx.x < group) {
            float* to = all + split * part_size + threadIdx.x * (HD + 4) + HD;
            __stcg(to, m);
            __stcg(to + 1, l);
        }
        __threadfence();
        __shared__ u32 arrived;
        __syncthreads();
        u32* counter = a.counters + blockIdx.z * a.kv_heads + kv_head;
        if (threadIdx.x == 0) arrived = atomicAdd(counter, 1);
        __syncthreads();
        if (arrived != splits - 1) return;
        __threadfence();
        if (threadIdx.x == 0) *counter = 0;
        for (u32 s = 0; s < splits; ++s) {
            const float* part = all + s * part_size;
            if (threadIdx.x < group) {
                float later_m = __ldcg(part + threadIdx.x * (HD + 4) + HD), later_l = __ldcg(part + threadIdx.x * (HD + 4) + HD + 1);
                if (s == 0) {
                    m = later_m;
                    l = later_l;
                } else {
                    fold(m, l, later_m, later_l, factors[0][threadIdx.x][0], factors[0][threadIdx.x][1]);
                }
            }
            __syncthreads();
#pragma unroll
            for (int g = 0; g < 16; ++g) {
                if (g >= group || threadIdx.x >= HD) break;
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    float later = __ldcg(part + g * (HD + 4) + threadIdx.x + c * THREADS);
                    o[g][c] = s == 0 ? later : folded(o[g][c], later, factors[0][g][0], factors[0][g][1]);
                }
            }
            __syncthreads();
        }
    }
    if (threadIdx.x < group) {
        factors[0][threadIdx.x][0] = __frcp_rn(l);
        if (a.lse) a.lse[place + threadIdx.x] = log_sum(m, l);
    }
    __syncthreads();
#pragma unroll
    for (int g = 0; g < 16; ++g) {
        if (g >= group || threadIdx.x >= HD) break;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            a.out[(place + g) * HD + threadIdx.x + c * THREADS] = __fmul_rn(o[g][c], factors[0][g][0]);
        }
    }
}

#define KERNELS(name, format, hd, warps)                                                                            \
    extern "C" __global__ void __launch_bounds__(256, 1) flash_prefill_##name##_##hd(                               \
        const float* qkv, const u8* keys, const u8* values, const float* key_scales, const float* value_scales,     \
        const Span* spans, const u32* pages, const u32* work, float* out, float* lse, int stride, int heads,        \
        int kv_heads, int page_shift, float scale                                                                    \
    ) {                                                                                                             \
        FlashArgs args = {qkv, keys, values,  key_scales, value_scales, spans,    pages,      work, out,            \
                          lse, nullptr, nullptr, stride,  heads,        kv_heads, page_shift, 1,    scale};         \
        prefill<format, hd>(args);                                                                                  \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(warps * 32) flash_decode_##name##_##hd(                            \
        const float* qkv, const u8* keys, const u8* values, const float* key_scales, const float* value_scales,     \
        const Span* spans, const u32* pages, float* out, float* lse, float* partials, u32* counters, int stride,    \
        int heads, int kv_heads, int page_shift, int splits, float scale                                             \
    ) {                                                                                                             \
        FlashArgs args = {qkv, keys,     values,   key_scales, value_scales, spans,    pages,      nullptr, out,    \
                          lse, partials, counters, stride,     heads,        kv_heads, page_shift, splits,  scale}; \
        wait_for_previous();                                                                                        \
        decode<format, hd, warps>(args);                                                                            \
    }
KERNELS(bf16, KV_BF16, 64, 4)
KERNELS(bf16, KV_BF16, 128, 2)
KERNELS(int8, KV_INT8, 64, 4)
KERNELS(int8, KV_INT8, 128, 4)
KERNELS(fp8, KV_FP8, 64, 4)
KERNELS(fp8, KV_FP8, 128, 4)
