// Attention of one new position of each sequence over long contexts, at the speed of memory: see flash.cuh.
//
// Where a step has more splits than can be resident, several warps that share a split only wait for each
// other. Here every warp takes whole splits, one after another, and streams their tiles through its own ring
// of stages in shared memory. The ring is filled ahead across the ends of splits, tiles are folded in
// registers, and no warp waits for another, so as much is in flight as shared memory holds. The last splits
// of sequences, which are shorter, come last, so that warps end together. A second kernel folds the splits of
// a row in order.
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

// One split of one sequence, for up to eight heads.
struct Item {
    u32 row, pages, length, seen, kv_head, first_head, heads, tile, last_tile;
};

// Results are [split][party][DECODE_HEADS][HD columns, m, l, 2 empty]: the splits of all sequences but the
// last ones of each, then these.
template <int FORMAT, int HD, int STAGES>
__device__ __forceinline__ void stream(const FlashArgs& a, u32 sequences) {
    const int BYTES = Row<FORMAT, HD>::BYTES;
    const bool SCALED = FORMAT != KV_BF16;
    const u32 STAGE = FLASH_TILE * (BYTES + (SCALED ? 4 : 0)), RESULT = DECODE_HEADS * (HD + 4);
    extern __shared__ __align__(1024) u8 smem[];
    // Splits of the sequences up to and with each, without the last ones.
    __shared__ u32 ends[MAX_STREAM_SEQUENCES];
    __shared__ Board unused;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Parties parties(a);
    for (u32 i = threadIdx.x; i < sequences; i += blockDim.x) ends[i] = Seen(a.spans[i], a.window).splits - 1;
    __syncthreads();
    if (warp == 0) {
        u32 before = 0;
        for (u32 first = 0; first < sequences; first += WARP) {
            u32 i = first + lane, sum = i < sequences ? ends[i] : 0;
#pragma unroll
            for (int d = 1; d < WARP; d *= 2) {
                u32 other = __shfl_up_sync(FULL, sum, d);
                if (lane >= d) sum += other;
            }
            sum += before;
            if (i < sequences) ends[i] = sum;
            before = __shfl_sync(FULL, sum, WARP - 1);
        }
    }
    __syncthreads();
    u32 earlier = ends[sequences - 1], items = (earlier + sequences) * parties.count;
    // Neighbouring items are on different SMs.
    u32 first_item = warp * gridDim.x + blockIdx.x, step = gridDim.x * (blockDim.x / WARP);

    auto open = [&](u32 number) {
        u32 split = number / parties.count, party = number % parties.count, low = split - earlier;
        bool last = split >= earlier;
        if (!last) {
            // The first sequence that ends after it.
            u32 high = sequences - 1;
            for (low = 0; low < high;) {
                u32 middle = (low + high) / 2;
                if (ends[middle] > split) {
                    high = middle;
                } else {
                    low = middle + 1;
                }
            }
            split -= low > 0 ? ends[low - 1] : 0;
        }
        Span span = a.spans[low];
        Seen seen(span, a.window);
        if (last) split = seen.splits - 1;
        Item item;
        item.row = span.row, item.pages = span.pages, item.length = seen.length, item.seen = seen.keys;
        item.kv_head = party / parties.eights, item.first_head = party % parties.eights * DECODE_HEADS;
        item.heads = min(DECODE_HEADS, parties.group - item.first_head);
        item.tile = (seen.first_split + split) * SPLIT_TILES;
        item.last_tile = min(seen.last_tile, item.tile + SPLIT_TILES);
        item.tile = max(item.tile, seen.first_tile);
        return item;
    };

    // What is fetched next: a tile's keys, then its values; and the numbers of its pages, one a lane.
    u32 next = first_item, numbers = 0;
    bool values = false, waited = false;
    Item ahead = {};
    auto page_numbers = [&]() {
        u32 page = (ahead.tile * FLASH_TILE >> a.page_shift) + lane;
        numbers = page << a.page_shift < ahead.length ? a.pages[ahead.pages + page] : 0;
    };
    auto fetch = [&](u8* stage) {
        if (next < items) {
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
                    u32 place =
                        values ? value_place<FORMAT, HD>(row, chunk) : key_place<FORMAT, HD>(row, chunk);
                    copy_16(to + place, rows + r * BYTES, row < left);
                }
            }
            if (SCALED) {
                const float* scales = values ? a.value_scales : a.key_scales;
#pragma unroll
                for (u32 row = lane; row < FLASH_TILE; row += WARP)
                    copy_4(to + FLASH_TILE * BYTES + row * 4, scales + source(row), row < left);
            }
            if (values) {
                if (++ahead.tile == ahead.last_tile) {
                    next += step;
                    if (next < items) ahead = open(next);
                }
                if (next < items) page_numbers();
            }
            values = !values;
        }
        copies_commit();
    };

    u8 *ring = smem + warp * STAGES * STAGE, *stage = ring;
    if (next < items) {
        ahead = open(next);
        page_numbers();
    }
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) fetch(ring + i * STAGE);
    if (!waited) wait_for_previous();
    waited = true;
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
#pragma unroll 1
    for (u32 number = first_item; number < items; number += step) {
        Item item = open(number);
        u32 q[HD / 16][2], head = lane / 4;
        const float* query =
            a.qkv + (u64)item.row * a.stride + (item.kv_head * parties.group + item.first_head + head) * HD;
#pragma unroll
        for (int s = 0; s < HD / 16; ++s) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float* pair = query + query_pair<FORMAT, HD>(s, h);
                float2 x = {0, 0};
                if (head < item.heads) x = *reinterpret_cast<const float2*>(pair);
                q[s][h] = two<SCALED>(x.x, x.y);
            }
        }
        Work total;
        total.clear();
#pragma unroll 1
        for (u32 tile = item.tile; tile < item.last_tile; ++tile) {
            Work work;
            arrived();
            const float* scales = reinterpret_cast<const float*>(stage + FLASH_TILE * BYTES);
            work.score(q, stage, scales, a.scale, tile * FLASH_TILE - (item.length - item.seen), item.seen);
            refill();
            work.weigh(unused, 0, alone);
            arrived();
            u32 p[4][2];
            work.share(unused, 0, alone, reinterpret_cast<const float*>(stage + FLASH_TILE * BYTES), p);
            work.combine(stage, p);
            refill();
            total.fold_in(work);
        }
        total.leave(0, item.heads, a.partials + (u64)number * RESULT);
    }
}

// Folds the splits of a row in order: a block for each row and up to eight heads, a warp for each of these.
template <int HD>
__device__ __forceinline__ void fold_splits(const FlashArgs& a, u32 sequences) {
    const u32 OWN = HD / WARP, AT_ONCE = 20, RESULT = DECODE_HEADS * (HD + 4);
    u32 lane = threadIdx.x % WARP, head = threadIdx.x / WARP, party = blockIdx.x, sequence = blockIdx.y;
    Parties parties(a);
    u32 first_head = party % parties.eights * DECODE_HEADS,
        heads = min(DECODE_HEADS, parties.group - first_head);
    // Splits of the sequences before this one, and of all, without the last ones.
    u32 before = 0, earlier = 0;
    for (u32 i = lane; i < sequences; i += WARP) {
        u32 splits = Seen(a.spans[i], a.window).splits - 1;
        earlier += splits;
        if (i < sequence) before += splits;
    }
    before = __reduce_add_sync(FULL, before), earlier = __reduce_add_sync(FULL, earlier);
    Span span = a.spans[sequence];
    Seen seen(span, a.window);
    auto result = [&](u32 split) {
        u32 number = split + 1 < seen.splits ? before + split : earlier + sequence;
        return a.partials + ((u64)number * parties.count + party) * RESULT + head * (HD + 4);
    };
    wait_for_previous();
    float m[1] = {-INFINITY_F}, l[1] = {0.0f};
    Columns<OWN> o[1];
    if (head < heads) {
#pragma unroll 1
        for (u32 first = 0; first < seen.splits; first += AT_ONCE) {
            // Lane i has m and l of the i-th.
            float2 state = {-INFINITY_F, 0.0f};
            if (lane < AT_ONCE && first + lane < seen.splits)
                state = *reinterpret_cast<const float2*>(result(first + lane) + HD);
            Columns<OWN> later[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                if (first + i >= seen.splits) break;
                later[i].load(result(first + i) + lane * OWN);
            }
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                if (first + i >= seen.splits) break;
                float later_m = __shfl_sync(FULL, state.x, i), later_l = __shfl_sync(FULL, state.y, i);
                if (first + i == 0) {
                    m[0] = later_m, l[0] = later_l, o[0] = later[0];
                    continue;
                }
                float keep, take;
                fold(m[0], l[0], later_m, later_l, keep, take);
#pragma unroll
                for (int c = 0; c < OWN; ++c) o[0].x[c] = folded(o[0].x[c], later[i].x[c], keep, take);
            }
        }
    }
    u32 row_head = party / parties.eights * parties.group + first_head;
    finish_heads<HD>(a, span.row, row_head, heads, party, parties.count, m, l, o);
}

#define STREAM(name, format, hd, warps, stages)                                                             \
    extern "C" __global__ void __launch_bounds__(warps* WARP, 1) flash_stream_##name##_##hd(                \
        const float* qkv, const u8* keys, const u8* values, const float* key_scales,                        \
        const float* value_scales, const Span* spans, const u32* pages, float* partials, int stride,        \
        int heads, int kv_heads, int page_shift, float scale, u32 window, u32 sequences                     \
    ) {                                                                                                     \
        FlashArgs args = {};                                                                                \
        args.qkv = qkv, args.keys = keys, args.values = values, args.key_scales = key_scales;               \
        args.value_scales = value_scales, args.spans = spans, args.pages = pages, args.partials = partials; \
        args.stride = stride, args.heads = heads, args.kv_heads = kv_heads, args.page_shift = page_shift;   \
        args.scale = scale, args.window = window;                                                           \
        stream<format, hd, stages>(args, sequences);                                                        \
    }
STREAM(bf16, KV_BF16, 64, 12, 2)
STREAM(bf16, KV_BF16, 128, 6, 2)
STREAM(int8, KV_INT8, 64, 8, 4)
STREAM(int8, KV_INT8, 128, 12, 2)
STREAM(fp8, KV_FP8, 64, 8, 4)
STREAM(fp8, KV_FP8, 128, 12, 2)

#define FOLD(hd)                                                                                            \
    extern "C" __global__ void __launch_bounds__(DECODE_HEADS* WARP) flash_stream_fold_##hd(                \
        float* partials, const Span* spans, float* out, float* lse, int heads, int kv_heads, u32 window,    \
        u32 sequences, int output, float* out_scales, u32* absmax                                           \
    ) {                                                                                                     \
        FlashArgs args = {};                                                                                \
        args.partials = partials, args.spans = spans, args.out = out, args.lse = lse, args.heads = heads;   \
        args.kv_heads = kv_heads, args.window = window, args.output = output, args.out_scales = out_scales; \
        args.absmax = absmax;                                                                               \
        fold_splits<hd>(args, sequences);                                                                   \
    }
FOLD(64)
FOLD(128)
