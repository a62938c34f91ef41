//! Panels that are stored as codes, back into words of bf16 pairs.
//!
//! A stored word holds four 8-bit or eight 4-bit codes, neighbours along k; it becomes two or four words. All
//! codes are exact in bf16, and so is an E2M1 number times its E4M3 scale (two and four significant bits give
//! at most six), so decoding loses nothing.

use super::Span;
use super::tile::Job;
use crate::cpu::quant::codec::{E2M1_BF16, INT4_BF16};
use crate::cpu::simd::Simd;

/// What the stored words of a right operand are.
#[derive(Clone, Copy)]
pub(crate) enum Codes {
    /// The words themselves.
    Words,
    /// Four E4M3 codes.
    E4m3 {
        /// Whether a vector of words has a zero or a subnormal: `[panel][word][half of the columns]`.
        small: *const u8,
        /// Stored words of a column.
        words: usize,
    },
    /// Eight 4-bit integers.
    Int4,
    /// Eight E2M1 codes; for every sixteen along k there is an E4M3 scale per column, `[panel][k /
    /// 16][column]`.
    Nvfp4 {
        /// The scales.
        scales: *const u8,
        /// Scales of a column.
        groups: usize,
    },
}

/// Values along k that share an E4M3 scale in [`Codes::Nvfp4`].
pub(crate) const NVFP4_GROUP: usize = 16;

impl Codes {
    /// Words that a stored word becomes.
    pub fn per_word(&self) -> usize {
        match self {
            Codes::Words => 1,
            Codes::E4m3 { .. } => 2,
            Codes::Int4 | Codes::Nvfp4 { .. } => 4,
        }
    }

    /// The same codes seen from a later panel.
    ///
    /// # Safety
    /// The panel lies inside the operand.
    pub unsafe fn seen_from(self, panel: usize, width: usize) -> Codes {
        match self {
            Codes::Nvfp4 { scales, groups } => {
                // SAFETY: the caller's promise.
                Codes::Nvfp4 { scales: unsafe { scales.add(panel * groups * width) }, groups }
            }
            Codes::E4m3 { small, words } => {
                // SAFETY: the caller's promise.
                Codes::E4m3 { small: unsafe { small.add(panel * words * 2) }, words }
            }
            same => same,
        }
    }
}

/// Decodes the words `range` of a panel of 4-bit codes into `out[words][2 * LANES]`. The range begins at a
/// multiple of eight words.
///
/// # Safety
/// The range lies inside the panel, and `out` is large enough for it.
#[inline(always)]
pub(super) unsafe fn decode<S: Simd>(job: &Job, panel: usize, range: Span, out: *mut u32) {
    let (l, width) = (S::LANES, 2 * S::LANES);
    // SAFETY: the caller's promise; a stored word of k is `width` words of the panel.
    unsafe {
        match job.codes {
            // Decoded by the tile itself, while it multiplies.
            Codes::Words | Codes::E4m3 { .. } => {}
            Codes::Int4 | Codes::Nvfp4 { .. } => {
                for word in range.clone().step_by(4) {
                    for half in [0, l] {
                        let from = job.stored(panel, word, width).add(half);
                        let to = out.add((word - range.start) * width + half);
                        if let Codes::Nvfp4 { scales, groups } = job.codes {
                            S::decode_nibbles(from, &E2M1_BF16, to, width);
                            let group = 2 * word / NVFP4_GROUP;
                            let scale = S::load_e4m3(scales.add((panel * groups + group) * width + half));
                            for i in 0..4 {
                                S::scale_pairs(to.add(i * width), scale);
                            }
                        } else {
                            S::decode_nibbles(from, &INT4_BF16, to, width);
                        }
                    }
                }
            }
        }
    }
}
