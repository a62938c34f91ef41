//! Keys and values in eight bits: codes with one scale per token and head.
//!
//! Scales are rounded up to sixteen significant bits, so that the largest code times the scale is exact.
//! Numbers that have been rounded once then get the same scale and codes again: the trainer may round before
//! it stores. int8 are multiplied as integers ([`attention`](crate::cpu::attention)); E4M3 become f32 first.

use crate::cpu::attention::MAX_HEAD_DIM;
use crate::cpu::kv::KEY_BLOCK;
use crate::cpu::quant::codec::CodeKind;
use crate::cpu::quant::{largest_bits, scale_of};
use crate::cpu::simd::{Simd, simd_dispatch};
use std::ptr::null;

/// Bytes of a buffer for the codes of one head.
pub(super) const MAX_CODES: usize = MAX_HEAD_DIM + 16;

/// Bytes after the last code: a vector of values that goes beyond the last row reads them.
pub(super) const TRAIL: usize = 64;

/// Where sixteen tokens lie: codes in words of four and scales.
#[derive(Clone, Copy)]
pub(crate) struct Int8Block {
    /// `[key_dim / 4][16]`
    pub keys: *const i32,
    /// `[16 / 4][head_dim]`
    pub values: *const i32,
    /// One a token.
    pub key_scales: *const f32,
    /// One a token.
    pub value_scales: *const f32,
}

impl Int8Block {
    /// No block.
    pub(crate) const NONE: Int8Block =
        Int8Block { keys: null(), values: null(), key_scales: null(), value_scales: null() };
}

/// The kind of code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    Int8,
    E4m3,
}

simd_dispatch!(
    /// Codes of one head of one token; returns the scale, NaN where a number is not finite.
    pub(super) fn quantize(code: Code, values: &[f32], codes: &mut [u8; MAX_CODES]) -> f32 = quantize_at
);

simd_dispatch!(
    /// Rounds one head of one token to what its codes and scale stand for.
    pub(super) fn round(code: Code, values: &mut [f32]) = round_at
);

#[inline(always)]
unsafe fn quantize_at<S: Simd>(code: Code, values: &[f32], codes: &mut [u8; MAX_CODES]) -> f32 {
    assert!(values.len() <= MAX_HEAD_DIM, "head of {} values", values.len());
    let max = if code == Code::Int8 { CodeKind::Int8.max() } else { CodeKind::E4m3.max() };
    // SAFETY: the buffer holds one vector more than the largest head.
    unsafe {
        let scale = scale_of(largest_bits::<S>(values), max);
        let scale = if scale.is_nan() { scale } else { f32::from_bits((scale.to_bits() + 0xff) & !0xff) };
        let inverse = S::splat(1.0 / scale);
        for i in (0..values.len()).step_by(S::LANES) {
            let v = S::mul(S::load_n(values.as_ptr().add(i), S::LANES.min(values.len() - i)), inverse);
            match code {
                Code::Int8 => S::store_i8(codes.as_mut_ptr().add(i), v),
                Code::E4m3 => S::store_e4m3(codes.as_mut_ptr().add(i), v),
            }
        }
        scale
    }
}

#[inline(always)]
unsafe fn round_at<S: Simd>(code: Code, values: &mut [f32]) {
    let mut codes = [0u8; MAX_CODES];
    // SAFETY: as above; partial vectors are masked.
    unsafe {
        let scale = S::splat(quantize_at::<S>(code, values, &mut codes));
        for i in (0..values.len()).step_by(S::LANES) {
            let from = codes.as_ptr().add(i);
            let v = match code {
                Code::Int8 => S::load_i8(from),
                Code::E4m3 => S::load_e4m3(from),
            };
            S::store_n(values.as_mut_ptr().add(i), S::mul(v, scale), S::LANES.min(values.len() - i));
        }
    }
}

/// An E4M3 key block `[head_dim][16]`, whose tokens have a scale each.
///
/// # Safety
/// `out` holds all; the machine has the instructions of S.
#[inline(always)]
pub(super) unsafe fn keys<S: Simd>(codes: &[u8], scales: &[f32], out: *mut f32) {
    // SAFETY: sixteen tokens are one or two vectors, for codes and scales alike.
    unsafe {
        for token in (0..KEY_BLOCK).step_by(S::LANES) {
            let scale = S::load(scales[token..token + S::LANES].as_ptr());
            for i in (token..codes.len()).step_by(KEY_BLOCK) {
                S::store(out.add(i), S::mul(S::load_e4m3(codes.as_ptr().add(i)), scale));
            }
        }
    }
}

/// E4M3 value rows `[16][head_dim]`, each with a scale.
///
/// # Safety
/// `out` holds all; the machine has the instructions of S.
#[inline(always)]
pub(super) unsafe fn values<S: Simd>(codes: &[u8], scales: &[f32], out: *mut f32) {
    let head_dim = codes.len() / KEY_BLOCK;
    for (row, &scale) in scales.iter().enumerate() {
        let start = row * head_dim;
        // SAFETY: a vector that goes beyond its row is written again by the next one; the last vector of all
        // is kept inside by going through a buffer.
        unsafe {
            let scale = S::splat(scale);
            for i in (start..start + head_dim).step_by(S::LANES) {
                if i + S::LANES <= codes.len() {
                    S::store(out.add(i), S::mul(S::load_e4m3(codes.as_ptr().add(i)), scale));
                } else {
                    let mut last = [0u8; 16];
                    last[..codes.len() - i].copy_from_slice(&codes[i..]);
                    S::store_n(out.add(i), S::mul(S::load_e4m3(last.as_ptr()), scale), codes.len() - i);
                }
            }
        }
    }
}
