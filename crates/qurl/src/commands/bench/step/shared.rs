//! What ranks did beside computing: bytes that each has sent in a step beside the cost model's, its memory
//! beside its plan, and a number that tells the weights that came out from others, the same for any number
//! of ranks.

use crate::output::{OutputError, out};
use qurl_kernels::collective::Moved;
use qurl_kernels::{Device, checksum};
use qurl_train::cost::{Sharing, Work, step_bytes};
use qurl_train::learner::Passes;
use qurl_train::recipe::Recipe;
use qurl_train::rl::RlTrainer;
use serde::Serialize;

/// What had been sent when the timed steps began.
pub struct Sent {
    moved: Moved,
    passed: Passes,
}

/// Of all ranks.
#[derive(Serialize)]
pub struct Shared {
    shards: usize,
    zero_stage: usize,
    /// Of the weights after the last step.
    pub checksum: String,
    /// By rank.
    ranks: Vec<OfRank>,
}

/// Of one rank; bytes are those of the mean step.
#[derive(Serialize)]
struct OfRank {
    gradients: u64,
    gradients_by_model: u64,
    weights: u64,
    weights_by_model: u64,
    host: u64,
    planned_bytes: u64,
    /// Allocated at most; 0 where the device has no memory of its own, which nobody counts.
    peak_bytes: u64,
}

/// A number that tells the trained weights from others, the same for any number of ranks.
pub fn checksum_of<D: Device>(trainer: &mut RlTrainer<D>) -> anyhow::Result<String> {
    let weights = trainer.weights()?;
    let sum = weights.iter().map(|leaf| checksum::values(leaf)).fold(checksum::SEED, checksum::mix);
    Ok(format!("{sum:016x}"))
}

impl Sent {
    /// From here on.
    pub fn by<D: Device>(trainer: &RlTrainer<D>) -> Sent {
        Sent { moved: trainer.ranks().collective().moved(), passed: trainer.passed() }
    }

    /// What was sent since, in so many steps, gathered from all ranks.
    pub fn shared<D: Device>(
        &self,
        trainer: &mut RlTrainer<D>,
        recipe: &Recipe,
        planned: usize,
        steps: usize,
    ) -> anyhow::Result<Shared> {
        let (ranks, steps) = (trainer.ranks().clone(), steps as u64);
        let moved = ranks.collective().moved().since(&self.moved);
        let passed = trainer.passed();
        // The model is of one step: passes of all of them are divided evenly.
        let passes = Passes {
            forward: (passed.forward - self.passed.forward) / steps,
            training: (passed.training - self.passed.training) / steps,
        };
        let sharing = Sharing::of(recipe, ranks.size());
        let (plan, config) = (trainer.plan(), &trainer.start().config);
        let model = step_bytes(plan, config, &Work::of(plan), passes, ranks.rank(), &sharing);
        let peak = trainer.device().memory().map_or(0, |memory| memory.peak);
        let own = vec![
            moved.all_to_all / steps,
            model.all_to_all,
            moved.all_gather / steps,
            model.all_gather,
            moved.host / steps,
            planned as u64,
            peak as u64,
        ];
        let of_ranks = ranks.gather(own)?.into_iter().map(|of| OfRank {
            gradients: of[0],
            gradients_by_model: of[1],
            weights: of[2],
            weights_by_model: of[3],
            host: of[4],
            planned_bytes: of[5],
            peak_bytes: of[6],
        });
        let checksum = checksum_of(trainer)?;
        Ok(Shared {
            shards: recipe.trainer.shards,
            zero_stage: recipe.trainer.zero_stage,
            checksum,
            ranks: of_ranks.collect(),
        })
    }
}

impl Shared {
    /// A line for each rank, where there are several.
    pub fn print(&self) -> Result<(), OutputError> {
        let Shared { shards, zero_stage, checksum, ranks } = self;
        out!("weights   {checksum} ({shards} shards, ZeRO-{zero_stage})")?;
        for (rank, of) in ranks.iter().enumerate() {
            let planned = of.planned_bytes >> 20;
            let memory = match of.peak_bytes {
                0 => format!("memory {planned} MiB planned"),
                peak => format!("memory {} MiB of {planned} planned", peak >> 20),
            };
            out!(
                "rank {rank}: sent a step: gradients {} (by the model {}), weights {} (by the model {}), host \
                 {}; {memory}",
                of.gradients,
                of.gradients_by_model,
                of.weights,
                of.weights_by_model,
                of.host
            )?;
        }
        Ok(())
    }
}
