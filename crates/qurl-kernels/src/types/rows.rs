//! Rows inside a tensor.

/// Where the normalised rows lie: `outer` runs of `per` neighbouring rows of `width`, `stride` apart, from
/// `start`.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Offset of the first row.
    pub start: usize,
    /// Runs of rows.
    pub outer: usize,
    /// Distance between runs.
    pub stride: usize,
    /// Rows of a run.
    pub per: usize,
    /// Length of a row.
    pub width: usize,
}

impl Rows {
    /// `rows` rows of `width`, one after the other.
    pub fn dense(rows: usize, width: usize) -> Self {
        Rows { start: 0, outer: rows, stride: width, per: 1, width }
    }

    pub(crate) fn fits(&self, len: usize) -> bool {
        self.outer == 0 || self.start + (self.outer - 1) * self.stride + self.per * self.width <= len
    }
}
