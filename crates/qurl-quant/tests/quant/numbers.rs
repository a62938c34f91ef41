//! Numbers against what others say they are: PyTorch's E4M3 cast, and the error budgets of the formats.

use qurl_kernels::Format;
use qurl_kernels::cpu::quant::codec;
use qurl_model::rng::CounterRng;
use qurl_quant::codes::Magnitudes;
use qurl_quant::{budget, reference};

/// `tests/python/fp8.py` made this with PyTorch: the float8_e4m3fn code of every bf16 number.
static GOLDEN: &[u8; 65_536] = include_bytes!("../goldens/float8_e4m3fn.bin");

#[test]
fn e4m3_is_that_of_pytorch_on_every_bf16() {
    for (bits, &theirs) in (0..=u16::MAX).zip(GOLDEN) {
        let x = f32::from_bits(u32::from(bits) << 16);
        if x.is_nan() {
            assert_eq!(theirs & 0x7f, 0x7f, "PyTorch has a code for NaN");
            continue;
        }
        assert_eq!(codec::e4m3_code(x), theirs, "{x:e}");
        assert_eq!(Magnitudes::e4m3().code(x), theirs, "{x:e}");
        assert_eq!(codec::e4m3_value(theirs), Magnitudes::e4m3().value(theirs), "{theirs:#x}");
    }
}

/// Older versions of PyTorch make NaN of what is too large, so this is stated apart from the golden. Codes
/// for NaN are never made: weights that are not finite are refused, and activations carry it in their scale.
#[test]
fn e4m3_saturates() {
    for x in [448.1, 464.0, 465.0, 1e30, f32::MAX, f32::INFINITY] {
        assert_eq!([codec::e4m3_code(x), codec::e4m3_code(-x)], [0x7e, 0xfe], "{x:e}");
        assert_eq!([Magnitudes::e4m3().code(x), Magnitudes::e4m3().code(-x)], [0x7e, 0xfe], "{x:e}");
    }
    assert_eq!(codec::e4m3_value(codec::e4m3_code(f32::NAN)).abs(), 448.0);
}

#[test]
fn every_format_keeps_its_budget() {
    let (rows, cols) = (256, 1024);
    let mut weights = vec![0.0; rows * cols];
    CounterRng::new(&[7]).fill_normal(&mut weights, 0.02);
    for format in Format::ALL {
        let rounded = match format {
            Format::F32 => weights.clone(),
            Format::Bf16 => weights.iter().map(|&w| half::bf16::from_f32(w).to_f32()).collect(),
            _ => reference::quantize(format, "w", &weights, rows, cols).expect("finite").dequantize(),
        };
        let square = |x: f64| x * x;
        let error: f64 =
            rounded.iter().zip(&weights).map(|(q, w)| square(f64::from(*q) - f64::from(*w))).sum();
        let size: f64 = weights.iter().map(|w| square(f64::from(*w))).sum();
        let (error, allowed) = (error / size, budget::normalized_error(format));
        println!("{format:9}  {error:.2e} of {allowed:.1e}");
        assert!(error <= allowed, "{format}: {error:e} is above its budget {allowed:e}");
        assert!(error >= 0.5 * allowed, "{format}: {error:e} is far below its budget {allowed:e}");
        largest_errors(format, &weights, &rounded, cols);
    }
}

/// No weight is further off than the budget for the largest weight that shares its scale.
fn largest_errors(format: Format, weights: &[f32], rounded: &[f32], cols: usize) {
    let shared = match format {
        Format::F32 | Format::Bf16 => 1,
        Format::Nvfp4 => reference::NVFP4_GROUP,
        Format::Int4 => reference::BLOCK,
        _ => cols,
    };
    let everything = weights.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    for (weights, rounded) in weights.chunks(shared).zip(rounded.chunks(shared)) {
        let largest = weights.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let largest = if format == Format::Fp8Block { everything } else { largest };
        let allowed = budget::largest_error(format) * f64::from(largest) * 1.000_01;
        for (w, q) in weights.iter().zip(rounded) {
            let error = (f64::from(*w) - f64::from(*q)).abs();
            assert!(error <= allowed, "{format}: {w} became {q}, allowed {allowed:e}");
        }
    }
}

#[test]
fn bad_input_is_named() {
    let mut weights = vec![1.0; 6];
    weights[4] = f32::NEG_INFINITY;
    let error =
        reference::quantize(Format::Int8, "layers.3.down", &weights, 2, 3).expect_err("infinite").to_string();
    assert!(
        error.contains("layers.3.down") && error.contains("row 1, column 1") && error.contains("-inf"),
        "{error}"
    );
    let error = reference::quantize(Format::Fp8, "w", &weights, 3, 3).expect_err("shape").to_string();
    assert!(error.contains("6 values") && error.contains("3 x 3"), "{error}");
    assert!(reference::quantize(Format::Bf16, "w", &[1.0], 1, 1).is_err(), "bf16 has no codes");
}
