//! The number formats a linear layer's weights can be packed in.

use std::fmt;
use std::str::FromStr;

/// Number format of the weights of a linear layer, and with it of the GEMM.
///
/// All scales are symmetric and computed from the numbers at hand (no calibration). The formats below bf16
/// are for the forward pass only.
///
/// ```
/// use qurl_kernels::Format;
///
/// assert_eq!("fp8-block".parse(), Ok(Format::Fp8Block));
/// assert!(Format::Int8.is_quantized() && !Format::Bf16.is_quantized());
/// let error = "int3".parse::<Format>().expect_err("not a format").to_string();
/// assert!(error.starts_with("unknown format \"int3\"; expected one of f32, bf16, int8"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// 32-bit floats.
    F32,
    /// bf16 weights and activations, sums in f32.
    Bf16,
    /// 8-bit integers: weights scaled per output channel, activations per token, sums in integers.
    Int8,
    /// 8-bit floats (E4M3): weights scaled per output channel, activations per token, sums in f32.
    Fp8,
    /// 8-bit floats (E4M3): weights scaled in blocks of 128 x 128, activations in blocks of 128, sums in f32.
    Fp8Block,
    /// 4-bit integer weights in groups of 128 along the inputs, bf16 activations.
    Int4,
    /// 4-bit float weights (E2M1) with an E4M3 scale per 16 inputs and one f32 scale, bf16 activations.
    Nvfp4,
}

impl Format {
    /// All formats, widest first.
    pub const ALL: [Format; 7] =
        [Format::F32, Format::Bf16, Format::Int8, Format::Fp8, Format::Fp8Block, Format::Int4, Format::Nvfp4];

    /// The name used on the command line and in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "f32",
            Format::Bf16 => "bf16",
            Format::Int8 => "int8",
            Format::Fp8 => "fp8",
            Format::Fp8Block => "fp8-block",
            Format::Int4 => "int4",
            Format::Nvfp4 => "nvfp4",
        }
    }

    /// Whether weights are quantized values with scales: forward only, and rounded again after every update.
    pub fn is_quantized(self) -> bool {
        !matches!(self, Format::F32 | Format::Bf16)
    }
}

/// Packed weights of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightShape {
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// Number format.
    pub format: Format,
    /// Whether gradients will be computed: keeps what the gradient of the input needs too.
    pub trained: bool,
}

/// How weights are rounded to quantized values. Scales and activations are always rounded to nearest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// To the nearest value, ties to even.
    #[default]
    Nearest,
    /// Up or down with the probability that makes the mean right, sampled by (seed, place in the matrix).
    Stochastic {
        /// Different matrices and steps need different seeds.
        seed: u64,
    },
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A format name that is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown format {found:?}; expected one of {}", known_names())]
pub struct UnknownFormat {
    /// The name given.
    pub found: String,
}

fn known_names() -> String {
    Format::ALL.map(Format::name).join(", ")
}

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        Format::ALL
            .into_iter()
            .find(|f| f.name() == name)
            .ok_or_else(|| UnknownFormat { found: name.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for format in Format::ALL {
            assert_eq!(format.name().parse(), Ok(format));
        }
        let error = "int3".parse::<Format>().expect_err("not a format").to_string();
        assert!(error.contains("\"int3\"") && error.contains("bf16"), "{error}");
    }
}
