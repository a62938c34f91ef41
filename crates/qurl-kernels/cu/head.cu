// The log-probability head: rows of logits are reduced chunk by chunk, the chunks of a row joined in a fixed
// order.
#include "common.cuh"
#include "mma.cuh"

// A warp sums up a chunk of the vocabulary, in fours.
#define FOURS (HEAD_CHUNK / WARP / 4)

// Scales the logits of a row and chunk in place (by the row's own factor where there are several) and sums
// them up.
extern "C" __global__ void __launch_bounds__(HEAD_THREADS) reduce_logits(
    float* logits, u32 vocabulary, u32 rows, u32 chunks, float factor, const float* factors, Partial* partials
) {
    wait_for_previous();
    u32 at = blockIdx.x * (HEAD_THREADS / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 row = at / chunks, first = at % chunks * HEAD_CHUNK;
    if (row >= rows) return;
    u32 count = min(HEAD_CHUNK, vocabulary - first);
    float* x = logits + (u64)row * vocabulary + first;
    float scale = factors ? factors[row] : factor;
    bool aligned = vocabulary % 4 == 0;
    float v[FOURS][4];
    // Number e of four j is that of column (j * WARP + lane) * 4 + e.
#pragma unroll
    for (u32 j = 0; j < FOURS; ++j) {
        u32 i = (j * WARP + lane) * 4;
        if (aligned && i < count) {
            float4 four = *reinterpret_cast<const float4*>(x + i);
            v[j][0] = four.x, v[j][1] = four.y, v[j][2] = four.z, v[j][3] = four.w;
        } else {
#pragma unroll
            for (u32 e = 0; e < 4; ++e) v[j][e] = i + e < count ? x[i + e] : -INFINITY_F;
        }
    }
    if (scale != 1.0f) {
#pragma unroll
        for (u32 j = 0; j < FOURS; ++j) {
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                u32 i = (j * WARP + lane) * 4 + e;
                v[j][e] = __fmul_rn(v[j][e], scale);
                if (i < count) x[i] = v[j][e];
            }
        }
    }
    float best = -INFINITY_F;
#pragma unroll
    for (u32 j = 0; j < FOURS; ++j) {
#pragma unroll
        for (u32 e = 0; e < 4; ++e) best = fmaxf(best, v[j][e]);
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) best = fmaxf(best, __shfl_xor_sync(FULL, best, d));
    // A number that is not finite makes a sum that is none either. After the last column there is nothing to
    // add.
    float total = 0.0f, weighted = 0.0f;
    u32 place = HEAD_CHUNK;
#pragma unroll
    for (u32 j = 0; j < FOURS; ++j) {
        u32 i = (j * WARP + lane) * 4;
        if (i >= count) break;
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            if (!aligned && i + e >= count) break;
            float shifted = __fsub_rn(v[j][e], best),
                  exponential = exp2_fast(__fmul_rn(shifted, 1.44269504088896340736f));
            total = __fadd_rn(total, exponential);
            weighted = __fmaf_rn(exponential, shifted, weighted);
            if (v[j][e] == best) place = min(place, i + e);
        }
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) place = min(place, __shfl_xor_sync(FULL, place, d));
    total = warp_sum(total);
    weighted = warp_sum(weighted);
    if (lane == 0) partials[at] = Partial{best, first + (place < HEAD_CHUNK ? place : 0), total, weighted};
}

// Log-probability of the target, entropy, argmax and logarithm of the denominator; a warp a row.
extern "C" __global__ void __launch_bounds__(WARP) score_rows(
    const float* logits, u32 vocabulary, u32 chunks, const Partial* partials, const u32* targets, float* logp,
    float* entropy, u32* argmax, float* lse
) {
    u32 row = blockIdx.x;
    Distribution d = join_partials(partials + (u64)row * chunks, chunks);
    if (threadIdx.x == 0) {
        logp[row] = d.logp(logits[(u64)row * vocabulary + targets[row]]);
        entropy[row] = d.entropy();
        argmax[row] = d.argmax;
        lse[row] = d.lse();
    }
}

// dL/dlogits = -p (g + e (log p + H)) / T, and + g / T for the target; `scale` makes logits those of the
// temperature, which they may be already.
__device__ __forceinline__ float logit_gradient(
    float logit, u32 column, u32 target, float scale, float inverse_temperature, float lse, float dlogp,
    float dentropy, float entropy
) {
    float log_p = __fsub_rn(__fmul_rn(logit, scale), lse);
    float slope = __fmaf_rn(__fadd_rn(log_p, entropy), dentropy, dlogp);
    float g = __fmul_rn(__fmul_rn(exp_cpu(log_p), slope), -inverse_temperature);
    return column == target ? __fadd_rn(g, __fmul_rn(dlogp, inverse_temperature)) : g;
}

// Four neighbours of a row a thread; results may take the logits' place. Without `dentropy` its numbers are
// zeros.
template <typename To>
__device__ __forceinline__ void logit_gradients(
    const float* logits, u32 vocabulary, const u32* targets, float scale, float inverse_temperature,
    const float* lse, const float* dlogp, const float* dentropy, const float* entropy, To* out
) {
    u32 row = blockIdx.y, column = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    u32 count = column < vocabulary ? min(4, vocabulary - column) : 0;
    u32 target = targets[row];
    float row_lse = lse[row], row_dlogp = dlogp[row], row_dentropy = dentropy ? dentropy[row] : 0.0f,
          row_entropy = entropy[row];
    u64 at = (u64)row * vocabulary + column;
    auto gradient = [&](float logit, u32 e) {
        return logit_gradient(
            logit, column + e, target, scale, inverse_temperature, row_lse, row_dlogp, row_dentropy,
            row_entropy
        );
    };
    if (vocabulary % 4 == 0 && count == 4) {
        float4 x = *reinterpret_cast<const float4*>(logits + at);
        put(out + at, make_float4(gradient(x.x, 0), gradient(x.y, 1), gradient(x.z, 2), gradient(x.w, 3)));
    } else {
        for (u32 e = 0; e < count; ++e) put(out + at + e, gradient(logits[at + e], e));
    }
}

extern "C" __global__ void __launch_bounds__(256) logit_gradients_f32(
    const float* logits, u32 vocabulary, const u32* targets, float scale, float inverse_temperature,
    const float* lse, const float* dlogp, const float* dentropy, const float* entropy, float* out
) {
    logit_gradients(
        logits, vocabulary, targets, scale, inverse_temperature, lse, dlogp, dentropy, entropy, out
    );
}

extern "C" __global__ void __launch_bounds__(256) logit_gradients_bf16(
    const float* logits, u32 vocabulary, const u32* targets, float scale, float inverse_temperature,
    const float* lse, const float* dlogp, const float* dentropy, const float* entropy, u16* out
) {
    logit_gradients(
        logits, vocabulary, targets, scale, inverse_temperature, lse, dlogp, dentropy, entropy, out
    );
}
