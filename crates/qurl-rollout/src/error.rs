//! What can go wrong in a rollout, with the bound and the value that was given.

use crate::request::{RequestId, WeightVersion};
use qurl_kernels::DeviceError;

/// Why the engine refused a setting or a request, or gave one up.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RolloutError {
    /// A setting of the engine or of a request is outside of its range.
    #[error("{key} = {found}: expected {expected}")]
    OutOfRange {
        /// The setting.
        key: &'static str,
        /// The value given.
        found: String,
        /// The values allowed.
        expected: String,
    },
    /// A prompt without tokens.
    #[error("the prompt is empty: expected at least one token")]
    EmptyPrompt,
    /// The context is too short for the prompt and a first new token.
    #[error("the prompt has {len} tokens, but a context of {context} tokens takes at most \
             {}", context.saturating_sub(1))]
    PromptTooLong {
        /// Tokens of the prompt.
        len: usize,
        /// Longest sequence of the network.
        context: usize,
    },
    /// A token number that the model does not have.
    #[error("{what} {token} is outside of the vocabulary of {vocabulary} tokens")]
    TokenOutsideVocabulary {
        /// Which token, e.g. "prompt token at position 3".
        what: String,
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
    /// Not even one sequence fits into the memory for keys and values.
    #[error(
        "the key/value budget is too small: a sequence of {tokens} tokens needs {need} bytes ({need_pages} \
         pages), the budget has {have} bytes ({have_pages} pages)"
    )]
    BudgetTooSmall {
        /// Tokens of the sequence, prompt and new ones.
        tokens: usize,
        /// Bytes that it needs.
        need: usize,
        /// Pages that it needs.
        need_pages: usize,
        /// Bytes of the budget.
        have: usize,
        /// Pages of the budget.
        have_pages: usize,
    },
    /// Stop strings need text, and the engine was given no way to make it.
    #[error("stop strings were given, but the engine has no text decoder")]
    NoTextDecoder,
    /// The model's output cannot be sampled from.
    #[error(
        "the model gives a logit that is not finite: {request}, sample {sample}, position {position} \
         (seed {seed}, step {step}, prompt {prompt})"
    )]
    BadLogits {
        /// The request, which has been dropped.
        request: RequestId,
        /// Its sample.
        sample: u32,
        /// Position of the token that was to be sampled.
        position: usize,
        /// Seed of the sample's key.
        seed: u64,
        /// Step of the sample's key.
        step: u64,
        /// Prompt of the sample's key.
        prompt: u64,
    },
    /// Weights cannot change under requests in flight.
    #[error("cannot load weights: {unfinished} sequences are unfinished")]
    Busy {
        /// Sequences in flight.
        unfinished: usize,
    },
    /// The last attempt to load weights failed half-way.
    #[error("the engine has no usable weights: the last load failed")]
    NoWeights,
    /// Samples are about to be used with weights they were not made with.
    #[error("rollout made with {made_with}, asked for {asked}")]
    WrongWeights {
        /// The weights the rollout was made with.
        made_with: WeightVersion,
        /// The weights asked for.
        asked: WeightVersion,
    },
    /// Nothing can be scheduled although sequences are unfinished; a defect of the scheduler.
    #[error("the scheduler is stuck with {unfinished} unfinished sequences")]
    Stuck {
        /// Sequences in flight.
        unfinished: usize,
    },
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
