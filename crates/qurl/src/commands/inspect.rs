//! `qurl inspect A [B]`: what a number format does to the weights of A, and what changed from A to B.
//!
//! Per block and in total: the normalized quantization error (Eq. 14), the normalized weight update (Eq. 13)
//! and the share of quantized values that the update flipped. An update far below the quantization error that
//! flips few of them is one that the quantized actor does not see.

use crate::input::{OrBad, bad};
use crate::model;
use crate::output::{OutputError, out};
use qurl_kernels::Format;
use qurl_model::hf::LoadedModel;
use qurl_quant::diagnostics::{self, Measure, Scope};
use serde::Serialize;
use std::path::PathBuf;

/// Options of `qurl inspect`.
#[derive(clap::Args)]
#[command(
    after_help = "Example: qurl inspect runs/a/checkpoints/step-10 runs/a/checkpoints/step-11 --format int8"
)]
pub struct Args {
    /// Hugging Face directory
    a: PathBuf,
    /// A later checkpoint of the same model
    b: Option<PathBuf>,
    /// Number format to look at
    #[arg(long, default_value_t = Format::Int8)]
    format: Format,
    /// Include the output head
    #[arg(long)]
    quantize_head: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// The measures of a block, a matrix or the model; `null` where there is no B, or nothing is quantized.
#[derive(Serialize)]
struct Figures {
    quantization_error: f64,
    weight_update: Option<f64>,
    flipped_codes: Option<f64>,
}

#[derive(Serialize)]
struct Layer {
    layer: usize,
    #[serde(flatten)]
    figures: Figures,
}

#[derive(Serialize)]
struct Matrix {
    name: String,
    #[serde(flatten)]
    figures: Figures,
}

#[derive(Serialize)]
struct Document {
    a: String,
    b: Option<String>,
    format: String,
    total: Figures,
    layers: Vec<Layer>,
    matrices: Vec<Matrix>,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let a = model::load(&args.a)?;
    let b = args.b.as_ref().map(|dir| model::load(dir)).transpose()?;
    let document = measure(&args, &a, b.as_ref())?;
    if args.json {
        out!("{}", serde_json::to_string(&document)?)?;
    } else {
        print(&document)?;
    }
    Ok(())
}

fn measure(args: &Args, a: &LoadedModel, b: Option<&LoadedModel>) -> anyhow::Result<Document> {
    let (config, format, scope) = (&a.config, args.format, Scope { head: args.quantize_head });
    let in_b = |e: qurl_quant::QuantError| {
        let dir = args.b.as_ref().map_or(String::new(), |dir| dir.display().to_string());
        bad(format!("{dir}: not another checkpoint of {}: {e}", args.a.display()))
    };
    let error = diagnostics::quantization_error(&a.params, config, format, scope).or_bad()?;
    let update = b
        .map(|b| diagnostics::weight_update(&a.params, &b.params, config, scope))
        .transpose()
        .map_err(in_b)?;
    let flipped = b
        .filter(|_| format.is_quantized())
        .map(|b| diagnostics::flipped_codes(&a.params, &b.params, config, format, scope))
        .transpose()
        .map_err(in_b)?;
    let figures = |of: &dyn Fn(&Measure) -> f64| Figures {
        quantization_error: of(&error),
        weight_update: update.as_ref().map(of),
        flipped_codes: flipped.as_ref().map(of),
    };
    let layers = (0..config.num_layers)
        .map(|layer| Layer { layer, figures: figures(&|m| m.layers().get(layer).copied().unwrap_or(0.0)) });
    let matrices = error.matrices.iter().enumerate().map(|(i, matrix)| Matrix {
        name: matrix.name.clone(),
        figures: figures(&|m| m.matrices.get(i).map_or(0.0, diagnostics::Matrix::ratio)),
    });
    Ok(Document {
        a: args.a.display().to_string(),
        b: args.b.as_ref().map(|dir| dir.display().to_string()),
        format: format.to_string(),
        total: figures(&Measure::total),
        layers: layers.collect(),
        matrices: matrices.collect(),
    })
}

fn print(document: &Document) -> Result<(), OutputError> {
    let number = |x: Option<f64>| x.map_or("-".to_string(), |x| format!("{x:.3e}"));
    let row = |name: &str, f: &Figures| {
        let flipped = f.flipped_codes.map_or("-".to_string(), |x| format!("{:.3}%", 100.0 * x));
        let (error, update) = (number(Some(f.quantization_error)), number(f.weight_update));
        out!("{name:>8}  {error:>18}  {update:>13}  {flipped:>14}")
    };
    out!("{}: weights of {}", document.format, document.a)?;
    if let Some(b) = &document.b {
        out!("update and flipped quantized values: to {b}")?;
    }
    out!("{:>8}  {:>18}  {:>13}  {:>14}", "layer", "quantization error", "weight update", "flipped values")?;
    for layer in &document.layers {
        row(&layer.layer.to_string(), &layer.figures)?;
    }
    row("total", &document.total)
}
