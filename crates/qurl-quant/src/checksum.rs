//! A number that tells the weights of a model from others.
//!
//! Weights travel with a version and this checksum, and so do the rollouts made from them; scoring against other
//! weights is then noticed. It is no cryptographic hash. The order is fixed (leaves in the tree's order, values in
//! memory order, blocks of [`BLOCK`] values), so threads do not change it; every bit of every value counts.

use qurl_model::Params;
use rayon::prelude::*;

/// Values that are hashed in one go.
const BLOCK: usize = 1 << 16;
/// Independent chains inside a block, so that a multiplication need not wait for the one before.
const CHAINS: usize = 8;

/// Checksum of all parameters.
pub fn params(weights: &Params<Vec<f32>>) -> u64 {
    weights.iter().fold(SEED, |sum, leaf| mix(sum, values(leaf)))
}

/// Checksum of one tensor.
pub fn values(values: &[f32]) -> u64 {
    let blocks: Vec<u64> = values.par_chunks(BLOCK).map(block).collect();
    blocks.iter().fold(mix(SEED, values.len() as u64), |sum, &block| mix(sum, block))
}

const SEED: u64 = 0x6a09_e667_f3bc_c908;

/// Two numbers into one; neither order nor value is lost.
fn mix(a: u64, b: u64) -> u64 {
    let x = (a ^ b.rotate_left(32)).wrapping_mul(0x9fb2_1c65_1e98_df25);
    let x = (x ^ (x >> 29)).wrapping_add(b).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

fn block(values: &[f32]) -> u64 {
    let mut chains: [u64; CHAINS] = std::array::from_fn(|i| SEED.wrapping_add(i as u64));
    let (whole, rest) = values.as_chunks::<CHAINS>();
    for values in whole {
        for (chain, x) in chains.iter_mut().zip(values) {
            *chain = (*chain ^ u64::from(x.to_bits())).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        }
    }
    let sum = chains.into_iter().fold(SEED, mix);
    rest.iter().fold(sum, |sum, x| mix(sum, u64::from(x.to_bits())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_and_every_place_counts() {
        let numbers: Vec<f32> = (0..3 * BLOCK + 5).map(|i| i as f32 * 0.37 - 1000.0).collect();
        let sum = values(&numbers);
        assert_eq!(sum, values(&numbers));
        for at in [0, 7, 8, BLOCK - 1, BLOCK, numbers.len() - 1] {
            for bit in [0, 13, 31] {
                let mut changed = numbers.clone();
                changed[at] = f32::from_bits(changed[at].to_bits() ^ (1 << bit));
                assert_ne!(values(&changed), sum, "bit {bit} of value {at}");
            }
        }
        let mut swapped = numbers.clone();
        swapped.swap(3, 4);
        assert_ne!(values(&swapped), sum);
        assert_ne!(values(&numbers[1..]), sum);
        assert_ne!(values(&[0.0]), values(&[]));
        assert_ne!(values(&[0.0]), values(&[-0.0]));
    }
}
