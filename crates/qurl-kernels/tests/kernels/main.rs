//! Proof of the kernels, as a chain: every operation equals its naive twin in f64 (`op_table`; `parts` has
//! the CPU's kernels that are only parts of operations), every naive backward equals finite differences of
//! its naive forward (`gradients`), and the bits of a result depend on nothing but the row and its history
//! (`determinism`, `attention_paths`), nor on what an operation does at once (`fused`) or whether a step is
//! replayed (`replay`). `numbers` looks at the edges: exponentials over their whole range, and where a NaN
//! may travel; `sampling` at tokens, `kv_formats` at stored keys and values. `cuda`, `cuda_attention` and
//! `cuda_fused` hold the device against the same checks and the CPU, `cuda_counted` launches against what a
//! device takes, `emulated` those devices that are emulated.

mod attention_paths;
mod cuda;
mod cuda_attention;
mod cuda_counted;
mod cuda_fused;
mod determinism;
mod emulated;
mod fused;
mod gradients;
mod kv_formats;
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
