//! Packed weights as bytes that are the same on every device: what travels to rollout workers.
//!
//! The packed form of a device ([`Device::Weight`](crate::Device::Weight)) suits its GEMMs and is nobody
//! else's business. The canonical form of a matrix `[n, k]` is
//! - its numbers, row by row, in the format's own bits, little-endian: 4, 2 or 1 bytes a number; four-bit
//!   numbers two a byte, the first in the low half, a row of an odd k padded with zero;
//! - then its scales:
//!
//! | format | scales |
//! |---|---|
//! | f32, bf16 | none |
//! | int8, fp8 | one f32 a row |
//! | fp8-block | one f32 for each square of 128 by 128, row by row of squares |
//! | int4 | one f32 for each 128 numbers of a row |
//! | nvfp4 | one E4M3 byte for each 16 numbers of a row, then one f32 |
//!
//! Packing from it ([`Queue::import`](crate::Queue::import)) gives what packing from the f32 weights gave, to
//! the bit, since nothing is rounded on the way.

use crate::types::{DeviceError, Format, WeightShape};

/// Numbers that share a scale in the block formats.
const BLOCK: usize = 128;
/// Numbers that share a scale of nvfp4.
const GROUP: usize = 16;

/// Bytes of the numbers of a row.
pub fn row_bytes(shape: WeightShape) -> usize {
    match shape.format {
        Format::F32 => 4 * shape.k,
        Format::Bf16 => 2 * shape.k,
        Format::Int8 | Format::Fp8 | Format::Fp8Block => shape.k,
        Format::Int4 | Format::Nvfp4 => shape.k.div_ceil(2),
    }
}

/// Bytes of a matrix.
pub fn bytes(shape: WeightShape) -> usize {
    let WeightShape { n, k, format, .. } = shape;
    let scales = match format {
        Format::F32 | Format::Bf16 => 0,
        Format::Int8 | Format::Fp8 => 4 * n,
        Format::Fp8Block => 4 * n.div_ceil(BLOCK) * k.div_ceil(BLOCK),
        Format::Int4 => 4 * n * k.div_ceil(BLOCK),
        Format::Nvfp4 => n * k.div_ceil(GROUP) + 4,
    };
    n * row_bytes(shape) + scales
}

/// An error where bytes are not a matrix of this shape, or the matrix is one that is trained: its packed form
/// has more than the canonical one.
pub(crate) fn check(shape: WeightShape, found: usize) -> Result<(), DeviceError> {
    let (format, expected) = (shape.format, bytes(shape));
    let reason = match () {
        () if shape.trained => "weights that are trained are packed from f32".to_string(),
        () if found != expected => {
            format!("{found} bytes for a matrix of {} by {}; expected {expected}", shape.n, shape.k)
        }
        () => return Ok(()),
    };
    Err(DeviceError::Pack { format, reason })
}
