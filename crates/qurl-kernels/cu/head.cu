// The log-probability head: rows of logits are reduced chunk by chunk, the chunks of a row joined in a fixed order.
#include "common.cuh"

#define THREADS 128
#define PER_THREAD 8
// Columns of the vocabulary that are reduced at a time.
#define CHUNK (THREADS * PER_THREAD)

// Scales the logits of a row and chunk in place (by the row's own factor where there are several) and sums them up.
extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_logits(float* logits, u32 vocabulary, u32 chunks, float factor, const float* factors, Partial* partials) {
    wait_for_previous();
    __shared__ float sums[THREADS / WARP], more[THREADS / WARP], best_of[THREADS / WARP];
    __shared__ u32 place_of[THREADS / WARP];
    u32 row = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
    u32 first = chunk * CHUNK, count = min(CHUNK, vocabulary - first);
    float* x = logits + (u64)row * vocabulary + first;
    float scale = factors ? factors[row] : factor;
    float v[PER_THREAD];
    float best = -INFINITY_F;
    u32 place = 0xffffffffu;
#pragma unroll
    for (u32 j = 0; j < PER_THREAD; ++j) {
        u32 i = j * THREADS + threadIdx.x;
        v[j] = -INFINITY_F;
        if (i < count) {
            v[j] = __fmul_rn(x[i], scale);
            if (scale != 1.0f) x[i] = v[j];
            if (v[j] > best || (place == 0xffffffffu && v[j] == v[j])) {
                best = v[j];
                place = i;
            }
        }
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        float other = __shfl_xor_sync(FULL, best, d);
        u32 at = __shfl_xor_sync(FULL, place, d);
        if (other > best || (other == best && at < place)) {
            best = other;
            place = at;
        }
    }
    if (threadIdx.x % WARP == 0) {
        best_of[threadIdx.x / WARP] = best;
        place_of[threadIdx.x / WARP] = place;
    }
    __syncthreads();
    best = best_of[0];
    place = place_of[0];
#pragma unroll
    for (int i = 1; i < THREADS / WARP; ++i) {
        if (best_of[i] > best || (best_of[i] == best && place_of[i] < place)) {
            best = best_of[i];
            place = place_of[i];
        }
    }
    float total = 0.0f, weighted = 0.0f;
#pragma unroll
    for (u32 j = 0; j < PER_THREAD; ++j) {
        if (j * THREADS + threadIdx.x < count) {
            float shifted = __fsub_rn(v[j], best), e = exp_fast(shifted);
            total = __fadd_rn(total, e);
            weighted = __fmaf_rn(e, shifted, weighted);
        }
    }
    total = block_sum<THREADS>(total, sums);
    weighted = block_sum<THREADS>(weighted, more);
    if (threadIdx.x == 0) partials[blockIdx.x] = Partial{best, first + (place == 0xffffffffu ? 0 : place), total, weighted};
}

// Log-probability of the target, entropy, likeliest token and logarithm of the denominator; a warp a row.
extern "C" __global__ void __launch_bounds__(WARP)
    score_rows(const float* logits, u32 vocabulary, u32 chunks, const Partial* partials, const u32* targets, float* logp,
               float* entropy, u32* argmax, float* lse) {
    u32 row = blockIdx.x;
    Distribution d = join_partials(partials + (u64)row * chunks, chunks);
    if (threadIdx.x == 0) {
        logp[row] = d.logp(logits[(u64)row * vocabulary + targets[row]]);
        entropy[row] = d.entropy();
        argmax[row] = d.argmax;
        lse[row] = d.lse();
    }
}

// dL/dlogits = -p (g + e (log p + H)) / T, and + g / T for the target, from unscaled logits.
__device__ __forceinline__ float logit_gradient(float logit, u32 column, u32 target, float inverse_temperature,
                                                float lse, float dlogp, float dentropy, float entropy) {
    float log_p = __fsub_rn(__fmul_rn(logit, inverse_temperature), lse);
    float slope = __fmaf_rn(__fadd_rn(log_p, entropy), dentropy, dlogp);
    float g = __fmul_rn(__fmul_rn(exp_cpu(log_p), slope), -inverse_temperature);
    return column == target ? __fadd_rn(g, __fmul_rn(dlogp, inverse_temperature)) : g;
}

extern "C" __global__ void __launch_bounds__(256)
    logit_gradients_f32(float* logits, u32 vocabulary, const u32* targets, float inverse_temperature, const float* lse,
                        const float* dlogp, const float* dentropy, const float* entropy) {
    u32 row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= vocabulary) return;
    float* x = logits + (u64)row * vocabulary + column;
    *x = logit_gradient(*x, column, targets[row], inverse_temperature, lse[row], dlogp[row], dentropy[row], entropy[row]);
}

extern "C" __global__ void __launch_bounds__(256)
    logit_gradients_bf16(const float* logits, u32 vocabulary, const u32* targets, float inverse_temperature,
                         const float* lse, const float* dlogp, const float* dentropy, const float* entropy, u16* out) {
    u32 row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= vocabulary) return;
    u64 at = (u64)row * vocabulary + column;
    float g = logit_gradient(logits[at], column, targets[row], inverse_temperature, lse[row], dlogp[row], dentropy[row],
                             entropy[row]);
    out[at] = bf16_bits(g);
}
