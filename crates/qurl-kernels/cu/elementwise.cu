// The small operations between the GEMMs: rotary embedding, SwiGLU, embedding rows, column sums, dot
// products.
#include "common.cuh"
#include "mma.cuh"

// A token of a batch: its number, or a row of sampled tokens, whose number the host may not have seen.
struct Token {
    u32 is_sampled, number;
};

// to = from, d numbers, by all threads of a block.
__device__ __forceinline__ void copy_row(const float* from, u32 d, float* to) {
    if (d % 4 == 0) {
        for (u32 i = threadIdx.x; i < d / 4; i += blockDim.x) ((float4*)to)[i] = ((const float4*)from)[i];
    } else {
        for (u32 i = threadIdx.x; i < d; i += blockDim.x) to[i] = from[i];
    }
}

// out[i] = table[ids[i]], rows of d. A block a row.
extern "C" __global__ void __launch_bounds__(256) gather(
    const float* table, const u32* ids, u32 d, float* out
) {
    wait_for_previous();
    copy_row(table + (u64)ids[blockIdx.x] * d, d, out + (u64)blockIdx.x * d);
}

// The same for tokens of a batch: the host issues a step before it knows the tokens that the last one
// sampled.
extern "C" __global__ void __launch_bounds__(256)
    gather_tokens(const float* table, const Token* tokens, const u32* sampled, u32 d, float* out) {
    wait_for_previous();
    Token token = tokens[blockIdx.x];
    // The number is the first word of a sampled token.
    u32 id = token.is_sampled ? sampled[(u64)token.number * TOKEN_WORDS] : token.number;
    copy_row(table + (u64)id * d, d, out + (u64)blockIdx.x * d);
}

// table[target] += the rows of a segment, in their order. A block a target: ids[segment], rows
// order[starts..].
extern "C" __global__ void __launch_bounds__(256)
    scatter_add(const float* rows, const u32* ids, const u32* starts, const u32* order, u32 d, float* table) {
    u32 first = starts[blockIdx.x], last = starts[blockIdx.x + 1];
    float* to = table + (u64)ids[blockIdx.x] * d;
    for (u32 i = threadIdx.x; i < d; i += blockDim.x) {
        float sum = to[i];
        for (u32 r = first; r < last; ++r) sum = __fadd_rn(sum, rows[(u64)order[r] * d + i]);
        to[i] = sum;
    }
}

// Rotates pairs (i, i + half) of the first heads of every row, by the row's position or back.
extern "C" __global__ void __launch_bounds__(256)
    rope(float* x, u32 stride, u32 heads, u32 half, const u32* positions, const float* cos, const float* sin,
         u32 inverse) {
    u32 row = blockIdx.x;
    const float* c = cos + (u64)positions[row] * half;
    const float* s = sin + (u64)positions[row] * half;
    for (u32 i = threadIdx.x; i < heads * half; i += blockDim.x) {
        u32 at = i % half;
        float* pair = x + (u64)row * stride + i / half * 2 * half + at;
        float a = pair[0], b = pair[half], cs = c[at], sn = inverse ? 0.0f - s[at] : s[at];
        pair[0] = __fsub_rn(__fmul_rn(a, cs), __fmul_rn(b, sn));
        pair[half] = __fadd_rn(__fmul_rn(b, cs), __fmul_rn(a, sn));
    }
}

__device__ __forceinline__ float sigmoid(float x) {
    return __fdiv_rn(1.0f, __fadd_rn(1.0f, exp_cpu(0.0f - x)));
}

// out[rows, f] = silu(gate) * up of gate_up[rows, 2 f].
extern "C" __global__ void __launch_bounds__(256) swiglu(const float* gate_up, u32 f, u64 count, float* out) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    u64 at = i / f * 2 * f + i % f;
    float g = gate_up[at], u = gate_up[at + f];
    out[i] = __fmul_rn(__fmul_rn(g, sigmoid(g)), u);
}

// What becomes of the gradient d of silu(g) * u: that of g in its place, that of u in its place, and silu(g)
// * u in place of d; `s` is the sigmoid of g.
__device__ __forceinline__ void swiglu_gradient(float s, float& g, float& u, float& d) {
    float silu = __fmul_rn(g, s);
    float slope = __fmaf_rn(silu, __fsub_rn(1.0f, s), s);
    float dg = __fmul_rn(__fmul_rn(d, u), slope), du = __fmul_rn(d, silu), out = __fmul_rn(silu, u);
    g = dg, u = du, d = out;
}

// gate_up[rows, 2 f] becomes its gradient; out, on entry the gradient of the output, becomes the output. Four
// neighbours of a row a thread, rows along x.
extern "C" __global__ void __launch_bounds__(256) swiglu_backward(float* gate_up, u32 f, float* out) {
    wait_for_previous();
    u64 row = blockIdx.x;
    u32 first = 4 * (blockIdx.y * blockDim.x + threadIdx.x);
    float *gate = gate_up + row * 2 * f, *up = gate + f;
    out += row * f;
    if (f % 4 == 0) {
        if (first >= f) return;
        float4 g = *(float4*)(gate + first), u = *(float4*)(up + first), d = *(float4*)(out + first);
        swiglu_gradient(sigmoid(g.x), g.x, u.x, d.x);
        swiglu_gradient(sigmoid(g.y), g.y, u.y, d.y);
        swiglu_gradient(sigmoid(g.z), g.z, u.z, d.z);
        swiglu_gradient(sigmoid(g.w), g.w, u.w, d.w);
        put(gate + first, g);
        put(up + first, u);
        put(out + first, d);
    } else {
        for (u32 i = first; i < min(first + 4, f); ++i)
            swiglu_gradient(sigmoid(gate[i]), gate[i], up[i], out[i]);
    }
}

__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Two neighbours of x in bf16 in each word, the first in its low half.
extern "C" __global__ void __launch_bounds__(256) narrow(const float* x, u64 count, u32* words) {
    u64 all = (count + 1) / 2;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += (u64)gridDim.x * blockDim.x)
        words[i] = bf16_two(x[2 * i], 2 * i + 1 < count ? x[2 * i + 1] : 0.0f);
}

// y = the values of narrow.
extern "C" __global__ void __launch_bounds__(256) widen(const u32* words, u64 count, float* y) {
    u64 all = (count + 1) / 2;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += (u64)gridDim.x * blockDim.x) {
        u32 pair = words[i];
        y[2 * i] = bf16_low(pair);
        if (2 * i + 1 < count) y[2 * i + 1] = bf16_high(pair);
    }
}

// The gradients of two neighbours, in place of gate and up.
__device__ __forceinline__ void swiglu_gradient_pair(u32& gate, u32& up, u32 dout) {
    float g[2] = {bf16_low(gate), bf16_high(gate)}, u[2] = {bf16_low(up), bf16_high(up)},
          d[2] = {bf16_low(dout), bf16_high(dout)};
    swiglu_gradient(sigmoid_fast(g[0]), g[0], u[0], d[0]);
    swiglu_gradient(sigmoid_fast(g[1]), g[1], u[1], d[1]);
    gate = bf16_two(g[0], g[1]);
    up = bf16_two(u[0], u[1]);
}

// The same with projections and gradients in bf16, where the output was kept: eight neighbours a thread.
extern "C" __global__ void __launch_bounds__(256)
    swiglu_backward_bf16(u16* gate_up, const u16* dout, u32 f) {
    wait_for_previous();
    u64 row = blockIdx.x;
    u32 first = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
    u16 *gate = gate_up + row * 2 * f, *up = gate + f;
    dout += row * f;
    if (f % 8 == 0) {
        if (first >= f) return;
        uint4 g = *(uint4*)(gate + first), u = *(uint4*)(up + first), d = *(const uint4*)(dout + first);
        swiglu_gradient_pair(g.x, u.x, d.x);
        swiglu_gradient_pair(g.y, u.y, d.y);
        swiglu_gradient_pair(g.z, u.z, d.z);
        swiglu_gradient_pair(g.w, u.w, d.w);
        *(uint4*)(gate + first) = g;
        *(uint4*)(up + first) = u;
    } else {
        for (u32 i = first; i < min(first + 8, f); ++i) {
            u32 g = gate[i], u = up[i];
            swiglu_gradient_pair(g, u, dout[i]);
            gate[i] = (u16)g;
            up[i] = (u16)u;
        }
    }
}

// partials[part][column] = sum over a part of the rows of x (times w[row]); parts of `per` rows, one per
// blockIdx.y.
extern "C" __global__ void __launch_bounds__(128)
    column_partials(const float* x, const float* w, u32 rows, u32 d, u32 per, float* partials) {
    u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= d) return;
    u32 first = blockIdx.y * per, last = min(first + per, rows);
    float sum = 0.0f;
    for (u32 row = first; row < last; ++row) {
        float v = x[(u64)row * d + column];
        sum = w ? __fmaf_rn(w[row], v, sum) : __fadd_rn(sum, v);
    }
    partials[(u64)blockIdx.y * d + column] = sum;
}

// sums[column] += partials of all parts. A block has WARP columns: each of its warps adds up every
// ADDING_WARPS'th part, and their sums are added in order.
extern "C" __global__ void __launch_bounds__(ADDING_WARPS * WARP) add_partials(
    const float* partials, u32 parts, u32 d, float* sums
) {
    __shared__ float buffer[ADDING_WARPS][WARP];
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, column = blockIdx.x * WARP + lane;
    float sum = 0.0f;
    if (column < d) {
#pragma unroll 8
        for (u32 part = warp; part < parts; part += ADDING_WARPS)
            sum = __fadd_rn(sum, partials[(u64)part * d + column]);
    }
    buffer[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= d) return;
#pragma unroll
    for (u32 other = 1; other < ADDING_WARPS; ++other) sum = __fadd_rn(sum, buffer[other][lane]);
    sums[column] = __fadd_rn(sums[column], sum);
}

// out[row] = x[row] . w, a warp a row.
extern "C" __global__ void __launch_bounds__(32) row_dots(const float* x, const float* w, u32 d, float* out) {
    const float* row = x + (u64)blockIdx.x * d;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < d; i += WARP) sum = __fmaf_rn(row[i], w[i], sum);
    sum = warp_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// dx[row] = g[row] w.
extern "C" __global__ void __launch_bounds__(256)
    outer_product(const float* g, const float* w, u32 d, u64 count, float* dx) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) dx[i] = __fmul_rn(g[i / d], w[i % d]);
}

// Roughly normal numbers (a sum of four uniform ones) times a factor, each a function of seed and place.
extern "C" __global__ void __launch_bounds__(256) random_fill(float* out, u64 count, u64 seed, float factor) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    u64 x = seed + (i + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    int sum = (int)(x & 0xffff) + (int)(x >> 16 & 0xffff) + (int)(x >> 32 & 0xffff) + (int)(x >> 48);
    out[i] = (float)(sum - 131070) * (1.7320508f / 65536.0f) * factor;
}

// to[row, column] (+)= factor * from[row, column], rows of both with strides of their own: blocks of a
// block-diagonal matrix.
extern "C" __global__ void __launch_bounds__(256) scale_block(
    const float* from, u32 from_stride, float* to, u32 to_stride, u32 rows, u32 columns, float factor, u32 add
) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)rows * columns) return;
    u64 row = i / columns, column = i % columns;
    float x = __fmul_rn(factor, from[row * from_stride + column]);
    float* out = to + row * to_stride + column;
    *out = add ? __fadd_rn(*out, x) : x;
}
