//! Attention's sizes, and how its keys and values are stored.

/// The heads of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Dimension of a head, at most [`Heads::MAX_DIM`].
    pub head_dim: usize,
    /// Factor on the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Sliding window: a query sees itself and the `window - 1` positions before it; `None` sees all of them.
    pub window: Option<usize>,
}

impl Heads {
    /// Largest head dimension.
    pub const MAX_DIM: usize = 256;

    /// Query heads that share a key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Columns of the queries, and of attention's output.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Columns of a row of queries, keys and values side by side.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// The first position that a query at `position` sees.
    pub fn first_seen(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

/// Neighbouring query rows of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First row in the batch.
    pub row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Position of the first row in its sequence; all earlier positions are in the pages.
    pub position: usize,
    /// Where the sequence's page numbers begin in the page list.
    pub pages: usize,
}

/// Number format of stored keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// 32-bit floats.
    F32,
    /// bf16.
    Bf16,
    /// 8-bit integers, a scale per token and head.
    Int8,
    /// 8-bit floats (E4M3), a scale per token and head.
    Fp8,
}

impl KvFormat {
    /// All formats, widest first.
    pub const ALL: [KvFormat; 4] = [KvFormat::F32, KvFormat::Bf16, KvFormat::Int8, KvFormat::Fp8];

    /// The name used on the command line and in recipes.
    pub fn name(self) -> &'static str {
        match self {
            KvFormat::F32 => "f32",
            KvFormat::Bf16 => "bf16",
            KvFormat::Int8 => "int8",
            KvFormat::Fp8 => "fp8",
        }
    }
}

/// A name that is not a format of keys and values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown key/value format {found:?}; expected one of \
         {}", KvFormat::ALL.map(KvFormat::name).join(", "))]
pub struct UnknownKvFormat {
    /// The name given.
    pub found: String,
}

impl std::str::FromStr for KvFormat {
    type Err = UnknownKvFormat;

    fn from_str(name: &str) -> Result<Self, UnknownKvFormat> {
        let known = KvFormat::ALL.into_iter().find(|format| format.name() == name);
        known.ok_or_else(|| UnknownKvFormat { found: name.to_string() })
    }
}

/// The pages of one layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Number format.
    pub format: KvFormat,
    /// Number of pages.
    pub pages: usize,
    /// Tokens of a page, a multiple of 16.
    pub page_size: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Dimension of a head.
    pub head_dim: usize,
}
