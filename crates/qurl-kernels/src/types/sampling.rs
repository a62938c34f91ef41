//! How a row is sampled, and what was sampled.

/// The logit of a token that is not sampled, before its temperature. It is finite, so that sums over the row
/// are, and weighs nothing beside any other: what is left is a distribution of its own, with its own
/// log-probabilities and entropy.
pub const BANNED_LOGIT: f32 = -1e9;

/// What is added to one logit of a sampled row, before its temperature and all else.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bias {
    /// Which of the sampled rows.
    pub row: u32,
    /// Which logit.
    pub token: u32,
    /// How much; minus infinity: the token is not sampled.
    pub add: f32,
}

impl Bias {
    /// The logit with it. One that is not finite stays so.
    pub fn of(&self, logit: f32) -> f32 {
        match self.add == f32::NEG_INFINITY && logit.is_finite() {
            true => BANNED_LOGIT,
            false => logit + self.add,
        }
    }

    /// Refuses lists that are not in the order of rows and tokens, with one bias for each, or that name other
    /// rows.
    pub(crate) fn check(biases: &[Bias], rows: usize) {
        let place = |bias: &Bias| (bias.row, bias.token);
        assert!(
            biases.is_sorted_by(|a, b| place(a) < place(b)),
            "batch: biases by row and token, one for each"
        );
        assert!(biases.last().is_none_or(|last| (last.row as usize) < rows), "batch: biases of sampled rows");
    }
}

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
