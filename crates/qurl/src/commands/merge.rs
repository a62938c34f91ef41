//! `qurl merge`: a model and LoRA adapters as one whole model.
//!
//! The update of each layer is summed in f64 and added to the weights in f32; they are written in the model's
//! own number format, in which they are rounded once more, or in the one asked for.

use super::quantize::tokenizer_files;
use crate::input::{OrBad, bad};
use crate::model;
use crate::output::out;
use crate::target;
use qurl_model::Dtype;
use qurl_model::hf::{self, SaveOptions, peft};
use serde::Serialize;
use std::path::PathBuf;

/// Options of `qurl merge`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl merge --model BASE --adapter runs/lora/model OUT")]
pub struct Args {
    /// Hugging Face directory of the base, or an id of the hub whose snapshot is in the local cache
    #[arg(long, value_parser = crate::model::directory)]
    model: PathBuf,
    /// Directory of LoRA adapters for it, as PEFT or a run with [lora] writes it
    #[arg(long, value_name = "DIR")]
    adapter: PathBuf,
    /// Number format to write, f32, bf16 or f16: the base's own if not given
    #[arg(long, value_parser = dtype)]
    dtype: Option<Dtype>,
    /// Write into a directory that is not empty; weights there are replaced
    #[arg(long)]
    force: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// Directory to write
    out: PathBuf,
}

fn dtype(name: &str) -> Result<Dtype, String> {
    match name {
        "f32" => Ok(Dtype::F32),
        "bf16" => Ok(Dtype::Bf16),
        "f16" => Ok(Dtype::F16),
        _ => Err("expected f32, bf16 or f16".to_string()),
    }
}

#[derive(Serialize)]
struct Summary {
    out: String,
    dtype: String,
    parameters: u64,
    adapter_parameters: u64,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    target::check_apart(&args.out, &args.model)?;
    target::check_apart(&args.out, &args.adapter)?;
    target::check(&args.out, args.force)?;
    let mut model = model::load(&args.model)?;
    if model.config.uaq != 1.0 {
        let (dir, mark) = (args.model.display(), model.config.uaq);
        let expected = "the model as it is without that scaling: `qurl quantize --uaq 1` takes it off";
        return Err(bad(format!(
            "{dir} is scaled by {mark} (`qurl.uaq` in its config.json); expected {expected}"
        )));
    }
    let adapter = peft::load(&args.adapter, &model.config).or_bad()?;
    adapter.lora.merge(&model.config, &adapter.params, &mut model.params);
    let tokenizer_files = tokenizer_files(&args.model)?;
    let dtype = args.dtype.unwrap_or(model.config.dtype);
    let options =
        SaveOptions { tokenizer_files: &tokenizer_files, ..SaveOptions::new(dtype, &model.generation) };
    hf::save(&args.out, &model.config, &model.params, &options).or_bad()?;
    let summary = Summary {
        out: args.out.display().to_string(),
        dtype: dtype.to_string(),
        parameters: model.config.param_count(),
        adapter_parameters: adapter.lora.param_count(&model.config),
    };
    if args.json {
        out!("{}", serde_json::to_string(&summary)?)?;
        return Ok(());
    }
    let Summary { out, dtype, parameters, adapter_parameters } = summary;
    out!("{out}: {parameters} parameters with {adapter_parameters} of adapters merged, {dtype}")?;
    Ok(())
}
