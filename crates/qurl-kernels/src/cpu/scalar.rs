//! The scalar level: the [`Simd`] operations in plain Rust, eight lanes as an array.
//!
//! It is the reference for the other levels and the fallback where they are missing. No fused multiply-add:
//! without hardware support that would be a library call per number.

use super::simd::Simd;

/// Eight f32 in an array.
#[derive(Clone, Copy)]
pub struct Scalar;

const N: usize = 8;

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; N] {
    std::array::from_fn(f)
}

#[inline(always)]
pub(crate) fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return ((bits >> 16) | 0x40) as u16;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

#[inline(always)]
pub(crate) fn bf16_value(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

// SAFETY: no special instructions; pointers are used as the trait's contract allows.
unsafe impl Simd for Scalar {
    type V = [f32; N];
    type I = [i32; N];
    const LANES: usize = N;
    const MR: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; N]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: the caller gives LANES readable values.
        unsafe { p.cast::<[f32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: the caller gives LANES writable values.
        unsafe { p.cast::<[f32; N]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_n(p: *const f32, n: usize) -> Self::V {
        // SAFETY: the caller gives n readable values.
        each(|i| if i < n { unsafe { *p.add(i) } } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn store_n(p: *mut f32, v: Self::V, n: usize) {
        for (i, x) in v.iter().enumerate().take(n) {
            // SAFETY: the caller gives n writable values.
            unsafe { *p.add(i) = *x }
        }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn sqrt(a: Self::V) -> Self::V {
        each(|i| a[i].sqrt())
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        each(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn keep_n(v: Self::V, n: usize, fill: f32) -> Self::V {
        each(|i| if i < n { v[i] } else { fill })
    }
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
    }
    #[inline(always)]
    unsafe fn largest(v: Self::V) -> f32 {
        v.iter().fold(f32::NEG_INFINITY, |m, &x| if m > x { m } else { x })
    }
    #[inline(always)]
    unsafe fn round(v: Self::V) -> Self::V {
        each(|i| v[i].round_ties_even())
    }
    #[inline(always)]
    unsafe fn pow2(v: Self::V) -> Self::V {
        each(|i| f32::from_bits(((v[i] as i32 + 127) << 23) as u32))
    }
    #[inline(always)]
    unsafe fn load_pairs(p: *const u32) -> [Self::V; 2] {
        // SAFETY: the caller gives LANES readable words.
        unsafe { Self::load_pairs_n(p, Self::LANES) }
    }
    #[inline(always)]
    unsafe fn load_pairs_n(p: *const u32, n: usize) -> [Self::V; 2] {
        // SAFETY: the caller gives n readable words.
        let words = each(|i| f32::from_bits(if i < n { unsafe { *p.add(i) } } else { 0 })).map(f32::to_bits);
        [words.map(|word| f32::from_bits(word << 16)), words.map(|word| f32::from_bits(word & 0xffff_0000))]
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: Self::V) {
        for (i, x) in v.iter().enumerate() {
            // SAFETY: the caller gives LANES writable values.
            unsafe { *p.add(i) = bf16_bits(*x) }
        }
    }
    #[inline(always)]
    unsafe fn round_bf16(v: Self::V) -> Self::V {
        each(|i| bf16_value(bf16_bits(v[i])))
    }
    #[inline(always)]
    unsafe fn dot_bf16(acc: Self::V, a: u32, b: Self::I) -> Self::V {
        let (a0, a1) = (f32::from_bits(a << 16), f32::from_bits(a & 0xffff_0000));
        each(|i| {
            let pair = b[i] as u32;
            acc[i] + (a0 * f32::from_bits(pair << 16) + a1 * f32::from_bits(pair & 0xffff_0000))
        })
    }
    #[inline(always)]
    unsafe fn store_pairs(p: *mut u32, low: Self::V, high: Self::V) {
        for i in 0..N {
            // SAFETY: the caller gives LANES writable words.
            unsafe { *p.add(i) = bf16_bits(low[i]) as u32 | (bf16_bits(high[i]) as u32) << 16 }
        }
    }
    #[inline(always)]
    unsafe fn store_neighbours(p: *mut u32, first: Self::V, second: Self::V) {
        // SAFETY: the caller gives LANES writable words.
        unsafe {
            Self::store_bf16(p.cast(), first);
            Self::store_bf16(p.cast::<u16>().add(N), second);
        }
    }
    #[inline(always)]
    unsafe fn zero_i() -> Self::I {
        [0; N]
    }
    #[inline(always)]
    unsafe fn dot_u8i8(acc: Self::I, a: u32, b: Self::I) -> Self::I {
        let a = a.to_le_bytes();
        std::array::from_fn(|i| {
            let b = b[i].to_le_bytes();
            (0..4).fold(acc[i], |s, j| s + a[j] as i32 * (b[j] as i8) as i32)
        })
    }
    #[inline(always)]
    unsafe fn dot_i16(acc: Self::I, a: u32, b: Self::I) -> Self::I {
        let halves = |word: u32| [i32::from(word as i16), i32::from((word >> 16) as i16)];
        let [a0, a1] = halves(a);
        std::array::from_fn(|i| {
            let [b0, b1] = halves(b[i] as u32);
            acc[i] + a0 * b0 + a1 * b1
        })
    }
    #[inline(always)]
    unsafe fn widen_i8(bytes: Self::I) -> [Self::I; 2] {
        let pair = |low: u8, high: u8| {
            let wide = |byte: u8| i16::from(byte.cast_signed()) as u16;
            (u32::from(wide(low)) | u32::from(wide(high)) << 16).cast_signed()
        };
        let [mut even, mut odd] = [[0; N]; 2];
        for (i, word) in bytes.iter().enumerate() {
            let [a, b, c, d] = word.to_le_bytes();
            (even[i], odd[i]) = (pair(a, c), pair(b, d));
        }
        [even, odd]
    }
    #[inline(always)]
    unsafe fn load_i(p: *const i32) -> Self::I {
        // SAFETY: the caller gives LANES readable values.
        unsafe { p.cast::<[i32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_i(p: *mut i32, v: Self::I) {
        // SAFETY: the caller gives LANES writable values.
        unsafe { p.cast::<[i32; N]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn to_f32(v: Self::I) -> Self::V {
        each(|i| v[i] as f32)
    }
    #[inline(always)]
    unsafe fn bits_as_f32(v: Self::I) -> Self::V {
        each(|i| f32::from_bits(v[i] as u32))
    }
    #[inline(always)]
    unsafe fn abs_max(acc: Self::I, v: Self::V) -> Self::I {
        std::array::from_fn(|i| acc[i].max(v[i].abs().to_bits() as i32))
    }
    #[inline(always)]
    unsafe fn largest_i(v: Self::I) -> i32 {
        v.iter().fold(i32::MIN, |m, &x| m.max(x))
    }
}
