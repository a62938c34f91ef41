//! Compute kernels of QuRL: devices, and the operations that a queue of a device runs. Knows no models.
//!
//! Start with [`Device`] (memory) and [`Queue`] (operations, whose arguments are the structs of [`ops`]); [`types`] is
//! the vocabulary that both sides of the seam speak. [`Cpu`] and [`Cuda`] implement them.
//!
//! This is the only crate with `unsafe`; each block says why it is sound.

pub mod checksum;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod mmap;
pub mod ops;
pub mod queue;
pub mod types;

pub use cpu::Cpu;
pub use cuda::Cuda;
pub use device::Device;
pub use queue::Queue;
pub use types::{DeviceError, DeviceKind, Format, KvFormat, Rounding, UnknownDeviceKind, UnknownFormat};
