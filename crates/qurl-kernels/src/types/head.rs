//! What the log-probability head says of a row, and what the loss asks of it.

/// What the head says about each row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeadOutput {
    /// Log-probability of the target.
    pub logp: Vec<f32>,
    /// Entropy of the distribution.
    pub entropy: Vec<f32>,
    /// The argmax token (the first of equals).
    pub argmax: Vec<u32>,
    /// Logarithm of the softmax denominator of logits / temperature.
    pub lse: Vec<f32>,
}

impl HeadOutput {
    /// Appends other rows.
    pub fn extend(&mut self, other: HeadOutput) {
        self.logp.extend(other.logp);
        self.entropy.extend(other.entropy);
        self.argmax.extend(other.argmax);
        self.lse.extend(other.lse);
    }

    /// Some of the rows.
    pub fn part(&self, rows: std::ops::Range<usize>) -> HeadOutput {
        HeadOutput {
            logp: self.logp[rows.clone()].to_vec(),
            entropy: self.entropy[rows.clone()].to_vec(),
            argmax: self.argmax[rows.clone()].to_vec(),
            lse: self.lse[rows].to_vec(),
        }
    }
}

/// What the loss asks of each row: `dL/dlogp` and `dL/dentropy`.
#[derive(Clone, Copy, Debug)]
pub struct HeadGradient<'a> {
    /// `dL/dlogp` per row.
    pub dlogp: &'a [f32],
    /// `dL/dentropy` per row; empty where the loss has no entropy.
    pub dentropy: &'a [f32],
}

impl<'a> HeadGradient<'a> {
    /// That of some of the rows.
    pub fn part(self, rows: std::ops::Range<usize>) -> HeadGradient<'a> {
        let dentropy = if self.dentropy.is_empty() { &[][..] } else { &self.dentropy[rows.clone()] };
        HeadGradient { dlogp: &self.dlogp[rows], dentropy }
    }

    /// # Panics
    /// If it is not that of so many rows: a bug.
    pub(crate) fn check(&self, rows: usize) {
        assert!(self.dlogp.len() == rows, "head backward: gradient");
        assert!(self.dentropy.is_empty() || self.dentropy.len() == rows, "head backward: entropy gradient");
    }
}

/// Derivatives of the loss by what the head said: [`HeadGradient`], owned.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LossGradient {
    /// By each target's log-prob.
    pub dlogp: Vec<f32>,
    /// By each target's entropy; empty where the loss has none.
    pub dentropy: Vec<f32>,
}

impl LossGradient {
    /// The same, borrowed.
    pub fn borrowed(&self) -> HeadGradient<'_> {
        HeadGradient { dlogp: &self.dlogp, dentropy: &self.dentropy }
    }
}
