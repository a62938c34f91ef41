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

/// An error and its causes on one line. The messages of our libraries hold their causes already; nothing is
/// said twice.
pub fn message(error: &anyhow::Error) -> String {
    error.chain().skip(1).fold(error.to_string(), |text, cause| match cause.to_string() {
        cause if text.contains(&cause) => text,
        cause => format!("{text}: {cause}"),
    })
}

/// Marks an error as the user's to mend.
pub trait OrBad<T> {
    /// Keeps the message (with its causes) and makes it a [`BadInput`].
    fn or_bad(self) -> anyhow::Result<T>;
}

impl<T, E: Into<anyhow::Error>> OrBad<T> for Result<T, E> {
    fn or_bad(self) -> anyhow::Result<T> {
        self.map_err(|e| bad(message(&e.into())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_cause_is_said_once() {
        let cause = || std::io::Error::other("the disk is full");
        let said = anyhow::Error::new(cause())
            .context("a.txt: cannot be written: the disk is full")
            .context("saving");
        assert_eq!(message(&said), "saving: a.txt: cannot be written: the disk is full");
        let unsaid = Err::<(), _>(cause()).context("saving").or_bad().expect_err("an error");
        assert_eq!(unsaid.to_string(), "saving: the disk is full");
    }
}
