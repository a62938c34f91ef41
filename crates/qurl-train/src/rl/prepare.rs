//! Everything that can be known to be wrong before a run begins: what the recipe, the model and the problems
//! say together. A run that starts has passed this, so that no hour of training ends in a message about its
//! first line.

use super::TrainError;
use crate::recipe::{Recipe, RecipeError, RlPlan, TaskSource};
use crate::solve::{SolveError, draw_problems};
use crate::start::{Start, StartError};
use qurl_kernels::Device;
use qurl_kernels::types::KvShape;
use qurl_model::ModelConfig;
use qurl_model::compute::NetworkOptions;
use qurl_rollout::RolloutError;
use qurl_tasks::task::{Dropped, Problem, Split, Task};

/// Generated problems whose length is looked at.
const LOOKED_AT: u64 = 64;

/// Checks a plan against the model and the problems, and drops the problems whose prompts are longer than
/// `data.max_prompt_length`; says how many.
pub fn prepare<D: Device>(
    device: &D,
    recipe: &Recipe,
    file: &str,
    start: &Start,
    task: &mut dyn Task,
) -> Result<Dropped, TrainError> {
    let plan = recipe.rl(file)?;
    let invalid = |key: &str, found: String, expected: String| {
        let place = recipe.place(file, key);
        Err(TrainError::Recipe(RecipeError::Invalid { place, key: key.to_string(), found, expected }))
    };
    let (config, longest) = (&start.config, plan.longest());
    check_context(&plan, recipe, file, config)?;
    check_uaq(&plan, recipe, file, config)?;
    if let Err(RolloutError::OutOfRange { key, found, expected }) =
        plan.rollout.sampling().check(config.vocab_size)
    {
        return invalid(&format!("rollout.{key}"), found, expected);
    }
    let (needed, there) = (sequence_bytes(device, &plan, start), plan.rollout.kv_cache_mb << 20);
    if needed > there {
        let expected = format!("at least {}, for one sequence of {longest} tokens", needed.div_ceil(1 << 20));
        return invalid("rollout.kv_cache_mb", plan.rollout.kv_cache_mb.to_string(), expected);
    }
    if task.len(Split::Train).is_none() {
        // Generated problems cannot be dropped: some of them stand for all.
        let most = plan.data.max_prompt_length;
        for problem in draw_problems(&*task, Split::Train, recipe.trainer.seed, 0, LOOKED_AT)? {
            let found = encode(start, &problem)?.len();
            if found > most {
                let expected = format!("at least the {found} tokens of problem {}", problem.id);
                return invalid("data.max_prompt_length", most.to_string(), expected);
            }
        }
    }
    let dropped = drop_long_prompts(start, task, plan.data.max_prompt_length)?;
    if task.is_empty(Split::Train) || task.is_empty(Split::Test) {
        return Err(nothing_left(recipe, file, &plan, &*task, dropped).into());
    }
    Ok(dropped)
}

/// That no problem is left to train on, or none to measure on, and by what.
fn nothing_left(
    recipe: &Recipe,
    file: &str,
    plan: &RlPlan,
    task: &dyn Task,
    dropped: Dropped,
) -> RecipeError {
    let (section, data) = recipe
        .task
        .as_ref()
        .and_then(TaskSource::dataset)
        .map_or(("task", None), |(section, data)| (section, Some(data)));
    let key = |name: &str| format!("{section}.{name}");
    let most = plan.data.max_prompt_length;
    let long =
        |count: u64| format!("{count} have prompts of more than data.max_prompt_length = {most} tokens");
    let held_out = data.map_or(0.0, |data| data.held_out);
    let mut why = Vec::new();
    let (asked, what) = if task.is_empty(Split::Train) {
        if task.overlaps() > 0 {
            why.push(format!("{} are among those of {}", task.overlaps(), key("test_files")));
        }
        if dropped.train > 0 {
            why.push(long(dropped.train));
        }
        if held_out > 0.0 {
            why.push(format!("{} = {held_out} holds out the others", key("held_out")));
        }
        (key("files"), "train on")
    } else {
        // Of the two keys that could give some, the one that somebody set is to blame.
        let set = |name: &str| recipe.place(file, &key(name)) != file;
        let share = held_out > 0.0 || (set("held_out") && !set("test_files"));
        let asked = key(if share { "held_out" } else { "test_files" });
        let (files, held_out_key, test_files) = (key("files"), key("held_out"), key("test_files"));
        match dropped.test {
            0 if held_out > 0.0 => why.push(format!("{held_out} of so few is none")),
            0 if share => {
                why.push(format!("it is 0; hold out a share of {files} with it, or give {test_files}"))
            }
            0 => why.push(format!("give {test_files}, or hold out a share of {files} with {held_out_key}")),
            count => why.push(long(count)),
        }
        (asked, "measure on")
    };
    if let Some(data) = data.filter(|data| !data.data_sources.is_empty()) {
        why.push(format!("only rows of {} = {:?} count", key("data_sources"), data.data_sources));
    }
    RecipeError::NothingLeft { place: recipe.place(file, &asked), key: asked, what, why: why.join(", ") }
}

/// Refuses sequences longer than the model's context.
pub(super) fn check_context(
    plan: &RlPlan,
    recipe: &Recipe,
    file: &str,
    config: &ModelConfig,
) -> Result<(), RecipeError> {
    let (longest, context) = (plan.longest(), config.max_position_embeddings);
    if longest <= context {
        return Ok(());
    }
    Err(RecipeError::Invalid {
        place: recipe.place(file, "data.max_response_length"),
        key: "data.max_response_length".to_string(),
        found: format!("such that they have {longest}"),
        expected: format!(
            "prompts and responses of together at most {context} tokens, the model's context \
             (`model.max_position_embeddings` asks for a longer one)"
        ),
    })
}

/// Refuses to scale a model that is marked as scaled. With the recipe's own scale it is taken as it is (a
/// checkpoint of such a run), and a recipe without one takes the scaling off.
pub(super) fn check_uaq(
    plan: &RlPlan,
    recipe: &Recipe,
    file: &str,
    config: &ModelConfig,
) -> Result<(), RecipeError> {
    let (asked, mark) = (plan.rollout.uaq, config.uaq);
    if mark == 1.0 || asked == 1.0 || asked as f32 == mark {
        return Ok(());
    }
    let dir = recipe.model.path.as_ref().map_or("the model".to_string(), |dir| dir.display().to_string());
    let marked = format!("{dir} is scaled by {mark} already (`qurl.uaq` in its config.json)");
    Err(RecipeError::Invalid {
        place: recipe.place(file, "rollout.uaq"),
        key: "rollout.uaq".to_string(),
        found: asked.to_string(),
        expected: format!(
            "{mark} to train it as it is or 1 to take the scaling off, since {marked}; or another model"
        ),
    })
}

/// Bytes of the keys and values of one longest sequence.
fn sequence_bytes<D: Device>(device: &D, plan: &RlPlan, start: &Start) -> usize {
    let (c, r) = (&start.config, &plan.rollout);
    let format = r.kv_format().unwrap_or(NetworkOptions::inference(c, r.format).kv_format);
    let page_size = r.engine_options(device).page_size;
    let (kv_heads, head_dim) = (c.num_kv_heads, c.head_dim);
    let shape = KvShape { format, pages: 1, page_size, kv_heads, head_dim };
    let page = device.kv_page_bytes(shape) * c.num_layers;
    page * plan.longest().div_ceil(page_size)
}

fn encode(start: &Start, problem: &Problem) -> Result<Vec<u32>, SolveError> {
    let failed = |e| SolveError::Prompt { id: problem.id.clone(), source: Box::new(e) };
    start.encode(&problem.prompt).map_err(failed)
}

fn drop_long_prompts(start: &Start, task: &mut dyn Task, most: usize) -> Result<Dropped, TrainError> {
    let mut failed = None;
    let mut fits = |problem: &Problem| match encode(start, problem) {
        Ok(prompt) => prompt.len() <= most,
        Err(SolveError::Prompt { source, .. }) if matches!(*source, StartError::TooLong { .. }) => false,
        Err(error) => {
            failed.get_or_insert(error);
            true
        }
    };
    let dropped = task.retain(&mut fits);
    match failed {
        Some(error) => Err(error.into()),
        None => Ok(dropped),
    }
}
