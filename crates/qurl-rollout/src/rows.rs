//! The rows of a step as the model takes them: token ids, positions, places of keys and values, draws.

use crate::pages::PagePool;
use crate::sequence::Sequence;
use qurl_kernels::backend::{SampleRow, Span};
use qurl_model::compute::Batch;

/// Buffers of a step, filled again and again.
#[derive(Debug, Default)]
pub(crate) struct StepRows {
    /// What is computed.
    pub batch: Batch,
    /// Rows that a token is drawn from.
    pub draw_rows: Vec<u32>,
    /// How.
    pub draws: Vec<SampleRow>,
    /// Draws that are sequences'; the rest fills up the step.
    pub drawing: usize,
}

impl StepRows {
    /// Lays out the scheduled rows. A step of nothing but decoding is filled up to the size that `bucket` gives, with rows
    /// whose keys and values go to the page behind the last.
    pub fn fill(&mut self, running: &[Sequence], pool: &PagePool, bucket: impl FnOnce(usize) -> usize) {
        let Batch { ids, positions, slots, spans, pages } = &mut self.batch;
        for buffer in [&mut *ids, positions, slots, pages, &mut self.draw_rows] {
            buffer.clear();
        }
        spans.clear();
        self.draws.clear();
        let page_size = pool.page_size();
        for sequence in running {
            let rows = sequence.rows();
            if rows.is_empty() {
                continue;
            }
            spans.push(Span { row: ids.len(), rows: rows.len(), position: rows.start, pages: pages.len() });
            pages.extend_from_slice(&sequence.pages().ids()[..rows.end.div_ceil(page_size)]);
            sequence.copy_tokens(rows.clone(), ids);
            positions.extend(rows.clone().map(|position| position as u32));
            slots.extend(rows.map(|position| sequence.pages().slot(position)));
            if sequence.draws() {
                self.draw_rows.push(ids.len() as u32 - 1);
                self.draws.push(sequence.draw());
            }
        }
        self.drawing = self.draws.len();
        if !ids.is_empty() && self.draws.len() == ids.len() {
            let spare = pool.total();
            let table = pages.len();
            for row in ids.len()..bucket(ids.len()) {
                ids.push(0);
                positions.push(0);
                slots.push((spare * page_size) as u32);
                spans.push(Span { row, rows: 1, position: 0, pages: table });
                self.draw_rows.push(row as u32);
                self.draws.push(SampleRow::greedy());
            }
            if ids.len() > self.drawing {
                pages.push(spare as u32);
            }
        }
    }
}
