//! The log-probability head and sampling: logits of some rows at a time, reduced on the device.
//!
//! Logits of as many rows as [`HELD_LOGITS`] allows exist at a time. Scoring and sampling share the kernels that sum a
//! row up, so without truncation a sampled token's log-probability has the bits that scoring it gives.

use super::device::Cuda;
use super::ffi::DevicePtr;
use super::launch::args;
use super::linear::{self, Operand, Source};
use super::linear_backward::{input_gradient, weight_gradient};
use super::pending::TOKEN_WORDS;
use super::queue::CudaQueue;
use super::weight::CudaWeight;
use crate::ops::{Head, HeadBackward, Output, Sample};
use crate::types::{DeviceError, Format, HeadOutput};

/// Logits that are held at the same time (1 GiB).
const HELD_LOGITS: usize = 1 << 28;
/// Most rows at a time.
const MAX_ROWS: usize = 1 << 15;
/// Columns of the vocabulary that are summed up at a time.
const CHUNK: usize = 1024;
/// Threads that sample a token.
const SAMPLING_THREADS: u32 = 128;
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
        Logits { hidden, at, vocabulary: head.n as u32, chunks: head.n.div_ceil(CHUNK) }
    }

    /// Partial sums of the rows' chunks after scaling by a factor (or one per row).
    fn reduce(&self, queue: &mut CudaQueue, rows: usize, factor: f32, factors: DevicePtr) -> DevicePtr {
        let partials = queue.alloc(rows * self.chunks * PARTIAL_BYTES);
        let chunks = self.chunks as u32;
        let given = args![self.at, self.vocabulary, rows as u32, chunks, factor, factors, partials];
        let grid = [(rows * self.chunks).div_ceil(4), 1, 1];
        queue.launch_next("head", "reduce_logits", grid, 128, 0, given);
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
        let (chunks, vocabulary) = (logits.chunks as u32, logits.vocabulary);
        let given =
            args![logits.at, vocabulary, chunks, partials, targets, part(0), part(1), part(2), part(3)];
        queue.launch("head", "score_rows", [rows, 1, 1], 32, 0, given);
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
        let given = args![logits.at, vocabulary, chunks, partials, samples, to];
        queue.launch_next("sample", "sample_rows", [rows, 1, 1], SAMPLING_THREADS, 0, given);
        let mark = queue.mark();
        for from in (0..batch.shape.truncated).step_by(TRUNCATED_ROWS) {
            queue.rewind(mark);
            let truncated = (batch.shape.truncated - from).min(TRUNCATED_ROWS);
            let keys = queue.alloc(8 * keys_of_row * truncated);
            let given = args![
                logits.at,
                vocabulary,
                chunks,
                partials,
                samples,
                batch.truncated(from),
                first as u32,
                rows as u32,
                keys,
                keys_of_row as u32,
                to,
            ];
            queue.launch("sample", "sample_truncated", [truncated, 1, 1], 256, 0, given);
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
        let (vocabulary, inverse) = (logits.vocabulary, 1.0 / temperature);
        let grid = [head.n.div_ceil(4 * 256), count, 1];
        let dlogits = match head.format {
            Format::Bf16 => {
                let to = queue.alloc(2 * count * head.n);
                let given = args![logits.at, vocabulary, targets, inverse, lse, dlogp, dentropy, entropy, to];
                queue.launch("head", "logit_gradients_bf16", grid, 256, 0, given);
                to
            }
            Format::F32 => {
                let given = args![logits.at, vocabulary, targets, inverse, lse, dlogp, dentropy, entropy];
                queue.launch("head", "logit_gradients_f32", grid, 256, 0, given);
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
