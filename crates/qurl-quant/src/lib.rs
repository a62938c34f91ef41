//! Quantization outside of the fast path.
//!
//! The packed kernels that roll out live in `qurl-kernels`. This crate has what surrounds them: [`codes`] and
//! [`reference`](mod@reference) say in plain code what every format means, and the kernels are tested against
//! them; [`budget`] bounds the error of each format; [`uaq`] is the paper's update-aware scaling;
//! [`diagnostics`] measures what quantization does to a model and what training changes; [`checksum`] tells
//! weights apart; [`export`] lays a model out as compressed-tensors files for other engines.
//!
//! # Where to start
//!
//! [`reference::quantize`] makes a [`Quantized`] matrix of weights in any [`Format`] that has scales;
//! `docs/formats.md` has the formats in a table. [`uaq::apply`] and [`diagnostics`] work on whole models.
//!
//! A row of int8 has one scale, so that its largest weight is 127:
//! ```
//! use qurl_quant::{Format, reference};
//!
//! let weights = [0.5, -1.27, 0.004, 0.0];
//! let quantized = reference::quantize(Format::Int8, "w", &weights, 1, 4)?;
//! assert_eq!(quantized.codes, [50, -127i8 as u8, 0, 0]);
//! let back = quantized.dequantize();
//! assert!(weights.iter().zip(&back).all(|(w, b)| (w - b).abs() <= 0.5 * quantized.scales[0]));
//! # Ok::<(), qurl_quant::QuantError>(())
//! ```
#![forbid(unsafe_code)]

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
