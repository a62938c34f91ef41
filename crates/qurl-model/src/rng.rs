//! Random numbers by address instead of by order.
//!
//! A [`CounterRng`] is a pure function from an index to a number: nothing is carried from one sample to the
//! next. Keyed by, say, (seed, step, prompt, sample) and indexed by position, a sample does not depend on
//! what else is in the batch, on the number of threads or on how often a run was resumed. The function is
//! Philox4x32-10 (Salmon et al., 2011), which passes the usual statistical batteries and needs only integer
//! multiplications, so that every machine gives the same bits.

use rayon::prelude::*;

const PHILOX_M: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const PHILOX_W: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Numbers filled by one task in [`CounterRng::fill_normal`]; even, because normals come in pairs.
const FILL_CHUNK: usize = 1 << 14;

/// A stream of random numbers with random access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterRng {
    key: u64,
    stream: u64,
}

impl CounterRng {
    /// The stream named by `parts`; different parts (or another order, or another number of them) name
    /// unrelated streams.
    pub fn new(parts: &[u64]) -> CounterRng {
        let fold = |start: u64| {
            parts.iter().fold(mix(start ^ parts.len() as u64), |state, &part| {
                mix(state.rotate_left(23) ^ mix(part.wrapping_add(start)))
            })
        };
        CounterRng { key: fold(0x243F_6A88_85A3_08D3), stream: fold(0x1319_8A2E_0370_7344) }
    }

    /// 64 uniform bits at index `i`.
    pub fn u64_at(&self, i: u64) -> u64 {
        self.pair_at(i / 2)[(i % 2) as usize]
    }

    /// A number in [0, 1) at index `i`: a multiple of 2^-24, so that 1 is never reached.
    pub fn uniform_f32_at(&self, i: u64) -> f32 {
        (self.u64_at(i) >> 40) as f32 * (1.0 / (1u64 << 24) as f32)
    }

    /// A number in [0, 1) at index `i`: a multiple of 2^-53.
    pub fn uniform_f64_at(&self, i: u64) -> f64 {
        unit_f64(self.u64_at(i))
    }

    /// A whole number below `bound` at index `i`; 0 where `bound` is 0. The bias is below `bound` / 2^64.
    pub fn below_at(&self, i: u64, bound: u64) -> u64 {
        ((self.u64_at(i) as u128 * bound as u128) >> 64) as u64
    }

    /// A standard normal number at index `i` (Box-Muller in f64 over the uniforms 2⌊i/2⌋ and 2⌊i/2⌋+1).
    pub fn normal_at(&self, i: u64) -> f64 {
        let (cos, sin) = self.normal_pair_at(i / 2);
        if i.is_multiple_of(2) { cos } else { sin }
    }

    /// Fills `out` with `normal_at(0..)` times `std`, on all threads.
    pub fn fill_normal(&self, out: &mut [f32], std: f32) {
        let std = f64::from(std);
        out.par_chunks_mut(FILL_CHUNK).enumerate().for_each(|(chunk, numbers)| {
            let first_pair = (chunk * FILL_CHUNK / 2) as u64;
            for (pair, two) in (first_pair..).zip(numbers.chunks_mut(2)) {
                let (cos, sin) = self.normal_pair_at(pair);
                for (slot, value) in two.iter_mut().zip([cos, sin]) {
                    *slot = (value * std) as f32;
                }
            }
        });
    }

    fn normal_pair_at(&self, pair: u64) -> (f64, f64) {
        let [a, b] = self.pair_at(pair);
        let radius = (-2.0 * (1.0 - unit_f64(a)).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * unit_f64(b)).sin_cos();
        (radius * cos, radius * sin)
    }

    fn pair_at(&self, block: u64) -> [u64; 2] {
        let [a, b, c, d] = philox([block, self.stream], self.key).map(u64::from);
        [a | b << 32, c | d << 32]
    }
}

/// A key part made from a text (FNV-1a), for streams named after a parameter or a purpose.
pub fn text_key(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

/// A uniform order of `0..n` (Fisher-Yates over `below_at(0..)`).
pub fn permutation(rng: &CounterRng, n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    for last in (1..n).rev() {
        order.swap(last, rng.below_at(last as u64, last as u64 + 1) as usize);
    }
    order
}

fn unit_f64(bits: u64) -> f64 {
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// The finaliser of SplitMix64: a bijection in which every input bit changes half of the output bits.
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn philox(counter: [u64; 2], key: u64) -> [u32; 4] {
    let [low, high] = counter;
    let mut x = [low as u32, (low >> 32) as u32, high as u32, (high >> 32) as u32];
    let mut k = [key as u32, (key >> 32) as u32];
    for _ in 0..ROUNDS {
        let p0 = u64::from(PHILOX_M[0]) * u64::from(x[0]);
        let p1 = u64::from(PHILOX_M[1]) * u64::from(x[2]);
        x = [(p1 >> 32) as u32 ^ x[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ x[3] ^ k[1], p0 as u32];
        k = [k[0].wrapping_add(PHILOX_W[0]), k[1].wrapping_add(PHILOX_W[1])];
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the published reference implementation.
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox([0, 0], 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u64::MAX, u64::MAX], u64::MAX),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox([0x85a3_08d3_243f_6a88, 0x0370_7344_1319_8a2e], 0x299f_31d0_a409_3822),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn streams_differ_by_every_part() {
        let streams: [&[u64]; 7] = [&[], &[0], &[0, 0], &[1], &[1, 2], &[2, 1], &[1, 2, 0]];
        let firsts: std::collections::BTreeSet<u64> =
            streams.iter().map(|parts| CounterRng::new(parts).u64_at(0)).collect();
        assert_eq!(firsts.len(), streams.len());
    }

    #[test]
    fn uniforms_stay_below_one_and_average_to_a_half() {
        let rng = CounterRng::new(&[7]);
        let n = 100_000u64;
        let mut sum = 0.0;
        for i in 0..n {
            let (a, b) = (rng.uniform_f32_at(i), rng.uniform_f64_at(i));
            assert!((0.0..1.0).contains(&a) && (0.0..1.0).contains(&b));
            sum += b;
        }
        assert!((sum / n as f64 - 0.5).abs() < 0.005);
    }

    #[test]
    fn fill_equals_random_access_and_has_unit_variance() {
        let rng = CounterRng::new(&[3, 4]);
        let mut filled = vec![0.0f32; 3 * FILL_CHUNK + 1];
        rng.fill_normal(&mut filled, 1.0);
        for i in [0, 1, 2, FILL_CHUNK - 1, FILL_CHUNK, 3 * FILL_CHUNK] {
            assert_eq!(filled[i], rng.normal_at(i as u64) as f32);
        }
        let n = filled.len() as f64;
        let mean = filled.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = filled.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n - mean * mean;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }

    #[test]
    fn permutation_holds_every_index_once() {
        let mut order = permutation(&CounterRng::new(&[9]), 1000);
        assert_ne!(order[..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        order.sort_unstable();
        assert_eq!(order, (0..1000).collect::<Vec<_>>());
    }
}
