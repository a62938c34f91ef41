//! The number formats a linear layer's weights can be packed in.

use std::fmt;
use std::str::FromStr;

/// Number format of the weights of a linear layer, and with it of the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// 32-bit floats.
    F32,
    /// bf16 weights and activations, sums in f32.
    Bf16,
}

impl Format {
    /// All formats, widest first.
    pub const ALL: [Format; 2] = [Format::F32, Format::Bf16];

    /// The name used on the command line and in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "f32",
            Format::Bf16 => "bf16",
        }
    }
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
        Format::ALL.into_iter().find(|f| f.name() == name).ok_or_else(|| UnknownFormat { found: name.to_string() })
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
