//! The log-probability head and sampling: logits of some rows at a time, reduced on the device.
//!
//! Logits of as many rows as [`HELD_LOGITS`] allows exist at a time. Scoring and sampling share the kernels
//! that sum a row up, so without truncation a sampled token's log-probability has the bits that scoring it
//! gives.

use super::constants::TRUNCATED_THREADS;
use super::constants::{BIAS_THREADS, HEAD_CHUNK, HEAD_THREADS, SAMPLE_THREADS, TOKEN_WORDS};
use super::device::Cuda;
use super::ffi::DevicePtr;
use super::kernels::{self, BiasLogits, ReduceLogits, SampleRows, SampleTruncated, ScoreRows, TopTokens};
use super::launch::Launch;
use super::linear::{self, Operand, Source};
use super::queue::CudaQueue;
use super::weight::CudaWeight;
use crate::ops::{Head, Output, Sample, Top};
use crate::types::{DeviceError, HeadOutput};
use std::ops::Range;

/// Logits that are held at the same time (1 GiB).
const HELD_LOGITS: usize = 1 << 28;
/// Most rows at a time.
const MAX_ROWS: usize = 1 << 15;
/// Bytes of the sums of a chunk.
const PARTIAL_BYTES: usize = 16;
/// Rows with truncation that are sampled at the same time.
const TRUNCATED_ROWS: usize = 64;

/// Ranges of rows whose logits are held at the same time.
pub(super) fn held(rows: usize, vocabulary: usize) -> impl Iterator<Item = Range<usize>> {
    let most = (HELD_LOGITS / vocabulary).clamp(1, MAX_ROWS);
    (0..rows).step_by(most).map(move |first| first..(first + most).min(rows))
}

/// Logits of some rows, and the operand that they are made of.
#[derive(Clone, Copy)]
pub(super) struct Logits {
    pub hidden: Operand,
    pub at: DevicePtr,
    pub vocabulary: u32,
    chunks: usize,
}

impl Logits {
    pub fn new(queue: &mut CudaQueue, head: &CudaWeight, hidden: DevicePtr, rows: usize) -> Logits {
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

    /// Scales the logits by the temperature and scores the targets.
    pub fn score(
        &self,
        queue: &mut CudaQueue,
        temperature: f32,
        targets: DevicePtr,
        rows: usize,
        scores: Scores,
    ) {
        let partials = self.reduce(queue, rows, 1.0 / temperature, 0);
        let args = ScoreRows {
            logits: self.at,
            vocabulary: self.vocabulary,
            chunks: self.chunks as u32,
            partials,
            targets,
            logp: scores.part(0),
            entropy: scores.entropy(),
            argmax: scores.part(2),
            lse: scores.lse(),
        };
        queue.launch(kernels::score_rows, Launch::blocks(rows, 32), args);
    }
}

/// Where the log-probs, entropies, argmax tokens and softmax denominators of some rows are, one after the
/// other.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    pub at: DevicePtr,
    pub rows: usize,
}

/// Words of a row's scores.
pub(super) const SCORE_WORDS: usize = 4;

impl Scores {
    fn part(&self, i: usize) -> DevicePtr {
        self.at + (i * self.rows * 4) as u64
    }

    pub fn entropy(&self) -> DevicePtr {
        self.part(1)
    }

    pub fn lse(&self) -> DevicePtr {
        self.part(3)
    }

    /// The scores of rows that have come to the host.
    pub fn read(words: &[u32], output: &mut HeadOutput) {
        let rows = words.len() / SCORE_WORDS;
        let numbers = |i: usize| words[i * rows..(i + 1) * rows].iter().map(|&w| f32::from_bits(w));
        output.logp.extend(numbers(0));
        output.entropy.extend(numbers(1));
        output.argmax.extend_from_slice(&words[2 * rows..3 * rows]);
        output.lse.extend(numbers(3));
    }
}

/// [`crate::Queue::head`]: everything is issued before the results are waited for.
pub(super) fn score(queue: &mut CudaQueue, args: Head<Cuda>) -> Result<HeadOutput, DeviceError> {
    let Head { hidden, head, targets, temperature } = args;
    assert!(targets.len() * head.k <= hidden.len, "head: rows");
    assert!(targets.iter().all(|&t| (t as usize) < head.n), "head: target outside of the vocabulary");
    let results = queue.alloc(4 * SCORE_WORDS * targets.len());
    let mark = queue.mark();
    for range in held(targets.len(), head.n) {
        queue.rewind(mark);
        let rows = range.len();
        let logits = Logits::new(queue, head, hidden.at() + (range.start * head.k * 4) as u64, rows);
        let scores = Scores { at: results + (4 * SCORE_WORDS * range.start) as u64, rows };
        let targets = queue.stage(&targets[range]);
        logits.score(queue, temperature, targets, rows, scores);
    }
    let mut words = vec![0u32; SCORE_WORDS * targets.len()];
    queue.read_values(results, &mut words)?;
    let mut output = HeadOutput::default();
    for Range { start, end } in held(targets.len(), head.n) {
        Scores::read(&words[SCORE_WORDS * start..SCORE_WORDS * end], &mut output);
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
        if batch.shape.biases > 0 {
            let (biases, count) = (batch.biases(), batch.shape.biases);
            let args = BiasLogits {
                logits: logits.at,
                vocabulary: logits.vocabulary,
                first: first as u32,
                rows: rows as u32,
                biases,
                count: count as u32,
            };
            let blocks = count.div_ceil(BIAS_THREADS);
            queue.launch(kernels::bias_logits, Launch::blocks(blocks, BIAS_THREADS), args);
        }
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

/// [`crate::Queue::top`]
pub(super) fn top(queue: &mut CudaQueue, args: Top<Cuda>) -> Result<Vec<Vec<(u32, f32)>>, DeviceError> {
    let Top { hidden, head, factors, count } = args;
    let count = count.min(head.n);
    assert!(factors.len() * head.k <= hidden.len, "top: rows");
    let results = queue.alloc(8 * factors.len() * count);
    let mark = queue.mark();
    for range in held(factors.len(), head.n) {
        queue.rewind(mark);
        let (first, rows) = (range.start, range.len());
        let logits = Logits::new(queue, head, hidden.at() + (first * head.k * 4) as u64, rows);
        let factors = queue.stage(&factors[range]);
        let partials = logits.reduce(queue, rows, 1.0, factors);
        let args = TopTokens {
            logits: logits.at,
            vocabulary: logits.vocabulary,
            chunks: logits.chunks as u32,
            partials,
            count: count as u32,
            out: results + (8 * first * count) as u64,
        };
        queue.launch(kernels::top_tokens, Launch::blocks(rows, TRUNCATED_THREADS), args);
    }
    let mut words = vec![[0u32; 2]; factors.len() * count];
    queue.read_values(results, &mut words)?;
    // A row that is not finite has NaN in all places.
    let tokens = |row: &[[u32; 2]]| {
        let tokens = row.iter().map(|[id, logp]| (*id, f32::from_bits(*logp)));
        tokens.filter(|(_, logp)| !logp.is_nan()).collect()
    };
    Ok(match count {
        0 => vec![Vec::new(); factors.len()],
        count => words.chunks_exact(count).map(tokens).collect(),
    })
}
