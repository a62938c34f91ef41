//! Means and bootstrap intervals of a few values. Everything is a function of the values: the resamples are
//! the same whenever they are drawn.

use qurl_model::rng::{CounterRng, text_key};
use serde::Serialize;

/// Resamples of an interval.
const RESAMPLES: u64 = 10_000;
/// What lies outside of an interval, at both ends together.
const OUTSIDE: f64 = 0.05;

/// A mean and how far it may be off.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Values.
    pub n: usize,
    /// Their mean.
    pub mean: f64,
    /// Lower end of the 95% bootstrap interval (percentiles) of the mean; the mean itself for one value.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Estimate {
    /// Of some values; nothing of none.
    pub fn of(values: &[f64]) -> Option<Estimate> {
        let n = values.len();
        let mean = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, |sum, x| sum + x) / n as f64;
        if n == 0 {
            return None;
        }
        let rng = CounterRng::new(&[text_key("bootstrap"), n as u64]);
        let mut means: Vec<f64> = (0..RESAMPLES)
            .map(|resample| {
                let pick = |i: usize| values[rng.below_at(resample * n as u64 + i as u64, n as u64) as usize];
                mean(&mut (0..n).map(pick))
            })
            .collect();
        means.sort_by(f64::total_cmp);
        let at = |share: f64| means[((share * RESAMPLES as f64) as usize).min(means.len() - 1)];
        let (low, high) = (at(OUTSIDE / 2.0), at(1.0 - OUTSIDE / 2.0));
        Some(Estimate { n, mean: mean(&mut values.iter().copied()), low, high })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_of_known_samples() {
        assert_eq!(Estimate::of(&[]), None);
        assert_eq!(Estimate::of(&[2.5]), Some(Estimate { n: 1, mean: 2.5, low: 2.5, high: 2.5 }));
        let same = Estimate::of(&[1.0; 7]).expect("values");
        assert_eq!((same.mean, same.low, same.high), (1.0, 1.0, 1.0));
        // 0..99: the standard error of the mean is 28.87/10; the interval is close to mean ± 1.96 of it.
        let values: Vec<f64> = (0..100).map(f64::from).collect();
        let e = Estimate::of(&values).expect("values");
        assert!((e.mean - 49.5).abs() < 1e-12);
        assert!((e.low - 43.84).abs() < 0.5 && (e.high - 55.16).abs() < 0.5, "{e:?}");
        assert_eq!(Estimate::of(&values), Some(e), "the same whenever it is asked for");
    }

    /// Of samples of ten normal numbers, the interval misses the mean about as often as small samples do:
    /// more often than 5%, and not much more.
    #[test]
    fn intervals_cover_the_mean() {
        let rng = CounterRng::new(&[9]);
        let normal = |i: u64| (0..12).map(|j| rng.uniform_f64_at(12 * i + j)).sum::<f64>() - 6.0;
        let missed = (0..300).filter(|&s| {
            let values: Vec<f64> = (0..10).map(|i| normal(10 * s + i)).collect();
            let e = Estimate::of(&values).expect("values");
            e.low > 0.0 || e.high < 0.0
        });
        let missed = missed.count();
        assert!((9..=45).contains(&missed), "{missed} of 300");
    }
}
