//! A number that tells tensors from others.
//!
//! Weights travel with a version and a checksum, and so do the rollouts made from them; scoring against other
//! weights is then noticed. It is no cryptographic hash. The order is fixed (values in memory order, blocks
//! of [`BLOCK`] values, [`CHAINS`] chains in a block), so neither threads nor the device change it; every bit
//! of every value counts.

use crate::cpu::buf::Parts;
use crate::cpu::pool::Pool;

/// Values that are hashed in one go.
pub const BLOCK: usize = 1 << 16;
/// Independent chains inside a block, so that a multiplication need not wait for the one before.
pub const CHAINS: usize = 8;

/// What every sum starts from.
pub const SEED: u64 = 0x6a09_e667_f3bc_c908;

/// Two numbers into one; neither order nor value is lost.
pub fn mix(a: u64, b: u64) -> u64 {
    let x = (a ^ b.rotate_left(32)).wrapping_mul(0x9fb2_1c65_1e98_df25);
    let x = (x ^ (x >> 29)).wrapping_add(b).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

/// Checksum of one tensor.
///
/// ```
/// use qurl_kernels::{Cpu, Device, Queue, checksum};
/// use std::sync::Arc;
///
/// let weights = [0.5, -1.25, 3.0];
/// assert_ne!(checksum::values(&weights), checksum::values(&[-1.25, 0.5, 3.0]));
///
/// // A device computes the same.
/// let mut queue = Arc::new(Cpu::from_env()?).queue()?;
/// let tensor = queue.upload(&weights)?;
/// assert_eq!(queue.checksum(&tensor)?, checksum::values(&weights));
///
/// // One number for several tensors, in their order.
/// let each = [&weights[..2], &weights[2..]].map(checksum::values);
/// let all = each.into_iter().fold(checksum::SEED, checksum::mix);
/// assert_ne!(all, checksum::values(&weights));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn values(values: &[f32]) -> u64 {
    whole(values.len(), values.chunks(BLOCK).map(block))
}

/// [`values`] with all threads of a pool.
pub(crate) fn on(pool: &Pool, values: &[f32]) -> u64 {
    let mut sums = vec![0; values.len().div_ceil(BLOCK)];
    let (count, parts) = (sums.len(), Parts::new(&mut sums));
    pool.for_each(count, &|i| {
        let end = ((i + 1) * BLOCK).min(values.len());
        // SAFETY: one slot a task.
        unsafe { *parts.at(i) = block(&values[i * BLOCK..end]) }
    });
    whole(values.len(), sums.into_iter())
}

/// Checksum of a tensor of `len` values from those of its blocks.
pub fn whole(len: usize, blocks: impl Iterator<Item = u64>) -> u64 {
    blocks.fold(mix(SEED, len as u64), mix)
}

/// Checksum of one block of at most [`BLOCK`] values.
pub fn block(values: &[f32]) -> u64 {
    let mut chains: [u64; CHAINS] = std::array::from_fn(|i| SEED.wrapping_add(i as u64));
    let (rows, rest) = values.as_chunks::<CHAINS>();
    for values in rows {
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
