//! Shards of a mini-batch: what makes the bits of a run independent of how many ranks compute it.
//!
//! A mini-batch is cut into `trainer.shards` runs of neighbouring sequences by their lengths alone. Each
//! shard adds up its micro-batches in order, beginning at zero, and the sums of the shards are added in a
//! fixed binary tree ([`crate::gradients`]). Which rank computes which shard changes no bit of that.

use qurl_model::compute::TapeOptions;
use std::ops::Range;

/// Cuts sequences into `shards` ranges of about as many tokens each: a sequence belongs to the shard that its
/// middle falls into. A shard may be empty.
pub fn cut(lengths: &[usize], shards: usize) -> Vec<Range<usize>> {
    let total: usize = lengths.iter().sum();
    let mut ends = vec![0; shards];
    let mut before = 0;
    for (sequence, &length) in lengths.iter().enumerate() {
        let shard = ((2 * before + length) * shards).checked_div(2 * total).unwrap_or(0).min(shards - 1);
        ends[shard] = sequence + 1;
        before += length;
    }
    let mut start = 0;
    let ranges = ends.into_iter().map(|end| {
        let range = start..end.max(start);
        start = range.end;
        range
    });
    ranges.collect()
}

/// Splits whole sequences into micro-batches of at most `rows` tokens and `sequences` sequences, in order. A
/// sequence longer than `rows` is an error of the caller.
pub fn micro_batches(lengths: &[usize], options: TapeOptions) -> Vec<Range<usize>> {
    let mut batches = Vec::new();
    let (mut start, mut rows) = (0, 0);
    for (i, &length) in lengths.iter().enumerate() {
        if i > start && (rows + length > options.rows || i - start == options.sequences) {
            batches.push(start..i);
            (start, rows) = (i, 0);
        }
        rows += length;
    }
    if start < lengths.len() {
        batches.push(start..lengths.len());
    }
    batches
}

/// Passes that a shard takes at most, of so many sequences that are not longer than `longest`.
pub fn most_passes(sequences: usize, longest: usize, shards: usize, tape: TapeOptions) -> usize {
    // Each end of a shard reaches beyond its part by half a sequence at most.
    let tokens = (sequences * longest).min((sequences * longest).div_ceil(shards) + longest);
    // Two neighbouring micro-batches have more tokens together than one holds.
    if tokens <= tape.rows { 1 } else { 2 * tokens / tape.rows + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qurl_model::compute::Recompute;

    #[test]
    fn shards_are_neighbours_of_about_as_many_tokens() {
        assert_eq!(cut(&[5; 8], 4), [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(cut(&[1, 1, 1, 1, 4, 8], 4), [0..4, 4..5, 5..5, 5..6]);
        assert_eq!(cut(&[9, 1], 1), std::slice::from_ref(&(0..2)));
        assert_eq!(cut(&[7], 4), [0..0, 0..0, 0..1, 1..1]);
        assert_eq!(cut(&[], 2), [0..0, 0..0]);
        assert_eq!(cut(&[0, 0], 2), [0..2, 2..2]);
    }

    #[test]
    fn no_shard_takes_more_passes_than_it_may() {
        let tape = TapeOptions { rows: 100, sequences: 1000, recompute: Recompute::None };
        assert_eq!(most_passes(4, 20, 1, tape), 1);
        assert_eq!(most_passes(64, 20, 16, tape), 1);
        assert_eq!(most_passes(64, 20, 8, tape), 4);
        let lengths: Vec<usize> = (0..64).map(|i| 1 + (i * i * 31 + 7) % 20).collect();
        for shards in [1, 2, 8, 16, 64] {
            let most =
                cut(&lengths, shards).into_iter().map(|s| micro_batches(&lengths[s], tape).len()).max();
            assert!(most <= Some(most_passes(64, 20, shards, tape)), "{shards}: {most:?}");
        }
    }

    #[test]
    fn every_sequence_is_in_one_shard_and_cuts_of_fewer_shards_are_among_those_of_more() {
        let lengths: Vec<usize> = (0..97).map(|i| (i * i * 31 + 7) % 60).collect();
        let total: usize = lengths.iter().sum();
        for shards in [1, 2, 4, 8, 64, 256] {
            let ranges = cut(&lengths, shards);
            assert_eq!(ranges.len(), shards);
            assert_eq!((ranges[0].start, ranges[shards - 1].end), (0, lengths.len()));
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranges:?}");
            let tokens = ranges.iter().map(|range| lengths[range.clone()].iter().sum::<usize>());
            assert!(tokens.max() <= Some(total / shards + 61), "{shards} shards");
            let finer = cut(&lengths, 2 * shards);
            assert!(ranges.iter().zip(finer.chunks(2)).all(|(r, f)| *r == (f[0].start..f[1].end)));
        }
    }

    #[test]
    fn micro_batches_keep_order_and_bounds() {
        let options = TapeOptions { rows: 10, sequences: 3, recompute: Recompute::None };
        assert_eq!(micro_batches(&[4, 4, 4, 1, 1, 1, 1, 10], options), [0..2, 2..5, 5..7, 7..8]);
        assert!(micro_batches(&[], options).is_empty());
    }
}
