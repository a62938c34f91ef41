//! Stored numbers to f32 and back, on all threads, checked to be finite on the way.

use half::{bf16, f16};
use rayon::prelude::*;

use crate::config::Dtype;

/// Numbers per task: large enough to hide scheduling, small enough to share one tensor among all threads.
const CHUNK: usize = 1 << 16;

/// The first number that is not finite.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct NotFinite {
    pub index: usize,
    pub value: f32,
}

/// Converts little-endian `bytes` into `out`. `bytes` holds exactly `out.len()` numbers.
pub(super) fn to_f32(bytes: &[u8], dtype: Dtype, out: &mut [f32]) -> Result<(), NotFinite> {
    let size = dtype.bytes();
    let bad = out
        .par_chunks_mut(CHUNK)
        .zip(bytes.par_chunks(CHUNK * size))
        .enumerate()
        .filter_map(|(chunk, (out, bytes))| {
            match dtype {
                Dtype::F32 => fill(out, bytes, f32::from_le_bytes),
                Dtype::Bf16 => fill(out, bytes, |b| bf16::from_le_bytes(b).to_f32()),
                Dtype::F16 => fill(out, bytes, |b| f16::from_le_bytes(b).to_f32()),
            }
            first_bad(out, chunk)
        })
        .min_by_key(|bad| bad.index);
    bad.map_or(Ok(()), Err)
}

/// Quantized values `[rows, columns]` with a scale for each row, as the numbers they stand for.
pub(super) fn quantized_to_f32(
    quantized: &[u8],
    value: fn(u8) -> f32,
    scales: &[f32],
    out: &mut [f32],
) -> Result<(), NotFinite> {
    let columns = (out.len() / scales.len().max(1)).max(1);
    let rows = out.par_chunks_mut(columns).zip(quantized.par_chunks(columns)).zip(scales).enumerate();
    let bad = rows
        .filter_map(|(row, ((out, quantized), &scale))| {
            out.iter_mut().zip(quantized).for_each(|(out, &bits)| *out = value(bits) * scale);
            let index = out.iter().position(|x| !x.is_finite())?;
            Some(NotFinite { index: row * columns + index, value: out[index] })
        })
        .min_by_key(|bad| bad.index);
    bad.map_or(Ok(()), Err)
}

/// Converts `values` to little-endian bytes in `out` (cleared first), rounding to nearest even.
pub(super) fn from_f32(values: &[f32], dtype: Dtype, out: &mut Vec<u8>) -> Result<(), NotFinite> {
    let size = dtype.bytes();
    out.clear();
    out.resize(values.len() * size, 0);
    let bad = out
        .par_chunks_mut(CHUNK * size)
        .zip(values.par_chunks(CHUNK))
        .enumerate()
        .filter_map(|(chunk, (out, values))| match dtype {
            Dtype::F32 => {
                store(out, values, f32::to_le_bytes);
                first_bad(values, chunk)
            }
            Dtype::Bf16 => {
                store(out, values, |v| bf16::from_f32(v).to_le_bytes());
                let overflow = |v: f32| !bf16::from_f32(v).is_finite();
                first_where(values, chunk, overflow)
            }
            Dtype::F16 => {
                store(out, values, |v| f16::from_f32(v).to_le_bytes());
                let overflow = |v: f32| !f16::from_f32(v).is_finite();
                first_where(values, chunk, overflow)
            }
        })
        .min_by_key(|bad| bad.index);
    bad.map_or(Ok(()), Err)
}

fn fill<const N: usize>(out: &mut [f32], bytes: &[u8], convert: impl Fn([u8; N]) -> f32) {
    let (numbers, _) = bytes.as_chunks::<N>();
    for (slot, &number) in out.iter_mut().zip(numbers) {
        *slot = convert(number);
    }
}

fn store<const N: usize>(out: &mut [u8], values: &[f32], convert: impl Fn(f32) -> [u8; N]) {
    let (numbers, _) = out.as_chunks_mut::<N>();
    for (slot, &value) in numbers.iter_mut().zip(values) {
        *slot = convert(value);
    }
}

fn first_bad(values: &[f32], chunk: usize) -> Option<NotFinite> {
    first_where(values, chunk, |v| !v.is_finite())
}

/// Scans without leaving early, which vectorises, and looks for the place only where there is one.
fn first_where(values: &[f32], chunk: usize, bad: impl Fn(f32) -> bool) -> Option<NotFinite> {
    if !values.iter().fold(false, |any, &v| any | bad(v)) {
        return None;
    }
    let at = values.iter().position(|&v| bad(v))?;
    Some(NotFinite { index: chunk * CHUNK + at, value: values[at] })
}
