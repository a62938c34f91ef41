//! Lengths of responses that are set in advance, for benchmarks: random weights hardly ever end a response,
//! and how fast a rollout is depends on how its lengths spread.

use qurl_model::rng::{CounterRng, text_key};

/// Which lengths responses have; stop tokens do not end them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ForcedLengths {
    /// All have the most that they may have.
    Full,
    /// Lognormal with this mean before they are cut at the most that they may have.
    Lognormal {
        /// Mean length in tokens.
        mean: f64,
        /// Deviation of the logarithm.
        sigma: f64,
    },
}

impl ForcedLengths {
    /// Lengths of the `n` responses to a prompt, each from 1 to `most`; they depend on their key alone.
    pub fn of(self, (seed, step, prompt): (u64, u64, u64), n: usize, most: usize) -> Vec<usize> {
        let random = CounterRng::new(&[seed, text_key("length"), step, prompt]);
        let length = |sample: u64| match self {
            ForcedLengths::Full => most,
            ForcedLengths::Lognormal { mean, sigma } => {
                let logarithm = mean.ln() - sigma * sigma / 2.0 + sigma * random.normal_at(sample);
                (logarithm.exp().round() as usize).clamp(1, most)
            }
        };
        (0..n as u64).map(length).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lognormal_lengths_have_their_mean_and_their_limit() {
        let lengths = ForcedLengths::Lognormal { mean: 4096.0, sigma: 1.0 };
        let all: Vec<usize> =
            (0..2000).flat_map(|prompt| lengths.of((1, 1, prompt), 8, usize::MAX)).collect();
        let mean = all.iter().sum::<usize>() as f64 / all.len() as f64;
        assert!((mean / 4096.0 - 1.0).abs() < 0.05, "{mean}");
        let mut sorted = all.clone();
        sorted.sort_unstable();
        let median = sorted[all.len() / 2] as f64;
        assert!((median / (4096.0 * (-0.5f64).exp()) - 1.0).abs() < 0.05, "{median}");
        let cut: Vec<usize> = (0..2000).flat_map(|prompt| lengths.of((1, 1, prompt), 8, 16384)).collect();
        assert!(cut.iter().zip(&all).all(|(&cut, &all)| cut == all.min(16384)));
        assert_eq!(lengths.of((1, 1, 5), 8, 16384), cut[40..48]);
        assert_ne!(lengths.of((1, 2, 5), 8, 16384), cut[40..48]);
        assert_eq!(ForcedLengths::Full.of((1, 1, 5), 2, 7), [7, 7]);
    }
}
