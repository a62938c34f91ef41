// The epilogue of whole tiles in bf16: see gemm_hopper.cuh.
//
// All SMs end a tile at about the same time, and what they then write takes as long as a fifth of the GEMM if
// they wait for it. Here results go to shared memory in the layout of a tensor map, bulk stores take them
// from there in the background, and the MMAs of the next tile begin. A warpgroup has its own half of the
// area, where it stores CHUNK tokens at a time, alternating between two buffers.
#pragma once
#include "gemm_store.cuh"
#include "hopper.cuh"

const int CHUNK = BULK_CHUNK, AREA_BYTES = BULK_KIB * 1024 / 2;

// ---- bulk stores ------------------------------------------------------------------------------------------

// A box of shared memory to a matrix; what lies outside of the matrix is left out.
__device__ __forceinline__ void store_box(const TensorMap* map, int column, int row, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"(column), "r"(row), "r"(from)
                 : "memory");
}

// Adds a box of f32 numbers; one addition per element, so its order cannot vary.
__device__ __forceinline__ void add_box(const TensorMap* map, int column, int row, u32 from) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group "
                 "[%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"(column), "r"(row), "r"(from)
                 : "memory");
}

__device__ __forceinline__ void boxes_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until shared memory is free again that all but the last LEFT groups of boxes lie in.
template <int LEFT>
__device__ __forceinline__ void boxes_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

// What was written to shared memory may be read by bulk stores.
__device__ __forceinline__ void boxes_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Stores four 8 x 8 matrices of 16-bit numbers transposed; lanes 8 i .. 8 i + 7 give the rows of matrix i.
__device__ __forceinline__ void store_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ void store_four(u32 address, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}

__device__ __forceinline__ void store_one(u32 address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

__device__ __forceinline__ void load_four(u32 address, float (&x)[4]) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(address)
                 : "memory");
}

// ---- the epilogue -----------------------------------------------------------------------------------------

// What a thread needs to store tiles. Boxes are CHUNK tokens (CHUNK / 2 of SwiGLU's results) by 128 bytes,
// swizzled: 16 bytes of a token lie at their number XOR the token's, modulo 8.
struct BulkStore {
    const TensorMap *out, *kept;
    u32 areas, next;  // of both warpgroups, and which buffer of each is next

    __device__ BulkStore(const TensorMap* out, const TensorMap* kept, u32 areas)
        : out(out), kept(kept), areas(areas), next(0) {}

    // Where this thread is. It is read wherever it is needed: the sums leave no register to keep it.
    static __device__ __forceinline__ u32 thread() {
        u32 number;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
        return number;
    }
    static __device__ __forceinline__ u32 lane() { return thread() % WARP; }
    static __device__ __forceinline__ u32 part() { return thread() / WARP % 4; }
    static __device__ __forceinline__ u32 group() { return thread() / 128; }
    __device__ __forceinline__ u32 area() const { return areas + group() * AREA_BYTES; }
    // The thread that issues the boxes of a warpgroup.
    static __device__ __forceinline__ bool issues() { return thread() % 128 == 0; }
    static __device__ __forceinline__ void group_sync() {
        asm volatile("bar.sync %0, 128;" ::"r"(5 + group()) : "memory");
    }
    // Waits for the warp of the other group that has the same rows and tokens.
    static __device__ __forceinline__ void pair_sync() {
        asm volatile("bar.sync %0, 64;" ::"r"(1 + part()) : "memory");
    }

    // Until the buffer that is next may be written to.
    __device__ void begin_chunk() {
        if (issues()) boxes_wait<1>();
        group_sync();
    }
    // Until all of it is written.
    __device__ void end_chunk() {
        boxes_fence();
        group_sync();
        next ^= 1;
    }

    // Stores tokens from `chunk` on of the tile at (row, token).
    template <int TOK>
    __device__ __forceinline__ void store(
        const GemmArgs& a, float (&d)[TOK / 2], int chunk, u32 row, u32 token
    ) {
        if (a.gating == GATING_SWIGLU) {
            store_swiglu(a, d + chunk / 2, row, token + chunk);
        } else {
            store_f32(a, d + chunk / 2, row, token + chunk);
        }
    }

    // [64 columns / 32][CHUNK tokens][32 columns].
    __device__ __forceinline__ void store_f32(const GemmArgs& a, const float* d, u32 row, u32 token) {
        u32 lane = this->lane(), part = this->part();
        u32 quad = lane % 4, eighth = lane / 4, own = row + part * 16 + eighth;
        float bias[2] = {0, 0};
        if (a.bias) {
#pragma unroll
            for (int h = 0; h < 2; ++h) bias[h] = own + 8 * h < a.n ? a.bias[own + 8 * h] : 0.0f;
        }
        begin_chunk();
        u32 buffer = area() + next * (AREA_BYTES / 2);
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                u32 place = buffer + part / 2 * (CHUNK * 128) + (quad * 2 + e) * 128 +
                            ((part % 2 * 4 + h * 2 + eighth / 4) ^ (quad * 2 + e)) * 16 + eighth % 4 * 4;
#pragma unroll
                for (int t = 0; t < CHUNK; t += 8) {
                    float x = d[t / 2 + 2 * h + e];
                    store_one(place + t * 128, a.bias ? __fadd_rn(x, bias[h]) : x);
                }
            }
        }
        end_chunk();
        if (issues()) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 from = buffer + half * (CHUNK * 128);
                if (a.add) {
                    add_box(out, row + half * 32, token, from);
                } else {
                    store_box(out, row + half * 32, token, from);
                }
            }
            boxes_commit();
        }
    }

    // 16 rows of EIGHTS eights of tokens to a buffer of [tokens][64 columns in bf16], rounded.
    template <int EIGHTS>
    static __device__ void transpose_bf16(const float* s, u32 buffer) {
        u32 lane = BulkStore::lane(), part = BulkStore::part(), matrix = lane / 8;
        u32 token = matrix / 2 * 8 + lane % 8;
        u32 place = buffer + token * 128 + ((part * 2 + matrix % 2) ^ (lane % 8)) * 16;
#pragma unroll
        for (int e = 0; e < EIGHTS; e += 2) {
            const float *x = s + 4 * e, *y = x + 4;
            store_transposed(
                place + e * 1024, bf16_two(x[0], x[1]), bf16_two(x[2], x[3]), bf16_two(y[0], y[1]),
                bf16_two(y[2], y[3])
            );
        }
    }

    // silu(gate) * up. The first warpgroup has the gate projections, the second the up projections of the
    // same columns; each gives the other what it needs for half of the tokens. The area is: numbers on their
    // way, then two buffers of half a chunk of results and a chunk of projections to keep.
    __device__ __forceinline__ void store_swiglu(const GemmArgs& a, float* d, u32 row, u32 token) {
        const u32 SENT = CHUNK / 2 * 64 * 4, RESULT = CHUNK / 2 * 128, KEPT = CHUNK * 128, HALF = CHUNK / 4;
        static_assert(SENT + 2 * (RESULT + KEPT) <= AREA_BYTES, "the area holds two buffers");
        u32 group = this->group(), area = this->area();
        u32 sent = area + thread() % 128 * 16, column = group == 0 ? row : row - a.n / 2;
        u32 received = sent + (group == 0 ? AREA_BYTES : -AREA_BYTES);
        begin_chunk();
        u32 result = area + SENT + next * (RESULT + KEPT), keep = result + RESULT;
        if (a.kept) transpose_bf16<CHUNK / 8>(d, keep);
        bool gates = group == 0;
#pragma unroll
        for (int i = 0; i < HALF; i += 4) {
            const float *first = d + i, *second = first + HALF;
            store_four(
                sent + i / 4 * (128 * 16), gates ? second[0] : first[0], gates ? second[1] : first[1],
                gates ? second[2] : first[2], gates ? second[3] : first[3]
            );
        }
        pair_sync();
#pragma unroll
        for (int i = 0; i < HALF; i += 4) {
            float other[4];
            load_four(received + i / 4 * (128 * 16), other);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float own = gates ? d[i + e] : d[HALF + i + e];
                d[i + e] = silu_times(gates ? own : other[e], gates ? other[e] : own);
            }
        }
        transpose_bf16<CHUNK / 16>(d, result);
        end_chunk();
        // The other warp may send again.
        pair_sync();
        if (issues()) {
            store_box(out, column, token + group * (CHUNK / 2), result);
            if (a.kept) store_box(kept, row, token, keep);
            boxes_commit();
        }
    }

    // Until shared memory is free of everything that was stored.
    __device__ void finish() const {
        if (issues()) boxes_wait<0>();
    }
};
