//! What can be wrong with a recipe, and how it is said.

use super::explain;
use super::source::Source;

/// Why a recipe cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The file cannot be read.
    #[error("{file}: cannot be read: {source}")]
    Io {
        /// The file.
        file: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not TOML, an unknown or missing key, or a value of the wrong type.
    #[error("{reason}")]
    Parse {
        /// Everything that is wrong, a line each: the place, the key and what was expected.
        reason: String,
    },
    /// An override that is not `key=value`.
    #[error("--set {found}: {reason}")]
    Override {
        /// As given.
        found: String,
        /// What is wrong.
        reason: String,
    },
    /// A value that is out of range or contradicts another.
    #[error("{place}: key `{key}` is {found}, expected {expected}")]
    Invalid {
        /// File and line, or the override.
        place: String,
        /// Path of the key.
        key: String,
        /// The value.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// No problem is left.
    #[error("{place}: key `{key}` leaves no problem to {what}: {why}")]
    NothingLeft {
        /// File and line, or the override.
        place: String,
        /// Path of the key.
        key: String,
        /// What the problems would be for.
        what: &'static str,
        /// What took them away.
        why: String,
    },
    /// A section that the command needs is not there.
    #[error("{file}: section `[{section}]` is missing; {why}")]
    Section {
        /// The file.
        file: String,
        /// Name of the section.
        section: &'static str,
        /// What needs it.
        why: &'static str,
    },
}

/// Writes `Invalid` errors.
#[derive(Clone, Copy)]
pub(crate) struct Check<'a> {
    pub(super) file: &'a str,
    pub(super) source: &'a Source,
}

impl Check<'_> {
    /// Refuses a value unless it is `ok`.
    pub(crate) fn that(
        self,
        key: &str,
        found: impl std::fmt::Display,
        ok: bool,
        expected: &str,
    ) -> Result<(), RecipeError> {
        if ok {
            return Ok(());
        }
        let (place, key) = (self.source.place(self.file, key), key.to_string());
        Err(RecipeError::Invalid { place, key, found: found.to_string(), expected: expected.to_string() })
    }

    /// Refuses a name that is none of the known ones.
    pub(crate) fn name(self, key: &str, given: &str, known: &[&str]) -> Result<(), RecipeError> {
        self.that(key, format!("{given:?}"), known.contains(&given), &explain::one_of(known, given))
    }
}
