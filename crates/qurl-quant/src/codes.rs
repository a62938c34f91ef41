//! Codes of eight and four bits, defined by what they mean.
//!
//! A code is found by looking for the nearest value in the list of all values; a tie goes to the even code, a
//! number beyond the last value to the last. That is slow and plain on purpose: the kernels compute the same
//! codes with bit tricks, and each is the other's test.

use std::sync::OnceLock;

/// The magnitudes of a small float format in the order of their codes.
pub struct Magnitudes {
    values: Vec<f32>,
    sign: u8,
}

impl Magnitudes {
    fn new(exponent_bits: u32, mantissa_bits: u32, last_code: u32) -> Magnitudes {
        let bias = (1 << (exponent_bits - 1)) - 1;
        let steps = f64::from(1u32 << mantissa_bits);
        let value = |code: u32| {
            let (exponent, mantissa) = (code >> mantissa_bits, f64::from(code % (1 << mantissa_bits)));
            if exponent == 0 {
                mantissa / steps * 2f64.powi(1 - bias)
            } else {
                (1.0 + mantissa / steps) * 2f64.powi(exponent as i32 - bias)
            }
        };
        let values = (0..=last_code).map(|code| value(code) as f32).collect();
        Magnitudes { values, sign: 1 << (exponent_bits + mantissa_bits) }
    }

    /// E4M3 without infinities: 448 is the largest number.
    pub fn e4m3() -> &'static Magnitudes {
        static TABLE: OnceLock<Magnitudes> = OnceLock::new();
        TABLE.get_or_init(|| Magnitudes::new(4, 3, 0x7e))
    }

    /// E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
    pub fn e2m1() -> &'static Magnitudes {
        static TABLE: OnceLock<Magnitudes> = OnceLock::new();
        TABLE.get_or_init(|| Magnitudes::new(2, 1, 7))
    }

    /// The largest number.
    pub fn max(&self) -> f32 {
        *self.values.last().unwrap_or(&0.0)
    }

    /// The nearest code, ties to even, saturating. NaN saturates too: callers check for it.
    pub fn code(&self, x: f32) -> u8 {
        let magnitude = x.abs();
        let above = self.values.partition_point(|&v| v < magnitude);
        let nearest = match (above.checked_sub(1), self.values.get(above)) {
            (None, _) => 0,
            (Some(below), None) => below,
            (Some(below), Some(&upper)) => {
                // Both distances are exact: the values have few bits.
                let down = f64::from(magnitude) - f64::from(self.values[below]);
                let up = f64::from(upper) - f64::from(magnitude);
                if down < up || (down == up && below % 2 == 0) { below } else { above }
            }
        };
        nearest as u8 | if x.is_sign_negative() { self.sign } else { 0 }
    }

    /// The number of a code.
    pub fn value(&self, code: u8) -> f32 {
        let magnitude = self.values[usize::from(code & (self.sign - 1)).min(self.values.len() - 1)];
        if code & self.sign == 0 { magnitude } else { -magnitude }
    }
}

/// The nearest whole number in -max..=max, ties to even.
pub fn integer_code(x: f32, max: i8) -> i8 {
    x.round_ties_even().clamp(-f32::from(max), f32::from(max)) as i8
}

#[cfg(test)]
mod tests {
    use super::*;
    use qurl_kernels::cpu::quant::codec;

    #[test]
    fn lists_of_values() {
        assert_eq!(Magnitudes::e4m3().max(), 448.0);
        assert_eq!(
            (0..8).map(|c| Magnitudes::e2m1().value(c)).collect::<Vec<_>>(),
            [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        );
    }

    /// The kernels' bit tricks give the same codes for every bf16 number and for random f32.
    #[test]
    fn kernels_find_the_same_codes() {
        let every_bf16 = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16));
        let random = (0..200_000u64).map(|i| f32::from_bits(codec::random_bits(3, i) & 0xbfff_ffff));
        let scaled = (0..200_000u64).map(|i| codec::random_bits(4, i) as f32 / 4e6 - 500.0);
        for x in every_bf16.chain(random).chain(scaled).filter(|x| !x.is_nan()) {
            assert_eq!(codec::e4m3_code(x), Magnitudes::e4m3().code(x), "{x:e}");
            assert_eq!(codec::e2m1_code(x), Magnitudes::e2m1().code(x), "{x:e}");
        }
        for code in (0..=0xff).filter(|code| code & 0x7f != 0x7f) {
            assert_eq!(codec::e4m3_value(code).to_bits(), Magnitudes::e4m3().value(code).to_bits());
        }
    }
}
