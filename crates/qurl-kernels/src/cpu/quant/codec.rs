//! Numbers as codes of eight and four bits, one at a time.
//!
//! These are the plain bodies behind the vector conversions of [`Simd`](crate::cpu::simd::Simd), and what
//! stochastic rounding uses. All of them saturate; none has a code for infinities or NaNs, which are
//! refused in weights and travel in the scale of activations.

use crate::Rounding;

/// The largest E4M3 number.
pub const E4M3_MAX: f32 = 448.0;
/// The largest E2M1 number.
pub const E2M1_MAX: f32 = 6.0;

/// The bf16 bits of the sixteen E2M1 codes: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
pub(crate) const E2M1_BF16: [u32; 16] = [
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000,
    0xc040, 0xc080, 0xc0c0,
];

/// The bf16 bits of four-bit integers in two's complement.
pub(crate) const INT4_BF16: [u32; 16] = [
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080,
    0xc040, 0xc000, 0xbf80,
];

/// A small float format: sign, exponent, mantissa, no infinities.
struct Mini {
    mantissa: u32,
    bias: u32,
    sign: u32,
    max: f32,
}

const E4M3: Mini = Mini { mantissa: 3, bias: 7, sign: 0x80, max: E4M3_MAX };
const E2M1: Mini = Mini { mantissa: 1, bias: 1, sign: 0x8, max: E2M1_MAX };

impl Mini {
    /// The code of a number; `random` are 32 random bits for stochastic rounding, `None` rounds to nearest
    /// even.
    #[inline(always)]
    fn code(&self, x: f32, random: Option<u32>) -> u8 {
        let cut = 23 - self.mantissa;
        let magnitude = if x.abs() < self.max { x.abs() } else { self.max };
        let smallest_normal = f32::from_bits((128 - self.bias) << 23);
        let code = if magnitude < smallest_normal {
            // Steps of one unit in the last place of the smallest normal number.
            let steps = magnitude / smallest_normal * (1u32 << self.mantissa) as f32;
            match random {
                None => steps.round_ties_even() as u32,
                Some(random) => (steps + unit(random)).floor() as u32,
            }
        } else {
            let bits = magnitude.to_bits();
            let up = match random {
                None => (1 << (cut - 1)) - 1 + ((bits >> cut) & 1),
                Some(random) => random >> (32 - cut),
            };
            ((bits + up) >> cut) - ((127 - self.bias) << self.mantissa)
        };
        (code | if x.is_sign_negative() { self.sign } else { 0 }) as u8
    }

    #[inline(always)]
    fn value(&self, code: u8) -> f32 {
        let magnitude = u32::from(code) & (self.sign - 1);
        // The fields of the code in those of an f32 are the value times 2^(bias - 127), subnormals included.
        let fields = f32::from_bits(magnitude << (23 - self.mantissa));
        let value = fields * f32::from_bits((254 - self.bias) << 23);
        if u32::from(code) & self.sign == 0 { value } else { -value }
    }
}

/// The nearest E4M3 code, ties to even, saturating at 448.
#[inline(always)]
pub fn e4m3_code(x: f32) -> u8 {
    E4M3.code(x, None)
}

/// The number of an E4M3 code (those that this crate makes: not the two NaNs).
#[inline(always)]
pub fn e4m3_value(code: u8) -> f32 {
    E4M3.value(code)
}

/// GEMMs take E4M3 weights this much too small and activations this much too large (2^56): so the exponent
/// of a normal weight's bf16 is its own exponent beside one set bit, where the true one would need an
/// addition. Both stay far from the ends of bf16, so sums are the same to the last bit.
pub(crate) const E4M3_SHIFT: f32 = f32::from_bits((127 + 56) << 23);

/// Four E4M3 codes, neighbours along k, as the stored word that decoding is quick for: the last two are the
/// upper bytes of its halves, from where one shift brings them into the places of a bf16. The first two are
/// the lower bytes, and upper ones when memory is read from one byte earlier on.
#[inline(always)]
pub(crate) fn e4m3_word(codes: [u8; 4]) -> u32 {
    let [a, b, c, d] = codes;
    u32::from_le_bytes([a, c, b, d])
}

/// The codes of a word of [`e4m3_word`].
#[inline(always)]
pub(crate) fn e4m3_codes(word: u32) -> [u8; 4] {
    let [a, c, b, d] = word.to_le_bytes();
    [a, b, c, d]
}

/// Whether a code is zero or subnormal.
#[inline(always)]
pub(crate) fn e4m3_is_small(code: u8) -> bool {
    code & 0x78 == 0
}

/// The nearest E2M1 code, ties to even, saturating at 6.
#[inline(always)]
pub fn e2m1_code(x: f32) -> u8 {
    E2M1.code(x, None)
}

/// The nearest signed byte, ties to even, saturating, as its bits.
#[inline(always)]
pub fn i8_code(x: f32) -> u8 {
    (x.round_ties_even() as i8).cast_unsigned()
}

/// The kinds of codes that packed weights are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CodeKind {
    Int8,
    E4m3,
    Int4,
    E2m1,
}

impl CodeKind {
    /// The largest number a code stands for; the scale maps the largest weight to it.
    pub fn max(self) -> f32 {
        match self {
            CodeKind::Int8 => 127.0,
            CodeKind::E4m3 => E4M3_MAX,
            CodeKind::Int4 => 7.0,
            CodeKind::E2m1 => E2M1_MAX,
        }
    }

    /// Codes in a packed word of 32 bits.
    pub fn per_word(self) -> usize {
        match self {
            CodeKind::Int8 | CodeKind::E4m3 => 4,
            CodeKind::Int4 | CodeKind::E2m1 => 8,
        }
    }

    /// The code of a scaled weight, in the low bits. `index` counts the weights of the matrix: stochastic
    /// rounding draws by it, so that neither threads nor the order of packing matter.
    #[inline(always)]
    pub fn code(self, x: f32, rounding: Rounding, index: usize) -> u8 {
        let random = match rounding {
            Rounding::Nearest => None,
            Rounding::Stochastic { seed } => Some(random_bits(seed, index as u64)),
        };
        match self {
            CodeKind::E4m3 => E4M3.code(x, random),
            CodeKind::E2m1 => E2M1.code(x, random),
            CodeKind::Int8 | CodeKind::Int4 => {
                let whole = match random {
                    None => x.round_ties_even(),
                    Some(random) => (x + unit(random)).floor(),
                };
                let code = (whole.clamp(-self.max(), self.max()) as i8).cast_unsigned();
                if self == CodeKind::Int4 { code & 15 } else { code }
            }
        }
    }
}

/// A number in [0, 1) from 32 random bits.
#[inline(always)]
fn unit(random: u32) -> f32 {
    (random >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// Random bits that depend on nothing but the seed and a counter.
#[inline(always)]
pub fn random_bits(seed: u64, index: u64) -> u32 {
    let mut x = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ (x >> 31)) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_codes() {
        assert_eq!([0.0, 1.0, -1.0, 448.0, 1e9, 0.015_625].map(e4m3_code), [0, 0x38, 0xb8, 0x7e, 0x7e, 8]);
        assert_eq!(e4m3_code(1.0 / 1024.0), 0, "half a step rounds to even");
        assert_eq!(
            [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 7.0, -6.0].map(e2m1_code),
            [1, 2, 3, 4, 5, 6, 7, 7, 15]
        );
        assert_eq!([0.25, 0.75, 2.5, 5.0].map(e2m1_code), [0, 2, 4, 6], "ties go to the even code");
    }

    #[test]
    fn codes_round_trip() {
        for code in 0..=0xffu8 {
            if code & 0x7f != 0x7f {
                assert_eq!(e4m3_code(e4m3_value(code)), code);
            }
        }
        for code in 0..=0xffu8 {
            let codes = [code, code.wrapping_mul(7), !code, code ^ 0x35];
            assert_eq!(e4m3_codes(e4m3_word(codes)), codes);
        }
        for code in 0..16u8 {
            let value = f32::from_bits(E2M1_BF16[code as usize] << 16);
            assert_eq!((e2m1_code(value), E2M1.value(code)), (code, value));
            let signed = (code << 4).cast_signed() >> 4;
            assert_eq!(f32::from_bits(INT4_BF16[code as usize] << 16), f32::from(signed));
        }
    }

    #[test]
    fn stochastic_rounding_has_the_right_mean() {
        for (kind, x) in
            [(CodeKind::Int8, 3.3f32), (CodeKind::E4m3, 3.3), (CodeKind::E4m3, 0.003), (CodeKind::E2m1, 3.3)]
        {
            let decode = |code: u8| match kind {
                CodeKind::Int8 => f32::from(code.cast_signed()),
                CodeKind::E4m3 => e4m3_value(code),
                _ => E2M1.value(code),
            };
            let rounding = Rounding::Stochastic { seed: 5 };
            let draws = 40_000;
            let mean =
                (0..draws).map(|i| f64::from(decode(kind.code(x, rounding, i)))).sum::<f64>() / draws as f64;
            assert!((mean / f64::from(x) - 1.0).abs() < 0.01, "{kind:?}: {mean}");
        }
    }
}
