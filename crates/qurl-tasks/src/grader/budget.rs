//! The bound on work per answer.
//!
//! A grader reads text that a model under training wrote, so it must end on anything. Every loop that can
//! grow with the input takes fuel from one counter, recursion has a depth limit, and numbers, texts and
//! polynomials have a size limit. Whoever runs out says [`Stop`], and the comparison that asked is then "not
//! equal".

/// Longest answer, in bytes, that is parsed. Longer ones are only compared as text.
pub const MAX_ANSWER_BYTES: usize = 4096;
/// Most tokens of one answer.
pub const MAX_TOKENS: usize = 2048;
/// Deepest nesting of brackets, exponents and function arguments.
pub const MAX_DEPTH: usize = 40;
/// Most digits of a number as written.
pub const MAX_DIGITS: usize = 1500;
/// Most bits of a number as computed (2004! has about 19,000).
pub const MAX_BITS: u64 = 32_768;
/// Most terms of a polynomial.
pub const MAX_TERMS: usize = 600;
/// Most items of a list, set, tuple or matrix that are compared one by one.
pub const MAX_ITEMS: usize = 256;
/// Fuel of one comparison. A unit is some tens of nanoseconds of work.
pub const FUEL: u64 = 150_000;

/// The work was given up: the input is too large, too deep or too dear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stop;

/// The fuel left for one comparison.
#[derive(Clone, Debug)]
pub struct Budget {
    given: u64,
    left: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Budget { given: FUEL, left: FUEL }
    }
}

impl Budget {
    /// Takes `units` of fuel, or stops when there is not enough.
    pub fn charge(&mut self, units: u64) -> Result<(), Stop> {
        match self.left.checked_sub(units) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => {
                self.left = 0;
                Err(Stop)
            }
        }
    }

    /// A budget of half of what is left, for an attempt that has a fallback. Its use is charged to this one
    /// afterwards.
    pub fn half(&self) -> Budget {
        Budget { given: self.left / 2, left: self.left / 2 }
    }

    /// Fuel used so far.
    pub fn used(&self) -> u64 {
        self.given - self.left
    }
}
