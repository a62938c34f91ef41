//! What a run takes of its device's memory, told before it starts.
//!
//! Counted from the sizes of the model and of the batches, the way the parts allocate. A device whose memory does not
//! hold the sum refuses the run with these figures, in place of failing somewhere on the way.

use crate::learner::LearnerOptions;
use crate::recipe::{Recipe, RlPlan, Sft};
use qurl_kernels::{Backend, BackendError, Format};
use qurl_model::ModelConfig;
use qurl_model::compute::{NetworkOptions, TapeOptions};
use qurl_rollout::EngineOptions;
use std::fmt;

/// Scratch memory of the kernels: logits and their gradients, workspaces.
const SCRATCH: usize = 2 << 30;
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
    /// Scratch memory alone.
    pub fn new() -> MemoryPlan {
        MemoryPlan { parts: vec![("scratch".to_string(), SCRATCH)] }
    }

    /// What reinforcement learning by a recipe takes.
    pub fn of_rl(recipe: &Recipe, plan: &RlPlan, config: &ModelConfig) -> MemoryPlan {
        let positions = plan.longest();
        let rows = recipe.trainer.micro_tokens.max(positions);
        let tape = TapeOptions { rows, sequences: rows, recompute: recipe.trainer.recompute };
        let compute = recipe.trainer.compute;
        let learner = |adamw| LearnerOptions { compute, positions, tape, adamw };
        let inference = |format| NetworkOptions { positions, ..NetworkOptions::inference(config, format) };
        let mut memory = MemoryPlan::new().learner("actor", config, &learner(plan.actor.optim));
        if let Some(critic) = &plan.critic {
            memory = memory.learner("critic", config, &learner(critic.optim));
        }
        if plan.algorithm.needs_reference() {
            memory = memory.network("reference", config, &inference(compute));
        }
        let r = &plan.rollout;
        let mut network = inference(r.format);
        network.head_format = if r.quantize_head { r.format } else { network.head_format };
        let engine = EngineOptions {
            kv_bytes: r.kv_cache_mb << 20,
            page_size: r.page_size,
            max_num_seqs: r.max_num_seqs,
            max_num_batched_tokens: r.max_num_batched_tokens,
        };
        memory.engine(config, &network, &engine)
    }

    /// What supervised training by a recipe takes.
    pub fn of_sft(recipe: &Recipe, sft: &Sft, config: &ModelConfig) -> MemoryPlan {
        let positions = sft.max_length.min(config.max_position_embeddings);
        let rows = recipe.trainer.micro_tokens.max(positions);
        let tape = TapeOptions { rows, sequences: sft.batch_size, recompute: recipe.trainer.recompute };
        let options = LearnerOptions { compute: recipe.trainer.compute, positions, tape, adamw: sft.optim };
        MemoryPlan::new().learner("model", config, &options)
    }

    /// Adds a model that is trained.
    pub fn learner(mut self, name: &str, config: &ModelConfig, options: &LearnerOptions) -> MemoryPlan {
        let weights = F32 * config.param_count() as usize;
        let network = NetworkOptions::training(config, options.compute);
        self.add(format!("{name}: weights in f32"), weights);
        self.add(format!("{name}: gradients"), weights);
        self.add(format!("{name}: moments"), 2 * weights);
        self.add(format!("{name}: packed weights"), packed_bytes(config, &network));
        self.add(format!("{name}: activations"), tape_bytes(config, options.tape));
        self.share("operands", operand_bytes(config, options.tape.rows));
        self
    }

    /// Adds a copy of the model that only computes forward.
    pub fn network(mut self, name: &str, config: &ModelConfig, options: &NetworkOptions) -> MemoryPlan {
        self.add(format!("{name}: packed weights"), packed_bytes(config, options));
        self
    }

    /// Adds an engine.
    pub fn engine(mut self, config: &ModelConfig, network: &NetworkOptions, options: &EngineOptions) -> MemoryPlan {
        self.add("rollout: packed weights".to_string(), packed_bytes(config, network));
        self.add("rollout: keys and values".to_string(), options.kv_bytes);
        let rows = options.max_num_batched_tokens.max(options.max_num_seqs);
        self.add("rollout: working memory".to_string(), rows * F32 * row_values(config, false));
        self
    }

    fn add(&mut self, part: String, bytes: usize) {
        self.parts.push((part, bytes));
    }

    /// A part that models use in turns: as much as the largest needs.
    fn share(&mut self, part: &str, bytes: usize) {
        match self.parts.iter_mut().find(|(name, _)| name == part) {
            Some((_, most)) => *most = bytes.max(*most),
            None => self.add(part.to_string(), bytes),
        }
    }

    /// All parts together.
    pub fn total(&self) -> usize {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Refuses a run that the device's free memory does not hold; devices that do not tell take everything.
    pub fn check<B: Backend>(&self, backend: &B) -> Result<(), BackendError> {
        match backend.memory() {
            Some((free, total)) if self.total() > free => {
                let device = format!("the device ({} of {} MiB free)", free >> 20, total >> 20);
                let what = format!(
                    "this run: {self}; lower trainer.micro_tokens or rollout.kv_cache_mb, or set trainer.recompute"
                );
                Err(BackendError::OutOfMemory { device, need: self.total(), what })
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

fn tape_bytes(config: &ModelConfig, tape: TapeOptions) -> usize {
    let c = config;
    let kept = if tape.recompute { 1 } else { c.num_layers };
    let gradients = 5 * c.hidden_size + c.intermediate_size + c.q_dim() + c.qkv_dim();
    let row = c.num_layers * c.hidden_size + kept * row_values(config, true) + gradients;
    F32 * tape.rows * row
}

/// Bytes of rows on their way into the products of a block's backward pass, and of what attention works with there: operands
/// in bf16, 16 bytes of facts a head, and sums of keys and values in parts.
fn operand_bytes(config: &ModelConfig, rows: usize) -> usize {
    let c = config;
    let products = 3 * c.intermediate_size + c.hidden_size;
    let attention = BF16 * (c.qkv_dim() + c.q_dim()) + 16 * c.num_heads + 2 * F32 * c.q_dim();
    rows * (BF16 * products + attention)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::AdamWOptions;

    #[test]
    fn a_plan_names_its_parts_and_their_sum() {
        let config = ModelConfig::named("qwen2.5-0.5b").expect("a known shape");
        let tape = TapeOptions { rows: 4096, sequences: 8, recompute: false };
        let options = LearnerOptions { compute: Format::Bf16, positions: 512, tape, adamw: AdamWOptions::default() };
        let plan = MemoryPlan::new().learner("actor", &config, &options);
        let text = plan.to_string();
        for part in ["actor: gradients", "actor: activations", "together"] {
            assert!(text.contains(part), "{text}");
        }
        // Sixteen bytes a parameter for weights, gradients and moments, and more than that in all.
        assert!(plan.total() > 16 * config.param_count() as usize);
        // What is trained in bf16 is packed twice.
        let packed = |trained| {
            packed_bytes(&config, &NetworkOptions { trained, ..NetworkOptions::training(&config, Format::Bf16) })
        };
        let linear =
            config.num_layers * config.hidden_size * (config.qkv_dim() + config.q_dim() + 3 * config.intermediate_size)
                + config.vocab_size * config.hidden_size;
        assert_eq!(packed(true) - packed(false), BF16 * linear);
        // A second model brings its own of everything but scratch memory.
        let shared = SCRATCH + operand_bytes(&config, tape.rows);
        let both = plan.clone().learner("critic", &config, &options);
        assert_eq!(both.total(), 2 * plan.total() - shared);
        let recomputed = LearnerOptions { tape: TapeOptions { recompute: true, ..tape }, ..options };
        assert!(MemoryPlan::new().learner("actor", &config, &recomputed).total() < plan.total());
    }
}
