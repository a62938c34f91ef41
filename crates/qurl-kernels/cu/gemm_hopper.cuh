// GEMMs with packed weights on Hopper: out[token, n] = x[token, k] . w[n, k], for one token or thousands.
//
// Decoding reads every weight once for a handful of tokens, so the kernel is built around the weight stream.
// Weights lie packed in tiles of 64 rows x 128 bytes of k, already swizzled as the tensor cores want them, so
// a tile is one 8 KB bulk copy. They are the left operand (64 rows of a wgmma), the tokens the right one
// (16..256 columns): the result is computed transposed and no work is padded but to the next token tile. A
// block is two producers, a thread for weights and one for tokens, which keep STAGES tiles in flight, and WG
// consumer warpgroups of 64 rows each. CL blocks of a cluster work on neighbouring rows and share the
// activations by multicast, each loading a part.
//
// Schedules:
//   STREAM  the matrix is cut into equal ranges of k-blocks of 256 rows, whatever the tiles. A range is two
//           blocks of threads, one for each half of the rows. Ranges that share a tile publish their partial
//           sums in memory, and each adds up some tokens, in order of k (split-K reduction). The cut depends
//           on (n, k) and the number of ranges, never on the tokens: neither do the bits.
//   TILES   whole tiles, for many tokens.
//   SPLIT   whole tiles, each by the blocks of a cluster, which have a part of k each and then some of the
//           tokens: for few rows of many numbers. In floating point only where the parts are the ranges of
//           STREAM, for the same bits.
//   VIRTUAL whole tiles, but summed with the cuts of STREAM, for the same bits in floating point with many
//           tokens.
//   BULK    the same in bf16 with results stored in the background (gemm_bulk.cuh).
//
// Weights in four bits come as codes and are decoded in registers: see gemm_bits4.cuh.
//
// Weights do not depend on earlier kernels: launched with programmatic serialization, a block fills its
// stages with them while the kernel before it still runs, a stream not faster than PACE.
#pragma once
#include "gemm_bits4.cuh"
#include "gemm_bulk.cuh"
#include "gemm_split_k.cuh"
#include "hopper.cuh"

enum Schedule { STREAM, TILES, VIRTUAL, SPLIT, BULK };

// Streams for few tokens take less than half of the registers: norms and roundings of rows then run beside
// them. They are there when the GEMM before them ends, and the weights of the next one come meanwhile.
#define IS_LIGHT(tok, schedule) ((schedule) == STREAM && (tok) <= 64)
// Registers of a thread when the block begins. (What is decoded takes some more.)
#define REGISTERS_OF(format, tok, schedule) \
    (!IS_LIGHT(tok, schedule) ? 168 : IS_BITS4(format) && (tok) == 64 ? 128 : 80)

// Nanoseconds from one early stage of a stream to the next. All at once would fill the queues of the memory,
// and the kernel before, short as it may be, is a chain of round trips through them.
const u32 PACE = 450;

// Whole tiles are taken by so many rows of tiles at a time: what runs at once then needs few weights and few
// tokens, and finds them in the L2.
#ifndef GROUP
#define GROUP 8u
#endif

// ---- MMAs -------------------------------------------------------------------------------------------------

// d += 64 rows of weights . TOK tokens over 128 bytes of k; asynchronous.
template <int FORMAT, int TOK>
__device__ __forceinline__ void multiply(
    typename Sum<FORMAT>::type (&d)[TOK / 2], u64 wa, u64 xb, int go_on
) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        // 32 bytes further along k.
        u64 w = wa + step * 2, x = xb + step * 2;
        if constexpr (FORMAT == BF16) wgmma_bf16<TOK>(d, w, x, go_on | step);
        if constexpr (FORMAT == INT8) wgmma_int8<TOK>(d, w, x, go_on | step);
        if constexpr (FORMAT == FP8) wgmma_fp8<TOK>(d, w, x, go_on | step);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Nothing that uses sums may be moved before this.
__device__ __forceinline__ void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ __forceinline__ void pin(int& x) { asm volatile("" : "+r"(x)::"memory"); }

template <int LEFT>
__device__ __forceinline__ void finish_mmas() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// ---- the kernel -------------------------------------------------------------------------------------------

// Stages of a block in shared memory: tiles of weights, then boxes of 128 bytes of all tokens.
template <int FORMAT, int TOK, int WG, int SCHEDULE>
struct Shape {
    static constexpr int TILE = IS_BITS4(FORMAT) ? Bits4<FORMAT>::TILE : TILE_BYTES,
                     BOXES = IS_BITS4(FORMAT) ? 2 : 1, BOX_BYTES = TOK * 128;
    // Boxes begin at multiples of what they are swizzled by.
    static const int TILES_BYTES = (WG * TILE + 1023) / 1024 * 1024;
    static const int STAGE_BYTES = TILES_BYTES + BOXES * BOX_BYTES;
    // What arrives in a stage.
    static const int ARRIVING = WG * TILE + BOXES * BOX_BYTES;
    static const int FITTING = (SCHEDULE == BULK ? BULK_STAGE_KIB : STAGE_KIB) * 1024 / STAGE_BYTES;
    static const int STAGES = FITTING > MAX_STAGES ? MAX_STAGES : FITTING;
};

// The blocks of a cluster have the sums of a tile over parts of k. Each gets some stretches of tokens from
// all, itself included, where its stages were, adds them up in order of k and has the results.
template <int FORMAT, int TOK, int CL, int WARPS>
__device__ __forceinline__ void join(
    const GemmArgs& a, const Finish<FORMAT, TOK>& finish, const typename Sum<FORMAT>::type (&d)[TOK / 2],
    u32 rank, u32 area, float* buffer
) {
    typedef typename Sum<FORMAT>::type S;
    const int STEP = STRETCH, STRETCHES = TOK / STEP, MAX_OWN = (STRETCHES + CL - 1) / CL, QUADS = STEP / 8;
    auto first_of = [](u32 block) { return STRETCHES * block / CL; };
    // Where the sums of part `from` wait in the block that adds up the stretch, its `nth`.
    auto place = [&](u32 from, u32 nth) {
        return area +
               (((from * MAX_OWN + nth) * WARPS + threadIdx.x / WARP) * QUADS * WARP + threadIdx.x % WARP) *
                   16;
    };
    // Nobody needs stages any more.
    cluster_sync();
#pragma unroll
    for (u32 stretch = 0; stretch < STRETCHES; ++stretch) {
        const u32 to = ((stretch + 1) * CL - 1) / STRETCHES;
        u32 there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;"
            : "=r"(there)
            : "r"(place(rank, stretch - first_of(to))), "r"(to));
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            const S* s = d + stretch * (STEP / 2) + 4 * q;
            send(there + q * WARP * 16, s[0], s[1], s[2], s[3]);
        }
    }
    cluster_sync();
#pragma unroll 1
    for (u32 stretch = first_of(rank); stretch < first_of(rank + 1); ++stretch) {
        S total[STEP / 2];
#pragma unroll
        for (u32 part = 0; part < CL; ++part) {
            u32 from = place(part, stretch - first_of(rank));
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                S more[4];
                receive(from + q * WARP * 16, more);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    total[4 * q + e] = part == 0 ? more[e] : total[4 * q + e] + more[e];
            }
        }
        __syncwarp();
#pragma unroll
        for (int t = 0; t < STEP; t += 8)
            transpose(buffer, t, total[t / 2], total[t / 2 + 1], total[t / 2 + 2], total[t / 2 + 3]);
        __syncwarp();
        finish.template flush<STEP>(a, buffer, stretch * STEP);
    }
}

template <int FORMAT, int TOK, int WG, int CL, int SCHEDULE>
__device__ __forceinline__ void gemm(
    const TensorMap& map, const TensorMap* out_map, const TensorMap* kept_map, const GemmArgs& a
) {
    typedef typename Sum<FORMAT>::type S;
    const bool STREAMS = SCHEDULE == STREAM, SPLITS = SCHEDULE == SPLIT, BULKS = SCHEDULE == BULK;
    static_assert(!BULKS || (FORMAT == BF16 && WG == 2 && TOK % CHUNK == 0), "what bulk stores are made for");
    typedef Shape<FORMAT, TOK, WG, SCHEDULE> Memory;
    const int STAGES = Memory::STAGES;
    const int STAGE_BYTES = Memory::STAGE_BYTES, TILE = Memory::TILE, BOXES = Memory::BOXES;
    const int WARPS = WG * 4;
    // Blocks with the same tokens.
    const int ALIKE = SPLITS ? 1 : CL;
    // Of a thread when the block begins; producers then give some of theirs to the consumers.
    const int REGISTERS = REGISTERS_OF(FORMAT, TOK, SCHEDULE);
    const int PRODUCER_REGISTERS =
        REGISTERS < 168 || FORMAT == FP8 || BULKS || (STREAMS && TOK == 256) ? 40
        : STREAMS || SPLITS || TOK == 192 || IS_BITS4(FORMAT)                ? 56
                                                                             : 88;
    static_assert(!STREAMS || (WG == 2 && CL <= SIDES), "a stream's tiles have 256 rows");

    extern __shared__ u8 dynamic[];
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ float4 buffers[BULKS ? 1 : WARPS * WarpBuffer<TOK>::FLOATS / 4];
    u32 area = (smem_address(dynamic) + 1023) & ~1023u, stages = area + (BULKS ? BULK_KIB * 1024 : 0);
    u32 warp = threadIdx.x / WARP;
    u32 rank = CL > 1 ? blockIdx.x % CL : 0;
    u32 range = blockIdx.x / (STREAMS ? SIDES : CL), clusters = gridDim.x / CL;
    u32 tiles = (a.n + TILE_ROWS * WG * ALIKE - 1) / (TILE_ROWS * WG * ALIKE);
    u32 token_tiles = (a.tokens + TOK - 1) / TOK;
    u32 kb = a.k_blocks, strips = (a.n + TILE_ROWS - 1) / TILE_ROWS;
    Cut cut = {((u32)a.n + CUT_ROWS - 1) / CUT_ROWS * kb, (u32)a.ranges, kb};

    // Whether the input is there.
    __shared__ u32 input_is_there;
    volatile u32* input = &input_is_there;
    if (threadIdx.x == 0) *input = 0;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(smem_address(&full[s]), 1);
            barrier_init(smem_address(&empty[s]), WARPS * ALIKE);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (CL > 1) {
        cluster_sync();
    } else {
        __syncthreads();
    }
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    // Work is a list of (tile, token tile, first and last k-block); producer and consumers walk it alike.
    struct Walk {
        u32 at, end, tile, token_tile, k0, k1;
    };
    auto start = [&]() {
        Walk w = {range, tiles * token_tiles, 0, 0, 0, kb};
        if (STREAMS) {
            w.at = cut.begin(range);
            w.end = cut.begin(range + 1);
        }
        if (SPLITS) {
            w.k0 = kb * rank / CL;
            w.k1 = kb * (rank + 1) / CL;
        }
        return w;
    };
    // The 64 rows of a warpgroup: with gating the second takes the up rows.
    auto strip_of = [&](u32 tile, u32 group) {
        u32 at = STREAMS ? tile * SIDES + blockIdx.x % SIDES : SPLITS ? tile : tile * CL + rank;
        return WG > 1 && a.gating != GATING_NONE ? at + group * (strips / 2) : at * WG + group;
    };
    // Tile and token tile of a number of the list.
    auto locate = [&](Walk& w, u32 number) {
        u32 first = number / (GROUP * token_tiles) * GROUP, nth = number % (GROUP * token_tiles),
            rows = min(GROUP, tiles - first);
        w.tile = first + nth % rows;
        w.token_tile = nth / rows;
    };
    auto next = [&](Walk& w) {
        if (w.at >= w.end) return false;
        if (STREAMS) {
            w.tile = w.at / kb;
            w.k0 = w.at % kb;
            w.k1 = min(kb, w.k0 + (w.end - w.at));
            w.at += w.k1 - w.k0;
        } else {
            locate(w, w.at);
            w.at += clusters;
        }
        return true;
    };

    if (warp >= WARPS) {
        if (WG > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        // One thread loads weights, early, and one for tokens when the kernel before has written them. Both
        // wait until the consumers are through with a stage.
        auto each_stage = [&](auto use) {
            Walk w = start();
            for (u32 done = 0; next(w);) {
                for (u32 k = w.k0; k < w.k1; ++k, ++done) {
                    u32 stage = done % STAGES;
                    if (done >= STAGES) barrier_wait(smem_address(&empty[stage]), (done / STAGES & 1) ^ 1);
                    use(stage, w, k, done);
                }
            }
        };
        if (threadIdx.x == WARPS * WARP) {
            u64 policy;
            if (SCHEDULE == STREAM) {
                asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
            } else {
                asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
            }
            each_stage([&](u32 stage, const Walk& w, u32 k, u32 done) {
                u32 barrier = smem_address(&full[stage]);
                barrier_expect(barrier, Memory::ARRIVING);
#pragma unroll
                for (int g = 0; g < WG; ++g) {
                    // Past the last rows the last ones are read again; nothing of them is stored.
                    u32 strip = min(strip_of(w.tile, g), strips - 1);
                    const u8* from = a.weights + ((u64)strip * kb + k) * TILE;
                    copy_weights(stages + stage * STAGE_BYTES + g * TILE, from, TILE, barrier, policy);
                }
                if (STREAMS && done > 0 && done < STAGES && !*input) __nanosleep(PACE);
            });
        }
        if (threadIdx.x == (WARPS + 1) * WARP) {
            asm volatile("griddepcontrol.wait;" ::: "memory");
            *input = 1;
            u32 first = SPLITS ? 0 : rank * (TOK / CL);
            each_stage([&](u32 stage, const Walk& w, u32 k, u32 done) {
                u32 to = stages + stage * STAGE_BYTES + Memory::TILES_BYTES + first * 128;
#pragma unroll
                for (int box = 0; box < BOXES; ++box)
                    copy_tokens<ALIKE>(
                        to + box * Memory::BOX_BYTES, &map, (k * BOXES + box) * 128,
                        w.token_tile * TOK + first, smem_address(&full[stage])
                    );
            });
        }
    } else {
        if (WG > 1)
            asm volatile(
                "setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((3 * REGISTERS - PRODUCER_REGISTERS) / 2 / 8 * 8)
            );
        asm volatile("griddepcontrol.wait;" ::: "memory");
        u32 group = warp / 4, lane = threadIdx.x % WARP;
        u32 done = 0;
        // Lane b signals block b of the cluster that this warp is through with a stage.
        auto release = [&](u32 stage) {
            if (lane < ALIKE) barrier_arrive(smem_address(&empty[stage]), SPLITS ? rank : lane);
        };
        float* buffer = reinterpret_cast<float*>(buffers) + (BULKS ? 0 : warp * WarpBuffer<TOK>::FLOATS);
        u32 scales_of = ~0u;
        S d[TOK / 2];
        // Where a stage is that has arrived.
        auto arrived = [&](u32 number) {
            barrier_wait(smem_address(&full[number % STAGES]), number / STAGES & 1);
            return stages + number % STAGES * STAGE_BYTES;
        };
        // Of weights in four bits.
        auto sum_up_bits4 = [&](u32 from, u32 to) {
            u32 first[4][4], second[4][4], strip = warp % 4, own = group * TILE;
            auto tokens = [&](u32 at, int half) {
                return operand(at + Memory::TILES_BYTES + half * Memory::BOX_BYTES);
            };
            if constexpr (FORMAT == NVFP4) {
                for (u32 k = from; k < to; ++k, ++done) {
                    u32 at = arrived(done);
                    load_half<FORMAT>(at + own, strip, lane, 0, first);
                    multiply_half<TOK>(d, first, tokens(at, 0), 1);
                    // The half before is through: its registers and its stage are free.
                    finish_mmas<1>();
                    if (k > from) release((done - 1) % STAGES);
                    load_half<FORMAT>(at + own, strip, lane, 1, second);
                    multiply_half<TOK>(d, second, tokens(at, 1), 1);
                    finish_mmas<1>();
                }
                finish_mmas<0>();
                release((done - 1) % STAGES);
#pragma unroll
                for (int i = 0; i < TOK / 2; ++i) pin(d[i]);
            } else if constexpr (FORMAT == INT4) {
                // The rows of a k-block have a scale each: its sum is taken out, and multiplied by that.
                u32 at = arrived(done);
                load_half<FORMAT>(at + own, strip, lane, 0, first);
                for (u32 k = from; k < to; ++k, ++done) {
                    S block[TOK / 2];
                    multiply_half<TOK>(block, first, tokens(at, 0), 0);
                    load_half<FORMAT>(at + own, strip, lane, 1, second);
                    float2 scales = row_scales(at + own, strip, lane);
                    multiply_half<TOK>(block, second, tokens(at, 1), 1);
                    finish_mmas<1>();
                    if (k + 1 < to) {
                        at = arrived(done + 1);
                        load_half<FORMAT>(at + own, strip, lane, 0, first);
                    }
                    finish_mmas<0>();
                    release(done % STAGES);
#pragma unroll
                    for (int i = 0; i < TOK / 2; ++i) pin(block[i]);
#pragma unroll
                    for (int i = 0; i < TOK / 2; ++i)
                        d[i] = __fmaf_rn(block[i], i / 2 % 2 ? scales.y : scales.x, d[i]);
                }
            }
        };
        auto sum_up_tiles = [&](u32 from, u32 to, auto meanwhile) {
            for (u32 k = from; k < to; ++k, ++done) {
                u32 at = arrived(done);
                u64 wa = operand(at + group * TILE), xb = operand(at + Memory::TILES_BYTES);
                if constexpr (FORMAT == FP8) {
                    // The tensor cores keep only 14 bits or so of a sum of fp8: it is taken out after every
                    // block, of at most 128 tokens at a time, for which there are registers.
                    const int PART = TOK < 128 ? TOK : 128;
#pragma unroll
                    for (int first = 0; first < TOK; first += PART) {
                        S block[PART / 2];
                        multiply<FORMAT, PART>(block, wa, xb + first * 128 / 16, 0);
                        finish_mmas<0>();
                        if (first + PART == TOK) release(done % STAGES);
#pragma unroll
                        for (int i = 0; i < PART / 2; ++i) pin(block[i]);
#pragma unroll
                        for (int i = 0; i < PART / 2; ++i)
                            d[first / 2 + i] = __fadd_rn(d[first / 2 + i], block[i]);
                    }
                } else {
                    multiply<FORMAT, TOK>(d, wa, xb, 1);
                    meanwhile(k);
                    finish_mmas<1>();
                    if (k > from) release((done - 1) % STAGES);
                }
            }
            if constexpr (FORMAT != FP8) {
                finish_mmas<0>();
                release((done - 1) % STAGES);
#pragma unroll
                for (int i = 0; i < TOK / 2; ++i) pin(d[i]);
            }
        };
        auto sum_up = [&](u32 from, u32 to, auto meanwhile) {
            // Also so that the registers are free between tiles.
#pragma unroll
            for (int i = 0; i < TOK / 2; ++i) d[i] = 0;
            if constexpr (IS_BITS4(FORMAT)) {
                sum_up_bits4(from, to);
            } else {
                sum_up_tiles(from, to, meanwhile);
            }
        };
        auto nothing = [](u32) {};
        Walk w = start();
        if constexpr (BULKS) {
            // Read again: kept from above it would be spilled.
            asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(w.at));
            w.at /= CL;
            BulkStore bulk(out_map, kept_map, area);
            // The results of the tile before are stored while the first k-blocks of a tile are multiplied.
            S total[TOK / 2];
            auto store_chunk = [&](u32 number, u32 chunk_number) {
                Walk stored;
                locate(stored, number);
                u32 row = strip_of(stored.tile, group) * TILE_ROWS;
#pragma unroll
                for (int chunk = 0; chunk < TOK / CHUNK; ++chunk)
                    if (chunk == chunk_number)
                        bulk.store<TOK>(a, total, chunk * CHUNK, row, stored.token_tile * TOK);
            };
            for (;;) {
                // The number after that of the tile before, in its own steps.
                u32 last = w.at;
                bool more = next(w), has_results = last >= clusters;
                // The cut of up rows is that of their gate rows.
                u32 base = (w.tile * CL + rank) / SIDES * kb, held_by = cut.holder(base), from = 0;
                if (more) {
                    from = min(kb, cut.begin(held_by + 1) - base);
                    sum_up(0, from, [&](u32 k) {
                        if (has_results && k < TOK / CHUNK) store_chunk(last - clusters, k);
                    });
                }
                for (u32 chunk = from; has_results && chunk < TOK / CHUNK; ++chunk)
                    store_chunk(last - clusters, chunk);
                if (!more) break;
#pragma unroll
                for (int i = 0; i < TOK / 2; ++i) total[i] = d[i];
                while (from < kb) {
                    u32 to = min(kb, cut.begin(++held_by + 1) - base);
                    if (to <= from) continue;
                    sum_up(from, to, nothing);
#pragma unroll
                    for (int i = 0; i < TOK / 2; ++i) total[i] = total[i] + d[i];
                    from = to;
                }
            }
            bulk.finish();
        }
        while (!BULKS && next(w)) {
            u32 row = strip_of(w.tile, group) * TILE_ROWS + warp % 4 * 16;
            if (w.token_tile != scales_of) prefetch_scales<FORMAT, TOK>(a, w.token_tile * TOK, buffer);
            scales_of = w.token_tile;
            Finish<FORMAT, TOK> finish;
            finish.prefetch(a, row, buffer);
            if (SCHEDULE == VIRTUAL) {
                S total[TOK / 2];
                // The cut of up rows is that of their gate rows.
                u32 base = (WG > 1 ? (w.tile * CL + rank) / SIDES : row / CUT_ROWS) * kb, from = 0;
                for (u32 r = cut.holder(base); from < kb; ++r) {
                    u32 to = min(kb, cut.begin(r + 1) - base);
                    if (to <= from) continue;
                    sum_up(from, to, nothing);
#pragma unroll
                    for (int i = 0; i < TOK / 2; ++i) total[i] = from == 0 ? d[i] : total[i] + d[i];
                    from = to;
                }
                finish.fetch(a, row, w.token_tile * TOK, buffer);
                store<FORMAT, TOK>(a, finish, total, buffer);
            } else if constexpr (SPLITS) {
                sum_up(w.k0, w.k1, nothing);
                finish.fetch(a, row, w.token_tile * TOK, buffer);
                join<FORMAT, TOK, CL, WARPS>(a, finish, d, rank, stages, buffer);
            } else {
                SplitTile split(cut, w.tile);
                sum_up(w.k0, w.k1, nothing);
                bool joins = STREAMS && split.first < split.last,
                     adds = split.adders == 1 && range == split.first;
                if (joins && !adds) {
                    finish.fetch(a, row, w.token_tile * TOK, buffer);
                    reduce_split_k<FORMAT, TOK, WARPS>(a, finish, split, d, range, buffer);
                } else {
                    if (joins) add_published<FORMAT, TOK, WARPS>(a, split, d);
                    finish.fetch(a, row, w.token_tile * TOK, buffer);
                    store<FORMAT, TOK>(a, finish, d, buffer);
                }
            }
        }
    }
    // No block may end while another of its cluster still sends to it. Blocks that join sums have met twice:
    // so do their producers.
    if (CL > 1 && !(SPLITS && warp < WARPS)) {
        __syncwarp();
        cluster_sync();
        if (SPLITS) cluster_sync();
    }
}

// With two consumer warpgroups the producers are a warpgroup, so that registers can change hands.
#define THREADS(wg) ((wg) > 1 ? (wg) * 128 + 128 : 192)
// The compiler divides all registers by these threads: 168 for each of 384, 128 of 512, 80 of 768.
#define BOUND(format, tok, wg, schedule) \
    (IS_LIGHT(tok, schedule) ? 65536 / REGISTERS_OF(format, tok, schedule) / 128 * 128 : THREADS(wg))
#define GEMM_PARAMETERS                                                                                     \
    const __grid_constant__ TensorMap map, const u8 *weights, const float *w_scales, const float *x_scales, \
        const float *bias, float *out, uint4 *partials, int tokens, int n, int k_blocks, int ranges,        \
        int add, int gating, u32 *absmax, u16 *kept
#define GEMM_ARGUMENTS \
    {weights, w_scales, x_scales, bias, out, partials, tokens, n, k_blocks, ranges, add, gating, absmax, kept}
#define KERNEL(name, format, tok, wg, cl, schedule)                                                      \
    extern "C" __global__ void __cluster_dims__(cl, 1, 1) __launch_bounds__(BOUND(format, tok, wg, schedule), 1) \
        gemm_##name##_##tok##_##wg##_##cl##_##schedule(GEMM_PARAMETERS) {                                \
        GemmArgs args = GEMM_ARGUMENTS;                                                                  \
        gemm<format, tok, wg, cl, schedule>(map, nullptr, nullptr, args);                                \
    }
// With bulk stores: what they store to is in maps, of the results and of what is kept.
#define BULK_KERNEL(tok, wg, cl)                                                                            \
    extern "C" __global__ void __cluster_dims__(cl, 1, 1) __launch_bounds__(THREADS(wg), 1)                 \
        gemm_bf16_##tok##_##wg##_##cl##_BULK(                                                               \
            const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap out_map,               \
            const __grid_constant__ TensorMap kept_map, const u8* weights, const float* bias, int tokens,   \
            int n, int k_blocks, int ranges, int add, int gating, u16* kept                                 \
        ) {                                                                                                 \
        GemmArgs args = {};                                                                                 \
        args.weights = weights, args.bias = bias, args.tokens = tokens, args.n = n;                         \
        args.k_blocks = k_blocks, args.ranges = ranges, args.add = add, args.gating = gating;               \
        args.kept = kept;                                                                                   \
        gemm<BF16, tok, wg, cl, BULK>(map, &out_map, &kept_map, args);                                      \
    }
