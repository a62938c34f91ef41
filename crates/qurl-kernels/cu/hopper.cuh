// Instructions of Hopper (sm_90a) that the GEMMs are made of: barriers that count bytes, bulk copies and MMAs
// of a warpgroup.
#pragma once
#include "common.cuh"

const int TILE_BYTES = TILE_ROWS * TILE_DEPTH;

struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Arrives at the barrier of the same address in block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ void copy_weights(u32 to, const u8* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory"
    );
}

template <int CL>
__device__ __forceinline__ void copy_tokens(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    if (CL == 1) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3}], [%4];" ::
                "r"(to),
            "l"(map), "r"(column), "r"(row), "r"(barrier)
            : "memory"
        );
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
            "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
            "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((u16)((1 << CL) - 1))
            : "memory");
    }
}

// Rows of 128 bytes in groups of eight, swizzled over 128 bytes.
__device__ __forceinline__ u64 operand(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

#define TEN(p) "%" p "0, %" p "1, %" p "2, %" p "3, %" p "4, %" p "5, %" p "6, %" p "7, %" p "8, %" p "9"
#define REGS8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGS16 TEN("") ", %10, %11, %12, %13, %14, %15"
#define REGS32 TEN("") ", " TEN("1") ", " TEN("2") ", %30, %31"
#define REGS40 TEN("") ", " TEN("1") ", " TEN("2") ", " TEN("3")
#define REGS48 REGS40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define REGS56 REGS48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define REGS60 REGS40 ", " TEN("4") ", " TEN("5")
#define REGS64 REGS60 ", %60, %61, %62, %63"
#define REGS72 REGS60 ", " TEN("6") ", %70, %71"
#define REGS90 REGS60 ", " TEN("6") ", " TEN("7") ", " TEN("8")
#define REGS96 REGS90 ", %90, %91, %92, %93, %94, %95"
#define REGS128                                                  \
    REGS90 ", " TEN("9") ", " TEN("10") ", " TEN("11")           \
        ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define SUMS8(c, i) SUMS4(c, i), SUMS4(c, i + 4)
#define SUMS16(c, i) SUMS8(c, i), SUMS8(c, i + 8)
#define SUMS32(c, i) SUMS16(c, i), SUMS16(c, i + 16)
#define SUMS40(c, i) SUMS32(c, i), SUMS8(c, i + 32)
#define SUMS48(c, i) SUMS32(c, i), SUMS16(c, i + 32)
#define SUMS56(c, i) SUMS48(c, i), SUMS8(c, i + 48)
#define SUMS64(c, i) SUMS32(c, i), SUMS32(c, i + 32)
#define SUMS72(c, i) SUMS64(c, i), SUMS8(c, i + 64)
#define SUMS96(c, i) SUMS64(c, i), SUMS32(c, i + 64)
#define SUMS128(c, i) SUMS64(c, i), SUMS64(c, i + 64)
#define WGMMA(shape, regs, sums, a, b, go, tail)                                                        \
    asm volatile("{\n.reg .pred go;\nsetp.ne.b32 go, " go ", 0;\n"                                        \
                 "wgmma.mma_async.sync.aligned." shape " {" regs "}, " a ", " b ", go" tail ";\n}\n"      \
                 : sums                                                                                 \
                 : "l"(wa), "l"(xb), "r"(go_on))
#define WGMMA_TOKENS(name, type, c, shape_tail, k, tail)                                                    \
    template <int TOK>                                                                                      \
    __device__ __forceinline__ void name(type(&d)[TOK / 2], u64 wa, u64 xb, int go_on) {                    \
        if constexpr (TOK == 16) WGMMA("m64n16" k shape_tail, REGS8, SUMS8(c, 0), "%8", "%9", "%10", tail); \
        if constexpr (TOK == 32)                                                                            \
            WGMMA("m64n32" k shape_tail, REGS16, SUMS16(c, 0), "%16", "%17", "%18", tail);                  \
        if constexpr (TOK == 64)                                                                            \
            WGMMA("m64n64" k shape_tail, REGS32, SUMS32(c, 0), "%32", "%33", "%34", tail);                  \
        if constexpr (TOK == 80)                                                                            \
            WGMMA("m64n80" k shape_tail, REGS40, SUMS40(c, 0), "%40", "%41", "%42", tail);                  \
        if constexpr (TOK == 96)                                                                            \
            WGMMA("m64n96" k shape_tail, REGS48, SUMS48(c, 0), "%48", "%49", "%50", tail);                  \
        if constexpr (TOK == 112)                                                                           \
            WGMMA("m64n112" k shape_tail, REGS56, SUMS56(c, 0), "%56", "%57", "%58", tail);                 \
        if constexpr (TOK == 128)                                                                           \
            WGMMA("m64n128" k shape_tail, REGS64, SUMS64(c, 0), "%64", "%65", "%66", tail);                 \
        if constexpr (TOK == 144)                                                                           \
            WGMMA("m64n144" k shape_tail, REGS72, SUMS72(c, 0), "%72", "%73", "%74", tail);                 \
        if constexpr (TOK == 192)                                                                           \
            WGMMA("m64n192" k shape_tail, REGS96, SUMS96(c, 0), "%96", "%97", "%98", tail);                 \
        if constexpr (TOK == 256)                                                                           \
            WGMMA("m64n256" k shape_tail, REGS128, SUMS128(c, 0), "%128", "%129", "%130", tail);            \
    }
WGMMA_TOKENS(wgmma_bf16, float, "+f", ".f32.bf16.bf16", "k16", ", 1, 1, 0, 0")
WGMMA_TOKENS(wgmma_int8, int, "+r", ".s32.s8.s8", "k32", "")
WGMMA_TOKENS(wgmma_fp8, float, "+f", ".f32.e4m3.e4m3", "k32", ", 1, 1")
// The same in bf16 with weights in registers: four of each thread, as for mma.sync of its warp's 16 rows.
#define WGMMA_LEFT(shape, regs, sums, a, b, go)                                                             \
    asm volatile("{\n.reg .pred go;\nsetp.ne.b32 go, " go ", 0;\n"                                         \
                 "wgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 {" regs "}, {" a "}, " b             \
                 ", go, 1, 1, 0;\n}\n"                                                                      \
                 : sums                                                                                     \
                 : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(xb), "r"(go_on))
template <int TOK>
__device__ __forceinline__ void wgmma_left(float (&d)[TOK / 2], const u32 (&w)[4], u64 xb, int go_on) {
    if constexpr (TOK == 16)
        WGMMA_LEFT("m64n16k16", REGS8, SUMS8("+f", 0), "%8, %9, %10, %11", "%12", "%13");
    if constexpr (TOK == 64)
        WGMMA_LEFT("m64n64k16", REGS32, SUMS32("+f", 0), "%32, %33, %34, %35", "%36", "%37");
    if constexpr (TOK == 96)
        WGMMA_LEFT("m64n96k16", REGS48, SUMS48("+f", 0), "%48, %49, %50, %51", "%52", "%53");
    if constexpr (TOK == 128)
        WGMMA_LEFT("m64n128k16", REGS64, SUMS64("+f", 0), "%64, %65, %66, %67", "%68", "%69");
}
