//! CUDA: every operation on an NVIDIA GPU of compute capability 8.0 or newer.
//!
//! It is compiled in always and found at run time: driver, NVRTC and cuBLASLt are opened with `dlopen`
//! ([`ffi`]), the kernels are sources in the binary, compiled for the device at hand and kept on disk
//! ([`compile`]). A [`Cuda`] device owns the driver's [`context`] and allocates; a [`CudaQueue`] owns a
//! stream, the [`workspace`] of its operations, the [`staging`] of their inputs and recorded steps
//! ([`replay`]).
//!
//! Tensors are f32 on the device; GEMMs convert their operands to bf16 or to quantized values of eight bits
//! right before ([`linear`]), on tensor cores where the shapes allow ([`gemm`] on Hopper, [`gemm_mma`]
//! elsewhere, [`flash`]). The rows of a pass are a [`batch`], whose shape alone chooses kernels; sampled
//! tokens come to the host while the next step runs ([`pending`]).

mod adapter;
mod attention;
mod batch;
mod bits4;
mod canonical;
pub mod compile;
mod constants;
mod context;
pub mod counting;
mod device;
mod exchange;
pub mod ffi;
mod flash;
mod flash_backward;
mod flash_stream;
mod found;
mod gemm;
mod gemm_mma;
mod gemm_tiles;
mod head;
mod head_backward;
mod kernels;
mod kv;
mod launch;
mod linear;
mod linear_backward;
mod lt;
mod memory;
mod mlp;
mod moments;
pub(crate) mod nccl;
mod norm;
mod ops;
pub mod peak;
mod pending;
mod pulse;
mod queue;
mod replay;
mod rows;
mod staging;
mod sums;
mod transfer;
mod weight;
mod workspace;

pub use batch::CudaBatch;
pub use device::{Cuda, CudaTensor, CudaTokens};
pub use found::{Found, FoundGpu, found};
pub use kv::CudaKv;
pub use mlp::CudaKeptMlp;
pub use moments::CudaMoments;
pub use pending::CudaPending;
pub use queue::CudaQueue;
pub use weight::CudaWeight;
