//! A model that learns from examples: one step, the validation loss, and the state in and out.

use super::{EpochOrder, Example, Examples, SftError, SftRecord};
use crate::base;
use crate::checkpoint::Snapshot;
use crate::learner::{Learner, LearnerOptions, LossGradient, LossScope};
use crate::optimizer::UpdateReport;
use crate::ranks::Ranks;
use crate::recipe::{Recipe, Sft};
use crate::shards::micro_batches;
use crate::start::Start;
use qurl_kernels::{Device, DeviceError, Queue};
use qurl_model::Params;
use qurl_model::compute::{Batch, TapeOptions, Targets, whole_batch};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Skipped updates in a row after which training gives up.
const MAX_SKIPPED: u64 = 20;

/// A model that learns from examples.
pub struct SftTrainer<'a, D: Device> {
    queue: D::Queue,
    learner: Learner<D>,
    examples: &'a Examples<'a>,
    order: EpochOrder,
    sft: Sft,
    tape: TapeOptions,
    /// Steps done.
    step: u64,
    skipped_in_a_row: u64,
    /// Tells the examples from others.
    fingerprint: u64,
    /// The directory of the frozen base, where adapters are trained beside one.
    base: Option<PathBuf>,
}

impl<'a, D: Device> SftTrainer<'a, D> {
    /// Takes over the weights of the start, which all ranks have.
    pub fn new(
        device: &Arc<D>,
        recipe: &Recipe,
        sft: &Sft,
        start: &Start,
        examples: &'a Examples<'a>,
        ranks: &Ranks,
    ) -> Result<Self, SftError> {
        let positions = sft.max_length.min(start.config.max_position_embeddings);
        let rows = recipe.trainer.micro_tokens.max(positions);
        let tape = TapeOptions { rows, sequences: sft.batch_size, recompute: recipe.trainer.recompute };
        let options = LearnerOptions {
            compute: recipe.trainer.compute,
            positions,
            pack_once: recipe.trainer.pack_once,
            kv_format: None,
            tape,
            adamw: sft.optim,
            lora: recipe.lora_options(),
        };
        device.limit_memory(recipe.memory_limit());
        let mut queue = device.queue()?;
        let mut learner = Learner::from_start(&mut queue, &start.config, start.learner(), options, ranks)?;
        learner.work(&mut queue)?;
        Ok(SftTrainer {
            queue,
            learner,
            examples,
            order: EpochOrder::default(),
            sft: sft.clone(),
            tape,
            step: 0,
            skipped_in_a_row: 0,
            fingerprint: examples.fingerprint(),
            base: start.adapters.as_ref().map(|adapters| adapters.dir.clone()),
        })
    }

    /// Its settings.
    pub fn sft(&self) -> &Sft {
        &self.sft
    }

    /// Where it computes, and the model.
    pub fn parts(&mut self) -> (&mut D::Queue, &mut Learner<D>) {
        (&mut self.queue, &mut self.learner)
    }

    /// Who trains it.
    pub fn ranks(&self) -> &Ranks {
        self.learner.ranks()
    }

    /// Where it computes.
    pub fn device(&self) -> &D {
        self.queue.device()
    }

    /// The weights, on the host.
    pub fn weights(&mut self) -> Result<Params<Vec<f32>>, DeviceError> {
        self.learner.weights(&mut self.queue)
    }

    /// Steps done so far.
    pub fn steps_done(&self) -> u64 {
        self.step
    }

    /// One update on the next batch. After `MAX_SKIPPED` updates in a row that were not finite it is an
    /// error.
    pub fn step(&mut self) -> Result<SftRecord, SftError> {
        let began = Instant::now();
        let size = self.sft.batch_size as u64;
        let first = self.step * size;
        let batch: Vec<Example> = (first..first + size)
            .map(|index| self.examples.get(&mut self.order, index))
            .collect::<Result<_, _>>()?;
        let lr = self.sft.schedule().at(self.step);
        let (loss, report) = train_step(&mut self.queue, &mut self.learner, &batch, self.tape, lr)?;
        self.step += 1;
        self.skipped_in_a_row = if report.applied { 0 } else { self.skipped_in_a_row + 1 };
        if self.skipped_in_a_row >= MAX_SKIPPED {
            return Err(SftError::NotFinite { step: self.step, times: self.skipped_in_a_row });
        }
        let mut record = SftRecord {
            step: self.step,
            epoch: self.examples.count().map(|count| (self.step * size) as f64 / count as f64),
            loss,
            validation_loss: None,
            lr,
            grad_norm: report.grad_norm,
            updates: u64::from(report.applied),
            skipped_updates: u64::from(!report.applied),
            tokens: batch.iter().map(|example| example.ids.len()).sum(),
            learned_tokens: batch.iter().map(Example::scored).sum(),
            timing: BTreeMap::new(),
        };
        record.add_phase("update", began.elapsed().as_secs_f64());
        Ok(record)
    }

    /// Adds the validation loss to a step's record, where the recipe wants it there.
    pub fn validate_after(&mut self, record: &mut SftRecord) -> Result<(), SftError> {
        if self.sft.validates_at(record.step) && !self.examples.validation().is_empty() {
            let began = Instant::now();
            record.validation_loss = self.validation_loss()?;
            record.add_phase("validation", began.elapsed().as_secs_f64());
        }
        Ok(())
    }

    /// Mean negative log-prob of all learned tokens of the examples to validate on; none where there are
    /// none.
    pub fn validation_loss(&mut self) -> Result<Option<f64>, SftError> {
        let examples = self.examples.validation();
        let tokens: usize = examples.iter().map(Example::scored).sum();
        let lengths: Vec<usize> = examples.iter().map(|example| example.ids.len()).collect();
        let mut sum = 0.0;
        let (micros, ranks) = (micro_batches(&lengths, self.tape), self.learner.ranks().clone());
        let mut own = Vec::new();
        for range in &micros[ranks.part(micros.len())] {
            let (batch, targets) = packed(&examples[range.clone()]);
            let out = self.learner.score(&mut self.queue, &batch, &targets, 1.0)?;
            own.push(out.logp.iter().map(|&x| f64::from(x)).sum::<f64>());
        }
        // Some ranks may have one micro-batch more, and all pass alike.
        if own.len() < micros.len().div_ceil(ranks.size()) {
            self.learner.idle(&mut self.queue)?;
        }
        ranks.join(own).map_err(DeviceError::from)?.iter().for_each(|logp| sum -= logp);
        Ok((tokens > 0).then(|| sum / tokens as f64))
    }

    /// A copy of everything that the next steps depend on. `recipe` is the text that goes into the
    /// checkpoint.
    pub fn snapshot(&mut self, recipe: &str) -> Result<Snapshot, SftError> {
        let drawn = self.step * self.sft.batch_size as u64;
        let learner = self.learner.snapshot(&mut self.queue)?;
        let recipe = recipe.to_string();
        let mut snapshot = Snapshot::new(
            self.step,
            drawn,
            recipe,
            self.fingerprint,
            None,
            learner,
            None,
            None,
            None,
            Vec::new(),
        );
        snapshot.state.base = self.learner.base_sums().map(<[u64]>::to_vec);
        Ok(snapshot)
    }

    /// Takes over the state of a run with the same recipe, the last updates of which were skipped so many
    /// times; a warning where it cannot know whether the frozen base is the same.
    pub fn restore(
        &mut self,
        snapshot: &Snapshot,
        skipped_in_a_row: u64,
    ) -> Result<Option<String>, SftError> {
        if snapshot.state.problems != Some(self.fingerprint) {
            return Err(SftError::OtherExamples);
        }
        let config = self.learner.network().config();
        let warning = match (&self.base, self.learner.base_sums()) {
            (Some(dir), Some(own)) => base::check(dir, config, own, snapshot.state.base.as_deref())?,
            _ => None,
        };
        self.learner.restore(&mut self.queue, &snapshot.actor)?;
        self.step = snapshot.state.step;
        self.skipped_in_a_row = skipped_in_a_row;
        Ok(warning)
    }
}

/// Examples side by side, without attention between them, and the tokens of theirs that are scored.
fn packed(examples: &[Example]) -> (Batch, Targets) {
    let ids: Vec<&[u32]> = examples.iter().map(|example| example.ids.as_slice()).collect();
    let targets = Targets::of(&ids, |sequence, position| examples[sequence].loss[position]);
    (whole_batch(&ids), targets)
}

/// One update on a batch of examples, each rank its shards; returns the loss before it: the mean over the
/// learned tokens of the whole batch.
pub fn train_step<D: Device>(
    queue: &mut D::Queue,
    learner: &mut Learner<D>,
    batch: &[Example],
    tape: TapeOptions,
    lr: f64,
) -> Result<(f64, UpdateReport), DeviceError> {
    let scored: usize = batch.iter().map(Example::scored).sum();
    let weight = 1.0 / scored.max(1) as f64;
    let lengths: Vec<usize> = batch.iter().map(|e| e.ids.len()).collect();
    let (mut losses, ranks) = (Vec::new(), learner.ranks().clone());
    for shard in ranks.own_shards_of(&lengths, tape) {
        let mut of_shard = Vec::new();
        learner.begin_shard(queue, shard.passes)?;
        for range in shard.micros {
            let (packed, targets) = packed(&batch[range]);
            learner.accumulate(queue, &packed, targets, 1.0, LossScope::Token, |_, out| {
                of_shard.push(out.logp.iter().map(|&x| x as f64).sum::<f64>() * weight);
                let dlogp = vec![-weight as f32; out.logp.len()];
                Ok::<_, DeviceError>(LossGradient { dlogp, dentropy: Vec::new() })
            })?;
        }
        learner.end_shard(queue)?;
        losses.push(of_shard);
    }
    let loss = ranks.join_shards(losses)?.iter().fold(0.0, |loss, part| loss - part);
    Ok((loss, learner.update(queue, lr)?))
}
