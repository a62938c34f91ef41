//! The learning rate over the steps of a run.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What follows the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Decay {
    /// The peak is kept to the end.
    #[default]
    Constant,
    /// Half a cosine from the peak down to `min_lr_ratio` of it.
    Cosine,
}

/// Linear warm-up to the peak, then constant or cosine decay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Highest learning rate.
    pub peak: f64,
    /// Steps of the warm-up; the first step already learns.
    pub warmup_steps: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// What follows the warm-up.
    pub decay: Decay,
    /// Where the cosine ends, as a share of the peak.
    pub min_lr_ratio: f64,
}

impl Schedule {
    /// The learning rate of step `step`, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f64 / self.warmup_steps as f64;
        }
        match self.decay {
            Decay::Constant => self.peak,
            Decay::Cosine => {
                let rest = self.total_steps.saturating_sub(self.warmup_steps).max(1);
                let done = ((step - self.warmup_steps) as f64 / rest as f64).min(1.0);
                let share = 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
                self.peak * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * share)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_then_decay() {
        let s =
            Schedule { peak: 1.0, warmup_steps: 4, total_steps: 14, decay: Decay::Cosine, min_lr_ratio: 0.1 };
        let rates: Vec<f64> = (0..=14).map(|i| s.at(i)).collect();
        assert_eq!(rates[..4], [0.25, 0.5, 0.75, 1.0]);
        assert_eq!(rates[4], 1.0);
        assert!((rates[9] - 0.55).abs() < 1e-12 && (rates[14] - 0.1).abs() < 1e-12);
        assert!(rates[4..].windows(2).all(|w| w[1] <= w[0]));
        let constant = Schedule { decay: Decay::Constant, warmup_steps: 0, ..s };
        assert_eq!((constant.at(0), constant.at(1000)), (1.0, 1.0));
    }
}
