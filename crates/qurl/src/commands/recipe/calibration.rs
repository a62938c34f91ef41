//! What the parts of a training step cost on a device: seconds a token, a decode step or an update, measured
//! in about a second with the code that a run uses.
//!
//! A small model is measured as it is. A large one by slices of its own width: one block, two blocks, and one
//! block with half of the vocabulary; costs are affine in blocks and vocabulary, so three slices give those
//! of the whole. What a slice cannot show is that the weights of the whole do not stay in the caches: a
//! decode step is therefore never faster than reading all packed weights, keys and values at the memory's
//! measured bandwidth.

use crate::commands::bench::machine::Machine;
use crate::commands::bench::median;
use qurl_kernels::types::{Batch, KvShape};
use qurl_kernels::{Device, DeviceError, Format, KvFormat, Queue, Rounding};
use qurl_model::compute::{NetworkOptions, Targets, whole_batch};
use qurl_model::{ModelConfig, params};
use qurl_rollout::{Engine, EngineOptions, Sampling, WeightVersion};
use qurl_train::learner::{Learner, LearnerOptions, LossGradient, LossScope};
use std::time::Instant;

/// Parameters up to which a model is measured as it is.
const SMALL: u64 = 16_000_000;
/// The vocabulary of a slice.
const SLICE_VOCABULARY: usize = 8192;
/// Seconds after which a measured batch is long enough.
const ENOUGH: f64 = 0.02;
/// Rows that a measurement begins with.
const FEW_ROWS: usize = 64;
/// Measurements of which the median counts, after one that does not.
const REPEATS: usize = 3;
/// Decode steps of a measurement.
const DECODE_STEPS: usize = 4;

/// What is measured: tokens of a sequence and how they are computed.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Tokens of a prompt.
    pub prompt: usize,
    /// Tokens of a sequence, with its prompt.
    pub length: usize,
    /// How the learner computes.
    pub learner: LearnerOptions,
    /// How responses are sampled; none in supervised training.
    pub rollout: Option<RolloutWorkload>,
}

/// The same of a rollout.
#[derive(Clone, Copy, Debug)]
pub struct RolloutWorkload {
    /// Number format of the weights.
    pub format: Format,
    /// Whether the head has it, too.
    pub quantize_head: bool,
    /// Number format of keys and values, where the recipe says so.
    pub kv_format: Option<KvFormat>,
    /// Size of the engine; `max_num_seqs` is the number of sequences that are decoded together.
    pub engine: EngineOptions,
    /// Temperature and truncation.
    pub sampling: Sampling,
}

impl RolloutWorkload {
    /// How the copy that samples computes.
    pub fn network(&self, config: &ModelConfig, positions: usize) -> NetworkOptions {
        let inference = NetworkOptions::inference(config, self.format);
        let kv_format = self.kv_format.unwrap_or(inference.kv_format);
        let head_format = if self.quantize_head { self.format } else { inference.head_format };
        NetworkOptions { positions, kv_format, head_format, ..inference }
    }
}

/// Costs of a model in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Log-probs of a token, per token of the sequence.
    pub score: f64,
    /// Forward and backward pass, per token of the sequence.
    pub learn: f64,
    /// An update of the optimizer and packing the weights anew.
    pub update: f64,
    /// Quantizing the weights for the rollout.
    pub quantize: f64,
    /// Computing a token of a prompt.
    pub prefill: f64,
    /// A decode step of all sequences in the middle of their responses.
    pub decode: f64,
}

/// Figures of a slice, each of which is affine in blocks and vocabulary.
const FIGURES: usize = 7;

/// Measures a workload.
pub fn measure<D: Machine>(
    queue: &mut D::Queue,
    config: &ModelConfig,
    work: Workload,
) -> anyhow::Result<Costs> {
    let [score, learn, update, quantize, prefill, decode, weight_bytes] =
        of_whole_model(config, |slice| slice_costs::<D>(queue, slice, work))?;
    let decode = match work.rollout {
        Some(rollout) => {
            let token_bytes = page_bytes(&**queue.device(), config, rollout) / rollout.engine.page_size;
            let cached = rollout.engine.max_num_seqs * middle(work);
            let bytes = weight_bytes + (cached * token_bytes) as f64;
            decode.max(bytes / D::bandwidth_of(queue, bytes as usize)?)
        }
        None => 0.0,
    };
    Ok(Costs { score, learn, update, quantize, prefill, decode })
}

/// Figures of a model by those of itself, or by those of its slices.
fn of_whole_model(
    config: &ModelConfig,
    mut measure: impl FnMut(&ModelConfig) -> anyhow::Result<[f64; FIGURES]>,
) -> anyhow::Result<[f64; FIGURES]> {
    if config.param_count() <= SMALL {
        return measure(config);
    }
    let vocabulary = config.vocab_size.min(SLICE_VOCABULARY);
    let mut slice =
        |num_layers, vocab_size| measure(&ModelConfig { num_layers, vocab_size, ..config.clone() });
    let (one, two, narrow) = (slice(1, vocabulary)?, slice(2, vocabulary)?, slice(1, vocabulary / 2)?);
    let blocks = config.num_layers as f64 - 1.0;
    // In halves of the slices' vocabulary.
    let words = (config.vocab_size - vocabulary) as f64 / (vocabulary - vocabulary / 2) as f64;
    Ok(std::array::from_fn(|i| {
        let (block, word) = ((two[i] - one[i]).max(0.0), (one[i] - narrow[i]).max(0.0));
        one[i] + blocks * block + words * word
    }))
}

/// Figures of one model, in the order of [`Costs`], and the bytes of its packed weights.
fn slice_costs<D: Machine>(
    queue: &mut D::Queue,
    config: &ModelConfig,
    work: Workload,
) -> anyhow::Result<[f64; FIGURES]> {
    let weights = params::shapes(config, false).map(|leaf| vec![0.0; leaf.len()]);
    let mut learner = Learner::<D>::new(queue, config, &weights, work.learner)?;
    drop(weights);
    // As many rows as it takes to measure a time, at most a whole micro-batch.
    let most = work.learner.tape.rows.min(work.learner.tape.sequences * work.length);
    let mut rows = most.min(FEW_ROWS);
    while rows < most && learn(queue, &mut learner, work, rows)? < ENOUGH {
        rows = most.min(2 * rows);
    }
    let learn = repeated(|| learn(queue, &mut learner, work, rows))? / rows as f64;
    let score = repeated(|| score(queue, &mut learner, work, rows))? / rows as f64;
    let update = repeated(|| timed::<D>(queue, |queue| learner.update(queue, 0.0).map(|_| ())))?;
    let [quantize, prefill, decode, weight_bytes] = match work.rollout {
        Some(rollout) => sampling_costs(queue, &mut learner, rollout, work, rows)?,
        None => [0.0; 4],
    };
    Ok([score, learn, update, quantize, prefill, decode, weight_bytes])
}

/// Seconds of quantizing, of a token of a prompt and of a decode step; bytes of the packed weights.
fn sampling_costs<D: Machine>(
    queue: &mut D::Queue,
    learner: &mut Learner<D>,
    rollout: RolloutWorkload,
    work: Workload,
    rows: usize,
) -> anyhow::Result<[f64; 4]> {
    let config = &learner.network().config().clone();
    let network = learner.packed(queue, rollout.network(config, middle(work)))?;
    let weight_bytes = network.weight_bytes() as f64;
    let sequences = rollout.engine.max_num_seqs;
    let options = EngineOptions {
        // A rehearsal uses one page only.
        kv_bytes: page_bytes(&**queue.device(), config, rollout),
        max_num_seqs: sequences.min(rows),
        max_num_batched_tokens: rollout.engine.max_num_batched_tokens.min(rows),
        ..rollout.engine
    };
    let version = WeightVersion::default();
    let mut engine = Engine::new(queue.device().clone(), network, version, options)?;
    let quantize = repeated(|| {
        let began = Instant::now();
        let master = &mut learner.master;
        master.checksum(queue)?;
        engine.load_with(version, |net| net.refresh_leaves(queue, master, Rounding::Nearest))?;
        queue.synchronize()?;
        Ok(began.elapsed().as_secs_f64())
    })?;
    let steps = [rollout.sampling; DECODE_STEPS];
    let mut rehearse = |queue: &mut D::Queue, steps: &[Sampling]| {
        timed::<D>(queue, |queue| {
            engine.rehearse(queue, steps);
            Ok(())
        })
    };
    let prefill = repeated(|| rehearse(queue, &[]))?;
    let both = repeated(|| rehearse(queue, &steps))?;
    let decode = (both - prefill).max(0.0) / DECODE_STEPS as f64;
    let decode = decode * sequences as f64 / options.max_num_seqs as f64;
    Ok([quantize, prefill / options.max_num_batched_tokens as f64, decode, weight_bytes])
}

/// Seconds of one forward and backward pass over so many rows.
fn learn<D: Machine>(
    queue: &mut D::Queue,
    learner: &mut Learner<D>,
    work: Workload,
    rows: usize,
) -> anyhow::Result<f64> {
    let (batch, targets) = batch_of(work, rows);
    timed::<D>(queue, |queue| {
        learner.accumulate(queue, &batch, targets, 1.0, LossScope::Token, |_, out| {
            Ok(LossGradient { dlogp: vec![0.0; out.logp.len()], dentropy: Vec::new() })
        })
    })
}

/// Seconds of scoring so many rows.
fn score<D: Machine>(
    queue: &mut D::Queue,
    learner: &mut Learner<D>,
    work: Workload,
    rows: usize,
) -> anyhow::Result<f64> {
    let (batch, targets) = batch_of(work, rows);
    timed::<D>(queue, |queue| learner.score(queue, &batch, &targets, 1.0).map(|_| ()))
}

/// Whole sequences that fill so many rows, the last one cut, with their responses as targets.
fn batch_of(work: Workload, rows: usize) -> (Batch, Targets) {
    let starts = (0..rows).step_by(work.length);
    let ids: Vec<Vec<u32>> = starts.map(|start| vec![0; work.length.min(rows - start)]).collect();
    // A sequence that is cut is taken for a shorter one with a shorter prompt.
    let targets = Targets::of(&ids, |i, position| position * work.length >= work.prompt * ids[i].len());
    (whole_batch(&ids), targets)
}

/// Bytes of a page of keys and values in all layers.
pub fn page_bytes<D: Device>(device: &D, config: &ModelConfig, rollout: RolloutWorkload) -> usize {
    let format = rollout.network(config, 1).kv_format;
    let (page_size, kv_heads, head_dim) = (rollout.engine.page_size, config.num_kv_heads, config.head_dim);
    device.kv_page_bytes(KvShape { format, pages: 1, page_size, kv_heads, head_dim }) * config.num_layers
}

/// Context in the middle of a response.
fn middle(work: Workload) -> usize {
    (work.prompt + work.length).div_ceil(2)
}

/// Seconds until the device is done.
fn timed<D: Machine>(
    queue: &mut D::Queue,
    work: impl FnOnce(&mut D::Queue) -> Result<(), DeviceError>,
) -> anyhow::Result<f64> {
    let began = Instant::now();
    work(queue)?;
    queue.synchronize()?;
    Ok(began.elapsed().as_secs_f64())
}

/// The median of some measurements, after one that may have had to prepare something.
fn repeated(mut once: impl FnMut() -> anyhow::Result<f64>) -> anyhow::Result<f64> {
    once()?;
    Ok(median((0..REPEATS).map(|_| once()).collect::<anyhow::Result<_>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figures that are affine in blocks and vocabulary are those of the whole model, exactly.
    #[test]
    fn slices_give_the_figures_of_the_whole() {
        let config = ModelConfig::named("qwen2.5-0.5b").expect("a known shape");
        let figure = |c: &ModelConfig| 3.0 + 0.25 * c.num_layers as f64 + c.vocab_size as f64 / 1024.0;
        let mut sizes = Vec::new();
        let whole = of_whole_model(&config, |slice| {
            assert_eq!(slice.hidden_size, config.hidden_size);
            sizes.push((slice.num_layers, slice.vocab_size));
            Ok([figure(slice); FIGURES])
        });
        assert_eq!(whole.expect("measured"), [figure(&config); FIGURES]);
        assert_eq!(sizes, [(1, 8192), (2, 8192), (1, 4096)]);
        let small = ModelConfig { num_layers: 2, vocab_size: 100, hidden_size: 64, ..config };
        let measured = of_whole_model(&small, |slice| Ok([slice.num_layers as f64; FIGURES]));
        assert_eq!(measured.expect("measured"), [2.0; FIGURES], "as it is");
    }
}
