//! Means of a few values, how far they may be off, and how likely differences of pairs are by chance.
//! Everything is a function of the values: resamples are the same whenever they are drawn.
//!
//! A study has five seeds or so. Percentiles of a bootstrap are too narrow then (of five normal numbers a
//! "95%" interval misses the mean in 16 of 100 samples, since five numbers resampled spread less than their
//! source), so the interval that decides is Student's t, and the bootstrap is only shown. Student's t takes
//! differences to be normal; the sign-flip test beside it takes them to be symmetric and no more, and is
//! exact. With five pairs its smallest p is 1/32: all five have to agree.

use qurl_model::rng::{CounterRng, text_key};
use serde::Serialize;

/// Resamples of a bootstrap, and sign flips where not all can be tried.
const RESAMPLES: u64 = 10_000;
/// What lies outside of an interval, at both ends together.
const OUTSIDE: f64 = 0.05;
/// Most values of which all sign flips are tried.
const MAX_EXACT: usize = 16;

/// 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom.
const T: [f64; 30] = [
    12.706_205, 4.302_653, 3.182_446, 2.776_445, 2.570_582, 2.446_912, 2.364_624, 2.306_004, 2.262_157,
    2.228_139, 2.200_985, 2.178_813, 2.160_369, 2.144_787, 2.131_450, 2.119_905, 2.109_816, 2.100_922,
    2.093_024, 2.085_963, 2.079_614, 2.073_873, 2.068_658, 2.063_899, 2.059_539, 2.055_529, 2.051_831,
    2.048_407, 2.045_230, 2.042_272,
];

/// A mean and how far it may be off.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Values.
    pub n: usize,
    /// Their mean.
    pub mean: f64,
    /// Lower end of the 95% interval of the mean by Student's t; the mean itself for one value.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// The 95% interval of the mean by percentiles of a bootstrap.
    pub bootstrap: [f64; 2],
}

impl Estimate {
    /// Of some values; nothing of none.
    pub fn of(values: &[f64]) -> Option<Estimate> {
        let n = values.len();
        let mean = mean(values)?;
        let half = half_interval(values, mean);
        Some(Estimate { n, mean, low: mean - half, high: mean + half, bootstrap: bootstrap(values) })
    }
}

/// Half the width of the 95% interval of a mean by Student's t; 0 for one value.
fn half_interval(values: &[f64], mean: f64) -> f64 {
    let squares = values.iter().fold(0.0, |sum, x| sum + (x - mean) * (x - mean));
    match values.len() {
        0 | 1 => 0.0,
        n => student_t(n - 1) * (squares / (n - 1) as f64 / n as f64).sqrt(),
    }
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().fold(0.0, |sum, x| sum + x) / values.len() as f64)
}

/// The 97.5% quantile with so many degrees of freedom; beyond the table by its expansion around the normal.
fn student_t(freedom: usize) -> f64 {
    let z: f64 = 1.959_964;
    let v = freedom as f64;
    let expansion =
        || z + (z.powi(3) + z) / (4.0 * v) + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * v * v);
    T.get(freedom - 1).copied().unwrap_or_else(expansion)
}

fn bootstrap(values: &[f64]) -> [f64; 2] {
    let n = values.len() as u64;
    let rng = CounterRng::new(&[text_key("bootstrap"), n]);
    let mut means: Vec<f64> = (0..RESAMPLES)
        .map(|resample| {
            let pick = |i: u64| values[rng.below_at(resample * n + i, n) as usize];
            (0..n).map(pick).fold(0.0, |sum, x| sum + x) / n as f64
        })
        .collect();
    means.sort_by(f64::total_cmp);
    [OUTSIDE / 2.0, 1.0 - OUTSIDE / 2.0]
        .map(|share| means[((share * RESAMPLES as f64) as usize).min(means.len() - 1)])
}

/// How often a sum at least as large comes about where each value has either sign by chance: a one-sided test
/// of a mean above zero. All signs are tried where they are few; 1 of no values.
pub fn sign_flip_p(values: &[f64]) -> f64 {
    let n = values.len();
    let sum = |sign: &dyn Fn(usize) -> bool| {
        values.iter().enumerate().fold(0.0, |sum, (i, x)| if sign(i) { sum + x } else { sum - x })
    };
    let observed = sum(&|_| true);
    // Sums in another order differ by rounding.
    let slack = 1e-12 * values.iter().fold(0.0, |sum, x| sum + x.abs());
    let (tried, as_large) = if n <= MAX_EXACT {
        let signs = 0..1u64 << n;
        (signs.end, signs.filter(|s| sum(&|i| s >> i & 1 == 0) >= observed - slack).count() as u64)
    } else {
        // What was observed is one of them.
        let rng = CounterRng::new(&[text_key("sign flips"), n as u64]);
        let flips = |r: u64| sum(&|i| rng.below_at(r * n as u64 + i as u64, 2) == 0);
        (RESAMPLES + 1, 1 + (0..RESAMPLES).filter(|&r| flips(r) >= observed - slack).count() as u64)
    };
    as_large as f64 / tried as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_of_known_samples() {
        assert_eq!(Estimate::of(&[]), None);
        let one = Estimate { n: 1, mean: 2.5, low: 2.5, high: 2.5, bootstrap: [2.5; 2] };
        assert_eq!(Estimate::of(&[2.5]), Some(one));
        let same = Estimate::of(&[1.0; 7]).expect("values");
        assert_eq!((same.mean, same.low, same.high, same.bootstrap), (1.0, 1.0, 1.0, [1.0; 2]));
        // A deviation of √2.5 and t = 2.776 with 4 degrees of freedom.
        let five = Estimate::of(&[1.0, 2.0, 3.0, 4.0, 5.0]).expect("values");
        assert!((five.mean - 3.0).abs() < 1e-12 && (five.high - 3.0 - 1.963_243).abs() < 1e-5, "{five:?}");
        // 0..99: the standard error of the mean is 2.901, t with 99 degrees of freedom 1.9842.
        let values: Vec<f64> = (0..100).map(f64::from).collect();
        let e = Estimate::of(&values).expect("values");
        assert!((e.mean - 49.5).abs() < 1e-12);
        assert!((e.low - 43.7434).abs() < 1e-3 && (e.high - 55.2566).abs() < 1e-3, "{e:?}");
        assert!((e.bootstrap[0] - 43.84).abs() < 0.5 && (e.bootstrap[1] - 55.16).abs() < 0.5, "{e:?}");
        assert_eq!(Estimate::of(&values), Some(e), "the same whenever it is asked for");
        assert!((student_t(30) - 2.0423).abs() < 1e-4 && (student_t(31) - 2.0395).abs() < 1e-3);
    }

    /// Samples of five normal numbers: the interval misses the mean in 5 of 100, that of the bootstrap, which
    /// does not decide, in about 16; and of differences that are nothing but chance, few are called one.
    #[test]
    fn intervals_cover_the_mean_of_five_values() {
        let rng = CounterRng::new(&[9]);
        let normal = |i: u64| (0..12).map(|j| rng.uniform_f64_at(12 * i + j)).sum::<f64>() - 6.0;
        let (mut missed, mut missed_by_bootstrap, mut chance) = (0, 0, 0);
        for s in 0..400 {
            let values: Vec<f64> = (0..5).map(|i| normal(5 * s + i)).collect();
            let mean = mean(&values).expect("values");
            let half = half_interval(&values, mean);
            missed += usize::from(mean.abs() > half);
            chance += usize::from(mean > half && sign_flip_p(&values) <= 0.05);
            if s < 30 {
                let [low, high] = bootstrap(&values);
                missed_by_bootstrap += usize::from(low > 0.0 || high < 0.0);
            }
        }
        assert!((8..=34).contains(&missed), "{missed} of 400");
        assert!((2..=11).contains(&missed_by_bootstrap), "{missed_by_bootstrap} of 30");
        assert!(chance <= 16, "{chance} of 400");
    }

    #[test]
    fn sign_flips_by_hand() {
        assert_eq!(sign_flip_p(&[]), 1.0);
        // Only the signs as they are have a sum so large.
        assert_eq!(sign_flip_p(&[1.0, 2.0, 3.0, 4.0, 5.0]), 1.0 / 32.0);
        assert_eq!(sign_flip_p(&[-1.0, -2.0, -3.0]), 1.0);
        assert_eq!(sign_flip_p(&[0.0; 5]), 1.0);
        // 1 + 2 − 0.5: that and the one with +0.5.
        assert_eq!(sign_flip_p(&[1.0, 2.0, -0.5]), 2.0 / 8.0);
        // Sums that are equal but for rounding count.
        assert_eq!(sign_flip_p(&[0.1, 0.2, 0.3, -0.3]), 6.0 / 16.0);
        // Many values: sampled, about the same as a normal says (mean 0.5, deviation 1, n = 36: z = 3).
        let values: Vec<f64> = (0..36).map(|i| 0.5 + if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
        let p = sign_flip_p(&values);
        assert!((1e-4..0.02).contains(&p), "{p}");
    }
}
