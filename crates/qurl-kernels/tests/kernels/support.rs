//! What the tests share: random numbers, the roundings of formats, comparisons.

use qurl_kernels::Format;

/// A small counter-based generator: the same numbers in every run.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0xd134_2543_de82_ef95))
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// Numbers below `end`.
    pub fn ids(&mut self, len: usize, end: usize) -> Vec<u32> {
        (0..len).map(|_| self.below(end) as u32).collect()
    }

    /// Roughly normal numbers of variance one: sums of four uniform ones.
    pub fn normals(&mut self, len: usize) -> Vec<f32> {
        let mut uniform = || (self.bits() >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
        (0..len).map(|_| (uniform() + uniform() + uniform() + uniform()) * 3f32.sqrt()).collect()
    }

    /// `0..len` in random order.
    pub fn shuffled(&mut self, len: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..len as u32).collect();
        for i in (1..len).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

/// f32 as f64, exactly.
pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| x as f64).collect()
}

/// The operand as a format's GEMM sees it.
pub fn as_operand(format: Format, values: &[f32]) -> Vec<f64> {
    let round = rounding(format);
    values.iter().map(|&x| round(x as f64)).collect()
}

/// The rounding of a format's operands.
pub fn rounding(format: Format) -> fn(f64) -> f64 {
    match format {
        Format::Bf16 => round_bf16,
        _ => |x| x,
    }
}

/// The nearest number with eight significant bits, ties to even.
pub fn round_bf16(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let quantum = 2f64.powi(x.abs().log2().floor() as i32 - 7);
    (x / quantum).round_ties_even() * quantum
}

/// The rounding error of one f32 operation.
pub const ULP: f64 = 1.0 / (1u64 << 24) as f64;

/// `|got - want| <= units * ULP * (|want| + rms(want))`: an error allowed in roundings of a typical value, so
/// that cancellation in single values does not matter.
pub fn assert_close(what: &str, got: &[f64], want: &[f64], units: f64) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let rms = rms(want);
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let allowed = units * ULP * (want.abs() + rms);
        // Written so that a NaN fails.
        assert!((got - want).abs() <= allowed, "{what}[{i}]: got {got:e}, want {want:e} within {allowed:e}");
    }
}

/// Root of the mean square.
fn rms(values: &[f64]) -> f64 {
    (values.iter().map(|x| x * x).sum::<f64>() / values.len().max(1) as f64).sqrt()
}

/// The largest error in the units of [`assert_close`]; NaN where one is not wanted.
pub fn units_off(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len(), "length");
    let rms = rms(want);
    let off = |(&got, &want): (&f64, &f64)| match got == want {
        true => 0.0,
        false => (got - want).abs() / (ULP * (want.abs() + rms)),
    };
    got.iter().zip(want).map(off).fold(0.0, |most, x| if x > most || x.is_nan() { x } else { most })
}

/// `|got - want| / |want|` over all values together.
pub fn distance(got: &[f64], want: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut got.iter().zip(want).map(|(a, b)| a - b)) / norm(&mut want.iter().copied())
}

/// The sum, value by value: what an output holds to which a gradient was added.
pub fn plus(a: Vec<f64>, b: &[f32]) -> Vec<f64> {
    assert_eq!(a.len(), b.len(), "length");
    a.iter().zip(b).map(|(a, &b)| a + f64::from(b)).collect()
}

/// The same bits.
pub fn assert_bits(what: &str, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(got.to_bits() == want.to_bits(), "{what}[{i}]: got {got:e}, want {want:e}, bit for bit");
    }
}
