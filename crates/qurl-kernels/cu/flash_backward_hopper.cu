// Backward pass of causal grouped-query attention with the instructions of Hopper: see flash_backward.cu for
// what is computed.
//
// Again one kernel owns keys and another owns queries, and nothing is added by two blocks at once. A block is
// a producer, which brings the tiles of 64 rows that pass by, and warpgroups that own 64 rows each: while one
// takes exponentials, the tensor cores have the MMAs of another. Tiles lie in halves of 64 columns, 128 bytes
// a row, swizzled; so the same tile is an operand by its rows (scores) and by its columns (gradients).
// Weights and their gradients go from one MMA to the next in registers.
//
// A block that owns keys takes `share` of the query heads that read them; where that is not all, its sums are
// parts, which flash_backward_join adds up in order.
//
// The last tile of a sequence holds rows of the next one, times zero: numbers that are not finite can go over
// from there, as they do to every weight's gradient anyway.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "flash_hopper.cuh"

static_assert(BACKWARD_TILE == FLASH_ROWS, "rows of a tile");

struct HopperArgs {
    const Span* spans;
    const u32*
        work;  // pairs of span and first row, in steps of the rows that a block owns, the longest work first
    const float4* facts;  // [rows, heads]: of flash_backward_prepare
    float* dkeys;         // [rows, stride]: HD columns for every `share` of heads
    float* dvalues;
    float* dqueries;
    u64 stride;
    int heads, kv_heads, share;
    u32 window;
    float scale;

    // Blocks that have the same rows come one after the other: they read the same keys and values. This is
    // the number of the block's heads among theirs, and that of its rows.
    __device__ u32 part() const { return blockIdx.x % (heads / share); }
    __device__ u32 item() const { return blockIdx.x / (heads / share); }
};

const int CONSUMERS = BACKWARD_GROUPS * 128;

template <int HD>
struct Shape {
    static const int TILE = BACKWARD_TILE * HD * 2;
    static const int OWN = 2 * BACKWARD_GROUPS * TILE;  // two matrices
    static const int STAGES = HD == 64 ? 4 : 3;
};

// Writes a warpgroup's rows, times a factor.
template <int HD>
__device__ __forceinline__ void write_rows(
    const float (&sum)[HD / 2], float* to, u64 stride, u32 row, u32 end, float factor
) {
    u32 lane = threadIdx.x % WARP, first = row + threadIdx.x % 128 / WARP * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (first + 8 * h >= end) continue;
        float* out = to + (first + 8 * h) * stride + lane % 4 * 2;
#pragma unroll
        for (int t = 0; t < HD / 8; ++t) {
            float2 pair = {__fmul_rn(sum[4 * t + 2 * h], factor), __fmul_rn(sum[4 * t + 2 * h + 1], factor)};
            *reinterpret_cast<float2*>(out + t * 8) = pair;
        }
    }
}

// What the blocks of both kernels share: barriers of the stages and of what the block owns.
struct Barriers {
    u64 full[4], empty[4], own;
};

template <int STAGES>
__device__ __forceinline__ void set_up(Barriers& b) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(smem_address(&b.full[s]), 1);
            barrier_init(smem_address(&b.empty[s]), CONSUMERS / WARP);
        }
        barrier_init(smem_address(&b.own), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}

// ---- gradients of keys and values -------------------------------------------------------------------------

template <int HD>
__device__ __forceinline__ void backward_keys(
    const TensorMap& qkv, const TensorMap& dout, const TensorMap& facts_map, const HopperArgs& a
) {
    typedef Shape<HD> M;
    extern __shared__ u8 dynamic[];
    __shared__ Barriers barriers;
    __shared__ __align__(128) float4 facts[M::STAGES][BACKWARD_TILE];
    u32 own = (smem_address(dynamic) + 1023) & ~1023u, stages = own + M::OWN;
    set_up<M::STAGES>(barriers);
    u32 group = a.heads / a.kv_heads, head = a.part() * a.share, kv_head = head / group;
    Span span = a.spans[a.work[2 * a.item()]];
    u32 first = a.work[2 * a.item() + 1];
    // Steps: the block's query heads, and for each the queries from the first key on, as far as they see the
    // last one.
    u32 queries_seeing = min(span.rows - first, a.window + BACKWARD_GROUPS * BACKWARD_TILE - 1);
    u32 blocks = (queries_seeing + BACKWARD_TILE - 1) / BACKWARD_TILE;

    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == CONSUMERS) {
            u32 barrier = smem_address(&barriers.own);
            barrier_expect(barrier, M::OWN);
            for (u32 g = 0; g < BACKWARD_GROUPS; ++g) {
                u32 row = span.row + first + g * BACKWARD_TILE;
                bring<HD>(own + 2 * g * M::TILE, &qkv, (a.heads + kv_head) * HD, row, barrier);
                bring<HD>(
                    own + (2 * g + 1) * M::TILE, &qkv, (a.heads + a.kv_heads + kv_head) * HD, row, barrier
                );
            }
            u32 done = 0;
            for (u32 h = head; h < head + a.share; ++h) {
                for (u32 block = 0; block < blocks; ++block, ++done) {
                    u32 stage = done % M::STAGES, to = stages + stage * 2 * M::TILE,
                        row = span.row + first + block * BACKWARD_TILE;
                    if (done >= M::STAGES)
                        barrier_wait(smem_address(&barriers.empty[stage]), (done / M::STAGES & 1) ^ 1);
                    barrier = smem_address(&barriers.full[stage]);
                    barrier_expect(barrier, 2 * M::TILE + sizeof(facts[0]));
                    bring<HD>(to, &qkv, h * HD, row, barrier);
                    bring<HD>(to + M::TILE, &dout, h * HD, row, barrier);
                    copy_tokens<1>(smem_address(facts[stage]), &facts_map, h * sizeof(float4), row, barrier);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        u32 warpgroup = threadIdx.x / 128, lane = threadIdx.x % WARP, quad = lane % 4;
        u32 first_key = first + warpgroup * BACKWARD_TILE,
            key = first_key + threadIdx.x % 128 / WARP * 16 + lane / 4;
        u32 keys = own + 2 * warpgroup * M::TILE, values = keys + M::TILE;
        float dk[HD / 2], dv[HD / 2];
#pragma unroll
        for (int i = 0; i < HD / 2; ++i) dk[i] = dv[i] = 0.0f;
        float log_scale = __fmul_rn(a.scale, LOG2E);
        barrier_wait(smem_address(&barriers.own), 0);
        u32 done = 0;
        for (u32 h = 0; h < a.share; ++h) {
            for (u32 block = 0; block < blocks; ++block, ++done) {
                u32 stage = done % M::STAGES, queries = stages + stage * 2 * M::TILE,
                    douts = queries + M::TILE;
                u32 query = first + block * BACKWARD_TILE;
                barrier_wait(smem_address(&barriers.full[stage]), done / M::STAGES & 1);
                // Queries before all keys of the warpgroup see none, nor do those that come too long after.
                u32 apart = query - first_key;
                if (apart < a.window + BACKWARD_TILE - 1) {
                    float p[BACKWARD_TILE / 2], dp[BACKWARD_TILE / 2];
                    begin_products();
                    scores<HD>(p, keys, queries);
                    scores<HD>(dp, values, douts);
                    wait_for_products<1>();
                    pin(p);
                    const float4* known = facts[stage] + quad * 2;
#pragma unroll
                    for (int j = 0; j < BACKWARD_TILE / 8; ++j) {
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            p[4 * j + e] =
                                exp2_fast(__fmaf_rn(p[4 * j + e], log_scale, -known[j * 8 + e % 2].x));
                    }
                    bool edge = apart + BACKWARD_TILE > a.window;
                    if (edge || query == first_key || query + BACKWARD_TILE > span.rows) {
#pragma unroll
                        for (int i = 0; i < BACKWARD_TILE / 2; ++i) {
                            u32 q = query + i / 4 * 8 + quad * 2 + i % 2;
                            p[i] = q - (key + i % 4 / 2 * 8) < a.window && q < span.rows ? p[i] : 0.0f;
                        }
                    }
                    Left weights, gradients;
                    weights.take(p);
                    begin_products();
                    accumulate<HD>(dv, weights, douts);
                    wait_for_products<1>();
                    pin(dp);
#pragma unroll
                    for (int j = 0; j < BACKWARD_TILE / 8; ++j) {
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            dp[4 * j + e] =
                                __fmul_rn(p[4 * j + e], __fsub_rn(dp[4 * j + e], known[j * 8 + e % 2].y));
                    }
                    gradients.take(dp);
                    begin_products();
                    accumulate<HD>(dk, gradients, queries);
                    wait_for_products<0>();
                    pin(dv);
                    pin(dk);
                }
                if (lane == 0) barrier_arrive(smem_address(&barriers.empty[stage]), 0);
            }
        }
        u64 to = span.row * a.stride + a.part() * HD;
        write_rows<HD>(dk, a.dkeys + to, a.stride, first_key, span.rows, a.scale);
        write_rows<HD>(dv, a.dvalues + to, a.stride, first_key, span.rows, 1.0f);
    }
}

// ---- gradients of queries ---------------------------------------------------------------------------------

template <int HD>
__device__ __forceinline__ void backward_queries(
    const TensorMap& qkv, const TensorMap& dout, const HopperArgs& a
) {
    typedef Shape<HD> M;
    extern __shared__ u8 dynamic[];
    __shared__ Barriers barriers;
    u32 own = (smem_address(dynamic) + 1023) & ~1023u, stages = own + M::OWN;
    set_up<M::STAGES>(barriers);
    u32 head = a.part(), kv_head = head / (a.heads / a.kv_heads);
    Span span = a.spans[a.work[2 * a.item()]];
    u32 first = a.work[2 * a.item() + 1];
    // Tiles of keys from the first that the first query sees.
    u32 first_tile = (first + 1 - min(first + 1, a.window)) / BACKWARD_TILE;
    u32 end = (min(first + BACKWARD_GROUPS * BACKWARD_TILE, span.rows) + BACKWARD_TILE - 1) / BACKWARD_TILE;
    u32 steps = end - first_tile;

    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == CONSUMERS) {
            u32 barrier = smem_address(&barriers.own);
            barrier_expect(barrier, M::OWN);
            for (u32 g = 0; g < BACKWARD_GROUPS; ++g) {
                u32 row = span.row + first + g * BACKWARD_TILE;
                bring<HD>(own + 2 * g * M::TILE, &qkv, head * HD, row, barrier);
                bring<HD>(own + (2 * g + 1) * M::TILE, &dout, head * HD, row, barrier);
            }
            for (u32 step = 0; step < steps; ++step) {
                u32 stage = step % M::STAGES, to = stages + stage * 2 * M::TILE,
                    row = span.row + (first_tile + step) * BACKWARD_TILE;
                if (step >= M::STAGES)
                    barrier_wait(smem_address(&barriers.empty[stage]), (step / M::STAGES & 1) ^ 1);
                barrier = smem_address(&barriers.full[stage]);
                barrier_expect(barrier, 2 * M::TILE);
                bring<HD>(to, &qkv, (a.heads + kv_head) * HD, row, barrier);
                bring<HD>(to + M::TILE, &qkv, (a.heads + a.kv_heads + kv_head) * HD, row, barrier);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        u32 warpgroup = threadIdx.x / 128, lane = threadIdx.x % WARP, quad = lane % 4;
        u32 first_query = first + warpgroup * BACKWARD_TILE,
            query = first_query + threadIdx.x % 128 / WARP * 16 + lane / 4;
        u32 queries = own + 2 * warpgroup * M::TILE, douts = queries + M::TILE;
        float log[2], delta[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float4 known = a.facts[(u64)(span.row + min(query + 8 * h, span.rows - 1)) * a.heads + head];
            log[h] = known.x;
            delta[h] = known.y;
        }
        float dq[HD / 2];
#pragma unroll
        for (int i = 0; i < HD / 2; ++i) dq[i] = 0.0f;
        float log_scale = __fmul_rn(a.scale, LOG2E);
        barrier_wait(smem_address(&barriers.own), 0);
        for (u32 step = 0; step < steps; ++step) {
            u32 stage = step % M::STAGES, keys = stages + stage * 2 * M::TILE, values = keys + M::TILE;
            u32 key = (first_tile + step) * BACKWARD_TILE, apart = first_query - key;
            barrier_wait(smem_address(&barriers.full[stage]), step / M::STAGES & 1);
            // Keys that come after all queries of the warpgroup, or that none of them sees any more, add
            // nothing.
            if (apart < a.window + BACKWARD_TILE - 1) {
                float p[BACKWARD_TILE / 2], dp[BACKWARD_TILE / 2];
                begin_products();
                scores<HD>(p, queries, keys);
                scores<HD>(dp, douts, values);
                wait_for_products<1>();
                pin(p);
#pragma unroll
                for (int i = 0; i < BACKWARD_TILE / 2; ++i)
                    p[i] = exp2_fast(__fmaf_rn(p[i], log_scale, -log[i % 4 / 2]));
                if (key == first_query || apart + BACKWARD_TILE > a.window) {
#pragma unroll
                    for (int i = 0; i < BACKWARD_TILE / 2; ++i) {
                        u32 k = key + i / 4 * 8 + quad * 2 + i % 2;
                        p[i] = query + i % 4 / 2 * 8 - k < a.window ? p[i] : 0.0f;
                    }
                }
                wait_for_products<0>();
                pin(dp);
#pragma unroll
                for (int i = 0; i < BACKWARD_TILE / 2; ++i)
                    dp[i] = __fmul_rn(p[i], __fsub_rn(dp[i], delta[i % 4 / 2]));
                Left gradients;
                gradients.take(dp);
                begin_products();
                accumulate<HD>(dq, gradients, keys);
                wait_for_products<0>();
                pin(dq);
            }
            if (lane == 0) barrier_arrive(smem_address(&barriers.empty[stage]), 0);
        }
        write_rows<HD>(
            dq, a.dqueries + span.row * a.stride + head * HD, a.stride, first_query, span.rows, a.scale
        );
    }
}

#define KERNELS(hd)                                                                                         \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) flash_backward_hopper_keys_##hd(       \
        const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap dout,                      \
        const __grid_constant__ TensorMap facts_map, const Span* spans, const u32* work, float* dkeys,      \
        float* dvalues, u64 stride, int heads, int kv_heads, int share, u32 window, float scale             \
    ) {                                                                                                     \
        HopperArgs args = {spans,  work,  nullptr,  dkeys, dvalues, nullptr,                                \
                           stride, heads, kv_heads, share, window,  scale};                                 \
        backward_keys<hd>(qkv, dout, facts_map, args);                                                      \
    }                                                                                                       \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) flash_backward_hopper_queries_##hd(    \
        const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap dout, const float4* facts, \
        const Span* spans, const u32* work, float* dqueries, u64 stride, int heads, int kv_heads,           \
        u32 window, float scale                                                                             \
    ) {                                                                                                     \
        HopperArgs args = {                                                                                 \
            spans, work, facts, nullptr, nullptr, dqueries, stride, heads, kv_heads, 1, window, scale       \
        };                                                                                                  \
        backward_queries<hd>(qkv, dout, args);                                                              \
    }
KERNELS(64)
KERNELS(128)

// dqkv's keys and values: the sums of `parts` neighbours of HD columns each, in order. A block per row.
extern "C" __global__ void __launch_bounds__(128) flash_backward_join(
    const float* dkeys, const float* dvalues, float* to, u64 stride, int parts, int kv_heads, int head_dim
) {
    u64 row = blockIdx.x;
    u32 width = kv_heads * head_dim;
    for (u32 i = threadIdx.x * 4; i < 2 * width; i += 128 * 4) {
        u32 column = i < width ? i : i - width;
        const float* from = (i < width ? dkeys : dvalues) + row * width * parts +
                            (column / head_dim * parts * head_dim + column % head_dim);
        float4 sum = *reinterpret_cast<const float4*>(from);
        for (int part = 1; part < parts; ++part) {
            float4 more = *reinterpret_cast<const float4*>(from + part * head_dim);
            sum = make_float4(
                __fadd_rn(sum.x, more.x), __fadd_rn(sum.y, more.y), __fadd_rn(sum.z, more.z),
                __fadd_rn(sum.w, more.w)
            );
        }
        *reinterpret_cast<float4*>(to + row * stride + i) = sum;
    }
}
#endif
