//! Compute kernels of QuRL: the [`Backend`] trait and its implementations. Knows no models.
//!
//! This is the only crate with `unsafe`; each block says why it is sound.

pub mod backend;
pub mod checksum;
pub mod cpu;
pub mod cuda;
mod device;
mod format;
pub mod mmap;

pub use backend::{Backend, BackendError};
pub use cpu::Cpu;
pub use cuda::Cuda;
pub use device::{Device, UnknownDevice};
pub use format::{Format, Rounding, UnknownFormat};
