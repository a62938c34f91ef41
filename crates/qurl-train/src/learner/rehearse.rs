//! The largest things that training does, once, for what they allocate: the plan of a run's memory is counted
//! by them on a device that only counts ([`crate::memory`]).

use super::{Learner, LossGradient, LossScope};
use crate::divided::Frozen;
use qurl_kernels::{Device, DeviceError};
use qurl_model::compute::{Network, TapeOptions, Targets, whole_batch};

impl<D: Device> Learner<D> {
    /// Does the largest things that training does, for what they allocate: a full micro-batch with its
    /// update, by the network that runs forward passes where that is another, and scoring by it and by
    /// `other`. A shard takes so many passes.
    pub(crate) fn rehearse(
        &mut self,
        queue: &mut D::Queue,
        tape: TapeOptions,
        longest: usize,
        ran: Option<&Network<D>>,
        other: Option<&Frozen<D>>,
        passes: usize,
    ) -> Result<(), DeviceError> {
        self.work(queue)?;
        let ids = full_batch(tape, longest);
        let (batch, targets) = (whole_batch(&ids), Targets::of(&ids, |_, _| true));
        self.score_with(queue, ran, &batch, &targets, 1.0)?;
        if let Some(other) = other {
            self.score_frozen(queue, other, &batch, &targets, 1.0)?;
        }
        // The head in one pass: it holds more logits at a time than in two.
        self.begin_shard(queue, passes)?;
        self.accumulate_straight(queue, ran, &batch, targets, 1.0, LossScope::Token, |_, out| {
            let zeros = vec![0.0; out.logp.len()];
            Ok::<_, DeviceError>(LossGradient { dlogp: zeros.clone(), dentropy: zeros })
        })?;
        self.rehearse_update(queue)
    }

    /// [`Learner::rehearse`] of a critic.
    pub(crate) fn rehearse_values(
        &mut self,
        queue: &mut D::Queue,
        tape: TapeOptions,
        longest: usize,
        passes: usize,
    ) -> Result<(), DeviceError> {
        self.work(queue)?;
        let ids = full_batch(tape, longest);
        let batch = whole_batch(&ids);
        let rows: Vec<u32> = (0..batch.rows() as u32).collect();
        self.values(queue, &batch, &rows)?;
        let zeros = |values: &[f32]| Ok::<_, DeviceError>(vec![0.0; values.len()]);
        self.begin_shard(queue, passes)?;
        self.accumulate_values(queue, &batch, &rows, zeros)?;
        self.rehearse_update(queue)
    }

    /// Ends the first shard and all others, and updates.
    fn rehearse_update(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        self.end_shard(queue)?;
        for _ in 1..self.ranks.shards_each() {
            self.begin_shard(queue, 1)?;
            self.end_shard(queue)?;
        }
        self.update(queue, 0.0).map(|_| ())
    }
}

/// Sequences that fill a micro-batch, as long as they may be.
fn full_batch(tape: TapeOptions, longest: usize) -> Vec<Vec<u32>> {
    let starts = (0..tape.rows).step_by(longest.max(1)).take(tape.sequences);
    starts.map(|start| vec![0; longest.min(tape.rows - start)]).collect()
}
