//! The AVX2+FMA level: eight f32 in a register.
//!
//! bf16 and 8-bit dot products are made from what AVX2 has: bf16 pairs are widened to f32 (exact) and fused
//! twice; bytes are widened to 16 bits and multiplied in pairs, which cannot overflow.

use super::simd::Simd;
use std::arch::x86_64::*;

/// Eight f32 in a 256-bit register.
#[derive(Clone, Copy)]
pub struct Avx2;

static KEEP: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

#[inline(always)]
unsafe fn mask(n: usize) -> __m256i {
    // SAFETY: n <= 8, so the eight values lie inside KEEP.
    unsafe { _mm256_loadu_si256(KEEP.as_ptr().add(8 - n).cast()) }
}

// SAFETY: only entered from functions with avx2 and fma enabled (simd_dispatch), after the level was
// detected.
unsafe impl Simd for Avx2 {
    type V = __m256;
    type I = __m256i;
    const LANES: usize = 8;
    const MR: usize = 6;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        // SAFETY: register operations.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: the caller gives LANES readable values.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: the caller gives LANES writable values.
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: register operations.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: register operations.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: register operations.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: register operations.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: register operations.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: register operations.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sqrt(a: Self::V) -> Self::V {
        // SAFETY: register operations.
        unsafe { _mm256_sqrt_ps(a) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: register operations.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn round(v: Self::V) -> Self::V {
        // SAFETY: register operations.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v) }
    }
    #[inline(always)]
    unsafe fn zero_i() -> Self::I {
        // SAFETY: register operations.
        unsafe { _mm256_setzero_si256() }
    }
    #[inline(always)]
    unsafe fn load_i(p: *const i32) -> Self::I {
        // SAFETY: the caller gives LANES readable values.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_i(p: *mut i32, v: Self::I) {
        // SAFETY: the caller gives LANES writable values.
        unsafe { _mm256_storeu_si256(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn to_f32(v: Self::I) -> Self::V {
        // SAFETY: register operations.
        unsafe { _mm256_cvtepi32_ps(v) }
    }
    #[inline(always)]
    unsafe fn bits_as_f32(v: Self::I) -> Self::V {
        // SAFETY: register operations.
        unsafe { _mm256_castsi256_ps(v) }
    }
    #[inline(always)]
    unsafe fn load_n(p: *const f32, n: usize) -> Self::V {
        // SAFETY: masked lanes are not read.
        unsafe { _mm256_maskload_ps(p, mask(n)) }
    }
    #[inline(always)]
    unsafe fn store_n(p: *mut f32, v: Self::V, n: usize) {
        // SAFETY: masked lanes are not written.
        unsafe { _mm256_maskstore_ps(p, mask(n), v) }
    }
    #[inline(always)]
    unsafe fn keep_n(v: Self::V, n: usize, fill: f32) -> Self::V {
        // SAFETY: register operations.
        unsafe { _mm256_blendv_ps(_mm256_set1_ps(fill), v, _mm256_castsi256_ps(mask(n))) }
    }
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        // SAFETY: register operations.
        unsafe {
            let q = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let d = _mm_add_ps(q, _mm_movehl_ps(q, q));
            _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps::<1>(d, d)))
        }
    }
    #[inline(always)]
    unsafe fn largest(v: Self::V) -> f32 {
        // SAFETY: register operations.
        unsafe {
            let q = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let d = _mm_max_ps(q, _mm_movehl_ps(q, q));
            _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps::<1>(d, d)))
        }
    }
    #[inline(always)]
    unsafe fn pow2(v: Self::V) -> Self::V {
        // SAFETY: register operations.
        unsafe {
            let n = _mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(n))
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(p: *const u32) -> [Self::V; 2] {
        // SAFETY: the caller gives LANES readable words.
        unsafe {
            let words = _mm256_loadu_si256(p.cast());
            let high = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)), _mm256_castsi256_ps(high)]
        }
    }
    #[inline(always)]
    unsafe fn load_pairs_n(p: *const u32, n: usize) -> [Self::V; 2] {
        let mut words = [0u32; 8];
        // SAFETY: the caller gives n readable words.
        unsafe {
            std::ptr::copy_nonoverlapping(p, words.as_mut_ptr(), n);
            Self::load_pairs(words.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: Self::V) {
        // SAFETY: the caller gives LANES writable values.
        unsafe {
            let high = _mm256_srli_epi32::<16>(_mm256_castps_si256(Self::round_bf16(v)));
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(high, high));
            _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(packed));
        }
    }
    #[inline(always)]
    unsafe fn round_bf16(v: Self::V) -> Self::V {
        // SAFETY: register operations.
        unsafe {
            let bits = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
            let cut = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(0xffff_0000_u32 as i32)));
            // Rounding up the bits of a NaN could make it an infinity: keep it a NaN.
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(v, v);
            let quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc0_0000));
            _mm256_blendv_ps(cut, quiet, nan)
        }
    }
    #[inline(always)]
    unsafe fn store_pairs(p: *mut u32, low: Self::V, high: Self::V) {
        // SAFETY: the caller gives LANES writable words.
        unsafe {
            let low = _mm256_srli_epi32::<16>(_mm256_castps_si256(Self::round_bf16(low)));
            let pairs = _mm256_or_si256(low, _mm256_castps_si256(Self::round_bf16(high)));
            _mm256_storeu_si256(p.cast(), pairs);
        }
    }
    #[inline(always)]
    unsafe fn store_neighbours(p: *mut u32, first: Self::V, second: Self::V) {
        // SAFETY: the caller gives LANES writable words.
        unsafe {
            Self::store_bf16(p.cast(), first);
            Self::store_bf16(p.cast::<u16>().add(8), second);
        }
    }
    #[inline(always)]
    unsafe fn dot_bf16(acc: Self::V, a: u32, b: Self::I) -> Self::V {
        // SAFETY: register operations.
        unsafe {
            let low = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b));
            let high = _mm256_castsi256_ps(_mm256_and_si256(b, _mm256_set1_epi32(0xffff_0000_u32 as i32)));
            let acc = _mm256_fmadd_ps(_mm256_set1_ps(f32::from_bits(a << 16)), low, acc);
            _mm256_fmadd_ps(_mm256_set1_ps(f32::from_bits(a & 0xffff_0000)), high, acc)
        }
    }
    #[inline(always)]
    unsafe fn dot_u8i8(acc: Self::I, a: u32, b: Self::I) -> Self::I {
        // SAFETY: register operations.
        unsafe {
            // Bytes 0 and 2, then 1 and 3 of every group, as 16-bit numbers.
            let b_even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(b));
            let b_odd = _mm256_srai_epi16::<8>(b);
            let a_even = _mm256_set1_epi32((a & 0x00ff_00ff) as i32);
            let a_odd = _mm256_set1_epi32(((a >> 8) & 0x00ff_00ff) as i32);
            let acc = _mm256_add_epi32(acc, _mm256_madd_epi16(a_even, b_even));
            _mm256_add_epi32(acc, _mm256_madd_epi16(a_odd, b_odd))
        }
    }
    #[inline(always)]
    unsafe fn dot_i16(acc: Self::I, a: u32, b: Self::I) -> Self::I {
        // SAFETY: register operations.
        unsafe { _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_set1_epi32(a as i32), b)) }
    }
    #[inline(always)]
    unsafe fn widen_i8(bytes: Self::I) -> [Self::I; 2] {
        // SAFETY: register operations.
        unsafe {
            let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(bytes));
            [even, _mm256_srai_epi16::<8>(bytes)]
        }
    }
    #[inline(always)]
    unsafe fn store_i16(p: *mut i16, v: Self::V) {
        // SAFETY: the caller gives LANES writable numbers.
        unsafe {
            let whole = _mm256_cvtps_epi32(v);
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packs_epi32(whole, whole));
            _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(packed));
        }
    }
    #[inline(always)]
    unsafe fn abs_max(acc: Self::I, v: Self::V) -> Self::I {
        // SAFETY: register operations.
        unsafe {
            _mm256_max_epi32(acc, _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(i32::MAX)))
        }
    }
    #[inline(always)]
    unsafe fn largest_i(v: Self::I) -> i32 {
        // SAFETY: register operations.
        unsafe {
            let q = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            let d = _mm_max_epi32(q, _mm_shuffle_epi32::<0b1110>(q));
            _mm_cvtsi128_si32(_mm_max_epi32(d, _mm_shuffle_epi32::<1>(d)))
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_close(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}
