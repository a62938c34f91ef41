//! The log-probability head and sampling: rows of logits in turns, reduced on the device.
//!
//! Logits of as many rows as [`HELD_LOGITS`] allows exist at a time. Scoring and drawing share the kernels that sum a
//! row up, so without truncation a drawn token's log-probability has the bits that scoring it gives.

use super::ffi::DevicePtr;
use super::gpu::Gpu;
use super::launch::args;
use super::linear::{self, CudaWeight, Rows};
use super::memory::{Plain, Slot};
use crate::backend::{DRAWN_WORDS, HeadGradient, HeadOutput, Output, SampleRow};
use crate::{DeviceError, Format};

/// Logits that are held at the same time (1 GiB).
const HELD_LOGITS: usize = 1 << 28;
/// Most rows of a turn.
const MOST_ROWS: usize = 1 << 15;
/// Columns of the vocabulary that are summed up at a time.
const CHUNK: usize = 1024;
/// Threads that draw a token.
const DRAWING: u32 = 128;
/// Bytes of the sums of a chunk.
const PARTIAL_BYTES: usize = 16;
/// Rows with truncation that are drawn at the same time.
const TRUNCATED_ROWS: usize = 64;

/// [`SampleRow`] as the kernels read it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Row {
    temperature: f32,
    top_p: f32,
    top_k: u32,
    min_p: f32,
    uniform: f64,
}

// SAFETY: numbers of 4 and 8 bytes, each at a multiple of its size, 24 bytes together.
unsafe impl Plain for Row {}

fn turn_rows(vocabulary: usize) -> usize {
    (HELD_LOGITS / vocabulary).clamp(1, MOST_ROWS)
}

/// Logits of some rows, and the partial sums of their chunks after scaling by a factor (or one per row).
struct Turn<'a> {
    gpu: &'a Gpu,
    vocabulary: usize,
    chunks: usize,
    logits: DevicePtr,
}

impl<'a> Turn<'a> {
    fn new(gpu: &'a Gpu, head: &CudaWeight, hidden: DevicePtr, rows: usize) -> Turn<'a> {
        let logits = gpu.scratch(Slot::Logits, 4 * rows * head.n);
        let x = linear::left(gpu, head.format, Rows::Plain(hidden), rows, head.k);
        linear::forward(gpu, x, rows, head, 0, Output::Store, logits);
        Turn { gpu, vocabulary: head.n, chunks: head.n.div_ceil(CHUNK), logits }
    }

    fn reduce(&self, rows: usize, factor: f32, factors: DevicePtr) -> DevicePtr {
        let partials = self.gpu.scratch(Slot::Partials, rows * self.chunks * PARTIAL_BYTES);
        let (vocabulary, chunks) = (self.vocabulary as u32, self.chunks as u32);
        let given = args![self.logits, vocabulary, rows as u32, chunks, factor, factors, partials];
        self.gpu.launch_next(
            "head",
            "reduce_logits",
            [(rows * self.chunks).div_ceil(4), 1, 1],
            128,
            0,
            given,
        );
        partials
    }
}

/// Log-probabilities of targets, entropies and likeliest tokens.
pub(super) fn score(
    gpu: &Gpu,
    hidden: DevicePtr,
    head: &CudaWeight,
    targets: &[u32],
    temperature: f32,
) -> Result<HeadOutput, DeviceError> {
    assert!(targets.iter().all(|&t| (t as usize) < head.n), "head: target outside of the vocabulary");
    let mut output = HeadOutput::default();
    let per_turn = turn_rows(head.n);
    for (first, targets) in (0..).step_by(per_turn).zip(targets.chunks(per_turn)) {
        let rows = targets.len();
        let turn = Turn::new(gpu, head, hidden + (first * head.k * 4) as u64, rows);
        let partials = turn.reduce(rows, 1.0 / temperature, 0);
        let results = gpu.scratch(Slot::Results, 16 * rows);
        let part = |i: usize| results + (i * rows * 4) as u64;
        let given = args![
            turn.logits,
            turn.vocabulary as u32,
            turn.chunks as u32,
            partials,
            gpu.stage(targets),
            part(0),
            part(1),
            part(2),
            part(3),
        ];
        gpu.launch("head", "score_rows", [rows, 1, 1], 32, 0, given);
        let mut words = vec![0u32; 4 * rows];
        gpu.read(results, &mut words)?;
        let numbers = |i: usize| words[i * rows..(i + 1) * rows].iter().map(|&w| f32::from_bits(w));
        output.logp.extend(numbers(0));
        output.entropy.extend(numbers(1));
        output.argmax.extend_from_slice(&words[2 * rows..3 * rows]);
        output.lse.extend(numbers(3));
    }
    Ok(output)
}

/// Draws a token for each row; three words a row go to `out`.
pub(super) fn draw(gpu: &Gpu, hidden: DevicePtr, head: &CudaWeight, rows: &[SampleRow], out: DevicePtr) {
    let per_turn = turn_rows(head.n);
    for (first, rows) in (0..).step_by(per_turn).zip(rows.chunks(per_turn)) {
        let turn = Turn::new(gpu, head, hidden + (first * head.k * 4) as u64, rows.len());
        let factors: Vec<f32> = rows.iter().map(|r| r.inverse_temperature()).collect();
        let partials = turn.reduce(rows.len(), 1.0, gpu.stage(&factors));
        let plain: Vec<Row> = rows
            .iter()
            .map(|&SampleRow { temperature, top_p, top_k, min_p, uniform }| Row {
                temperature,
                top_p,
                top_k,
                min_p,
                uniform,
            })
            .collect();
        let staged = gpu.stage(&plain);
        let to = out + (first * DRAWN_WORDS * 4) as u64;
        let given = args![turn.logits, turn.vocabulary as u32, turn.chunks as u32, partials, staged, to];
        gpu.launch_next("sample", "draw", [rows.len(), 1, 1], DRAWING, 0, given);
        let truncated = rows.iter().enumerate().filter(|(_, r)| !r.is_greedy() && r.truncates(head.n));
        let truncated: Vec<u32> = truncated.map(|(i, _)| i as u32).collect();
        let room = head.n.next_power_of_two();
        for which in truncated.chunks(TRUNCATED_ROWS) {
            let keys = gpu.scratch(Slot::Sorted, 8 * room * which.len());
            let given = args![
                turn.logits,
                turn.vocabulary as u32,
                turn.chunks as u32,
                partials,
                staged,
                gpu.stage(which),
                keys,
                room as u32,
                to,
            ];
            gpu.launch("sample", "draw_truncated", [which.len(), 1, 1], 256, 0, given);
        }
    }
}

/// Backward of [`score`]: `dhidden` is overwritten, `dweight += ...`.
pub(super) fn backward(
    gpu: &Gpu,
    hidden: DevicePtr,
    head: &CudaWeight,
    targets: &[u32],
    temperature: f32,
    out: &HeadOutput,
    gradient: HeadGradient,
    dhidden: DevicePtr,
    dweight: DevicePtr,
) {
    let rows = targets.len();
    assert!(out.lse.len() == rows && gradient.dlogp.len() == rows, "head backward: rows");
    assert!(
        gradient.dentropy.is_empty() || gradient.dentropy.len() == rows,
        "head backward: entropy gradient"
    );
    let zeros = vec![0.0; if gradient.dentropy.is_empty() { rows } else { 0 }];
    let dentropy = if gradient.dentropy.is_empty() { &zeros[..] } else { gradient.dentropy };
    let per_turn = turn_rows(head.n);
    for first in (0..rows).step_by(per_turn) {
        let range = first..(first + per_turn).min(rows);
        let count = range.len();
        let offset = (first * head.k * 4) as u64;
        let x = linear::left(gpu, head.format, Rows::Plain(hidden + offset), count, head.k);
        let logits = gpu.scratch(Slot::Logits, 4 * count * head.n);
        linear::forward(gpu, x, count, head, 0, Output::Store, logits);
        let common = [
            gpu.stage(&targets[range.clone()]),
            gpu.stage(&out.lse[range.clone()]),
            gpu.stage(&gradient.dlogp[range.clone()]),
            gpu.stage(&dentropy[range.clone()]),
            gpu.stage(&out.entropy[range]),
        ];
        let [targets, lse, dlogp, dentropy, entropy] = common;
        let (vocabulary, inverse) = (head.n as u32, 1.0 / temperature);
        let grid = [head.n.div_ceil(4 * 256), count, 1];
        let dlogits = match head.format {
            Format::Bf16 => {
                let to = gpu.scratch(Slot::Right, 2 * count * head.n);
                let given = args![logits, vocabulary, targets, inverse, lse, dlogp, dentropy, entropy, to];
                gpu.launch("head", "logit_gradients_bf16", grid, 256, 0, given);
                to
            }
            _ => {
                let given = args![logits, vocabulary, targets, inverse, lse, dlogp, dentropy, entropy];
                gpu.launch("head", "logit_gradients_f32", grid, 256, 0, given);
                logits
            }
        };
        linear::weight_gradient(gpu, head.format, x.data, dlogits, count, head.n, head.k, dweight);
        linear::input_gradient(gpu, dlogits, count, head, dhidden + offset);
    }
}
