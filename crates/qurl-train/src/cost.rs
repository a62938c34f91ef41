//! What a step of several ranks moves, and how long it may take: the cost model of `docs/scale.md`.
//!
//! Bytes of tensors are exact and held against what the exchange counts. Times are sums of what bounds each
//! phase: arithmetic, memory, links. Nothing is assumed to overlap, so they are meant as upper bounds for a
//! machine that sustains the given rates.

mod network;

pub use network::{NetworkWork, Operations};

use crate::gather::Travel;
use crate::learner::Passes;
use crate::ranks::cuts;
use crate::recipe::{Forward, Recipe, RlPlan, Trainer, Updates};
use qurl_kernels::collective::Moved;
use qurl_kernels::types::SQUARES_BLOCK;
use qurl_kernels::{Format, KvFormat};
use qurl_model::compute::Recompute;
use qurl_model::{Lora, ModelConfig, ParamInfo, Params, params};

/// Bytes of a number of gradients and weights.
const NUMBER: u64 = 4;
/// Bytes that a token takes in flight to another rank, at most: id, log-probs of sampler, actor and
/// reference, value, entropy, text, and its part of what the loss says.
const TOKEN: u64 = 48;

/// What ranks run on. Rates are sustained ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cluster {
    /// bf16 arithmetic of a GPU in training, in operations a second.
    pub flops: f64,
    /// Memory of a GPU, in bytes a second.
    pub memory: f64,
    /// Links between the GPUs of a machine: bytes a second that a GPU sends.
    pub local: f64,
    /// Links between machines: bytes a second of each GPU.
    pub network: f64,
    /// GPUs of a machine.
    pub per_machine: usize,
    /// Seconds that an exchange takes at least.
    pub latency: f64,
}

impl Default for Cluster {
    /// Machines of eight H200 with NVLink and 400 Gb/s of InfiniBand for each GPU.
    fn default() -> Cluster {
        Cluster { flops: 400e12, memory: 4.0e12, local: 350e9, network: 45e9, per_machine: 8, latency: 30e-6 }
    }
}

/// What a step does, in global numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// Responses.
    pub responses: usize,
    /// Mean tokens of a prompt.
    pub prompt: usize,
    /// Mean tokens of a response.
    pub response: usize,
    /// Tokens of the longest response.
    pub longest: usize,
}

impl Work {
    /// A step by a recipe, its prompts and responses at half of their limits on average.
    pub fn of(plan: &RlPlan) -> Work {
        let (longest, n) = plan.sizes_at(1);
        let (responses, prompt) = (plan.data.train_batch_size * n, plan.data.max_prompt_length.div_ceil(2));
        Work { responses, prompt, response: longest.div_ceil(2), longest }
    }

    fn tokens(&self) -> usize {
        self.responses * (self.prompt + self.response)
    }
}

/// Seconds of a step's phases.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTime {
    /// Prefill and decoding.
    pub rollout: f64,
    /// Log-probs of actor and reference, values.
    pub scoring: f64,
    /// Forward and backward passes.
    pub training: f64,
    /// Gradients and weights between ranks.
    pub exchange: f64,
}

impl StepTime {
    /// All phases.
    pub fn total(&self) -> f64 {
        self.rollout + self.scoring + self.training + self.exchange
    }
}

/// Updates of a step.
pub fn updates(plan: &RlPlan, of: &Updates) -> usize {
    plan.data.train_batch_size / of.ppo_mini_batch_size.max(1) * of.ppo_epochs
}

/// How the ranks of a run share a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sharing {
    /// How many there are.
    pub ranks: usize,
    /// `trainer.shards`.
    pub shards: usize,
    /// Whether packed weights and gradients are divided, too (ZeRO-3).
    pub divided: bool,
    /// `trainer.compute`.
    pub compute: Format,
    /// Whether the copy that samples is packed after every update, since it runs the forward passes.
    pub straight: bool,
    /// What is trained, where it is not the model.
    pub lora: Option<Lora>,
}

impl Sharing {
    /// By a recipe, on so many ranks.
    pub fn of(recipe: &Recipe, ranks: usize) -> Sharing {
        let Trainer { shards, zero_stage, compute, .. } = recipe.trainer;
        Sharing {
            ranks,
            shards,
            divided: zero_stage == 3 && ranks > 1,
            compute,
            straight: recipe.trainer.forward == Forward::Rollout,
            lora: recipe.lora_options().map(|options| options.lora),
        }
    }

    fn shapes(&self, config: &ModelConfig, value_head: bool) -> Params<ParamInfo> {
        self.lora.map_or_else(|| params::shapes(config, value_head), |lora| lora.shapes(config))
    }
}

/// Passes of a step through actor, critic and reference, where all sequences are as long as the mean.
pub fn passes(plan: &RlPlan, trainer: &Trainer, work: &Work, sharing: &Sharing) -> Passes {
    let rows = plan.tape(trainer).rows as f64;
    let micro_batches = |tokens: f64| (tokens / rows).ceil() as u64;
    let scored = micro_batches(work.tokens() as f64 / sharing.ranks as f64);
    let networks = 1 + u64::from(plan.algorithm.needs_reference()) + u64::from(plan.critic.is_some());
    let trained = |of: &Updates| {
        let updates = updates(plan, of) as f64;
        let of_shard = work.tokens() as f64 * of.ppo_epochs as f64 / (updates * sharing.shards as f64);
        updates as u64 * (sharing.shards / sharing.ranks) as u64 * micro_batches(of_shard)
    };
    let training = trained(&plan.actor) + plan.critic.as_ref().map_or(0, trained);
    let probed = u64::from(plan.run.full_kl_positions > 0);
    Passes { forward: networks * scored + probed, training }
}

/// Bytes that a rank sends for these leaves: once its part of everyone's gradient to its owner, once its
/// pieces of the weights to everyone, and its partial sums of the norm.
fn leaf_bytes<'a>(
    leaves: impl IntoIterator<Item = &'a ParamInfo>,
    travel: Travel,
    rank: usize,
    ranks: usize,
) -> Moved {
    let mut moved = Moved::default();
    for leaf in leaves {
        let cuts = cuts(leaf.len(), ranks);
        let own = cuts[rank + 1] - cuts[rank];
        moved.all_to_all += NUMBER * (leaf.len() - own) as u64;
        moved.all_gather += NUMBER * travel.numbers(leaf, own) as u64 * (ranks as u64 - 1);
        moved.host += 8 * own.div_ceil(SQUARES_BLOCK) as u64 * (ranks as u64 - 1);
    }
    moved
}

/// Bytes that a rank sends in a step: exact for tensors, an estimate for facts about tokens. What is done
/// beside the step (checkpoints, evaluations, figures of the weights) gathers the weights, too, and so does
/// `rollout.lag`.
///
/// An update sends all gradients once and gathers all weights for the network that is packed anew; divided,
/// gradients are sent after every shard of a rank, and blocks gathered in every pass, where the backward
/// begins with the block that the forward ended with. The actor's weights are gathered once more, for the
/// copy that samples, and where that runs the forward passes, after every update.
///
/// The first step sends less: the weights of its last update are gathered by the next one's first pass.
pub fn step_bytes(
    plan: &RlPlan,
    config: &ModelConfig,
    work: &Work,
    passes: Passes,
    rank: usize,
    sharing: &Sharing,
) -> Moved {
    let (mut moved, ranks) = (Moved::default(), sharing.ranks);
    let learners =
        std::iter::once((&plan.actor, false)).chain(plan.critic.as_ref().map(|critic| (critic, true)));
    let own = Travel::of(sharing.compute, sharing.compute);
    for (of, value_head) in learners {
        let shapes = sharing.shapes(config, value_head);
        let all = leaf_bytes(shapes.iter(), own, rank, ranks);
        let of_blocks = shapes.layers.iter().flat_map(|layer| layer.as_ref().into_leaves());
        let blocks = leaf_bytes(of_blocks, own, rank, ranks);
        let count = updates(plan, of) as u64;
        let (sent, gathered) = match sharing.divided {
            true => ((sharing.shards / ranks) as u64, all.all_gather - blocks.all_gather),
            false => (1, all.all_gather),
        };
        moved.all_to_all += count * sent * all.all_to_all;
        moved.all_gather += count * gathered;
        moved.host += count * all.host;
        if !value_head {
            let copies = if sharing.straight { 1 + count } else { 1 };
            moved.all_gather +=
                copies * leaf_bytes(shapes.iter(), of_copy(plan, sharing), rank, ranks).all_gather;
        }
    }
    if sharing.divided {
        let layers = config.num_layers as u64;
        let layer = params::shapes(config, false).layers.swap_remove(0);
        let block = leaf_bytes(layer.as_ref().into_leaves(), own, rank, ranks).all_gather;
        moved.all_gather += (passes.forward * layers + passes.training * (2 * layers - 1)) * block;
    }
    moved.host += TOKEN * (work.tokens() as u64).div_ceil(ranks as u64) * (ranks as u64 - 1);
    moved
}

/// As what weights travel for the copy that samples: a scale of fewer bits is that of a whole row in f32.
fn of_copy(plan: &RlPlan, sharing: &Sharing) -> Travel {
    match plan.rollout.stochastic_rounding {
        true => Travel::Full,
        false => Travel::of(sharing.compute, plan.rollout.format),
    }
}

/// Seconds of a step on so many ranks. All arithmetic is at the rate of bf16, that of quantized forward
/// passes, too; weights beside adapters have no gradients.
pub fn step_time(
    plan: &RlPlan,
    config: &ModelConfig,
    recipe: &Recipe,
    work: &Work,
    ranks: usize,
    on: &Cluster,
) -> StepTime {
    let (size, parts) = (config.param_count() as f64, ranks as f64);
    let tokens = work.tokens() as f64 / parts;
    let actor = NetworkWork::actor(recipe, plan, config);
    let critic = plan.critic.as_ref().map(|of| (of, NetworkWork::critic(recipe, config)));
    let again = computed_again(recipe.trainer.recompute, config);
    let forwards = if recipe.trainer.recompute == Recompute::None { 1.0 } else { 2.0 };
    // Of a token in an epoch.
    let operations = |of: &Updates, network: &NetworkWork| {
        let weights = (1.0 + network.backward_of_weights()) * 2.0 * size + again;
        of.ppo_epochs as f64 * (weights + (forwards + 2.0) * network.of_adapters())
    };
    let trained = operations(&plan.actor, &actor)
        + critic.as_ref().map_or(0.0, |(of, network)| operations(of, network));
    let others = usize::from(plan.algorithm.needs_reference()) + usize::from(critic.is_some());
    let scored = 2.0 * size * (1 + others) as f64 + actor.of_adapters();
    StepTime {
        rollout: rollout_time(plan, config, work, parts, on),
        scoring: scored * tokens / on.flops,
        training: trained * tokens / on.flops,
        exchange: exchange_time(plan, config, recipe, work, ranks, on),
    }
}

/// Operations for a token that the backward pass does a second time, in GEMMs of all blocks but the last.
fn computed_again(recompute: Recompute, config: &ModelConfig) -> f64 {
    let d = config.hidden_size;
    let gate_up = 2 * config.intermediate_size * d;
    let weights = match recompute {
        Recompute::None => 0,
        Recompute::Mlp => gate_up,
        Recompute::Block => gate_up + d * (config.qkv_dim() + config.q_dim()),
    };
    2.0 * (weights * (config.num_layers - 1)) as f64
}

/// Prefill is arithmetic. A step of decoding reads all weights and the keys and values of its sequences;
/// there are as many as the longest response has tokens, or more where not all responses fit into a batch.
fn rollout_time(plan: &RlPlan, config: &ModelConfig, work: &Work, parts: f64, on: &Cluster) -> f64 {
    let size = config.param_count() as f64;
    let responses = work.responses as f64 / parts;
    let sampled = responses * work.response as f64;
    let steps = (sampled / plan.rollout.max_num_seqs as f64).max(work.longest as f64);
    let weights = size * weight_bytes(plan.rollout.format);
    let kv_number = match plan.rollout.kv_cache {
        Some(KvFormat::F32) => 4.0,
        Some(KvFormat::Bf16) | None => 2.0,
        Some(KvFormat::Int8 | KvFormat::Fp8) => 1.0,
    };
    let kv_token = kv_number * (2 * config.kv_dim() * config.num_layers) as f64;
    let context = work.prompt as f64 + work.response as f64 / 2.0;
    let read = steps * weights + sampled * context * kv_token;
    let prefill = 2.0 * size * (responses / plan.rollout.n as f64) * work.prompt as f64 / on.flops;
    prefill + (read / on.memory).max(2.0 * size * sampled / on.flops)
}

fn weight_bytes(format: Format) -> f64 {
    match format {
        Format::F32 => 4.0,
        Format::Bf16 => 2.0,
        Format::Int8 | Format::Fp8 | Format::Fp8Block => 1.0,
        Format::Int4 | Format::Nvfp4 => 0.5,
    }
}

/// A rank's bytes go to ranks of its own machine over one kind of link and to others over the other, at the
/// same time.
fn exchange_time(
    plan: &RlPlan,
    config: &ModelConfig,
    recipe: &Recipe,
    work: &Work,
    ranks: usize,
    on: &Cluster,
) -> f64 {
    if ranks == 1 {
        return 0.0;
    }
    let sharing = &Sharing::of(recipe, ranks);
    let passes = passes(plan, &recipe.trainer, work, sharing);
    let moved = step_bytes(plan, config, work, passes, 0, sharing).total() as f64;
    let near = on.per_machine.min(ranks) as f64 - 1.0;
    let others = ranks as f64 - 1.0;
    let (local, network) = (moved * near / others, moved * (others - near) / others);
    // Leaves of a block travel together; embedding, norm and head are the rest.
    let groups = config.num_layers as f64 + 3.0;
    let learners = std::iter::once(&plan.actor).chain(plan.critic.as_ref());
    let updates = learners.map(|of| updates(plan, of) as f64).sum::<f64>();
    let exchanges = match sharing.divided {
        true => {
            (updates * sharing.shards as f64 / ranks as f64) + (passes.forward + 2 * passes.training) as f64
        }
        false => 2.0 * updates,
    };
    (local / on.local).max(network / on.network) + groups * (1.0 + exchanges) * on.latency
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::Recipe;

    fn recipe(name: &str, set: &[&str]) -> Recipe {
        let path = format!("../../recipes/{name}.toml");
        let text = std::fs::read_to_string(&path).expect("a recipe");
        let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
        Recipe::parse(&text, &path, &set).expect("a recipe")
    }

    #[test]
    fn one_rank_sends_nothing_and_all_ranks_together_what_a_ring_would() {
        let config = ModelConfig::named("qwen2.5-0.5b").expect("a shape");
        let shapes = params::shapes(&config, false);
        let leaves = || shapes.layers[0].as_ref().into_leaves().into_iter().chain([&shapes.embed]);
        assert_eq!(leaf_bytes(leaves(), Travel::Full, 0, 1), Moved::default());
        let numbers: u64 = leaves().map(|leaf| leaf.len() as u64).sum();
        let linear: u64 =
            leaves().filter(|leaf| leaf.kind.is_block_linear()).map(|leaf| leaf.len() as u64).sum();
        assert!(linear > 0 && linear < numbers);
        for ranks in [2, 4, 8] {
            for (travel, halved) in [(Travel::Full, 0), (Travel::Bf16, linear)] {
                let all = (0..ranks).map(|rank| leaf_bytes(leaves(), travel, rank, ranks));
                let sum = all.fold((0, 0), |(a, b), moved| (a + moved.all_to_all, b + moved.all_gather));
                let others = ranks as u64 - 1;
                assert_eq!(sum, (4 * numbers * others, (4 * numbers - 2 * halved) * others));
            }
        }
    }

    #[test]
    fn beside_adapters_weights_have_no_gradients() {
        let config = ModelConfig::named("qwen2.5-7b").expect("a shape");
        let training = |set: &[&str]| {
            let set = [&["trainer.zero_stage=1", "trainer.recompute=false"], set].concat();
            let recipe = recipe("aime-dapo", &set);
            let plan = recipe.rl(recipe.file()).expect("a plan");
            let time = step_time(&plan, &config, &recipe, &Work::of(&plan), 1, &Cluster::default());
            (time.training, time.scoring)
        };
        let whole = training(&[]);
        let lora = ["lora.rank=1", "rollout.uaq=1", "lora.target_modules=k_proj"];
        let adapters = training(&lora);
        assert!((adapters.0 / whole.0 - 2.0 / 3.0).abs() < 1e-3 && adapters.1 >= whole.1);
        let recomputed = training(&[&lora[..], &["trainer.recompute=true"]].concat());
        // Blocks but the last run again, without their down projections.
        let again = recomputed.0 / adapters.0;
        assert!((1.25..1.35).contains(&again), "{again}");
        let larger = training(&["lora.rank=256", "rollout.uaq=1"]);
        assert!(larger.0 > 1.05 * adapters.0 && larger.0 < whole.0 && larger.1 > adapters.1);
    }

    #[test]
    fn more_ranks_take_less_time_and_are_less_efficient() {
        let recipe = recipe("aime-dapo", &["trainer.zero_stage=1", "trainer.shards=64"]);
        let plan = recipe.rl(recipe.file()).expect("a plan");
        let config = ModelConfig::named("qwen2.5-7b").expect("a shape");
        let (work, on) = (Work::of(&plan), Cluster::default());
        assert_eq!((work.responses, work.prompt, work.response, work.longest), (8192, 1024, 4096, 8192));
        assert_eq!(recipe.trainer.recompute, Recompute::Block);
        let time = |ranks| step_time(&plan, &config, &recipe, &work, ranks, &on);
        let alone = time(1);
        assert_eq!(alone.exchange, 0.0);
        // 6 P operations for each token, at the given rate, and 2 for each weight that is used a second time:
        // those of 27 of 28 blocks but for their down projections.
        let tokens = (8192 * (1024 + 4096)) as f64;
        let (d, f, qkv) = (3584.0, 18_944.0, 4608.0);
        let of_pass =
            |again: f64| (6.0 * config.param_count() as f64 + 2.0 * 27.0 * again) * tokens / on.flops;
        let close = |time: StepTime, again: f64| (time.training / of_pass(again) - 1.0).abs() < 1e-12;
        assert!(close(alone, d * (qkv + d + 2.0 * f)));
        for (recompute, again) in [(Recompute::Mlp, 2.0 * d * f), (Recompute::None, 0.0)] {
            let mut with = recipe.clone();
            with.trainer.recompute = recompute;
            assert!(close(step_time(&plan, &config, &with, &work, 1, &on), again), "{recompute}");
        }
        let mut last = (alone.total(), 1.0);
        for ranks in [2, 4, 8, 16, 32, 64] {
            let total = time(ranks).total();
            let efficiency = alone.total() / (ranks as f64 * total);
            assert!(total < last.0 && efficiency < last.1, "{ranks}: {total} s, {efficiency}");
            last = (total, efficiency);
        }
        // Slower links cost time, and only there.
        let slow = step_time(&plan, &config, &recipe, &work, 16, &Cluster { network: 4.5e9, ..on });
        assert!(slow.exchange > 5.0 * time(16).exchange && slow.training == time(16).training);
        assert_eq!(step_time(&plan, &config, &recipe, &work, 8, &Cluster { network: 4.5e9, ..on }), time(8));
    }
}
