//! The three ways in which words of A and B are multiplied in the register tile.
//!
//! A tile is compiled once for each; what it keeps its sums in, where a sum begins and how it becomes a
//! number is said here.

use super::Mode;
use crate::cpu::simd::Simd;

/// How a packed word of A is multiplied by a vector of packed words of B, and what the sums are kept in.
pub(super) trait Words {
    /// A vector of sums.
    type Acc<S: Simd>: Copy;
    /// Whether B may be stored as codes of these words.
    const CODED: bool;
    /// Whether A may lie as rows: a word is one number.
    const LIE_AS_ROWS: bool;
    unsafe fn zero<S: Simd>() -> Self::Acc<S>;
    unsafe fn load<S: Simd>(from: *const f32) -> Self::Acc<S>;
    unsafe fn store<S: Simd>(to: *mut f32, acc: Self::Acc<S>);
    /// Where the sum over k begins; `c` is the old content.
    unsafe fn begin<S: Simd>(mode: Mode, c: *const f32, n: usize, start: *const i32) -> Self::Acc<S>;
    unsafe fn multiply_add<S: Simd>(acc: Self::Acc<S>, a: u32, b: S::I) -> Self::Acc<S>;
    /// The same with a word of A in memory, for products beside which codes are decoded.
    #[inline(always)]
    unsafe fn multiply_add_at<S: Simd>(acc: Self::Acc<S>, a: *const u32, b: S::I) -> Self::Acc<S> {
        // SAFETY: the caller's promise.
        unsafe { Self::multiply_add::<S>(acc, *a, b) }
    }
    unsafe fn value<S: Simd>(acc: Self::Acc<S>) -> S::V;
}

/// One product of f32.
pub(super) struct F32Words;
/// Two products of bf16.
pub(super) struct Bf16Words;
/// Four products of bytes.
pub(super) struct Int8Words;

/// What both kinds with f32 sums share.
macro_rules! float_sums {
    ($coded:literal) => {
        type Acc<S: Simd> = S::V;
        const CODED: bool = $coded;
        const LIE_AS_ROWS: bool = !$coded;
        #[inline(always)]
        unsafe fn zero<S: Simd>() -> S::V {
            // SAFETY: register operations.
            unsafe { S::splat(0.0) }
        }
        #[inline(always)]
        unsafe fn load<S: Simd>(from: *const f32) -> S::V {
            // SAFETY: the caller's promise.
            unsafe { S::load(from) }
        }
        #[inline(always)]
        unsafe fn store<S: Simd>(to: *mut f32, acc: S::V) {
            // SAFETY: the caller's promise.
            unsafe { S::store(to, acc) }
        }
        #[inline(always)]
        unsafe fn begin<S: Simd>(mode: Mode, c: *const f32, n: usize, _start: *const i32) -> S::V {
            // SAFETY: the caller's promise.
            unsafe { if mode == Mode::Chain { S::load_n(c, n) } else { S::splat(0.0) } }
        }
        #[inline(always)]
        unsafe fn value<S: Simd>(acc: S::V) -> S::V {
            acc
        }
    };
}

impl Words for F32Words {
    float_sums!(false);
    #[inline(always)]
    unsafe fn multiply_add<S: Simd>(acc: S::V, a: u32, b: S::I) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::fma(S::splat(f32::from_bits(a)), S::bits_as_f32(b), acc) }
    }
}

impl Words for Bf16Words {
    float_sums!(true);
    #[inline(always)]
    unsafe fn multiply_add<S: Simd>(acc: S::V, a: u32, b: S::I) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::dot_bf16(acc, a, b) }
    }
    #[inline(always)]
    unsafe fn multiply_add_at<S: Simd>(acc: S::V, a: *const u32, b: S::I) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::dot_bf16_at(acc, a, b) }
    }
}

impl Words for Int8Words {
    type Acc<S: Simd> = S::I;
    const CODED: bool = false;
    const LIE_AS_ROWS: bool = false;
    #[inline(always)]
    unsafe fn zero<S: Simd>() -> S::I {
        // SAFETY: register operations.
        unsafe { S::zero_i() }
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const f32) -> S::I {
        // SAFETY: the caller's promise.
        unsafe { S::load_i(from.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut f32, acc: S::I) {
        // SAFETY: the caller's promise.
        unsafe { S::store_i(to.cast(), acc) }
    }
    #[inline(always)]
    unsafe fn begin<S: Simd>(_mode: Mode, _c: *const f32, _n: usize, start: *const i32) -> S::I {
        // SAFETY: the starts are padded to whole panels.
        unsafe { S::load_i(start) }
    }
    #[inline(always)]
    unsafe fn multiply_add<S: Simd>(acc: S::I, a: u32, b: S::I) -> S::I {
        // SAFETY: the caller's promise.
        unsafe { S::dot_u8i8(acc, a, b) }
    }
    #[inline(always)]
    unsafe fn value<S: Simd>(acc: S::I) -> S::V {
        // SAFETY: register operations.
        unsafe { S::to_f32(acc) }
    }
}
