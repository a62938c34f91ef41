//! Checkpoints, as a resumed run reads them. The manifest tells nearly every change of a file; half of the
//! inputs therefore get a new one, so that what comes after it is tried, too.

use super::models::Folder;
use super::{Run, Target};
use crate::input::Input;
use qurl_kernels::Cpu;
use qurl_kernels::cpu::level::Level;
use qurl_train::checkpoint::{Keep, Manifest, ModelFiles, Snapshot, Store, Writer};
use qurl_train::ranks::Ranks;
use qurl_train::recipe::Recipe;
use qurl_train::rl::RlTrainer;
use qurl_train::runlog::Logged;
use qurl_train::start::Start;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

const RECIPE: &str = r#"
data = { train_batch_size = 2, max_prompt_length = 8, max_response_length = 4 }
rollout = { n = 2, format = "int8", kv_cache_mb = 1 }
algorithm = { adv_estimator = { type = "grpo" }, kl_loss_coef = 0.001 }
actor = { lr = 5e-3, ppo_mini_batch_size = 2 }
run = { total_steps = 1, test_problems = 1 }
task = { type = "synthetic", kind = "addition", level = 1 }
[model.new]
hidden_size = 8
intermediate_size = 8
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
max_position_embeddings = 16
"#;
/// The file that vouches for the others.
const MANIFEST: &str = "manifest.json";
const KEEP: Keep = Keep { last: 1, best: 1 };

pub const CHECKPOINT: Target = Target {
    name: "checkpoint",
    about: "checkpoints of a run that is resumed",
    words: &[
        "crc32c",
        "bytes",
        "files",
        "format",
        "step",
        "ranks",
        "drawn",
        "null",
        "manifest.json",
        "state.json",
        "F32",
        "BF16",
        "shape",
        "data_offsets",
        "weights",
        "first",
        "second",
        "actor_updates",
        "critic_updates",
        "has_reference",
        "../../etc/passwd",
        "best",
        "score",
    ],
    made: |folder| {
        let (mut trainer, start) = trainer()?;
        let store = Store::open(&folder.join("checkpoints"), KEEP)?;
        let mut writer = Writer::new(store.clone(), ModelFiles::of(&start), Ranks::alone(), None);
        writer.start(trainer.snapshot(RECIPE)?, Logged::default())?;
        writer.finish()?;
        Ok(vec![Input::read(&store.path(0))?])
    },
    open: |scratch| {
        let (mut trainer, start) = trainer()?;
        let folder = scratch.join("checkpoints");
        let mut step = Folder::new(folder.join("step-0"));
        let run: Run = Box::new(move |input| {
            let resumed = resume(&folder, &mut step, input, &start, &mut trainer);
            resumed.is_ok()
        });
        Ok(run)
    },
};

fn trainer() -> Result<(RlTrainer<Cpu>, Start), Box<dyn Error>> {
    let recipe = Recipe::parse(RECIPE, "recipe.toml", &[])?;
    let device = Arc::new(Cpu::new(Level::best(), 1));
    let start = || Start::from_recipe(&recipe, &*recipe.task()?.task()?).map_err(Box::<dyn Error>::from);
    let trainer = RlTrainer::new(&device, &recipe, "recipe.toml", start()?, recipe.task()?.task()?)?;
    Ok((trainer, start()?))
}

/// What a resumed run does up to its first step.
fn resume(
    folder: &Path,
    step: &mut Folder,
    input: &Input,
    start: &Start,
    trainer: &mut RlTrainer<Cpu>,
) -> Result<(), Box<dyn Error>> {
    step.hold(&input.parts).expect("the files of an input");
    let total: usize = input.parts.iter().map(|(_, bytes)| bytes.len()).sum();
    if total.is_multiple_of(2) {
        let mut input = input.clone();
        let manifest = Manifest::of(step.path())?.to_json()?.into_bytes();
        input
            .parts
            .iter_mut()
            .filter(|(name, _)| name == MANIFEST)
            .for_each(|part| part.1 = manifest.clone());
        step.hold(&input.parts).expect("the files of an input");
    }
    let store = Store::open(folder, KEEP)?;
    let (number, place) = store.newest()?.whole.ok_or("no checkpoint")?;
    let recipe = Recipe::parse(&store.recipe(number)?, "recipe.toml", &[])?;
    recipe.rl("recipe.toml")?;
    let snapshot = Snapshot::read(&place, &start.config, &Ranks::alone())?;
    trainer.restore(snapshot)?;
    Ok(())
}
