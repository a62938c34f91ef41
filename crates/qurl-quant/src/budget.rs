//! How far each format may be from the weights it stands for.
//!
//! The measure is Eq. 14 of the paper, `||Q(w) - w||^2 / ||w||^2`, on normally distributed weights with 1,024
//! inputs, which is what trained matrices look like to a quantizer. A test holds each format to its budget
//! from both sides: above it something is broken, far below it the budget says nothing.

use qurl_kernels::Format;

/// The largest normalized quantization error that a format may have on normally distributed weights.
pub fn normalized_error(format: Format) -> f64 {
    match format {
        Format::F32 => 0.0,
        Format::Bf16 => 4e-6,
        Format::Int8 => 8e-5,
        Format::Fp8 | Format::Fp8Block => 8e-4,
        Format::Int4 => 1.4e-2,
        Format::Nvfp4 => 1.1e-2,
    }
}

/// The largest error of one weight, as a share of the absmax among those it shares a scale with.
pub fn largest_error(format: Format) -> f64 {
    match format {
        Format::F32 => 0.0,
        Format::Bf16 => 1.0 / 256.0,
        Format::Int8 => 0.5 / 127.0,
        // Half a step between 256 and 448, where steps are 32.
        Format::Fp8 | Format::Fp8Block => 16.0 / 448.0,
        Format::Int4 => 0.5 / 7.0,
        // Half the step from 4 to 6; the group's own scale is rounded to E4M3, which adds 1/16 at most.
        Format::Nvfp4 => 1.0 / 6.0 * (1.0 + 1.0 / 16.0) + 1.0 / 16.0,
    }
}
