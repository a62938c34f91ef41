//! How a row is sampled, and what was sampled.

/// How one row is sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleRow {
    /// Softmax temperature; 0 takes the argmax (the first of equals) with its log-probability at temperature
    /// 1, without truncation.
    pub temperature: f32,
    /// Keep the smallest set of tokens with at least this probability; 1 keeps all.
    pub top_p: f32,
    /// Keep this many tokens of highest probability, fewer than the vocabulary has; 0 keeps all.
    pub top_k: u32,
    /// Keep tokens with at least this share of the highest probability; 0 keeps all.
    pub min_p: f32,
    /// The random number, in [0, 1).
    pub uniform: f64,
}

/// A sampled token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its log-probability under the distribution it was sampled from; NaN where a logit of the row is not
    /// finite, and then the token is 0.
    pub logp: f32,
    /// Entropy of that distribution.
    pub entropy: f32,
}

impl SampleRow {
    /// The argmax token.
    pub fn greedy() -> SampleRow {
        SampleRow { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, uniform: 0.0 }
    }

    /// Whether the argmax is taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// What logits are multiplied with; for greedy rows that of temperature 1.
    pub fn inverse_temperature(&self) -> f32 {
        if self.is_greedy() { 1.0 } else { 1.0 / self.temperature }
    }

    /// Whether only some tokens are kept: such rows take another kernel.
    pub fn truncates(&self) -> bool {
        !self.is_greedy() && (self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0)
    }
}
