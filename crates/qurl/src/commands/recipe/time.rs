//! The time of a step, estimated before a run: measured costs ([`super::calibration`]) times what a step
//! does.
//!
//! Nobody knows how long responses will get, so there is one estimate with all of them at their limit and one
//! at half of it. Counted is what computes: quantizing the actor, prefill and decoding, scoring by actor,
//! reference and critic, and the passes and updates of actor and critic. Rewards, evaluations and checkpoints
//! are not.

use super::calibration::{Costs, RolloutWorkload, Workload, measure, page_bytes};
use crate::commands::bench::machine::Machine;
use qurl_kernels::{Device, Queue};
use qurl_model::ModelConfig;
use qurl_model::compute::TapeOptions;
use qurl_rollout::EngineOptions;
use qurl_train::learner::LearnerOptions;
use qurl_train::recipe::{Recipe, RlPlan, Sft, Updates};
use serde::Serialize;

/// How far off an estimate may be, in words.
pub const ESTIMATED: &str = "estimated from a short measurement on this device, within a factor of two or so";

/// The estimated time of a step whose sequences have a certain length.
#[derive(Clone, Debug, Serialize)]
pub struct StepTime {
    /// What has that length: `responses`, or the `sequences` of supervised training.
    pub of: &'static str,
    /// Their tokens.
    pub tokens: usize,
    /// Parts of the step, in order.
    pub phases: Vec<Phase>,
    /// All of them.
    pub seconds: f64,
}

/// A part of a step.
#[derive(Clone, Debug, Serialize)]
pub struct Phase {
    /// Its name, as metrics have it.
    pub phase: &'static str,
    /// Estimated seconds.
    pub seconds: f64,
}

impl StepTime {
    fn new(of: &'static str, tokens: usize, phases: &[(&'static str, f64)]) -> StepTime {
        let phases: Vec<Phase> = phases.iter().map(|&(phase, seconds)| Phase { phase, seconds }).collect();
        let seconds = phases.iter().map(|phase| phase.seconds).sum();
        StepTime { of, tokens, phases, seconds }
    }

    /// One line of text.
    pub fn line(&self) -> String {
        let phases: Vec<String> =
            self.phases.iter().map(|p| format!("{} {}", p.phase, duration(p.seconds))).collect();
        format!("{} of {} tokens: {} ({})", self.of, self.tokens, duration(self.seconds), phases.join(", "))
    }
}

/// Half of a limit, and the limit.
fn lengths(limit: usize) -> [usize; 2] {
    [limit.div_ceil(2), limit.max(1)]
}

/// Estimates of the first step of reinforcement learning; prompts have `prompt` tokens in the mean.
pub fn of_rl<D: Machine>(
    queue: &mut D::Queue,
    recipe: &Recipe,
    plan: &RlPlan,
    config: &ModelConfig,
    prompt: usize,
) -> anyhow::Result<Vec<StepTime>> {
    let (longest, n) = plan.sizes_at(1);
    let estimate = |response| {
        let mut step = RlStep::of(&**queue.device(), recipe, plan, n, prompt, response);
        step.fit_cache(page_bytes(&**queue.device(), config, step.rollout));
        let costs = measure::<D>(queue, config, step.workload())?;
        Ok(step.time(&costs, plan))
    };
    lengths(longest).into_iter().map(estimate).collect()
}

/// Estimates of a step of supervised training.
pub fn of_sft<D: Machine>(
    queue: &mut D::Queue,
    recipe: &Recipe,
    sft: &Sft,
    config: &ModelConfig,
) -> anyhow::Result<Vec<StepTime>> {
    let positions = sft.max_length.min(config.max_position_embeddings);
    let rows = recipe.trainer.micro_tokens.max(positions);
    let tape = TapeOptions { rows, sequences: sft.batch_size, recompute: recipe.trainer.recompute };
    let learner = LearnerOptions {
        lora: None,
        compute: recipe.trainer.compute,
        positions,
        pack_once: recipe.trainer.pack_once,
        kv_format: None,
        tape,
        adamw: sft.optim,
    };
    let estimate = |length| {
        let work = Workload { prompt: 0, length, learner, rollout: None };
        let costs = measure::<D>(queue, config, work)?;
        let tokens = (sft.batch_size * length) as f64;
        let phases = [("learn", tokens * costs.learn), ("update", costs.update)];
        Ok(StepTime::new("sequences", length, &phases))
    };
    lengths(positions).into_iter().map(estimate).collect()
}

/// The sizes of a step of reinforcement learning.
struct RlStep {
    /// Prompts, and responses to each.
    prompts: usize,
    n: usize,
    /// Tokens of a prompt and of a response.
    prompt: usize,
    response: usize,
    learner: LearnerOptions,
    rollout: RolloutWorkload,
    /// Bytes for keys and values.
    kv_bytes: usize,
}

impl RlStep {
    fn of<D: Device>(
        device: &D,
        recipe: &Recipe,
        plan: &RlPlan,
        n: usize,
        prompt: usize,
        response: usize,
    ) -> RlStep {
        let (r, compute) = (&plan.rollout, recipe.trainer.compute);
        let prompts = plan.data.train_batch_size;
        let engine = r.engine_options(device);
        let engine = EngineOptions {
            max_num_seqs: r.max_num_seqs.min(prompts * n),
            max_num_batched_tokens: engine.max_num_batched_tokens.min(prompts * prompt).max(1),
            ..engine
        };
        let tape = plan.tape(&recipe.trainer);
        let learned = plan.actor.ppo_mini_batch_size * n * (prompt + response);
        let learner = LearnerOptions {
            lora: None,
            compute,
            positions: plan.longest(),
            pack_once: recipe.trainer.pack_once,
            kv_format: None,
            tape: TapeOptions { rows: tape.rows.min(learned), ..tape },
            adamw: plan.actor.optim,
        };
        let rollout = RolloutWorkload {
            format: r.format,
            quantize_head: r.quantize_head,
            kv_format: r.kv_format(),
            engine,
            sampling: r.sampling(),
        };
        RlStep { prompts, n, prompt, response, learner, rollout, kv_bytes: engine.kv_bytes }
    }

    /// No more sequences at once than the memory for keys and values holds at their full length.
    fn fit_cache(&mut self, page_bytes: usize) {
        let pages = (self.prompt + self.response).div_ceil(self.rollout.engine.page_size);
        let held = (self.kv_bytes / (page_bytes * pages).max(1)).max(1);
        self.rollout.engine.max_num_seqs = self.rollout.engine.max_num_seqs.min(held);
    }

    fn workload(&self) -> Workload {
        let RlStep { prompt, response, learner, rollout, .. } = *self;
        Workload { prompt, length: prompt + response, learner, rollout: Some(rollout) }
    }

    fn time(&self, costs: &Costs, plan: &RlPlan) -> StepTime {
        let responses = (self.prompts * self.n) as f64;
        let tokens = responses * (self.prompt + self.response) as f64;
        // Samples of a prompt share its prefill; whoever ends gives its place to the next.
        let prefill = (self.prompts * self.prompt) as f64 * costs.prefill;
        let decode_steps = responses * self.response as f64 / self.rollout.engine.max_num_seqs as f64;
        // The first update computes prox of its mini-batch itself, unless it is needed before.
        let first = match plan.algorithm.needs_prox_first() {
            true => 0,
            false => plan.actor.ppo_mini_batch_size.min(self.prompts),
        };
        let by_actor = 1.0 - first as f64 / self.prompts.max(1) as f64;
        let others = usize::from(plan.algorithm.needs_reference()) + usize::from(plan.critic.is_some());
        let updates = |updates: &Updates| {
            let epochs = updates.ppo_epochs as f64;
            let in_an_epoch = self.prompts.div_ceil(updates.ppo_mini_batch_size.max(1)) as f64;
            epochs * (tokens * costs.learn + in_an_epoch * costs.update)
        };
        let phases = [
            ("quantize", costs.quantize),
            ("rollout", prefill + decode_steps * costs.decode),
            ("score", (by_actor + others as f64) * tokens * costs.score),
            ("update", updates(&plan.actor) + plan.critic.as_ref().map_or(0.0, updates)),
        ];
        StepTime::new("responses", self.response, &phases)
    }
}

/// Seconds with two or three digits, in the unit that fits.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 0.001 => format!("{:.0} us", s * 1e6),
        s if s < 0.1 => format!("{:.1} ms", s * 1e3),
        s if s < 10.0 => format!("{s:.2} s"),
        s if s < 600.0 => format!("{s:.0} s"),
        s => format!("{:.0} min", s / 60.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qurl_kernels::cpu::level::Level;
    use qurl_kernels::{Cpu, Device};
    use qurl_model::Family;
    use qurl_model::config::Dims;
    use std::sync::Arc;

    const RECIPE: &str = r#"
        [model.new]
        hidden_size = 32
        intermediate_size = 64
        num_hidden_layers = 1
        num_attention_heads = 2
        num_key_value_heads = 1
        max_position_embeddings = 1024
        [task]
        type = "synthetic"
        kind = "addition"
        level = 1
        [sft]
        steps = 1
        batch_size = 4
        max_length = 32
        lr = 1e-3
        [data]
        train_batch_size = 4
        max_prompt_length = 8
        max_response_length = 16
        [rollout]
        n = 4
        kv_cache_mb = 64
        [algorithm]
        adv_estimator = { type = "grpo" }
        [actor]
        lr = 1e-4
        ppo_mini_batch_size = 2
        [run]
        total_steps = 1
        [trainer]
        compute = "f32"
    "#;

    fn recipe(overrides: &[&str]) -> (Recipe, RlPlan) {
        let overrides: Vec<String> = overrides.iter().map(|text| text.to_string()).collect();
        let recipe = Recipe::parse(RECIPE, "recipe.toml", &overrides).expect("a recipe");
        let plan = recipe.rl("recipe.toml").expect("a plan");
        (recipe, plan)
    }

    fn model(hidden_size: usize, num_layers: usize) -> ModelConfig {
        let dims = Dims {
            vocab_size: 32,
            hidden_size,
            intermediate_size: 2 * hidden_size,
            num_layers,
            num_heads: 2,
            num_kv_heads: 1,
        };
        ModelConfig::from_dims(Family::Qwen2, dims).expect("a shape")
    }

    fn seconds(time: &StepTime) -> Vec<(&'static str, f64)> {
        time.phases.iter().map(|phase| (phase.phase, phase.seconds)).collect()
    }

    /// On this machine: all phases take time, and more of it where responses are 32 times as long or the
    /// model is 500 times as large.
    #[test]
    fn measured_phases_grow_with_responses_and_model() {
        let cpu = Arc::new(Cpu::new(Level::best(), 1));
        let mut queue = cpu.queue().expect("a queue");
        let mut estimate = |overrides: &[&str], config: &ModelConfig| {
            let (recipe, plan) = recipe(overrides);
            of_rl::<Cpu>(&mut queue, &recipe, &plan, config, 4).expect("estimates")
        };
        let small = estimate(&[], &model(32, 1));
        assert_eq!(small.iter().map(|time| time.tokens).collect::<Vec<_>>(), [8, 16]);
        let longer = estimate(&["data.max_response_length=512"], &model(32, 1));
        let larger = estimate(&[], &model(256, 8));
        for (small, (longer, larger)) in
            seconds(&small[1]).iter().zip(seconds(&longer[1]).iter().zip(seconds(&larger[1])))
        {
            assert!(small.1 > 0.0 && larger.1 > small.1, "{}: {} and {}", small.0, small.1, larger.1);
            assert!(small.0 == "quantize" || longer.1 > small.1, "{}: {} and {}", small.0, small.1, longer.1);
        }
        let (recipe, _) = recipe(&[]);
        let sft = recipe.sft.as_ref().expect("supervised training");
        let times = of_sft::<Cpu>(&mut queue, &recipe, sft, &model(32, 1)).expect("estimates");
        assert_eq!(
            times.iter().map(|time| (time.of, time.tokens)).collect::<Vec<_>>(),
            [("sequences", 16), ("sequences", 32)]
        );
        assert!(times.iter().flat_map(seconds).all(|(_, seconds)| seconds > 0.0), "{times:?}");
    }

    /// Exact costs: what a step does is counted right.
    #[test]
    fn a_step_counts_passes_updates_and_decode_steps() {
        let costs =
            Costs { score: 1.0, learn: 10.0, update: 100.0, quantize: 7.0, prefill: 3.0, decode: 1000.0 };
        let time = |overrides: &[&str], page_bytes: usize| {
            let (recipe, plan) = recipe(overrides);
            let mut step = RlStep::of(&Cpu::new(Level::Scalar, 1), &recipe, &plan, 4, 4, 16);
            step.fit_cache(page_bytes);
            step.time(&costs, &plan)
        };
        // 16 responses of 4 + 16 tokens; the 4 prompts are computed once, all responses are decoded together.
        let plain = time(&[], 1024);
        let expected =
            [("quantize", 7.0), ("rollout", 48.0 + 16_000.0), ("score", 160.0), ("update", 3200.0 + 200.0)];
        assert_eq!(seconds(&plain), expected);
        assert_eq!(plain.seconds, expected.iter().map(|(_, seconds)| seconds).sum::<f64>());
        // Pages for 8 of the 16: each takes two pages.
        assert_eq!(seconds(&time(&[], 4 << 20))[1], ("rollout", 48.0 + 32_000.0));
        let kl = time(&["algorithm.kl_loss_coef=0.1", "actor.ppo_epochs=2"], 1024);
        assert_eq!(seconds(&kl)[2..], [("score", 480.0), ("update", 6800.0)]);
        let in_reward = "algorithm.kl_in_reward={ kl_ctrl = { type = \"fixed\", kl_coef = 0.1 } }";
        assert_eq!(seconds(&time(&[in_reward], 1024))[2], ("score", 640.0), "prox is needed for the rewards");
        let critic = "critic={ lr = 1e-4, ppo_mini_batch_size = 4 }";
        let ppo = time(&["algorithm.adv_estimator={ type = \"gae\" }", critic], 1024);
        assert_eq!(seconds(&ppo)[2..], [("score", 480.0), ("update", 3400.0 + 3300.0)]);
    }

    #[test]
    fn a_line_names_phases_and_units() {
        let phases = [("quantize", 0.0002), ("rollout", 0.05), ("score", 2.0), ("update", 700.0)];
        let time = StepTime::new("responses", 16, &phases);
        assert_eq!(
            time.line(),
            "responses of 16 tokens: 12 min (quantize 200 us, rollout 50.0 ms, score 2.00 s, update 12 min)"
        );
    }
}
