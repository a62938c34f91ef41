//! The pieces of a tensor, one of each rank: where they begin and end.

use std::ops::Range;

/// Bytes of a number of a tensor.
const NUMBER: usize = size_of::<f32>();

/// A tensor cut into a piece for each rank; offsets in bytes.
pub(crate) struct Pieces {
    cuts: Vec<usize>,
}

impl Pieces {
    /// Cuts given in numbers: rank r's piece is `cuts[r]..cuts[r + 1]` of the `len` numbers of a tensor.
    pub fn new(cuts: &[usize], size: usize, len: usize) -> Pieces {
        assert_eq!(cuts.len(), size + 1, "cuts: one more than ranks");
        assert!(cuts.is_sorted() && cuts[0] == 0, "cuts: from 0 on, ascending");
        assert!(cuts[size] <= len, "cuts: {} of a tensor of {len}", cuts[size]);
        Pieces { cuts: cuts.iter().map(|cut| cut * NUMBER).collect() }
    }

    /// Bytes of a rank's piece.
    pub fn range(&self, rank: usize) -> Range<usize> {
        self.cuts[rank]..self.cuts[rank + 1]
    }

    /// Bytes of all pieces.
    pub fn total(&self) -> usize {
        self.cuts.last().copied().unwrap_or(0)
    }

    /// Ranks.
    pub fn ranks(&self) -> usize {
        self.cuts.len() - 1
    }

    /// Whether all pieces are of one size.
    pub fn even(&self) -> bool {
        (0..self.ranks()).all(|rank| self.range(rank).len() == self.range(0).len())
    }

    /// Bytes that a rank receives of an all-to-all: its piece from everyone.
    pub fn received(&self, rank: usize) -> usize {
        self.range(rank).len() * self.ranks()
    }

    /// The pieces of a tensor.
    pub fn slices<'a>(&self, mut tensor: &'a mut [u8]) -> Vec<&'a mut [u8]> {
        let mut slices = Vec::with_capacity(self.ranks());
        for rank in 0..self.ranks() {
            let (slice, rest) = tensor.split_at_mut(self.range(rank).len());
            slices.push(slice);
            tensor = rest;
        }
        slices
    }

    /// Places for a rank's piece from everyone, in `[ranks, piece]`.
    pub fn slots<'a>(&self, rank: usize, mut into: &'a mut [u8]) -> Vec<&'a mut [u8]> {
        assert!(
            into.len() >= self.received(rank),
            "all to all: [ranks, own piece] is larger than the tensor"
        );
        let len = self.range(rank).len();
        let mut slots = Vec::with_capacity(self.ranks());
        for _ in 0..self.ranks() {
            let (slot, rest) = into.split_at_mut(len);
            slots.push(slot);
            into = rest;
        }
        slots
    }
}

/// Numbers as bytes.
pub(crate) fn bytes_of(numbers: &[f32]) -> &[u8] {
    // SAFETY: floats have no padding, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

/// Numbers as bytes to be written: any bytes are floats.
pub(crate) fn bytes_of_mut(numbers: &mut [f32]) -> &mut [u8] {
    // SAFETY: as above; every pattern of bits is a float, and the slice is borrowed mutably.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}
