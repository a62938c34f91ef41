//! The AVX-512 level: sixteen f32 in a register; with and without the bf16 and 8-bit dot products.

use super::simd::Simd;
use std::arch::x86_64::*;

/// Sixteen f32 in a 512-bit register; bf16 and 8-bit dot products by widening.
#[derive(Clone, Copy)]
pub struct Avx512;

/// Sixteen f32 in a 512-bit register; bf16 and 8-bit dot products by the instructions made for them.
#[derive(Clone, Copy)]
pub struct Avx512Bf16;

#[inline(always)]
unsafe fn mask(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

#[inline(always)]
unsafe fn round_bf16_by_hand(v: __m512) -> __m512 {
    // SAFETY: register operations.
    unsafe {
        let bits = _mm512_castps_si512(v);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        let cut = _mm512_and_si512(up, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        // Rounding up the bits of a NaN could make it an infinity: keep it a NaN.
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        _mm512_castsi512_ps(_mm512_mask_blend_epi32(nan, cut, _mm512_set1_epi32(0x7fc0_0000)))
    }
}

/// The operations that both kinds share.
macro_rules! common_operations {
    () => {
        type V = __m512;
        type I = __m512i;
        const LANES: usize = 16;
        const MR: usize = 12;

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self::V {
            // SAFETY: register operations.
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self::V {
            // SAFETY: the caller gives LANES readable values.
            unsafe { _mm512_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn store(p: *mut f32, v: Self::V) {
            // SAFETY: the caller gives LANES writable values.
            unsafe { _mm512_storeu_ps(p, v) }
        }
        #[inline(always)]
        unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: register operations.
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: register operations.
            unsafe { _mm512_sub_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: register operations.
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: register operations.
            unsafe { _mm512_div_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: register operations.
            unsafe { _mm512_max_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: register operations.
            unsafe { _mm512_min_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn sqrt(a: Self::V) -> Self::V {
            // SAFETY: register operations.
            unsafe { _mm512_sqrt_ps(a) }
        }
        #[inline(always)]
        unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
            // SAFETY: register operations.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn round(v: Self::V) -> Self::V {
            // SAFETY: register operations.
            unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v) }
        }
        #[inline(always)]
        unsafe fn zero_i() -> Self::I {
            // SAFETY: register operations.
            unsafe { _mm512_setzero_si512() }
        }
        #[inline(always)]
        unsafe fn load_i(p: *const i32) -> Self::I {
            // SAFETY: the caller gives LANES readable values.
            unsafe { _mm512_loadu_si512(p.cast()) }
        }
        #[inline(always)]
        unsafe fn store_i(p: *mut i32, v: Self::I) {
            // SAFETY: the caller gives LANES writable values.
            unsafe { _mm512_storeu_si512(p.cast(), v) }
        }
        #[inline(always)]
        unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I {
            // SAFETY: register operations.
            unsafe { _mm512_sub_epi32(a, b) }
        }
        #[inline(always)]
        unsafe fn to_f32(v: Self::I) -> Self::V {
            // SAFETY: register operations.
            unsafe { _mm512_cvtepi32_ps(v) }
        }
        #[inline(always)]
        unsafe fn load_n(p: *const f32, n: usize) -> Self::V {
            // SAFETY: masked lanes are not read.
            unsafe { _mm512_maskz_loadu_ps(mask(n), p) }
        }
        #[inline(always)]
        unsafe fn store_n(p: *mut f32, v: Self::V, n: usize) {
            // SAFETY: masked lanes are not written.
            unsafe { _mm512_mask_storeu_ps(p, mask(n), v) }
        }
        #[inline(always)]
        unsafe fn keep_n(v: Self::V, n: usize, fill: f32) -> Self::V {
            // SAFETY: register operations.
            unsafe { _mm512_mask_blend_ps(mask(n), _mm512_set1_ps(fill), v) }
        }
        #[inline(always)]
        unsafe fn sum(v: Self::V) -> f32 {
            // SAFETY: register operations.
            unsafe { _mm512_reduce_add_ps(v) }
        }
        #[inline(always)]
        unsafe fn largest(v: Self::V) -> f32 {
            // SAFETY: register operations.
            unsafe { _mm512_reduce_max_ps(v) }
        }
        #[inline(always)]
        unsafe fn pow2(v: Self::V) -> Self::V {
            // SAFETY: register operations.
            unsafe {
                let n = _mm512_add_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(127));
                _mm512_castsi512_ps(_mm512_slli_epi32::<23>(n))
            }
        }
        #[inline(always)]
        unsafe fn load_bf16(p: *const u16) -> Self::V {
            // SAFETY: the caller gives LANES readable values.
            unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))) }
        }
    };
}

// SAFETY: only entered from functions with avx512f/bw/dq/vl enabled (simd_dispatch), after the level was detected.
unsafe impl Simd for Avx512 {
    common_operations!();

    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: Self::V) {
        // SAFETY: the caller gives LANES writable values.
        unsafe {
            let high = _mm512_srli_epi32::<16>(_mm512_castps_si512(round_bf16_by_hand(v)));
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(high));
        }
    }
    #[inline(always)]
    unsafe fn round_bf16(v: Self::V) -> Self::V {
        // SAFETY: register operations.
        unsafe { round_bf16_by_hand(v) }
    }
    #[inline(always)]
    unsafe fn dot_bf16(acc: Self::V, a: u32, b: *const u32) -> Self::V {
        // SAFETY: the caller gives LANES readable pairs.
        unsafe {
            let pairs = _mm512_loadu_si512(b.cast());
            let low = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs));
            let high = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32)));
            let acc = _mm512_fmadd_ps(_mm512_set1_ps(f32::from_bits(a << 16)), low, acc);
            _mm512_fmadd_ps(_mm512_set1_ps(f32::from_bits(a & 0xffff_0000)), high, acc)
        }
    }
    #[inline(always)]
    unsafe fn dot_u8i8(acc: Self::I, a: u32, b: *const u32) -> Self::I {
        // SAFETY: the caller gives LANES readable groups of four bytes.
        unsafe {
            let b = _mm512_loadu_si512(b.cast());
            // Bytes 0 and 2, then 1 and 3 of every group, as 16-bit numbers.
            let b_even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(b));
            let b_odd = _mm512_srai_epi16::<8>(b);
            let a_even = _mm512_set1_epi32((a & 0x00ff_00ff) as i32);
            let a_odd = _mm512_set1_epi32(((a >> 8) & 0x00ff_00ff) as i32);
            let acc = _mm512_add_epi32(acc, _mm512_madd_epi16(a_even, b_even));
            _mm512_add_epi32(acc, _mm512_madd_epi16(a_odd, b_odd))
        }
    }
}

// SAFETY: as above, with avx512bf16 and avx512vnni enabled too.
unsafe impl Simd for Avx512Bf16 {
    common_operations!();

    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: Self::V) {
        // SAFETY: the caller gives LANES writable values.
        unsafe {
            let high = _mm512_srli_epi32::<16>(_mm512_castps_si512(round_bf16_by_hand(v)));
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(high));
        }
    }
    #[inline(always)]
    unsafe fn round_bf16(v: Self::V) -> Self::V {
        // SAFETY: register operations. (The conversion instruction flushes subnormals: rounding by hand keeps them.)
        unsafe { round_bf16_by_hand(v) }
    }
    #[inline(always)]
    unsafe fn dot_bf16(acc: Self::V, a: u32, b: *const u32) -> Self::V {
        // SAFETY: the caller gives LANES readable pairs; the casts only rename the bits of a register.
        unsafe {
            let pairs: __m512bh = std::mem::transmute(_mm512_loadu_si512(b.cast()));
            let a: __m512bh = std::mem::transmute(_mm512_set1_epi32(a as i32));
            _mm512_dpbf16_ps(acc, a, pairs)
        }
    }
    #[inline(always)]
    unsafe fn dot_u8i8(acc: Self::I, a: u32, b: *const u32) -> Self::I {
        // SAFETY: the caller gives LANES readable groups of four bytes.
        unsafe { _mm512_dpbusd_epi32(acc, _mm512_set1_epi32(a as i32), _mm512_loadu_si512(b.cast())) }
    }
}
