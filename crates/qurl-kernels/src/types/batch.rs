//! The rows that one pass computes: tokens, where their keys and values go, what they see, which of them are sampled.

use super::{SampleRow, Span};

/// A token of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// Its number in the vocabulary.
    Id(u32),
    /// The one that this row of the last [`sample`](crate::Queue::sample) gave; the host may not have seen it yet.
    Sampled(u32),
}

/// Rows of tokens for one pass. [`Queue::load`](crate::Queue::load) brings them to the device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Token of each row.
    pub tokens: Vec<Token>,
    /// Position of each row in its sequence.
    pub positions: Vec<u32>,
    /// Where each row's keys and values are stored: page * page size + place in the page.
    pub slots: Vec<u32>,
    /// Runs of rows that belong to one sequence.
    pub spans: Vec<Span>,
    /// Page numbers of all sequences; a span knows where its own begin.
    pub pages: Vec<u32>,
    /// Rows whose next token is sampled.
    pub sampled_rows: Vec<u32>,
    /// How, one for each of those rows.
    pub samples: Vec<SampleRow>,
}

impl Batch {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Removes all rows and keeps the memory.
    pub fn clear(&mut self) {
        let Batch { tokens, positions, slots, spans, pages, sampled_rows, samples } = self;
        tokens.clear();
        spans.clear();
        samples.clear();
        [positions, slots, pages, sampled_rows].into_iter().for_each(Vec::clear);
    }
}
