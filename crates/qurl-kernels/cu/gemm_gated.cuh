// Gate and up projections in int8 with the tokens on the left: out[token, f] = silu(gate) * up, for up to 256
// tokens.
//
// In gemm_hopper.cuh the weights are the left operand, whose rows come in strips of 64, gate and up in pairs
// of strips. With many tokens that can be a bad number of tiles for the SMs: 76 pairs of 0.5B for 132. Here
// the tokens are the left operand, and a tile has some COLUMNS of gate and up projections as the right one:
// 40 make 122 tiles of 0.5B, 72 make 264 of 7B. Four warpgroups have 64 tokens each; where their sums are too
// many for the registers of so many threads, two have 128. A lane has the gate and the up of a column, so
// results go from registers to memory. Sums of int8 are exact: the bits are those of all other forms.
#pragma once
#include "gemm_hopper.cuh"

template <int COLUMNS>
struct Gated {
    static const int TOKENS = GATED_TOKENS;
    // Strips of 64 tokens of a warpgroup.
    static const int STRIPS = COLUMNS > GATED_WIDE ? 2 : 1, WARPS = TOKENS / 16 / STRIPS;
    // Beside four warpgroups the producers are two warps. Beside two they are a warpgroup and give registers.
    static const int THREADS_ALL = WARPS * WARP + (STRIPS > 1 ? 128 : 64);
    static const int TOKEN_BYTES = TOKENS * 128, STAGE_BYTES = TOKEN_BYTES + 2 * COLUMNS * 128;
    static const int STAGES = GATED_STAGE_KIB * 1024 / STAGE_BYTES;
};

__device__ __forceinline__ void write_two(float* to, float2 v, bool store) {
    asm volatile(
        "{\n"
        ".reg .pred store;\n"
        "setp.ne.b32 store, %3, 0;\n"
        "@store st.global.v2.f32 [%0], {%1, %2};\n"
        "}\n" ::"l"(to),
        "f"(v.x), "f"(v.y), "r"((int)store));
}

// Two sums as numbers: as Finish::scaled of gemm_store.cuh.
__device__ __forceinline__ float2 scaled_two(int s0, int s1, float x, float2 w) {
    return make_float2(__fmul_rn((float)s0, __fmul_rn(x, w.x)), __fmul_rn((float)s1, __fmul_rn(x, w.y)));
}

// Stores the results of a tile, whose sums lie as the tensor cores put them: a lane has tokens `token + {0,
// 8}`, and of every eight gate or up projections two neighbours. `scales`: those of the tile's gate
// projections, then those of its up ones.
template <int COLUMNS>
__device__ __forceinline__ void store_gated(
    const GemmArgs& a, const int (&d)[COLUMNS], const float* scales, u32 tile, u32 token, const float (&xs)[2]
) {
    const int EIGHTS = COLUMNS / 8;
    u32 width = a.n / 2, column = tile * COLUMNS + threadIdx.x % 4 * 2;
    const float2* ws = reinterpret_cast<const float2*>(scales) + threadIdx.x % 4;
    float* to = a.out + (u64)token * width + column;
    u32 absmax[2] = {0, 0};
#pragma unroll
    for (int b = 0; b < EIGHTS; ++b) {
        bool inside = column + 8 * b < width;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int *gates = d + 4 * b + 2 * r, *ups = gates + 4 * EIGHTS;
            float2 gate = scaled_two(gates[0], gates[1], xs[r], ws[4 * b]);
            float2 up = scaled_two(ups[0], ups[1], xs[r], ws[4 * (b + EIGHTS)]);
            float2 v = make_float2(silu_times(gate.x, up.x), silu_times(gate.y, up.y));
            write_two(to + 8 * r * (u64)width + 8 * b, v, inside && token + 8 * r < a.tokens);
            if (inside) absmax[r] = max(absmax[r], max(magnitude_bits(v.x), magnitude_bits(v.y)));
        }
    }
    if (!a.absmax) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        absmax[r] = max(absmax[r], __shfl_xor_sync(FULL, absmax[r], 1));
        absmax[r] = max(absmax[r], __shfl_xor_sync(FULL, absmax[r], 2));
        bool publishes = threadIdx.x % 4 == 0 && token + 8 * r < a.tokens;
        if (publishes) atomicMax(a.absmax + (token + 8 * r) * ABSMAX_STRIDE, absmax[r]);
    }
}

template <int COLUMNS>
__device__ __forceinline__ void gemm_gated(const TensorMap& map, const GemmArgs& a) {
    typedef Gated<COLUMNS> Form;
    const int STAGES = Form::STAGES, STAGE_BYTES = Form::STAGE_BYTES, WARPS = Form::WARPS;
    extern __shared__ u8 dynamic[];
    __shared__ u64 full[STAGES], empty[STAGES];
    // Every warp fetches the scales of a tile for itself.
    __shared__ float2 all_scales[WARPS][COLUMNS];
    u32 stages = (smem_address(dynamic) + 1023) & ~1023u;
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 kb = a.k_blocks, width = a.n / 2, strips = (a.n + TILE_ROWS - 1) / TILE_ROWS,
        tiles = (width + COLUMNS - 1) / COLUMNS;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(smem_address(&full[s]), 1);
            barrier_init(smem_address(&empty[s]), WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    // `use` gets a stage and its barrier when the consumers are through with it, a tile and the block of k.
    auto fill_stages = [&](auto use) {
        u32 done = 0;
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            for (u32 k = 0; k < kb; ++k, ++done) {
                u32 stage = done % STAGES;
                if (done >= STAGES) barrier_wait(smem_address(&empty[stage]), (done / STAGES & 1) ^ 1);
                use(stages + stage * STAGE_BYTES, smem_address(&full[stage]), tile, k);
            }
        }
    };
    if (warp >= WARPS) {
        if (Form::STRIPS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == WARPS * WARP) {
            u64 policy;
            asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
            fill_stages([&](u32 at, u32 barrier, u32 tile, u32 k) {
                u32 to = at + Form::TOKEN_BYTES;
                barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
                for (int ups = 0; ups < 2; ++ups) {
                    // From any eighth of a strip on, and from the next one.
                    for (u32 row = ups * width + tile * COLUMNS, left = COLUMNS; left > 0;) {
                        u32 some = min(left, TILE_ROWS - row % TILE_ROWS);
                        // Past the last strip it is read again; nothing of it is stored.
                        const u8* from =
                            a.weights + ((u64)min(row / TILE_ROWS, strips - 1) * kb + k) * TILE_BYTES;
                        copy_weights(to, from + row % TILE_ROWS * 128, some * 128, barrier, policy);
                        row += some, left -= some, to += some * 128;
                    }
                }
            });
        } else if (threadIdx.x == (WARPS + 1) * WARP) {
            asm volatile("griddepcontrol.wait;" ::: "memory");
            fill_stages([&](u32 at, u32 barrier, u32, u32 k) {
                copy_tokens<1>(at, &map, k * 128, 0, barrier);
            });
        }
    } else {
        if (Form::STRIPS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        asm volatile("griddepcontrol.wait;" ::: "memory");
        // Of the warp's first strip; the next is 64 further.
        const u32 STRIPS = Form::STRIPS;
        u32 token = warp / 4 * (STRIPS * 64) + warp % 4 * 16 + lane / 4;
        float* scales = reinterpret_cast<float*>(all_scales[warp]);
        float xs[STRIPS][2];
#pragma unroll
        for (u32 s = 0; s < STRIPS; ++s) {
#pragma unroll
            for (u32 r = 0; r < 2; ++r) {
                u32 own = token + 64 * s + 8 * r;
                xs[s][r] = own < a.tokens ? a.x_scales[own] : 0.0f;
            }
        }
        auto release = [&](u32 done) {
            if (lane == 0) barrier_arrive(smem_address(&empty[done % STAGES]), 0);
        };
        u32 done = 0;
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            __syncwarp();
            for (u32 i = lane; i < 2 * COLUMNS; i += WARP) {
                u32 column = tile * COLUMNS + i % COLUMNS;
                copy_4(smem_address(scales + i), a.w_scales + i / COLUMNS * width + column, column < width);
            }
            int d[STRIPS][COLUMNS];
#pragma unroll
            for (u32 s = 0; s < STRIPS; ++s) {
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) d[s][i] = 0;
            }
            for (u32 k = 0; k < kb; ++k, ++done) {
                u32 stage = done % STAGES, at = stages + stage * STAGE_BYTES;
                barrier_wait(smem_address(&full[stage]), done / STAGES & 1);
#pragma unroll
                for (u32 s = 0; s < STRIPS; ++s)
                    multiply<INT8, 2 * COLUMNS>(
                        d[s], operand(at + (warp / 4 * STRIPS + s) * TILE_BYTES),
                        operand(at + Form::TOKEN_BYTES), 1
                    );
                finish_mmas<STRIPS>();
                if (k > 0) release(done - 1);
            }
            finish_mmas<0>();
            release(done - 1);
#pragma unroll
            for (u32 s = 0; s < STRIPS; ++s) {
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) pin(d[s][i]);
            }
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncwarp();
#pragma unroll
            for (u32 s = 0; s < STRIPS; ++s)
                store_gated<COLUMNS>(a, d[s], scales, tile, token + 64 * s, xs[s]);
        }
    }
}

// One producer for weights, one for tokens.
#define GATED(columns)                                                                   \
    extern "C" __global__ void __launch_bounds__(Gated<columns>::THREADS_ALL, 1)         \
        gemm_int8_256_##columns##_GATED(GEMM_PARAMETERS) {                               \
        GemmArgs args = GEMM_ARGUMENTS;                                                  \
        gemm_gated<columns>(map, args);                                                  \
    }
