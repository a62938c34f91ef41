// Attention of one new position of each sequence over long contexts, at the speed of memory: see flash.cuh.
//
// Where a step has more splits than can be resident, several warps that share a split only wait for each other.
// Here every warp takes an equal run of tiles of the whole step and streams them through its own ring of stages
// in shared memory. The ring is filled ahead across the ends of splits, tiles are folded in registers, and no
// warp waits for another, so as much is in flight as shared memory holds, and all end at the same time.
//
// A run begins and ends anywhere in a split. The first part of a split is folded as it is read; tiles of a later
// part are stored apart, since folding is not associative. A second kernel folds a row's splits in order, and
// in a split that was cut its tiles: the same sums in the same order as everywhere.
#include "flash_tile.cuh"

// What the row of a span sees.
struct Seen {
    u32 length, keys, first_tile, last_tile, first_split, splits;
    __device__ __forceinline__ Seen(const Span& span, u32 window) {
        length = span.position + 1;
        keys = min(length, window);
        first_tile = (length - keys) / FLASH_TILE;
        last_tile = (length + FLASH_TILE - 1) / FLASH_TILE;
        first_split = first_tile / SPLIT_TILES;
        splits = (last_tile + SPLIT_TILES - 1) / SPLIT_TILES - first_split;
    }
    // Tiles of the n-th of its splits.
    __device__ __forceinline__ u32 begin(u32 n) const {
        return max(first_tile, (first_split + n) * SPLIT_TILES);
    }
    __device__ __forceinline__ u32 end(u32 n) const {
        return min(last_tile, (first_split + n + 1) * SPLIT_TILES);
    }
};

// Blocks of heads that share keys and values, up to eight each.
struct Parties {
    u32 group, eights, count;
    __device__ __forceinline__ Parties(const FlashArgs& a) {
        group = a.heads / a.kv_heads;
        eights = (group + DECODE_HEADS - 1) / DECODE_HEADS;
        count = a.kv_heads * eights;
    }
};

// The first tile of a warp's run.
__device__ __forceinline__ u32 run_begin(u32 warp, u32 warps, u32 tiles) {
    return (u64)warp * tiles / warps;
}

// Tiles of one split, for up to eight heads: those of a run.
struct Part {
    u32 row, pages, length, seen, kv_head, first_head, heads, tile, last_tile;
    bool first;  // the first tile is the split's
    u32 split;   // where its result lies
};

// Partial results are [DECODE_HEADS][HD columns, m, l, tiles, warp]: of the splits of all sequences by party,
// then of single tiles, SPLIT_TILES - 1 for each warp.
template <int FORMAT, int HD, int STAGES>
__device__ __forceinline__ void stream(const FlashArgs& a, u32 sequences, float* tile_partials, u32* firsts) {
    const int BYTES = Row<FORMAT, HD>::BYTES;
    const bool SCALED = FORMAT != KV_BF16;
    const u32 STAGE = FLASH_TILE * (BYTES + (SCALED ? 4 : 0)), RESULT = DECODE_HEADS * (HD + 4);
    extern __shared__ __align__(1024) u8 smem[];
    // Tiles and splits of the sequences before each, and of all.
    __shared__ u32 tiles_before[MAX_STREAM_SEQUENCES + 1], splits_before[MAX_STREAM_SEQUENCES + 1];
    __shared__ Board unused;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    Parties parties(a);
    for (u32 i = threadIdx.x; i < sequences; i += blockDim.x) {
        Seen seen(a.spans[i], a.window);
        tiles_before[i + 1] = seen.last_tile - seen.first_tile;
        splits_before[i + 1] = seen.splits;
    }
    __syncthreads();
    if (warp < 2) {
        u32 *sums = warp == 0 ? tiles_before : splits_before, before = 0;
        for (u32 first = 0; first < sequences; first += WARP) {
            u32 i = first + lane, sum = i < sequences ? sums[i + 1] : 0;
#pragma unroll
            for (int d = 1; d < WARP; d *= 2) {
                u32 other = __shfl_up_sync(FULL, sum, d);
                if (lane >= d) sum += other;
            }
            sum += before;
            if (i < sequences) sums[i + 1] = sum;
            before = __shfl_sync(FULL, sum, WARP - 1);
        }
        if (lane == 0) sums[0] = 0;
    }
    __syncthreads();
    u32 me = blockIdx.x * warps + warp, tiles = tiles_before[sequences] * parties.count;
    u32 begin = run_begin(me, gridDim.x * warps, tiles), end = run_begin(me + 1, gridDim.x * warps, tiles);

    // The part of a split that begins with this tile of all.
    auto open = [&](u32 at) {
        // The last sequence that begins before or there.
        u32 low = 0, high = sequences - 1;
        while (low < high) {
            u32 middle = (low + high + 1) / 2;
            if (tiles_before[middle] * parties.count > at) {
                high = middle - 1;
            } else {
                low = middle;
            }
        }
        Span span = a.spans[low];
        Seen seen(span, a.window);
        // All parties' tiles of the first split, of the second, ..
        u32 rest = at - tiles_before[low] * parties.count, split = 0;
        u32 in_first = (seen.end(0) - seen.begin(0)) * parties.count;
        if (rest >= in_first) {
            rest -= in_first;
            split = 1 + rest / (SPLIT_TILES * parties.count);
            rest %= SPLIT_TILES * parties.count;
        }
        u32 count = seen.end(split) - seen.begin(split), party = rest / count, offset = rest % count;
        Part part;
        part.row = span.row, part.pages = span.pages, part.length = seen.length, part.seen = seen.keys;
        part.kv_head = party / parties.eights, part.first_head = party % parties.eights * DECODE_HEADS;
        part.heads = min(DECODE_HEADS, parties.group - part.first_head);
        part.tile = seen.begin(split) + offset;
        part.last_tile = part.tile + min(count - offset, end - at);
        part.first = offset == 0;
        part.split = (splits_before[low] + split) * parties.count + party;
        return part;
    };

    // What is fetched next: a tile's keys, then its values; and the numbers of its pages, one a lane.
    u32 next = begin, numbers = 0;
    bool values = false, waited = false;
    Part ahead = {};
    auto page_numbers = [&]() {
        u32 page = (ahead.tile * FLASH_TILE >> a.page_shift) + lane;
        numbers = page << a.page_shift < ahead.length ? a.pages[ahead.pages + page] : 0;
    };
    auto fetch = [&](u8* stage) {
        if (next < end) {
            // The new row is the work of the kernel before.
            if (!waited && (ahead.tile + 1) * FLASH_TILE >= ahead.length) {
                wait_for_previous();
                waited = true;
            }
            u32 first = ahead.tile * FLASH_TILE, left = ahead.length - first;
            u32 first_page = first >> a.page_shift, in_page = (1 << a.page_shift) - 1;
            // Where the tile's row lies.
            auto source = [&](u32 row) {
                u32 page = __shfl_sync(FULL, numbers, (first + row >> a.page_shift) - first_page);
                return ((u64)(page * a.kv_heads + ahead.kv_head) << a.page_shift) + (first + row & in_page);
            };
            // Pages have 16 positions or more: so many lie together.
            const u32 PIECE = 16, CHUNKS = BYTES / 16, STEP = WARP / CHUNKS;
            u32 own = lane / CHUNKS, chunk = lane % CHUNKS, to = smem_address(stage);
            const u8* from = values ? a.values : a.keys;
#pragma unroll
            for (u32 piece = 0; piece < FLASH_TILE; piece += PIECE) {
                const u8* rows = from + source(piece) * BYTES + lane * 16;
#pragma unroll
                for (u32 r = 0; r < PIECE; r += STEP) {
                    u32 row = piece | r | own;
                    u32 place = values ? value_place<FORMAT, HD>(row, chunk) : key_place<FORMAT, HD>(row, chunk);
                    copy_16(to + place, rows + r * BYTES, row < left);
                }
            }
            if (SCALED) {
                const float* scales = values ? a.value_scales : a.key_scales;
#pragma unroll
                for (u32 row = lane; row < FLASH_TILE; row += WARP)
                    copy_4(to + FLASH_TILE * BYTES + row * 4, scales + source(row), row < left);
            }
            if (values && ++next < end) {
                if (++ahead.tile == ahead.last_tile) ahead = open(next);
                page_numbers();
            }
            values = !values;
        }
        copies_commit();
    };

    u8 *ring = smem + warp * STAGES * STAGE, *stage = ring;
    if (begin < end) {
        ahead = open(begin);
        page_numbers();
    }
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) fetch(ring + i * STAGE);
    if (!waited) wait_for_previous();
    waited = true;
    if (blockIdx.x == 0) {
        for (u32 i = threadIdx.x; i < sequences; i += blockDim.x) firsts[i] = splits_before[i];
        if (threadIdx.x == 0) firsts[sequences] = tiles;
    }
    // Waits for the oldest stage; fills it again.
    auto arrived = [&]() {
        copies_wait<STAGES - 1>();
        __syncwarp();
    };
    auto refill = [&]() {
        __syncwarp();
        fetch(stage);
        stage = stage == ring + (STAGES - 1) * STAGE ? ring : stage + STAGE;
    };
    typedef Tile<FORMAT, HD, 1> Work;
    auto alone = []() { __syncwarp(); };
    float* apart = tile_partials + (u64)me * (SPLIT_TILES - 1) * RESULT;
#pragma unroll 1
    for (u32 at = begin; at < end;) {
        Part part = open(at);
        u32 q[HD / 16][2], head = lane / 4;
        const float* query =
            a.qkv + (u64)part.row * a.stride + (part.kv_head * parties.group + part.first_head + head) * HD;
#pragma unroll
        for (int s = 0; s < HD / 16; ++s) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float2 x = {0, 0};
                if (head < part.heads) x = *reinterpret_cast<const float2*>(query + query_pair<FORMAT, HD>(s, h));
                q[s][h] = two<SCALED>(x.x, x.y);
            }
        }
        Work total;
        total.clear();
#pragma unroll 1
        for (u32 tile = part.tile; tile < part.last_tile; ++tile) {
            Work work;
            arrived();
            const float* scales = reinterpret_cast<const float*>(stage + FLASH_TILE * BYTES);
            work.score(q, stage, scales, a.scale, tile * FLASH_TILE - (part.length - part.seen), part.seen);
            refill();
            work.weigh(unused, 0, alone);
            arrived();
            u32 p[4][2];
            work.share(unused, 0, alone, reinterpret_cast<const float*>(stage + FLASH_TILE * BYTES), p);
            work.combine(stage, p);
            refill();
            if (part.first) {
                total.fold_in(work);
            } else {
                work.leave(0, part.heads, apart + (tile - part.tile) * RESULT);
            }
        }
        u32 count = part.last_tile - part.tile;
        if (part.first) {
            float* to = a.partials + (u64)part.split * RESULT;
            total.leave(0, part.heads, to);
            if (lane < part.heads) *reinterpret_cast<uint2*>(to + lane * (HD + 4) + HD + 2) = make_uint2(count, me);
        }
        at += count;
    }
}

// Folds the splits of a row in order: a warp for each row, head and 32 columns.
template <int HD>
__device__ __forceinline__ void fold_splits(
    const FlashArgs& a, u32 sequences, const float* tile_partials, const u32* firsts, u32 stream_warps
) {
    const u32 AT_ONCE = 8, PARTS = HD / WARP, RESULT = DECODE_HEADS * (HD + 4);
    u32 task = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    u32 column = task % PARTS * WARP + threadIdx.x % WARP, head = task / PARTS % a.heads,
        sequence = task / PARTS / a.heads;
    if (sequence >= sequences) return;
    Parties parties(a);
    u32 party = head / parties.group * parties.eights + head % parties.group / DECODE_HEADS;
    u32 local = head % parties.group % DECODE_HEADS * (HD + 4);
    Span span = a.spans[sequence];
    Seen seen(span, a.window);
    wait_for_previous();
    const float* from = a.partials + ((u64)firsts[sequence] * parties.count + party) * RESULT + local;
    u32 tiles = firsts[sequences];
    float m = -INFINITY_F, l = 0.0f, o = 0.0f;
    auto fold_in = [&](float later, float later_m, float later_l) {
        float keep, take;
        fold(m, l, later_m, later_l, keep, take);
        o = folded(o, later, keep, take);
    };
#pragma unroll 1
    for (u32 first = 0; first < seen.splits; first += AT_ONCE) {
        float later[AT_ONCE];
        float4 state[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            const float* at = from + (u64)min(first + i, seen.splits - 1) * parties.count * RESULT;
            later[i] = at[column];
            state[i] = *reinterpret_cast<const float4*>(at + HD);
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            u32 split = first + i;
            if (split >= seen.splits) break;
            float split_m = state[i].x, split_l = state[i].y, split_o = later[i];
            u32 missing = seen.end(split) - seen.begin(split) - __float_as_uint(state[i].z);
            // The tiles that other warps had.
#pragma unroll 1
            for (u32 warp = __float_as_uint(state[i].w) + 1; missing > 0; ++warp) {
                u32 run = run_begin(warp + 1, stream_warps, tiles) - run_begin(warp, stream_warps, tiles);
                u32 count = min(missing, run);
                const float* at = tile_partials + (u64)warp * (SPLIT_TILES - 1) * RESULT + local;
#pragma unroll 1
                for (u32 t = 0; t < count; ++t, at += RESULT) {
                    float keep, take;
                    fold(split_m, split_l, at[HD], at[HD + 1], keep, take);
                    split_o = folded(split_o, at[column], keep, take);
                }
                missing -= count;
            }
            if (split == 0) {
                m = split_m, l = split_l, o = split_o;
            } else {
                fold_in(split_o, split_m, split_l);
            }
        }
    }
    u64 place = (u64)span.row * a.heads + head;
    if (a.lse && column == 0) a.lse[place] = log_sum(m, l);
    float x = __fmul_rn(o, __frcp_rn(l));
    if (a.output == DECODED_F32) {
        a.out[place * HD + column] = x;
    } else {
        reinterpret_cast<u16*>(a.out)[place * HD + column] = bf16_bits(x);
    }
}

#define STREAM(name, format, hd, warps, stages)                                                                \
    extern "C" __global__ void __launch_bounds__(warps* WARP, 1) flash_stream_##name##_##hd(                   \
        const float* qkv, const u8* keys, const u8* values, const float* key_scales,                           \
        const float* value_scales, const Span* spans, const u32* pages, float* partials, float* tile_partials, \
        u32* firsts, int stride, int heads, int kv_heads, int page_shift, float scale, u32 window,             \
        u32 sequences                                                                                          \
    ) {                                                                                                        \
        FlashArgs args = {};                                                                                   \
        args.qkv = qkv, args.keys = keys, args.values = values, args.key_scales = key_scales;                  \
        args.value_scales = value_scales, args.spans = spans, args.pages = pages, args.partials = partials;    \
        args.stride = stride, args.heads = heads, args.kv_heads = kv_heads, args.page_shift = page_shift;      \
        args.scale = scale, args.window = window;                                                              \
        stream<format, hd, stages>(args, sequences, tile_partials, firsts);                                    \
    }
STREAM(bf16, KV_BF16, 64, 8, 3)
STREAM(bf16, KV_BF16, 128, 4, 3)
STREAM(int8, KV_INT8, 64, 8, 4)
STREAM(int8, KV_INT8, 128, 8, 3)
STREAM(fp8, KV_FP8, 64, 8, 4)
STREAM(fp8, KV_FP8, 128, 8, 3)

#define FOLD(hd)                                                                                           \
    extern "C" __global__ void flash_stream_fold_##hd(                                                     \
        float* partials, const float* tile_partials, const u32* firsts, const Span* spans, float* out,     \
        float* lse, int heads, int kv_heads, u32 window, u32 sequences, u32 stream_warps, int output       \
    ) {                                                                                                    \
        FlashArgs args = {};                                                                               \
        args.partials = partials, args.spans = spans, args.out = out, args.lse = lse, args.heads = heads;  \
        args.kv_heads = kv_heads, args.window = window, args.output = output;                              \
        fold_splits<hd>(args, sequences, tile_partials, firsts, stream_warps);                             \
    }
FOLD(64)
FOLD(128)
