//! Moments of the optimizer in fewer bits, and how they are rounded.
//!
//! The 8-bit floats have four bits of exponent below an exponent that their block shares: a power of two, so
//! decoding is exact, and what is decoded is encoded as it was. Second moments are
//! stored as their roots: half the range, and what Adam divides by.
//!
//! Rounding is up or down by a threshold ([`dither`]) that is uniform over the numbers of a tensor and, for
//! each number, evenly spread over the updates (the golden ratio's sequence). Independent random thresholds
//! would have the right mean, too, but second moments forget so slowly that their errors would pile up:
//! simulated over 6,000 updates, the root is off by 12% instead of 11% in 8 bits and by 2.4% instead of 1.3%
//! in bf16; rounding to nearest is off by 25% and 43%.

use super::buf::{Aligned, out_of_memory};
use crate::types::{DeviceError, MOMENT_BLOCK, MomentFormat, MomentValues, Moments};

/// Both moments of a tensor.
pub struct CpuMoments {
    pub(super) first: Stored,
    pub(super) second: Stored,
}

/// One moment of a tensor.
pub(super) enum Stored {
    /// [n]
    F32(Aligned<f32>),
    /// [n], the bits of bf16.
    Bf16(Aligned<u16>),
    /// [n] 8-bit floats and [ceil(n / MOMENT_BLOCK)] exponents.
    EightBit(Aligned<u8>, Aligned<u8>),
}

impl CpuMoments {
    /// `len` zeros each.
    pub(super) fn new(len: usize, format: MomentFormat) -> Result<Self, DeviceError> {
        Ok(CpuMoments { first: Stored::new(len, format)?, second: Stored::new(len, format)? })
    }

    pub(super) fn read(&self) -> Moments {
        Moments { first: self.first.read(), second: self.second.read() }
    }

    pub(super) fn write(&mut self, from: &Moments) -> Result<(), DeviceError> {
        self.first.write(&from.first)?;
        self.second.write(&from.second)
    }
}

impl Stored {
    fn new(len: usize, format: MomentFormat) -> Result<Self, DeviceError> {
        let missing = |bytes: usize| move || out_of_memory(bytes, "moments");
        let bytes = |len: usize| Aligned::try_zeros(len).ok_or_else(missing(len));
        Ok(match format {
            MomentFormat::F32 => Stored::F32(Aligned::try_zeros(len).ok_or_else(missing(4 * len))?),
            MomentFormat::Bf16 => Stored::Bf16(Aligned::try_zeros(len).ok_or_else(missing(2 * len))?),
            MomentFormat::EightBit => Stored::EightBit(bytes(len)?, bytes(len.div_ceil(MOMENT_BLOCK))?),
        })
    }

    fn read(&self) -> MomentValues {
        match self {
            Stored::F32(values) => MomentValues::F32(values.to_vec()),
            Stored::Bf16(values) => MomentValues::Bf16(values.to_vec()),
            Stored::EightBit(values, exponents) => {
                MomentValues::EightBit { values: values.to_vec(), exponents: exponents.to_vec() }
            }
        }
    }

    fn format(&self) -> MomentFormat {
        match self {
            Stored::F32(_) => MomentFormat::F32,
            Stored::Bf16(_) => MomentFormat::Bf16,
            Stored::EightBit(..) => MomentFormat::EightBit,
        }
    }

    fn write(&mut self, from: &MomentValues) -> Result<(), DeviceError> {
        let (found, expected) = (from.format(), self.format());
        match (self, from) {
            (Stored::F32(to), MomentValues::F32(from)) => to.copy_from_slice(from),
            (Stored::Bf16(to), MomentValues::Bf16(from)) => to.copy_from_slice(from),
            (Stored::EightBit(to, to_exponents), MomentValues::EightBit { values, exponents }) => {
                to.copy_from_slice(values);
                to_exponents.copy_from_slice(exponents);
            }
            _ => return Err(DeviceError::Moments { found, expected }),
        }
        Ok(())
    }
}

/// Which moment, for what differs between them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Moment {
    First,
    Second,
}

/// The threshold of a number at an update: it is rounded up where the part that rounding cuts off, times
/// 2^32, is not below 2^32 less this.
pub(super) fn dither(moment: Moment, at: usize, step: u64) -> u32 {
    const GOLDEN: u32 = 0x9e37_79b9;
    let salt = if moment == Moment::First { 0 } else { 0x5851_f42d };
    // The finalizer of MurmurHash3.
    let mut hash = at as u32 ^ salt;
    hash = (hash ^ hash >> 16).wrapping_mul(0x85eb_ca6b);
    hash = (hash ^ hash >> 13).wrapping_mul(0xc2b2_ae35);
    hash ^= hash >> 16;
    hash.wrapping_add((step as u32).wrapping_mul(GOLDEN))
}

/// The bits of a bf16 next to a number that is finite.
pub(super) fn bf16(x: f32, dither: u32) -> u16 {
    (x.to_bits().wrapping_add(dither >> 16) >> 16) as u16
}

/// Below this exponent blocks share it: no scale leaves the range of f32, and what is rounded off is far
/// below Adam's epsilon.
const LOWEST_EXPONENT: u32 = 40;
/// Exponents of a value below that of its block, of which the lowest has the subnormal values.
const EXPONENTS: u32 = 15;

/// The exponent of a block with this largest magnitude; 0 for a block of zeros. What is rounded up to `M`
/// bits of mantissa is a value of the block, too: a moment that grows by less than a step would get stuck
/// below it.
fn exponent_of<const M: u32>(largest: f32) -> u8 {
    let up = (largest.to_bits() + (1 << (23 - M)) - 1) >> 23;
    if largest == 0.0 { 0 } else { up.clamp(LOWEST_EXPONENT, 254) as u8 }
}

/// An 8-bit float next to a magnitude, with `M` bits of mantissa.
fn encode<const M: u32>(magnitude: f32, exponent: u8, dither: u32) -> u8 {
    let (bits, lowest) = (magnitude.to_bits(), u32::from(exponent) - (EXPONENTS - 1));
    let value = if bits >> 23 >= lowest {
        ((bits + (dither >> (9 + M))) >> (23 - M)) - ((lowest - 1) << M)
    } else {
        // In units of the smallest value, with 20 bits below them.
        let units = magnitude * f32::from_bits((254 - lowest + M) << 23);
        ((units * (1 << 20) as f32) as u32 + (dither >> 12)) >> 20
    };
    value.min((16 << M) - 1) as u8
}

/// The magnitude of an 8-bit float with `M` bits of mantissa.
fn decode<const M: u32>(value: u8, exponent: u8) -> f32 {
    let (value, lowest) = (u32::from(value), u32::from(exponent) - (EXPONENTS - 1));
    let (scale, mantissa) = (value >> M, value & ((1 << M) - 1));
    match scale {
        0 => mantissa as f32 * f32::from_bits((lowest - M) << 23),
        _ => f32::from_bits((lowest - 1 + scale) << 23 | mantissa << (23 - M)),
    }
}

/// The numbers of a block.
pub(super) fn decode_block(moment: Moment, values: &[u8], exponent: u8, to: &mut [f32]) {
    if exponent == 0 {
        return to.fill(0.0);
    }
    for (to, &value) in to.iter_mut().zip(values) {
        *to = match moment {
            Moment::First => {
                let magnitude = decode::<3>(value & 0x7f, exponent);
                if value & 0x80 != 0 { -magnitude } else { magnitude }
            }
            Moment::Second => {
                let root = decode::<4>(value, exponent);
                root * root
            }
        }
    }
}

/// A block's values and its exponent; its first number is number `at` of the tensor.
pub(super) fn encode_block(moment: Moment, from: &[f32], at: usize, step: u64, values: &mut [u8]) -> u8 {
    let magnitude = |x: f32| if moment == Moment::First { x.abs() } else { x.sqrt() };
    let largest = from.iter().fold(0.0f32, |most, &x| most.max(magnitude(x)));
    let exponent = match moment {
        Moment::First => exponent_of::<3>(largest),
        Moment::Second => exponent_of::<4>(largest),
    };
    if exponent == 0 {
        values.fill(0);
        return 0;
    }
    for (i, (&x, value)) in from.iter().zip(values).enumerate() {
        let dither = dither(moment, at + i, step);
        *value = match moment {
            Moment::First => encode::<3>(x.abs(), exponent, dither) | (x.to_bits() >> 24 & 0x80) as u8,
            Moment::Second => encode::<4>(x.sqrt(), exponent, dither),
        }
    }
    exponent
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All magnitudes with this many bits of mantissa under an exponent, in order.
    fn grid<const M: u32>(exponent: u8) -> Vec<f32> {
        (0..16u32 << M).map(|value| decode::<M>(value as u8, exponent)).collect()
    }

    fn holds_its_own_values<const M: u32>(exponent: u8) {
        let grid = grid::<M>(exponent);
        assert!(grid.is_sorted_by(|a, b| a < b), "values rise");
        let top = f32::from_bits(u32::from(exponent) << 23);
        assert_eq!(*grid.last().expect("values"), top * (2.0 - 0.5f32.powi(M as i32)));
        for (value, &magnitude) in grid.iter().enumerate() {
            for dither in [0, 1, 0x8000_0000, u32::MAX] {
                assert_eq!(usize::from(encode::<M>(magnitude, exponent, dither)), value);
            }
        }
    }

    #[test]
    fn decoded_values_are_encoded_as_they_were() {
        for exponent in [40, 100, 127, 200, 254] {
            holds_its_own_values::<3>(exponent);
            holds_its_own_values::<4>(exponent);
        }
    }

    #[test]
    fn rounding_goes_to_a_neighbour_and_is_right_in_the_mean() {
        let exponent = 127;
        let grid = grid::<4>(exponent);
        for i in 0..4000u32 {
            let x = (f64::from(i) / 4000.0 * 1.9).powi(6) as f32 / 30.0;
            let above = grid.partition_point(|&value| value <= x).min(grid.len() - 1);
            let (low, high) = (grid[above - 1], grid[above]);
            let updates = 1000;
            let ups = (0..updates)
                .filter(|&step| {
                    let rounded = decode::<4>(
                        encode::<4>(x, exponent, dither(Moment::Second, i as usize, step)),
                        exponent,
                    );
                    assert!(rounded == low || rounded == high, "{x}: {rounded} is not {low} or {high}");
                    rounded == high
                })
                .count();
            let share = f64::from((x - low) / (high - low));
            // The golden ratio's sequence: a few counts off however many updates there are.
            let off = ups as f64 - share * updates as f64;
            assert!(off.abs() <= 4.0, "{x} between {low} and {high}: {ups} of {updates} for {share}");
        }
    }

    #[test]
    fn bf16_goes_to_a_neighbour_and_is_right_in_the_mean() {
        for i in 0..500u32 {
            let x = f32::from_bits(0x3f12_3456 + i * 7919) * if i % 2 == 0 { 1.0 } else { -1.0 };
            let (updates, low) = (1000, x.to_bits() >> 16);
            let ups = (0..updates)
                .filter(|&step| {
                    let rounded = u32::from(bf16(x, dither(Moment::First, i as usize, step)));
                    assert!(rounded == low || rounded == low + 1);
                    rounded != low
                })
                .count();
            let off = ups as f64 - f64::from(x.to_bits() & 0xffff) / 65536.0 * updates as f64;
            assert!(off.abs() <= 4.0, "{x}: {ups}");
        }
    }

    #[test]
    fn blocks_of_tiny_and_huge_numbers() {
        for largest in [0.0, 1e-45, 1e-30, 1e-8, 1.0, 3e38f32] {
            let from: Vec<f32> = (0..MOMENT_BLOCK).map(|i| largest * (i as f32 / 63.0)).collect();
            for moment in [Moment::First, Moment::Second] {
                let (mut values, mut back) = ([0; MOMENT_BLOCK], [0.0; MOMENT_BLOCK]);
                let exponent = encode_block(moment, &from, 0, 1, &mut values);
                decode_block(moment, &values, exponent, &mut back);
                for (from, back) in from.iter().zip(back) {
                    assert!(back.is_finite() && (from - back).abs() <= from / 7.0 + 2e-23, "{from}: {back}");
                }
            }
        }
    }
}
