// Attention of one new position of each sequence over long contexts, at the speed of memory: see flash.cuh.
//
// Where a step has more splits than can be resident, nothing is won by several warps that share a split: every
// warp takes whole splits, one after another, and streams their tiles through its own ring of stages in shared
// memory. The ring is filled ahead across the end of a split, tiles are folded in registers, and no warp ever
// waits for another, so there is always as much in flight as shared memory holds. The splits of a row are
// folded in order by a second kernel.
#include "flash_tile.cuh"

// Splits that the row of a span sees keys of, and the tile its window begins in.
struct Seen {
    u32 length, keys, first_tile, first_split, splits;
    __device__ __forceinline__ Seen(const Span& span, u32 window) {
        length = span.position + 1;
        keys = min(length, window);
        first_tile = (length - keys) / FLASH_TILE;
        first_split = first_tile / SPLIT_TILES;
        splits = (length + FLASH_TILE * SPLIT_TILES - 1) / (FLASH_TILE * SPLIT_TILES) - first_split;
    }
};

// One split of one sequence, for up to eight heads that share keys and values.
struct Item {
    u32 row, pages, length, seen, kv_head, first_head, heads, tile, last_tile;
};

template <int FORMAT, int HD, int STAGES>
__device__ __forceinline__ void stream(const FlashArgs& a, u32 sequences, u32* firsts) {
    const int BYTES = Row<FORMAT, HD>::BYTES;
    const bool SCALED = FORMAT != KV_BF16;
    const u32 STAGE = FLASH_TILE * (BYTES + (SCALED ? 4 : 0));
    extern __shared__ __align__(1024) u8 smem[];
    __shared__ u32 ends[MAX_STREAM_SEQUENCES];  // splits of the sequences up to and with each
    __shared__ Board unused;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 group = a.heads / a.kv_heads, eights = (group + DECODE_HEADS - 1) / DECODE_HEADS,
        parties = a.kv_heads * eights;
    for (u32 i = threadIdx.x; i < sequences; i += blockDim.x) ends[i] = Seen(a.spans[i], a.window).splits;
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
    u32 items = ends[sequences - 1] * parties, step = gridDim.x * (blockDim.x / WARP);
    // Neighbouring warps are on different SMs.
    u32 first_item = warp * gridDim.x + blockIdx.x;

    auto open = [&](u32 number) {
        u32 split = number / parties, party = number % parties;
        // The first sequence that ends after it.
        u32 low = 0, high = sequences - 1;
        while (low < high) {
            u32 middle = (low + high) / 2;
            if (ends[middle] > split) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        Span span = a.spans[low];
        Seen seen(span, a.window);
        split -= low > 0 ? ends[low - 1] : 0;
        Item item;
        item.row = span.row, item.pages = span.pages, item.length = seen.length, item.seen = seen.keys;
        item.kv_head = party / eights, item.first_head = party % eights * DECODE_HEADS;
        item.heads = min(DECODE_HEADS, group - item.first_head);
        item.tile = (seen.first_split + split) * SPLIT_TILES;
        item.last_tile = min((seen.length + FLASH_TILE - 1) / FLASH_TILE, item.tile + SPLIT_TILES);
        item.tile = max(item.tile, seen.first_tile);
        return item;
    };

    // What is fetched next: the item, its keys (part 0) or values (1), and its tile's page numbers, one a lane.
    u32 next = first_item, part = 0, numbers = 0;
    Item ahead = {};
    bool waited = false;
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
            const u8* from = part == 0 ? a.keys : a.values;
#pragma unroll
            for (u32 piece = 0; piece < FLASH_TILE; piece += PIECE) {
                const u8* rows = from + source(piece) * BYTES + lane * 16;
#pragma unroll
                for (u32 r = 0; r < PIECE; r += STEP) {
                    u32 row = piece | r | own;
                    u32 place = part == 0 ? key_chunk<BYTES>(row, chunk) : value_place<FORMAT, HD>(row, chunk);
                    copy_16(to + place, rows + r * BYTES, row < left);
                }
            }
            if (SCALED) {
                const float* scales = part == 0 ? a.key_scales : a.value_scales;
#pragma unroll
                for (u32 row = lane; row < FLASH_TILE; row += WARP)
                    copy_4(to + FLASH_TILE * BYTES + row * 4, scales + source(row), row < left);
            }
            if (part == 1) {
                if (++ahead.tile == ahead.last_tile) {
                    next += step;
                    if (next < items) ahead = open(next);
                }
                if (next < items) page_numbers();
            }
            part ^= 1;
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
    if (blockIdx.x == 0) {
        for (u32 i = threadIdx.x; i < sequences; i += blockDim.x) firsts[i] = i > 0 ? ends[i - 1] : 0;
    }
    // The oldest stage, when it has arrived; and it is filled again.
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
        u32 q[HD / 16][2];
        u32 head = lane / 4;
        const float* query =
            a.qkv + (u64)item.row * a.stride + (item.kv_head * group + item.first_head + head) * HD;
#pragma unroll
        for (int s = 0; s < HD / 16; ++s) {
            float4 x = {0, 0, 0, 0};
            if (head < item.heads) x = *reinterpret_cast<const float4*>(query + lane % 4 * (HD / 4) + 4 * s);
            q[s][0] = two<SCALED>(x.x, x.y), q[s][1] = two<SCALED>(x.z, x.w);
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
        total.leave(0, item.heads, a.partials + (u64)number * DECODE_HEADS * (HD + 4));
    }
}

// Folds the splits of a row in order: a warp for each row and head.
template <int HD>
__device__ __forceinline__ void fold_splits(const FlashArgs& a, u32 sequences, const u32* firsts) {
    const int OWN = HD / WARP, AT_ONCE = 8;
    wait_for_previous();
    u32 lane = threadIdx.x % WARP, task = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    u32 sequence = task / a.heads, head = task % a.heads;
    if (sequence >= sequences) return;
    u32 group = a.heads / a.kv_heads, eights = (group + DECODE_HEADS - 1) / DECODE_HEADS,
        parties = a.kv_heads * eights;
    u32 party = head / group * eights + head % group / DECODE_HEADS, local = head % group % DECODE_HEADS;
    Span span = a.spans[sequence];
    u32 splits = Seen(span, a.window).splits;
    const u32 SIZE = DECODE_HEADS * (HD + 4);
    const float* from = a.partials + ((u64)firsts[sequence] * parties + party) * SIZE + local * (HD + 4);
    float m = -INFINITY_F, l = 0.0f;
    Columns<OWN> o;
#pragma unroll 1
    for (u32 first = 0; first < splits; first += AT_ONCE) {
        Columns<OWN> later[AT_ONCE];
        float2 state[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i >= splits) break;
            const float* at = from + (u64)(first + i) * parties * SIZE;
            later[i].load(at + lane * OWN);
            state[i] = *reinterpret_cast<const float2*>(at + HD);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i >= splits) break;
            if (first + i == 0) {
                m = state[0].x, l = state[0].y, o = later[0];
                continue;
            }
            float keep, take;
            fold(m, l, state[i].x, state[i].y, keep, take);
#pragma unroll
            for (int c = 0; c < OWN; ++c) o.x[c] = folded(o.x[c], later[i].x[c], keep, take);
        }
    }
    u64 place = (u64)span.row * a.heads + head;
    if (a.lse && lane == 0) a.lse[place] = log_sum(m, l);
    float inverse = __frcp_rn(l);
#pragma unroll
    for (int c = 0; c < OWN; ++c) o.x[c] = __fmul_rn(o.x[c], inverse);
    if (a.output == DECODED_F32) return o.store(a.out + place * HD + lane * OWN);
    u32* words = reinterpret_cast<u32*>(reinterpret_cast<u16*>(a.out) + place * HD + lane * OWN);
#pragma unroll
    for (int c = 0; c < OWN; c += 2) words[c / 2] = bf16_pair(o.x[c], o.x[c + 1]);
}

#define STREAM(name, format, hd, warps, stages)                                                              \
    extern "C" __global__ void __launch_bounds__(warps* WARP, 1) flash_stream_##name##_##hd(                 \
        const float* qkv, const u8* keys, const u8* values, const float* key_scales,                         \
        const float* value_scales, const Span* spans, const u32* pages, float* partials, u32* firsts,        \
        int stride, int heads, int kv_heads, int page_shift, float scale, u32 window, u32 sequences          \
    ) {                                                                                                      \
        FlashArgs args = {qkv,        keys,    values,   key_scales, value_scales, spans,   pages,  nullptr, \
                          nullptr,    nullptr, partials, nullptr,    stride,       heads,   kv_heads,        \
                          page_shift, 0,       scale,    window,     nullptr,      nullptr, 0,      nullptr, \
                          nullptr};                                                                          \
        stream<format, hd, stages>(args, sequences, firsts);                                                 \
    }
STREAM(bf16, KV_BF16, 64, 8, 3)
STREAM(bf16, KV_BF16, 128, 4, 3)
STREAM(int8, KV_INT8, 64, 8, 4)
STREAM(int8, KV_INT8, 128, 8, 3)
STREAM(fp8, KV_FP8, 64, 8, 4)
STREAM(fp8, KV_FP8, 128, 8, 3)

#define FOLD(hd)                                                                                             \
    extern "C" __global__ void flash_stream_fold_##hd(                                                       \
        const float* partials, const u32* firsts, const Span* spans, float* out, float* lse, int heads,      \
        int kv_heads, u32 window, u32 sequences, int output                                                  \
    ) {                                                                                                      \
        FlashArgs args = {nullptr, nullptr, nullptr, nullptr, nullptr, spans,                                \
                          nullptr, nullptr, out,     lse,     const_cast<float*>(partials),                  \
                          nullptr, 0,       heads,   kv_heads, 0, 0, 0.0f, window, nullptr, nullptr, output, \
                          nullptr, nullptr};                                                                 \
        fold_splits<hd>(args, sequences, firsts);                                                            \
    }
FOLD(64)
FOLD(128)
