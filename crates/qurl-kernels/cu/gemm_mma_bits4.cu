// GEMMs with weights in four bits on every tensor core since Ampere: gemm_mma.cu with the tiles of bits4.cuh,
// whose codes become bf16 in registers. A step is half a tile, 64 of k; everything else is as there.
#include "bits4.cuh"
#include "common.cuh"
#include "mma.cuh"

struct Bits4Args {
    const u8* weights;      // [n / 64][k_blocks] tiles
    const u16* x;           // [tokens][k]
    const float* w_scale;   // of all weights (nvfp4), or null
    const float* bias;      // [n], or null
    float* out;             // [tokens, n]
    float* partials;        // [splits][tokens, n], where cuts are blocks of their own
    int tokens, n, k, k_blocks;
    int splits;             // cuts along k
    int add;                // out += instead of out =
};

template <int FORMAT>
__device__ __forceinline__ void finish_one(const Bits4Args& p, float v, u32 token, u32 row) {
    if (FORMAT == NVFP4) v = __fmul_rn(v, __fmul_rn(*p.w_scale, NVFP4_FACTOR));
    if (p.bias) v = __fadd_rn(v, p.bias[row]);
    float* to = p.out + (u64)token * p.n + row;
    *to = p.add ? __fadd_rn(*to, v) : v;
}

// A block of ROWS x TOK results by WR x WT warps. Its z-index is the cut it sums up, unless there is only one
// z: then it takes all of them.
template <int FORMAT, int ROWS, int TOK, int WR, int WT, int STAGES>
__device__ __forceinline__ void gemm_mma_bits4(const Bits4Args& p) {
    const int THREADS = WR * WT * WARP, TILE = Bits4<FORMAT>::TILE, SCALES = Bits4<FORMAT>::SCALES;
    const int STRIPS = ROWS / TILE_ROWS, PART = HALF_BYTES + SCALES, STAGE = STRIPS * PART + TOK * 128;
    const int RT = ROWS / WR / 16, TT = TOK / WT / 8;
    static_assert(TT % 2 == 0, "ldmatrix brings two tiles of eight tokens");
    extern __shared__ u8 dynamic[];
    u32 stages = smem_address(dynamic);
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 first_row = blockIdx.x * ROWS, first_token = blockIdx.y * TOK;
    u32 strips = (p.n + TILE_ROWS - 1) / TILE_ROWS;
    u32 kb = p.k_blocks;
    bool all = gridDim.z == 1;
    u32 cut = all ? 0 : blockIdx.z;
    u32 begin = (u64)kb * cut / p.splits, end = all ? kb : (u32)((u64)kb * (cut + 1) / p.splits);

    // The halves of tiles are counted; each comes with the scales of both.
    auto load = [&](u32 half) {
        u32 to = stages + half % STAGES * STAGE;
        const int CHUNKS = PART / 16;
        for (int i = threadIdx.x; i < STRIPS * CHUNKS; i += THREADS) {
            // Past the last rows the last ones are read again; nothing of them is stored.
            u32 strip = min(first_row / TILE_ROWS + i / CHUNKS, strips - 1), byte = i % CHUNKS * 16;
            u32 from = byte < HALF_BYTES ? half % 2 * HALF_BYTES + byte : HALF_BYTES + byte;
            copy_16(to + i * 16, p.weights + ((u64)strip * kb + half / 2) * TILE + from, true);
        }
#pragma unroll
        for (int i = threadIdx.x; i < TOK * 8; i += THREADS) {
            u32 row = i / 8, chunk = i % 8;
            u32 token = first_token + row, column = half * 64 + chunk * 8;
            bool valid = token < p.tokens && column < p.k;
            const u16* from = valid ? p.x + (u64)token * p.k + column : p.x;
            copy_16(to + STRIPS * PART + row * 128 + (chunk ^ (row & 7)) * 16, from, valid);
        }
    };

    // Sums of a k-block (int4), of a cut, of all.
    float d[RT][TT][4], sum[RT][TT][4], total[RT][TT][4];
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int t = 0; t < TT; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) d[r][t][e] = sum[r][t][e] = 0;

    for (u32 s = 0; s < STAGES - 1; ++s) {
        if (2 * begin + s < 2 * end) load(2 * begin + s);
        copies_commit();
    }
    u32 row_of_warp = warp % WR * (RT * 16), token_of_warp = warp / WR * (TT * 8);
    u32 b_row = token_of_warp + lane % 8 + lane / 16 * 8, b_chunk = lane / 8 % 2;
    for (u32 half = 2 * begin; half < 2 * end; ++half) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        if (half + STAGES - 1 < 2 * end) load(half + STAGES - 1);
        copies_commit();
        u32 w = stages + half % STAGES * STAGE, x = w + STRIPS * PART;
        u32 a[RT][4][4];
        float2 scales[RT];
#pragma unroll
        for (int r = 0; r < RT; ++r) {
            u32 row = row_of_warp + r * 16, tile = w + row / TILE_ROWS * PART, strip = row % TILE_ROWS / 16;
            u32 pair = strip * 8 + lane / 4;
            uint4 words = shared_words(tile + (strip * WARP + lane) * 16);
            if constexpr (FORMAT == INT4) {
                scales[r] = shared_two(tile + HALF_BYTES + pair * 8);
                decode<FORMAT>(words, 0, 0, a[r]);
            } else {
                float2 bytes = shared_two(tile + HALF_BYTES + pair * 16 + half % 2 * 8);
                decode<FORMAT>(words, __float_as_uint(bytes.x), __float_as_uint(bytes.y), a[r]);
            }
        }
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int t = 0; t < TT; t += 2) {
                u32 b[4], row = b_row + t * 8;
                load_matrices(b, x + row * 128 + ((step * 2 + b_chunk) ^ (row & 7)) * 16);
#pragma unroll
                for (int r = 0; r < RT; ++r) {
                    const u32* o = a[r][step];
                    mma_bf16(d[r][t], o[0], o[1], o[2], o[3], b[0], b[1]);
                    mma_bf16(d[r][t + 1], o[0], o[1], o[2], o[3], b[2], b[3]);
                }
            }
        }
        if (half % 2 == 0) continue;
        // A k-block is complete, and maybe a cut.
        bool cut_ends = all && half / 2 + 1 == (u32)((u64)kb * (cut + 1) / p.splits);
#pragma unroll
        for (int r = 0; r < RT; ++r)
#pragma unroll
            for (int t = 0; t < TT; ++t)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (FORMAT == INT4) {
                        sum[r][t][e] = __fmaf_rn(d[r][t][e], e / 2 ? scales[r].y : scales[r].x, sum[r][t][e]);
                        d[r][t][e] = 0;
                    }
                    if (!cut_ends) continue;
                    float part = FORMAT == INT4 ? sum[r][t][e] : d[r][t][e];
                    total[r][t][e] = cut == 0 ? part : total[r][t][e] + part;
                    d[r][t][e] = sum[r][t][e] = 0;
                }
        if (cut_ends) ++cut;
    }

    // A lane has rows lane / 4 + {0, 8} of tokens 2 (lane % 4) + {0, 1}.
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int t = 0; t < TT; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                u32 row = first_row + row_of_warp + r * 16 + lane / 4 + e / 2 * 8;
                u32 token = first_token + token_of_warp + t * 8 + lane % 4 * 2 + e % 2;
                if (row >= p.n || token >= p.tokens) continue;
                if (all) {
                    finish_one<FORMAT>(p, total[r][t][e], token, row);
                } else {
                    p.partials[((u64)cut * p.tokens + token) * p.n + row] =
                        FORMAT == INT4 ? sum[r][t][e] : d[r][t][e];
                }
            }
}

#define KERNEL(name, size, format, rows, tok, wr, wt, stages)                                               \
    extern "C" __global__ void __launch_bounds__(wr * wt * WARP) gemm_mma_bits4_##name##_##size(            \
        const u8* weights, const u16* x, const float* w_scale, const float* bias, float* out,               \
        float* partials, int tokens, int n, int k, int k_blocks, int splits, int add                        \
    ) {                                                                                                     \
        Bits4Args p = {weights, x, w_scale, bias, out, partials, tokens, n, k, k_blocks, splits, add};      \
        gemm_mma_bits4<format, rows, tok, wr, wt, stages>(p);                                               \
    }
#define KERNELS(name, format)                     \
    KERNEL(name, few, format, 64, 16, 4, 1, 6)    \
    KERNEL(name, some, format, 64, 64, 4, 1, 4)   \
    KERNEL(name, many, format, 128, 64, 4, 2, 3)
KERNELS(int4, INT4)
KERNELS(nvfp4, NVFP4)

// Adds up what the cuts left, in order of k; a thread for every result.
template <int FORMAT>
__device__ __forceinline__ void finish(const Bits4Args& p) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, count = (u64)p.tokens * p.n;
    if (i >= count) return;
    float sum = p.partials[i];
    for (int cut = 1; cut < p.splits; ++cut) sum = sum + p.partials[cut * count + i];
    finish_one<FORMAT>(p, sum, i / p.n, i % p.n);
}

#define FINISH(name, format)                                                                              \
    extern "C" __global__ void __launch_bounds__(256) gemm_mma_bits4_##name##_finish(                     \
        const float* w_scale, const float* bias, float* out, float* partials, int tokens, int n,          \
        int splits, int add                                                                               \
    ) {                                                                                                   \
        Bits4Args p = {nullptr, nullptr, w_scale, bias, out, partials, tokens, n, 0, 0, splits, add};     \
        finish<format>(p);                                                                                \
    }
FINISH(int4, INT4)
FINISH(nvfp4, NVFP4)
