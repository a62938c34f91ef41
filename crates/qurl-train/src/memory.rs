//! What a run takes of its device's memory, told before it starts.
//!
//! One truth: the run's own constructors, and the largest things of every kind that it does, on a device that
//! only counts ([`Device::counting`]). A device whose memory does not hold the sum refuses the run with these
//! figures, in place of failing somewhere on the way; at the end of a run they are printed beside what was
//! really allocated.

mod advice;

use crate::learner::{Learner, LearnerOptions};
use crate::ranks::Ranks;
use crate::recipe::{Recipe, RlPlan, Sft};
use crate::rl::{Models, TrainError};
use crate::shards::most_passes;
use qurl_kernels::device::DeviceMemory;
use qurl_kernels::{Device, DeviceError};
use qurl_model::ModelConfig;
use qurl_model::compute::TapeOptions;
use std::fmt;
use std::sync::Arc;

/// What the driver takes while a run lasts, beside what is requested of it: recorded steps, code, rounded
/// sizes. 1.2 GiB were seen beside runs of 31 and of 119 GiB.
pub const DRIVER_RESERVE: usize = 1536 << 20;

/// Parts of the memory of a run, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    parts: Vec<(String, usize)>,
    /// What each phase of a step takes beside the parts, where memory is given back between them.
    phases: Vec<(String, usize)>,
    /// State that is kept in page-locked memory of the host.
    on_host: usize,
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
        if now < self.seen {
            // The last part was given back: it belongs to the phases that take it again.
            self.plan.parts.last_mut().into_iter().for_each(|(_, bytes)| *bytes -= self.seen - now);
        } else {
            self.plan.parts.push((part.to_string(), now - self.seen));
        }
        self.seen = now;
    }

    /// What is allocated beside the parts while a phase has its memory.
    fn phase(&mut self, phase: &str) {
        let beside = self.memory().allocated.saturating_sub(self.plan.total());
        self.plan.phases.push((phase.to_string(), beside));
    }

    /// What there was at most beyond all parts: workspaces, which grow to what the operations need, and what
    /// the phases take in turn.
    fn finish(mut self) -> MemoryPlan {
        let rest = self.memory().peak.saturating_sub(self.plan.total());
        let most = self.plan.phases.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0).min(rest);
        if most > 0 {
            self.plan.parts.push(("the largest phase of a step".to_string(), most));
        }
        self.plan.parts.push(("workspace".to_string(), rest - most));
        self.plan.on_host = self.memory().on_host;
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
        let divided = ranks.divides_weights();
        models.rehearse(&mut queue, recipe, plan, &mut |phase| {
            if divided {
                count.phase(phase);
            }
        })?;
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
        let options = LearnerOptions {
            compute: recipe.trainer.compute,
            positions,
            pack_once: recipe.trainer.pack_once,
            kv_format: None,
            tape,
            adamw: sft.optim,
            lora: recipe.lora_options(),
        };
        let passes = most_passes(sft.batch_size, positions, recipe.trainer.shards, tape);
        MemoryPlan::of_passes(device, config, options, ranks, passes)
    }

    /// What a model that is trained takes on this rank, on a device like this one.
    pub fn of_learner<D: Device>(
        device: &D,
        config: &ModelConfig,
        options: LearnerOptions,
        ranks: &Ranks,
    ) -> Result<MemoryPlan, DeviceError> {
        MemoryPlan::of_passes(device, config, options, ranks, 1)
    }

    /// The same where a shard takes so many passes.
    fn of_passes<D: Device>(
        device: &D,
        config: &ModelConfig,
        options: LearnerOptions,
        ranks: &Ranks,
        passes: usize,
    ) -> Result<MemoryPlan, DeviceError> {
        let ranks = &ranks.counted();
        let counting = Arc::new(device.counting());
        let mut count = Count::new(&*counting);
        let mut queue = counting.queue()?;
        count.taken("queue");
        let shapes = options.shapes(config);
        let mut taken = |part: &str| count.taken(&format!("model: {part}"));
        let mut learner: Learner<D::Counting> =
            Learner::of(&mut queue, config, shapes, None, None, options, ranks, &mut taken)?;
        if ranks.divides_weights() {
            learner.work(&mut queue)?;
            taken("activations");
            learner.begin_shard(&mut queue, passes)?;
            taken("gradients");
        }
        learner.rehearse(&mut queue, options.tape, options.positions, None, None, passes)?;
        Ok(count.finish())
    }

    /// All parts with their bytes.
    pub fn parts(&self) -> &[(String, usize)] {
        &self.parts
    }

    /// What each phase of a step takes beside the parts that are there all the time, where weights are
    /// divided and memory is given back between the phases; workspaces of those before it included.
    pub fn phases(&self) -> &[(String, usize)] {
        &self.phases
    }

    /// Bytes of the host's memory, page-locked: moments with `offload`.
    pub fn on_host(&self) -> usize {
        self.on_host
    }

    /// All parts together.
    pub fn total(&self) -> usize {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Refuses a run that the device's free memory, or its budget in bytes, does not hold with
    /// `DRIVER_RESERVE` beside it, or whose state on the host the machine does not hold. A CPU has the memory
    /// of the machine or the container. What to change is said by [`MemoryPlan::check_rl`] and
    /// [`MemoryPlan::check_sft`], which know the recipe.
    pub fn check<D: Device>(&self, device: &D, budget: Option<usize>) -> Result<(), DeviceError> {
        match device.memory() {
            Some(DeviceMemory { free, total, .. })
                if self.total() + DRIVER_RESERVE > free.min(budget.unwrap_or(free)) =>
            {
                let device = match budget.filter(|budget| *budget < free) {
                    Some(budget) => format!("the device (trainer.memory_budget_mb = {})", budget >> 20),
                    None => format!("the device ({} of {} MiB free)", free >> 20, total >> 20),
                };
                let what = format!("this run: {self}, and {} MiB for the driver", DRIVER_RESERVE >> 20);
                Err(DeviceError::OutOfMemory { device, need: self.total(), what })
            }
            Some(_) => self.check_state_on_host(qurl_files::available_memory()),
            None => self.check_host(qurl_files::available_memory(), budget),
        }
    }

    /// What a CPU holds of it: there is no driver and no workspace worth counting, and what would be kept on
    /// the host is memory like all other.
    fn on_a_cpu(&self) -> MemoryPlan {
        let of_a_gpu = |part: &str| part == "queue" || part == "workspace";
        let mut parts: Vec<_> = self.parts.iter().filter(|(part, _)| !of_a_gpu(part)).cloned().collect();
        if self.on_host > 0 {
            parts.push(("state kept on the host".to_string(), self.on_host));
        }
        MemoryPlan { parts, phases: Vec::new(), on_host: 0 }
    }

    /// Bytes that are needed of the memory of a device, or of the machine where the device is a CPU.
    pub fn needed<D: Device>(&self, device: &D) -> usize {
        match device.memory() {
            Some(_) => self.total(),
            None => self.on_a_cpu().total(),
        }
    }

    /// What the host holds of the state of a run on a GPU.
    fn check_state_on_host(&self, free: Option<u64>) -> Result<(), DeviceError> {
        let need = self.on_host;
        match free {
            Some(free) if need as u64 > free => {
                let device = format!("the machine ({} MiB of memory available)", free >> 20);
                let what = "moments on the host; leave out optim.offload or set optim.moments = \"8bit\"";
                Err(DeviceError::OutOfMemory { device, need, what: what.to_string() })
            }
            _ => Ok(()),
        }
    }

    /// What a CPU holds of the plan, which was counted on a GPU that is not there: the memory that is free,
    /// or the budget where that is less.
    fn check_host(&self, free: Option<u64>, budget: Option<usize>) -> Result<(), DeviceError> {
        let plan = self.on_a_cpu();
        let need = plan.total();
        let budget =
            budget.map(|budget| budget as u64).filter(|budget| free.is_none_or(|free| *budget < free));
        match budget.or(free) {
            Some(limit) if need as u64 > limit => {
                let device = match budget {
                    Some(budget) => format!("the machine (trainer.memory_budget_mb = {})", budget >> 20),
                    None => format!("the machine ({} MiB of memory available)", limit >> 20),
                };
                Err(DeviceError::OutOfMemory { device, need, what: format!("this run: {plan}") })
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
        write!(f, "together {} MiB", self.total() >> 20)?;
        match self.on_host {
            0 => Ok(()),
            bytes => write!(f, "; on the host {} MiB, page-locked", bytes >> 20),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::AdamWOptions;
    use qurl_kernels::cpu::level::Level;
    use qurl_kernels::types::MomentFormat;
    use qurl_kernels::{Cpu, Format};
    use qurl_model::compute::Recompute;

    #[test]
    fn a_plan_names_its_parts_and_their_sum() {
        let cpu = Cpu::new(Level::best(), 1);
        let config = ModelConfig::named("qwen2.5-0.5b").expect("a known shape");
        let tape = TapeOptions { rows: 4096, sequences: 8, recompute: Recompute::None };
        let options = LearnerOptions {
            compute: Format::Bf16,
            positions: 512,
            pack_once: false,
            kv_format: None,
            tape,
            adamw: AdamWOptions::default(),
            lora: None,
        };
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
        // On a CPU the same, but for what only a GPU has.
        let host = plan.total() - part(&plan, "workspace") - part(&plan, "queue");
        assert!(plan.check_host(Some(host as u64), None).is_ok() && plan.check_host(None, None).is_ok());
        let error = plan.check_host(Some(host as u64 - 1), None).expect_err("refused").to_string();
        assert!(error.contains("MiB of memory available") && error.contains("model: moments"), "{error}");
        // The budget counts where it is less than what is free.
        for free in [None, Some(u64::MAX)] {
            assert!(plan.check_host(free, Some(host)).is_ok());
            let error = plan.check_host(free, Some(host - 1)).expect_err("refused").to_string();
            assert!(error.contains("trainer.memory_budget_mb = "), "{error}");
        }
        let error = plan.check(&cpu, Some(1 << 20)).expect_err("refused").to_string();
        assert!(error.contains("trainer.memory_budget_mb = 1)"), "{error}");
        let error = plan.check_host(Some(1 << 20), Some(host - 1)).expect_err("refused").to_string();
        assert!(error.contains("(1 MiB of memory available)"), "{error}");
        for (moments, bytes) in
            [(MomentFormat::Bf16, 4 * parameters), (MomentFormat::EightBit, 2 * parameters)]
        {
            let adamw = AdamWOptions { moments, ..options.adamw };
            let plan =
                MemoryPlan::of_learner(&cpu, &config, LearnerOptions { adamw, ..options }, &Ranks::alone());
            let taken = part(&plan.expect("a plan"), "model: moments");
            assert!((bytes..bytes + bytes / 60).contains(&taken), "{moments:?}: {taken}");
        }
        // Moments on the host are no part of the device's memory, and what the host lacks is said.
        let offload = AdamWOptions { offload: true, ..options.adamw };
        let offload = LearnerOptions { adamw: offload, ..options };
        let offload = MemoryPlan::of_learner(&cpu, &config, offload, &Ranks::alone()).expect("a plan");
        assert!(part(&offload, "model: moments") == 0 && offload.on_host() == 8 * parameters, "{offload}");
        assert_eq!(offload.total() + offload.on_host(), plan.total());
        assert!(offload.check_host(Some(host as u64), None).is_ok());
        assert!(offload.check_host(Some(host as u64 - 1), None).is_err());
        assert!(offload.check_state_on_host(Some(8 * parameters as u64)).is_ok());
        let error = offload.check_state_on_host(Some(8 * parameters as u64 - 1)).expect_err("refused");
        assert!(error.to_string().contains("optim.offload"), "{error}");
        // One packed copy of the blocks: two bytes less for each of their weights.
        let once = LearnerOptions { pack_once: true, ..options };
        let once = MemoryPlan::of_learner(&cpu, &config, once, &Ranks::alone()).expect("a plan");
        let [once, twice] = [&once, &plan].map(|plan| part(plan, "model: packed weights"));
        let blocks = parameters - config.vocab_size * config.hidden_size;
        assert!((twice - once).abs_diff(2 * blocks) < blocks / 50, "{twice} and {once}");
        let [mlp, block] = [Recompute::Mlp, Recompute::Block].map(|recompute| {
            let options = LearnerOptions { tape: TapeOptions { recompute, ..tape }, ..options };
            let plan = MemoryPlan::of_learner(&cpu, &config, options, &Ranks::alone()).expect("a plan");
            part(&plan, "model: activations")
        });
        let all = part(&plan, "model: activations");
        assert!(block < all / 4);
        // Of what MLPs keep there is one layer's left.
        let layers = config.num_layers;
        assert!((all - mlp).abs_diff(kept / layers * (layers - 1)) < kept / layers / 50, "{all} and {mlp}");
    }
}
