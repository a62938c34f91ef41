//! Whether training is still training.
//!
//! A run can be broken without failing: after a learning rate of 1000 the logits are uniform, every step
//! still samples, scores and updates, and nothing is ever learned again. The signs are plain in the record of
//! a step. One such step may be chance; several in a row ([`Health::patience`]) are the end of the run.
//!
//! The rollouts of step t show the weights that step t-1 left behind. So when t is the first step with a
//! symptom, the newest weights that were seen to work are those after step t-2 ([`Health::last_good`]).

use super::{StepRecord, TrainError};
use crate::solve::{SolveError, Trouble, is_not_finite};
use std::fmt;

/// Entropies from this share of the largest possible one on are those of uniform logits. Fresh random models
/// stay below: their logits of deviation 0.15 or more lose a hundredth of a nat.
const UNIFORM: f64 = 1.0 - 1e-3;
/// Mean entropies below this many nats are those of a policy that always writes the same.
const NO_ENTROPY: f64 = 1e-6;

/// A sign that training is broken.
#[derive(Clone, Debug, PartialEq)]
pub enum Symptom {
    /// No update of the step had a finite gradient.
    SkippedUpdates {
        /// How many there were.
        updates: u64,
    },
    /// The objective rejected every token, so that no update was made.
    AllRejected,
    /// Gradients of zero although responses of a group had different rewards.
    NoGradient,
    /// Every token is as likely as any other.
    UniformLogits {
        /// Mean entropy of the rollouts.
        entropy: f64,
        /// The logarithm of the size of the vocabulary.
        most: f64,
    },
    /// The policy always writes the same.
    NoEntropy {
        /// Mean entropy of the rollouts.
        entropy: f64,
    },
    /// Weights or logits are NaN or infinite: nothing can be sampled.
    NotFinite {
        /// What the engine said.
        reason: String,
    },
}

impl Symptom {
    /// What the record of a step shows; `vocabulary` is its size.
    pub fn of(record: &StepRecord, vocabulary: usize) -> Option<Symptom> {
        if record.skipped_updates > 0 && record.updates == 0 {
            return Some(Symptom::SkippedUpdates { updates: record.skipped_updates });
        }
        if record.response_tokens > 0 && record.updates == 0 {
            return Some(Symptom::AllRejected);
        }
        let without_gradient = record.learnable && record.updates > 0 && record.grad_norm == 0.0;
        Symptom::of_entropy(record.rollout_entropy, vocabulary)
            .or(without_gradient.then_some(Symptom::NoGradient))
    }

    /// What the failure of a step shows, if it is one of training and not of the machine.
    pub fn of_error(error: &TrainError, vocabulary: usize) -> Option<Symptom> {
        let engine = match error {
            TrainError::Rollout(engine) | TrainError::Solve(SolveError::Rollout(engine)) => engine,
            TrainError::Solve(SolveError::OtherRank { trouble: Trouble::NotFinite, reason, .. }) => {
                return Some(Symptom::NotFinite { reason: reason.clone() });
            }
            // A broken model answers everything wrong.
            TrainError::TooFewGroups { entropy, .. } => return Symptom::of_entropy(*entropy, vocabulary),
            _ => return None,
        };
        is_not_finite(engine).then(|| Symptom::NotFinite { reason: engine.to_string() })
    }

    fn of_entropy(entropy: f64, vocabulary: usize) -> Option<Symptom> {
        let most = (vocabulary as f64).ln();
        match () {
            () if !entropy.is_finite() => {
                Some(Symptom::NotFinite { reason: format!("the entropy of the rollouts is {entropy}") })
            }
            () if entropy >= UNIFORM * most => Some(Symptom::UniformLogits { entropy, most }),
            () if entropy < NO_ENTROPY => Some(Symptom::NoEntropy { entropy }),
            () => None,
        }
    }
}

impl fmt::Display for Symptom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Symptom::SkippedUpdates { updates } => {
                write!(f, "none of its {updates} updates had a finite gradient, all were skipped")
            }
            Symptom::AllRejected => f.write_str(
                "no update was made: algorithm.objective rejected every token, since its policies are too \
                 far apart",
            ),
            Symptom::NoGradient => {
                f.write_str("its gradients are zero although there was something to learn")
            }
            Symptom::UniformLogits { entropy, most } => {
                write!(f, "its entropy {entropy:.4} is that of uniform logits ({most:.4})")
            }
            Symptom::NoEntropy { entropy } => {
                write!(f, "its entropy {entropy:.1e} is zero: it always writes the same")
            }
            Symptom::NotFinite { reason } => write!(f, "the model is not finite: {reason}"),
        }
    }
}

/// Counts the steps in a row that show a symptom.
#[derive(Clone, Debug)]
pub struct Health {
    /// Steps in a row after which the run is broken; 0 for never.
    pub patience: u64,
    first: Option<u64>,
}

impl Health {
    /// A run that begins or resumes.
    pub fn new(patience: u64) -> Health {
        Health { patience, first: None }
    }

    /// Takes note of a step; whether training is broken.
    pub fn observe(&mut self, step: u64, symptom: Option<&Symptom>) -> bool {
        self.first = symptom.and(self.first.or(Some(step)));
        let in_a_row = self.first.map_or(0, |first| step + 1 - first);
        self.patience > 0 && in_a_row >= self.patience
    }

    /// Whether the last step showed no symptom.
    pub fn is_good(&self) -> bool {
        self.first.is_none()
    }

    /// The newest step whose weights were seen to work, where the last one shows a symptom (or failed with
    /// one).
    pub fn last_good(&self) -> Option<u64> {
        self.first.map(|first| first.saturating_sub(2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_symptoms_in_a_row_break_a_run() {
        let sick = Symptom::NoGradient;
        let mut health = Health::new(3);
        assert!(!health.observe(1, Some(&sick)) && !health.observe(2, Some(&sick)));
        assert!(!health.observe(3, None) && health.is_good() && health.last_good().is_none());
        assert!(!health.observe(4, Some(&sick)) && !health.observe(5, Some(&sick)));
        assert!(health.observe(6, Some(&sick)));
        assert_eq!(
            health.last_good(),
            Some(2),
            "step 4 sampled with what step 3 left, step 3 with what step 2 left"
        );
        let mut patient = Health::new(0);
        assert!((1..100).all(|step| !patient.observe(step, Some(&sick))));
        assert_eq!(patient.last_good(), Some(0), "the start");
    }
}
