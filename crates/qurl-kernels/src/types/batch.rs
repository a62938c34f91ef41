//! The rows that one pass computes: tokens, where their keys and values go, what they see, which of them are
//! sampled.

use super::{Bias, SampleRow, Span};

/// A token of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// Its number in the vocabulary.
    Id(u32),
    /// The one that this row of the last [`sample`](crate::Queue::sample) gave; the host may not have seen it
    /// yet.
    Sampled(u32),
}

/// Rows of tokens for one pass. [`Queue::load`](crate::Queue::load) brings them to the device.
///
/// A prompt of three tokens in page 5, whose last row is sampled; and beside it the twentieth token of
/// another sequence, which the host has not seen yet:
///
/// ```
/// use qurl_kernels::types::{Batch, Bias, SampleRow, Span, Token};
///
/// let page_size = 16;
/// let pages = vec![5, 2, 7]; // the first sequence has page 5, the second has pages 2 and 7
/// let batch = Batch {
///     tokens: vec![Token::Id(11), Token::Id(12), Token::Id(13), Token::Sampled(0)],
///     positions: vec![0, 1, 2, 19],
///     slots: vec![5 * page_size, 5 * page_size + 1, 5 * page_size + 2, 7 * page_size + 19 % page_size],
///     spans: vec![
///         Span { row: 0, rows: 3, position: 0, pages: 0 },
///         Span { row: 3, rows: 1, position: 19, pages: 1 },
///     ],
///     pages,
///     sampled_rows: vec![2, 3],
///     samples: vec![SampleRow::greedy(), SampleRow { temperature: 0.7, ..SampleRow::greedy() }],
///     biases: vec![Bias { row: 1, token: 2, add: f32::NEG_INFINITY }], // the second does not sample token 2
/// };
/// assert_eq!(batch.rows(), 4);
/// ```
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
    /// What is added to single logits of those rows, by row and token.
    pub biases: Vec<Bias>,
}

impl Batch {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Removes all rows and keeps the memory.
    pub fn clear(&mut self) {
        let Batch { tokens, positions, slots, spans, pages, sampled_rows, samples, biases } = self;
        tokens.clear();
        spans.clear();
        samples.clear();
        biases.clear();
        [positions, slots, pages, sampled_rows].into_iter().for_each(Vec::clear);
    }
}
