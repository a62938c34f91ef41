//! What the weights of a step take to a rollout worker: to one that comes late, and to one that has those of
//! the step before (`bench step --sync`). They are the weights of real updates, as the engine has them
//! packed.

use crate::commands::bench::sync::{self, Transfer};
use crate::output::{OutputError, out};
use qurl_kernels::Device;
use qurl_train::rl::RlTrainer;
use serde::Serialize;

/// One way of the weights from the trainer to a worker.
#[derive(Serialize)]
pub struct Synced {
    /// Share of all bytes that are not what they were.
    changed: f64,
    #[serde(flatten)]
    transfer: Transfer,
}

/// Measures what the weights that the last step sampled with take to a worker that has those of the step
/// before, which become these.
pub fn measure<D: Device>(
    trainer: &RlTrainer<D>,
    queue: &mut D::Queue,
    old: &mut Option<Vec<u8>>,
    rows: &mut Vec<Synced>,
) -> anyhow::Result<()> {
    let new = trainer.engine().network().export(queue)?;
    if let Some(was) = old.take() {
        let changed = was.iter().zip(&new).filter(|(a, b)| a != b).count() as f64 / new.len() as f64;
        for base in [None, Some(was)] {
            let (transfer, _) = sync::transfer(base, &new)?;
            rows.push(Synced { changed, transfer });
        }
    }
    *old = Some(new);
    Ok(())
}

impl Synced {
    /// One line.
    pub fn print(&self) -> Result<(), OutputError> {
        let Transfer { case, bytes, share, encode_s, loopback_s, decode_s } = &self.transfer;
        out!(
            "sync      {case:7} {:8.1} MB ({:.1}%), {:.1}% of the bytes changed: {encode_s:.3} s to make, \
             {loopback_s:.3} s over loopback, {decode_s:.3} s to read",
            *bytes as f64 / 1e6,
            100.0 * share,
            100.0 * self.changed
        )
    }
}
