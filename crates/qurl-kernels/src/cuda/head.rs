//! The log-probability head and sampling: logits of some rows at a time, reduced on the device.
//!
//! Logits of as many rows as [`HELD_LOGITS`] allows exist at a time. Scoring and sampling share the kernels
//! that sum a row up, so without truncation a sampled token's log-probability has the bits that scoring it
//! gives.

use super::constants::{HEAD_CHUNK, HEAD_THREADS, SAMPLE_THREADS, TOKEN_WORDS, TRUNCATED_THREADS};
use super::device::Cuda;
use super::ffi::DevicePtr;
use super::kernels::{self, LogitGradients, LogitGradientsBf16, ReduceLogits, SampleRows};
use super::kernels::{SampleTruncated, ScoreRows};
use super::launch::Launch;
use super::linear::{self, Operand, Source};
use super::linear_backward::{input_gradient, weight_gradient};
use super::queue::CudaQueue;
use super::weight::CudaWeight;
use crate::ops::{Head, HeadBackward, Output, Sample};
use crate::types::{DeviceError, Format, HeadOutput};

/// Logits that are held at the same time (1 GiB).
const HELD_LOGITS: usize = 1 << 28;
/// Most rows at a time.
const MAX_ROWS: usize = 1 << 15;
/// Bytes of the sums of a chunk.
const PARTIAL_BYTES: usize = 16;
/// Rows with truncation that are sampled at the same time.
const TRUNCATED_ROWS: usize = 64;

/// Ranges of rows whose logits are held at the same time.
fn held(rows: usize, vocabulary: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let most = (HELD_LOGITS / vocabulary).clamp(1, MAX_ROWS);
    (0..rows).step_by(most).map(move |first| first..(first + most).min(rows))
}

/// Logits of some rows, and the operand that they are made of.
struct Logits {
    hidden: Operand,
    at: DevicePtr,
    vocabulary: u32,
    chunks: usize,
}

impl Logits {
    fn new(queue: &mut CudaQueue, head: &CudaWeight, hidden: DevicePtr, rows: usize) -> Logits {
        let at = queue.alloc(4 * rows * head.n);
        let hidden = linear::operand(queue, head.format, Source::Rows(hidden), rows, head.k);
        linear::gemm(queue, hidden, rows, head, 0, Output::Store, at);
        Logits { hidden, at, vocabulary: head.n as u32, chunks: head.n.div_ceil(HEAD_CHUNK) }
    }

    /// Partial sums of the rows' chunks after scaling by a factor (or one per row).
    fn reduce(&self, queue: &mut CudaQueue, rows: usize, factor: f32, factors: DevicePtr) -> DevicePtr {
        let partials = queue.alloc(rows * self.chunks * PARTIAL_BYTES);
        let args = ReduceLogits {
            logits: self.at,
            vocabulary: self.vocabulary,
            rows: rows as u32,
            chunks: self.chunks as u32,
            factor,
            factors,
            partials,
        };
        // A warp for each chunk.
        let blocks = (rows * self.chunks).div_ceil(HEAD_THREADS / 32);
        queue.launch(kernels::reduce_logits, Launch::blocks(blocks, HEAD_THREADS), args);
        partials
    }
}

/// [`crate::Queue::head`]
pub(super) fn score(queue: &mut CudaQueue, args: Head<Cuda>) -> Result<HeadOutput, DeviceError> {
    let Head { hidden, head, targets, temperature } = args;
    assert!(targets.len() * head.k <= hidden.len, "head: rows");
    assert!(targets.iter().all(|&t| (t as usize) < head.n), "head: target outside of the vocabulary");
    let mut output = HeadOutput::default();
    let mark = queue.mark();
    for range in held(targets.len(), head.n) {
        queue.rewind(mark);
        let rows = range.len();
        let logits = Logits::new(queue, head, hidden.at() + (range.start * head.k * 4) as u64, rows);
        let partials = logits.reduce(queue, rows, 1.0 / temperature, 0);
        let results = queue.alloc(16 * rows);
        let part = |i: usize| results + (i * rows * 4) as u64;
        let targets = queue.stage(&targets[range]);
        let args = ScoreRows {
            logits: logits.at,
            vocabulary: logits.vocabulary,
            chunks: logits.chunks as u32,
            partials,
            targets,
            logp: part(0),
            entropy: part(1),
            argmax: part(2),
            lse: part(3),
        };
        queue.launch(kernels::score_rows, Launch::blocks(rows, 32), args);
        let mut words = vec![0u32; 4 * rows];
        queue.read_values(results, &mut words)?;
        let numbers = |i: usize| words[i * rows..(i + 1) * rows].iter().map(|&w| f32::from_bits(w));
        output.logp.extend(numbers(0));
        output.entropy.extend(numbers(1));
        output.argmax.extend_from_slice(&words[2 * rows..3 * rows]);
        output.lse.extend(numbers(3));
    }
    Ok(output)
}

/// [`crate::Queue::sample`]
pub(super) fn sample(queue: &mut CudaQueue, args: Sample<Cuda>) {
    let Sample { hidden, head, batch, out } = args;
    let count = batch.shape.sampled;
    assert!(count * head.k <= hidden.len && count <= out.rows, "sample: rows");
    // Keys of a row to be sorted.
    let keys_of_row = head.n.next_power_of_two();
    let mark = queue.mark();
    for range in held(count, head.n) {
        queue.rewind(mark);
        let (first, rows) = (range.start, range.len());
        let logits = Logits::new(queue, head, hidden.at() + (first * head.k * 4) as u64, rows);
        let partials = logits.reduce(queue, rows, 1.0, batch.factors(first));
        let (chunks, vocabulary) = (logits.chunks as u32, logits.vocabulary);
        let (samples, to) = (batch.samples(first), out.at() + (first * TOKEN_WORDS * 4) as u64);
        let logits = logits.at;
        let args = SampleRows { logits, vocabulary, chunks, partials, samples, out: to };
        queue.launch(kernels::sample_rows, Launch::blocks(rows, SAMPLE_THREADS), args);
        let mark = queue.mark();
        for from in (0..batch.shape.truncated).step_by(TRUNCATED_ROWS) {
            queue.rewind(mark);
            let truncated = (batch.shape.truncated - from).min(TRUNCATED_ROWS);
            let keys = queue.alloc(8 * keys_of_row * truncated);
            let args = SampleTruncated {
                logits,
                vocabulary,
                chunks,
                partials,
                samples,
                which: batch.truncated(from),
                first: first as u32,
                rows: rows as u32,
                all_keys: keys,
                key_capacity: keys_of_row as u32,
                out: to,
            };
            queue.launch(kernels::sample_truncated, Launch::blocks(truncated, TRUNCATED_THREADS), args);
        }
    }
}

/// [`crate::Queue::head_backward`]
pub(super) fn backward(queue: &mut CudaQueue, args: HeadBackward<Cuda>) {
    let HeadBackward { hidden, head, targets, temperature, out, gradient, dhidden, dweight } = args;
    let rows = targets.len();
    assert!(rows * head.k <= hidden.len.min(dhidden.len), "head backward: hidden rows");
    assert!(dweight.as_ref().is_none_or(|dw| head.n * head.k <= dw.len), "head backward: weights");
    assert!(out.lse.len() == rows && out.entropy.len() == rows, "head backward: rows");
    assert!(gradient.dlogp.len() == rows, "head backward: gradient");
    let without = gradient.dentropy.is_empty();
    assert!(without || gradient.dentropy.len() == rows, "head backward: entropy gradient");
    let zeros = vec![0.0; if without { rows } else { 0 }];
    let dentropy = if without { &zeros[..] } else { gradient.dentropy };
    let dweight = dweight.map(|dweight| dweight.at());
    let mark = queue.mark();
    for range in held(rows, head.n) {
        queue.rewind(mark);
        let (count, offset) = (range.len(), (range.start * head.k * 4) as u64);
        let logits = Logits::new(queue, head, hidden.at() + offset, count);
        let targets = queue.stage(&targets[range.clone()]);
        let numbers = [&out.lse[..], gradient.dlogp, dentropy, &out.entropy];
        let [lse, dlogp, dentropy, entropy] = numbers.map(|numbers| queue.stage(&numbers[range.clone()]));
        let (vocabulary, inverse_temperature) = (logits.vocabulary, 1.0 / temperature);
        let launch = Launch::grid([head.n.div_ceil(4 * 256), count, 1], 256);
        let dlogits = match head.format {
            Format::Bf16 => {
                let to = queue.alloc(2 * count * head.n);
                let args = LogitGradientsBf16 {
                    logits: logits.at,
                    vocabulary,
                    targets,
                    inverse_temperature,
                    lse,
                    dlogp,
                    dentropy,
                    entropy,
                    out: to,
                };
                queue.launch(kernels::logit_gradients_bf16, launch, args);
                to
            }
            Format::F32 => {
                let args = LogitGradients {
                    logits: logits.at,
                    vocabulary,
                    targets,
                    inverse_temperature,
                    lse,
                    dlogp,
                    dentropy,
                    entropy,
                };
                queue.launch(kernels::logit_gradients_f32, launch, args);
                logits.at
            }
            Format::Int8 | Format::Fp8 | Format::Fp8Block | Format::Int4 | Format::Nvfp4 => {
                panic!("head backward: weights in {} have no gradients", head.format)
            }
        };
        if let Some(dweight) = dweight {
            weight_gradient(queue, logits.hidden.data, dlogits, count, head, dweight);
        }
        input_gradient(queue, dlogits, count, head, dhidden.at() + offset);
    }
}
