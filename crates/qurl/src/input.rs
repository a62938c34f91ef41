//! Errors that the user can mend: they end with exit status 2.

use std::fmt;
use std::io::ErrorKind;

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

/// Whether the system has no room for what was written: no other input would help.
fn is_no_room(error: &anyhow::Error) -> bool {
    let system = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    system.filter(|e| e.raw_os_error().is_some()).any(|e| {
        matches!(e.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
    })
}

/// Marks an error as the user's to mend.
pub trait OrBad<T> {
    /// Keeps the message (with its causes) and makes it a [`BadInput`]; but a disk that is full stays a
    /// failure.
    fn or_bad(self) -> anyhow::Result<T>;
}

impl<T, E: Into<anyhow::Error>> OrBad<T> for Result<T, E> {
    fn or_bad(self) -> anyhow::Result<T> {
        self.map_err(|e| match e.into() {
            error if is_no_room(&error) => error,
            error => bad(message(&error)),
        })
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

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_not_the_users_to_mend() {
        let system = |code| std::io::Error::from_raw_os_error(code);
        let is_bad = |error: std::io::Error| {
            let error =
                Err::<(), _>(error).context("a.txt").context("saving").or_bad().expect_err("an error");
            assert!(message(&error).starts_with("saving: a.txt: "), "{error}");
            error.is::<BadInput>()
        };
        let [denied, no_space, quota, too_large] = [13, 28, 122, 27].map(system);
        assert!(is_bad(denied) && !is_bad(no_space) && !is_bad(quota) && !is_bad(too_large));
        // What is larger than we read is a matter of the input.
        assert!(is_bad(std::io::Error::new(ErrorKind::FileTooLarge, "5 bytes, expected at most 4")));
    }
}
