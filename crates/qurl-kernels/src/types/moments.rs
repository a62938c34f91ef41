//! How the moments of an optimizer are stored.

/// Numbers of a tensor that share an exponent in [`MomentFormat::EightBit`].
pub const MOMENT_BLOCK: usize = 64;

/// Number format of an optimizer's moments. An update is computed in f32 whatever it is.
///
/// What has fewer bits is rounded up or down, in the mean to the number itself: an update changes a second
/// moment by a thousandth, which rounding to the nearest value would never let through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MomentFormat {
    /// 32-bit floats.
    #[default]
    F32,
    /// bf16.
    Bf16,
    /// 8-bit floats with an exponent for each [`MOMENT_BLOCK`] numbers: the first moment with a sign and
    /// three bits of mantissa, of the second one the root with four.
    EightBit,
}

impl MomentFormat {
    /// All formats, widest first.
    pub const ALL: [MomentFormat; 3] = [MomentFormat::F32, MomentFormat::Bf16, MomentFormat::EightBit];

    /// The name used in recipes.
    pub fn name(self) -> &'static str {
        match self {
            MomentFormat::F32 => "f32",
            MomentFormat::Bf16 => "bf16",
            MomentFormat::EightBit => "8bit",
        }
    }

    /// Bytes of one moment of `len` numbers.
    pub fn bytes(self, len: usize) -> usize {
        match self {
            MomentFormat::F32 => 4 * len,
            MomentFormat::Bf16 => 2 * len,
            MomentFormat::EightBit => len + len.div_ceil(MOMENT_BLOCK),
        }
    }
}

/// An optimizer's moments of a tensor, or of a piece of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MomentShape {
    /// Numbers of the tensor.
    pub len: usize,
    /// Number format.
    pub format: MomentFormat,
    /// Whether they are kept in page-locked memory of the host, which updates read and write over the bus: a
    /// device of little memory holds larger models then. A CPU has one memory.
    pub on_host: bool,
}

/// One moment of a tensor on the host, to the bit as a device has it.
#[derive(Clone, Debug, PartialEq)]
pub enum MomentValues {
    /// [n]
    F32(Vec<f32>),
    /// [n], the bits of bf16.
    Bf16(Vec<u16>),
    /// 8-bit floats.
    EightBit {
        /// [n]
        values: Vec<u8>,
        /// [ceil(n / MOMENT_BLOCK)]
        exponents: Vec<u8>,
    },
}

impl MomentValues {
    /// `len` zeros.
    pub fn zeros(len: usize, format: MomentFormat) -> Self {
        match format {
            MomentFormat::F32 => MomentValues::F32(vec![0.0; len]),
            MomentFormat::Bf16 => MomentValues::Bf16(vec![0; len]),
            MomentFormat::EightBit => MomentValues::EightBit {
                values: vec![0; len],
                exponents: vec![0; len.div_ceil(MOMENT_BLOCK)],
            },
        }
    }

    /// Their format.
    pub fn format(&self) -> MomentFormat {
        match self {
            MomentValues::F32(_) => MomentFormat::F32,
            MomentValues::Bf16(_) => MomentFormat::Bf16,
            MomentValues::EightBit { .. } => MomentFormat::EightBit,
        }
    }

    /// How many numbers there are.
    pub fn len(&self) -> usize {
        match self {
            MomentValues::F32(values) => values.len(),
            MomentValues::Bf16(values) => values.len(),
            MomentValues::EightBit { values, .. } => values.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Both moments of a tensor on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Moments {
    /// Mean of past gradients.
    pub first: MomentValues,
    /// Mean of their squares.
    pub second: MomentValues,
}

impl Moments {
    /// `len` zeros each.
    pub fn zeros(len: usize, format: MomentFormat) -> Self {
        let [first, second] = [(); 2].map(|_| MomentValues::zeros(len, format));
        Moments { first, second }
    }
}
