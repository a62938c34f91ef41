//! Quantization outside of the fast path.
//!
//! The packed kernels that roll out live in `qurl-kernels`. This crate has what surrounds them: [`codes`] and
//! [`reference`] say in plain code what every format means, and the kernels are tested against them.

pub mod codes;
pub mod error;
pub mod reference;

pub use error::QuantError;
pub use qurl_kernels::{Format, Rounding};
pub use reference::Quantized;
