//! The same bits for one, two and four ranks: the records of all steps and the final weights, with all that a
//! step can do, and of runs that are resumed with another number of ranks. The ranks are threads here; what
//! moves their bytes otherwise is tested where it is.

use qurl_kernels::collective::Collective;
use qurl_kernels::cpu::level::Level;
use qurl_kernels::types::HeadOutput;
use qurl_kernels::{Cpu, Device, DeviceError, Format};
use qurl_model::compute::{Targets, whole_batch};
use qurl_model::{Dtype, ModelConfig, Params};
use qurl_tasks::reward::RewardError;
use qurl_tasks::task::{Attempt, Problem, Split, Task, Verdict};
use qurl_train::checkpoint::{Keep, ModelFiles, Store};
use qurl_train::learner::{Learner, LearnerOptions, LossGradient, LossScope};
use qurl_train::memory::MemoryPlan;
use qurl_train::optimizer::AdamWOptions;
use qurl_train::ranks::Ranks;
use qurl_train::recipe::Recipe;
use qurl_train::rl::{RlTrainer, Symptom, TrainError};
use qurl_train::run::{Outcome, Run, RunError, RunParts};
use qurl_train::runlog::RunLog;
use qurl_train::sft::{self, Examples, SftRecord};
use qurl_train::start::Start;
use serde_json::Value;
use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Wide enough that its matrices are cut into pieces: two blocks of the gradient's norm and more.
const TINY: &str = r#"
[model.new]
hidden_size = 64
intermediate_size = 192
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 64

[task]
type = "synthetic"
kind = "addition"
level = 1
format_weight = 0.5

[sft]
steps = 12
batch_size = 10
lr = 5e-3
max_length = 48
validation_freq = 6

[data]
train_batch_size = 6
max_prompt_length = 8
max_response_length = 16

[rollout]
n = 3
format = "int8"
kv_cache_mb = 8

[algorithm]
adv_estimator = { type = "grpo" }

[actor]
lr = 1e-3
ppo_mini_batch_size = 3
ppo_epochs = 2

[run]
total_steps = 3
test_freq = 2
test_problems = 7
test_k = 2
update_metrics_freq = 1
rollout_log_freq = 0

[trainer]
compute = "f32"
micro_tokens = 64
shards = 4
save_freq = 2
"#;

const GRPO: &[&str] = &["algorithm.kl_loss_coef=0.01", "algorithm.entropy_coeff=0.01"];
const PPO: &[&str] = &[
    "rollout.n=1",
    "data.train_batch_size=10",
    "actor.ppo_mini_batch_size=5",
    "algorithm.adv_estimator={ type = \"gae\" }",
    "critic={ lr = 1e-3, ppo_mini_batch_size = 5, cliprange_value = 0.5 }",
    "algorithm.kl_in_reward={ kl_ctrl = { type = \"fixed\", kl_coef = 0.01 } }",
    "trainer.compute=bf16",
];
const DAPO: &[&str] = &[
    "algorithm.filter_groups={ max_num_gen_batches = 6, allow_fewer = true }",
    "algorithm.overlong_buffer={ len = 8 }",
    "rollout.uaq=1.5",
];

fn recipe(overrides: &[&str]) -> Recipe {
    let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
    Recipe::parse(TINY, "tiny", &overrides).expect("a recipe")
}

/// Runs `rank` at all ranks of a run, as threads; what each gives, by rank.
fn on_ranks<T: Send>(count: usize, rank: impl Fn(Collective) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = Collective::threads(count)
            .into_iter()
            .map(|collective| scope.spawn(move || rank(collective)))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank that ends")).collect()
    })
}

fn cpu() -> Arc<Cpu> {
    Arc::new(Cpu::new(Level::best(), 1))
}

fn bits(weights: &Params<Vec<f32>>) -> Vec<u32> {
    weights.iter().flatten().map(|x| x.to_bits()).collect()
}

/// A record as its line of metrics.jsonl, without times.
fn line(record: &impl serde::Serialize) -> String {
    let mut value = serde_json::to_value(record).expect("JSON");
    value.as_object_mut().expect("an object").remove("timing");
    value.to_string()
}

/// A warm start and three steps, with their records, the tests between them, and the weights.
fn trained(recipe: &Recipe, collective: Collective) -> (Vec<String>, Vec<u32>) {
    let ranks = Ranks::new(Arc::new(collective), recipe).expect("ranks");
    let (cpu, mut lines) = (cpu(), Vec::new());
    let task = recipe.task().expect("[task]").task().expect("task");
    let mut start = Start::from_recipe(recipe, &*task).expect("start");
    let settings = recipe.sft.as_ref().expect("sft");
    let examples = Examples::open(settings, recipe.trainer.seed, &start, Some(&*task)).expect("examples");
    let keep = |record: &mut SftRecord| {
        lines.push(line(record));
        Ok::<_, sft::SftError>(ControlFlow::Continue(()))
    };
    let (weights, _) =
        sft::warm_start(&cpu, recipe, settings, &start, &examples, &ranks, keep).expect("warm start");
    drop(examples);
    start.weights = weights;
    let mut trainer = RlTrainer::on_ranks(&cpu, recipe, "tiny", start, task, ranks).expect("trainer");
    for _ in 0..3 {
        lines.push(line(&trainer.step().expect("step")));
        lines.push(format!("{:?}", trainer.evaluate().expect("an evaluation")));
    }
    let shown = trainer.sampled_rollouts(4).expect("rollouts");
    lines.extend(shown.iter().map(|rollout| serde_json::to_string(rollout).expect("JSON")));
    (lines, bits(&trainer.weights().expect("weights")))
}

/// Every rank of every number of ranks has the records and the weights of one rank, whatever they divide.
fn same_bits(overrides: &[&str]) {
    let recipe = |stage: &str| recipe(&[overrides, &[stage]].concat());
    let (first, third) = (recipe("trainer.zero_stage=1"), recipe("trainer.zero_stage=3"));
    let alone = trained(&first, Collective::alone());
    assert!(alone.0.iter().any(|line| line.contains("\"updates\":")), "{:?}", alone.0);
    for (count, stage, recipe) in [(2, 1, &first), (4, 1, &first), (2, 3, &third), (4, 3, &third)] {
        for (rank, found) in on_ranks(count, |c| trained(recipe, c)).into_iter().enumerate() {
            for (found, expected) in found.0.iter().zip(&alone.0) {
                assert_eq!(found, expected, "rank {rank} of {count}, ZeRO-{stage}");
            }
            assert_eq!(found.0.len(), alone.0.len());
            assert!(found.1 == alone.1, "the weights of rank {rank} of {count} differ, ZeRO-{stage}");
        }
    }
}

#[test]
fn shards_of_one_micro_batch_have_the_same_bits_on_any_number_of_ranks() {
    // Else a shard takes several: then a rank keeps the gradients of all blocks.
    same_bits(&["trainer.micro_tokens=256", "trainer.recompute=true"]);
}

#[test]
fn grpo_with_a_reference_has_the_same_bits_on_any_number_of_ranks() {
    same_bits(GRPO);
}

#[test]
fn ppo_with_a_critic_has_the_same_bits_on_any_number_of_ranks() {
    same_bits(PPO);
}

#[test]
fn dapo_with_dynamic_sampling_has_the_same_bits_on_any_number_of_ranks() {
    same_bits(DAPO);
}

/// A model that knows a little of the task.
fn warmed(recipe: &Recipe) -> Params<Vec<f32>> {
    let task = recipe.task().expect("[task]").task().expect("task");
    let start = Start::from_recipe(recipe, &*task).expect("start");
    let settings = recipe.sft.as_ref().expect("sft");
    let examples = Examples::open(settings, recipe.trainer.seed, &start, Some(&*task)).expect("examples");
    sft::run(&cpu(), recipe, settings, &start, &examples, |_| {}).expect("warm start")
}

/// Three steps from such a model, or from the adapters of the recipe: their records and the weights.
fn stepped(recipe: &Recipe, from: &Params<Vec<f32>>, collective: Collective) -> (Vec<String>, Vec<u32>) {
    let ranks = Ranks::new(Arc::new(collective), recipe).expect("ranks");
    let task = recipe.task().expect("[task]").task().expect("task");
    let mut start = Start::from_recipe(recipe, &*task).expect("start");
    if start.adapters.is_none() {
        start.weights = from.clone();
    }
    let mut trainer = RlTrainer::on_ranks(&cpu(), recipe, "tiny", start, task, ranks).expect("trainer");
    let mut lines: Vec<String> = (0..3).map(|_| line(&trainer.step().expect("step"))).collect();
    lines.push(format!("{:?}", trainer.evaluate().expect("an evaluation")));
    (lines, bits(&trainer.weights().expect("weights")))
}

/// [`stepped`] on one rank, and on so many with ZeRO of a stage.
fn same_steps(recipe: &Recipe, from: &Params<Vec<f32>>, cases: &[(usize, usize)]) -> (Vec<String>, Vec<u32>) {
    let alone = stepped(recipe, from, Collective::alone());
    for &(count, stage) in cases {
        let mut recipe = recipe.clone();
        recipe.trainer.zero_stage = stage;
        for (rank, found) in on_ranks(count, |c| stepped(&recipe, from, c)).into_iter().enumerate() {
            assert_eq!(found.0, alone.0, "rank {rank} of {count}, ZeRO-{stage}");
            assert!(found.1 == alone.1, "the weights of rank {rank} of {count} differ, ZeRO-{stage}");
        }
    }
    alone
}

#[test]
fn lag_and_forward_passes_of_the_rollout_have_the_same_bits_on_any_number_of_ranks() {
    let weights = warmed(&recipe(&[]));
    let lag = same_steps(&recipe(&["rollout.lag=1", "trainer.compute=bf16"]), &weights, &[(2, 1), (4, 3)]);
    assert!(lag.0[2].contains("\"rollout_version\":2"), "step 3 samples with older weights: {:?}", lag.0[2]);
    let straight = ["trainer.forward=rollout", "trainer.compute=bf16"];
    let straight = same_steps(&recipe(&straight), &weights, &[(2, 1), (4, 1)]);
    assert!(straight.0[0].contains("\"rho_max\":1.0,"), "{:?}", straight.0[0]);
}

#[test]
fn adapters_have_the_same_bits_on_any_number_of_ranks_and_where_another_number_resumes() {
    let whole = recipe(&[]);
    let (weights, base) = (warmed(&whole), Scratch::new());
    let task = whole.task().expect("[task]").task().expect("task");
    let start = Start::from_recipe(&whole, &*task).expect("start");
    ModelFiles::of(&start).save(&base.0, &start.config, &weights, Dtype::F32).expect("saved");
    let section = |from: &str, to: &str| {
        let at = |name: &str| TINY.find(name).expect("a section");
        &TINY[at(from)..at(to)]
    };
    let path = base.0.display();
    let text =
        format!("[model]\npath = \"{path}\"\n[lora]\nrank = 4\nalpha = 8\n{}", section("[task]", "[sft]"));
    let text = text + section("[data]", "[trainer]") + &TINY[TINY.find("[trainer]").expect("a section")..];
    let set = ["trainer.compute=bf16", "algorithm.kl_loss_coef=0.01", "actor.optim.moments='8bit'"];
    let recipe = Recipe::parse(&text, "lora", &set.map(String::from)).expect("a recipe");
    let alone = same_steps(&recipe, &weights, &[(2, 1), (4, 1)]);
    assert!(alone.0[2].contains("\"updates\":4"), "{:?}", alone.0[2]);
    let torn = Scratch::new();
    for (count, last) in [(4, 1), (2, 9)] {
        let found = on_ranks(count, |collective| run(&recipe, &torn.0, collective, last));
        assert!(last < 9 || found.iter().all(|bits| *bits == alone.1), "resumed by {count} ranks");
    }
}

#[test]
fn shards_round_otherwise_and_one_is_what_was_before_shards() {
    let weights = |shards: &str| trained(&recipe(&[GRPO, &[shards]].concat()), Collective::alone()).1;
    assert_ne!(weights("trainer.shards=1"), weights("trainer.shards=4"));
}

/// A directory of its own, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Scratch {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("qurl-ranks-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        Scratch(path)
    }

    /// The lines of metrics.jsonl without times.
    fn metrics(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.0.join("metrics.jsonl")).expect("metrics");
        text.lines().map(|line_| line(&serde_json::from_str::<Value>(line_).expect("JSON"))).collect()
    }

    /// The files of a checkpoint.
    fn files(&self, step: u64) -> Vec<String> {
        let dir = self.0.join(format!("checkpoints/step-{step}"));
        let entries = std::fs::read_dir(dir).expect("a checkpoint");
        let mut names: Vec<String> =
            entries.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// One rank of a run in a directory, begun or resumed, which ends after `last` steps.
fn run(recipe: &Recipe, dir: &Path, collective: Collective, last: u64) -> Vec<u32> {
    let ranks = Ranks::new(Arc::new(collective), recipe).expect("ranks");
    let (place, keep) = (dir.join("checkpoints"), Keep { last: 2, best: 1 });
    let store = match ranks.is_first() {
        true => Store::open(&place, keep).expect("a store"),
        false => Store::of_first(&place, keep),
    };
    ranks.barrier().expect("all ranks");
    let from = store.newest().expect("checkpoints").whole;
    let log = match ranks.is_first() {
        true => RunLog::open(dir, from.as_ref()).expect("logs"),
        false => RunLog::silent(),
    };
    let task = recipe.task().expect("[task]").task().expect("task");
    let start = Start::from_recipe(recipe, &*task).expect("start");
    let trainer = RlTrainer::on_ranks(&cpu(), recipe, "tiny", start, task, ranks).expect("trainer");
    let parts = RunParts { path: dir.to_path_buf(), store, from, log };
    let mut run = Run::begin(trainer, recipe, parts).expect("begun");
    let done = AtomicU64::new(run.trainer().steps_done());
    // One rank alone is told to stop.
    let first = run.trainer().ranks().is_first();
    let stop = || first && done.load(Ordering::Relaxed) >= last;
    let report = |event: qurl_train::run::Event| {
        if let qurl_train::run::Event::Step(record) = event {
            done.store(record.step, Ordering::Relaxed);
        }
    };
    match run.steps(stop, report) {
        Ok(outcome) => assert_eq!(outcome, Outcome::Done),
        Err(RunError::Stopped { step }) => assert_eq!(step, last),
        Err(error) => panic!("{error}"),
    }
    run.save_model().expect("saved");
    let weights = run.into_trainer().weights().expect("weights");
    bits(&weights)
}

#[test]
fn a_run_that_is_resumed_with_another_number_of_ranks_has_the_same_bits() {
    // Moments in all three formats, too.
    let fewer_bits: &[&str] = &["actor.optim.moments='8bit'", "critic.optim.moments='bf16'"];
    for (overrides, moments) in [(PPO, fewer_bits), (DAPO, &[])] {
        let sets = [overrides, moments, &["run.total_steps=5"]].concat();
        let mut recipe = recipe(&sets);
        recipe.sft = None;
        let divided = {
            let mut divided = recipe.clone();
            divided.trainer.zero_stage = 3;
            divided
        };
        let whole = Scratch::new();
        let weights = run(&recipe, &whole.0, Collective::alone(), 9);
        assert_eq!(whole.metrics().len(), 5);
        for counts in [[1, 4, 2], [4, 2, 1], [2, 1, 4]] {
            let torn = Scratch::new();
            // Stopped after steps 1 and 3: a checkpoint there, and one of step 2 or 4 by the recipe.
            for (count, last) in counts.into_iter().zip([1, 3, 9]) {
                // Two ranks divide their weights, whatever the others do.
                let recipe = if count == 2 { &divided } else { &recipe };
                let found = on_ranks(count, |collective| run(recipe, &torn.0, collective, last));
                assert!(found.iter().all(|bits| *bits == found[0]));
                assert!(last < 9 || found[0] == weights, "{counts:?}: other weights");
                if last == 3 && count > 1 {
                    let part = format!("optimizer-{count:05}-of-{count:05}.safetensors");
                    assert!(torn.files(3).contains(&part), "{:?}", torn.files(3));
                }
            }
            assert_eq!(torn.metrics(), whole.metrics(), "{counts:?}");
            let model =
                |run: &Scratch| std::fs::read(run.0.join("model/model.safetensors")).expect("a model");
            assert!(model(&torn) == model(&whole), "{counts:?}: the saved models differ");
        }
    }
}

/// A task whose judge is broken.
struct Broken(Box<dyn Task>);

impl Task for Broken {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn draw(&self, split: Split, seed: u64, index: u64) -> Option<Problem> {
        self.0.draw(split, seed, index)
    }

    fn verify(&self, problem: &Problem, response: &str) -> Verdict {
        self.0.verify(problem, response)
    }

    fn judge(&self, _batch: &[Attempt]) -> Result<Vec<Verdict>, RewardError> {
        Err(RewardError::TwoJudges { first: "one".to_string(), second: "other".to_string() })
    }

    fn len(&self, split: Split) -> Option<u64> {
        self.0.len(split)
    }
}

#[test]
fn a_rank_that_cannot_judge_ends_all_with_an_error_that_names_it() {
    let recipe = recipe(GRPO);
    let ended = on_ranks(2, |collective| {
        let mut task = recipe.task().expect("[task]").task().expect("task");
        let start = Start::from_recipe(&recipe, &*task).expect("start");
        if collective.rank() == 1 {
            task = Box::new(Broken(task));
        }
        let ranks = Ranks::new(Arc::new(collective), &recipe).expect("ranks");
        let mut trainer = RlTrainer::on_ranks(&cpu(), &recipe, "tiny", start, task, ranks).expect("trainer");
        let error = trainer.step().expect_err("a broken judge");
        assert_eq!(trainer.steps_done(), 0, "nothing has changed");
        error
    });
    assert!(ended.iter().all(TrainError::is_of_all_ranks), "{ended:?}");
    let [first, second] = [&ended[0], &ended[1]].map(ToString::to_string);
    assert!(
        second.contains("`one` and `other`") && first == format!("rank 1: {second}"),
        "{first}\n{second}"
    );
}

#[test]
fn weights_that_are_not_finite_break_all_ranks_alike() {
    let recipe = recipe(GRPO);
    let symptoms = on_ranks(2, |collective| {
        let task = recipe.task().expect("[task]").task().expect("task");
        let mut start = Start::from_recipe(&recipe, &*task).expect("start");
        start.weights.final_norm.fill(f32::NAN);
        let ranks = Ranks::new(Arc::new(collective), &recipe).expect("ranks");
        let vocabulary = start.config.vocab_size;
        let mut trainer = RlTrainer::on_ranks(&cpu(), &recipe, "tiny", start, task, ranks).expect("trainer");
        Symptom::of_error(&trainer.step().expect_err("NaN"), vocabulary)
    });
    assert!(symptoms.iter().all(|s| matches!(s, Some(Symptom::NotFinite { .. }))), "{symptoms:?}");
}

/// Two updates of a model with its own head on made-up sequences; as a critic, too.
fn updated(collective: Collective, stage: usize, rows: usize, critic: bool) -> Vec<u32> {
    let recipe = recipe(&[&format!("trainer.zero_stage={stage}")]);
    let ranks = Ranks::new(Arc::new(collective), &recipe).expect("ranks");
    let task = recipe.task().expect("[task]").task().expect("task");
    let mut config = Start::from_recipe(&recipe, &*task).expect("start").config;
    config.tie_word_embeddings = false;
    let weights = qurl_model::params::init(&config, 7, critic);
    let tape = qurl_model::compute::TapeOptions { rows, sequences: 8, recompute: false };
    let adamw = AdamWOptions::default();
    let options =
        LearnerOptions { compute: Format::Bf16, positions: 64, kv_format: None, tape, adamw, lora: None };
    let queue = &mut cpu().queue().expect("a queue");
    let mut learner = Learner::<Cpu>::on_ranks(queue, &config, &weights, options, &ranks).expect("a learner");
    learner.work(queue).expect("activations");
    let vocabulary = config.vocab_size as u32;
    let sequences: Vec<Vec<u32>> =
        (0..13u32).map(|s| (0..5 + s % 7).map(|t| (31 * s + 7 * t) % vocabulary).collect()).collect();
    let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
    for _ in 0..2 {
        for shard in ranks.own_shards_of(&lengths, tape) {
            learner.begin_shard(queue, shard.passes).expect("a shard");
            for micro in shard.micros {
                let ids = &sequences[micro];
                let (batch, targets) = (whole_batch(ids), Targets::of(ids, |_, _| true));
                if critic {
                    let rows = targets.rows;
                    let loss =
                        |values: &[f32]| Ok::<_, DeviceError>(values.iter().map(|v| v - 0.5).collect());
                    learner.accumulate_values(queue, &batch, &rows, loss).expect("a micro-batch");
                } else {
                    let loss = |_: Range<usize>, out: &HeadOutput| {
                        let dlogp = vec![-0.01; out.logp.len()];
                        Ok::<_, DeviceError>(LossGradient { dlogp, dentropy: Vec::new() })
                    };
                    let scope = LossScope::Sequence;
                    learner.accumulate(queue, &batch, targets, 1.0, scope, loss).expect("a micro-batch");
                }
            }
            learner.end_shard(queue).expect("a shard");
        }
        assert!(learner.update(queue, 1e-3).expect("an update").applied);
    }
    bits(&learner.weights(queue).expect("weights"))
}

#[test]
fn a_head_of_its_own_and_a_value_head_have_the_same_bits_however_they_are_divided() {
    for critic in [false, true] {
        // Shards of one micro-batch, and of several.
        for rows in [64, 16] {
            let alone = updated(Collective::alone(), 1, rows, critic);
            for (count, stage) in [(2, 1), (2, 3), (4, 3)] {
                let found = on_ranks(count, |collective| updated(collective, stage, rows, critic));
                let what = format!("{count} ranks, ZeRO-{stage}, {rows} rows, critic {critic}");
                assert!(found.iter().all(|bits| *bits == alone), "{what}");
            }
        }
    }
}

#[test]
fn weights_and_moments_are_divided_and_gradients_counted_in_the_plan_of_a_rank() {
    let config = ModelConfig::named("qwen2.5-0.5b").expect("a known shape");
    let tape = qurl_model::compute::TapeOptions { rows: 1024, sequences: 8, recompute: true };
    let options = LearnerOptions {
        lora: None,
        compute: Format::Bf16,
        positions: 512,
        kv_format: None,
        tape,
        adamw: AdamWOptions::default(),
    };
    let parameters = config.param_count() as usize;
    let parts = |count: usize, shards: usize, stage: usize| -> Vec<(String, usize)> {
        let stage = format!("trainer.zero_stage={stage}");
        let recipe = recipe(&[&format!("trainer.shards={shards}"), &stage]);
        let ranks = Ranks::new(Arc::new(Collective::counted(count - 1, count)), &recipe).expect("ranks");
        MemoryPlan::of_learner(&*cpu(), &config, options, &ranks).expect("a plan").parts().to_vec()
    };
    let part = |parts: &[(String, usize)], name: &str| {
        parts.iter().find(|(part, _)| part.ends_with(name)).expect("a part").1
    };
    let (one, eight, divided) = (parts(1, 8, 1), parts(8, 8, 1), parts(8, 32, 3));
    assert_eq!(part(&one, "gradients"), 4 * 4 * parameters, "1 + log2(8) gradients");
    assert_eq!(part(&one, "moments"), 8 * parameters);
    assert_eq!(part(&one, "weights in f32"), 4 * parameters);
    let close = |found: usize, expected: usize, what: &str| {
        assert!(found.abs_diff(expected) < expected / 50, "{what}: {found}, expected about {expected}");
    };
    // The head is the embedding.
    let embedding = 4 * config.vocab_size * config.hidden_size;
    let block = (4 * parameters - embedding) / config.num_layers;
    // An eighth of the weights, in whole blocks, and a place for all of a block, twice where its matrices
    // travel in bf16, and of the embedding.
    close(part(&eight, "weights in f32"), parameters / 2 + embedding + 3 * block / 2, "weights in f32");
    close(part(&eight, "moments"), parameters, "moments");
    // One shard, and everyone's pieces of a block and of the embedding.
    close(part(&eight, "gradients"), 4 * parameters + embedding + block, "gradients");
    // Divided: two blocks and the embedding, two sums of pieces for four rounds, one of the longest piece,
    // everyone's pieces as before.
    let sums = 2 * parameters / 2 + embedding / 8;
    close(part(&divided, "gradients"), 2 * block + embedding + sums + embedding + block, "divided gradients");
    // The embedding in f32, and in bf16 as the head for forward and backward; one block in bf16, twice.
    close(part(&divided, "packed weights"), 2 * embedding + block, "divided packed weights");
    close(part(&divided, "weights in f32"), part(&eight, "weights in f32"), "divided weights in f32");
}
