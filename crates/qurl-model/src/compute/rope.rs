//! Rotary tables: cosines and sines of every position and frequency.

use crate::config::{Rope, RopeScaling};

/// Frequencies of the pairs of a head, in f32 steps as transformers computes them.
pub fn frequencies(rope: &Rope, head_dim: usize) -> Vec<f32> {
    let base = (0..head_dim / 2)
        .map(|i| (1.0 / (rope.theta as f32 as f64).powf((2 * i) as f64 / head_dim as f64)) as f32);
    match rope.scaling {
        RopeScaling::None => base.collect(),
        RopeScaling::Linear { factor } => base.map(|f| f / factor as f32).collect(),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            let context = original_max_position_embeddings as f64;
            let (longest, shortest) = (context / low_freq_factor, context / high_freq_factor);
            base.map(|f| {
                let wavelength = 2.0 * std::f64::consts::PI / f as f64;
                let scaled = f as f64 / factor;
                if wavelength < shortest {
                    f
                } else if wavelength > longest {
                    scaled as f32
                } else {
                    let share =
                        (context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    ((1.0 - share) * scaled + share * f as f64) as f32
                }
            })
            .collect()
        }
    }
}

/// `(cos, sin)`, each `[positions, head_dim / 2]`.
pub fn tables(rope: &Rope, head_dim: usize, positions: usize) -> (Vec<f32>, Vec<f32>) {
    let frequencies = frequencies(rope, head_dim);
    let angles = (0..positions).flat_map(|p| frequencies.iter().map(move |&f| (p as f32 * f) as f64));
    angles.map(|a| (a.cos() as f32, a.sin() as f32)).unzip()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_frequencies() {
        let rope = Rope { theta: 10_000.0, scaling: RopeScaling::None };
        let f = frequencies(&rope, 4);
        assert_eq!(f[0], 1.0);
        assert!((f[1] - 0.01).abs() < 1e-9);
        let (cos, sin) = tables(&rope, 4, 3);
        assert_eq!((cos.len(), cos[0], sin[0]), (6, 1.0, 0.0));
        assert!((cos[4] - 2f32.cos()).abs() < 1e-7);
        // More positions leave the first ones as they are.
        let longer = tables(&rope, 4, 9);
        assert_eq!((&longer.0[..6], &longer.1[..6]), (&cos[..], &sin[..]));
    }
}
