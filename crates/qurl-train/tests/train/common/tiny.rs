//! A recipe of a second: a warm start on one-digit sums, then GRPO with int8 rollouts. Tests of whole runs
//! take its sections and say what they change.

use qurl_kernels::Cpu;
use qurl_kernels::cpu::level::Level;
use qurl_model::Params;
use qurl_tasks::task::Task;
use qurl_train::recipe::{Recipe, RecipeError};
use qurl_train::rl::{RlTrainer, StepRecord};
use qurl_train::sft::{self, Examples};
use qurl_train::start::Start;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// All sections, by name.
const SECTIONS: [(&str, &str); 8] = [
    (
        "model.new",
        "hidden_size = 32\nintermediate_size = 64\nnum_hidden_layers = 2\nnum_attention_heads = 4\n\
         num_key_value_heads = 2\nmax_position_embeddings = 64\n",
    ),
    ("task", "type = \"synthetic\"\nkind = \"addition\"\nlevel = 1\nformat_weight = 0.5\n"),
    ("sft", "steps = 20\nbatch_size = 16\nlr = 5e-3\nmax_length = 48\n"),
    ("data", "train_batch_size = 4\nmax_prompt_length = 8\nmax_response_length = 24\n"),
    ("rollout", "n = 4\nformat = \"int8\"\nkv_cache_mb = 16\n"),
    ("algorithm", "adv_estimator = { type = \"grpo\" }\n"),
    ("actor", "lr = 1e-3\nppo_mini_batch_size = 2\n"),
    ("run", "total_steps = 3\ntest_problems = 8\n"),
];

/// What every run has.
const TRAINER: &str = "[trainer]\ncompute = \"f32\"\nmicro_tokens = 128\n";

/// A model that is made and learns by examples.
pub const WARM_START: &[&str] = &["model.new", "task", "sft"];
/// Reinforcement learning of a model that is there.
pub const RL: &[&str] = &["task", "data", "rollout", "algorithm", "actor", "run"];

/// A recipe of such sections, changed as `--set` does it.
pub fn parsed(sections: &[&str], overrides: &[&str]) -> Result<Recipe, RecipeError> {
    let wanted = SECTIONS.iter().filter(|(name, _)| sections.contains(name));
    let text: String = wanted.map(|(name, keys)| format!("[{name}]\n{keys}\n")).collect();
    let overrides: Vec<String> = overrides.iter().map(|set| set.to_string()).collect();
    Recipe::parse(&(text + TRAINER), "tiny", &overrides)
}

/// The whole recipe.
pub fn recipe(overrides: &[&str]) -> Recipe {
    parsed(&[WARM_START, RL].concat(), overrides).expect("a recipe")
}

/// A CPU with so many threads.
pub fn cpu(threads: usize) -> Arc<Cpu> {
    Arc::new(Cpu::new(Level::best(), threads))
}

/// What a recipe begins with, and its task.
pub fn start(recipe: &Recipe) -> (Start, Box<dyn Task>) {
    let task = recipe.task().expect("[task]").task().expect("a task");
    (Start::from_recipe(recipe, &*task).expect("a start"), task)
}

/// The weights after a recipe's warm start.
pub fn warmed(cpu: &Arc<Cpu>, recipe: &Recipe) -> Params<Vec<f32>> {
    let (start, task) = start(recipe);
    let settings = recipe.sft.as_ref().expect("[sft]");
    let examples = Examples::open(settings, recipe.trainer.seed, &start, Some(&*task)).expect("examples");
    sft::run(cpu, recipe, settings, &start, &examples, |_| {}).expect("a warm start")
}

/// A trainer of the whole recipe after its warm start.
pub fn trainer(overrides: &[&str], threads: usize) -> RlTrainer<Cpu> {
    let (cpu, recipe) = (cpu(threads), recipe(overrides));
    let (mut start, task) = start(&recipe);
    start.weights = warmed(&cpu, &recipe);
    RlTrainer::new(&cpu, &recipe, "tiny", start, task).expect("a trainer")
}

/// The records of so many steps, without times.
pub fn steps(trainer: &mut RlTrainer<Cpu>, count: usize) -> Vec<StepRecord> {
    let step = |_| {
        let mut record = trainer.step().expect("a step");
        record.timing.clear();
        record
    };
    (0..count).map(step).collect()
}

/// Weights as bits.
pub fn bits(weights: &Params<Vec<f32>>) -> Vec<u32> {
    weights.iter().flatten().map(|x| x.to_bits()).collect()
}

/// A directory of its own, which is removed when the test ends.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Scratch {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("qurl-train-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        Scratch(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
