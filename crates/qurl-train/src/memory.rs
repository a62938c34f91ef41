//! What a run takes of its device's memory, told before it starts.
//!
//! Counted from the sizes of the model and of the batches, the way the parts allocate. A device whose memory does not
//! hold the sum refuses the run with these figures, in place of failing somewhere on the way; at the end of a run they are
//! printed beside what was really allocated.

use crate::learner::LearnerOptions;
use crate::recipe::{Recipe, RlPlan, Sft};
use qurl_kernels::KvFormat;
use qurl_kernels::device::DeviceMemory;
use qurl_kernels::{Device, DeviceError, Format};
use qurl_model::ModelConfig;
use qurl_model::compute::{NetworkOptions, PAGE, TapeOptions};
use qurl_rollout::EngineOptions;
use std::fmt;

/// Workspaces of the kernels that do not depend on the model: those of GEMMs, partial sums, inputs on their way.
const FIXED_WORKSPACE: usize = 256 << 20;
/// Logits that the head holds at the same time, and most rows of them.
const HELD_LOGITS: usize = 1 << 28;
const HELD_ROWS: usize = 1 << 15;
/// What the driver takes while a run goes on, beside what is asked of it: recorded steps, code, rounded sizes. 1.2 GiB were
/// seen beside runs of 31 and of 119 GiB.
const DRIVER_RESERVE: usize = 1536 << 20;
/// Bytes of a bf16 number.
const BF16: usize = 2;
/// Bytes of an f32.
const F32: usize = 4;

/// Parts of the memory of a run, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    parts: Vec<(String, usize)>,
}

impl MemoryPlan {
    /// What reinforcement learning by a recipe takes.
    pub fn of_rl(recipe: &Recipe, plan: &RlPlan, config: &ModelConfig) -> MemoryPlan {
        let positions = plan.longest();
        let tape = plan.tape(&recipe.trainer);
        let compute = recipe.trainer.compute;
        let learner = |adamw| LearnerOptions { compute, positions, tape, adamw };
        let inference = |format| NetworkOptions { positions, ..NetworkOptions::inference(config, format) };
        let mut memory = MemoryPlan::default().learner("actor", config, &learner(plan.actor.optim));
        if let Some(critic) = &plan.critic {
            memory = memory.learner("critic", config, &learner(critic.optim));
        }
        if plan.algorithm.needs_reference() {
            memory = memory.network("reference", config, &inference(compute));
        }
        let r = &plan.rollout;
        let mut network = inference(r.format);
        network.head_format = if r.quantize_head { r.format } else { network.head_format };
        // Evaluations use the same pages in the trainer's own format.
        let engine = r.engine_options();
        let formats = [r.kv_cache.unwrap_or(network.kv_format), inference(compute).kv_format];
        let bytes = |kv_format: KvFormat| kv_bytes(config, &NetworkOptions { kv_format, ..network }, &engine);
        network.kv_format = if bytes(formats[0]) >= bytes(formats[1]) { formats[0] } else { formats[1] };
        memory.engine(config, &network, &engine)
    }

    /// What supervised training by a recipe takes.
    pub fn of_sft(recipe: &Recipe, sft: &Sft, config: &ModelConfig) -> MemoryPlan {
        let positions = sft.max_length.min(config.max_position_embeddings);
        let rows = recipe.trainer.micro_tokens.max(positions);
        let tape = TapeOptions { rows, sequences: sft.batch_size, recompute: recipe.trainer.recompute };
        let options = LearnerOptions { compute: recipe.trainer.compute, positions, tape, adamw: sft.optim };
        MemoryPlan::default().learner("model", config, &options)
    }

    /// Adds a model that is trained.
    pub fn learner(mut self, name: &str, config: &ModelConfig, options: &LearnerOptions) -> MemoryPlan {
        let weights = F32 * config.param_count() as usize;
        let network = NetworkOptions::training(config, options.compute);
        self.add(format!("{name}: weights in f32"), weights);
        self.add(format!("{name}: gradients"), weights);
        self.add(format!("{name}: moments"), 2 * weights);
        self.add(format!("{name}: packed weights"), packed_bytes(config, &network));
        self.add(format!("{name}: activations"), tape_bytes(config, options.tape, network.kv_format));
        self.share("workspace", workspace_bytes(config, options.compute, options.tape.rows));
        self
    }

    /// Adds a copy of the model that only computes forward.
    pub fn network(mut self, name: &str, config: &ModelConfig, options: &NetworkOptions) -> MemoryPlan {
        self.add(format!("{name}: packed weights"), packed_bytes(config, options));
        self
    }

    /// Adds an engine.
    pub fn engine(
        mut self,
        config: &ModelConfig,
        network: &NetworkOptions,
        options: &EngineOptions,
    ) -> MemoryPlan {
        self.add("rollout: packed weights".to_string(), packed_bytes(config, network));
        self.add("rollout: keys and values".to_string(), kv_bytes(config, network, options));
        let rows = options.max_num_batched_tokens.max(options.max_num_seqs);
        self.add("rollout: working memory".to_string(), rows * F32 * row_values(config, false));
        self
    }

    fn add(&mut self, part: String, bytes: usize) {
        self.parts.push((part, bytes));
    }

    /// A part that models share, one after the other: as much as the largest needs.
    fn share(&mut self, part: &str, bytes: usize) {
        match self.parts.iter_mut().find(|(name, _)| name == part) {
            Some((_, most)) => *most = bytes.max(*most),
            None => self.add(part.to_string(), bytes),
        }
    }

    /// All parts with their bytes.
    pub fn parts(&self) -> &[(String, usize)] {
        &self.parts
    }

    /// All parts together.
    pub fn total(&self) -> usize {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Refuses a run that the device's free memory does not hold, with [`DRIVER_RESERVE`] beside it; devices that do not
    /// tell take everything.
    pub fn check<D: Device>(&self, device: &D) -> Result<(), DeviceError> {
        match device.memory() {
            Some(DeviceMemory { free, total, .. }) if self.total() + DRIVER_RESERVE > free => {
                let device = format!("the device ({} of {} MiB free)", free >> 20, total >> 20);
                let what = format!(
                    "this run: {self}, and {} MiB for the driver; lower trainer.micro_tokens or rollout.kv_cache_mb, or set trainer.recompute",
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

/// Bytes of a network: linear layers in their format, embedding and small tensors in f32.
fn packed_bytes(config: &ModelConfig, options: &NetworkOptions) -> usize {
    let c = config;
    let bits = |format: Format| match format {
        Format::F32 => 32,
        Format::Bf16 => 16,
        Format::Int8 | Format::Fp8 | Format::Fp8Block => 8,
        Format::Int4 | Format::Nvfp4 => 4,
    };
    let block = c.hidden_size * (c.qkv_dim() + c.q_dim() + 3 * c.intermediate_size);
    let table = c.vocab_size * c.hidden_size;
    let linear = c.num_layers * block / 8 * bits(options.format) + table / 8 * bits(options.head_format);
    // Trained ones twice, for forward products and for the way back, but for f32, which both read alike.
    let copies = if options.trained && options.format != Format::F32 { 2 } else { 1 };
    copies * linear + F32 * table + 2 * F32 * options.positions * c.head_dim / 2
}

/// Values of one row in a block's forward pass; `kept` counts what only training keeps.
fn row_values(config: &ModelConfig, kept: bool) -> usize {
    let c = config;
    let always = c.qkv_dim() + c.q_dim() + 2 * c.intermediate_size;
    let working = 4 * c.hidden_size + c.intermediate_size;
    let training = c.hidden_size + c.num_heads + if c.qk_norm { c.qkv_dim() } else { 0 };
    always + if kept { training } else { working }
}

fn tape_bytes(config: &ModelConfig, tape: TapeOptions, kv: KvFormat) -> usize {
    let c = config;
    let kept = if tape.recompute { 1 } else { c.num_layers };
    let gradients = 5 * c.hidden_size + c.intermediate_size + c.q_dim() + c.qkv_dim();
    let row = c.num_layers * c.hidden_size + kept * row_values(config, true) + gradients;
    F32 * tape.rows * row + tape.pages() * page_bytes(config, kv, PAGE)
}

/// Bytes of a page of one layer.
fn page_bytes(config: &ModelConfig, kv: KvFormat, page_size: usize) -> usize {
    let (number, scale) = match kv {
        KvFormat::F32 => (4, 0),
        KvFormat::Bf16 => (2, 0),
        KvFormat::Int8 | KvFormat::Fp8 => (1, 4),
    };
    2 * page_size * config.num_kv_heads * (config.head_dim * number + scale)
}

/// Bytes of the engine's keys and values: whole pages of the budget, but no more than all sequences can fill, twice.
fn kv_bytes(config: &ModelConfig, network: &NetworkOptions, options: &EngineOptions) -> usize {
    let page = page_bytes(config, network.kv_format, options.page_size) * config.num_layers;
    let useful = options.max_num_seqs.saturating_mul(2 * network.positions.div_ceil(options.page_size));
    ((options.kv_bytes / page.max(1)).min(useful) + 1) * page
}

/// Bytes that the operations of a training step work in: operands of the GEMMs of a block's backward pass in bf16, what
/// attention's backward keeps of a row (operands, 16 bytes a head, sums of keys and values in parts), logits and their
/// gradients, and the largest matrix before it is packed. Areas are an eighth larger than what is asked of them.
fn workspace_bytes(config: &ModelConfig, compute: Format, rows: usize) -> usize {
    let c = config;
    let held = (HELD_LOGITS / c.vocab_size).clamp(1, HELD_ROWS).min(rows);
    let logits = F32 * held * c.vocab_size;
    let number = if compute == Format::F32 { F32 } else { BF16 };
    let left = rows * c.intermediate_size.max(c.q_dim()).max(c.hidden_size) * number;
    let right = (rows * 2 * c.intermediate_size * BF16).max(BF16 * held * c.vocab_size);
    let gradient = rows * c.hidden_size * BF16;
    let attention = rows * (BF16 * (c.qkv_dim() + c.q_dim()) + 16 * c.num_heads + 2 * F32 * c.q_dim());
    let packing = BF16 * c.vocab_size * c.hidden_size;
    let asked = match compute {
        Format::F32 => logits + left + packing + rows * F32 * c.num_heads,
        _ => logits + left + right + gradient + attention + packing,
    };
    FIXED_WORKSPACE + asked + asked / 8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::AdamWOptions;

    #[test]
    fn a_plan_names_its_parts_and_their_sum() {
        let config = ModelConfig::named("qwen2.5-0.5b").expect("a known shape");
        let tape = TapeOptions { rows: 4096, sequences: 8, recompute: false };
        let options =
            LearnerOptions { compute: Format::Bf16, positions: 512, tape, adamw: AdamWOptions::default() };
        let plan = MemoryPlan::default().learner("actor", &config, &options);
        let text = plan.to_string();
        for part in ["actor: gradients", "actor: activations", "together"] {
            assert!(text.contains(part), "{text}");
        }
        // Sixteen bytes a parameter for weights, gradients and moments, and more than that in all.
        assert!(plan.total() > 16 * config.param_count() as usize);
        // What is trained in bf16 is packed twice.
        let packed = |trained| {
            packed_bytes(
                &config,
                &NetworkOptions { trained, ..NetworkOptions::training(&config, Format::Bf16) },
            )
        };
        let linear = config.num_layers
            * config.hidden_size
            * (config.qkv_dim() + config.q_dim() + 3 * config.intermediate_size)
            + config.vocab_size * config.hidden_size;
        assert_eq!(packed(true) - packed(false), BF16 * linear);
        // A second model brings its own of everything but workspace.
        let shared = workspace_bytes(&config, Format::Bf16, tape.rows);
        let both = plan.clone().learner("critic", &config, &options);
        assert_eq!(both.total(), 2 * plan.total() - shared);
        let recomputed = LearnerOptions { tape: TapeOptions { recompute: true, ..tape }, ..options };
        assert!(MemoryPlan::default().learner("actor", &config, &recomputed).total() < plan.total());
    }
}
