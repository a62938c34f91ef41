//! Quantization outside of the fast path.
//!
//! The packed kernels that roll out live in `qurl-kernels`. This crate has what surrounds them: [`codes`] and
//! [`reference`] say in plain code what every format means, and the kernels are tested against them;
//! [`budget`] bounds the error of each format; [`uaq`] is the paper's update-aware scaling; [`diagnostics`]
//! measures what quantization does to a model and what training changes; [`checksum`] tells weights apart;
//! [`export`] lays a model out as compressed-tensors files for other engines.

pub mod budget;
pub mod checksum;
pub mod codes;
pub mod diagnostics;
pub mod error;
pub mod export;
pub mod reference;
pub mod uaq;

pub use error::QuantError;
pub use qurl_kernels::{Format, Rounding};
pub use reference::Quantized;
