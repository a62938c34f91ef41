//! `qurl sft`: supervised training, from a recipe or from the embedded default.

use super::reward_guard;
use super::train::overlaps;
use crate::device::{RecipeDevice, on_device};
use crate::input::OrBad;
use crate::model::warn;
use crate::output::{err, out};
use crate::progress::Progress;
use crate::target;
use anyhow::Context;
use qurl_kernels::Device;
use qurl_model::compute::{Network, NetworkOptions};
use qurl_model::hf::{SaveOptions, save};
use qurl_rollout::{Engine, EngineOptions, Sampling, WeightVersion};
use qurl_tasks::task::Split;
use qurl_train::memory::MemoryPlan;
use qurl_train::recipe::{Recipe, RecipeError};
use qurl_train::sft::{self, Examples};
use qurl_train::solve::{Draw, accuracy, draw_problems, held_out, solve};
use qurl_train::start::Start;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// The embedded recipe.
pub const DEFAULT: &str = include_str!("../../../../recipes/sft.toml");

/// Options of `qurl sft`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl sft recipes/sft.toml --set sft.steps=100 --out runs/sft")]
pub struct Args {
    /// Recipe file; without one the embedded default trains a small model from nothing
    recipe: Option<PathBuf>,
    /// Overrides a key of the recipe, as in --set trainer.seed=7
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Directory that receives the model [default: the first of runs/sft-1, runs/sft-2, ... that is free]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Write into a directory that is not empty; a model there is replaced
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    device: RecipeDevice,
    /// Print one JSON document at the end
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Summary {
    first_loss: f64,
    last_loss: f64,
    steps: u64,
    skipped: u64,
    tokens_per_s: f64,
    seconds: f64,
    accuracy: Option<f64>,
    model: String,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let began = Instant::now();
    let (recipe, file) = match &args.recipe {
        Some(path) => (Recipe::read(path, &args.overrides), path.display().to_string()),
        None => (Recipe::parse(DEFAULT, "embedded default", &args.overrides), "embedded default".to_string()),
    };
    let recipe = args.device.put_into(recipe.or_bad()?);
    let out = args.out.clone().unwrap_or_else(|| target::free_run("sft"));
    if let Some(model) = &recipe.model.path {
        target::check_apart(&out, model).context("--out").or_bad()?;
    }
    target::check(&out, args.force).context("--out").or_bad()?;
    on_device!(recipe.trainer.device, device => run_on(device, recipe, file, &out, args.json, began))
}

fn run_on<D: Device>(
    device: Arc<D>,
    recipe: Recipe,
    file: String,
    out: &Path,
    json: bool,
    began: Instant,
) -> anyhow::Result<()> {
    let section = RecipeError::Section { file, section: "sft", why: "`qurl sft` trains by it" };
    let sft = recipe.sft.clone().ok_or(section).or_bad()?;
    let task = recipe.task.launch(&reward_guard::launch(Arc::default())?).or_bad()?;
    let start = Start::from_recipe(&recipe, &*task).or_bad()?;
    warn(start.warning.as_deref());
    overlaps(&*task).iter().for_each(|note| err!("{note}"));
    recipe.doubts(task.len(Split::Train)).iter().for_each(|doubt| err!("warning: {doubt}"));
    let examples = Examples::open(&sft, recipe.trainer.seed, &start, &*task).or_bad()?;
    if let Examples::Files { examples, .. } = &examples {
        recipe.doubt_of_examples(examples.len()).iter().for_each(|doubt| err!("warning: {doubt}"));
    }
    err!("{}: {} parameters, {}", recipe.trainer.compute, start.config.param_count(), device.info().description);
    if device.memory().is_some() {
        let memory = MemoryPlan::of_sft(&recipe, &sft, &start.config);
        err!("memory: {memory}");
        memory.check(&*device).or_bad()?;
    }
    target::prepare(out).context("--out").or_bad()?;

    let progress = Progress::new(sft.steps, json);
    let (mut first_loss, mut last_loss, mut tokens, mut seconds, mut skipped) =
        (f64::NAN, f64::NAN, 0, 0.0, 0);
    let mut queue = device.queue()?;
    let learner = sft::run::<D>(&mut queue, &recipe, &sft, &start, &examples, |step| {
        if step.step == 1 {
            first_loss = step.loss;
        }
        last_loss = step.loss;
        tokens += step.tokens;
        seconds += step.time.as_secs_f64();
        skipped += u64::from(!step.applied);
        progress.step(step.step, &format!("loss {:.4}  {:.0} tokens/s", step.loss, tokens as f64 / seconds));
    })
    .or_bad()?;
    progress.finish();

    let weights = learner.weights(&mut queue)?;
    let options = SaveOptions {
        tokenizer_files: start.tokenizer.files(),
        ..SaveOptions::new(start.config.dtype, &start.generation)
    };
    save(out, &start.config, &weights, &options).with_context(|| format!("saving to {}", out.display()))?;

    let test_problems = held_out(&*task, sft.test_problems);
    let accuracy = if test_problems > 0 && task.draw(Split::Test, recipe.trainer.seed, 0).is_some() {
        let options = NetworkOptions::inference(&start.config, recipe.trainer.compute);
        let network = Network::new(&mut queue, &start.config, &learner.params, options)?;
        let mut engine = Engine::new(device, network, WeightVersion::default(), EngineOptions::default())?;
        let problems = draw_problems(&*task, Split::Test, recipe.trainer.seed, 0, test_problems)?;
        let max_new = sft.max_length.min(start.config.max_position_embeddings);
        let (max_prompt, seed) = (usize::MAX, recipe.trainer.seed); // the engine has its own limit
        let draw = Draw { max_prompt, n: 1, sampling: Sampling::greedy(), max_new, seed, step: 0 };
        Some(accuracy(&solve(&mut queue, &mut engine, &start, &*task, problems, draw)?.0))
    } else {
        None
    };
    let summary = Summary {
        first_loss,
        last_loss,
        steps: sft.steps,
        skipped,
        tokens_per_s: tokens as f64 / seconds,
        seconds: began.elapsed().as_secs_f64(),
        accuracy,
        model: out.display().to_string(),
    };
    if json {
        out!("{}", serde_json::to_string(&summary)?)?;
        return Ok(());
    }
    out!(
        "loss {:.4} -> {:.4} in {} steps, {:.0} tokens/s",
        first_loss,
        last_loss,
        sft.steps,
        summary.tokens_per_s
    )?;
    if let Some(accuracy) = accuracy {
        out!("greedy accuracy on {} held-out problems: {:.1}%", test_problems, 100.0 * accuracy)?;
    }
    out!("model saved to {}", summary.model)?;
    Ok(())
}
