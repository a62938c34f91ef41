//! What can go wrong in this crate.

use qurl_kernels::Format;

/// Why something could not be quantized, scaled or compared.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum QuantError {
    /// A weight is infinite or NaN.
    #[error("{name}: row {row}, column {column} is {value}; expected a finite number")]
    NotFinite {
        /// The tensor.
        name: String,
        /// Output channel.
        row: usize,
        /// Input.
        column: usize,
        /// What is there.
        value: f32,
    },
    /// A tensor does not have the size that its shape says.
    #[error("{name}: {found} values, expected {rows} x {cols}")]
    Shape {
        /// The tensor.
        name: String,
        /// Values given.
        found: usize,
        /// Rows expected.
        rows: usize,
        /// Columns expected.
        cols: usize,
    },
    /// A format without codes was asked for codes.
    #[error("format {format} cannot be {what}; expected one of {expected}")]
    Format {
        /// The format given.
        format: Format,
        /// What was to be done with it.
        what: String,
        /// Formats that would do.
        expected: String,
    },
    /// A scale of update-aware quantization that makes no sense.
    #[error("UAQ scale is {found:?}; expected a number from 1/64 to 64")]
    UaqScale {
        /// The number given.
        found: f32,
    },
    /// Scaled weights were asked for another scale.
    #[error(
        "the weights are scaled by {found} for UAQ already (`qurl.uaq` in config.json); {asked} is a second \
         scaling"
    )]
    Scaled {
        /// The mark.
        found: f32,
        /// The scale that was asked for.
        asked: f32,
    },
    /// Two parameter trees, or a tree and a configuration, do not fit together.
    #[error("parameters do not fit: {what}")]
    Layout {
        /// The first difference.
        what: String,
    },
}
