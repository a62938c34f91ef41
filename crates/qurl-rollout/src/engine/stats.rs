//! What an engine counts.

use std::time::Duration;

/// What an engine has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Tokens computed only for their keys and values: prompts (all but their last token), and what was
    /// preempted.
    pub prefill_tokens: u64,
    /// Tokens computed to sample the next one, which was taken.
    pub decode_tokens: u64,
    /// How often a sequence gave back its pages and was computed again.
    pub preemptions: u64,
    /// Tokens that were not computed because another request's pages hold them.
    pub shared_tokens: u64,
    /// Steps launched.
    pub steps: u64,
    /// Most pages in use at the same time.
    pub peak_pages: usize,
    /// What full batches took: beside it stands what a whole rollout took, with its tail.
    pub full: FullBatches,
}

/// Steps in which every place decoded, right after another such step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FullBatches {
    /// Tokens that they sampled.
    pub tokens: u64,
    /// The time they took.
    pub time: Duration,
}

impl FullBatches {
    /// Tokens a second since an earlier moment; nothing where no batch was full.
    pub fn tokens_per_s_since(&self, before: FullBatches) -> Option<f64> {
        let (tokens, time) = (self.tokens - before.tokens, self.time - before.time);
        (tokens > 0).then(|| tokens as f64 / time.as_secs_f64())
    }
}
