//! Supervised training: the likelihood of given responses.
//!
//! A step takes `batch_size` examples, packs them side by side without attention between them, and lowers the
//! mean negative log-prob of the learned tokens by one AdamW update. The order of the examples is a function
//! of the seed. [`SftRun`] is the run of `qurl sft`, with checkpoints and logs; [`warm_start`] the same steps
//! alone, before reinforcement learning.

mod examples;
mod record;
mod rows;
mod run;
mod summary;
mod trainer;

pub use examples::{EpochOrder, Example, ExampleError, Examples, LeftOut};
pub use record::SftRecord;
pub use run::SftRun;
pub use summary::{SftBegun, SftBest, SftSummary};
pub use trainer::{SftTrainer, train_step};

use crate::base::OtherBase;
use crate::ranks::Ranks;
use crate::recipe::{Recipe, Sft};
use crate::start::{Start, StartError};
use qurl_kernels::{Device, DeviceError};
use qurl_model::Params;
use std::ops::ControlFlow;
use std::sync::Arc;

/// Why supervised training stopped. What fails around it in a run is a [`RunError`](crate::run::RunError).
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
        times: u64,
    },
    /// A checkpoint of a run with other examples.
    #[error("the examples are not those that the run was begun with: their files were changed")]
    OtherExamples,
    /// Adapters of another base.
    #[error(transparent)]
    OtherBase(#[from] OtherBase),
}

/// All steps of a recipe's supervised training, and the weights that they lead to. `on_step` sees the record
/// of each and may end it early; the flag tells whether it did.
pub fn warm_start<D: Device, E: From<SftError>>(
    device: &Arc<D>,
    recipe: &Recipe,
    sft: &Sft,
    start: &Start,
    examples: &Examples,
    ranks: &Ranks,
    mut on_step: impl FnMut(&mut SftRecord) -> Result<ControlFlow<()>, E>,
) -> Result<(Params<Vec<f32>>, ControlFlow<()>), E> {
    let mut trainer = SftTrainer::new(device, recipe, sft, start, examples, ranks)?;
    while trainer.steps_done() < sft.steps {
        let mut record = trainer.step()?;
        trainer.validate_after(&mut record)?;
        // A signal may reach one rank before the others.
        let breaks = on_step(&mut record)?.is_break();
        if ranks.any(breaks).map_err(|e| SftError::from(DeviceError::from(e)))? {
            return Ok((trainer.weights().map_err(SftError::from)?, ControlFlow::Break(())));
        }
    }
    Ok((trainer.weights().map_err(SftError::from)?, ControlFlow::Continue(())))
}

/// [`warm_start`] to its end, on one rank.
pub fn run<D: Device>(
    device: &Arc<D>,
    recipe: &Recipe,
    sft: &Sft,
    start: &Start,
    examples: &Examples,
    mut on_step: impl FnMut(&SftRecord),
) -> Result<Params<Vec<f32>>, SftError> {
    let go_on = |record: &mut SftRecord| {
        on_step(record);
        Ok::<_, SftError>(ControlFlow::Continue(()))
    };
    Ok(warm_start(device, recipe, sft, start, examples, &Ranks::one(recipe), go_on)?.0)
}
