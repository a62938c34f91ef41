//! Supervised training: the likelihood of given responses.
//!
//! A step takes `batch_size` examples, packs them side by side without attention between them, and lowers the mean
//! negative log-prob of the response tokens by one AdamW update. The order of the examples is a function of the seed.

mod examples;

pub use examples::{Example, ExampleError, Examples};

use crate::learner::{Learner, LearnerOptions, LossGradient, micro_batches};
use crate::recipe::{Recipe, Sft};
use crate::start::{Start, StartError};
use qurl_kernels::{Device, DeviceError};
use qurl_model::compute::{TapeOptions, Targets, whole_batch};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Why supervised training stopped.
#[derive(Debug, thiserror::Error)]
pub enum SftError {
    /// The model or tokenizer.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The examples.
    #[error(transparent)]
    Examples(#[from] ExampleError),
    /// The computation.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The loss or its gradient was not finite too often.
    #[error(
        "step {step}: the loss or gradient was not finite {times} times in a row; a smaller `sft.lr` may help"
    )]
    NotFinite {
        /// The step.
        step: u64,
        /// How often.
        times: u32,
    },
}

/// What one step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SftStep {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean negative log-prob of the response tokens.
    pub loss: f64,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f64,
    /// False where the gradient was not finite: the step changed nothing.
    pub applied: bool,
    /// Learning rate.
    pub lr: f64,
    /// Tokens computed, prompts included.
    pub tokens: usize,
    /// Time taken.
    pub time: Duration,
}

/// Skipped steps in a row after which training gives up.
const MOST_SKIPPED: u32 = 20;

/// Trains on the examples of the recipe and returns the learner. `on_step` sees every step.
pub fn run<D: Device>(
    queue: &mut D::Queue,
    recipe: &Recipe,
    sft: &Sft,
    start: &Start,
    examples: &Examples,
    mut on_step: impl FnMut(&SftStep),
) -> Result<Learner<D>, SftError> {
    let go_on = |step: &SftStep| {
        on_step(step);
        ControlFlow::Continue(())
    };
    Ok(run_while(queue, recipe, sft, start, examples, go_on)?.0)
}

/// Like [`run`], but ends early where `on_step` says so; the flag tells whether it did.
pub fn run_while<D: Device>(
    queue: &mut D::Queue,
    recipe: &Recipe,
    sft: &Sft,
    start: &Start,
    examples: &Examples,
    mut on_step: impl FnMut(&SftStep) -> ControlFlow<()>,
) -> Result<(Learner<D>, ControlFlow<()>), SftError> {
    let positions = sft.max_length.min(start.config.max_position_embeddings);
    let rows = recipe.trainer.micro_tokens.max(positions);
    let tape = TapeOptions { rows, sequences: sft.batch_size, recompute: recipe.trainer.recompute };
    let options = LearnerOptions { compute: recipe.trainer.compute, positions, tape, adamw: sft.optim };
    let mut learner = Learner::new(queue, &start.config, &start.weights, options)?;
    let schedule = sft.schedule();
    let mut skipped = 0;
    for step in 0..sft.steps {
        let began = Instant::now();
        let batch: Vec<Example> = (0..sft.batch_size as u64)
            .map(|i| examples.get(step * sft.batch_size as u64 + i))
            .collect::<Result<_, _>>()?;
        let lr = schedule.at(step);
        let (loss, report) = train_step(queue, &mut learner, &batch, tape, lr)?;
        skipped = if report.applied { 0 } else { skipped + 1 };
        let flow = on_step(&SftStep {
            step: step + 1,
            loss,
            grad_norm: report.grad_norm,
            applied: report.applied,
            lr,
            tokens: batch.iter().map(|e| e.ids.len()).sum(),
            time: began.elapsed(),
        });
        if flow.is_break() {
            return Ok((learner, flow));
        }
        if skipped == MOST_SKIPPED {
            return Err(SftError::NotFinite { step: step + 1, times: skipped });
        }
    }
    Ok((learner, ControlFlow::Continue(())))
}

/// One update on a batch of examples; returns the loss before it.
pub fn train_step<D: Device>(
    queue: &mut D::Queue,
    learner: &mut Learner<D>,
    batch: &[Example],
    tape: TapeOptions,
    lr: f64,
) -> Result<(f64, crate::optimizer::UpdateReport), DeviceError> {
    let scored: usize = batch.iter().map(Example::scored).sum();
    let weight = 1.0 / scored.max(1) as f64;
    let lengths: Vec<usize> = batch.iter().map(|e| e.ids.len()).collect();
    let mut loss = 0.0;
    for range in micro_batches(&lengths, tape) {
        let part = &batch[range];
        let ids: Vec<&[u32]> = part.iter().map(|e| e.ids.as_slice()).collect();
        let targets = Targets::of(&ids, |sequence, position| part[sequence].loss[position]);
        learner.accumulate(queue, &whole_batch(&ids), targets, 1.0, |out| {
            loss -= out.logp.iter().map(|&x| x as f64).sum::<f64>() * weight;
            let dlogp = vec![-weight as f32; out.logp.len()];
            Ok::<_, DeviceError>(LossGradient { dlogp, dentropy: Vec::new() })
        })?;
    }
    Ok((loss, learner.update(queue, lr)?))
}
