//! Proof of the kernels, as a chain: every fast kernel equals its naive twin in f64 (`op_table`), every naive
//! backward equals finite differences of its naive forward (`gradients`), and the bits of a result depend on
//! nothing but the row and its history (`determinism`, `attention_paths`). `numbers` looks at the edges:
//! exponentials over their whole range, and where a NaN may travel. `cuda` holds the device against the same
//! table and the CPU.

mod attention_paths;
mod cuda;
mod cuda_fused;
mod determinism;
mod fused;
mod gradients;
mod naive;
mod naive_attention;
mod naive_head;
mod numbers;
mod op_table;
mod ops;
mod paged;
mod parts;
mod replay;
mod sampling;
mod support;
