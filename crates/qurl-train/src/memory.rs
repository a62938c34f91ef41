//! What a run takes of its device's memory, told before it starts.
//!
//! One truth: the run's own constructors, and the largest things of every kind that it does, on a device that
//! only counts ([`Device::counting`]). A device whose memory does not hold the sum refuses the run with these
//! figures, in place of failing somewhere on the way; at the end of a run they are printed beside what was
//! really allocated.

use crate::learner::{Learner, LearnerOptions};
use crate::ranks::Ranks;
use crate::recipe::{Recipe, RlPlan, Sft};
use crate::rl::{Models, TrainError};
use qurl_kernels::device::DeviceMemory;
use qurl_kernels::{Device, DeviceError};
use qurl_model::compute::TapeOptions;
use qurl_model::{ModelConfig, params};
use std::fmt;
use std::sync::Arc;

/// What the driver takes while a run lasts, beside what is requested of it: recorded steps, code, rounded
/// sizes. 1.2 GiB were seen beside runs of 31 and of 119 GiB.
pub const DRIVER_RESERVE: usize = 1536 << 20;

/// Parts of the memory of a run, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    parts: Vec<(String, usize)>,
}

/// What is allocated on a counting device, part by part.
struct Count<'a, C: Device> {
    device: &'a C,
    seen: usize,
    plan: MemoryPlan,
}

impl<'a, C: Device> Count<'a, C> {
    fn new(device: &'a C) -> Self {
        Count { device, seen: 0, plan: MemoryPlan::default() }
    }

    fn memory(&self) -> DeviceMemory {
        self.device.memory().unwrap_or_else(|| panic!("a counting device has memory of its own"))
    }

    /// What was allocated since the last part.
    fn taken(&mut self, part: &str) {
        let now = self.memory().allocated;
        self.plan.parts.push((part.to_string(), now.saturating_sub(self.seen)));
        self.seen = now;
    }

    /// What there was at most beyond all parts: workspaces, which grow to what the operations need.
    fn finish(mut self) -> MemoryPlan {
        let rest = self.memory().peak.saturating_sub(self.plan.total());
        self.plan.parts.push(("workspace".to_string(), rest));
        self.plan
    }
}

impl MemoryPlan {
    /// What reinforcement learning by a recipe takes on this rank, on a device like this one.
    pub fn of_rl<D: Device>(
        device: &D,
        recipe: &Recipe,
        plan: &RlPlan,
        config: &ModelConfig,
        ranks: &Ranks,
    ) -> Result<MemoryPlan, TrainError> {
        let ranks = &ranks.counted();
        let counting = Arc::new(device.counting());
        let mut count = Count::new(&*counting);
        let mut queue = counting.queue()?;
        count.taken("queue");
        let mut taken = |part: &str| count.taken(part);
        let mut models: Models<D::Counting> =
            Models::new(&mut queue, recipe, plan, config, ranks, None, &mut taken)?;
        models.rehearse(&mut queue, plan)?;
        Ok(count.finish())
    }

    /// What supervised training by a recipe takes on this rank, on a device like this one.
    pub fn of_sft<D: Device>(
        device: &D,
        recipe: &Recipe,
        sft: &Sft,
        config: &ModelConfig,
        ranks: &Ranks,
    ) -> Result<MemoryPlan, DeviceError> {
        let positions = sft.max_length.min(config.max_position_embeddings);
        let rows = recipe.trainer.micro_tokens.max(positions);
        let tape = TapeOptions { rows, sequences: sft.batch_size, recompute: recipe.trainer.recompute };
        let options = LearnerOptions { compute: recipe.trainer.compute, positions, tape, adamw: sft.optim };
        MemoryPlan::of_learner(device, config, options, ranks)
    }

    /// What a model that is trained takes on this rank, on a device like this one.
    pub fn of_learner<D: Device>(
        device: &D,
        config: &ModelConfig,
        options: LearnerOptions,
        ranks: &Ranks,
    ) -> Result<MemoryPlan, DeviceError> {
        let ranks = &ranks.counted();
        let counting = Arc::new(device.counting());
        let mut count = Count::new(&*counting);
        let mut queue = counting.queue()?;
        count.taken("queue");
        let shapes = params::shapes(config, false);
        let mut taken = |part: &str| count.taken(&format!("model: {part}"));
        let mut learner: Learner<D::Counting> =
            Learner::of(&mut queue, config, shapes, None, options, ranks, &mut taken)?;
        learner.rehearse(&mut queue, options.tape, options.positions, None)?;
        Ok(count.finish())
    }

    /// All parts with their bytes.
    pub fn parts(&self) -> &[(String, usize)] {
        &self.parts
    }

    /// All parts together.
    pub fn total(&self) -> usize {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Refuses a run that the device's free memory does not hold, with `DRIVER_RESERVE` beside it; devices
    /// that do not tell take everything.
    pub fn check<D: Device>(&self, device: &D) -> Result<(), DeviceError> {
        match device.memory() {
            Some(DeviceMemory { free, total, .. }) if self.total() + DRIVER_RESERVE > free => {
                let device = format!("the device ({} of {} MiB free)", free >> 20, total >> 20);
                let what = format!(
                    "this run: {self}, and {} MiB for the driver; lower trainer.micro_tokens or \
                     rollout.kv_cache_mb, or set trainer.recompute",
                    DRIVER_RESERVE >> 20
                );
                Err(DeviceError::OutOfMemory { device, need: self.total(), what })
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (part, bytes) in &self.parts {
            write!(f, "{part} {} MiB, ", bytes >> 20)?;
        }
        write!(f, "together {} MiB", self.total() >> 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::AdamWOptions;
    use qurl_kernels::cpu::level::Level;
    use qurl_kernels::{Cpu, Format};

    #[test]
    fn a_plan_names_its_parts_and_their_sum() {
        let cpu = Cpu::new(Level::best(), 1);
        let config = ModelConfig::named("qwen2.5-0.5b").expect("a known shape");
        let tape = TapeOptions { rows: 4096, sequences: 8, recompute: false };
        let options =
            LearnerOptions { compute: Format::Bf16, positions: 512, tape, adamw: AdamWOptions::default() };
        let plan = MemoryPlan::of_learner(&cpu, &config, options, &Ranks::alone()).expect("a plan");
        let text = plan.to_string();
        for part in ["model: gradients", "model: activations", "workspace", "together"] {
            assert!(text.contains(part), "{text}");
        }
        let part = |plan: &MemoryPlan, name: &str| {
            plan.parts.iter().find(|(part, _)| part == name).unwrap_or_else(|| panic!("{plan}")).1
        };
        let parameters = config.param_count() as usize;
        assert_eq!(part(&plan, "model: weights in f32"), 4 * parameters);
        assert_eq!(part(&plan, "model: gradients"), 4 * parameters);
        assert_eq!(part(&plan, "model: moments"), 8 * parameters);
        // A row's gate and up projections and their SwiGLU alone, kept in every layer, in bf16.
        let kept = 2 * tape.rows * 3 * config.intermediate_size * config.num_layers;
        assert!(part(&plan, "model: activations") > kept, "{text}");
        let recomputed = LearnerOptions { tape: TapeOptions { recompute: true, ..tape }, ..options };
        let recomputed = MemoryPlan::of_learner(&cpu, &config, recomputed, &Ranks::alone()).expect("a plan");
        assert!(part(&recomputed, "model: activations") < part(&plan, "model: activations") / 4);
    }
}
