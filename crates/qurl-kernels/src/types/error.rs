//! What can go wrong on a device.

use super::{Format, MomentFormat};
use crate::collective::CollectiveError;

/// What can go wrong on a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The memory requested is not there.
    #[error("out of memory on {device}: {need} bytes requested for {what}")]
    OutOfMemory {
        /// Where.
        device: String,
        /// How much.
        need: usize,
        /// What for.
        what: String,
    },
    /// Weights cannot be packed.
    #[error("cannot pack weights as {format}: {reason}")]
    Pack {
        /// The requested format.
        format: Format,
        /// What is wrong with the weights.
        reason: String,
    },
    /// Moments of another optimizer.
    #[error("moments in {} for an optimizer that keeps them in {}", found.name(), expected.name())]
    Moments {
        /// The format of those given.
        found: MomentFormat,
        /// The optimizer's.
        expected: MomentFormat,
    },
    /// There is no such device, or it cannot be used.
    #[error("device {device} cannot be used: {reason}")]
    Unavailable {
        /// The requested device.
        device: String,
        /// What is missing.
        reason: String,
    },
    /// A device failed while computing.
    #[error("{device} failed: {what}")]
    Device {
        /// The device.
        device: String,
        /// What it was doing and what it said.
        what: String,
    },
    /// Numbers that were to come to a device cannot be read.
    #[error("{0}")]
    Source(String),
    /// An exchange between ranks failed.
    #[error(transparent)]
    Exchange(#[from] CollectiveError),
}
