//! The arithmetic of one network of a step, by the formats it is computed in and by what of it is frozen: one
//! description for the limits beside measured phases (`qurl bench step`) and for estimates (`qurl plan`).

use crate::optimizer::AdamWOptions;
use crate::recipe::{Forward, Recipe, RlPlan};
use qurl_kernels::Format;
use qurl_kernels::types::MomentFormat;
use qurl_model::{Lora, ModelConfig};

/// Multiply-adds, times two, by the format of the GEMMs that make them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operations(pub [(Format, f64); 3]);

impl Operations {
    /// Seconds where each format has its rate in operations a second.
    pub fn seconds(&self, rate: impl Fn(Format) -> f64) -> f64 {
        self.0.iter().filter(|(_, count)| *count > 0.0).map(|&(format, count)| count / rate(format)).sum()
    }
}

/// How a network is computed, and what of it is trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NetworkWork {
    /// Operations of a token in the linear layers of all blocks.
    linear: f64,
    /// In the head.
    head: f64,
    /// In attention, for each position that it sees.
    attention: f64,
    /// In adapters.
    adapters: f64,
    /// Format of the blocks' weights.
    blocks: Format,
    /// Format of the head.
    head_format: Format,
    /// Format of everything else: attention, adapters, and all of a backward pass, which takes quantized
    /// weights for the numbers that they stand for.
    rest: Format,
    /// Numbers that are trained.
    trained: f64,
    /// Whether the weights that the linear layers and the head multiply with are frozen.
    frozen: bool,
}

impl NetworkWork {
    /// The network that is trained. Beside adapters it is packed in the base's format, and with
    /// `trainer.forward = "rollout"` the rollout's weights run its forward passes.
    pub fn actor(recipe: &Recipe, plan: &RlPlan, config: &ModelConfig) -> NetworkWork {
        let (r, compute) = (&plan.rollout, recipe.trainer.compute);
        let lora = recipe.lora_options();
        let shared = lora.is_some() || recipe.trainer.forward == Forward::Rollout;
        let blocks = if shared { r.format } else { compute };
        let head = if shared && r.quantize_head { r.format } else { compute };
        NetworkWork::of(config, lora.map(|lora| lora.lora), [blocks, head, compute])
    }

    /// The network that samples: its adapters, attention and a head in full are in bf16, or all is in f32.
    pub fn sampler(recipe: &Recipe, plan: &RlPlan, config: &ModelConfig) -> NetworkWork {
        let format = plan.rollout.format;
        let full = if format == Format::F32 { Format::F32 } else { Format::Bf16 };
        let head = if plan.rollout.quantize_head { format } else { full };
        NetworkWork::of(config, recipe.lora_options().map(|lora| lora.lora), [format, head, full])
    }

    /// The reference: the actor as it began, without adapters.
    pub fn reference(recipe: &Recipe, plan: &RlPlan, config: &ModelConfig) -> NetworkWork {
        NetworkWork { adapters: 0.0, ..NetworkWork::actor(recipe, plan, config) }
    }

    /// The critic, whose head is a vector.
    pub fn critic(recipe: &Recipe, config: &ModelConfig) -> NetworkWork {
        NetworkWork { head: 0.0, ..NetworkWork::of(config, None, [recipe.trainer.compute; 3]) }
    }

    fn of(c: &ModelConfig, lora: Option<Lora>, [blocks, head_format, rest]: [Format; 3]) -> NetworkWork {
        let weights = c.num_layers * c.hidden_size * (c.qkv_dim() + c.q_dim() + 3 * c.intermediate_size);
        let of_adapters = lora.map_or(0.0, |lora| lora.param_count(c) as f64);
        NetworkWork {
            linear: 2.0 * weights as f64,
            head: 2.0 * (c.vocab_size * c.hidden_size) as f64,
            attention: 4.0 * (c.num_layers * c.q_dim()) as f64,
            adapters: 2.0 * of_adapters,
            blocks,
            head_format,
            rest,
            trained: if lora.is_some() { of_adapters } else { c.param_count() as f64 },
            frozen: lora.is_some(),
        }
    }

    /// The formats that it computes in.
    pub fn formats(&self) -> [Format; 3] {
        [self.blocks, self.head_format, self.rest]
    }

    /// A forward pass of whole sequences, every token of which sees itself and those before it, with the head
    /// at so many of them.
    pub fn forward(&self, sequences: &[usize], targets: usize) -> Operations {
        let tokens: f64 = sequences.iter().map(|&length| length as f64).sum();
        let seen: f64 = sequences.iter().map(|&length| (length * (length + 1) / 2) as f64).sum();
        Operations([
            (self.blocks, self.linear * tokens),
            (self.head_format, self.head * targets as f64),
            (self.rest, self.attention * seen + self.adapters * tokens),
        ])
    }

    /// One forward and one backward pass of them.
    pub fn training(&self, sequences: &[usize], targets: usize) -> Operations {
        let Operations([blocks, head, rest]) = self.forward(sequences, targets);
        let backward = self.backward_of_weights() * (blocks.1 + head.1) + 2.0 * rest.1;
        Operations([blocks, head, (rest.0, rest.1 + backward)])
    }

    /// Decoding of so many tokens without what they see.
    pub fn decoding(&self, tokens: usize) -> Operations {
        let tokens = tokens as f64;
        Operations([
            (self.blocks, self.linear * tokens),
            (self.head_format, self.head * tokens),
            (self.rest, self.adapters * tokens),
        ])
    }

    /// GEMMs with the weights in a backward pass, in multiples of the forward pass's: gradients of their
    /// inputs, and where they are trained of themselves.
    pub fn backward_of_weights(&self) -> f64 {
        if self.frozen { 1.0 } else { 2.0 }
    }

    /// Operations of a token in adapters in a forward pass.
    pub fn of_adapters(&self) -> f64 {
        self.adapters
    }

    /// Bytes that an update reads and writes: weight, gradient and two moments, all written but the gradient.
    pub fn update_bytes(&self, adamw: &AdamWOptions) -> f64 {
        let moment = match adamw.moments {
            MomentFormat::F32 => 4.0,
            MomentFormat::Bf16 => 2.0,
            MomentFormat::EightBit => 1.0,
        };
        self.trained * (8.0 + 4.0 + 4.0 * moment)
    }

    /// Bytes that the copy that samples takes to be packed anew: what is trained is read in f32 and written,
    /// into `packed` bytes where that is the whole copy.
    pub fn packing_bytes(&self, packed: usize) -> f64 {
        let adapter = if self.rest == Format::F32 { 4.0 } else { 2.0 };
        4.0 * self.trained + if self.frozen { adapter * self.trained } else { packed as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(set: &[&str]) -> (Recipe, RlPlan) {
        let text = "[model]\npath = \"random weights\"\n\
                    [data]\ntrain_batch_size = 4\nmax_prompt_length = 8\nmax_response_length = 24\n\
                    [rollout]\nn = 2\n\
                    [algorithm]\nadv_estimator = { type = \"grpo\" }\nkl_loss_coef = 0.001\n\
                    [actor]\nlr = 1e-7\nppo_mini_batch_size = 4\n[run]\ntotal_steps = 1\n\
                    [trainer]\ncompute = \"bf16\"\n";
        let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
        let recipe = Recipe::parse(text, "test", &set).expect("a recipe");
        let plan = recipe.rl("test").expect("a plan");
        (recipe, plan)
    }

    const SEQUENCES: [usize; 2] = [512, 300];
    const TARGETS: usize = 600;

    /// Seconds of a forward pass and of training on a machine that does twice as much in int8.
    fn seconds(work: &NetworkWork) -> (f64, f64) {
        let rate = |format| if format == Format::Int8 { 2.0 } else { 1.0 };
        let (forward, training) = (work.forward(&SEQUENCES, TARGETS), work.training(&SEQUENCES, TARGETS));
        (forward.seconds(rate), training.seconds(rate))
    }

    #[test]
    fn whole_models_train_at_three_forward_passes_and_frozen_bases_at_two() {
        let config = ModelConfig::named("qwen2.5-0.5b").expect("a shape");
        let work = |set: &[&str]| {
            let (recipe, plan) = recipe(set);
            NetworkWork::actor(&recipe, &plan, &config)
        };
        let whole = work(&["rollout.format=int8"]);
        let (forward, training) = seconds(&whole);
        assert_eq!(training, 3.0 * forward, "weights, inputs and the forward pass, in bf16");
        // Beside adapters that hardly compute anything the weights have no gradients.
        let tiny = ["rollout.format=bf16", "lora.rank=1", "lora.target_modules=k_proj"];
        let adapters = work(&tiny);
        let (base, trained) = seconds(&adapters);
        assert!((base / forward - 1.0).abs() < 1e-3);
        let share = trained / training;
        assert!((0.66..0.72).contains(&share), "all but attention at two thirds: {share}");
        // An int8 base halves the time of its GEMMs, and nothing of the backward pass.
        let int8 = work(&["rollout.format=int8", tiny[1], tiny[2]]);
        let (quick, trained_int8) = seconds(&int8);
        assert!((0.5..0.75).contains(&(quick / base)), "head and attention stay: {}", quick / base);
        assert!((trained - trained_int8 - (base - quick)).abs() < 1e-6 * trained);
        // The critic has no head to compute, and the rollout's forward is that of its formats.
        let (recipe, plan) =
            recipe(&["rollout.format=int8", "rollout.quantize_head=true", "trainer.forward=rollout"]);
        let straight = seconds(&NetworkWork::actor(&recipe, &plan, &config));
        assert!(straight.0 < quick && straight.1 > trained_int8);
        assert!(seconds(&NetworkWork::critic(&recipe, &config)).0 < forward);
    }

    #[test]
    fn updates_and_packing_touch_what_is_trained() {
        let config = ModelConfig::named("qwen2.5-0.5b").expect("a shape");
        let (parameters, packed) = (config.param_count() as f64, 1 << 30);
        let work = |set: &[&str]| {
            let (recipe, plan) = recipe(set);
            (NetworkWork::actor(&recipe, &plan, &config), plan.actor.optim)
        };
        let (whole, adamw) = work(&["rollout.format=int8"]);
        assert_eq!(whole.update_bytes(&adamw), 28.0 * parameters);
        assert_eq!(whole.packing_bytes(packed), 4.0 * parameters + packed as f64);
        let (eight, adamw) = work(&["rollout.format=int8", "actor.optim.moments=8bit"]);
        assert_eq!(eight.update_bytes(&adamw), 16.0 * parameters);
        let (adapters, adamw) = work(&["rollout.format=int8", "lora.rank=8"]);
        let (recipe, _) = recipe(&["rollout.format=int8", "lora.rank=8"]);
        let trained = recipe.lora_options().expect("adapters").lora.param_count(&config) as f64;
        assert!(trained < parameters / 50.0);
        assert_eq!(adapters.update_bytes(&adamw), 28.0 * trained);
        assert_eq!(adapters.packing_bytes(packed), 6.0 * trained);
        let (recipe, plan) = self::recipe(&["rollout.format=int8", "lora.rank=8"]);
        let reference = seconds(&NetworkWork::reference(&recipe, &plan, &config)).0;
        assert!(reference < seconds(&adapters).0, "the reference has no adapters");
    }
}
