// Attention of one new position of each sequence: see flash.cuh.
#include "flash.cuh"

// What decode writes: numbers, or a product's left operand. For codes the blocks of a row tell each other their largest
// number, so all of them must run at the same time.
enum Output { OUT_F32, OUT_BF16, OUT_INT8, OUT_FP8 };

// A number of a head's first or second half, rotated with the one in the other half.
__device__ __forceinline__ float rotated(bool second, float own, float other, float cos, float sin) {
    float a = __fmul_rn(own, cos), b = __fmul_rn(other, sin);
    return second ? __fadd_rn(a, b) : __fsub_rn(a, b);
}

// The queries of a group in shared memory, as 16-bit numbers, and from there as left operands.
template <int HD, bool F16>
struct StagedQueries {
    u16 (*rows)[HD + 8];  // padded: neighbouring rows begin four banks apart

    __device__ __forceinline__ void put(u32 head, u32 at, float4 x) const {
        *reinterpret_cast<uint2*>(&rows[head][at]) = make_uint2(two<F16>(x.x, x.y), two<F16>(x.z, x.w));
    }
    __device__ __forceinline__ void get(Queries<HD>& q, u32 group) const {
        u32 row = threadIdx.x % WARP / 4, first = threadIdx.x % 4 * (HD / 4);
#pragma unroll
        for (int s = 0; s < HD / 16; s += 2) {
            uint4 x = {0, 0, 0, 0}, y = {0, 0, 0, 0};
            if (row < group) x = *reinterpret_cast<const uint4*>(&rows[row][first + 4 * s]);
            if (row + 8 < group) y = *reinterpret_cast<const uint4*>(&rows[row + 8][first + 4 * s]);
            q.a[s][0] = x.x, q.a[s][2] = x.y, q.a[s + 1][0] = x.z, q.a[s + 1][2] = x.w;
            q.a[s][1] = y.x, q.a[s][3] = y.y, q.a[s + 1][1] = y.z, q.a[s + 1][3] = y.w;
        }
    }
};

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
// folded in order. A pair alone keeps what it has folded in registers. More pairs are faster, but only as long as all
// blocks run at the same time. Tiles of codes are small: the next DEPTH - 1 are on their way, too.
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
    // Tiles on their way: where they are small, the next one is fetched before the first is needed.
    const int DEPTH = SCALED && PAIRS < 4 ? 2 : 1;
    const int KEYS_BYTES = HALF * BYTES, ALL_KEYS = PAIRS * 2 * KEYS_BYTES;  // of a warp, of all
    const int THREADS = PAIRS * 2 * WARP;
    const int FOLDERS = THREADS < HD ? 1 : THREADS / HD;  // threads that fold a column, each for some heads
    const int EACH = HD * FOLDERS / THREADS;              // columns of a thread, THREADS apart
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

    // Of the warp: keys, values, and the scales of both.
    u8* all_keys = smem + warp * KEYS_BYTES;
    u8* all_values = smem + DEPTH * ALL_KEYS + warp * KEYS_BYTES;
    float* after_tiles = reinterpret_cast<float*>(smem + 2 * DEPTH * ALL_KEYS);
    float* all_scales = after_tiles + warp * 2 * HALF;
    float* parts = after_tiles + (SCALED ? DEPTH * PAIRS * 2 * TILE : 0);
    // A pair's part is [group][HD + 4]; before that is known, its place holds the weights as left operands.
    u32 part_size = group * (HD + 4), part_stride = max(part_size, 4u * 4 * WARP);
    uint4* weights = reinterpret_cast<uint4*>(parts + pair * part_stride) + lane;
    auto pair_sync = [&]() { asm volatile("bar.sync %0, 64;" ::"r"(1 + pair) : "memory"); };

    // Lane i has the number of the tile's i-th page, known before the tile is fetched.
    auto page_numbers = [&](u32 tile) {
        u32 page = (tile * TILE >> a.page_shift) + lane;
        return tile < last_tile && page << a.page_shift < length ? a.pages[span.pages + page] : 0;
    };
    // Copies the warp's keys (part 0) or values (1) of a tile.
    auto fetch = [&](u32 tile, int part, u32 numbers) {
        u32 turn = (tile - first_tile) / PAIRS;
        u8 *keys = all_keys + turn % DEPTH * ALL_KEYS, *values = all_values + turn % DEPTH * ALL_KEYS;
        float* scales = all_scales + turn % DEPTH * (PAIRS * 2 * TILE);
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
    u32 early_numbers[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) early_numbers[i] = page_numbers(first_tile + pair + i * PAIRS);
    u32 numbers = page_numbers(first_tile + pair + DEPTH * PAIRS);
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        fetch(first_tile + pair + i * PAIRS, 0, early_numbers[i]);
        fetch(first_tile + pair + i * PAIRS, 1, early_numbers[i]);
    }

    // A thread stages four neighbouring numbers `at` of some heads' queries. Lanes of the pair that takes the tile of the new
    // position make its key and value, NUMBERS each.
    const int NUMBERS = HD / WARP, FOURS = HD / 4, STAGED = 8 * FOURS / THREADS;
    // Where shared memory is short (two pairs of bf16), queries are kept in registers and their place is used again; where
    // registers are, they are read again for every tile.
    const bool KEEPS = PAIRS > 1 && !SCALED;
    __shared__ __align__(16) u16 own_place[KEEPS ? 1 : 16][HD + 8];
    StagedQueries<HD, SCALED> staged = {KEEPS ? reinterpret_cast<u16 (*)[HD + 8]>(parts) : own_place};
    u32 at = threadIdx.x % FOURS * 4, first_head = threadIdx.x / FOURS;
    u32 new_tile = span.position / TILE, new_at = span.position % TILE, new_first = lane * NUMBERS;
    bool makes = a.cos && new_tile < last_tile && (new_tile - first_tile) % PAIRS == pair;
    u32 new_byte = lane * NewRow<FORMAT, HD>::BYTES;
    // It waits here for its tile.
    __shared__ NewRow<FORMAT, HD> fresh[2][2][WARP];
    NewRow<FORMAT, HD>*fresh_key = &fresh[side][0][lane], *fresh_value = &fresh[side][1][lane];
    float4 cos = {1, 1, 1, 1}, sin = {0, 0, 0, 0};
    float new_cos[NUMBERS], new_sin[NUMBERS];
    u64 new_place = 0;
    if (a.cos) {
        // What does not come from the kernel in front is fetched before it has ended.
        u64 angles = (u64)span.position * (HD / 2);
        cos = *reinterpret_cast<const float4*>(a.cos + angles + at % (HD / 2));
        sin = *reinterpret_cast<const float4*>(a.sin + angles + at % (HD / 2));
        if (makes) {
#pragma unroll
            for (int i = 0; i < NUMBERS; ++i) {
                new_cos[i] = a.cos[angles + (new_first + i) % (HD / 2)];
                new_sin[i] = a.sin[angles + (new_first + i) % (HD / 2)];
            }
            u32 page = a.pages[span.pages + (span.position >> a.page_shift)];
            new_place = ((u64)(page * a.kv_heads + kv_head) << a.page_shift) + (span.position & ((1 << a.page_shift) - 1));
        }
        wait_for_previous();
    }
    const float* row = a.qkv + (u64)span.row * a.stride;
    // Queries in eights of heads: fetched, and rotated and staged.
    float4 own[STAGED], other[STAGED];
    auto fetch_queries = [&](u32 eight) {
#pragma unroll
        for (int i = 0; i < STAGED; ++i) {
            u32 head = eight + first_head + i * (THREADS / FOURS);
            if (head >= group) break;
            const float* from = row + (kv_head * group + head) * HD;
            own[i] = *reinterpret_cast<const float4*>(from + at);
            if (a.cos) other[i] = *reinterpret_cast<const float4*>(from + (at ^ HD / 2));
        }
    };
    auto stage_queries = [&](u32 eight) {
#pragma unroll
        for (int i = 0; i < STAGED; ++i) {
            u32 head = eight + first_head + i * (THREADS / FOURS);
            if (head >= group) break;
            float4 x = own[i], y = other[i];
            if (a.cos) {
                bool second = at >= HD / 2;
                x = make_float4(rotated(second, x.x, y.x, cos.x, sin.x), rotated(second, x.y, y.y, cos.y, sin.y),
                                rotated(second, x.z, y.z, cos.z, sin.z), rotated(second, x.w, y.w, cos.w, sin.w));
            }
            staged.put(head, at, x);
        }
    };
    fetch_queries(0);
    if (makes) {
        const float* key = row + (a.heads + kv_head) * HD;
        const float* value = key + a.kv_heads * HD;
        NewRow<FORMAT, HD> new_key, new_value;
        float x[NUMBERS], y[NUMBERS], z[NUMBERS];
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i) {
            x[i] = key[new_first + i];
            y[i] = key[(new_first + i) ^ HD / 2];
            z[i] = value[new_first + i];
        }
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i) x[i] = rotated(new_first + i >= HD / 2, x[i], y[i], new_cos[i], new_sin[i]);
        new_key.round(x);
        new_value.round(z);
        *fresh_key = new_key;
        *fresh_value = new_value;
        if (side == 0) {
            new_key.put(const_cast<u8*>(a.keys) + new_place * BYTES + new_byte);
            new_value.put(const_cast<u8*>(a.values) + new_place * BYTES + new_byte);
            if (SCALED && lane == 0) {
                const_cast<float*>(a.key_scales)[new_place] = new_key.scale;
                const_cast<float*>(a.value_scales)[new_place] = new_value.scale;
            }
        }
    }
    stage_queries(0);
    if (group > 8) {
        fetch_queries(8);
        stage_queries(8);
    }
    __syncthreads();
    Queries<HD> q;
    if (KEEPS) {
        staged.get(q, group);
        __syncthreads();
    }
    u32 head = lane / 4;
    u32 limit[2] = {length, length};

    // Thread g keeps m and l of head g; a thread folds EACH columns of heads threadIdx.x / HD, + FOLDERS, ...
    float m = -INFINITY_F, l = 0.0f, o[16 / FOLDERS][EACH];
    // Calls `use` with every number of the thread, its head and its column.
    auto each = [&](auto use) {
#pragma unroll
        for (int i = 0; i < 16 / FOLDERS; ++i) {
            u32 g = threadIdx.x / HD + i * FOLDERS;
            if (g >= group) break;
#pragma unroll
            for (int c = 0; c < EACH; ++c) use(o[i][c], g, threadIdx.x % HD + c * THREADS);
        }
    };
    each([&](float& o, u32, u32) { o = 0.0f; });
    // What a pair alone has folded.
    Softmax alone = {{-INFINITY_F, -INFINITY_F}, {0.0f, 0.0f}};
    float folded_alone[COLUMNS][4];
#pragma unroll
    for (int t = 0; t < COLUMNS; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) folded_alone[t][e] = 0.0f;
    }
    // Leaves a pair's part of the result in shared memory.
    auto leave = [&](const float (&part)[COLUMNS][4], float m, float l, int h) {
        if (head + 8 * h >= group) return;
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
            mine[HD] = m;
            mine[HD + 1] = l;
        }
    };
    for (u32 round = first_tile; round < last_tile; round += PAIRS) {
        u32 tile = round + pair;
        bool has_tile = tile < last_tile, inserts = makes && tile == new_tile;
        u32 turn = (round - first_tile) / PAIRS;
        u8 *keys = all_keys + turn % DEPTH * ALL_KEYS, *values = all_values + turn % DEPTH * ALL_KEYS;
        float* scales = all_scales + turn % DEPTH * (PAIRS * 2 * TILE);
        copies_wait<2 * DEPTH - 1>();
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
            if (!KEEPS) staged.get(q, group);
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
        fetch(tile + DEPTH * PAIRS, 0, numbers);
        copies_wait<2 * DEPTH - 1>();
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
                    if (SCALED) {
#pragma unroll
                        for (int w = 0; w < WORDS; ++w) rows[r][w] = bias_codes<FORMAT>(rows[r][w]);
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
                            // Columns t and t ^ 1 of two keys, side by side.
                            u32 four = __byte_perm(rows[2 * h][t / 4], rows[2 * h + 1][t / 4], t % 4 < 2 ? 0x5140 : 0x7362);
                            b[h] = t % 2 ? codes_f16<FORMAT, 1>(four) : codes_f16<FORMAT, 0>(four);
                        }
                    }
                    mma<SCALED>(part[t], p, b[0], b[1]);
                }
            }
            // Both have read the weights: the place takes the results.
            pair_sync();
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float sum = __fadd_rn(sums[pair][0][head + 8 * h], sums[pair][1][head + 8 * h]);
                if (PAIRS > 1) {
                    leave(part, soft.m[h], sum, h);
                    continue;
                }
                float keep, take;
                fold(alone.m[h], alone.l[h], soft.m[h], sum, keep, take);
#pragma unroll
                for (int t = 0; t < COLUMNS; ++t) {
#pragma unroll
                    for (int i = 2 * h; i < 2 * h + 2; ++i) folded_alone[t][i] = folded(folded_alone[t][i], part[t][i], keep, take);
                }
            }
        }
        __syncwarp();
        fetch(tile + DEPTH * PAIRS, 1, numbers);
        numbers = page_numbers(tile + (DEPTH + 1) * PAIRS);
        if (PAIRS == 1) continue;
        __syncthreads();
        if (threadIdx.x < group) {
            for (int w = 0; w < PAIRS && round + w < last_tile; ++w) {
                const float* from = parts + w * part_stride + threadIdx.x * (HD + 4) + HD;
                fold(m, l, from[0], from[1], factors[w][threadIdx.x][0], factors[w][threadIdx.x][1]);
            }
        }
        __syncthreads();
        for (int w = 0; w < PAIRS && round + w < last_tile; ++w) {
            each([&](float& o, u32 g, u32 column) {
                o = folded(o, parts[w * part_stride + g * (HD + 4) + column], factors[w][g][0], factors[w][g][1]);
            });
        }
        __syncthreads();
    }
    if (PAIRS == 1) {
        __syncthreads();
        leave(folded_alone, alone.m[0], alone.l[0], 0);
        leave(folded_alone, alone.m[1], alone.l[1], 1);
        __syncthreads();
        if (threadIdx.x < group) {
            m = parts[threadIdx.x * (HD + 4) + HD];
            l = parts[threadIdx.x * (HD + 4) + HD + 1];
        }
        each([&](float& o, u32 g, u32 column) { o = parts[g * (HD + 4) + column]; });
    }

    u32 splits = (length + TILE * SPLIT_TILES - 1) / (TILE * SPLIT_TILES);
    u64 place = (u64)span.row * a.heads + kv_head * group;
    if (splits > 1) {
        // The block that comes last folds the splits in order.
        float* all = a.partials + (u64)(blockIdx.z * a.kv_heads + kv_head) * a.splits * part_size;
        each([&](float& o, u32 g, u32 column) { __stcg(all + split * part_size + g * (HD + 4) + column, o); });
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
            each([&](float& o, u32 g, u32 column) {
                float later = __ldcg(part + g * (HD + 4) + column);
                o = s == 0 ? later : folded(o, later, factors[0][g][0], factors[0][g][1]);
            });
            __syncthreads();
        }
    }
    if (threadIdx.x < group) {
        factors[0][threadIdx.x][0] = __frcp_rn(l);
        if (a.lse) a.lse[place + threadIdx.x] = log_sum(m, l);
    }
    __syncthreads();
    float inverse = 1.0f;
    if (a.output == OUT_INT8 || a.output == OUT_FP8) {
        __shared__ u32 largest_of[PAIRS * 2];
        u32 largest = 0;
        each([&](float& o, u32 g, u32) {
            o = __fmul_rn(o, factors[0][g][0]);
            largest = max(largest, magnitude_bits(o));
        });
        largest = warp_max(largest);
        if (lane == 0) largest_of[warp] = largest;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < PAIRS * 2; ++w) largest = max(largest, largest_of[w]);
        // Lane h of every warp tells block h of the row, and hears from it; only the first warp speaks and clears.
        u32* told = a.maxima + (u64)span.row * a.kv_heads * a.kv_heads;
        for (u32 h = lane; h < a.kv_heads; h += WARP) {
            if (warp == 0) tell(told + h * a.kv_heads + kv_head, largest);
        }
        u32 heard = 0;
        for (u32 h = lane; h < a.kv_heads; h += WARP) heard = max(heard, hear(told + kv_head * a.kv_heads + h));
        largest = warp_max(heard);
        __syncthreads();
        for (u32 h = lane; h < a.kv_heads; h += WARP) {
            if (warp == 0) tell(told + kv_head * a.kv_heads + h, EMPTY);
        }
        float scale = scale_of(largest, a.output == OUT_INT8 ? 127.0f : 448.0f);
        inverse = __fdiv_rn(1.0f, scale);
        if (threadIdx.x == 0 && kv_head == 0) a.out_scales[span.row] = scale;
    }
    each([&](float& o, u32 g, u32 column) {
        u64 at = (place + g) * HD + column;
        if (a.output == OUT_INT8) {
            reinterpret_cast<i8*>(a.out)[at] = i8_code(__fmul_rn(o, inverse));
        } else if (a.output == OUT_FP8) {
            reinterpret_cast<u8*>(a.out)[at] = e4m3_code(__fmul_rn(o, inverse));
        } else if (a.output == OUT_BF16) {
            reinterpret_cast<u16*>(a.out)[at] = bf16_bits(__fmul_rn(o, factors[0][g][0]));
        } else {
            a.out[at] = __fmul_rn(o, factors[0][g][0]);
        }
    });
}

#define KERNEL(name, format, hd, pairs, blocks)                                                                     \
    extern "C" __global__ void __launch_bounds__(pairs * 64, blocks) flash_decode_##name##_##hd##_##pairs(          \
        const float* qkv, const u8* keys, const u8* values, const float* key_scales, const float* value_scales,     \
        const Span* spans, const u32* pages, float* out, float* lse, float* partials, u32* counters, int stride,    \
        int heads, int kv_heads, int page_shift, int splits, float scale, const float* cos, const float* sin,        \
        int output, float* out_scales, u32* maxima                                                                   \
    ) {                                                                                                             \
        FlashArgs args = {qkv, keys,     values,   key_scales, value_scales, spans,    pages,      nullptr, out,    \
                          lse, partials, counters, stride,     heads,        kv_heads, page_shift, splits,  scale,  \
                          cos, sin,      output, out_scales, maxima};                                               \
        if (!cos) wait_for_previous();                                                                              \
        decode<format, hd, pairs>(args);                                                                            \
    }
KERNEL(bf16, KV_BF16, 64, 1, 8)
KERNEL(bf16, KV_BF16, 64, 2, 4)
KERNEL(bf16, KV_BF16, 128, 1, 6)
KERNEL(bf16, KV_BF16, 128, 2, 3)
KERNEL(int8, KV_INT8, 64, 1, 8)
KERNEL(int8, KV_INT8, 64, 2, 4)
KERNEL(int8, KV_INT8, 128, 1, 6)
KERNEL(int8, KV_INT8, 128, 2, 4)
KERNEL(int8, KV_INT8, 128, 4, 2)
KERNEL(fp8, KV_FP8, 64, 1, 8)
KERNEL(fp8, KV_FP8, 64, 2, 4)
KERNEL(fp8, KV_FP8, 128, 1, 6)
KERNEL(fp8, KV_FP8, 128, 2, 4)
KERNEL(fp8, KV_FP8, 128, 4, 2)
