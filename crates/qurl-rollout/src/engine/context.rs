//! Sequences that begin at a context which nobody computed: for measuring how fast an engine decodes there.
//!
//! Prefilling half a million tokens takes minutes and tells nothing about decoding. What decoding costs
//! depends on how many keys and values there are and where they lie, not on what they are, as long as they
//! are finite. So a few pages are prefilled, every other page gets a copy of one of them (each sequence
//! still reads pages of its own, so caches help no more than in earnest), and sequences are scheduled as if
//! their prompts had been computed.

use super::Engine;
use crate::error::RolloutError;
use crate::request::{Request, RequestId};
use qurl_kernels::types::{Batch, Span, Token};
use qurl_kernels::{Device, Queue};
use qurl_model::rng::{CounterRng, text_key};

/// Most tokens that are prefilled to be copied.
const PREFILLED: usize = 4096;

impl<D: Device> Engine<D> {
    /// Fills all pages with keys and values of random tokens.
    ///
    /// # Panics
    /// If requests are in flight: their pages are written.
    pub fn fill_pages(&mut self, queue: &mut D::Queue, seed: u64) -> Result<(), RolloutError> {
        assert_eq!(self.unfinished(), 0, "pages are filled under requests");
        self.scheduler.forget_prefixes();
        let (page_size, total) = (self.options.page_size, self.pages().total());
        let positions = self.network.options().positions;
        let pages = (PREFILLED.min(positions) / page_size).clamp(1, total);
        let tokens = (pages * page_size).min(positions);
        let random = CounterRng::new(&[seed, text_key("fill_pages")]);
        let vocabulary = self.network.config().vocab_size as u64;
        for start in (0..tokens).step_by(self.options.max_num_batched_tokens) {
            let rows = start..(start + self.options.max_num_batched_tokens).min(tokens);
            let batch = Batch {
                tokens: rows
                    .clone()
                    .map(|i| Token::Id(random.below_at(i as u64, vocabulary) as u32))
                    .collect(),
                positions: rows.clone().map(|position| position as u32).collect(),
                slots: rows.clone().map(|slot| slot as u32).collect(),
                spans: vec![Span { row: 0, rows: rows.len(), position: start, pages: 0 }],
                pages: (0..rows.end.div_ceil(page_size) as u32).collect(),
                ..Batch::default()
            };
            self.work.step(queue, &self.network, &batch, &mut self.kv, None);
        }
        for kv in &mut self.kv {
            for page in pages..total {
                queue.copy_page(kv, page % pages, page);
            }
        }
        Ok(queue.synchronize()?)
    }

    /// Queues a request whose prompt, but for its last token, counts as computed: what its pages hold takes
    /// the place of its keys and values ([`Engine::fill_pages`]). It is checked like any other.
    pub fn submit_at_context(&mut self, request: Request) -> Result<RequestId, RolloutError> {
        self.enqueue(request, true)
    }
}
