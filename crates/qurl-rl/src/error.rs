//! One error type: what a caller can get wrong is the shape of the slices or the value of a setting.

use thiserror::Error;

/// What can be wrong with the arguments of a function of this crate.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum RlError {
    /// Two slices that run over the same tokens (or sequences) differ in length.
    #[error("`{name}` has {len} entries, expected {expected}, as many as `{like}`")]
    Length {
        /// The slice that does not fit.
        name: &'static str,
        /// Its length.
        len: usize,
        /// The slice it was compared with.
        like: &'static str,
        /// The length of that one.
        expected: usize,
    },
    /// A sequence index points past the sequences that were given.
    #[error("`seq[{token}]` is {index}, but there are only {count} sequences")]
    Sequence {
        /// Position of the token.
        token: usize,
        /// Its sequence index.
        index: usize,
        /// Number of sequences.
        count: usize,
    },
    /// A setting has a value it cannot have.
    #[error("`{key}` is {value}, expected {expected}")]
    Setting {
        /// Name of the setting, as written in a recipe.
        key: &'static str,
        /// The value given.
        value: String,
        /// What would be right.
        expected: &'static str,
    },
    /// Generalised advantage estimation was asked for without a critic.
    #[error("advantage estimator `gae` needs `values` from a critic, none were given")]
    NoValues,
}

/// Fails unless `len` equals `expected`.
pub(crate) fn same_length(
    name: &'static str,
    len: usize,
    like: &'static str,
    expected: usize,
) -> Result<(), RlError> {
    if len == expected { Ok(()) } else { Err(RlError::Length { name, len, like, expected }) }
}

/// Fails unless `good`; the value is printed as given.
pub(crate) fn setting(
    good: bool,
    key: &'static str,
    value: f64,
    expected: &'static str,
) -> Result<(), RlError> {
    if good { Ok(()) } else { Err(RlError::Setting { key, value: value.to_string(), expected }) }
}

/// Number of sequences named by `seq`: one more than the largest index.
pub(crate) fn sequence_count(seq: &[u32]) -> usize {
    seq.iter().max().map_or(0, |&last| last as usize + 1)
}
