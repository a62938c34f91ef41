// Attention of many queries of a sequence with the instructions of Hopper, keys and values in bf16: see
// flash.cuh for what is computed and in which order. The bits are those of flash_prefill.cu.
//
// Blocks stay and take items of work one after the other: 128 packed rows of a span and key/value head. A
// block is a producer, which brings tiles of keys and values, and two warpgroups that own 64 rows each. A
// warpgroup always has an MMA in flight: that of a tile's weights and values while it takes the exponentials
// of the next one, that of the scores of the tile after that while it folds the first one in. What one
// warpgroup leaves idle of the tensor cores, the other one has.
//
// Tiles lie in halves of 64 columns, 128 bytes a row, swizzled. Pages are matrices of rows to the TMA, whose
// boxes have the rows of a page, or 64 of them.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "flash.cuh"
#include "flash_hopper.cuh"

const int GROUPS = PREFILL_ROWS / FLASH_ROWS;
const int CONSUMERS = GROUPS * 128;
// Items that the producer can be ahead by, and more: each has a tile at least.
const int ITEMS = 16;

struct PrefillArgs {
    const float* qkv;  // [rows, stride]: queries of all heads first
    const Span* spans;
    const u32* pages;
    const u32* work;  // pairs of span and first packed row, those that see most keys first; or null: every
                      // span has one row
    float* out;       // [rows, heads * head_dim]
    float* lse;       // [rows, heads], or null
    int stride, heads, kv_heads, page_shift;
    int blocks;   // of the work, for every key/value head
    float scale;  // of scores, times log2(e)
    u32 window;   // keys that a row sees, its own included
};

template <int HD>
struct Shape {
    static const int TILE = FLASH_TILE * HD * 2;
    static const int STAGES = PREFILL_RING_KIB * 1024 / (2 * TILE);
    static const int QUERIES = GROUPS * TILE;
    static const int RING = STAGES * 2 * TILE;
    static_assert(STAGES + 1 < ITEMS, "the producer runs ahead");
};

// Rows of one span and key/value head.
struct Item {
    Span span;
    u32 kv_head, first_row;
};

// What some of an item's packed rows see.
struct Seen {
    u32 rows;         // how many of them are real
    u32 shortest;     // positions up to the first row's own, and up to the last one's
    u32 length;
    u32 first, end;   // tiles
    __device__ __forceinline__ Seen(const PrefillArgs& a, const Item& item, u32 first_row, u32 count) {
        u32 group = a.heads / a.kv_heads, all = item.span.rows * group;
        rows = first_row < all ? min(count, all - first_row) : 0;
        u32 last_row = first_row + max(rows, 1u) - 1;
        shortest = item.span.position + first_row / group + 1;
        length = item.span.position + last_row / group + 1;
        first = (shortest - min(shortest, a.window)) / FLASH_TILE;
        end = rows ? (length + FLASH_TILE - 1) / FLASH_TILE : first;
    }
};

// The number of the block's item of a turn. Items come by falling size: every second turn goes backwards, so
// that blocks have about as much to do.
__device__ __forceinline__ u32 item_number(u32 turn) {
    return turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

struct Barriers {
    u64 keys[8], values[8];            // they have come
    u64 free_keys[8], free_values[8];  // they have been read
};

__device__ __forceinline__ void arrive(u64& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(&barrier)) : "memory");
}

// Waits for all threads of a warpgroup.
__device__ __forceinline__ void group_sync(u32 group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// Stores of this thread can be read by MMAs after a barrier.
__device__ __forceinline__ void publish_stores() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void load_four(u32 from, float& x, float& y, float& z, float& w) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x), "=f"(y), "=f"(z), "=f"(w)
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void store_four(u32 to, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x), "f"(y), "f"(z), "f"(w)
                 : "memory");
}

// Operands of tiles, `offset` bytes further on: of `operand` and `operand_across`, whose upper words are
// constant and whose lower ones are added to.
template <int HIGH>
__device__ __forceinline__ u64 descriptor(u32 low) {
    u64 d;
    asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "n"(HIGH));
    return d;
}
__device__ __forceinline__ u64 tile_along(u32 address, u32 offset) {
    return descriptor<64 | 1 << 30>((address >> 4 | 1 << 16) + (offset >> 4));
}
__device__ __forceinline__ u64 tile_across(u32 address, u32 offset) {
    return descriptor<64 | 1 << 30>((address >> 4 | HALF >> 4 << 16) + (offset >> 4));
}

// Scores of a tile, as `scores` makes them.
template <int HD>
__device__ __forceinline__ void tile_scores_of(float (&d)[FLASH_TILE / 2], u32 left, u32 right) {
    // What was there before is not an input.
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" REGS32 "}, %32, %33, 0, 1, 1, 0, 0;"
                 : SUMS32("=f", 0)
                 : "l"(tile_along(left, 0)), "l"(tile_along(right, 0)));
#pragma unroll
    for (int k = 1; k < HD / 16; ++k) {
        u32 at = k / 4 * HALF + k % 4 * 32;
        wgmma_bf16<FLASH_ROWS>(d, tile_along(left, at), tile_along(right, at), 1);
    }
    commit_products();
}

// ---- the producer -----------------------------------------------------------------------------------------

// By one warp: brings the tiles of all items in order.
template <int HD>
__device__ __forceinline__ void produce(
    const TensorMap* keys, const TensorMap* values, const PrefillArgs& a, Barriers& barriers, Item* items,
    u32 ring
) {
    typedef Shape<HD> M;
    u32 lane = threadIdx.x % WARP, count = a.blocks * a.kv_heads;
    u32 shift = min(a.page_shift, 6), boxes = FLASH_TILE >> shift;
    // A lane brings one box: rows of a page, in one half of the columns.
    u32 half = lane % (HD / 64), box = lane / (HD / 64);
    u32 place = half * HALF + (box << shift) * 128;
    u32 done = 0;
    Item mine;  // of the turn of the lane's number, of 32
    for (u32 turn = 0; item_number(turn) < count; ++turn) {
        if (turn % WARP == 0 && item_number(turn + lane) < count) {
            u32 number = item_number(turn + lane), block = number / a.kv_heads;
            mine.span = a.spans[a.work ? a.work[2 * block] : block];
            mine.first_row = a.work ? a.work[2 * block + 1] : 0;
            mine.kv_head = number % a.kv_heads;
        }
        Item item;
        auto take = [&](u32 x) { return __shfl_sync(FULL, x, turn % WARP); };
        item.span.row = take(mine.span.row), item.span.rows = take(mine.span.rows);
        item.span.position = take(mine.span.position), item.span.pages = take(mine.span.pages);
        item.kv_head = take(mine.kv_head), item.first_row = take(mine.first_row);
        // Who has waited for the first keys of the item sees this.
        if (lane == 0) items[turn % ITEMS] = item;
        Seen seen(a, item, item.first_row, PREFILL_ROWS);
        // The box's page of a tile: looked up a tile ahead.
        auto page_of = [&](u32 tile) {
            u32 position = tile * FLASH_TILE + (box << shift);
            bool there = box < boxes && position < seen.length;
            return there ? a.pages[item.span.pages + (position >> a.page_shift)] : 0;
        };
        u32 page = page_of(seen.first);
        for (u32 tile = seen.first; tile < seen.end; ++tile, ++done) {
            u32 position = tile * FLASH_TILE + (box << shift);
            u32 row = ((page * a.kv_heads + item.kv_head) << a.page_shift) +
                      (position & ((1 << a.page_shift) - 1));
            bool mine_too = box < boxes && position < seen.length;
            if (tile + 1 < seen.end) page = page_of(tile + 1);
            u32 bytes = min(((seen.length - tile * FLASH_TILE - 1) >> shift) + 1, boxes) << shift;
            bytes *= HD * 2;
            u32 stage = done % M::STAGES, again = (done / M::STAGES & 1) ^ 1;
            u32 to = ring + stage * 2 * M::TILE + place;
            if (done >= M::STAGES) barrier_wait(smem_address(&barriers.free_keys[stage]), again);
            u32 barrier = smem_address(&barriers.keys[stage]);
            if (lane == 0) barrier_expect(barrier, bytes);
            __syncwarp();
            if (mine_too) copy_tokens<1>(to, keys, half * 128, row, barrier);
            if (done >= M::STAGES) barrier_wait(smem_address(&barriers.free_values[stage]), again);
            barrier = smem_address(&barriers.values[stage]);
            if (lane == 0) barrier_expect(barrier, bytes);
            __syncwarp();
            if (mine_too) copy_tokens<1>(to + M::TILE, values, half * 128, row, barrier);
        }
    }
}

// ---- a warpgroup of rows ----------------------------------------------------------------------------------

// The weighted values of a tile while MMAs sum them up: registers that are named for ptxas. A variable that
// goes from one turn of a loop to the next would be moved while MMAs still write it, and ptxas would
// serialize them. Between two items the next queries come here: there are as many of them, and no other
// registers are free.
#define PARTS(p)                                                                                        \
    "part" p "0, part" p "1, part" p "2, part" p "3, part" p "4, part" p "5, part" p "6, part" p "7, part" p \
    "8, part" p "9"
#define PARTS30 PARTS("") ", " PARTS("1") ", " PARTS("2")
#define PARTS60 PARTS30 ", " PARTS("3") ", " PARTS("4") ", " PARTS("5")
template <int HD>
struct Part {
    __device__ __forceinline__ void declare() { asm volatile(".reg .f32 part<%0>;" ::"n"(HD / 2)); }

    // Queries of 64 rows: a thread has eight neighbouring numbers of every STEP-th row.
    static const int CHUNKS = HD / 8, STEP = 128 / CHUNKS;

    // Loads four numbers, or zeros.
    template <int I>
    __device__ __forceinline__ void load(const float* from, bool real) {
        asm volatile(
            "{\n.reg .pred real;\nsetp.ne.b32 real, %1, 0;\n"
            "mov.f32 part%2, 0f00000000;\nmov.f32 part%3, 0f00000000;\n"
            "mov.f32 part%4, 0f00000000;\nmov.f32 part%5, 0f00000000;\n"
            "@real ld.global.v4.f32 {part%2, part%3, part%4, part%5}, [%0];\n}" ::"l"(from),
            "r"((u32)real), "n"(I), "n"(I + 1), "n"(I + 2), "n"(I + 3)
            : "memory"
        );
    }

    template <int I = 0>
    __device__ __forceinline__ void fetch(const PrefillArgs& a, const Item& item, u32 first_row) {
        if constexpr (I < HD / 2) {
            u32 group = a.heads / a.kv_heads, thread = threadIdx.x % 128;
            u32 packed = first_row + thread / CHUNKS + I / 8 * STEP;
            u32 query = packed / group, head = item.kv_head * group + packed % group;
            bool real = query < item.span.rows;
            u64 row = real ? item.span.row + query : 0;
            const float* from = a.qkv + row * a.stride + head * HD + thread % CHUNKS * 8;
            load<I>(from, real);
            load<I + 4>(from + 4, real);
            fetch<I + 8>(a, item, first_row);
        }
    }

    template <int I>
    __device__ __forceinline__ u32 rounded() const {
        u32 two;
        asm volatile("cvt.rn.bf16x2.f32 %0, part%1, part%2;" : "=r"(two) : "n"(I + 1), "n"(I));
        return two;
    }

    // Stores them in bf16, as a tile.
    template <int I = 0>
    __device__ __forceinline__ void settle(u32 to) const {
        if constexpr (I < HD / 2) {
            u32 thread = threadIdx.x % 128, chunk = thread % CHUNKS, row = thread / CHUNKS + I / 8 * STEP;
            u32 at = to + chunk / 8 * HALF + row * 128 + (chunk % 8 ^ (row & 7)) * 16;
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(rounded<I>()),
                         "r"(rounded<I + 2>()), "r"(rounded<I + 4>()), "r"(rounded<I + 6>())
                         : "memory");
            settle<I + 8>(to);
        }
    }

    template <int ADD>
    __device__ __forceinline__ void step(const u32* a, u64 values) {
        if constexpr (HD == 64) {
            asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PARTS30
                         ", part30, part31}, {%0, %1, %2, %3}, %4, %5, 1, 1, 1;" ::"r"(a[0]),
                         "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(values), "n"(ADD));
        } else {
            asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PARTS60
                         ", part60, part61, part62, part63}, {%0, %1, %2, %3}, %4, %5, 1, 1, 1;" ::"r"(a[0]),
                         "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(values), "n"(ADD));
        }
    }

    // part = weights . values of a tile; asynchronous.
    __device__ __forceinline__ void sum(const Left& weights, u32 values) {
        step<0>(weights.a, tile_across(values, 0));
#pragma unroll
        for (int k = 1; k < FLASH_TILE / 16; ++k)
            step<1>(weights.a + 4 * k, tile_across(values, k * 16 * 128));
        commit_products();
    }

    // Folds it into o, from the register I on; the FIRST tile of a split into zeros.
    template <bool FIRST, int I = 0>
    __device__ __forceinline__ void fold_into(
        float (&o)[HD / 2], const float (&keep)[2], const float (&take)[2]
    ) const {
        if constexpr (I < HD / 2) {
            float x;
            asm volatile("mov.f32 %0, part%1;" : "=f"(x) : "n"(I));
            o[I] = FIRST ? __fmaf_rn(x, take[I % 4 / 2], 0.0f)
                         : folded(o[I], x, keep[I % 4 / 2], take[I % 4 / 2]);
            fold_into<FIRST, I + 1>(o, keep, take);
        }
    }
};

// The state of 64 rows: (m, l, o) of the split at hand, and of all splits before in shared memory.
template <int HD>
struct State {
    Softmax soft;
    float o[HD / 2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int h = 0; h < 2; ++h) soft.m[h] = -INFINITY_F, soft.l[h] = 0.0f;
#pragma unroll
        for (int i = 0; i < HD / 2; ++i) o[i] = 0.0f;
    }

    // Folds the split into the total of those before it, if there are any: [HD / 8 of o, m and l][128].
    __device__ __forceinline__ void close_split(u32 total, bool first) {
        total += threadIdx.x % 128 * 16;
        const int SUMS = HD / 8 * 128 * 16;
        if (!first) {
            float m[2], l[2], keep[2], take[2];
            load_four(total + SUMS, m[0], l[0], m[1], l[1]);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                fold(m[h], l[h], soft.m[h], soft.l[h], keep[h], take[h]);
                soft.m[h] = m[h], soft.l[h] = l[h];
            }
#pragma unroll
            for (int t = 0; t < HD / 8; ++t) {
                float* own = o + 4 * t;
                float before[4];
                load_four(total + t * 128 * 16, before[0], before[1], before[2], before[3]);
#pragma unroll
                for (int e = 0; e < 4; ++e) own[e] = folded(before[e], own[e], keep[e / 2], take[e / 2]);
            }
        }
        store_four(total + SUMS, soft.m[0], soft.l[0], soft.m[1], soft.l[1]);
#pragma unroll
        for (int t = 0; t < HD / 8; ++t)
            store_four(total + t * 128 * 16, o[4 * t], o[4 * t + 1], o[4 * t + 2], o[4 * t + 3]);
    }

    // Writes the rows of an item.
    __device__ __forceinline__ void write(const PrefillArgs& a, const Item& item, u32 first_row) const {
        u32 lane = threadIdx.x % WARP, quad = lane % 4, group = a.heads / a.kv_heads;
        u32 packed = first_row + threadIdx.x % 128 / WARP * 16 + lane / 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 query = (packed + 8 * h) / group, head = item.kv_head * group + (packed + 8 * h) % group;
            if (query >= item.span.rows) continue;
            u64 place = (u64)(item.span.row + query) * a.heads + head;
            float inverse = __frcp_rn(soft.l[h]);
            float* out = a.out + place * HD + quad * 2;
#pragma unroll
            for (int t = 0; t < HD / 8; ++t) {
                const float* own = o + 4 * t + 2 * h;
                float2 pair = {__fmul_rn(own[0], inverse), __fmul_rn(own[1], inverse)};
                *reinterpret_cast<float2*>(out + t * 8) = pair;
            }
            if (a.lse && quad == 0) a.lse[place] = log_sum(soft.m[h], soft.l[h]);
        }
    }
};

// A place in the ring: its stage, and whether it has come around an odd number of times.
template <int STAGES>
struct Place {
    u32 stage, odd;
    __device__ __forceinline__ Place next() const {
        bool around = stage + 1 == STAGES;
        return {around ? 0 : stage + 1, odd ^ (u32)around};
    }
};

// A copy that is made here and not before: registers that MMAs in flight read must not be written.
__device__ __forceinline__ void move(Left& to, const Left& from) {
#pragma unroll
    for (int i = 0; i < FLASH_ROWS / 4; ++i)
        asm volatile("mov.b32 %0, %1;" : "=r"(to.a[i]) : "r"(from.a[i]) : "memory");
}

template <bool IS>
struct More {
    static const bool YES = IS;
};

template <int HD>
__device__ __forceinline__ void consume(
    const PrefillArgs& a, Barriers& barriers, const Item* items, u32 queries, u32 ring, u32 total
) {
    typedef Shape<HD> M;
    typedef Place<M::STAGES> Stage;
    // The same in all lanes, and the compiler can tell.
    u32 group = __shfl_sync(FULL, threadIdx.x / 128, 0);
    u32 count = a.blocks * a.kv_heads;
    bool speaks = threadIdx.x % WARP == 0;
    queries += group * M::TILE;
    total += group * (HD / 8 + 1) * 128 * 16;
    State<HD> state;
    Part<HD> part;
    part.declare();

    auto keys_of = [&](Stage n) { return __shfl_sync(FULL, ring + n.stage * 2 * M::TILE, 0); };
    auto values_of = [&](Stage n) { return keys_of(n) + M::TILE; };
    auto await_keys = [&](Stage n) { barrier_wait(smem_address(&barriers.keys[n.stage]), n.odd); };
    auto await_values = [&](Stage n) { barrier_wait(smem_address(&barriers.values[n.stage]), n.odd); };
    auto free_keys = [&](Stage n) {
        if (speaks) arrive(barriers.free_keys[n.stage]);
    };
    auto free_values = [&](Stage n) {
        if (speaks) arrive(barriers.free_values[n.stage]);
    };
    Stage at = {0, 0};  // of the tile at hand
    await_keys(at);
    part.fetch(a, items[0], items[0].first_row + group * FLASH_ROWS);
    for (u32 turn = 0;; ++turn) {
        part.settle(queries);
        publish_stores();
        group_sync(group);

        const Item& item = items[turn % ITEMS];
        u32 first_row = item.first_row + group * FLASH_ROWS;
        u32 tiles, own_tiles, before, tile, whole_first, whole_end;
        {
            Seen block(a, item, item.first_row, PREFILL_ROWS), own(a, item, first_row, FLASH_ROWS);
            tiles = block.end - block.first, own_tiles = own.end - own.first;
            before = min(own.first - block.first, tiles), tile = own.first;
            // Tiles that all rows see.
            whole_end = own.shortest / FLASH_TILE;
            whole_first = (own.length - min(own.length, a.window) + FLASH_TILE - 1) / FLASH_TILE;
        }
        // Tiles that only other rows of the block see.
        auto pass = [&](u32 more) {
            for (; more > 0; --more, at = at.next()) {
                await_keys(at);
                free_keys(at);
                await_values(at);
                free_values(at);
            }
        };
        pass(before);
        state.clear();
        if (own_tiles > 0) {
            u32 left = own_tiles - 1;  // after the one at hand
            u32 first_split = 1;       // no split has been folded
            u32 fresh = 1;             // no tile of the split has been folded
            Softmax soft;
            float s[FLASH_TILE / 2], keep[2], take[2];
            // Weights of the tile from its scores.
            auto weigh = [&](Left& p) {
                float(&rows)[FLASH_TILE / 8][4] = reinterpret_cast<float(&)[FLASH_TILE / 8][4]>(s);
#pragma unroll
                for (int i = 0; i < FLASH_TILE / 2; ++i) s[i] = __fmul_rn(s[i], a.scale);
                if (tile < whole_first || tile >= whole_end) {
                    u32 limit[2];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        u32 row = threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4 + 8 * h;
                        u32 query = (items[turn % ITEMS].first_row + row) / (a.heads / a.kv_heads);
                        limit[h] = items[turn % ITEMS].span.position + query + 1;
                    }
                    hide_scores(rows, limit, a.window, tile * FLASH_TILE);
                }
                largest_scores(rows, soft);
                tile_weights(rows, soft);
                p.take(s);
            };
            auto ask_scores = [&](Stage n) {
                await_keys(n);
                begin_products();
                tile_scores_of<HD>(s, queries, keys_of(n));
            };
            auto have_scores = [&](Stage n) {
                wait_for_products<0>();
                pin(s);
                free_keys(n);
            };
            // The factors of the tile at hand.
            auto factors = [&]() {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    fold(state.soft.m[h], state.soft.l[h], soft.m[h], soft.l[h], keep[h], take[h]);
            };
            auto fold_part = [&]() {
                if (fresh) {
                    part.template fold_into<true>(state.o, keep, take);
                } else {
                    part.template fold_into<false>(state.o, keep, take);
                }
                fresh = 0;
            };
            // From a tile, whose weights are there, to the next one, whose scores are.
            auto step = [&](const Left& p, Left& next_p, auto more) {
                Stage next = at.next(), after = next.next();
                await_values(at);
                begin_products();
                part.sum(p, values_of(at));
                ++tile, --left;
                weigh(next_p);
                if constexpr (decltype(more)::YES) {
                    ask_scores(after);
                    wait_for_products<1>();
                } else {
                    wait_for_products<0>();
                }
                free_values(at);
                fold_part();
                if (tile % SPLIT_TILES == 0) {
                    state.close_split(total, first_split);
                    state.clear();
                    first_split = 0, fresh = 1;
                }
                factors();
                if constexpr (decltype(more)::YES) have_scores(after);
                at = next;
            };
            ask_scores(at);
            have_scores(at);
            Left even, odd;
            weigh(even);
            factors();
            if (left > 0) {
                ask_scores(at.next());
                have_scores(at.next());
            }
            while (left > 1) {
                step(even, odd, More<true>());
                if (left == 1) {
                    move(even, odd);
                    break;
                }
                step(odd, even, More<true>());
            }
            if (left > 0) {
                step(even, odd, More<false>());
                move(even, odd);
            }
            await_values(at);
            // Rows past the end may be anything; their weights are zero.
            u32 rows = Seen(a, items[turn % ITEMS], items[turn % ITEMS].first_row, PREFILL_ROWS).length -
                       tile * FLASH_TILE;
            if (rows < FLASH_TILE) {
                u32 values = values_of(at);
                for (u32 i = rows * 8 + threadIdx.x % 128; i < FLASH_TILE * 8; i += 128) {
#pragma unroll
                    for (int half = 0; half < HD / 64; ++half)
                        store_four(values + half * HALF + i * 16, 0.0f, 0.0f, 0.0f, 0.0f);
                }
                publish_stores();
                group_sync(group);
            }
            begin_products();
            part.sum(even, values_of(at));
            wait_for_products<0>();
            free_values(at);
            fold_part();
            if (!first_split) state.close_split(total, false);
            at = at.next();
        }
        pass(tiles - before - own_tiles);

        // The next queries come while these rows are written.
        bool more = item_number(turn + 1) < count;
        if (more) {
            await_keys(at);
            const Item& next = items[(turn + 1) % ITEMS];
            part.fetch(a, next, next.first_row + group * FLASH_ROWS);
        }
        state.write(a, items[turn % ITEMS], items[turn % ITEMS].first_row + group * FLASH_ROWS);
        if (!more) break;
        group_sync(group);
    }
}

template <int HD>
__device__ __forceinline__ void prefill(
    const TensorMap& keys, const TensorMap& values, const PrefillArgs& a
) {
    typedef Shape<HD> M;
    extern __shared__ u8 dynamic[];
    __shared__ Barriers barriers;
    __shared__ Item items[ITEMS];
    u32 queries = (smem_address(dynamic) + 1023) & ~1023u, ring = queries + M::QUERIES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < M::STAGES; ++s) {
            barrier_init(smem_address(&barriers.keys[s]), 1);
            barrier_init(smem_address(&barriers.values[s]), 1);
            barrier_init(smem_address(&barriers.free_keys[s]), CONSUMERS / WARP);
            barrier_init(smem_address(&barriers.free_values[s]), CONSUMERS / WARP);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    wait_for_previous();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x < CONSUMERS + WARP) produce<HD>(&keys, &values, a, barriers, items, ring);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume<HD>(a, barriers, items, queries, ring, ring + M::RING);
    }
}

#define KERNEL(hd)                                                                                    \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) flash_prefill_hopper_##hd(       \
        const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,             \
        const float* qkv, const Span* spans, const u32* pages, const u32* work, float* out,           \
        float* lse, int stride, int heads, int kv_heads, int page_shift, int blocks, float scale,     \
        u32 window                                                                                    \
    ) {                                                                                               \
        PrefillArgs args = {qkv,   spans,    pages,      work,   out,   lse,   stride,                \
                            heads, kv_heads, page_shift, blocks, scale, window};                      \
        prefill<hd>(keys, values, args);                                                              \
    }
KERNEL(64)
KERNEL(128)
#endif
