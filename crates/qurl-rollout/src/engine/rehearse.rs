//! The largest steps that an engine can make, for what they allocate.

use super::{Engine, padded_rows};
use crate::request::Sampling;
use qurl_kernels::Device;
use qurl_kernels::types::{Batch, SampleRow, Span, Token};

impl<D: Device> Engine<D> {
    /// Makes a step of as many prompt tokens, and steps of as many sequences at the end of the context, as
    /// there can be; the latter for each way of sampling. What they compute is of no use.
    ///
    /// # Panics
    /// If requests are in flight: their pages are written.
    pub fn rehearse(&mut self, queue: &mut D::Queue, sampling: &[Sampling]) {
        assert_eq!(self.unfinished(), 0, "a rehearsal in between");
        let positions = self.network.options().positions;
        let mut prompts = Batch::default();
        while prompts.rows() < self.options.max_num_batched_tokens {
            let rows = positions.min(self.options.max_num_batched_tokens - prompts.rows());
            self.add_rows(&mut prompts, rows, 0);
        }
        self.work.step(queue, &self.network, &prompts, &mut self.kv, None);
        for &Sampling { temperature, top_p, top_k, min_p } in sampling {
            let mut decoding = Batch::default();
            for row in 0..padded_rows(self.asynchronous, self.options.max_num_seqs) {
                self.add_rows(&mut decoding, 1, positions - 1);
                decoding.sampled_rows.push(row as u32);
                decoding.samples.push(SampleRow { temperature, top_p, top_k, min_p, uniform: 0.5 });
            }
            self.work.step(queue, &self.network, &decoding, &mut self.kv, None);
        }
    }

    /// Rows of one sequence from a position on, with the first page in place of all of its pages.
    fn add_rows(&self, batch: &mut Batch, rows: usize, position: usize) {
        let page_size = self.options.page_size;
        let (row, pages) = (batch.rows(), batch.pages.len());
        batch.spans.push(Span { row, rows, position, pages });
        batch.pages.extend(std::iter::repeat_n(0, (position + rows).div_ceil(page_size)));
        for position in position..position + rows {
            batch.tokens.push(Token::Id(0));
            batch.positions.push(position as u32);
            batch.slots.push((position % page_size) as u32);
        }
    }
}
