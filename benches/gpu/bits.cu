// The same sums by `mma.sync` and by `wgmma`: a [n][64][128] times b [n][16][128], a matrix a block.
#include "common.cuh"
#include "hopper.cuh"
#include "mma.cuh"

template <bool F16>
__device__ __forceinline__ void by_mma(const u16* a, const u16* b, float* out) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    a += (u64)blockIdx.x * 64 * 128, b += (u64)blockIdx.x * 16 * 128, out += (u64)blockIdx.x * 64 * 16;
    for (int n = 0; n < 2; ++n) {
        float d[4] = {0, 0, 0, 0};
        for (int k = 0; k < 8; ++k) {
            const u16* row = a + (warp * 16 + lane / 4) * 128 + k * 16 + lane % 4 * 2;
            const u16* column = b + (n * 8 + lane / 4) * 128 + k * 16 + lane % 4 * 2;
            auto pair = [](const u16* at) { return *reinterpret_cast<const u32*>(at); };
            u32 rows[4] = {pair(row), pair(row + 8 * 128), pair(row + 8), pair(row + 8 * 128 + 8)};
            if (F16) {
                mma_f16(d, rows[0], rows[1], rows[2], rows[3], pair(column), pair(column + 8));
            } else {
                mma_bf16(d, rows[0], rows[1], rows[2], rows[3], pair(column), pair(column + 8));
            }
        }
        for (int e = 0; e < 4; ++e)
            out[(warp * 16 + lane / 4 + e / 2 * 8) * 16 + n * 8 + lane % 4 * 2 + e % 2] = d[e];
    }
}

// Rows of 256 bytes as halves of 128, swizzled.
__device__ __forceinline__ void stage(u8* to, const u16* from, int rows) {
    for (int i = threadIdx.x; i < rows * 16; i += blockDim.x) {
        int row = i / 16, chunk = i % 16;
        *reinterpret_cast<uint4*>(to + chunk / 8 * rows * 128 + row * 128 + (chunk % 8 ^ row & 7) * 16) =
            *reinterpret_cast<const uint4*>(from + row * 128 + chunk * 8);
    }
}

template <bool F16>
__device__ __forceinline__ void by_wgmma(const u16* a, const u16* b, float* out) {
    extern __shared__ __align__(1024) u8 smem[];
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    a += (u64)blockIdx.x * 64 * 128, b += (u64)blockIdx.x * 16 * 128, out += (u64)blockIdx.x * 64 * 16;
    u8* columns = smem + 64 * 256;
    stage(smem, a, 64);
    stage(columns, b, 16);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    float d[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int k = 0; k < 8; ++k) {
        u64 wa = operand(smem_address(smem) + k / 4 * 64 * 128 + k % 4 * 32);
        u64 xb = operand(smem_address(columns) + k / 4 * 16 * 128 + k % 4 * 32);
        int go_on = 1;
        if (F16) {
            WGMMA("m64n16k16.f32.f16.f16", REGS8, SUMS8("+f", 0), "%8", "%9", "%10", ", 1, 1, 0, 0");
        } else {
            WGMMA("m64n16k16.f32.bf16.bf16", REGS8, SUMS8("+f", 0), "%8", "%9", "%10", ", 1, 1, 0, 0");
        }
    }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 8; ++i)
        out[(warp * 16 + lane / 4 + i / 2 % 2 * 8) * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}

#define BITS(way, kind, f16)                                                                      \
    extern "C" __global__ void way##_##kind(const u16* a, const u16* b, float* out) {            \
        by_##way<f16>(a, b, out);                                                                \
    }
BITS(mma, bf16, false)
BITS(mma, f16, true)
BITS(wgmma, bf16, false)
BITS(wgmma, f16, true)
