//! What each format does to a matrix of weights and to rows of activations, in plain code.
//!
//! Which numbers share a scale:
//!
//! | format | weights | activations |
//! |---|---|---|
//! | int8, fp8 | an output channel | a token |
//! | fp8-block | 128 channels x 128 inputs | 128 inputs of a token |
//! | int4 | 128 inputs of a channel | bf16 |
//! | nvfp4 | 16 inputs of a channel (E4M3 scale), and the matrix (f32 scale) | bf16 |
//!
//! The scale is the absmax over the largest code; a code is `round(x * (1 / scale))`. Where the absmax
//! is below 2^-100 the scale is one and all codes are zero.

use qurl_kernels::Format;

use crate::codes::{Magnitudes, integer_code};
use crate::error::QuantError;

/// Inputs (and channels, in squares) that share a scale in the formats with blocks.
pub const BLOCK: usize = 128;
/// Inputs that share an E4M3 scale in nvfp4.
pub const NVFP4_GROUP: usize = 16;

const TINY: f32 = 7.888_609e-31; // 2^-100

/// A quantized matrix: a code per weight and what turns codes into numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// The format.
    pub format: Format,
    /// Output channels.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// One code per weight, row-major: the bits of an i8, of E4M3, or four bits.
    pub codes: Vec<u8>,
    /// f32 scales, row-major over the blocks of [`Quantized::scale_grid`].
    pub scales: Vec<f32>,
    /// nvfp4: E4M3 scales per 16 inputs, row-major.
    pub group_scales: Vec<u8>,
}

/// The scale of some numbers.
fn scale(values: impl Iterator<Item = f32>, max: f32) -> f32 {
    let largest = values.fold(0.0f32, |m, x| m.max(x.abs()));
    if largest < TINY { 1.0 } else { largest / max }
}

/// Rows and columns of the matrix that share an f32 scale.
fn scale_block(format: Format, rows: usize, cols: usize) -> (usize, usize) {
    match format {
        Format::F32 | Format::Bf16 | Format::Nvfp4 => (rows, cols),
        Format::Int8 | Format::Fp8 => (1, cols),
        Format::Fp8Block => (BLOCK, BLOCK),
        Format::Int4 => (1, BLOCK),
    }
}

fn largest_code(format: Format) -> f32 {
    match format {
        Format::F32 | Format::Bf16 => 1.0,
        Format::Int8 => 127.0,
        Format::Fp8 | Format::Fp8Block => Magnitudes::e4m3().max(),
        Format::Int4 => 7.0,
        Format::Nvfp4 => Magnitudes::e4m3().max() * Magnitudes::e2m1().max(),
    }
}

/// Quantizes weights `[rows, cols]`; `name` is for messages.
pub fn quantize(
    format: Format,
    name: &str,
    weights: &[f32],
    rows: usize,
    cols: usize,
) -> Result<Quantized, QuantError> {
    if !format.is_quantized() {
        let expected = "int8, fp8, fp8-block, int4, nvfp4".to_string();
        return Err(QuantError::Format { format, what: "quantized to codes".to_string(), expected });
    }
    if weights.len() != rows * cols || weights.is_empty() {
        return Err(QuantError::Shape { name: name.to_string(), found: weights.len(), rows, cols });
    }
    if let Some(at) = weights.iter().position(|x| !x.is_finite()) {
        let (row, column) = (at / cols, at % cols);
        return Err(QuantError::NotFinite { name: name.to_string(), row, column, value: weights[at] });
    }
    let (block_rows, block_cols) = scale_block(format, rows, cols);
    let mut scales = Vec::new();
    for row in (0..rows).step_by(block_rows) {
        for col in (0..cols).step_by(block_cols) {
            let block = (row..(row + block_rows).min(rows))
                .flat_map(|r| &weights[r * cols + col..r * cols + (col + block_cols).min(cols)]);
            scales.push(scale(block.copied(), largest_code(format)));
        }
    }
    let mut quantized = Quantized { format, rows, cols, codes: Vec::new(), scales, group_scales: Vec::new() };
    if format == Format::Nvfp4 {
        for row in weights.chunks(cols) {
            for group in row.chunks(NVFP4_GROUP) {
                let largest = group.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                let wanted = largest / Magnitudes::e2m1().max() / quantized.scales[0];
                quantized.group_scales.push(Magnitudes::e4m3().code(wanted));
            }
        }
    }
    for (row, values) in weights.chunks(cols).enumerate() {
        for (col, values) in quantized.runs(values) {
            let scale = quantized.scale_at(row, col);
            let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            quantized.codes.extend(values.iter().map(|x| code(format, x * inverse)));
        }
    }
    Ok(quantized)
}

/// The code of a scaled weight.
fn code(format: Format, x: f32) -> u8 {
    match format {
        Format::Fp8 | Format::Fp8Block => Magnitudes::e4m3().code(x),
        Format::Nvfp4 => Magnitudes::e2m1().code(x),
        Format::Int4 => integer_code(x, 7).cast_unsigned() & 15,
        Format::Int8 | Format::F32 | Format::Bf16 => integer_code(x, 127).cast_unsigned(),
    }
}

impl Quantized {
    /// Rows and columns of the grid of f32 scales.
    pub fn scale_grid(&self) -> (usize, usize) {
        let (rows, cols) = scale_block(self.format, self.rows, self.cols);
        (self.rows.div_ceil(rows), self.cols.div_ceil(cols))
    }

    /// What the code of a weight is multiplied by.
    pub fn scale_at(&self, row: usize, col: usize) -> f32 {
        let (block_rows, block_cols) = scale_block(self.format, self.rows, self.cols);
        let scale = self.scales[row / block_rows * self.scale_grid().1 + col / block_cols];
        match self.format {
            Format::Nvfp4 => {
                let group = row * self.cols.div_ceil(NVFP4_GROUP) + col / NVFP4_GROUP;
                scale * Magnitudes::e4m3().value(self.group_scales[group])
            }
            _ => scale,
        }
    }

    /// The number that the code of a weight stands for, before the scale.
    pub fn code_value(&self, at: usize) -> f32 {
        let code = self.codes[at];
        match self.format {
            Format::Fp8 | Format::Fp8Block => Magnitudes::e4m3().value(code),
            Format::Nvfp4 => Magnitudes::e2m1().value(code),
            Format::Int4 => f32::from((code << 4).cast_signed() >> 4),
            Format::Int8 | Format::F32 | Format::Bf16 => f32::from(code.cast_signed()),
        }
    }

    /// The weights that the codes stand for.
    pub fn dequantize(&self) -> Vec<f32> {
        let mut weights = Vec::with_capacity(self.codes.len());
        for (row, codes) in self.codes.chunks(self.cols).enumerate() {
            for (col, codes) in self.runs(codes) {
                let scale = self.scale_at(row, col);
                let first = row * self.cols + col;
                weights.extend((first..first + codes.len()).map(|at| self.code_value(at) * scale));
            }
        }
        weights
    }

    /// A row in pieces that have one scale, with their first column.
    fn runs<'a, T>(&self, row: &'a [T]) -> impl Iterator<Item = (usize, &'a [T])> + use<'a, T> {
        let len = match self.format {
            Format::Nvfp4 => NVFP4_GROUP,
            _ => scale_block(self.format, self.rows, self.cols).1,
        };
        row.chunks(len).enumerate().map(move |(i, piece)| (i * len, piece))
    }
}

/// Rows of activations as a GEMM sees them: numbers on the format's grid, and what they are multiplied by.
#[derive(Clone, Debug, PartialEq)]
pub struct Activations {
    /// Codes as numbers.
    pub values: Vec<f32>,
    /// Scales `[rows][blocks]`.
    pub scales: Vec<f32>,
    /// Inputs that share a scale.
    pub block: usize,
}

/// Quantizes rows `[rows, cols]` of activations for a GEMM with weights of this format.
pub fn activations(format: Format, x: &[f32], cols: usize) -> Activations {
    let block = if format == Format::Fp8Block { BLOCK } else { cols };
    let mut out = Activations { values: Vec::new(), scales: Vec::new(), block };
    for values in x.chunks(cols).flat_map(|row| row.chunks(block)) {
        let scale = match format {
            Format::Int8 | Format::Fp8 | Format::Fp8Block => {
                scale(values.iter().copied(), largest_code(format))
            }
            _ => 1.0,
        };
        out.scales.push(scale);
        out.values.extend(values.iter().map(|&x| match format {
            Format::F32 => x,
            Format::Int8 => f32::from(integer_code(x * (1.0 / scale), 127)),
            Format::Fp8 | Format::Fp8Block => {
                let table = Magnitudes::e4m3();
                table.value(table.code(x * (1.0 / scale)))
            }
            Format::Bf16 | Format::Int4 | Format::Nvfp4 => bf16(x),
        }));
    }
    out
}

/// `x[rows, cols] W^T` with both quantized, summed in f64: what the kernels come close to, and for int8
/// equal.
pub fn linear(weights: &Quantized, x: &[f32]) -> Vec<f32> {
    let cols = weights.cols;
    let left = activations(weights.format, x, cols);
    let per_row = cols.div_ceil(left.block);
    let mut out = Vec::new();
    for row in 0..x.len() / cols {
        for channel in 0..weights.rows {
            if weights.format == Format::Int8 {
                let sum: i32 = (0..cols)
                    .map(|k| {
                        left.values[row * cols + k] as i32 * weights.code_value(channel * cols + k) as i32
                    })
                    .sum();
                out.push(sum as f32 * (left.scales[row] * weights.scales[channel]));
                continue;
            }
            let term = |k: usize| {
                let a = f64::from(left.values[row * cols + k])
                    * f64::from(left.scales[row * per_row + k / left.block]);
                a * f64::from(weights.code_value(channel * cols + k))
                    * f64::from(weights.scale_at(channel, k))
            };
            out.push((0..cols).map(term).sum::<f64>() as f32);
        }
    }
    out
}

/// The nearest bf16, ties to even.
fn bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000)
}
