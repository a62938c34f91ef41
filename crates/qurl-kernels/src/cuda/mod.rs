//! The CUDA backend: every operation on an NVIDIA GPU of compute capability 8.0 or newer.
//!
//! It is compiled in always and found at run time: driver, NVRTC and cuBLASLt are opened with `dlopen` ([`ffi`]), the
//! kernels are sources in the binary, compiled for the device at hand and kept on disk ([`compile`]). Tensors are f32 on
//! the device; products convert their operands to bf16 or to codes of eight bits right before ([`linear`]), on tensor
//! cores where the shapes allow ([`gemm`] on Hopper, [`gemm_mma`] elsewhere, [`flash`]). Everything runs on one stream
//! ([`gpu`], [`launch`]); decode steps are replayed as recorded graphs ([`replay`]), and the tokens they draw come to the host while the
//! next step runs ([`drawn`]).

mod backend;
pub mod compile;
mod drawn;
pub mod ffi;
mod flash;
mod flash_backward;
mod gemm;
mod gemm_mma;
mod gpu;
mod head;
mod kv;
mod launch;
mod linear;
mod linear_backward;
mod lt;
mod memory;
pub mod peak;
mod replay;
mod sums;

pub use backend::{Cuda, CudaTensor};
pub use drawn::CudaDrawn;
pub use gpu::Gpu;
pub use kv::CudaKv;
pub use linear::CudaWeight;
