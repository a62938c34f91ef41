//! `qurl recipe init`: a recipe with comments that runs as it is, with sizes that fit the model and the data.
//!
//! The comments are the reference's own, so that they say what the program does.

use super::init_sft;
use crate::input::{OrBad, bad};
use crate::output::{self, err, out};
use crate::target;
use anyhow::Context;
use qurl_model::ModelConfig;
use qurl_model::chat::ChatTemplate;
use qurl_model::hf::hub;
use qurl_model::tokenizer::Tokenizer;
use qurl_tasks::task::{Split, Task};
use qurl_train::recipe::reference::{Key, keys};
use qurl_train::recipe::{Recipe, TaskSource};
use qurl_train::start::{StartError, encode};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Options of `qurl recipe init`.
#[derive(clap::Args)]
#[command(
    after_help = "Example: qurl recipe init --model DIR --data train.jsonl --algorithm grpo --out mine.toml"
)]
pub struct Args {
    /// Model directory, or an id of the hub whose snapshot is in the local cache; without one a small model
    /// from nothing
    #[arg(long)]
    pub(super) model: Option<PathBuf>,
    /// File of problems, or for sft of examples, to train on (.jsonl, .jsonl.gz or .parquet); without one
    /// generated sums
    #[arg(long, requires = "model")]
    pub(super) data: Option<PathBuf>,
    /// File of problems or examples to measure on; without one a share of --data is held out
    #[arg(long, requires = "data")]
    pub(super) test: Option<PathBuf>,
    /// Program that scores responses (docs/rewards.md) in place of the built-in grader: a Python script where
    /// its name ends in .py, else run as it is
    #[arg(long, requires = "data", value_name = "FILE")]
    reward: Option<PathBuf>,
    /// Algorithm
    #[arg(long, value_enum, default_value_t = Algorithm::Grpo)]
    algorithm: Algorithm,
    /// File to write, which must not be there yet; without one the recipe is printed
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print one JSON document with the recipe
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Algorithm {
    /// Advantages within the group of responses to a prompt
    Grpo,
    /// A critic and generalised advantage estimation
    Ppo,
    /// GRPO with dynamic sampling, a higher upper clip bound and a penalty for overlong responses
    Dapo,
    /// Supervised training on examples
    Sft,
}

/// Sizes that fit model and data.
struct Sizes {
    /// Prompts of a step.
    batch: u64,
    prompt: usize,
    response: usize,
    kv_cache_mb: usize,
    test_problems: u64,
}

/// A line of the recipe: a key with its value, perhaps as a comment that shows how it would be set.
pub(super) enum Line {
    Set(&'static str, String),
    Off(&'static str, &'static str),
}

use Line::{Off, Set};

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    if let Some(file) = args.out.as_ref().filter(|file| file.exists()) {
        return Err(bad(format!("--out {}: is there already, expected a new file", file.display())));
    }
    for (option, file) in [("--data", &args.data), ("--test", &args.test), ("--reward", &args.reward)] {
        if let Some(file) = file.as_ref().filter(|file| !file.exists()) {
            return Err(bad(format!("{option} {}: there is no such file", file.display())));
        }
    }
    let sections = match args.algorithm {
        Algorithm::Sft if args.reward.is_some() => {
            return Err(bad("--reward: supervised training has no rewards"));
        }
        Algorithm::Sft => init_sft::sections(&args)?,
        _ => reinforcement(&args)?,
    };
    let text = render(&args, &sections);
    // What is written must be a recipe.
    let name = args.out.as_ref().map_or("the new recipe".to_string(), |file| file.display().to_string());
    Recipe::parse(&text, &name, &[])?;
    if let Some(file) = &args.out {
        target::write(file, &text).context("--out").or_bad()?;
        let command = if args.algorithm == Algorithm::Sft { "sft" } else { "train" };
        err!("look at it with `qurl recipe check {name}`, start it with `qurl {command} {name}`");
    }
    match (args.json, &args.out) {
        (true, _) => Ok(out!("{}", serde_json::json!({ "recipe": text, "file": args.out }))?),
        (false, Some(_)) => Ok(()),
        (false, None) => Ok(output::text(&text)?),
    }
}

/// The sections of a recipe of reinforcement learning.
fn reinforcement(args: &Args) -> anyhow::Result<Vec<(&'static str, Vec<Line>)>> {
    let mut sections = source(args)?;
    let sizes = match &args.model {
        Some(model) => sizes(model, &sections)?,
        None => Sizes { batch: 16, prompt: 8, response: 32, kv_cache_mb: 64, test_problems: 200 },
    };
    sections.extend(args.reward.as_deref().map(own_reward));
    sections.extend(learning(args, &sizes));
    Ok(sections)
}

/// A program as the only reward.
fn own_reward(program: &Path) -> (&'static str, Vec<Line>) {
    let file = quoted(&absolute(program));
    let command = match program.extension().is_some_and(|end| end == "py") {
        true => format!("[\"python3\", {file}]"),
        false => format!("[{file}]"),
    };
    let reward = vec![
        Set("task.rewards.type", "\"command\"".to_string()),
        Set("task.rewards.command", command),
        Off("task.rewards.weight", "1.0"),
        Off("task.rewards.time_limit_s", "300.0"),
    ];
    // One of a list of sections, which another pair of brackets says.
    ("[task.rewards]", reward)
}

pub(super) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

pub(super) fn quoted(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}

/// The section of the model that was asked for, or of a small new one.
pub(super) fn model_of(args: &Args) -> (&'static str, Vec<Line>) {
    let Some(model) = &args.model else {
        let model = vec![
            Set("model.new.hidden_size", "64".to_string()),
            Set("model.new.intermediate_size", "192".to_string()),
            Set("model.new.num_hidden_layers", "2".to_string()),
            Set("model.new.num_attention_heads", "4".to_string()),
            Set("model.new.num_key_value_heads", "2".to_string()),
            Set("model.new.max_position_embeddings", "64".to_string()),
        ];
        return ("model.new", model);
    };
    let path = match hub::id(model).filter(|_| !model.exists()) {
        Some(id) => Path::new(id).to_path_buf(),
        None => absolute(model),
    };
    ("model", vec![Set("model.path", quoted(&path))])
}

/// The sections [model] and [task].
fn source(args: &Args) -> anyhow::Result<Vec<(&'static str, Vec<Line>)>> {
    let model = model_of(args);
    let Some(data) = &args.data else {
        let teacher_slips = if args.model.is_none() { 0.75 } else { 0.0 };
        return Ok(vec![model, ("task", sums(teacher_slips))]);
    };
    let mut task = vec![
        Set("task.type", "\"dataset\"".to_string()),
        Set("task.files", format!("[{}]", quoted(&absolute(data)))),
    ];
    match &args.test {
        Some(test) => task.push(Set("task.test_files", format!("[{}]", quoted(&absolute(test))))),
        None => task.push(Set("task.held_out", share_to_hold_out(&absolute(data))?.to_string())),
    }
    task.extend([Off("task.preset", "\"gsm8k\""), Off("task.format_weight", "0.1")]);
    Ok(vec![model, ("task", task)])
}

pub(super) fn sums(teacher_slips: f64) -> Vec<Line> {
    let mut task = vec![
        Set("task.type", "\"synthetic\"".to_string()),
        Set("task.kind", "\"addition\"".to_string()),
        Set("task.level", "2".to_string()),
    ];
    if teacher_slips > 0.0 {
        task.push(Set("task.teacher_slips", teacher_slips.to_string()));
    }
    task
}

/// The smallest usual share that leaves problems on both sides.
fn share_to_hold_out(data: &Path) -> anyhow::Result<f64> {
    for share in [0.1, 0.2, 0.35, 0.5] {
        let file = format!("{:?}", data.display().to_string());
        let task = problems(&format!("type = \"dataset\"\nfiles = [{file}]\nheld_out = {share}"))?;
        if !task.is_empty(Split::Train) && !task.is_empty(Split::Test) {
            return Ok(share);
        }
    }
    Err(bad(format!("--data {}: too few problems to hold some out; give others with --test", data.display())))
}

/// The problems of a section [task].
fn problems(section: &str) -> anyhow::Result<Box<dyn Task>> {
    let source: TaskSource = toml::from_str(section).context("section [task]")?;
    source.problems().or_bad()
}

/// Problems whose prompts are measured.
const MEASURED: u64 = 1000;
/// Responses of a new recipe are at most so long.
const RESPONSE: usize = 512;

/// Where a model is that is named by its directory, or by an id of the hub.
pub(super) fn directory(model: &Path) -> anyhow::Result<PathBuf> {
    match hub::id(model).filter(|_| !model.exists()) {
        Some(id) => hub::cached(id).ok_or_else(|| bad(format!("--model {id}: {}", hub::how_to_get(id)))),
        None => Ok(model.to_path_buf()),
    }
}

/// Sizes that fit a model and the problems of a section [task].
fn sizes(model: &Path, sections: &[(&'static str, Vec<Line>)]) -> anyhow::Result<Sizes> {
    let dir = directory(model)?;
    let config = ModelConfig::read(&dir.join("config.json")).context("--model").or_bad()?;
    let tokenizer = Tokenizer::load(&dir).context("--model").or_bad()?;
    let template = ChatTemplate::of(&tokenizer).context("--model").or_bad()?;
    let section = sections.iter().find(|(name, _)| *name == "task").map_or(&[][..], |(_, lines)| lines);
    let set = section.iter().filter_map(|line| match line {
        Set(key, value) => Some(format!("{} = {value}", key.trim_start_matches("task."))),
        Off(..) => None,
    });
    let task = problems(&set.collect::<Vec<_>>().join("\n"))?;
    let count = task.len(Split::Train).unwrap_or(u64::MAX);
    let mut longest = 1;
    let context = config.max_position_embeddings;
    for index in 0..count.min(MEASURED) {
        if let Some(problem) = task.draw(Split::Train, 1, index) {
            let prompt = match encode(&tokenizer, template.as_ref(), &problem.prompt, context) {
                Err(StartError::TooLong { most, .. }) => most,
                prompt => prompt.or_bad()?.len(),
            };
            longest = longest.max(prompt);
        }
    }
    let prompt = longest.next_multiple_of(64).min(context / 2).max(1);
    let response = RESPONSE.min(context - prompt).max(1);
    // Sixteen longest sequences in f32, the widest that keys and values can be.
    let sequence = 2 * config.num_layers * config.kv_dim() * 4 * (prompt + response);
    Ok(Sizes {
        batch: 1 << count.clamp(1, 32).ilog2(),
        prompt,
        response,
        kv_cache_mb: (16 * sequence).div_ceil(1 << 20).max(256),
        test_problems: task.len(Split::Test).unwrap_or(200).clamp(1, 200),
    })
}

/// The sections of training.
fn learning(args: &Args, sizes: &Sizes) -> Vec<(&'static str, Vec<Line>)> {
    let set = |key, value: &str| Set(key, value.to_string());
    let mini = (sizes.batch / 2).max(1).to_string();
    let (ppo, dapo) = (args.algorithm == Algorithm::Ppo, args.algorithm == Algorithm::Dapo);
    let new = args.model.is_none();
    let mut sections = Vec::new();
    if new {
        let sft = vec![
            set("sft.steps", "1000"),
            set("sft.batch_size", "64"),
            set("sft.max_length", "64"),
            set("sft.lr", "4e-3"),
            set("sft.warmup_steps", "30"),
            set("sft.decay", "\"cosine\""),
        ];
        sections.push(("sft", sft));
    }
    sections.push((
        "data",
        vec![
            Set("data.train_batch_size", sizes.batch.to_string()),
            Set("data.max_prompt_length", sizes.prompt.to_string()),
            Set("data.max_response_length", sizes.response.to_string()),
        ],
    ));
    sections.push((
        "rollout",
        vec![
            set("rollout.n", if ppo { "1" } else { "8" }),
            set("rollout.format", "\"int8\""),
            set("rollout.temperature", "1.0"),
            set("rollout.uaq", "1.5"),
            Set("rollout.kv_cache_mb", sizes.kv_cache_mb.to_string()),
        ],
    ));
    let high = if dapo { "0.28" } else { "0.2" };
    let objective = format!("{{ type = \"acr\", c = 2.0, clip_ratio_low = 0.2, clip_ratio_high = {high} }}");
    let estimator = if ppo { "{ type = \"gae\", gamma = 1.0, lam = 1.0 }" } else { "{ type = \"grpo\" }" };
    let mut algorithm =
        vec![set("algorithm.adv_estimator", estimator), Set("algorithm.objective", objective)];
    algorithm.push(set("algorithm.loss_agg_mode", "\"token-mean\""));
    match args.algorithm {
        Algorithm::Grpo => algorithm.push(set("algorithm.kl_loss_coef", "0.001")),
        Algorithm::Ppo => algorithm.push(set(
            "algorithm.kl_in_reward",
            "{ kl_penalty = \"k1\", kl_ctrl = { type = \"fixed\", kl_coef = 0.001 } }",
        )),
        Algorithm::Dapo => {
            let len = (sizes.response / 4).max(1);
            algorithm.push(set("algorithm.filter_groups", "{ max_num_gen_batches = 4, allow_fewer = true }"));
            algorithm
                .push(Set("algorithm.overlong_buffer", format!("{{ len = {len}, penalty_factor = 1.0 }}")));
        }
        Algorithm::Sft => {} // it has no rewards
    }
    sections.push(("algorithm", algorithm));
    let lr = if new { "1e-4" } else { "1e-6" };
    sections.push((
        "actor",
        vec![
            set("actor.lr", lr),
            set("actor.lr_warmup_steps", "5"),
            Set("actor.ppo_mini_batch_size", mini.clone()),
            set("actor.optim", "{ weight_decay = 0.0 }"),
        ],
    ));
    if ppo {
        let lr = if new { "1e-3" } else { "1e-5" };
        let critic = vec![
            set("critic.lr", lr),
            Set("critic.ppo_mini_batch_size", mini),
            set("critic.cliprange_value", "0.5"),
        ];
        sections.push(("critic", critic));
    }
    sections.push((
        "run",
        vec![
            set("run.total_steps", if new { "40" } else { "100" }),
            set("run.test_freq", "10"),
            Set("run.test_problems", sizes.test_problems.to_string()),
        ],
    ));
    let trainer = vec![
        set("trainer.seed", "1"),
        Off("trainer.compute", "\"f32\""),
        Off("trainer.recompute", "\"mlp\""),
        Off("trainer.device", "\"cuda\""),
    ];
    sections.push(("trainer", trainer));
    sections
}

/// Columns of a comment.
const COLUMNS: usize = 110;

/// The recipe as text; every key with its meaning before it.
fn render(args: &Args, sections: &[(&'static str, Vec<Line>)]) -> String {
    let reference = keys();
    let of = |path: &str| reference.iter().find(|key| key.key == path);
    let what = match args.algorithm {
        Algorithm::Sft => "Supervised training".to_string(),
        algorithm => format!("{} with int8 rollouts", format!("{algorithm:?}").to_uppercase()),
    };
    let mut text = format!("# {what}. `qurl recipe KEY` explains a key, `qurl recipe` all of them.\n");
    for (section, lines) in sections {
        let _ = writeln!(text, "\n[{section}]");
        for line in lines {
            let (path, value, mark) = match line {
                Set(path, value) => (*path, value.as_str(), ""),
                Off(path, value) => (*path, *value, "# "),
            };
            let key = of(path);
            comment(&mut text, &meaning(key));
            let _ = writeln!(text, "{mark}{} = {value}", path.rsplit('.').next().unwrap_or(path));
        }
    }
    text
}

/// What a key means and may be.
fn meaning(key: Option<&Key>) -> String {
    let Some(key) = key else { return String::new() };
    let names: Vec<&str> = key.choices.iter().map(|choice| choice.name.as_str()).collect();
    match names.is_empty() {
        true => key.meaning.clone(),
        false => format!("{} One of {}.", key.meaning, names.join(", ")),
    }
}

fn comment(text: &mut String, meaning: &str) {
    let mut line = "#".to_string();
    for word in meaning.split_whitespace() {
        if line.chars().count() + 1 + word.chars().count() > COLUMNS {
            let _ = writeln!(text, "{line}");
            line = "#".to_string();
        }
        line.push(' ');
        line.push_str(word);
    }
    if line.len() > 1 {
        let _ = writeln!(text, "{line}");
    }
}
