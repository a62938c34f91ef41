//! Compute kernels of QuRL: devices, and the operations that a queue of a device runs. Knows no models.
//!
//! Models, the rollout engine and the trainer are written with these operations and nothing else, so sampling
//! and scoring a token go through the same kernels, and quantization is the only difference between them.
//!
//! # Where to start
//!
//! - [`Device`] allocates, [`Queue`] computes; the arguments of an operation are a struct of [`ops`].
//! - [`types`] is the vocabulary of both: formats, heads, batches, samples. It imports nothing from a device.
//! - [`Cpu`] and [`Cuda`] are the devices. Their kernels are in [`cpu`] (a module for each, several levels of
//!   instructions) and [`cuda`] (sources in `cu/`, compiled for the GPU at hand).
//! - [`Collective`] moves bytes and tensors between the ranks of a run.
//! - `tests/kernels` holds every operation against a naive twin in f64, its bits against threads and batches.
//!
//! ```
//! use qurl_kernels::ops::{Norm, RmsNorm};
//! use qurl_kernels::{Cpu, Device, Queue};
//! use std::sync::Arc;
//!
//! let device = Arc::new(Cpu::from_env()?);
//! let mut queue = device.queue()?;
//! let (x, gain) = (queue.upload(&[3.0, -4.0, 0.0, 0.0])?, queue.upload(&[1.0, 1.0, 2.0, 2.0])?);
//! let mut out = device.zeros(4)?;
//! queue.rmsnorm(RmsNorm { x: &x, rows: 1, norm: Norm { gain: &gain, eps: 0.0 }, out: &mut out });
//! let normed = queue.read(&out, 4)?;
//! assert!((normed[0] - 1.2).abs() < 1e-6 && (normed[1] + 1.6).abs() < 1e-6);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! This is the only crate with `unsafe`; each block says why it is sound.

pub mod canonical;
pub mod checksum;
pub mod collective;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod mmap;
pub mod ops;
pub mod queue;
pub mod types;

pub use collective::{Collective, CollectiveError};
pub use cpu::Cpu;
pub use cuda::Cuda;
pub use device::Device;
pub use queue::Queue;
pub use types::{DeviceError, DeviceKind, Format, KvFormat, Rounding, UnknownDeviceKind, UnknownFormat};

#[cfg(test)]
mod tests {
    /// The tests' profile optimises this crate and leaves all checks on.
    #[test]
    fn sums_are_checked_in_tests() {
        assert!(std::hint::black_box(cfg!(debug_assertions)));
        let most = std::hint::black_box(i32::MAX);
        assert!(std::panic::catch_unwind(|| most + 1).is_err());
    }
}
