//! The rows of a pass on the device: one area of memory with all of them, and the shape that kernels are
//! chosen by.
//!
//! Where a part of the rows lies depends on the shape alone, and so does every choice of kernels. So a
//! recorded step ([`super::replay`]) is right for every batch of its shape.

use super::constants::{FLASH_TILE, SPLIT_TILES};
use super::context::ALIGN;
use super::ffi::DevicePtr;
use super::memory::{Buffer, Plain};
use super::queue::CudaQueue;
use crate::types::{Batch, Bias, SampleRow, Span, Token};
use std::sync::atomic::{AtomicU64, Ordering};

/// Positions of a split: contexts are rounded up to whole tiles, as far as there is one split of them, and to
/// powers of two of it beyond.
pub(super) const SPLIT: usize = SPLIT_TILES * FLASH_TILE;

/// What may tell the steps of two batches apart: the only thing that kernels are chosen by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct BatchShape {
    /// Where the area is.
    area: DevicePtr,
    pub rows: usize,
    pub sequences: usize,
    /// Positions of the longest sequence, new rows included, rounded up.
    pub longest: usize,
    /// Whether each sequence has one row.
    pub single: bool,
    /// Rows whose next token is sampled, and those of them that keep only some tokens.
    pub sampled: usize,
    pub truncated: usize,
    /// Places for biases: a power of two, so that steps with a few more or less are of one shape.
    pub biases: usize,
}

/// Where the parts of an area begin, in bytes. Page numbers come last: sequences grow, and nothing else
/// moves.
struct Layout {
    tokens: usize,
    positions: usize,
    slots: usize,
    spans: usize,
    sampled_rows: usize,
    samples: usize,
    factors: usize,
    truncated: usize,
    biases: usize,
    pages: usize,
}

impl BatchShape {
    fn layout(&self) -> Layout {
        let mut bytes = 0;
        let mut part = |count: usize, size: usize| {
            let at = bytes;
            bytes = (at + count * size).next_multiple_of(ALIGN);
            at
        };
        Layout {
            tokens: part(self.rows, size_of::<[u32; 2]>()),
            positions: part(self.rows, size_of::<u32>()),
            slots: part(self.rows, size_of::<u32>()),
            spans: part(self.sequences, size_of::<[u32; 4]>()),
            sampled_rows: part(self.sampled, size_of::<u32>()),
            samples: part(self.sampled, size_of::<SampleWords>()),
            factors: part(self.sampled, size_of::<f32>()),
            truncated: part(self.truncated, size_of::<u32>()),
            biases: part(self.biases, size_of::<BiasWords>()),
            pages: bytes,
        }
    }
}

/// Contexts of one rounded length go through the same kernels: the same tiles of a single split, or as many
/// splits.
fn rounded(longest: usize) -> usize {
    match longest {
        0..=SPLIT => longest.next_multiple_of(FLASH_TILE),
        _ => SPLIT * longest.div_ceil(SPLIT).next_power_of_two(),
    }
}

/// [`SampleRow`] as the kernels read it.
#[repr(C)]
#[derive(Clone, Copy)]
struct SampleWords {
    temperature: f32,
    top_p: f32,
    top_k: u32,
    min_p: f32,
    uniform: f64,
}

// SAFETY: numbers of 4 and 8 bytes, each at a multiple of its size, 24 bytes together.
unsafe impl Plain for SampleWords {}

/// [`Bias`] as the kernels read it.
#[repr(C)]
#[derive(Clone, Copy)]
struct BiasWords {
    row: u32,
    token: u32,
    add: f32,
}

// SAFETY: three numbers of 4 bytes.
unsafe impl Plain for BiasWords {}

/// The largest numbers of a batch, which the buffers of a step must have place for; one more than each, 0 for
/// none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Bounds {
    pub token: usize,
    /// Rows of sampled tokens that are named.
    pub sampled: usize,
    pub position: usize,
    pub slot: usize,
    pub page: usize,
}

/// Rows of a pass on the device.
#[derive(Default)]
pub struct CudaBatch {
    area: Option<Buffer>,
    pub(super) shape: BatchShape,
    pub(super) bounds: Bounds,
    /// Which load this is.
    pub(super) generation: u64,
    /// Sorted by row, as on the device.
    pub(super) spans: Vec<Span>,
    /// Whether the spans are whole sequences side by side, or rows of them.
    pub(super) covers: bool,
    pages: usize,
    pub(super) tokens: Vec<Token>,
    pub(super) sampled_rows: Vec<u32>,
}

/// Addresses of the parts.
impl CudaBatch {
    /// Pairs of kind (0 a token, 1 a row of sampled tokens) and number.
    pub(super) fn token_words(&self) -> DevicePtr {
        self.shape.area + self.shape.layout().tokens as u64
    }

    pub(super) fn positions(&self) -> DevicePtr {
        self.shape.area + self.shape.layout().positions as u64
    }

    pub(super) fn slots(&self) -> DevicePtr {
        self.shape.area + self.shape.layout().slots as u64
    }

    /// Row, rows, position, first page of each sequence, sorted by row.
    pub(super) fn span_words(&self) -> DevicePtr {
        self.shape.area + self.shape.layout().spans as u64
    }

    pub(super) fn pages(&self) -> DevicePtr {
        self.shape.area + self.shape.layout().pages as u64
    }

    pub(super) fn sampled(&self) -> DevicePtr {
        self.shape.area + self.shape.layout().sampled_rows as u64
    }

    /// [`SampleWords`] from a sampled row on.
    pub(super) fn samples(&self, first: usize) -> DevicePtr {
        self.shape.area + (self.shape.layout().samples + first * size_of::<SampleWords>()) as u64
    }

    /// Inverse temperatures from a sampled row on.
    pub(super) fn factors(&self, first: usize) -> DevicePtr {
        self.shape.area + (self.shape.layout().factors + first * size_of::<f32>()) as u64
    }

    /// Sampled rows that keep only some tokens, from the `first` of them on.
    pub(super) fn truncated(&self, first: usize) -> DevicePtr {
        self.shape.area + (self.shape.layout().truncated + first * size_of::<u32>()) as u64
    }

    /// [`BiasWords`], those that only fill their places included.
    pub(super) fn biases(&self) -> DevicePtr {
        self.shape.area + self.shape.layout().biases as u64
    }

    /// Whether all pages of its sequences are in the list, with pages of so many tokens.
    pub(super) fn has_pages(&self, page_size: usize) -> bool {
        let last = |span: &Span| span.pages + (span.position + span.rows).div_ceil(page_size);
        self.spans.iter().all(|span| last(span) <= self.pages)
    }
}

/// Numbers the loads of all queues: a batch may be loaded by one and used by another.
static GENERATIONS: AtomicU64 = AtomicU64::new(1);

/// [`crate::Queue::load`]
pub(super) fn load(queue: &mut CudaQueue, to: &mut CudaBatch, from: &Batch) {
    let Batch { tokens, positions, slots, spans, pages, sampled_rows, samples, biases } = from;
    let rows = tokens.len();
    assert!(positions.len() == rows && slots.len() == rows, "batch: one token, position and slot a row");
    assert!(sampled_rows.len() == samples.len(), "batch: one sample for each sampled row");
    assert!(sampled_rows.iter().all(|&row| (row as usize) < rows), "batch: sampled rows");
    Bias::check(biases, samples.len());
    to.spans.clone_from(spans);
    to.spans.sort_by_key(|span| span.row);
    to.tokens.clone_from(tokens);
    to.sampled_rows.clone_from(sampled_rows);
    to.pages = pages.len();
    let mut next = 0;
    to.covers = to.spans.iter().all(|span| std::mem::replace(&mut next, span.row + span.rows) == span.row);
    to.covers &= next == rows;
    assert!(to.spans.iter().all(|span| span.row + span.rows <= rows), "batch: rows of sequences");
    to.bounds = bounds(from);
    let truncated = samples.iter().filter(|sample| sample.truncates()).count();
    let longest = spans.iter().map(|span| span.position + span.rows).max().unwrap_or(0);
    let mut shape = BatchShape {
        area: 0,
        rows,
        sequences: spans.len(),
        longest: rounded(longest),
        single: spans.iter().all(|span| span.rows == 1),
        sampled: samples.len(),
        truncated,
        biases: if biases.is_empty() { 0 } else { biases.len().next_power_of_two() },
    };
    let layout = shape.layout();
    let bytes = layout.pages + size_of_val(&pages[..]);
    shape.area = queue.area(&mut to.area, bytes);
    (to.shape, to.generation) = (shape, GENERATIONS.fetch_add(1, Ordering::Relaxed));
    let truncating = || samples.iter().zip(0u32..).filter(|(sample, _)| sample.truncates());
    let truncating: Vec<u32> = truncating().map(|(_, row)| row).collect();
    queue.send(shape.area, bytes, |host| {
        host.put(layout.tokens, tokens.iter().map(token_words));
        host.put(layout.positions, positions.iter().copied());
        host.put(layout.slots, slots.iter().copied());
        host.put(layout.spans, to.spans.iter().map(span_words));
        host.put(layout.sampled_rows, sampled_rows.iter().copied());
        host.put(layout.samples, samples.iter().map(sample_words));
        host.put(layout.factors, samples.iter().map(SampleRow::inverse_temperature));
        host.put(layout.truncated, truncating.iter().copied());
        host.put(layout.biases, (0..shape.biases).map(|i| bias_words(biases.get(i))));
        host.put(layout.pages, pages.iter().copied());
    });
}

fn bounds(batch: &Batch) -> Bounds {
    let beyond = |numbers: &[u32]| numbers.iter().max().map_or(0, |&largest| largest as usize + 1);
    let (mut token, mut sampled) = (0, 0);
    for named in &batch.tokens {
        match *named {
            Token::Id(id) => token = token.max(id as usize + 1),
            Token::Sampled(row) => sampled = sampled.max(row as usize + 1),
        }
    }
    Bounds {
        token,
        sampled,
        position: beyond(&batch.positions),
        slot: beyond(&batch.slots),
        page: beyond(&batch.pages),
    }
}

fn token_words(token: &Token) -> [u32; 2] {
    match *token {
        Token::Id(id) => [0, id],
        Token::Sampled(row) => [1, row],
    }
}

fn span_words(span: &Span) -> [u32; 4] {
    [span.row, span.rows, span.position, span.pages].map(|x| x as u32)
}

fn sample_words(&SampleRow { temperature, top_p, top_k, min_p, uniform }: &SampleRow) -> SampleWords {
    SampleWords { temperature, top_p, top_k, min_p, uniform }
}

/// A bias; where there is none, that of no row.
fn bias_words(bias: Option<&Bias>) -> BiasWords {
    let none = BiasWords { row: u32::MAX, token: 0, add: 0.0 };
    bias.map_or(none, |&Bias { row, token, add }| BiasWords { row, token, add })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_an_area_do_not_overlap() {
        let (rows, sequences, sampled, truncated, biases) = (37, 33, 35, 3, 8);
        let shape = BatchShape { rows, sequences, sampled, truncated, biases, ..BatchShape::default() };
        let l = shape.layout();
        let parts = [
            (l.tokens, 37 * 8),
            (l.positions, 37 * 4),
            (l.slots, 37 * 4),
            (l.spans, 33 * 16),
            (l.sampled_rows, 35 * 4),
            (l.samples, 35 * 24),
            (l.factors, 35 * 4),
            (l.truncated, 3 * 4),
            (l.biases, 8 * 12),
            (l.pages, 0),
        ];
        assert!(parts.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        assert!(parts.iter().all(|(at, _)| at.is_multiple_of(ALIGN)));
    }

    /// A rounded length has as many tiles (of one split) and as many splits as every length it stands for.
    #[test]
    fn rounded_lengths_choose_what_they_stand_for() {
        for length in 0..5000 {
            let up = rounded(length);
            assert!(up >= length);
            assert_eq!(
                up.min(SPLIT).div_ceil(FLASH_TILE),
                length.min(SPLIT).div_ceil(FLASH_TILE),
                "{length}"
            );
            let splits = |length: usize| length.div_ceil(SPLIT).next_power_of_two();
            assert_eq!(splits(up), splits(length), "{length}");
        }
        assert_eq!(
            [1, 64, 65, 512, 513, 1024, 1025, 3000].map(rounded),
            [64, 64, 128, 512, 1024, 1024, 2048, 4096]
        );
    }
}
