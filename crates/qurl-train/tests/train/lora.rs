//! Adapters beside a frozen base that trainer and engine share: on-policy to the bit in any format, the base
//! as the reference, runs that resume with the same bits, and what such runs take of a device's memory.

use crate::common::tiny::{self, Scratch, bits, steps, warmed};
use qurl_kernels::cuda::counting::GpuProfile;
use qurl_kernels::{Cpu, Cuda, Device};
use qurl_model::config::Dims;
use qurl_model::hf::peft;
use qurl_model::params::{DenseMlp, MlpParams};
use qurl_model::{Dtype, Family, ModelConfig, Params};
use qurl_train::checkpoint::{Keep, ModelFiles, Store};
use qurl_train::memory::MemoryPlan;
use qurl_train::ranks::Ranks;
use qurl_train::recipe::{Recipe, RecipeError, RlPlan};
use qurl_train::rl::{RlTrainer, Symptom};
use qurl_train::run::{Run, RunParts};
use qurl_train::runlog::RunLog;
use qurl_train::sft::{Examples, SftTrainer};
use qurl_train::start::Start;
use std::path::Path;
use std::sync::Arc;

/// Adapters of rank 4.
const ADAPTERS: &[&str] = &["lora={ rank = 4, alpha = 8 }", "actor.lr=5e-3", "trainer.compute=bf16"];

fn cpu() -> Arc<Cpu> {
    tiny::cpu(2)
}

/// A model that knows a little of the task, as a directory.
fn base(dir: &Path) {
    let model = ["model.new.hidden_size=64", "model.new.intermediate_size=128"];
    let recipe = tiny::parsed(tiny::WARM_START, &model).expect("a recipe");
    let (start, _) = tiny::start(&recipe);
    let weights = warmed(&cpu(), &recipe);
    ModelFiles::of(&start).save(dir, &start.config, &weights, Dtype::F32).expect("saved");
}

/// Reinforcement learning of adapters beside a base.
fn parsed(base: &Path, overrides: &[&str]) -> Result<Recipe, RecipeError> {
    let path = format!("model.path={}", base.display());
    tiny::parsed(tiny::RL, &[&[path.as_str()], ADAPTERS, overrides].concat())
}

fn recipe(base: &Path, overrides: &[&str]) -> Recipe {
    parsed(base, overrides).expect("a recipe")
}

fn trainer(recipe: &Recipe) -> RlTrainer<Cpu> {
    let (start, task) = tiny::start(recipe);
    RlTrainer::new(&cpu(), recipe, "lora", start, task).expect("a trainer")
}

#[test]
fn rollouts_beside_a_frozen_base_are_exactly_on_policy_in_any_format() {
    let scratch = Scratch::new();
    let base_dir = scratch.path("base");
    base(&base_dir);
    let blocks = ["bf16", "int8", "fp8", "fp8-block", "int4", "nvfp4"].map(|format| (format, false));
    for (format, head) in blocks.into_iter().chain([("int8", true), ("int4", true)]) {
        let kl = "algorithm.kl_loss_coef=0.01";
        let set = [format!("rollout.format={format}"), format!("rollout.quantize_head={head}")];
        let recipe = recipe(&base_dir, &[&set[0], &set[1], kl]);
        let mut trainer = trainer(&recipe);
        let of_head = trainer.engine().network().options().head_format;
        assert_eq!(of_head.to_string(), if head { format } else { "bf16" });
        let before = trainer.weights().expect("weights");
        let records = steps(&mut trainer, 2);
        for record in &records {
            let mismatch = record.mismatch.expect("tokens");
            assert_eq!((mismatch.kl, mismatch.rho_max, mismatch.rho_min), (0.0, 1.0, 1.0), "{format}");
            assert!(record.updates > 0 && record.grad_norm > 0.0, "{format}: nothing was learned");
        }
        // The reference is the base: at first the policy itself, later no longer.
        let kls: Vec<f64> = records.iter().map(|record| record.reference_kl.expect("a reference")).collect();
        assert!(kls[1] > 0.0 && kls[1] > kls[0], "{format}: KL to the reference {kls:?}");
        let after = trainer.weights().expect("weights");
        assert_ne!(bits(&before), bits(&after), "{format}: adapters");
        assert!(
            after.layers.iter().all(|layer| layer.qkv.is_empty()),
            "the base is no part of what is trained"
        );
    }
}

#[test]
fn a_run_with_adapters_resumes_with_the_same_bits_from_a_directory_of_peft() {
    let scratch = Scratch::new();
    let base_dir = scratch.path("base");
    base(&base_dir);
    let text = |noise: bool| if noise { "rollout.norm_noise={ num_stages = 2 }" } else { "trainer.seed=1" };
    for noise in [false, true] {
        let recipe =
            recipe(&base_dir, &["lora.target_modules=[\"q_proj\", \"v_proj\", \"up_proj\"]", text(noise)]);
        let mut whole = trainer(&recipe);
        let records = steps(&mut whole, 3);
        let mut first = trainer(&recipe);
        steps(&mut first, 1);
        let snapshot = first.snapshot(&recipe.to_toml()).expect("snapshot");
        let dir = scratch.path("adapter");
        ModelFiles::of(first.start())
            .save(&dir, &first.start().config, &snapshot.actor.weights, Dtype::F32)
            .expect("saved");
        let loaded = peft::load(&dir, &first.start().config).expect("an adapter");
        assert_eq!(bits(&loaded.params), bits(&snapshot.actor.weights));
        let mut second = trainer(&recipe);
        second.restore(snapshot).expect("restored");
        assert_eq!(steps(&mut second, 2), records[1..], "noise: {noise}");
        assert_eq!(bits(&second.weights().expect("weights")), bits(&whole.weights().expect("weights")));
        // Noise on the norms of the copy that samples is seen from its stage on, and by nobody else.
        let off: Vec<bool> =
            records.iter().map(|record| record.mismatch.expect("tokens").rho_max > 1.0).collect();
        assert_eq!(off, [false, noise, noise]);
    }
}

/// The base is read from its directory again when a run resumes: other weights of the same sizes there are
/// noticed, and what an old checkpoint does not say is said.
#[test]
fn a_base_that_was_changed_is_noticed_by_its_weights_when_a_run_resumes() {
    let scratch = Scratch::new();
    let base_dir = scratch.path("base");
    base(&base_dir);
    let recipe = recipe(&base_dir, &["rollout.format=int8"]);
    let mut first = trainer(&recipe);
    let snapshot = first.snapshot(&recipe.to_toml()).expect("snapshot");
    let mut old = snapshot.clone();
    old.state.base = None;
    let warning = trainer(&recipe).restore(old).expect("restored").expect("a warning");
    assert!(warning.contains("older version") && warning.contains("base"), "{warning}");
    assert_eq!(trainer(&recipe).restore(snapshot.clone()).expect("restored"), None);
    // One number of one matrix, by one bit.
    let mut start = Start::load(&base_dir).expect("a model");
    let MlpParams::Dense(DenseMlp { down, .. }) = &mut start.weights.layers[1].mlp;
    down[7] = f32::from_bits(down[7].to_bits() ^ 1);
    ModelFiles::of(&start).save(&base_dir, &start.config, &start.weights, Dtype::F32).expect("saved");
    let error = trainer(&recipe).restore(snapshot).expect_err("another base").to_string();
    let expected = [base_dir.to_str().expect("a path"), "1 of ", "down", "lora.path"];
    assert!(expected.iter().all(|part| error.contains(part)), "{error}");
}

/// Where training starts is what it falls back on: the adapters, where it continues from some.
#[test]
fn a_run_that_breaks_at_once_names_the_adapters_that_it_began_with() {
    let scratch = Scratch::new();
    let base_dir = scratch.path("base");
    base(&base_dir);
    let (dir, new) = (scratch.path("adapter"), trainer(&recipe(&base_dir, &[])));
    let snapshot = { new }.snapshot("").expect("snapshot");
    let (start, _) = tiny::start(&recipe(&base_dir, &[]));
    ModelFiles::of(&start).save(&dir, &start.config, &snapshot.actor.weights, Dtype::F32).expect("saved");
    let continued = format!("lora.path={}", dir.display());
    for (overrides, expected) in [(&[][..], &base_dir), (&[continued.as_str()][..], &dir)] {
        let (recipe, path) = (recipe(&base_dir, overrides), scratch.path("run"));
        let store = Store::open(&path.join("checkpoints"), Keep { last: 1, best: 1 }).expect("a store");
        let parts = RunParts { log: RunLog::open(&path, None).expect("logs"), path, store, from: None };
        let run = Run::begin(trainer(&recipe), &recipe, parts).expect("begun");
        let broken = run.broken(1, &Symptom::NoGradient).expect("a summary");
        assert_eq!(broken.last_good, Some(expected.display().to_string()));
    }
}

#[test]
fn supervised_training_of_adapters_learns_and_continues_from_them() {
    let scratch = Scratch::new();
    let base_dir = scratch.path("base");
    base(&base_dir);
    let path = format!("model.path={}", base_dir.display());
    let of_sft = |overrides: &[&str]| {
        let set = [
            path.as_str(),
            "lora={ rank = 8, alpha = 16, rslora = true, base_format = \"int8\" }",
            "sft.steps=12",
            "trainer.compute=bf16",
            "trainer.micro_tokens=256",
        ];
        tiny::parsed(&["task", "sft"], &[&set[..], overrides].concat()).expect("a recipe")
    };
    let run = |overrides: &[&str]| -> (Vec<f64>, Params<Vec<f32>>, Start) {
        let recipe = of_sft(overrides);
        let settings = recipe.sft.clone().expect("sft");
        let task = recipe.task().expect("[task]").task().expect("task");
        let start = Start::of_sft(&recipe, Some(&*task)).expect("start");
        let examples = Examples::open(&settings, 1, &start, Some(&*task)).expect("examples");
        let mut trainer =
            SftTrainer::new(&cpu(), &recipe, &settings, &start, &examples, &Ranks::alone()).expect("trainer");
        let losses = (0..12).map(|_| trainer.step().expect("step").loss).collect();
        let weights = trainer.weights().expect("weights");
        drop(trainer);
        drop(examples);
        (losses, weights, start)
    };
    let (losses, weights, start) = run(&[]);
    assert!(losses[11] < 0.9 * losses[0], "{losses:?}");
    let dir = scratch.path("adapter");
    ModelFiles::of(&start).save(&dir, &start.config, &weights, Dtype::F32).expect("saved");
    let path = format!("lora.path={}", dir.display());
    let (continued, ..) = run(&[&path]);
    assert!(continued[0] < 0.9 * losses[0], "{losses:?}, then {continued:?}");
    // Another rank is another adapter.
    let recipe = of_sft(&[&path, "lora.rank=4"]);
    let task = recipe.task().expect("[task]").task().expect("task");
    let error = Start::of_sft(&recipe, Some(&*task)).err().expect("refused").to_string();
    assert!(error.contains("lora.path") && error.contains("rank 8") && error.contains("rank 4"), "{error}");
}

fn shape(dims: Dims) -> ModelConfig {
    let mut config = ModelConfig::from_dims(Family::Qwen2, dims).expect("a configuration");
    (config.max_position_embeddings, config.tie_word_embeddings) = (32_768, false);
    config
}

fn seven_b() -> ModelConfig {
    shape(Dims {
        vocab_size: 152_064,
        hidden_size: 3584,
        intermediate_size: 18_944,
        num_layers: 28,
        num_heads: 28,
        num_kv_heads: 4,
    })
}

/// The plan of a recipe on a large GPU, constructed on a device that only counts.
fn plan(file: &str, config: &ModelConfig, overrides: &[&str]) -> (MemoryPlan, Option<usize>) {
    let (recipe, rl) = published(file, overrides);
    let plan = MemoryPlan::of_rl(&*cpu(), &recipe, &rl, config, &Ranks::alone()).expect("a plan");
    (plan, recipe.memory_budget())
}

/// A recipe of the project.
fn published(file: &str, overrides: &[&str]) -> (Recipe, RlPlan) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes").join(file);
    let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
    let recipe = Recipe::read(&path, &overrides).expect("recipe");
    let rl = recipe.rl(file).expect("a plan");
    (recipe, rl)
}

#[test]
fn a_7b_base_fits_a_consumer_gpu_and_a_32b_base_one_large_gpu() {
    let small = seven_b();
    let large = shape(Dims {
        vocab_size: 152_064,
        hidden_size: 5120,
        intermediate_size: 27_648,
        num_layers: 64,
        num_heads: 40,
        num_kv_heads: 8,
    });
    let counting = cpu().counting();
    // A card of 24 GB has less than 24 GiB, kernels of its own architecture, and the driver beside the run.
    for card in ["rtx4090", "rtx3090"] {
        let gpu = Cuda::counting_as(&GpuProfile::named(card).expect("a kind of GPU"));
        let (recipe, rl) = published("qwen-7b-grpo.toml", &[]);
        let seven = MemoryPlan::of_rl(&gpu, &recipe, &rl, &small, &Ranks::alone()).expect("a plan");
        assert_eq!(recipe.memory_budget(), Some(24 << 30));
        seven.check(&gpu, recipe.memory_budget()).unwrap_or_else(|error| panic!("{card}: {error}"));
        let error = seven.check(&gpu, Some(12 << 30)).expect_err("too little").to_string();
        assert!(error.contains("trainer.memory_budget_mb = 12288"), "{error}");
    }
    let (thirty_two, budget) = plan("qwen-32b-lora.toml", &large, &[]);
    assert_eq!(budget, Some(139 << 30));
    thirty_two.check(&counting, budget).unwrap_or_else(|error| panic!("{error}"));

    // The base is there once: neither the reference nor the engine adds to it.
    let part = |plan: &MemoryPlan, name: &str| {
        plan.parts().iter().find(|(part, _)| part == name).unwrap_or_else(|| panic!("{plan}")).1
    };
    let linear = large.param_count() as usize - 2 * large.vocab_size * large.hidden_size;
    let packed = part(&thirty_two, "actor: packed weights");
    assert!(
        (linear..linear * 5 / 4).contains(&packed.saturating_sub(8 * large.vocab_size * large.hidden_size))
    );
    assert!(part(&thirty_two, "rollout: adapters") < packed / 20, "{thirty_two}");
    assert!(part(&thirty_two, "reference: norms") < 64 << 20, "{thirty_two}");
    assert!(part(&thirty_two, "actor: moments") < 4 << 30, "{thirty_two}");
}

/// All of 7B with answers of 8k tokens on one GPU of 141 GB; without what makes it fit, the error says what
/// to set, in the order of what it costs.
#[test]
fn all_of_7b_fits_one_large_gpu_and_a_plan_that_does_not_fit_says_what_would() {
    let (file, config) = ("qwen-7b-whole.toml", seven_b());
    let gpu = Cuda::counting_as(&GpuProfile::h200());
    let ranks = Ranks::alone();
    let check = |overrides: &[&str]| {
        let (recipe, rl) = published(file, overrides);
        let plan = MemoryPlan::of_rl(&gpu, &recipe, &rl, &config, &ranks).expect("a plan");
        (plan.clone(), plan.check(&gpu, recipe.memory_budget()), recipe, rl)
    };
    // The host of this test need not hold the moments.
    let (whole, fits, ..) = check(&[]);
    assert!(whole.on_host() > 28 << 30 && whole.total() < 135 << 30, "{whole}");
    if let Err(error) = fits {
        assert!(error.to_string().contains("memory available"), "{error}");
    }
    let without = ["trainer.pack_once=false", "trainer.recompute=false", "actor.optim.moments='f32'"];
    let (plan, refused, recipe, rl) = check(&[&without[..], &["actor.optim.offload=false"]].concat());
    refused.expect_err("too large");
    let error = plan.check_rl(&gpu, &recipe, &rl, &config, &ranks).expect_err("too large").to_string();
    let place = |key: &str| error.find(&format!("; with {key}")).unwrap_or_else(|| panic!("{key}: {error}"));
    let (once, offload) = (place("trainer.pack_once = true"), place("actor.optim.offload = true as well"));
    assert!(once < offload && offload < place("trainer.recompute = \"mlp\" as well"), "{error}");
}

#[test]
fn what_adapters_cannot_be_combined_with_is_refused_by_its_key() {
    let refused = |overrides: &[&str], expected: &[&str]| {
        let error = parsed(Path::new("/nowhere"), overrides).expect_err("refused").to_string();
        for part in expected {
            assert!(error.contains(part), "{overrides:?}: {error}");
        }
    };
    refused(&["lora.dropout=0.1"], &["lora.dropout", "0.1", "0: dropout is not computed"]);
    refused(&["lora.rank=0"], &["lora.rank", "0"]);
    refused(&["lora.target_modules=\"q\""], &["lora.target_modules", "q_proj", "all-linear"]);
    refused(&["lora.target_modules=[\"q_proj\", \"lm_head\"]"], &["lora.target_modules", "lm_head"]);
    refused(&["lora.base_format=nvfp4"], &["lora.base_format", "nvfp4", "rollout.format = int8"]);
    refused(&["rollout.uaq=1.5"], &["rollout.uaq", "1 beside [lora]"]);
    refused(&["rollout.lag=1"], &["rollout.lag", "0 beside [lora]"]);
    refused(&["trainer.zero_stage=3"], &["trainer.zero_stage", "1, since the base of adapters is frozen"]);
    refused(&["trainer.forward=rollout"], &["trainer.forward", "full: with [lora]"]);
    refused(&["rollout.stochastic_rounding=true"], &["rollout.stochastic_rounding"]);
    refused(&["trainer.compute=f32"], &["rollout.format", "int8", "f32, as trainer.compute"]);
    refused(&["sft={ steps = 1, batch_size = 1, lr = 1e-3 }"], &["sft", "lora.path"]);
    refused(&["rollout.norm_noise={ sigma_start = 0.0 }"], &["rollout.norm_noise.sigma_start"]);
    let critic = "critic={ lr = 1e-3, ppo_mini_batch_size = 2 }";
    refused(&["algorithm.adv_estimator={ type = \"gae\" }", critic], &["critic", "[lora]"]);
}
