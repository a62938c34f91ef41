// Sampling tokens from rows of scaled logits whose chunks have been summed up by the head.
//
// One uniform number a row: it walks the cumulative probabilities in a fixed order (chunks of the vocabulary,
// then the tokens of the chunk it falls into; truncated, the kept tokens from the argmax on). A row depends
// on itself alone.
#include "common.cuh"

// Says that the argmax is taken.
#define NO_CHUNK 0xffffffffu

struct Row {
    float temperature;
    float top_p;
    u32 top_k;
    float min_p;
    double uniform;
};

struct Sampled {
    u32 token;
    float logp;
    float entropy;
};

// types::BANNED_LOGIT.
#define BANNED_LOGIT -1e9f

struct Bias {
    u32 row;
    u32 token;
    float add;
};

// Adds to logits before they are scaled, a thread each: `rows` rows of the batch from `first` on are here. A
// bias of no row fills its place only. No two are of one logit.
extern "C" __global__ void __launch_bounds__(BIAS_THREADS)
    bias_logits(float* logits, u32 vocabulary, u32 first, u32 rows, const Bias* biases, u32 count) {
    u32 i = blockIdx.x * BIAS_THREADS + threadIdx.x;
    if (i >= count) return;
    Bias bias = biases[i];
    u32 row = bias.row - first; // one before the first is after the last
    if (row >= rows || bias.token >= vocabulary) return;
    float* logit = logits + (u64)row * vocabulary + bias.token;
    bool banned = bias.add == -INFINITY_F && fabsf(*logit) < INFINITY_F;
    *logit = banned ? BANNED_LOGIT : __fadd_rn(*logit, bias.add);
}

// The first of `count` weights at which the running sum passes `point`, by one warp: blocks of 32 weights are
// summed in order, then the block is walked. Rounding may put the point after the last weight: then the last
// one with any weight is meant.
template <typename Weight>
__device__ __forceinline__ u32 walk(const Weight& weight, u32 count, double point, double* rest) {
    u32 lane = threadIdx.x % WARP;
    double before = 0.0;
    u32 last = 0;
    double last_weight = 0.0;
    for (u32 first = 0; first < count; first += WARP) {
        double w = first + lane < count ? weight(first + lane) : 0.0;
        double upto = w;
#pragma unroll
        for (int d = 1; d < WARP; d *= 2) {
            double other = __shfl_up_sync(FULL, upto, d);
            if (lane >= d) upto += other;
        }
        u32 passed = __ballot_sync(FULL, before + upto > point);
        if (passed) {
            int at = __ffs(passed) - 1;
            double own = __shfl_sync(FULL, w, at), sum = __shfl_sync(FULL, upto, at);
            *rest = point - (before + (sum - own));
            return first + at;
        }
        u32 weighty = __ballot_sync(FULL, w > 0.0);
        if (weighty) {
            int at = 31 - __clz(weighty);
            last = first + at;
            last_weight = __shfl_sync(FULL, w, at);
        }
        before += __shfl_sync(FULL, upto, WARP - 1);
    }
    *rest = last_weight;
    return last;
}

struct ChunkMass {
    const Partial* partials;
    double largest;
    __device__ __forceinline__ double operator()(u32 i) const {
        return exp((double)partials[i].largest - largest) * (double)partials[i].total;
    }
};

struct TokenWeight {
    const double* weights;
    __device__ __forceinline__ double operator()(u32 i) const { return weights[i]; }
};

template <typename Weight>
__device__ __forceinline__ double total_of(const Weight& weight, u32 count) {
    double sum = 0.0;
    for (u32 i = threadIdx.x % WARP; i < count; i += WARP) sum += weight(i);
    return warp_sum(sum);
}

// Samples every row that does not truncate; a block a row. One warp finds the chunk, all find the weights of
// its tokens (exponentials of 64 bits are long), and the warp walks them.
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
    sample_rows(const float* logits, u32 vocabulary, u32 chunks, const Partial* partials, const Row* samples,
                Sampled* out) {
    __shared__ double weights[HEAD_CHUNK], top;
    __shared__ u32 chosen;
    wait_for_previous();
    u32 row = blockIdx.x;
    Row r = samples[row];
    bool greedy = r.temperature == 0.0f;
    bool truncates = (r.top_k >= 1 && r.top_k < vocabulary) || r.top_p < 1.0f || r.min_p > 0.0f;
    if (!greedy && truncates) return;
    const Partial* own = partials + (u64)row * chunks;
    const float* x = logits + (u64)row * vocabulary;
    Distribution all;
    // The chunk's mass was summed in 32 bits: the place inside is a share of what its tokens really weigh.
    double share = 0.0;
    if (threadIdx.x < WARP) {
        all = join_partials(own, chunks);
        u32 chunk = NO_CHUNK;
        if (all.finite && !greedy) {
            double rest = 0.0;
            ChunkMass mass{own, all.largest};
            chunk = walk(mass, chunks, r.uniform * all.total, &rest);
            share = rest / mass(chunk);
        }
        if (threadIdx.x == 0) {
            chosen = chunk;
            top = all.largest;
        }
    }
    __syncthreads();
    u32 first = chosen * HEAD_CHUNK, count = chosen == NO_CHUNK ? 0 : min(HEAD_CHUNK, vocabulary - first);
#pragma unroll
    for (u32 i = threadIdx.x; i < HEAD_CHUNK; i += SAMPLE_THREADS) {
        if (i < count) weights[i] = exp((double)x[first + i] - top);
    }
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    u32 token = all.argmax;
    if (count > 0) {
        double ignored = 0.0;
        TokenWeight weight{weights};
        token = first + walk(weight, count, share * total_of(weight, count), &ignored);
    }
    if (threadIdx.x == 0) {
        out[row] = all.finite ? Sampled{token, all.logp(x[token]), all.entropy()} : Sampled{0, NAN_F, NAN_F};
    }
}

// A logit and its token as a number that sorts by falling logit, then by token.
__device__ __forceinline__ u64 sort_key(float x, u32 token) {
    u32 b = __float_as_uint(x);
    u32 ascending = b & 0x80000000u ? ~b : b | 0x80000000u;
    return (u64)(~ascending) << 32 | token;
}

struct KeptWeight {
    const u64* keys;
    const float* logits;
    double largest;
    __device__ __forceinline__ double operator()(u32 i) const {
        return exp((double)logits[(u32)keys[i]] - largest);
    }
};

// Samples the rows that truncate, those of them whose logits are here: `rows` rows of the batch from `first`
// on. which[block] is the row in the batch; keys have place for `key_capacity` (a power of two) tokens each.
extern "C" __global__ void __launch_bounds__(TRUNCATED_THREADS) sample_truncated(
    const float* logits, u32 vocabulary, u32 chunks, const Partial* partials, const Row* samples,
    const u32* which, u32 first, u32 rows, u64* all_keys, u32 key_capacity, Sampled* out
) {
    __shared__ u32 count;
    __shared__ double mass_sum;
    __shared__ double sums[TRUNCATED_THREADS / WARP];
    u32 row = which[blockIdx.x] - first;
    if (row >= rows) return;
    Row r = samples[row];
    const float* x = logits + (u64)row * vocabulary;
    u64* keys = all_keys + (u64)blockIdx.x * key_capacity;
    Distribution all = join_partials(partials + (u64)row * chunks, chunks);
    if (!all.finite) {
        if (threadIdx.x == 0) out[row] = Sampled{0, NAN_F, NAN_F};
        return;
    }
    double top_p = r.top_p, min_p = r.min_p;
    bool cuts = r.top_k >= 1 && r.top_k < vocabulary;
    u32 top_k = cuts ? r.top_k : vocabulary;
    // Sorting the vocabulary would take long: tokens are taken only as far down as the kept ones can be.
    for (int step = 0; step < 5; ++step) {
        double depth = step == 4 ? 1e30 : (double)(4 << step);
        float least = step == 4 ? -INFINITY_F : (float)(all.largest - depth);
        __syncthreads();
        if (threadIdx.x == 0) count = 0;
        __syncthreads();
        double mass = 0.0;
        for (u32 i = threadIdx.x; i < vocabulary; i += TRUNCATED_THREADS) {
            if (x[i] >= least) {
                keys[atomicAdd(&count, 1u)] = sort_key(x[i], i);
                mass += exp((double)x[i] - all.largest);
            }
        }
        mass = block_sum<TRUNCATED_THREADS>(mass, sums);
        if (threadIdx.x == 0) mass_sum = mass;
        __syncthreads();
        bool covers_min_p = min_p > 0.0 && exp(-depth) < min_p * 0.999;
        bool enough = cuts ? count >= top_k || (r.top_p >= 1.0f && covers_min_p)
                           : covers_min_p || (r.top_p < 1.0f && mass_sum >= top_p * all.total);
        if (enough) break;
    }
    // Bitonic sort, padded with the largest key.
    u32 size = 1;
    while (size < count) size *= 2;
    for (u32 i = count + threadIdx.x; i < size; i += TRUNCATED_THREADS) keys[i] = ~0ull;
    __syncthreads();
    for (u32 span = 2; span <= size; span *= 2) {
        for (u32 step = span / 2; step > 0; step /= 2) {
            for (u32 i = threadIdx.x; i < size / 2; i += TRUNCATED_THREADS) {
                u32 low = i / step * 2 * step + i % step, high = low + step;
                u64 a = keys[low], b = keys[high];
                bool up = (low & span) == 0;
                if ((a > b) == up) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
            __syncthreads();
        }
    }
    if (threadIdx.x >= WARP) return;
    KeptWeight weight{keys, x, all.largest};
    u32 kept = min(count, top_k);
    if (r.top_p < 1.0f) {
        double base = cuts ? total_of(weight, kept) : all.total;
        double point = top_p * base, before = 0.0;
        u32 lane = threadIdx.x;
        bool found = false;
        for (u32 first = 0; first < kept && !found; first += WARP) {
            double w = first + lane < kept ? weight(first + lane) : 0.0, upto = w;
#pragma unroll
            for (int d = 1; d < WARP; d *= 2) {
                double other = __shfl_up_sync(FULL, upto, d);
                if (lane >= d) upto += other;
            }
            u32 reached = __ballot_sync(FULL, first + lane < kept && before + upto >= point);
            if (reached) {
                kept = first + __ffs(reached);
                found = true;
            }
            before += __shfl_sync(FULL, upto, WARP - 1);
        }
    }
    if (r.min_p > 0.0f) {
        u32 passing = 0;
        for (u32 i = threadIdx.x; i < kept; i += WARP) passing += weight(i) >= min_p ? 1 : 0;
#pragma unroll
        for (int d = 16; d > 0; d /= 2) passing += __shfl_xor_sync(FULL, passing, d);
        kept = passing;
    }
    kept = max(kept, 1u);
    double total = total_of(weight, kept), ignored = 0.0;
    u32 token = (u32)keys[walk(weight, kept, r.uniform * total, &ignored)];
    double weighted = 0.0;
    for (u32 i = threadIdx.x; i < kept; i += WARP) {
        double shifted = (double)x[(u32)keys[i]] - all.largest;
        weighted += exp(shifted) * shifted;
    }
    weighted = warp_sum(weighted);
    if (threadIdx.x == 0) {
        float logp = (float)((double)x[token] - all.largest - log(total));
        out[row] = Sampled{token, logp, (float)(log(total) - weighted / total)};
    }
}

struct TopToken {
    u32 token;
    float logp;
};

// The most probable tokens of a row, the best first; a block a row. Each turn finds the first key after the
// one found last: for a few tokens that is less than sorting.
extern "C" __global__ void __launch_bounds__(TRUNCATED_THREADS) top_tokens(
    const float* logits, u32 vocabulary, u32 chunks, const Partial* partials, u32 count, TopToken* out
) {
    __shared__ u64 firsts[TRUNCATED_THREADS / WARP];
    u32 row = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const float* x = logits + (u64)row * vocabulary;
    TopToken* own = out + (u64)row * count;
    Distribution all = join_partials(partials + (u64)row * chunks, chunks);
    u64 after = 0;
    for (u32 place = 0; place < count; ++place) {
        u64 first = ~0ull;
        for (u32 i = threadIdx.x; i < vocabulary; i += TRUNCATED_THREADS) {
            u64 key = sort_key(x[i], i);
            if ((place == 0 || key > after) && key < first) first = key;
        }
#pragma unroll
        for (int d = 16; d > 0; d /= 2) first = min(first, __shfl_xor_sync(FULL, first, d));
        __syncthreads();
        if (lane == 0) firsts[warp] = first;
        __syncthreads();
        after = firsts[0];
        for (u32 w = 1; w < TRUNCATED_THREADS / WARP; ++w) after = min(after, firsts[w]);
        u32 token = (u32)after;
        if (threadIdx.x == 0) own[place] = all.finite ? TopToken{token, all.logp(x[token])} : TopToken{0, NAN_F};
    }
}
