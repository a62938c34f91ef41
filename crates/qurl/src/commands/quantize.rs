//! `qurl quantize`: a model directory in another number format, or only scaled for update-aware quantization.
//!
//! int8 and fp8 become compressed-tensors directories, which vLLM and others read. f32 and bf16 are written
//! in full. `--uaq S` scales the weights first; alone it keeps the model's number format, in which the scaled
//! weights are rounded once more unless S is a power of two, and says so. The directory is marked (`qurl.uaq`
//! in its `config.json`); a marked one is not scaled again, and `--uaq 1` takes the scaling off.

use crate::input::{OrBad, bad};
use crate::model;
use crate::output::out;
use crate::target;
use qurl_kernels::Format;
use qurl_model::hf::{self, LoadedModel, RawTensor, SaveOptions};
use qurl_model::tokenizer::{Tokenizer, TokenizerError};
use qurl_model::{Dtype, ModelConfig};
use qurl_quant::{QuantError, export, uaq};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Options of `qurl quantize`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl quantize --model DIR --format int8 OUT")]
pub struct Args {
    /// Hugging Face directory, or an id of the hub whose snapshot is in the local cache
    #[arg(long, value_parser = crate::model::directory)]
    model: PathBuf,
    /// Number format to write: int8 or fp8 (compressed-tensors), f32 or bf16 (in full)
    #[arg(long, required_unless_present = "uaq")]
    format: Option<Format>,
    /// Scale of update-aware quantization: matrices after norms are divided by it, the norms multiplied; 1
    /// takes the scaling of a marked model off
    #[arg(long, value_name = "S")]
    uaq: Option<f32>,
    /// Write into a directory that is not empty; weights there are replaced
    #[arg(long)]
    force: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// Directory to write
    out: PathBuf,
}

#[derive(Serialize)]
struct Summary {
    out: String,
    /// `int8` or `fp8`; else the number format of all weights.
    format: String,
    uaq: Option<f32>,
    /// Whether scaled weights were rounded to the number format that they are written in.
    rounded: bool,
    parameters: u64,
    bytes: u64,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    target::check_apart(&args.out, &args.model)?;
    target::check(&args.out, args.force)?;
    if let Some(format) = args.format.filter(|f| f.is_quantized()) {
        export::quantization_config(format).map_err(|e| bad(format!("--format {format}: {e}")))?;
    }
    let mut model = model::load(&args.model)?;
    let tokenizer_files = tokenizer_files(&args.model)?;
    let mark = model.config.uaq;
    if let Some(s) = args.uaq {
        if mark != 1.0 && s != 1.0 {
            let (dir, expected) =
                (args.model.display(), "a model that is not scaled, or 1 to take the scaling off");
            let already = format!("{dir} is scaled by {mark} already (`qurl.uaq` in its config.json)");
            return Err(bad(format!("--uaq {s}: {already}; expected {expected}")));
        }
        uaq::rescale(&mut model.params, &mut model.config, s).or_bad()?;
        check_finite(&model, s)?;
    }
    let (format, rounded) = match args.format {
        Some(format) if format.is_quantized() => {
            save_quantized(&args.out, &model, format, &tokenizer_files)?;
            (format.to_string(), false)
        }
        full => {
            let dtype = full_dtype(full, model.config.dtype);
            let options = SaveOptions {
                tokenizer_files: &tokenizer_files,
                ..SaveOptions::new(dtype, &model.generation)
            };
            hf::save(&args.out, &model.config, &model.params, &options).or_bad()?;
            (dtype.to_string(), dtype != Dtype::F32 && !is_exact(args.uaq.map_or(1.0, |s| s / mark)))
        }
    };
    let summary = Summary {
        out: args.out.display().to_string(),
        format,
        uaq: args.uaq,
        rounded,
        parameters: model.config.param_count(),
        bytes: weight_bytes(&args.out)?,
    };
    if args.json {
        out!("{}", serde_json::to_string(&summary)?)?;
        return Ok(());
    }
    let scaled = match model.config.uaq {
        1.0 => String::new(),
        s => format!(", scaled by {s} for update-aware quantization"),
    };
    out!("{}: {} parameters, {}{scaled}", summary.out, summary.parameters, summary.format)?;
    out!("{:.1} MB of weights", summary.bytes as f64 / 1e6)?;
    if rounded {
        out!("scaled weights are rounded to {}; --format f32 keeps more of their bits", summary.format)?;
    }
    Ok(())
}

/// Scaling may leave the range of f32.
fn check_finite(model: &LoadedModel, s: f32) -> anyhow::Result<()> {
    match model.params.iter().flatten().all(|x| x.is_finite()) {
        true => Ok(()),
        false => Err(bad(format!("--uaq {s:e}: a weight leaves the range of f32; expected a scale near 1"))),
    }
}

/// The tokenizer's files go along where there are any.
pub fn tokenizer_files(dir: &Path) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    match Tokenizer::load(dir) {
        Ok(tokenizer) => Ok(tokenizer.files().to_vec()),
        Err(TokenizerError::NotFound { .. }) => Ok(Vec::new()),
        Err(error) => Err(bad(error)),
    }
}

/// Number format of weights written in full: the one asked for, else the one that the model has.
fn full_dtype(asked: Option<Format>, stored: Dtype) -> Dtype {
    match asked {
        None => stored,
        Some(Format::Bf16) => Dtype::Bf16,
        Some(_) => Dtype::F32,
    }
}

/// Whether scaling by this rounds nothing: a power of two has no mantissa bits.
fn is_exact(factor: f32) -> bool {
    factor.to_bits() & 0x007f_ffff == 0
}

fn save_quantized(
    out: &Path,
    model: &LoadedModel,
    format: Format,
    tokenizer_files: &[(String, Vec<u8>)],
) -> anyhow::Result<()> {
    let mut tensors = Vec::new();
    export::for_each_tensor(&model.params, &model.config, format, |tensor| {
        let export::StoredTensor { name, dtype, shape, bytes } = tensor;
        tensors.push(RawTensor { name, dtype: dtype.name(), shape, bytes });
        Ok::<(), QuantError>(())
    })
    .or_bad()?;
    let config = quantized_config(&model.config, format)?;
    hf::save_raw(out, &config, &tensors, &model.generation, tokenizer_files).or_bad()
}

fn quantized_config(config: &ModelConfig, format: Format) -> anyhow::Result<serde_json::Value> {
    let mut json = config.to_json();
    json["quantization_config"] = export::quantization_config(format).or_bad()?;
    Ok(json)
}

fn weight_bytes(dir: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().ends_with(".safetensors") {
            bytes += entry.metadata()?.len();
        }
    }
    Ok(bytes)
}
