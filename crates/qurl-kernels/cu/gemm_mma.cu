// GEMMs with packed weights on every tensor core since Ampere: out[token, n] = x[token, k] . w[n, k].
//
// Takes the tiles of gemm_pack.cu as gemm_hopper.cuh does, with the instructions that older devices have:
// copies in the background (cp.async) into a ring of stages, ldmatrix, mma. Weights are the left operand,
// tokens the right one.
//
// For few tokens the matrix is cut along k (split-K) so that all SMs have work; every cut writes its sums to
// memory and `finish` adds them up in order of k. For many tokens a block walks all cuts and adds them up in
// the same order. The cuts depend on the matrix and the device alone, so a row's bits do not depend on the
// rows beside it.
//
// fp8 becomes f16 before the tensor core: exact, with sums in f32.
#include "common.cuh"
#include "gemm_sums.cuh"
#include "mma.cuh"

const int TILE_BYTES = TILE_ROWS * TILE_DEPTH;

struct GemmMmaArgs {
    const u8* weights;      // [n / 64][k_blocks][64][128 bytes], swizzled
    const u8* x;            // [tokens][row_bytes]
    const float* w_scales;  // [n], or null
    const float* x_scales;  // [tokens], or null
    const float* bias;      // [n], or null
    float* out;             // [tokens, n]
    float* partials;        // [splits][tokens, n], where cuts are blocks of their own
    int tokens, n, row_bytes, k_blocks;
    int splits;             // cuts along k
    int add;                // out += instead of out =
};

__device__ __forceinline__ void mma_int8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)
    );
}

// d += a . b over 32 bytes of k.
template <int FORMAT, typename S>
__device__ __forceinline__ void multiply(S (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (FORMAT == BF16) mma_bf16(d, a[0], a[1], a[2], a[3], b0, b1);
    if constexpr (FORMAT == INT8) mma_int8(d, a, b0, b1);
    if constexpr (FORMAT == FP8) {
        // Of four neighbours the even ones, then the odd ones: both operands alike.
        mma_f16(
            d, f16_of_e4m3(a[0] << 8), f16_of_e4m3(a[1] << 8), f16_of_e4m3(a[2] << 8), f16_of_e4m3(a[3] << 8),
            f16_of_e4m3(b0 << 8), f16_of_e4m3(b1 << 8)
        );
        mma_f16(
            d, f16_of_e4m3(a[0]), f16_of_e4m3(a[1]), f16_of_e4m3(a[2]), f16_of_e4m3(a[3]), f16_of_e4m3(b0),
            f16_of_e4m3(b1)
        );
    }
}

template <int FORMAT, typename S>
__device__ __forceinline__ void finish_one(const GemmMmaArgs& p, S sum, u32 token, u32 row) {
    float v = (float)sum;
    if (FORMAT != BF16) v = __fmul_rn(v, __fmul_rn(p.x_scales[token], p.w_scales[row]));
    if (p.bias) v = __fadd_rn(v, p.bias[row]);
    float* to = p.out + (u64)token * p.n + row;
    *to = p.add ? __fadd_rn(*to, v) : v;
}

// A block of ROWS x TOK results by WR x WT warps. Its z-index is the cut it sums up, unless there is only one
// z: then it takes all of them.
template <int FORMAT, int ROWS, int TOK, int WR, int WT, int STAGES>
__device__ __forceinline__ void gemm_mma(const GemmMmaArgs& p) {
    typedef typename Sum<FORMAT>::type S;
    const int THREADS = WR * WT * WARP;
    const int STAGE = (ROWS + TOK) * 128;
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

    auto load = [&](u32 k) {
        u32 to = stages + k % STAGES * STAGE;
#pragma unroll
        for (int i = threadIdx.x; i < ROWS * 8; i += THREADS) {
            // Past the last rows the last ones are read again; nothing of them is stored.
            u32 strip = min(first_row / TILE_ROWS + i / (TILE_ROWS * 8), strips - 1);
            copy_16(
                to + i * 16, p.weights + ((u64)strip * kb + k) * TILE_BYTES + i % (TILE_ROWS * 8) * 16, true
            );
        }
#pragma unroll
        for (int i = threadIdx.x; i < TOK * 8; i += THREADS) {
            u32 row = i / 8, chunk = i % 8;
            u32 token = first_token + row, column = k * 128 + chunk * 16;
            bool valid = token < p.tokens && column < p.row_bytes;
            const u8* from = valid ? p.x + (u64)token * p.row_bytes + column : p.x;
            copy_16(to + ROWS * 128 + row * 128 + (chunk ^ (row & 7)) * 16, from, valid);
        }
    };

    S d[RT][TT][4], total[RT][TT][4];
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int t = 0; t < TT; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) d[r][t][e] = 0;

    for (u32 s = 0; s < STAGES - 1; ++s) {
        if (begin + s < end) load(begin + s);
        copies_commit();
    }
    u32 row_of_warp = warp % WR * (RT * 16), token_of_warp = warp / WR * (TT * 8);
    u32 a_row = row_of_warp + lane % 16, a_chunk = lane / 16;
    u32 b_row = token_of_warp + lane % 8 + lane / 16 * 8, b_chunk = lane / 8 % 2;
    for (u32 k = begin; k < end; ++k) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        if (k + STAGES - 1 < end) load(k + STAGES - 1);
        copies_commit();
        u32 w = stages + k % STAGES * STAGE, x = w + ROWS * 128;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            u32 a[RT][4];
#pragma unroll
            for (int r = 0; r < RT; ++r) {
                u32 row = a_row + r * 16;
                load_matrices(a[r], w + row * 128 + ((step * 2 + a_chunk) ^ (row & 7)) * 16);
            }
#pragma unroll
            for (int t = 0; t < TT; t += 2) {
                u32 b[4], row = b_row + t * 8;
                load_matrices(b, x + row * 128 + ((step * 2 + b_chunk) ^ (row & 7)) * 16);
#pragma unroll
                for (int r = 0; r < RT; ++r) {
                    multiply<FORMAT>(d[r][t], a[r], b[0], b[1]);
                    multiply<FORMAT>(d[r][t + 1], a[r], b[2], b[3]);
                }
            }
        }
        // Whole numbers need no cuts: their sums are the same in every order.
        if (FORMAT != INT8 && all && k + 1 == (u32)((u64)kb * (cut + 1) / p.splits)) {
#pragma unroll
            for (int r = 0; r < RT; ++r)
#pragma unroll
                for (int t = 0; t < TT; ++t)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        total[r][t][e] = cut == 0 ? d[r][t][e] : total[r][t][e] + d[r][t][e];
                        d[r][t][e] = 0;
                    }
            ++cut;
        }
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
                    finish_one<FORMAT>(p, FORMAT == INT8 ? d[r][t][e] : total[r][t][e], token, row);
                } else {
                    p.partials[((u64)cut * p.tokens + token) * p.n + row] = sum_bits(d[r][t][e]);
                }
            }
}

#define KERNEL(name, size, format, rows, tok, wr, wt, stages)                                            \
    extern "C" __global__ void __launch_bounds__(wr * wt * WARP) gemm_mma_##name##_##size(               \
        const u8* weights, const u8* x, const float* w_scales, const float* x_scales, const float* bias, \
        float* out, float* partials, int tokens, int n, int row_bytes, int k_blocks, int splits, int add \
    ) {                                                                                                  \
        GemmMmaArgs p = {weights, x, w_scales,  x_scales, bias,   out, partials,                         \
                         tokens,  n, row_bytes, k_blocks, splits, add};                                  \
        gemm_mma<format, rows, tok, wr, wt, stages>(p);                                                  \
    }
#define KERNELS(name, format)                     \
    KERNEL(name, few, format, 64, 16, 4, 1, 6)    \
    KERNEL(name, some, format, 64, 64, 4, 1, 4)   \
    KERNEL(name, many, format, 128, 64, 4, 2, 3)
KERNELS(bf16, BF16)
KERNELS(int8, INT8)
KERNELS(fp8, FP8)

// Adds up what the cuts left, in order of k; a thread for every result.
template <int FORMAT>
__device__ __forceinline__ void finish(const GemmMmaArgs& p) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, count = (u64)p.tokens * p.n;
    if (i >= count) return;
    typename Sum<FORMAT>::type sum, part;
    from_bits(sum, p.partials[i]);
    for (int cut = 1; cut < p.splits; ++cut) {
        from_bits(part, p.partials[cut * count + i]);
        sum = sum + part;
    }
    finish_one<FORMAT>(p, sum, i / p.n, i % p.n);
}

#define FINISH(name, format)                                                                          \
    extern "C" __global__ void __launch_bounds__(256) gemm_mma_##name##_finish(                       \
        const float* w_scales, const float* x_scales, const float* bias, float* out, float* partials, \
        int tokens, int n, int splits, int add                                                        \
    ) {                                                                                               \
        GemmMmaArgs p = {nullptr, nullptr, w_scales, x_scales, bias,   out, partials,                 \
                         tokens,  n,       0,        0,        splits, add};                          \
        finish<format>(p);                                                                            \
    }
FINISH(bf16, BF16)
FINISH(int8, INT8)
FINISH(fp8, FP8)
