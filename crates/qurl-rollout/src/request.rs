//! What is asked of the engine, and what comes back.

use crate::error::RolloutError;
use std::fmt;

/// Names a request in results and errors; numbers rise in the order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// The weights that something was computed with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct WeightVersion {
    /// Counts updates of the weights.
    pub version: u64,
    /// Of the weights themselves, so that two runs at the same version are told apart.
    pub checksum: u64,
}

impl fmt::Display for WeightVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "weight version {} (checksum {:016x})", self.version, self.checksum)
    }
}

/// The most probable tokens at a place with their log-probs, the best first. They are those of the whole
/// distribution at the request's temperature, even where only some of its tokens may be sampled.
pub type TopTokens = Vec<(u32, f32)>;

/// The lowest temperature above 0: the softmax of logits that are divided by less is one token.
pub const MIN_TEMPERATURE: f32 = 1e-3;

/// How tokens are sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Softmax temperature, 0 for the argmax or from 0.001 to 1000.
    pub temperature: f32,
    /// Keep the smallest set of tokens with at least this probability; 1 keeps all.
    pub top_p: f32,
    /// Keep this many of the most probable tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep tokens with at least this share of the largest probability; 0 keeps all.
    pub min_p: f32,
}

impl Default for Sampling {
    /// The model's own distribution.
    fn default() -> Self {
        Sampling { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0 }
    }
}

impl Sampling {
    /// The argmax, always.
    pub fn greedy() -> Self {
        Sampling { temperature: 0.0, ..Sampling::default() }
    }

    /// Whether every token of the vocabulary can be sampled, with the model's own probability at the
    /// temperature.
    pub fn is_full(&self) -> bool {
        self.temperature > 0.0 && self.top_p >= 1.0 && self.top_k == 0 && self.min_p <= 0.0
    }

    /// The temperature of the log-probs: that of the sampling, or 1 for greedy.
    pub fn logp_temperature(&self) -> f32 {
        if self.temperature == 0.0 { 1.0 } else { self.temperature }
    }

    /// Checks the ranges.
    pub fn check(&self, vocabulary: usize) -> Result<(), RolloutError> {
        let number = |key, value: f32, ok: bool, expected: &str| match ok {
            true => Ok(()),
            false => Err(RolloutError::OutOfRange {
                key,
                found: value.to_string(),
                expected: expected.to_string(),
            }),
        };
        let t = self.temperature;
        let usable = t == 0.0 || (MIN_TEMPERATURE..=1e3).contains(&t);
        number("temperature", t, usable, "0, or a number from 0.001 to 1000")?;
        number("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "a number above 0, at most 1")?;
        number("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "a number from 0 to 1")?;
        if self.top_k as usize > vocabulary {
            let expected = format!("0 for all, or at most the {vocabulary} tokens of the vocabulary");
            return Err(RolloutError::OutOfRange { key: "top_k", found: self.top_k.to_string(), expected });
        }
        Ok(())
    }
}

/// What the random numbers of a request's samples are keyed by, together with sample and position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SampleKey {
    /// Seed of the run.
    pub seed: u64,
    /// Step of the training.
    pub step: u64,
    /// The prompt's number in the step or data set.
    pub prompt: u64,
}

/// A prompt and what to do with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Number of samples.
    pub n: usize,
    /// What the first sample is called in the key of the random numbers: 0, unless some of a request's
    /// samples are made again.
    pub first_sample: u32,
    /// How tokens are sampled.
    pub sampling: Sampling,
    /// What is added to the logits of tokens, once for each: from -100 to 100, or minus infinity for tokens
    /// that are not sampled.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens before the first one that may end a sample: until then stop tokens are not sampled, and stop
    /// strings not looked for.
    pub min_new: usize,
    /// Names the random numbers.
    pub key: SampleKey,
    /// Most new tokens of a sample.
    pub max_new: usize,
    /// Most new tokens of each sample, where they differ (then at most `max_new`); empty where they do not.
    pub max_new_of: Vec<usize>,
    /// Tokens that end a sample; they are part of it.
    pub stop_ids: Vec<u32>,
    /// Texts that end a sample; the tokens that complete them are part of it.
    pub stop_strings: Vec<String>,
    /// How many of the most probable tokens are wanted at every new token.
    pub top_logprobs: usize,
    /// Whether the prompt's own log-probs are wanted.
    pub prompt_logprobs: bool,
    /// How many of the most probable tokens are wanted with each of them.
    pub prompt_top_logprobs: usize,
    /// Pages are shared with requests of the same salt alone, where pages of requests are shared.
    pub salt: Vec<u32>,
}

impl Request {
    /// One sample of up to `max_new` tokens from the model's own distribution.
    pub fn new(prompt: Vec<u32>, max_new: usize) -> Request {
        Request {
            prompt,
            n: 1,
            first_sample: 0,
            sampling: Sampling::default(),
            logit_bias: Vec::new(),
            min_new: 0,
            key: SampleKey::default(),
            max_new,
            max_new_of: Vec::new(),
            stop_ids: Vec::new(),
            stop_strings: Vec::new(),
            top_logprobs: 0,
            prompt_logprobs: false,
            prompt_top_logprobs: 0,
            salt: Vec::new(),
        }
    }

    /// Whether every token is sampled with the model's own probability at the temperature.
    pub fn is_full(&self) -> bool {
        self.sampling.is_full() && self.logit_bias.is_empty() && self.min_new == 0
    }

    /// Most new tokens of one of the samples.
    pub fn limit_of(&self, sample: u32) -> usize {
        self.max_new_of.get(sample as usize).copied().unwrap_or(self.max_new)
    }
}

/// Why a sample ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// This stop token was sampled.
    StopId(u32),
    /// The text contains this one (by its place) of the stop strings.
    StopString(usize),
    /// The sample has `max_new` tokens.
    Length,
    /// The context is full.
    Context,
}

impl FinishReason {
    /// A word for machine-readable output: `stop` or `length`.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::StopId(_) | FinishReason::StopString(_) => "stop",
            FinishReason::Length | FinishReason::Context => "length",
        }
    }

    /// Whether the sample was cut off before the model ended it.
    pub fn is_truncated(self) -> bool {
        matches!(self, FinishReason::Length | FinishReason::Context)
    }
}

/// One finished sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The sampled tokens.
    pub tokens: Vec<u32>,
    /// Log-probability of each under the distribution it was sampled from.
    pub logprobs: Vec<f32>,
    /// Entropy of that distribution at each token.
    pub entropies: Vec<f32>,
    /// Why it ended.
    pub finish: FinishReason,
    /// The weights it was made with.
    pub weights: WeightVersion,
}

/// The finished samples of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// The request.
    pub request: RequestId,
    /// Its key.
    pub key: SampleKey,
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Log-probs of the prompt's tokens but the first, where asked for (else empty).
    pub prompt_logprobs: Vec<f32>,
    /// The most probable tokens at the same places with their log-probs, the best first, where wanted.
    pub prompt_top: Vec<TopTokens>,
    /// Tokens of the prompt whose keys and values were found in pages of other requests.
    pub cached_tokens: usize,
    /// The samples, in their order.
    pub samples: Vec<Sample>,
}

impl Group {
    /// Refuses samples that were made with other weights than these.
    pub fn require_weights(&self, asked: WeightVersion) -> Result<(), RolloutError> {
        match self.samples.iter().find(|s| s.weights != asked) {
            Some(sample) => Err(RolloutError::WrongWeights { made_with: sample.weights, asked }),
            None => Ok(()),
        }
    }
}
