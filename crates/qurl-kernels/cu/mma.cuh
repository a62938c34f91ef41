// Tensor-core steps and copies of Ampere and later, for the kernels that run everywhere.
#pragma once

__device__ __forceinline__ u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// d += a . b for 16 x 16 by 16 x 8, bf16 with f32 sums. A lane holds of a: rows lane / 4 + {0, 8}, columns 2
// (lane % 4) + {0, 1, 8, 9}; of b: the same columns as rows, column lane / 4; of d: rows lane / 4 + {0, 8},
// columns 2 (lane % 4) + {0, 1}.
__device__ __forceinline__ void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)
    );
}

// The same in f16.
__device__ __forceinline__ void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)
    );
}

// Four 8 x 8 matrices of 16-bit numbers; lanes 8 i .. 8 i + 7 give the rows of matrix i.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Copies 16 bytes from global to shared memory in the background; zeros if not `valid`.
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_4(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0)
                 : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last LEFT groups of copies have arrived.
template <int LEFT>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Two floats as bf16, the first in the low half.
__device__ __forceinline__ u32 bf16_two(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// Numbers where they are kept (f32) or read by GEMMs (the bits of bf16), one and four.
__device__ __forceinline__ void put(float* to, float x) { *to = x; }
__device__ __forceinline__ void put(u16* to, float x) { *to = bf16_bits(x); }
__device__ __forceinline__ void put(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }
__device__ __forceinline__ void put(u16* to, float4 x) {
    *reinterpret_cast<uint2*>(to) = make_uint2(bf16_two(x.x, x.y), bf16_two(x.z, x.w));
}

// Two floats as f16.
__device__ __forceinline__ u32 f16_two(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// Two signed bytes (in bytes 0 and 2 of a word, 128 too large; bytes 1 and 3 are 0x64) as f16: 0x6400 + x is
// 1024 + x.
__device__ __forceinline__ u32 f16_of_bytes(u32 bytes) {
    u32 r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(bytes), "r"(0x64806480u));
    return r;
}

// Two E4M3 codes (in bytes 1 and 3 of a word) as f16: their fields are those of the number times 2^-8.
__device__ __forceinline__ u32 f16_of_e4m3(u32 bytes) {
    u32 r, fields = (bytes & 0x80008000u) | ((bytes & 0x7f007f00u) >> 1);
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(fields), "r"(0x5c005c00u));
    return r;
}

// silu(gate) * up, fast. Every kernel that computes it uses this, so that fused and separate steps have the
// same bits.
__device__ __forceinline__ float sigmoid_fast(float x) {
    float sigmoid;
    asm("rcp.approx.ftz.f32 %0, %1;"
        : "=f"(sigmoid)
        : "f"(__fadd_rn(1.0f, exp2_fast(__fmul_rn(x, -1.44269504088896340736f)))));
    return sigmoid;
}
__device__ __forceinline__ float silu_times(float gate, float up) {
    return __fmul_rn(__fmul_rn(gate, sigmoid_fast(gate)), up);
}
