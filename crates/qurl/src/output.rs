//! Standard output and standard error, which may be closed or full at any time.
//!
//! `println!` and `eprintln!` panic then, in the middle of a run that is not saved yet. Here a line for
//! standard error that cannot be written is lost in silence: it is a remark, and the work continues. A line
//! for standard output is the command's result, so [`out!`](out) gives an error; commands that train or write
//! files print after they have saved. An output that was closed because its reader has seen enough is no
//! failure: `main` ends then with status 0 and says nothing.
//!
//! What is printed holds names and texts of files that nobody vouches for: tensors, rows, what a template
//! says. So every line goes through [`printable`], here and nowhere else; on standard output only where a
//! terminal shows it, since programs read it otherwise.

use std::fmt;
use std::io::{self, ErrorKind, IsTerminal, Write};

/// Why a result could not be printed.
#[derive(Debug)]
pub enum OutputError {
    /// The reader has gone.
    Closed,
    /// Anything else, as a disk that is full.
    Failed(io::Error),
}

impl From<io::Error> for OutputError {
    fn from(error: io::Error) -> OutputError {
        match error.kind() {
            ErrorKind::BrokenPipe => OutputError::Closed,
            _ => OutputError::Failed(error),
        }
    }
}

impl fmt::Display for OutputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OutputError::Closed => f.write_str("standard output is closed"),
            OutputError::Failed(error) => write!(f, "standard output cannot be written: {error}"),
        }
    }
}

impl std::error::Error for OutputError {}

/// Whether an error says no more than that nobody reads the output any longer.
pub fn is_closed(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(OutputError::Closed))
}

/// The result of printing for a command that has more to do: a closed output does not end it.
pub fn even_if_closed(printed: Result<(), OutputError>) -> Result<(), OutputError> {
    match printed {
        Err(OutputError::Closed) => Ok(()),
        result => result,
    }
}

/// What a model or a file says, for a terminal: control characters and those that turn the direction of
/// writing are shown as escapes, so that no text can move the cursor, change colours or hide what it says.
/// Line breaks and tabs stay.
pub fn printable(text: &str) -> String {
    let turns =
        |c: char| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => shown.push(c),
            c if c.is_control() || turns(c) => shown.extend(c.escape_unicode()),
            c => shown.push(c),
        }
    }
    shown
}

/// Text for standard output that is shown at once; no line break is added.
pub fn text(text: &str) -> Result<(), OutputError> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    Ok(stdout.flush()?)
}

/// A line for standard output; called through [`out!`](out).
pub fn line(line: fmt::Arguments<'_>) -> Result<(), OutputError> {
    let mut stdout = io::stdout().lock();
    match stdout.is_terminal() {
        true => writeln!(stdout, "{}", printable(&line.to_string()))?,
        false => writeln!(stdout, "{line}")?,
    }
    Ok(())
}

/// A line for standard error; called through [`err!`](err).
pub fn remark(line: fmt::Arguments<'_>) {
    _ = writeln!(io::stderr().lock(), "{}", printable(&line.to_string()));
}

/// Prints a line to standard output: `println!` with a `Result`.
macro_rules! out {
    ($($text:tt)*) => {
        $crate::output::line(format_args!($($text)*))
    };
}

/// Prints a line to standard error: `eprintln!` that cannot fail.
macro_rules! err {
    ($($text:tt)*) => {
        $crate::output::remark(format_args!($($text)*))
    };
}

pub(crate) use {err, out};

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn nothing_reaches_a_terminal_but_text() {
        assert_eq!(printable("two\nlines\tand é 中"), "two\nlines\tand é 中");
        assert_eq!(printable("\u{1b}[31mred\u{7}\r"), "\\u{1b}[31mred\\u{7}\\u{d}");
        assert_eq!(printable("a\u{9b}b\u{7f}c\u{202e}d"), "a\\u{9b}b\\u{7f}c\\u{202e}d");
    }
}
