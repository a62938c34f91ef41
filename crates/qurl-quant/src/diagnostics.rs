//! What quantization does to a model's weights, and what training changes about that.
//!
//! Three measures, each per matrix, per layer and in total:
//! * [`quantization_error`], Eq. 14: `||Q(w) - w||^2 / ||w||^2`;
//! * [`weight_update`], Eq. 13: `||w' - w||^2 / ||w||^2` between two sets of weights;
//! * [`flipped_codes`]: the share of weights whose code differs between two sets. An update that flips no
//!   code is invisible to the quantized actor, except through scales.
//!
//! Measured are the matrices that a quantized rollout quantizes. A layer's or the model's number is the ratio
//! of the sums of its matrices, not a mean of ratios.

use qurl_kernels::Format;
use qurl_model::{ModelConfig, ParamInfo, Params, params};
use rayon::prelude::*;

use crate::error::QuantError;
use crate::reference::{self, BLOCK};
use crate::uaq::check_layout;

/// A measured matrix: `part / whole`.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// Such as `layers.0.qkv`.
    pub name: String,
    /// The block it belongs to; none for the head.
    pub layer: Option<usize>,
    /// What is measured: squared errors, squared changes, flipped codes.
    pub part: f64,
    /// What it is a share of: squared weights, or the number of weights.
    pub whole: f64,
}

/// One measure of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measure {
    /// Every matrix, in the order of the parameters.
    pub matrices: Vec<Matrix>,
}

impl Matrix {
    /// The measure of this matrix; 0 where there is nothing to be a share of and nothing measured.
    pub fn ratio(&self) -> f64 {
        ratio(self.part, self.whole)
    }
}

impl Measure {
    /// The measure of the whole model.
    pub fn total(&self) -> f64 {
        let sum = |f: fn(&Matrix) -> f64| self.matrices.iter().map(f).sum::<f64>();
        ratio(sum(|m| m.part), sum(|m| m.whole))
    }

    /// The measure of every block, first to last.
    pub fn layers(&self) -> Vec<f64> {
        let mut sums: Vec<(f64, f64)> = Vec::new();
        for matrix in &self.matrices {
            let Some(layer) = matrix.layer else { continue };
            if sums.len() <= layer {
                sums.resize(layer + 1, (0.0, 0.0));
            }
            sums[layer].0 += matrix.part;
            sums[layer].1 += matrix.whole;
        }
        sums.into_iter().map(|(part, whole)| ratio(part, whole)).collect()
    }
}

fn ratio(part: f64, whole: f64) -> f64 {
    if part == 0.0 { 0.0 } else { part / whole }
}

/// Which matrices are measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// The output head too, as where a rollout quantizes it.
    pub head: bool,
}

/// Eq. 14 for every matrix.
pub fn quantization_error(
    weights: &Params<Vec<f32>>,
    config: &ModelConfig,
    format: Format,
    scope: Scope,
) -> Result<Measure, QuantError> {
    measure(matrices(weights, config, scope)?, |info, weights| {
        in_pieces(format, info, weights.len(), |rows, range| {
            let weights = &weights[range];
            let quantized = rounded(format, info, weights, rows)?;
            let squares = |x: f64| x * x;
            let error: f64 =
                quantized.iter().zip(weights).map(|(q, w)| squares(f64::from(*q) - f64::from(*w))).sum();
            Ok((error, weights.iter().map(|w| squares(f64::from(*w))).sum()))
        })
    })
}

/// Eq. 13 for every matrix, from `before` to `after`.
pub fn weight_update(
    before: &Params<Vec<f32>>,
    after: &Params<Vec<f32>>,
    config: &ModelConfig,
    scope: Scope,
) -> Result<Measure, QuantError> {
    let after = matrices(after, config, scope)?;
    let mut after = after.iter();
    let before = matrices(before, config, scope)?;
    let pairs = before.into_iter().zip(&mut after).map(|((info, b), (_, a))| (info, (b, *a))).collect();
    measure(pairs, |_, (before, after)| {
        let terms = before.par_chunks(1 << 16).zip(after.par_chunks(1 << 16)).map(|(before, after)| {
            let square = |x: f64| x * x;
            let change: f64 =
                before.iter().zip(after).map(|(b, a)| square(f64::from(*a) - f64::from(*b))).sum();
            (change, before.iter().map(|b| square(f64::from(*b))).sum::<f64>())
        });
        Ok(sum_pairs(terms.collect()))
    })
}

/// The share of codes that differ between `before` and `after`, for every matrix.
pub fn flipped_codes(
    before: &Params<Vec<f32>>,
    after: &Params<Vec<f32>>,
    config: &ModelConfig,
    format: Format,
    scope: Scope,
) -> Result<Measure, QuantError> {
    let after = matrices(after, config, scope)?;
    let before = matrices(before, config, scope)?;
    let pairs = before.into_iter().zip(&after).map(|((info, b), (_, a))| (info, (b, *a))).collect();
    measure(pairs, |info, (before, after)| {
        in_pieces(format, info, before.len(), |rows, range| {
            let codes = |weights: &[f32]| reference::quantize(format, &info.name, weights, rows, info.cols);
            let (before, after) = (codes(&before[range.clone()])?, codes(&after[range])?);
            let flipped = before.codes.iter().zip(&after.codes).filter(|(b, a)| b != a).count();
            Ok((flipped as f64, before.codes.len() as f64))
        })
    })
}

type Leaf<T> = (ParamInfo, T);

/// The matrices that are measured, with their names.
fn matrices<'a>(
    weights: &'a Params<Vec<f32>>,
    config: &ModelConfig,
    scope: Scope,
) -> Result<Vec<Leaf<&'a [f32]>>, QuantError> {
    check_layout(weights, config)?;
    let infos = params::shapes(config, weights.value_head.is_some());
    let mut chosen = Vec::new();
    let head_of = if config.tie_word_embeddings { params::ParamKind::Embed } else { params::ParamKind::Head };
    let mut head = None;
    for (info, values) in infos.into_iter().zip(weights.iter()) {
        if info.kind.is_block_linear() {
            chosen.push((info, values.as_slice()));
        } else if scope.head && info.kind == head_of {
            head = Some((ParamInfo { name: "head".to_string(), ..info }, values.as_slice()));
        }
    }
    chosen.extend(head);
    Ok(chosen)
}

/// Applies `f` to every matrix.
fn measure<T: Copy>(
    leaves: Vec<Leaf<T>>,
    f: impl Fn(&ParamInfo, T) -> Result<(f64, f64), QuantError>,
) -> Result<Measure, QuantError> {
    let mut matrices = Vec::with_capacity(leaves.len());
    for (info, values) in leaves {
        let (part, whole) = f(&info, values)?;
        matrices.push(Matrix { name: info.name, layer: info.layer, part, whole });
    }
    Ok(Measure { matrices })
}

/// Calls `f(rows, range of values)` for pieces of a matrix that share no scale, on all threads, and adds up
/// in order.
fn in_pieces(
    format: Format,
    info: &ParamInfo,
    len: usize,
    f: impl Fn(usize, std::ops::Range<usize>) -> Result<(f64, f64), QuantError> + Sync,
) -> Result<(f64, f64), QuantError> {
    let rows = if format == Format::Nvfp4 { info.rows } else { BLOCK };
    let piece = rows * info.cols;
    let terms: Result<Vec<_>, _> = (0..len.div_ceil(piece))
        .into_par_iter()
        .map(|i| {
            let range = i * piece..((i + 1) * piece).min(len);
            f(range.len() / info.cols, range)
        })
        .collect();
    Ok(sum_pairs(terms?))
}

fn sum_pairs(terms: Vec<(f64, f64)>) -> (f64, f64) {
    terms.into_iter().fold((0.0, 0.0), |sum, term| (sum.0 + term.0, sum.1 + term.1))
}

/// What the weights become in this format.
fn rounded(format: Format, info: &ParamInfo, weights: &[f32], rows: usize) -> Result<Vec<f32>, QuantError> {
    Ok(match format {
        Format::F32 => weights.to_vec(),
        Format::Bf16 => weights.iter().map(|&w| half::bf16::from_f32(w).to_f32()).collect(),
        _ => reference::quantize(format, &info.name, weights, rows, info.cols)?.dequantize(),
    })
}
