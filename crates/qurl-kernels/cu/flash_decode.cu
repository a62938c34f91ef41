// Attention of one new position of each sequence: see flash.cuh.
#include "flash.cuh"

// Most blocks of a cluster: the key/value heads of a row whose output becomes codes.
#define MOST_KV_HEADS 8

// What decode writes: numbers, or a product's left operand. For codes the blocks of a row are a cluster.
enum Output { OUT_F32, OUT_BF16, OUT_INT8, OUT_FP8 };

// Four neighbouring numbers of a head, rotated: `at` is the first, cos and sin are those of the position.
template <int HD>
__device__ __forceinline__ float4 rotated(const float* head, u32 at, const float* cos, const float* sin) {
    float4 x = *reinterpret_cast<const float4*>(head + at), y = *reinterpret_cast<const float4*>(head + (at ^ HD / 2));
    float4 c = *reinterpret_cast<const float4*>(cos + at % (HD / 2)), s = *reinterpret_cast<const float4*>(sin + at % (HD / 2));
    auto one = [&](float own, float other, float c, float s) {
        float a = __fmul_rn(own, c), b = __fmul_rn(other, s);
        return at < HD / 2 ? __fsub_rn(a, b) : __fadd_rn(a, b);
    };
    return make_float4(one(x.x, y.x, c.x, s.x), one(x.y, y.y, c.y, s.y), one(x.z, y.z, c.z, s.z), one(x.w, y.w, c.w, s.w));
}

template <int HD, bool F16>
__device__ __forceinline__ void rotate_queries(Queries<HD>& q, const float* row0, const float* row8, const float* cos, const float* sin) {
    u32 first = threadIdx.x % 4 * (HD / 4);
#pragma unroll
    for (int s = 0; s < HD / 16; ++s) {
        float4 x = {0, 0, 0, 0}, y = {0, 0, 0, 0};
        if (row0) x = rotated<HD>(row0, first + 4 * s, cos, sin);
        if (row8) y = rotated<HD>(row8, first + 4 * s, cos, sin);
        q.a[s][0] = two<F16>(x.x, x.y);
        q.a[s][1] = two<F16>(y.x, y.y);
        q.a[s][2] = two<F16>(x.z, x.w);
        q.a[s][3] = two<F16>(y.z, y.w);
    }
}

// The new key or value of a head in the format of the pages: a lane has HD / 32 neighbouring numbers.
template <int FORMAT, int HD>
struct NewRow {
    static const int NUMBERS = HD / WARP;
    static const int BYTES = FORMAT == KV_BF16 ? 2 * NUMBERS : NUMBERS;
    u32 words[2];
    float scale;

    __device__ __forceinline__ void round(const float (&x)[NUMBERS]) {
        if (FORMAT == KV_BF16) {
#pragma unroll
            for (int i = 0; i < NUMBERS / 2; ++i) words[i] = bf16_pair(x[2 * i], x[2 * i + 1]);
            return;
        }
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i) largest = max(largest, magnitude_bits(x[i]));
        scale = kv_scale(warp_max(largest), FORMAT == KV_INT8 ? 127.0f : 448.0f);
        float inverse = __fdiv_rn(1.0f, scale);
        words[0] = 0;
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i) {
            float v = __fmul_rn(x[i], inverse);
            words[0] |= (u32)(FORMAT == KV_INT8 ? (u8)i8_code(v) : e4m3_code(v)) << 8 * i;
        }
    }
    // Writes the lane's part of the row.
    __device__ __forceinline__ void put(void* row_part) const {
        if (BYTES == 8) *reinterpret_cast<uint2*>(row_part) = make_uint2(words[0], words[1]);
        if (BYTES == 4) *reinterpret_cast<u32*>(row_part) = words[0];
        if (BYTES == 2) *reinterpret_cast<u16*>(row_part) = (u16)words[0];
    }
};

// One split of one sequence and key/value head. Pairs of warps take tiles in turns: for the scores each warp has half of
// the keys, for the values half of the columns, in its own stretch of shared memory; they tell each other the largest
// score, and their weights. The next keys are copied while the values are multiplied; after every round the tiles are
// folded in order.
//
// What lies in the pages was written in earlier steps, so where the new row is made here, the first tiles are fetched
// before the kernel in front (the product that makes the row) has ended.
template <int FORMAT, int HD, int PAIRS>
__device__ __forceinline__ void decode(const FlashArgs& a) {
    const int BYTES = Row<FORMAT, HD>::BYTES;
    const int CHUNKS = Row<FORMAT, HD>::CHUNKS;
    const int HALF = TILE / 2;           // keys of a warp
    const int HALF_BYTES = BYTES / 2;    // of a value
    const int COLUMNS = HD / 16;         // of a lane, side by side
    const bool SCALED = FORMAT != KV_BF16;
    const int THREADS = PAIRS * 2 * WARP;
    const int FOLDERS = THREADS / HD;    // threads that fold a column, each for some heads
    extern __shared__ __align__(1024) u8 smem[];
    __shared__ float maxima[PAIRS][2][16], sums[PAIRS][2][16];
    __shared__ float factors[PAIRS][16][2];
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, quad = lane % 4, pair = warp / 2, side = warp % 2;
    u32 split = blockIdx.x, kv_head = blockIdx.y, group = a.heads / a.kv_heads;
    Span span = a.spans[blockIdx.z];
    u32 length = span.position + 1;
    // Positions whose keys and values are in the pages.
    u32 stored = a.cos ? length - 1 : length;
    u32 first_tile = split * SPLIT_TILES;
    if (first_tile * TILE >= length) return;
    u32 last_tile = min((length + TILE - 1) / TILE, first_tile + SPLIT_TILES);

    u8* keys = smem + warp * 2 * HALF * BYTES;
    u8* values = keys + HALF * BYTES;
    float* scales = reinterpret_cast<float*>(smem + PAIRS * 2 * TILE * BYTES) + warp * 2 * HALF;  // keys, values
    float* parts = reinterpret_cast<float*>(smem + PAIRS * 2 * TILE * BYTES) + (SCALED ? PAIRS * 2 * TILE : 0);
    // A pair's part is [group][HD + 4]; before that is known, its place holds the weights as left operands.
    u32 part_size = group * (HD + 4), part_stride = max(part_size, 4u * 4 * WARP);
    uint4* weights = reinterpret_cast<uint4*>(parts + pair * part_stride) + lane;
    auto pair_sync = [&]() { asm volatile("bar.sync %0, 64;" ::"r"(1 + pair) : "memory"); };

    // Lane i has the number of the tile's i-th page, known a tile ahead.
    auto page_numbers = [&](u32 tile) {
        u32 page = (tile * TILE >> a.page_shift) + lane;
        return tile < last_tile && page << a.page_shift < length ? a.pages[span.pages + page] : 0;
    };
    // Copies the warp's keys (part 0) or values (1) of a tile.
    auto fetch = [&](u32 tile, int part, u32 numbers) {
        if (tile < last_tile) {
            u32 first_page = tile * TILE >> a.page_shift, in_page = (1 << a.page_shift) - 1;
            u32 left = stored - min(stored, tile * TILE);
            // Where position tile * 64 + row lies.
            auto source = [&](u32 row) {
                u32 position = tile * TILE + row;
                u32 page = __shfl_sync(FULL, numbers, (position >> a.page_shift) - first_page);
                return ((u64)(page * a.kv_heads + kv_head) << a.page_shift) + (position & in_page);
            };
            // Pages have 16 positions or more: so many lie together.
            const u32 PIECE = 16;
            if (part == 0) {
                const u32 STEP = WARP / CHUNKS;
                u32 own = lane / CHUNKS, to = smem_address(keys);
#pragma unroll
                for (u32 piece = 0; piece < HALF; piece += PIECE) {
                    const u8* rows = a.keys + source(side * HALF + piece) * BYTES + lane * 16;
#pragma unroll
                    for (u32 r = 0; r < PIECE; r += STEP) {
                        u32 row = piece | r | own;
                        copy_16(to + key_chunk<BYTES>(row, lane % CHUNKS), rows + r * BYTES, side * HALF + row < left);
                    }
                }
                if (SCALED) {
                    u64 at = source(side * HALF + lane);
                    bool valid = side * HALF + lane < left;
                    copy_4(smem_address(scales + lane), a.key_scales + at, valid);
                    copy_4(smem_address(scales + HALF + lane), a.value_scales + at, valid);
                }
            } else {
                const u32 WIDE = CHUNKS / 2, STEP = WARP / WIDE;
                u32 own = lane / WIDE, to = smem_address(values);
#pragma unroll
                for (u32 piece = 0; piece < TILE; piece += PIECE) {
                    const u8* rows = a.values + (source(piece) + own) * BYTES + side * HALF_BYTES + lane % WIDE * 16;
#pragma unroll
                    for (u32 r = 0; r < PIECE; r += STEP) {
                        u32 row = piece | r | own;
                        copy_16(to + value_chunk<HALF_BYTES>(row, lane % WIDE), rows + r * BYTES, row < left);
                    }
                }
            }
        }
        copies_commit();
    };
    u32 numbers = page_numbers(first_tile + pair);
    fetch(first_tile + pair, 0, numbers);
    fetch(first_tile + pair, 1, numbers);
    numbers = page_numbers(first_tile + pair + PAIRS);

    Queries<HD> q;
    const float* row = a.qkv + (u64)span.row * a.stride + kv_head * group * HD;
    u32 head = lane / 4;
    const float *row0 = head < group ? row + head * HD : nullptr, *row8 = head + 8 < group ? row + (head + 8) * HD : nullptr;
    u32 limit[2] = {length, length};
    // The pair that takes the tile of the new position makes its key and value.
    u32 new_tile = span.position / TILE, new_at = span.position % TILE;
    bool makes = a.cos && new_tile < last_tile && (new_tile - first_tile) % PAIRS == pair;
    u32 new_byte = lane * NewRow<FORMAT, HD>::BYTES;
    // It waits here for its tile.
    __shared__ NewRow<FORMAT, HD> fresh[2][2][WARP];
    NewRow<FORMAT, HD>*fresh_key = &fresh[side][0][lane], *fresh_value = &fresh[side][1][lane];
    if (a.cos) {
        const float *cos = a.cos + (u64)span.position * (HD / 2), *sin = a.sin + (u64)span.position * (HD / 2);
        wait_for_previous();
        if (makes) {
            const int NUMBERS = HD / WARP;
            const float* key = a.qkv + (u64)span.row * a.stride + (a.heads + kv_head) * HD;
            const float* value = key + a.kv_heads * HD;
            NewRow<FORMAT, HD> new_key, new_value;
            float x[NUMBERS];
#pragma unroll
            for (int i = 0; i < NUMBERS; ++i) {
                u32 at = lane * NUMBERS + i, angle = at % (HD / 2);
                float own = __fmul_rn(key[at], cos[angle]), other = __fmul_rn(key[at ^ HD / 2], sin[angle]);
                x[i] = at < HD / 2 ? __fsub_rn(own, other) : __fadd_rn(own, other);
            }
            new_key.round(x);
#pragma unroll
            for (int i = 0; i < NUMBERS; ++i) x[i] = value[lane * NUMBERS + i];
            new_value.round(x);
            *fresh_key = new_key;
            *fresh_value = new_value;
            if (side == 0) {
                u32 page = a.pages[span.pages + (span.position >> a.page_shift)];
                u64 place = ((u64)(page * a.kv_heads + kv_head) << a.page_shift) + (span.position & ((1 << a.page_shift) - 1));
                new_key.put(const_cast<u8*>(a.keys) + place * BYTES + new_byte);
                new_value.put(const_cast<u8*>(a.values) + place * BYTES + new_byte);
                if (SCALED && lane == 0) {
                    const_cast<float*>(a.key_scales)[place] = new_key.scale;
                    const_cast<float*>(a.value_scales)[place] = new_value.scale;
                }
            }
        }
        rotate_queries<HD, SCALED>(q, row0, row8, cos, sin);
    } else {
        load_queries<HD, SCALED>(q, row0, row8);
    }

    // Thread g keeps m and l of head g; a thread folds one column of heads threadIdx.x / HD, + FOLDERS, ...
    u32 column = threadIdx.x % HD, folder = threadIdx.x / HD;
    float m = -INFINITY_F, l = 0.0f, o[16 / FOLDERS];
#pragma unroll
    for (int i = 0; i < 16 / FOLDERS; ++i) o[i] = 0.0f;
    for (u32 round = first_tile; round < last_tile; round += PAIRS) {
        u32 tile = round + pair;
        bool has_tile = tile < last_tile, inserts = makes && tile == new_tile;
        copies_wait<1>();
        __syncwarp();
        if (inserts && new_at / HALF == side) {
            fresh_key->put(keys + key_chunk<BYTES>(new_at % HALF, new_byte / 16) + new_byte % 16);
            if (SCALED) {
                scales[new_at % HALF] = fresh_key->scale;
                scales[HALF + new_at % HALF] = fresh_value->scale;
            }
        }
        __syncwarp();
        float s[HALF / 8][4];
        Softmax soft;
        if (has_tile) {
            tile_scores<FORMAT, SCALED, HD>(q, keys, scales, a.scale, limit, tile * TILE + side * HALF, s, soft);
            if (quad == 0) {
                maxima[pair][side][head] = soft.m[0];
                maxima[pair][side][head + 8] = soft.m[1];
            }
            pair_sync();
            soft.m[0] = fmaxf(soft.m[0], maxima[pair][side ^ 1][head]);
            soft.m[1] = fmaxf(soft.m[1], maxima[pair][side ^ 1][head + 8]);
            tile_weights(s, soft);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                u32 p[4];
                weight_operand<FORMAT>(p, s, k, scales + HALF);
                weights[(side * 2 + k) * WARP] = make_uint4(p[0], p[1], p[2], p[3]);
            }
            if (quad == 0) {
                sums[pair][side][head] = soft.l[0];
                sums[pair][side][head + 8] = soft.l[1];
            }
        }
        __syncwarp();
        fetch(tile + PAIRS, 0, numbers);
        copies_wait<1>();
        __syncwarp();
        if (inserts && new_byte / HALF_BYTES == side) {
            u32 byte = new_byte % HALF_BYTES;
            fresh_value->put(values + value_chunk<HALF_BYTES>(new_at, byte / 16) + byte % 16);
        }
        if (has_tile) {
            pair_sync();
            float part[COLUMNS][4];
#pragma unroll
            for (int t = 0; t < COLUMNS; ++t) {
#pragma unroll
                for (int e = 0; e < 4; ++e) part[t][e] = 0.0f;
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                uint4 four_weights = weights[k * WARP];
                u32 p[4] = {four_weights.x, four_weights.y, four_weights.z, four_weights.w};
                // Product t has column COLUMNS * (lane / 4) + t of the half.
                const int WORDS = HALF_BYTES / 32;
                u32 rows[4][WORDS];
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    u32 key = k * 16 + quad * 2 + r % 2 + r / 2 * 8, byte = lane / 4 * WORDS * 4;
                    const u8* from = values + value_chunk<HALF_BYTES>(key, byte / 16) + byte % 16;
                    if (WORDS == 4) {
                        uint4 four = *reinterpret_cast<const uint4*>(from);
                        rows[r][0] = four.x;
                        rows[r][1 % WORDS] = four.y;
                        rows[r][2 % WORDS] = four.z;
                        rows[r][3 % WORDS] = four.w;
                    } else if (WORDS == 2) {
                        uint2 two = *reinterpret_cast<const uint2*>(from);
                        rows[r][0] = two.x;
                        rows[r][1 % WORDS] = two.y;
                    } else {
                        rows[r][0] = *reinterpret_cast<const u32*>(from);
                    }
                }
#pragma unroll
                for (int t = 0; t < COLUMNS; ++t) {
                    u32 b[2];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        if (FORMAT == KV_BF16) {
                            b[h] = __byte_perm(rows[2 * h][t / 2], rows[2 * h + 1][t / 2], t % 2 ? 0x7632 : 0x5410);
                        } else {
                            b[h] = codes_f16<FORMAT>(rows[2 * h][t / 4], t % 4, rows[2 * h + 1][t / 4], t % 4);
                        }
                    }
                    mma<SCALED>(part[t], p, b[0], b[1]);
                }
            }
            // Both have read the weights: the place takes the results.
            pair_sync();
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (head + 8 * h >= group) continue;
                float* mine = parts + pair * part_stride + (head + 8 * h) * (HD + 4);
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    int i = 2 * h + c;
                    float* to = mine + side * (HD / 2) + (quad * 2 + c) * COLUMNS;
#pragma unroll
                    for (int t = 0; t < COLUMNS; t += 4) {
                        float4 four = {part[t][i], part[t + 1][i], part[t + 2][i], part[t + 3][i]};
                        *reinterpret_cast<float4*>(to + t) = four;
                    }
                }
                if (quad == 0 && side == 0) {
                    mine[HD] = soft.m[h];
                    mine[HD + 1] = __fadd_rn(sums[pair][0][head + 8 * h], sums[pair][1][head + 8 * h]);
                }
            }
        }
        __syncwarp();
        fetch(tile + PAIRS, 1, numbers);
        numbers = page_numbers(tile + 2 * PAIRS);
        __syncthreads();
        if (threadIdx.x < group) {
            for (int w = 0; w < PAIRS && round + w < last_tile; ++w) {
                const float* from = parts + w * part_stride + threadIdx.x * (HD + 4) + HD;
                fold(m, l, from[0], from[1], factors[w][threadIdx.x][0], factors[w][threadIdx.x][1]);
            }
        }
        __syncthreads();
        for (int w = 0; w < PAIRS && round + w < last_tile; ++w) {
#pragma unroll
            for (int i = 0; i < 16 / FOLDERS; ++i) {
                u32 g = folder + i * FOLDERS;
                if (g >= group) break;
                o[i] = folded(o[i], parts[w * part_stride + g * (HD + 4) + column], factors[w][g][0], factors[w][g][1]);
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
        for (int i = 0; i < 16 / FOLDERS; ++i) {
            u32 g = folder + i * FOLDERS;
            if (g >= group) break;
            __stcg(all + split * part_size + g * (HD + 4) + column, o[i]);
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
            for (int i = 0; i < 16 / FOLDERS; ++i) {
                u32 g = folder + i * FOLDERS;
                if (g >= group) break;
                float later = __ldcg(part + g * (HD + 4) + column);
                o[i] = s == 0 ? later : folded(o[i], later, factors[0][g][0], factors[0][g][1]);
            }
            __syncthreads();
        }
    }
    if (threadIdx.x < group) {
        factors[0][threadIdx.x][0] = __frcp_rn(l);
        if (a.lse) a.lse[place + threadIdx.x] = log_sum(m, l);
    }
    __syncthreads();
    float inverse = 1.0f;
#if __CUDA_ARCH__ >= 900
    if (a.output == OUT_INT8 || a.output == OUT_FP8) {
        __shared__ u32 largest_of[PAIRS * 2], seen[MOST_KV_HEADS];
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < 16 / FOLDERS; ++i) {
            u32 g = folder + i * FOLDERS;
            if (g >= group) break;
            o[i] = __fmul_rn(o[i], factors[0][g][0]);
            largest = max(largest, magnitude_bits(o[i]));
        }
        largest = warp_max(largest);
        if (lane == 0) largest_of[warp] = largest;
        __syncthreads();
        // Every block of the cluster tells the others its largest.
        if (threadIdx.x < a.kv_heads) {
#pragma unroll
            for (int w = 0; w < PAIRS * 2; ++w) largest = max(largest, largest_of[w]);
            u32 other, own = smem_address(seen + kv_head);
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(own), "r"(threadIdx.x));
            asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(other), "r"(largest) : "memory");
        }
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
        largest = 0;
        for (u32 h = 0; h < a.kv_heads; ++h) largest = max(largest, seen[h]);
        float scale = scale_of(largest, a.output == OUT_INT8 ? 127.0f : 448.0f);
        inverse = __fdiv_rn(1.0f, scale);
        if (threadIdx.x == 0 && kv_head == 0) a.out_scales[span.row] = scale;
    }
#endif
#pragma unroll
    for (int i = 0; i < 16 / FOLDERS; ++i) {
        u32 g = folder + i * FOLDERS;
        if (g >= group) break;
        u64 at = (place + g) * HD + column;
        if (a.output == OUT_INT8) {
            reinterpret_cast<i8*>(a.out)[at] = i8_code(__fmul_rn(o[i], inverse));
        } else if (a.output == OUT_FP8) {
            reinterpret_cast<u8*>(a.out)[at] = e4m3_code(__fmul_rn(o[i], inverse));
        } else if (a.output == OUT_BF16) {
            reinterpret_cast<u16*>(a.out)[at] = bf16_bits(__fmul_rn(o[i], factors[0][g][0]));
        } else {
            a.out[at] = __fmul_rn(o[i], factors[0][g][0]);
        }
    }
}

#define KERNEL(name, format, hd, pairs, blocks)                                                                     \
    extern "C" __global__ void __launch_bounds__(pairs * 64, blocks) flash_decode_##name##_##hd(                    \
        const float* qkv, const u8* keys, const u8* values, const float* key_scales, const float* value_scales,     \
        const Span* spans, const u32* pages, float* out, float* lse, float* partials, u32* counters, int stride,    \
        int heads, int kv_heads, int page_shift, int splits, float scale, const float* cos, const float* sin,        \
        int output, float* out_scales                                                                                \
    ) {                                                                                                             \
        FlashArgs args = {qkv, keys,     values,   key_scales, value_scales, spans,    pages,      nullptr, out,    \
                          lse, partials, counters, stride,     heads,        kv_heads, page_shift, splits,  scale,  \
                          cos, sin,      output, out_scales};                                                       \
        if (!cos) wait_for_previous();                                                                              \
        decode<format, hd, pairs>(args);                                                                            \
    }
// Blocks of the largest kernel on a multiprocessor.
#if __CUDA_ARCH__ >= 900
#define AT_ONCE 2
#else
#define AT_ONCE 1
#endif
KERNEL(bf16, KV_BF16, 64, 2, 4)
KERNEL(bf16, KV_BF16, 128, 2, 3)
KERNEL(int8, KV_INT8, 64, 2, 4)
KERNEL(int8, KV_INT8, 128, 4, AT_ONCE)
KERNEL(fp8, KV_FP8, 64, 2, 4)
KERNEL(fp8, KV_FP8, 128, 2, 3)
