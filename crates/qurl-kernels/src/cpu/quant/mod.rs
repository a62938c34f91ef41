//! Quantized linear layers: codes of eight or four bits with scales, for the forward pass.
//!
//! Weights are quantized straight into the panels that the GEMM reads ([`pack`]); activations are quantized
//! row by row just before the GEMM ([`left`]). A [`Scheme`] says for each format which codes are used and
//! which numbers share a scale. The GEMM itself is that of [`gemm`](super::gemm): int8 in integers; the
//! others decode panels to bf16 (exactly) in a small buffer and multiply in bf16 with f32 sums.
//!
//! A code is `round(x * (1 / scale))` and a scale `largest |x| / largest code`, everywhere. Numbers whose
//! largest is below [`TINY`] count as zeros with a scale of one. Infinities and NaNs are an error in
//! weights; in activations they make the row's scale, and so its whole result, NaN.

pub mod codec;
mod left;
mod pack;

pub(crate) use left::largest_bits;

use super::Context;
use super::buf::Aligned;
use super::gemm::{Codes, Factors, Kind, LeftParts, NVFP4_GROUP};
use super::source::Piece;
use crate::types::DeviceError;
use crate::{Format, Rounding};
use codec::CodeKind;

/// Numbers that share a scale, along k (and, in squares, across rows).
pub(crate) const BLOCK: usize = 128;
/// 2^-100: below this absmax a channel counts as zero, since the inverse of its scale might not be finite.
pub(crate) const TINY: f32 = f32::from_bits(27 << 23);
/// Words before the first code: decoding reads a byte too early, and a whole cache line keeps the codes
/// aligned.
pub(in crate::cpu) const LEAD: usize = 16;
/// Words after the last code: decoding reads a row too far.
const TRAIL: usize = 32;
/// Longest sums of int8 GEMMs that cannot leave 32 bits.
const INT8_MAX_K: usize = 65_536;

/// Which weights share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Granularity {
    /// Those of one output channel.
    Channel,
    /// [`BLOCK`] neighbours of one output channel.
    Group,
    /// Squares of [`BLOCK`] channels by [`BLOCK`] inputs.
    Square,
    /// [`NVFP4_GROUP`] neighbours share an E4M3 scale, all weights an f32 scale.
    Nvfp4,
}

/// What activations are multiplied as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeftKind {
    /// Unsigned bytes, 128 too large, one scale a row.
    Int8,
    /// E4M3 numbers as bf16, one scale per row and block of k.
    E4m3,
    /// bf16 without scales.
    Bf16,
}

/// How a format turns numbers into codes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scheme {
    pub codes: CodeKind,
    pub granularity: Granularity,
    pub left: LeftKind,
}

impl Scheme {
    /// The scheme of a quantized format.
    pub fn of(format: Format) -> Option<Scheme> {
        let (codes, granularity, left) = match format {
            Format::F32 | Format::Bf16 => return None,
            Format::Int8 => (CodeKind::Int8, Granularity::Channel, LeftKind::Int8),
            Format::Fp8 => (CodeKind::E4m3, Granularity::Channel, LeftKind::E4m3),
            Format::Fp8Block => (CodeKind::E4m3, Granularity::Square, LeftKind::E4m3),
            Format::Int4 => (CodeKind::Int4, Granularity::Group, LeftKind::Bf16),
            Format::Nvfp4 => (CodeKind::E2m1, Granularity::Nvfp4, LeftKind::Bf16),
        };
        Some(Scheme { codes, granularity, left })
    }

    /// Blocks of k with an f32 scale of their own.
    pub fn blocks(self, k: usize) -> usize {
        match self.granularity {
            Granularity::Channel | Granularity::Nvfp4 => 1,
            Granularity::Group | Granularity::Square => k.div_ceil(BLOCK).max(1),
        }
    }
}

/// The scale of numbers whose absmax has these bits; NaN where one of them is not finite.
#[inline(always)]
pub(crate) fn scale_of(largest_bits: i32, max: f32) -> f32 {
    let largest = f32::from_bits(largest_bits as u32);
    if !largest.is_finite() {
        f32::NAN
    } else if largest < TINY {
        1.0
    } else {
        largest / max
    }
}

/// A quantized right operand, packed into panels.
#[derive(Clone, Debug)]
pub struct QuantB {
    pub(in crate::cpu) format: Format,
    pub(in crate::cpu) scheme: Scheme,
    pub(in crate::cpu) n: usize,
    pub(in crate::cpu) k: usize,
    /// Codes `[panel][k / codes of a word][column]` between [`LEAD`] and [`TRAIL`] words that are not used.
    pub(in crate::cpu) words: Aligned<u32>,
    /// `[panel][block of k][column]`.
    pub(in crate::cpu) scales: Aligned<f32>,
    /// Int8: minus 128 times the sum of a column's codes.
    pub(in crate::cpu) starts: Aligned<i32>,
    /// E4M3: whether a vector of words has a zero or a subnormal, `[panel][word][half of the columns]`.
    pub(in crate::cpu) small: Aligned<u8>,
    /// Nvfp4: E4M3 scales `[panel][k / 16][column]`.
    pub(in crate::cpu) group_scales: Aligned<u8>,
}

impl QuantB {
    /// A buffer for weights `[n, k]`.
    pub fn new(ctx: &Context, format: Format, n: usize, k: usize) -> Result<Self, DeviceError> {
        let refuse = |reason: String| Err(DeviceError::Pack { format, reason });
        let Some(scheme) = Scheme::of(format) else {
            return refuse("it has no codes".to_string());
        };
        if n == 0 || k == 0 {
            return refuse(format!("a matrix of {n} by {k} has no weights"));
        }
        if scheme.left == LeftKind::Int8 && k > INT8_MAX_K {
            return refuse(format!("{k} inputs, but 32-bit sums hold at most {INT8_MAX_K}"));
        }
        let lanes = n.div_ceil(ctx.panel()) * ctx.panel();
        let only = |wanted: bool, len: usize| if wanted { len } else { 0 };
        Ok(QuantB {
            format,
            scheme,
            n,
            k,
            words: ctx.weights.zeros(LEAD + lanes * k.div_ceil(scheme.codes.per_word()) + TRAIL)?,
            scales: ctx.weights.zeros(lanes * scheme.blocks(k))?,
            starts: ctx.weights.zeros(only(scheme.left == LeftKind::Int8, lanes))?,
            small: ctx
                .weights
                .zeros(only(scheme.codes == CodeKind::E4m3, 2 * lanes / ctx.panel() * k.div_ceil(4)))?,
            group_scales: ctx
                .weights
                .zeros(only(scheme.codes == CodeKind::E2m1, lanes * k.div_ceil(NVFP4_GROUP)))?,
        })
    }

    /// Quantizes weights `[n, k]` into the panels. After an error the content is of no use.
    pub fn fill(&mut self, ctx: &Context, source: &[f32], rounding: Rounding) -> Result<(), DeviceError> {
        pack::fill(ctx, self, source, rounding, None)
    }

    /// [`QuantB::fill`] that copies the weights while they are at hand.
    pub(crate) fn fill_and_copy(
        &mut self,
        ctx: &Context,
        source: &[f32],
        rounding: Rounding,
        copy: &mut [f32],
    ) -> Result<(), DeviceError> {
        pack::fill(ctx, self, source, rounding, Some(copy))
    }

    /// The number format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Output channels.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes that a GEMM reads: codes and scales.
    pub fn bytes(&self) -> usize {
        4 * (self.words.len() - LEAD - TRAIL + self.scales.len() + self.starts.len())
            + self.small.len()
            + self.group_scales.len()
    }

    /// The code of one weight: the bits of an i8, of E4M3, or four bits.
    pub fn code(&self, ctx: &Context, row: usize, column: usize) -> u8 {
        assert!(row < self.n && column < self.k, "weight ({row}, {column}) of {} by {}", self.n, self.k);
        let (width, per_word) = (ctx.panel(), self.scheme.codes.per_word());
        let stored = self.k.div_ceil(per_word);
        let word = self.words[LEAD + (row / width * stored + column / per_word) * width + row % width];
        if self.scheme.codes == CodeKind::E4m3 {
            return codec::e4m3_codes(word)[column % per_word];
        }
        let bits = 32 / per_word;
        ((word >> (column % per_word * bits)) & ((1 << bits) - 1)) as u8
    }

    /// What the code of one weight is multiplied by.
    pub fn scale(&self, ctx: &Context, row: usize, column: usize) -> f32 {
        assert!(row < self.n && column < self.k, "weight ({row}, {column}) of {} by {}", self.n, self.k);
        let width = ctx.panel();
        let blocks = self.scheme.blocks(self.k);
        let block = if blocks > 1 { column / BLOCK } else { 0 };
        let scale = self.scales[(row / width * blocks + block) * width + row % width];
        if self.group_scales.is_empty() {
            return scale;
        }
        let groups = self.k.div_ceil(NVFP4_GROUP);
        let group = (row / width * groups + column / NVFP4_GROUP) * width + row % width;
        scale * codec::e4m3_value(self.group_scales[group])
    }

    /// The numbers that the codes of one row stand for.
    pub(crate) fn row(&self, ctx: &Context, row: usize, to: &mut [f32]) {
        let (width, per_word) = (ctx.panel(), self.scheme.codes.per_word());
        let panel = LEAD + row / width * self.k.div_ceil(per_word) * width + row % width;
        for (i, to) in to.chunks_mut(per_word).enumerate() {
            let word = self.words[panel + i * width];
            let e4m3 = match self.scheme.codes {
                CodeKind::E4m3 => codec::e4m3_codes(word),
                CodeKind::Int8 | CodeKind::Int4 | CodeKind::E2m1 => [0; 4],
            };
            for (j, to) in to.iter_mut().enumerate() {
                *to = match self.scheme.codes {
                    CodeKind::Int8 => f32::from((word >> (8 * j)) as i8),
                    CodeKind::E4m3 => codec::e4m3_value(e4m3[j]),
                    CodeKind::Int4 => f32::from_bits(codec::INT4_BF16[(word >> (4 * j) & 15) as usize] << 16),
                    CodeKind::E2m1 => f32::from_bits(codec::E2M1_BF16[(word >> (4 * j) & 15) as usize] << 16),
                };
            }
        }
        let shared = match self.scheme.granularity {
            Granularity::Channel => self.k,
            Granularity::Group | Granularity::Square => BLOCK,
            Granularity::Nvfp4 => NVFP4_GROUP,
        };
        for (i, to) in to.chunks_mut(shared).enumerate() {
            let scale = self.scale(ctx, row, i * shared);
            to.iter_mut().for_each(|to| *to *= scale);
        }
    }

    /// Quantizes rows of activations into their columns of a strip.
    pub(crate) fn pack_left(&self, ctx: &Context, left: &LeftParts, piece: Piece) {
        left::pack(ctx, self.scheme.left, self.k, self.scheme.blocks(self.k), left, piece);
    }

    /// Words of a row of activations, as many as the decoded panel has, and scales of a row.
    pub(crate) fn left_words(&self) -> (usize, usize) {
        let stored = self.k.div_ceil(self.scheme.codes.per_word());
        let words = match self.scheme.codes {
            CodeKind::Int8 => stored,
            CodeKind::E4m3 => 2 * stored,
            CodeKind::Int4 | CodeKind::E2m1 => 4 * stored,
        };
        (words, if self.scheme.left == LeftKind::Bf16 { 0 } else { self.scheme.blocks(self.k) })
    }

    /// Panels, stored words of a panel along k, how they multiply, how they are coded, and the scales.
    pub(crate) fn parts(&self, left: &LeftParts) -> (*const u32, usize, Kind, Codes, Factors) {
        let (kind, codes) = match self.scheme.codes {
            CodeKind::Int8 => (Kind::Int8, Codes::Words),
            CodeKind::E4m3 => {
                (Kind::Bf16, Codes::E4m3 { small: self.small.as_ptr(), words: self.k.div_ceil(4) })
            }
            CodeKind::Int4 => (Kind::Bf16, Codes::Int4),
            CodeKind::E2m1 => {
                let scales = self.group_scales.as_ptr();
                (Kind::Bf16, Codes::Nvfp4 { scales, groups: self.k.div_ceil(NVFP4_GROUP) })
            }
        };
        let blocks = self.scheme.blocks(self.k);
        let factors = Factors {
            rows: if self.scheme.left == LeftKind::Bf16 {
                std::ptr::null()
            } else {
                left.scales.first().cast()
            },
            columns: self.scales.as_ptr(),
            start: if self.starts.is_empty() { std::ptr::null() } else { self.starts.as_ptr() },
            blocks,
            block_words: if blocks > 1 { BLOCK / 2 } else { usize::MAX },
        };
        (
            self.words.as_ptr().wrapping_add(LEAD),
            self.k.div_ceil(self.scheme.codes.per_word()),
            kind,
            codes,
            factors,
        )
    }
}
