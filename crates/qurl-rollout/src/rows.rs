//! The rows of a step as the model takes them: tokens, positions, places of keys and values, sampled rows.

use crate::pages::PagePool;
use crate::sequence::Sequence;
use qurl_kernels::types::{Batch, SampleRow, Span, Token};

/// Buffers of a step, filled again and again.
#[derive(Debug, Default)]
pub(crate) struct StepRows {
    /// What is computed.
    pub batch: Batch,
    /// Sampled rows that are sequences'; the rest pads the step.
    pub sampling: usize,
}

impl StepRows {
    /// Lays out the scheduled rows. A step of nothing but decoding is padded to the size that `padded` gives,
    /// with rows whose keys and values go to the page after the last.
    pub fn fill(&mut self, running: &[Sequence], pool: &PagePool, padded: impl FnOnce(usize) -> usize) {
        let batch = &mut self.batch;
        batch.clear();
        let page_size = pool.page_size();
        for sequence in running {
            let rows = sequence.rows();
            if rows.is_empty() {
                continue;
            }
            let (row, pages) = (batch.rows(), batch.pages.len());
            batch.spans.push(Span { row, rows: rows.len(), position: rows.start, pages });
            batch.pages.extend_from_slice(&sequence.pages().ids()[..rows.end.div_ceil(page_size)]);
            sequence.copy_tokens(rows.clone(), &mut batch.tokens);
            batch.positions.extend(rows.clone().map(|position| position as u32));
            batch.slots.extend(rows.map(|position| sequence.pages().slot(position)));
            if sequence.samples() {
                batch.sampled_rows.push(batch.tokens.len() as u32 - 1);
                batch.biases.extend(sequence.biases(batch.samples.len() as u32));
                batch.samples.push(sequence.sample_row());
            }
        }
        self.sampling = batch.samples.len();
        if batch.rows() == 0 || self.sampling < batch.rows() {
            return;
        }
        let spare = pool.total();
        let table = batch.pages.len();
        for row in batch.rows()..padded(batch.rows()) {
            batch.tokens.push(Token::Id(0));
            batch.positions.push(0);
            batch.slots.push((spare * page_size) as u32);
            batch.spans.push(Span { row, rows: 1, position: 0, pages: table });
            batch.sampled_rows.push(row as u32);
            batch.samples.push(SampleRow::greedy());
        }
        if batch.rows() > self.sampling {
            batch.pages.push(spare as u32);
        }
    }

    /// Whether every row is sampled: nothing but decoding.
    pub fn decodes(&self) -> bool {
        self.batch.samples.len() == self.batch.rows()
    }
}
