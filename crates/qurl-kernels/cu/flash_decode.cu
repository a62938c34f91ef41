// Attention of one new position of each sequence: see flash.cuh.
#include "flash_tile.cuh"

// Decode writes f32, or a GEMM's left operand. In eight bits the blocks of a row publish their absmax for
// each other, so all of them must be resident.

// A number of a head's first or second half, rotated with the one in the other half.
__device__ __forceinline__ float rotated(bool second, float own, float other, float cos, float sin) {
    float a = __fmul_rn(own, cos), b = __fmul_rn(other, sin);
    return second ? __fadd_rn(a, b) : __fsub_rn(a, b);
}

// The queries of up to eight heads in shared memory, as 16-bit numbers, and from there as right operands.
template <int FORMAT, int HD>
struct StagedQueries {
    u16 rows[DECODE_HEADS][HD + 8];  // padded: neighbouring rows begin four banks apart

    __device__ __forceinline__ void put(u32 head, u32 at, float4 x) {
        const bool F16 = FORMAT != KV_BF16;
        *reinterpret_cast<uint2*>(&rows[head][at]) = make_uint2(two<F16>(x.x, x.y), two<F16>(x.z, x.w));
    }
    __device__ __forceinline__ void get(u32 (&b)[HD / 16][2], u32 heads) const {
        u32 head = threadIdx.x % WARP / 4;
#pragma unroll
        for (int s = 0; s < HD / 16; ++s) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u16* pair = &rows[head][query_pair<FORMAT, HD>(s, h)];
                b[s][h] = head < heads ? *reinterpret_cast<const u32*>(pair) : 0;
            }
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
        u32 absmax = 0;
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i) absmax = max(absmax, magnitude_bits(x[i]));
        scale = kv_scale(warp_max(absmax), FORMAT == KV_INT8 ? 127.0f : 448.0f);
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

// One split of one sequence and of up to eight heads that share keys and values: the n-th of those that the
// row's window has keys of, without the tiles before the window. Every team of TEAM warps
// takes a tile at a time, in its own stretch of shared memory; after every round the tiles are folded in
// order, each warp for some of the heads. The next keys are copied while values are multiplied. As many teams
// as let all blocks run at the same time are best.
//
// What lies in the pages was written in earlier steps, so where the new row is made here, the first tiles are
// fetched before the kernel before (the GEMM that makes the row) has ended.
template <int FORMAT, int HD, int TEAM>
__device__ __forceinline__ void decode(const FlashArgs& a) {
    const int BYTES = Row<FORMAT, HD>::BYTES;
    const bool SCALED = FORMAT != KV_BF16;
    const int KEYS = FLASH_TILE / TEAM, KEY_BYTES = KEYS * BYTES, COLUMNS = HD / TEAM;  // of a warp
    const int TEAM_BYTES = 2 * FLASH_TILE * (BYTES + (SCALED ? 4 : 0));
    const int OWN = HD / WARP;  // columns of a lane that folds
    typedef Columns<OWN> Lane;
    extern __shared__ __align__(1024) u8 smem[];
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    u32 team = warp / TEAM, side = warp % TEAM, teams = warps / TEAM;
    u32 group = a.heads / a.kv_heads, eights = (group + DECODE_HEADS - 1) / DECODE_HEADS;
    u32 kv_head = blockIdx.y / eights, first_head = blockIdx.y % eights * DECODE_HEADS,
        heads = min(DECODE_HEADS, group - first_head);
    Span span = a.spans[blockIdx.z];
    // The row sees the last `seen` of its positions.
    u32 length = span.position + 1, seen = min(length, a.window), hidden_tiles = (length - seen) / FLASH_TILE;
    // Positions whose keys and values are in the pages.
    u32 stored = a.cos ? length - 1 : length;
    u32 first_split = hidden_tiles / SPLIT_TILES, first_tile = (first_split + blockIdx.x) * SPLIT_TILES;
    if (first_tile * FLASH_TILE >= length) return;
    u32 last_tile = min((length + FLASH_TILE - 1) / FLASH_TILE, first_tile + SPLIT_TILES);
    first_tile = max(first_tile, hidden_tiles);

    // Of the warp: keys, values, and the scales of both. Where a team's values were, its result waits to be
    // folded.
    u8 *keys = smem + team * TEAM_BYTES + side * KEY_BYTES, *values = keys + FLASH_TILE * BYTES;
    float* scales =
        reinterpret_cast<float*>(smem + team * TEAM_BYTES + 2 * FLASH_TILE * BYTES) + side * 2 * KEYS;
    auto result_of = [&](u32 t) {
        return reinterpret_cast<float*>(smem + t * TEAM_BYTES + FLASH_TILE * BYTES);
    };
    __shared__ Board boards[TEAM > 1 ? MAX_DECODE_WARPS / TEAM : 1];
    Board& board = boards[TEAM > 1 ? team : 0];
    auto team_sync = [&]() {
        if (TEAM > 1) {
            asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(TEAM * WARP) : "memory");
        } else {
            __syncwarp();
        }
    };

    // Lane i has the number of the tile's i-th page, known before the tile is fetched.
    auto page_numbers = [&](u32 tile) {
        u32 page = (tile * FLASH_TILE >> a.page_shift) + lane;
        return tile < last_tile && page << a.page_shift < length ? a.pages[span.pages + page] : 0;
    };
    // Copies the warp's keys (part 0) or values (1) of a tile, with the scales of its keys.
    auto fetch = [&](u32 tile, int part, u32 numbers) {
        if (tile < last_tile) {
            u32 first_page = tile * FLASH_TILE >> a.page_shift, in_page = (1 << a.page_shift) - 1;
            u32 left = stored - min(stored, tile * FLASH_TILE);
            // Where position tile * 64 + row lies.
            auto source = [&](u32 row) {
                u32 position = tile * FLASH_TILE + row;
                u32 page = __shfl_sync(FULL, numbers, (position >> a.page_shift) - first_page);
                return ((u64)(page * a.kv_heads + kv_head) << a.page_shift) + (position & in_page);
            };
            // Pages have 16 positions or more: so many lie together.
            const u32 PIECE = 16;
            if (part == 0) {
                const u32 CHUNKS = BYTES / 16, STEP = WARP / CHUNKS;
                u32 own = lane / CHUNKS, to = smem_address(keys);
#pragma unroll
                for (u32 piece = 0; piece < KEYS; piece += PIECE) {
                    const u8* rows = a.keys + source(side * KEYS + piece) * BYTES + lane * 16;
#pragma unroll
                    for (u32 r = 0; r < PIECE; r += STEP) {
                        u32 row = piece | r | own;
                        copy_16(
                            to + key_place<FORMAT, HD>(row, lane % CHUNKS), rows + r * BYTES,
                            side * KEYS + row < left
                        );
                    }
                }
            } else {
                const u32 CHUNKS = BYTES / TEAM / 16, STEP = WARP / CHUNKS;
                u32 own = lane / CHUNKS, to = smem_address(values);
#pragma unroll
                for (u32 piece = 0; piece < FLASH_TILE; piece += PIECE) {
                    const u8* rows =
                        a.values + (source(piece) + own) * BYTES + side * (BYTES / TEAM) + lane % CHUNKS * 16;
#pragma unroll
                    for (u32 r = 0; r < PIECE; r += STEP) {
                        u32 row = piece | r | own;
                        copy_16(
                            to + value_place<FORMAT, COLUMNS>(row, lane % CHUNKS), rows + r * BYTES,
                            row < left
                        );
                    }
                }
            }
            if (SCALED) {
                const float* from = part == 0 ? a.key_scales : a.value_scales;
#pragma unroll
                for (u32 row = lane; row < KEYS; row += WARP) {
                    copy_4(
                        smem_address(scales + part * KEYS + row), from + source(side * KEYS + row),
                        side * KEYS + row < left
                    );
                }
            }
        }
        copies_commit();
    };
    u32 first_numbers = page_numbers(first_tile + team), numbers = page_numbers(first_tile + team + teams);

    // A thread stages four neighbouring numbers `at` of some heads' queries. Lanes of the team that takes the
    // tile of the new position make its key and value, NUMBERS each.
    const int NUMBERS = HD / WARP, FOURS = HD / 4, MOST_STAGED = DECODE_HEADS * FOURS / WARP / TEAM;
    __shared__ __align__(16) StagedQueries<FORMAT, HD> staged;
    u32 at = threadIdx.x % FOURS * 4, staged_head = threadIdx.x / FOURS, staged_step = blockDim.x / FOURS;
    u32 new_tile = span.position / FLASH_TILE, new_at = span.position % FLASH_TILE,
        new_first = lane * NUMBERS;
    bool makes = a.cos && new_tile < last_tile && (new_tile - first_tile) % teams == team;
    u32 new_byte = lane * NewRow<FORMAT, HD>::BYTES;
    // It waits here for its tile.
    __shared__ NewRow<FORMAT, HD> fresh[TEAM][2][WARP];
    NewRow<FORMAT, HD>*fresh_key = &fresh[side][0][lane], *fresh_value = &fresh[side][1][lane];
    float4 cos = {1, 1, 1, 1}, sin = {0, 0, 0, 0};
    float new_cos[NUMBERS], new_sin[NUMBERS];
    u64 new_place = 0;
    if (a.cos) {
        // What does not come from the kernel before is fetched before it has ended.
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
            new_place = ((u64)(page * a.kv_heads + kv_head) << a.page_shift) +
                        (span.position & ((1 << a.page_shift) - 1));
        }
    }
    fetch(first_tile + team, 0, first_numbers);
    fetch(first_tile + team, 1, first_numbers);
    if (a.cos) wait_for_previous();
    const float* row = a.qkv + (u64)span.row * a.stride;
    float4 own[MOST_STAGED], other[MOST_STAGED];
#pragma unroll
    for (int i = 0; i < MOST_STAGED; ++i) {
        u32 head = staged_head + i * staged_step;
        if (head >= heads) break;
        const float* from = row + (kv_head * group + first_head + head) * HD;
        own[i] = *reinterpret_cast<const float4*>(from + at);
        if (a.cos) other[i] = *reinterpret_cast<const float4*>(from + (at ^ HD / 2));
    }
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
        for (int i = 0; i < NUMBERS; ++i)
            x[i] = rotated(new_first + i >= HD / 2, x[i], y[i], new_cos[i], new_sin[i]);
        new_key.round(x);
        new_value.round(z);
        *fresh_key = new_key;
        *fresh_value = new_value;
        if (first_head == 0 && side == 0) {
            new_key.put(const_cast<u8*>(a.keys) + new_place * BYTES + new_byte);
            new_value.put(const_cast<u8*>(a.values) + new_place * BYTES + new_byte);
            if (SCALED && lane == 0) {
                const_cast<float*>(a.key_scales)[new_place] = new_key.scale;
                const_cast<float*>(a.value_scales)[new_place] = new_value.scale;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < MOST_STAGED; ++i) {
        u32 head = staged_head + i * staged_step;
        if (head >= heads) break;
        float4 x = own[i], y = other[i];
        if (a.cos) {
            bool second = at >= HD / 2;
            x = make_float4(rotated(second, x.x, y.x, cos.x, sin.x), rotated(second, x.y, y.y, cos.y, sin.y),
                            rotated(second, x.z, y.z, cos.z, sin.z), rotated(second, x.w, y.w, cos.w, sin.w));
        }
        staged.put(head, at, x);
    }
    __syncthreads();
    u32 q[HD / 16][2];
    staged.get(q, heads);

    // Warp w folds heads w, w + warps, ..; a lane OWN columns of each.
    const int FOLDED = DECODE_HEADS / TEAM;
    float m[FOLDED], l[FOLDED];
    Lane o[FOLDED];
    // Calls `use` with the number of every head of the warp, in registers and in the block.
    auto each = [&](auto use) {
#pragma unroll
        for (int i = 0; i < FOLDED; ++i) {
            if (warp + i * warps >= heads) break;
            use(i, warp + i * warps);
        }
    };
    auto fold_in = [&](int i, const float* result) {
        float keep, take;
        fold(m[i], l[i], result[HD], result[HD + 1], keep, take);
        Lane later;
        later.load(result + lane * OWN);
#pragma unroll
        for (int c = 0; c < OWN; ++c) o[i].x[c] = folded(o[i].x[c], later.x[c], keep, take);
    };
    each([&](int i, u32) {
        m[i] = -INFINITY_F, l[i] = 0.0f;
#pragma unroll
        for (int c = 0; c < OWN; ++c) o[i].x[c] = 0.0f;
    });
    for (u32 round = first_tile; round < last_tile; round += teams) {
        u32 tile = round + team;
        if (tile < last_tile) {
            bool inserts = makes && tile == new_tile;
            copies_wait<1>();
            __syncwarp();
            if (inserts && new_at / KEYS == side) {
                fresh_key->put(keys + key_place<FORMAT, HD>(new_at % KEYS, new_byte / 16) + new_byte % 16);
                if (SCALED && lane == 0) scales[new_at % KEYS] = fresh_key->scale;
                __syncwarp();
            }
            Tile<FORMAT, HD, TEAM> work;
            u32 first_key = tile * FLASH_TILE + side * KEYS;
            work.score(q, keys, scales, a.scale, first_key - (length - seen), seen);
            __syncwarp();
            fetch(tile + teams, 0, numbers);
            work.weigh(board, side, team_sync);
            copies_wait<1>();
            __syncwarp();
            if (inserts) {
                const u32 HALF_BYTES = BYTES / TEAM;
                if (new_byte / HALF_BYTES == side) {
                    u32 byte = new_byte % HALF_BYTES;
                    fresh_value->put(values + value_place<FORMAT, COLUMNS>(new_at, byte / 16) + byte % 16);
                }
                if (SCALED && lane == 0 && new_at / KEYS == side)
                    scales[KEYS + new_at % KEYS] = fresh_value->scale;
                __syncwarp();
            }
            u32 p[4][2];
            work.share(board, side, team_sync, scales + KEYS, p);
            work.combine(values, p);
            team_sync();
            work.leave(side, heads, result_of(team));
        }
        __syncthreads();
        u32 present = min(teams, last_tile - round);
        each([&](int i, u32 g) {
#pragma unroll 1
            for (u32 t = 0; t < present; ++t) fold_in(i, result_of(t) + g * (HD + 4));
        });
        if (round + teams >= last_tile) break;
        __syncthreads();
        fetch(tile + teams, 1, numbers);
        numbers = page_numbers(tile + 2 * teams);
    }

    u32 splits = (length + FLASH_TILE * SPLIT_TILES - 1) / (FLASH_TILE * SPLIT_TILES) - first_split;
    if (splits > 1) {
        // The block that comes last folds the splits in order.
        u32 number = blockIdx.z * gridDim.y + blockIdx.y, size = DECODE_HEADS * (HD + 4);
        float* all = a.partials + (u64)number * a.splits * size;
        each([&](int i, u32 g) {
            float* to = all + blockIdx.x * size + g * (HD + 4);
            o[i].store(to + lane * OWN);
            if (lane == 0) *reinterpret_cast<float2*>(to + HD) = make_float2(m[i], l[i]);
        });
        __threadfence();
        __shared__ u32 arrived;
        __syncthreads();
        if (threadIdx.x == 0) arrived = atomicAdd(a.counters + number, 1);
        __syncthreads();
        if (arrived != splits - 1) return;
        __threadfence();
        if (threadIdx.x == 0) a.counters[number] = 0;
        each([&](int i, u32 g) {
#pragma unroll 1
            for (u32 s = 0; s < splits; ++s) {
                const float* from = all + s * size + g * (HD + 4);
                if (s > 0) {
                    fold_in(i, from);
                } else {
                    m[i] = from[HD], l[i] = from[HD + 1];
                    o[i].load(from + lane * OWN);
                }
            }
        });
    }
    finish_heads<HD>(a, span.row, kv_head * group + first_head, heads, blockIdx.y, gridDim.y, m, l, o);
}

// Small tiles by a warp alone, others by teams of two; registers for 16 warps an SM.
#define KERNEL(name, format, hd, team)                                                                   \
    extern "C" __global__ void __launch_bounds__(MAX_DECODE_WARPS* WARP, 2) flash_decode_##name##_##hd(  \
        const float* qkv, const u8* keys, const u8* values, const float* key_scales,                     \
        const float* value_scales, const Span* spans, const u32* pages, float* out, float* lse,          \
        float* partials, u32* counters, int stride, int heads, int kv_heads, int page_shift, int splits, \
        float scale, u32 window, const float* cos, const float* sin, int output, float* out_scales,      \
        u32* absmax                                                                                      \
    ) {                                                                                                  \
        FlashArgs args = {                                                                               \
            qkv,    keys,  values,   key_scales, value_scales, spans,  pages,      nullptr,              \
            out,    lse,   partials, counters,   stride,       heads,  kv_heads,   page_shift,           \
            splits, scale, window,   cos,        sin,          output, out_scales, absmax                \
        };                                                                                               \
        if (!cos) wait_for_previous();                                                                   \
        decode<format, hd, team>(args);                                                                  \
    }
KERNEL(bf16, KV_BF16, 64, 2)
KERNEL(bf16, KV_BF16, 128, 2)
KERNEL(int8, KV_INT8, 64, 1)
KERNEL(int8, KV_INT8, 128, 2)
KERNEL(fp8, KV_FP8, 64, 1)
KERNEL(fp8, KV_FP8, 128, 2)
