//! Errors that the user can mend: they end with exit status 2.

use std::fmt;

/// Wrong usage or input.
#[derive(Debug)]
pub struct BadInput(String);

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadInput {}

/// A [`BadInput`] with this message.
pub fn bad(message: impl fmt::Display) -> anyhow::Error {
    anyhow::Error::new(BadInput(message.to_string()))
}

/// Marks an error as the user's to mend.
pub trait OrBad<T> {
    /// Keeps the message (with its causes) and makes it a [`BadInput`].
    fn or_bad(self) -> anyhow::Result<T>;
}

impl<T, E: Into<anyhow::Error>> OrBad<T> for Result<T, E> {
    fn or_bad(self) -> anyhow::Result<T> {
        self.map_err(|e| bad(format!("{:#}", e.into())))
    }
}
