//! Batches of whole sequences, and which of their tokens are scored.

use qurl_kernels::types::{Batch, Span, Token};

/// Tokens of a page of the keys and values of whole sequences.
pub const PAGE: usize = 64;

/// Whole sequences side by side, each in pages of its own (of [`PAGE`] tokens, numbered from 0).
pub fn whole_batch<S: AsRef<[u32]>>(sequences: &[S]) -> Batch {
    let mut batch = Batch::default();
    for sequence in sequences {
        let sequence = sequence.as_ref();
        let (row, page) = (batch.rows(), batch.pages.len());
        batch.spans.push(Span { row, rows: sequence.len(), position: 0, pages: page });
        batch.pages.extend((page..page + sequence.len().div_ceil(PAGE)).map(|p| p as u32));
        batch.tokens.extend(sequence.iter().map(|&id| Token::Id(id)));
        batch.positions.extend(0..sequence.len() as u32);
        batch.slots.extend((0..sequence.len()).map(|i| (page * PAGE + i) as u32));
    }
    batch
}

/// The rows `range` of a batch of whole sequences: a chunk that continues where earlier chunks ended.
pub fn chunk(batch: &Batch, range: std::ops::Range<usize>) -> Batch {
    let spans = batch.spans.iter().filter_map(|s| {
        let (from, to) = (s.row.max(range.start), (s.row + s.rows).min(range.end));
        let position = s.position + from.checked_sub(s.row)?;
        (from < to).then(|| Span { row: from - range.start, rows: to - from, position, pages: s.pages })
    });
    Batch {
        tokens: batch.tokens[range.clone()].to_vec(),
        positions: batch.positions[range.clone()].to_vec(),
        slots: batch.slots[range.clone()].to_vec(),
        spans: spans.collect(),
        pages: batch.pages.clone(),
        ..Batch::default()
    }
}

/// Which rows predict which tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Targets {
    /// Row whose output is scored.
    pub rows: Vec<u32>,
    /// The token that follows it.
    pub tokens: Vec<u32>,
}

impl Targets {
    /// Every token of whole sequences but the first, where `wanted(sequence, position)` says so.
    pub fn of<S: AsRef<[u32]>>(sequences: &[S], wanted: impl Fn(usize, usize) -> bool) -> Targets {
        let mut targets = Targets::default();
        let mut first_row = 0;
        for (i, sequence) in sequences.iter().enumerate() {
            let sequence = sequence.as_ref();
            for position in (1..sequence.len()).filter(|&p| wanted(i, p)) {
                targets.rows.push((first_row + position - 1) as u32);
                targets.tokens.push(sequence[position]);
            }
            first_row += sequence.len();
        }
        targets
    }

    /// Number of scored tokens.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether nothing is scored.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_and_chunks() {
        let sequences = [vec![1, 2, 3], vec![4; 70], vec![5]];
        let batch = whole_batch(&sequences);
        assert_eq!(batch.rows(), 74);
        assert_eq!(batch.pages, [0, 1, 2, 3]);
        assert_eq!(batch.spans[1], Span { row: 3, rows: 70, position: 0, pages: 1 });
        assert_eq!(batch.slots[3], 64);
        let chunk = chunk(&batch, 2..5);
        assert_eq!(chunk.tokens, [3, 4, 4].map(Token::Id));
        assert_eq!(
            chunk.spans,
            [
                Span { row: 0, rows: 1, position: 2, pages: 0 },
                Span { row: 1, rows: 2, position: 0, pages: 1 }
            ]
        );
        let targets = Targets::of(&sequences, |s, p| s == 0 && p == 2 || s == 1 && p > 67);
        assert_eq!((targets.rows, targets.tokens), (vec![1, 70, 71], vec![3, 4, 4]));
    }
}
