//! Shared by the tests: a small seeded generator and random batches of tokens.

use qurl_rl::{Aggregation, LossAggMode, Objective, Outcome, Tokens};

pub const MODES: [LossAggMode; 5] = [
    LossAggMode::TokenMean,
    LossAggMode::TokenSum,
    LossAggMode::SeqMeanTokenSum,
    LossAggMode::SeqMeanTokenMean,
    LossAggMode::SeqMeanTokenSumNorm,
];

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [low, high).
    pub fn within(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }
}

/// Tokens that own their slices.
#[derive(Clone)]
pub struct Batch {
    pub theta: Vec<f64>,
    pub prox: Vec<f64>,
    pub behav: Vec<f64>,
    pub adv: Vec<f64>,
    pub mask: Vec<bool>,
    pub seq: Vec<u32>,
}

impl Batch {
    /// Random tokens; `spread` is the largest distance between two policies' log-probs.
    pub fn random(random: &mut Random, tokens: usize, spread: f64) -> Self {
        let sequences = 1 + random.below(5);
        let mut each =
            |low: f64, high: f64| -> Vec<f64> { (0..tokens).map(|_| random.within(low, high)).collect() };
        let prox = each(-6.0, -0.01);
        let add = |d: Vec<f64>| prox.iter().zip(d).map(|(p, d)| p + d).collect();
        let theta = add(each(-spread, spread));
        let behav = add(each(-spread, spread));
        let adv = each(-2.0, 2.0);
        let mask = (0..tokens).map(|_| random.below(4) > 0).collect();
        let mut seq: Vec<u32> = (0..tokens).map(|_| random.below(sequences) as u32).collect();
        seq.sort_unstable();
        Self { theta, prox, behav, adv, mask, seq }
    }

    pub fn tokens(&self) -> Tokens<'_, f64> {
        Tokens {
            theta: &self.theta,
            prox: &self.prox,
            behav: &self.behav,
            adv: &self.adv,
            mask: &self.mask,
            seq: &self.seq,
        }
    }

    pub fn weights(&self, mode: LossAggMode) -> Vec<f64> {
        Aggregation { mode, loss_scale_factor: None }.weights_of(&self.mask, &self.seq).unwrap()
    }

    pub fn evaluate(&self, objective: &Objective, mode: LossAggMode) -> Outcome {
        objective.evaluate(&self.tokens(), &self.weights(mode)).unwrap()
    }
}

/// An objective from its JSON.
pub fn objective(text: &str) -> Objective {
    let objective: Objective = serde_json::from_str(text).unwrap();
    objective.check().unwrap();
    objective
}

/// All objectives with their defaults, and with the dual clip where they have one.
pub fn all_objectives() -> Vec<Objective> {
    let plain = Objective::TYPES.iter().map(|name| objective(&format!(r#"{{"type":"{name}"}}"#)));
    let dual = ["naive", "quantized-is", "decoupled", "tis", "acr", "sequence-tis", "icepop"]
        .map(|name| objective(&format!(r#"{{"type":"{name}","clip_ratio_c":3.0}}"#)));
    let loose = [
        r#"{"type":"geo-mask","low":0.5,"high":2.0}"#,
        r#"{"type":"gspo","clip_ratio_low":0.2,"clip_ratio_high":0.2,"correction":{"type":"sequence-tis"}}"#,
        r#"{"type":"cispo","correction":{"type":"token-is"}}"#,
        r#"{"type":"kpop","phi":0.02,"clip_ratio_c":3.0}"#,
        r#"{"type":"dppo","delta_low":0.05,"delta_high":0.1,"ratio_max":1.5}"#,
        r#"{"type":"dppo","divergence":"kl","delta_low":0.05,"delta_high":0.05}"#,
        r#"{"type":"off-policy-mask","tau":0.1,"correction":{"type":"sequence-mis"}}"#,
        r#"{"type":"acr","off_policy_mask":0.2}"#,
        r#"{"type":"m2po","tau":0.3,"ratio":"behav","off_policy_mask":0.2}"#,
    ];
    plain.chain(dual).chain(loose.map(objective)).collect()
}

/// |a − b| ≤ 1e-6, relative where the numbers are above 1.
pub fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * a.abs().max(b.abs()).max(1.0)
}
