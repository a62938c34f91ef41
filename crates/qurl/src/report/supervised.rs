//! Supervised training in the page: the figures of a run of it, and those of the warm start of a run.

use super::{RunData, Steps};
use serde::Serialize;
use serde_json::Value;

/// What trained the model of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Reinforcement learning.
    Train,
    /// Supervised training alone.
    Sft,
}

impl RunData {
    /// What the run does, as far as its recipe says.
    pub fn kind(&self) -> Kind {
        match (self.setting("sft.steps"), self.setting("run.total_steps")) {
            (Some(_), None) => Kind::Sft,
            _ => Kind::Train,
        }
    }
}

/// The figures of supervised training; what was not measured is missing.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Supervised {
    /// Steps that were made.
    pub steps: usize,
    /// Loss of the first batch.
    pub loss_first: Option<f64>,
    /// Loss of the last batch.
    pub loss_last: Option<f64>,
    /// Validation loss before the first step.
    pub validation_loss_before: Option<f64>,
    /// Validation loss, taken last.
    pub validation_loss_after: Option<f64>,
    /// Lowest validation loss.
    pub validation_loss_best: Option<f64>,
    /// Greedy accuracy at the end on held-out problems.
    pub accuracy: Option<f64>,
    /// How often the examples were gone through.
    pub epochs: Option<f64>,
    /// Tokens per second of the updates, prompts included.
    pub tokens_per_s: Option<f64>,
    /// Seconds of all steps.
    pub seconds: Option<f64>,
    /// Updates that were applied.
    pub updates: f64,
    /// Updates that were skipped.
    pub skipped_updates: f64,
}

impl Supervised {
    /// The figures of a run, where it is one of supervised training.
    pub fn of_run(run: &RunData) -> Option<Supervised> {
        if run.kind() != Kind::Sft {
            return None;
        }
        let noted = |key: &str| run.summary.get(key).and_then(Value::as_f64);
        let mut figures = Supervised::of(&run.steps);
        figures.accuracy = noted("accuracy");
        figures.validation_loss_before = noted("validation_loss_before");
        let both = [figures.validation_loss_before, figures.validation_loss_best];
        figures.validation_loss_best = both.into_iter().flatten().reduce(f64::min);
        Some(figures)
    }

    /// The figures of a warm start, where there was one.
    pub fn of_warm_start(run: &RunData) -> Option<Supervised> {
        (!run.warm.is_empty()).then(|| Supervised::of(&run.warm))
    }

    fn of(steps: &Steps) -> Supervised {
        let sum = |key: &str| steps.values(key).sum::<f64>();
        let speed = sum("tokens") / sum("timing.update");
        Supervised {
            steps: steps.len(),
            loss_first: steps.values("loss").next(),
            loss_last: steps.values("loss").next_back(),
            validation_loss_after: steps.values("validation_loss").next_back(),
            validation_loss_best: steps.values("validation_loss").reduce(f64::min),
            epochs: steps.values("epoch").next_back(),
            tokens_per_s: Some(speed).filter(|speed| speed.is_finite()),
            seconds: steps.values("timing.total").next().map(|_| sum("timing.total")),
            updates: sum("updates"),
            skipped_updates: sum("skipped_updates"),
            ..Supervised::default()
        }
    }
}
