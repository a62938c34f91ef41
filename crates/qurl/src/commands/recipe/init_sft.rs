//! `qurl recipe init --algorithm sft`: a recipe of supervised training.

use super::init::{Args, Line, absolute, model_of, quoted, sums};
use crate::input::OrBad;
use Line::{Off, Set};
use anyhow::Context;
use qurl_model::ModelConfig;
use qurl_tasks::data::{DataError, each_record};
use std::path::Path;

/// Times that the examples are gone through.
const EPOCHS: usize = 3;
/// Most sequences of a batch.
const BATCH: usize = 32;
/// Fewer examples than this are all learned: a twentieth of them would say little, or be none.
const ENOUGH_TO_HOLD_OUT: usize = 200;
/// Sequences of a new recipe are at most so long.
const LENGTH: usize = 2048;

/// The sections of a recipe that learns the examples of --data, or without them worked solutions of generated
/// sums.
pub fn sections(args: &Args) -> anyhow::Result<Vec<(&'static str, Vec<Line>)>> {
    let set = |key, value: &str| Set(key, value.to_string());
    let mut sections = vec![model_of(args)];
    let mut sft = Vec::new();
    let (steps, batch, length, lr) = match (&args.model, &args.data) {
        (Some(model), Some(data)) => {
            sft.push(Set("sft.files", format!("[{}]", quoted(&absolute(data)))));
            let rows = count(data).context("--data").or_bad()?;
            match &args.test {
                Some(test) => {
                    count(test).context("--test").or_bad()?;
                    sft.push(Set("sft.validation_files", format!("[{}]", quoted(&absolute(test)))));
                }
                None if rows >= ENOUGH_TO_HOLD_OUT => sft.push(set("sft.held_out", "0.05")),
                None => sft.push(Off("sft.held_out", "0.05")),
            }
            let batch = 1 << rows.clamp(1, BATCH).ilog2();
            let config = ModelConfig::read(&super::init::directory(model)?.join("config.json"));
            let context = config.context("--model").or_bad()?.max_position_embeddings;
            ((EPOCHS * rows).div_ceil(batch), batch, LENGTH.min(context), "1e-5")
        }
        (model, _) => {
            sections.push(("task", sums(0.0)));
            (300, 64, 64, if model.is_some() { "1e-5" } else { "2e-3" })
        }
    };
    sft.extend([
        Set("sft.steps", steps.to_string()),
        Set("sft.batch_size", batch.to_string()),
        Set("sft.max_length", length.to_string()),
        set("sft.lr", lr),
        Set("sft.warmup_steps", (steps / 20).to_string()),
        set("sft.decay", "\"cosine\""),
        Off("sft.validation_freq", "20"),
    ]);
    sections.push(("sft", sft));
    let trainer = vec![
        set("trainer.seed", "1"),
        set("trainer.save_freq", "100"),
        Off("trainer.compute", "\"f32\""),
        Off("trainer.recompute", "\"mlp\""),
        Off("trainer.device", "\"cuda\""),
    ];
    sections.push(("trainer", trainer));
    Ok(sections)
}

/// Rows of a file.
fn count(file: &Path) -> Result<usize, DataError> {
    let mut rows = 0;
    each_record(file, |_, _| {
        rows += 1;
        Ok::<_, DataError>(())
    })?;
    Ok(rows)
}
