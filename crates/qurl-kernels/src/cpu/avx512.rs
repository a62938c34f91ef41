//! The AVX-512 level: sixteen f32 in a register; with and without the bf16 and 8-bit dot products.

use super::simd::Simd;
use std::arch::x86_64::*;

/// Sixteen f32 in a 512-bit register; bf16 and 8-bit dot products by widening.
#[derive(Clone, Copy)]
pub struct Avx512;

/// Sixteen f32 in a 512-bit register; bf16 and 8-bit dot products by the instructions made for them.
#[derive(Clone, Copy)]
pub struct Avx512Bf16;

/// 16-bit places 0, 16, 1, 17, ...: two vectors of halves become one of pairs.
static INTERLEAVE: [u16; 32] = {
    let mut order = [0; 32];
    let mut i = 0;
    while i < 16 {
        order[2 * i] = i as u16;
        order[2 * i + 1] = 16 + i as u16;
        i += 1;
    }
    order
};

#[inline(always)]
unsafe fn mask(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

/// The low and the high halves of words of two bf16, as f32.
#[inline(always)]
unsafe fn halves(words: __m512i) -> [__m512; 2] {
    // SAFETY: register operations.
    unsafe {
        let high = _mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)), _mm512_castsi512_ps(high)]
    }
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

/// The smallest normal number of E4M3.
const E4M3_NORMAL: f32 = 1.0 / 64.0;
/// E4M3 codes (nearest, ties to even, saturating at 448) in the lowest bytes; the others are of no use.
#[inline(always)]
unsafe fn e4m3_codes(v: __m512) -> __m512i {
    // SAFETY: register operations.
    unsafe {
        let magnitude = _mm512_min_ps(_mm512_abs_ps(v), _mm512_set1_ps(448.0));
        let bits = _mm512_castps_si512(magnitude);
        // Normal: exponent and mantissa, rebased and rounded. Below 2^-6: the steps that are left over when
        // 2^14 is added, whose neighbours are 2^-9 apart.
        let odd = _mm512_and_si512(_mm512_srli_epi32::<20>(bits), _mm512_set1_epi32(1));
        let rebased = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7_ffff - (120 << 23)));
        let normal = _mm512_srli_epi32::<20>(_mm512_add_epi32(rebased, odd));
        let small = _mm512_castps_si512(_mm512_add_ps(magnitude, _mm512_set1_ps(16384.0)));
        let is_small = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(magnitude, _mm512_set1_ps(E4M3_NORMAL));
        // Only the lowest byte counts, and the bits of 2^14 end in zeros.
        let code = _mm512_mask_blend_epi32(is_small, normal, small);
        let sign = _mm512_srli_epi32::<24>(_mm512_castps_si512(v));
        _mm512_ternarylogic_epi32::<0xf8>(code, sign, _mm512_set1_epi32(0x80))
    }
}

/// Four rows of four 128-bit quarters become four columns.
#[inline(always)]
unsafe fn transpose_quarters([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    // SAFETY: register operations.
    unsafe {
        let (ab_even, ab_odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
        let (cd_even, cd_odd) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
        [
            _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even),
            _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd),
            _mm512_shuffle_i32x4::<0xdd>(ab_even, cd_even),
            _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd),
        ]
    }
}

/// Sixteen rows of sixteen words become sixteen columns.
#[inline(always)]
unsafe fn transpose_words(rows: [__m512i; 16]) -> [__m512i; 16] {
    // SAFETY: register operations.
    unsafe {
        let zero = _mm512_setzero_si512();
        // Squares of four by four words inside the 128-bit lanes ...
        let mut quads = [zero; 16];
        for group in 0..4 {
            let (a, b, c, d) =
                (rows[4 * group], rows[4 * group + 1], rows[4 * group + 2], rows[4 * group + 3]);
            let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            quads[4 * group] = _mm512_unpacklo_epi64(ab_low, cd_low);
            quads[4 * group + 1] = _mm512_unpackhi_epi64(ab_low, cd_low);
            quads[4 * group + 2] = _mm512_unpacklo_epi64(ab_high, cd_high);
            quads[4 * group + 3] = _mm512_unpackhi_epi64(ab_high, cd_high);
        }
        // ... then the lanes themselves.
        let mut columns = [zero; 16];
        for i in 0..4 {
            let transposed = transpose_quarters([quads[i], quads[4 + i], quads[8 + i], quads[12 + i]]);
            for (quarter, column) in transposed.into_iter().enumerate() {
                columns[4 * quarter + i] = column;
            }
        }
        columns
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
        unsafe fn to_f32(v: Self::I) -> Self::V {
            // SAFETY: register operations.
            unsafe { _mm512_cvtepi32_ps(v) }
        }
        #[inline(always)]
        unsafe fn bits_as_f32(v: Self::I) -> Self::V {
            // SAFETY: register operations.
            unsafe { _mm512_castsi512_ps(v) }
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
        unsafe fn load_pairs(p: *const u32) -> [Self::V; 2] {
            // SAFETY: the caller gives LANES readable words.
            unsafe { halves(_mm512_loadu_si512(p.cast())) }
        }
        #[inline(always)]
        unsafe fn load_pairs_n(p: *const u32, n: usize) -> [Self::V; 2] {
            // SAFETY: masked words are not read.
            unsafe { halves(_mm512_maskz_loadu_epi32(mask(n), p.cast())) }
        }
        #[inline(always)]
        unsafe fn widen_i8(bytes: Self::I) -> [Self::I; 2] {
            // SAFETY: register operations.
            unsafe {
                let even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(bytes));
                [even, _mm512_srai_epi16::<8>(bytes)]
            }
        }
        #[inline(always)]
        unsafe fn store_i16(p: *mut i16, v: Self::V) {
            // SAFETY: the caller gives LANES writable numbers.
            unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v))) }
        }
        #[inline(always)]
        unsafe fn abs_max(acc: Self::I, v: Self::V) -> Self::I {
            // SAFETY: register operations.
            unsafe {
                let magnitude = _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(i32::MAX));
                _mm512_max_epi32(acc, magnitude)
            }
        }
        #[inline(always)]
        unsafe fn largest_i(v: Self::I) -> i32 {
            // SAFETY: register operations.
            unsafe { _mm512_reduce_max_epi32(v) }
        }
        #[inline(always)]
        unsafe fn stream_i(p: *mut i32, v: Self::I) {
            // SAFETY: the caller gives LANES writable, aligned values.
            unsafe { _mm512_stream_si512(p.cast(), v) }
        }
        #[inline(always)]
        unsafe fn fence() {
            // SAFETY: no operands.
            unsafe { _mm_sfence() }
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
        #[inline(always)]
        unsafe fn prefetch_for_writing(p: *const u8) {
            // SAFETY: a prefetch never faults.
            unsafe { std::arch::asm!("prefetchw \
                                      [{0}]", in(reg) p, options(nostack, preserves_flags, readonly)) }
        }
        #[inline(always)]
        unsafe fn store_i8(p: *mut u8, v: Self::V) {
            // SAFETY: the caller gives LANES writable bytes.
            unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v))) }
        }
        #[inline(always)]
        unsafe fn store_offset_i8(words: *mut u32, values: *const f32, factor: f32) {
            // SAFETY: the caller gives 64 readable numbers and sixteen writable words.
            unsafe {
                let whole = |part: usize| {
                    let part = _mm512_loadu_ps(values.add(16 * part));
                    _mm512_cvtps_epi32(_mm512_mul_ps(part, _mm512_set1_ps(factor)))
                };
                let halves = [_mm512_packs_epi32(whole(0), whole(1)), _mm512_packs_epi32(whole(2), whole(3))];
                // Each quarter has the same four neighbours of all parts.
                let bytes = _mm512_packs_epi16(halves[0], halves[1]);
                let order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
                let bytes = _mm512_permutexvar_epi32(order, bytes);
                let bytes = _mm512_xor_si512(bytes, _mm512_set1_epi8(i8::MIN));
                _mm512_storeu_si512(words.cast(), bytes);
            }
        }
        #[inline(always)]
        unsafe fn load_i8(p: *const u8) -> Self::V {
            // SAFETY: the caller gives LANES readable bytes.
            unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
        }
        #[inline(always)]
        unsafe fn round_e4m3(v: Self::V) -> Self::V {
            // SAFETY: register operations.
            unsafe {
                // The power of two below v, at least that of the subnormals; 2^20 times it has neighbours as
                // far apart as the E4M3 numbers around v, so adding it rounds. (One and a half times: then v
                // may be negative.)
                let power = _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7f80_0000));
                let power = _mm512_max_epi32(power, _mm512_set1_epi32(E4M3_NORMAL.to_bits() as i32));
                let coarse = _mm512_add_epi32(power, _mm512_set1_epi32(20 << 23 | 1 << 22));
                let coarse = _mm512_castsi512_ps(coarse);
                _mm512_sub_ps(_mm512_add_ps(v, coarse), coarse)
            }
        }
        #[inline(always)]
        unsafe fn store_e4m3(p: *mut u8, v: Self::V) {
            // SAFETY: the caller gives LANES writable bytes.
            unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(e4m3_codes(v))) }
        }
        #[inline(always)]
        unsafe fn byte_columns<const E4M3: bool>(
            rows: *const f32,
            stride: usize,
            factors: &[Self::V; 16],
        ) -> [Self::I; 4] {
            // SAFETY: the caller gives sixteen readable rows.
            unsafe {
                let mut fours = [_mm512_setzero_si512(); 4];
                for (group, four) in fours.iter_mut().enumerate() {
                    let mut codes = [_mm512_setzero_si512(); 4];
                    let rows = rows.add(4 * group * stride);
                    for (i, codes) in codes.iter_mut().enumerate() {
                        let row = _mm512_loadu_ps(rows.add(i * stride));
                        let scaled = _mm512_mul_ps(row, factors[4 * group + i]);
                        *codes = if E4M3 {
                            // The sign of a byte, so that saturation leaves it as it is.
                            _mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(e4m3_codes(scaled)))
                        } else {
                            _mm512_cvtps_epi32(scaled)
                        };
                    }
                    // Each quarter has four neighbours of four rows.
                    let low = _mm512_packs_epi32(codes[0], codes[1]);
                    let high = _mm512_packs_epi32(codes[2], codes[3]);
                    *four = _mm512_packs_epi16(low, high);
                }
                transpose_quarters(fours)
            }
        }
        #[inline(always)]
        unsafe fn load_e4m3(p: *const u8) -> Self::V {
            // SAFETY: the caller gives LANES readable bytes.
            unsafe {
                let code = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
                // The fields of the code in those of an f32 are the value times 2^-120, subnormals included.
                let fields = _mm512_slli_epi32::<20>(_mm512_and_si512(code, _mm512_set1_epi32(0x7f)));
                let power = _mm512_set1_ps(f32::from_bits(247 << 23));
                let value = _mm512_mul_ps(_mm512_castsi512_ps(fields), power);
                let sign = _mm512_slli_epi32::<24>(_mm512_and_si512(code, _mm512_set1_epi32(0x80)));
                _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(value), sign))
            }
        }
        #[inline(always)]
        unsafe fn order_e4m3(codes: Self::I) -> (Self::I, bool) {
            // SAFETY: register operations.
            unsafe {
                let small = _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78)) != 0;
                let order = _mm512_set4_epi32(0x0f0d_0e0c, 0x0b09_0a08, 0x0705_0604, 0x0301_0200);
                (_mm512_shuffle_epi8(codes, order), small)
            }
        }
        #[inline(always)]
        unsafe fn shift_e4m3<const LAST: bool>(codes: *const u32) -> Self::I {
            // SAFETY: the caller gives LANES readable words and a byte before them.
            unsafe {
                // Each half of a word holds one code of either pair. Those of the first pair get into the
                // upper byte by reading one byte earlier: that is free, unlike a shift.
                let from = if LAST { codes.cast::<u8>() } else { codes.cast::<u8>().sub(1) };
                _mm512_srai_epi16::<4>(_mm512_loadu_si512(from.cast()))
            }
        }
        #[inline(always)]
        unsafe fn place_e4m3(shifted: Self::I) -> Self::I {
            // SAFETY: register operations.
            unsafe {
                // The sign and the seven bits of exponent and mantissa lie where those of a bf16 do. 0xea:
                // they, or the set bit of the exponent.
                let places = _mm512_set1_epi16(0x87f0_u16 as i16);
                _mm512_ternarylogic_epi32::<0xea>(shifted, places, _mm512_set1_epi16(0x2000))
            }
        }
        #[inline(always)]
        unsafe fn mend_e4m3(words: Self::I) -> Self::I {
            // SAFETY: register operations; a lookup takes the lowest five bits of its index, here those of
            // the mantissa.
            unsafe {
                let small = _mm_set_epi16(0x2060, 0x2040, 0x2020, 0x2000, 0x1fc0, 0x1f80, 0x1f00, 0);
                let is_small = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x0780));
                let mantissa = _mm512_srli_epi16::<4>(words);
                let magnitude =
                    _mm512_mask_permutexvar_epi16(words, is_small, mantissa, _mm512_castsi128_si512(small));
                // Bit 15 from before, the others from the magnitude.
                _mm512_ternarylogic_epi32::<0xd8>(magnitude, words, _mm512_set1_epi16(i16::MIN))
            }
        }
        #[inline(always)]
        unsafe fn decode_nibbles(codes: *const u32, table: &[u32; 16], out: *mut u32, stride: usize) {
            // SAFETY: the caller gives LANES readable words and four vectors of writable ones.
            unsafe {
                let mut words = _mm512_loadu_si512(codes.cast());
                let table = _mm512_loadu_si512(table.as_ptr().cast());
                for pair in 0..4 {
                    // A lookup takes the lowest four bits of its index.
                    let low = _mm512_permutexvar_epi32(words, table);
                    let high = _mm512_permutexvar_epi32(_mm512_srli_epi32::<4>(words), table);
                    let both = _mm512_or_si512(low, _mm512_slli_epi32::<16>(high));
                    _mm512_storeu_si512(out.add(pair * stride).cast(), both);
                    words = _mm512_srli_epi32::<8>(words);
                }
            }
        }
        #[inline(always)]
        unsafe fn scale_pairs(words: *mut u32, scale: Self::V) {
            // SAFETY: the caller gives LANES words.
            unsafe {
                let pairs = _mm512_loadu_si512(words.cast());
                let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
                let low = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), scale);
                let high = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(pairs, upper)), scale);
                let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(low));
                _mm512_storeu_si512(words.cast(), _mm512_or_si512(low, _mm512_castps_si512(high)));
            }
        }
        #[inline(always)]
        unsafe fn transpose(from: *const u32, from_stride: usize, n: usize, to: *mut u32, to_stride: usize) {
            // SAFETY: the caller gives n readable rows; masked lanes are not written.
            unsafe {
                let mut rows = [_mm512_setzero_si512(); 16];
                for (r, row) in rows.iter_mut().enumerate() {
                    if r < n {
                        *row = _mm512_loadu_si512(from.add(r * from_stride).cast());
                    }
                }
                for (column, v) in transpose_words(rows).into_iter().enumerate() {
                    _mm512_mask_storeu_epi32(to.add(column * to_stride).cast(), mask(n), v);
                }
            }
        }
    };
}

// SAFETY: only entered from functions with avx512f/bw/dq/vl enabled (simd_dispatch), after the level was
// detected.
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
    unsafe fn store_pairs(p: *mut u32, low: Self::V, high: Self::V) {
        // SAFETY: the caller gives LANES writable words.
        unsafe {
            let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(round_bf16_by_hand(low)));
            let pairs = _mm512_or_si512(low, _mm512_castps_si512(round_bf16_by_hand(high)));
            _mm512_storeu_si512(p.cast(), pairs);
        }
    }
    #[inline(always)]
    unsafe fn store_neighbours(p: *mut u32, first: Self::V, second: Self::V) {
        // SAFETY: the caller gives LANES writable words.
        unsafe {
            Self::store_bf16(p.cast(), first);
            Self::store_bf16(p.cast::<u16>().add(16), second);
        }
    }
    #[inline(always)]
    unsafe fn dot_bf16(acc: Self::V, a: u32, b: Self::I) -> Self::V {
        // SAFETY: register operations.
        unsafe {
            let low = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(b));
            let high = _mm512_castsi512_ps(_mm512_and_si512(b, _mm512_set1_epi32(0xffff_0000_u32 as i32)));
            let acc = _mm512_fmadd_ps(_mm512_set1_ps(f32::from_bits(a << 16)), low, acc);
            _mm512_fmadd_ps(_mm512_set1_ps(f32::from_bits(a & 0xffff_0000)), high, acc)
        }
    }
    #[inline(always)]
    unsafe fn dot_u8i8(acc: Self::I, a: u32, b: Self::I) -> Self::I {
        // SAFETY: register operations.
        unsafe {
            // Bytes 0 and 2, then 1 and 3 of every group, as 16-bit numbers.
            let b_even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(b));
            let b_odd = _mm512_srai_epi16::<8>(b);
            let a_even = _mm512_set1_epi32((a & 0x00ff_00ff) as i32);
            let a_odd = _mm512_set1_epi32(((a >> 8) & 0x00ff_00ff) as i32);
            let acc = _mm512_add_epi32(acc, _mm512_madd_epi16(a_even, b_even));
            _mm512_add_epi32(acc, _mm512_madd_epi16(a_odd, b_odd))
        }
    }
    #[inline(always)]
    unsafe fn dot_i16(acc: Self::I, a: u32, b: Self::I) -> Self::I {
        // SAFETY: register operations.
        unsafe { _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_set1_epi32(a as i32), b)) }
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
        // SAFETY: register operations. (The conversion instruction flushes subnormals: rounding by hand keeps
        // them.)
        unsafe { round_bf16_by_hand(v) }
    }
    #[inline(always)]
    unsafe fn store_pairs(p: *mut u32, low: Self::V, high: Self::V) {
        // SAFETY: the caller gives LANES writable words; the casts only rename the bits of a register.
        unsafe {
            // All low halves, then all high halves: interleave them.
            let halves: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
            let order = _mm512_loadu_si512(INTERLEAVE.as_ptr().cast());
            _mm512_storeu_si512(p.cast(), _mm512_permutexvar_epi16(order, halves));
        }
    }
    #[inline(always)]
    unsafe fn store_neighbours(p: *mut u32, first: Self::V, second: Self::V) {
        // SAFETY: the caller gives LANES writable words; the cast renames bits.
        unsafe {
            let words: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(second, first));
            _mm512_storeu_si512(p.cast(), words);
        }
    }
    #[inline(always)]
    unsafe fn dot_bf16(acc: Self::V, a: u32, b: Self::I) -> Self::V {
        // SAFETY: register operations; the casts only rename the bits of a register.
        unsafe {
            let b: __m512bh = std::mem::transmute(b);
            let a: __m512bh = std::mem::transmute(_mm512_set1_epi32(a as i32));
            _mm512_dpbf16_ps(acc, a, b)
        }
    }
    #[inline(always)]
    unsafe fn dot_bf16_at(acc: Self::V, a: *const u32, b: Self::I) -> Self::V {
        // SAFETY: this level has the instruction; the caller gives a readable word.
        unsafe { dot_bf16_of_word(acc, a, b) }
    }
    #[inline(always)]
    unsafe fn dot_u8i8(acc: Self::I, a: u32, b: Self::I) -> Self::I {
        // SAFETY: register operations.
        unsafe { _mm512_dpbusd_epi32(acc, _mm512_set1_epi32(a as i32), b) }
    }
    #[inline(always)]
    unsafe fn dot_i16(acc: Self::I, a: u32, b: Self::I) -> Self::I {
        // SAFETY: register operations.
        unsafe { dot_pairs(acc, _mm512_set1_epi32(a as i32), b) }
    }
}

/// Adds the products of pairs of 16-bit numbers. Written out, because the compiler takes the instruction
/// apart: products first, then an addition, which shortens a chain that is not the limit here.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn dot_pairs(mut acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: one instruction on registers.
    unsafe {
        std::arch::asm!(
            "vpdpwssd {acc}, {a}, {b}",
            acc = inout(zmm_reg) acc, a = in(zmm_reg) a, b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}

/// Adds the products of a pair of bf16 in memory and the pairs of `b`. The pair is an operand of the
/// instruction itself: broadcast to a register first, once for two products, it takes a place in the vector
/// units that decoding needs (on Zen 4 a word of an eight-row tile then takes 17.5 instead of 16 cycles). The
/// compiler would always share the register.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn dot_bf16_of_word(mut acc: __m512, a: *const u32, b: __m512i) -> __m512 {
    // SAFETY: one instruction that reads the word and writes its sum.
    unsafe {
        std::arch::asm!(
            "vdpbf16ps {acc}, {b}, dword ptr [{a}]{{1to16}}",
            acc = inout(zmm_reg) acc, b = in(zmm_reg) b, a = in(reg) a,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    acc
}
