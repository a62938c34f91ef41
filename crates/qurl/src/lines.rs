//! JSON lines from standard input to standard output, one answer a line, in order.
//!
//! Answers are written in large pieces, but never held back while the command waits for more input: a program
//! that writes one line and reads one answer does not wait for ever. For the same reason lines are answered
//! together only where they have all arrived already. Blank lines are passed over.

use crate::input::{OrBad, bad};
use crate::output::OutputError;
use anyhow::Context;
use qurl_files::{MIB, read_line};
use serde::Serialize;
use std::io::{BufReader, BufWriter, Read, Write};

/// Size of the buffers in bytes.
const BUFFER: usize = 1 << 18;
/// Bytes of a line.
const MAX_LINE: u64 = 64 * MIB;
/// What some editors write before the first character of a text; no part of it.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// Answers every line of standard input with `answer(line number from 1, text)`. The first line that cannot
/// be answered ends the command as bad input, after the answers before it have been written.
pub fn answer_stdin<T: Serialize, E: std::fmt::Display>(
    answer: impl FnMut(usize, &str) -> Result<T, E>,
) -> anyhow::Result<()> {
    answer_stdin_together(1, answer, Ok)
}

/// As [`answer_stdin`] in two parts: `read` checks a line, and `answer` gives one answer for each of at most
/// `most` lines that have arrived.
pub fn answer_stdin_together<Q, T: Serialize, E: std::fmt::Display>(
    most: usize,
    read: impl FnMut(usize, &str) -> Result<Q, E>,
    answer: impl FnMut(Vec<Q>) -> anyhow::Result<Vec<T>>,
) -> anyhow::Result<()> {
    answer_together(std::io::stdin().lock(), "standard input", most, read, answer)
}

/// [`answer_stdin_together`] for the lines of something else, which errors call `name`.
pub fn answer_together<Q, T: Serialize, E: std::fmt::Display>(
    input: impl Read,
    name: &str,
    most: usize,
    read: impl FnMut(usize, &str) -> Result<Q, E>,
    answer: impl FnMut(Vec<Q>) -> anyhow::Result<Vec<T>>,
) -> anyhow::Result<()> {
    answer_lines(input, std::io::stdout().lock(), name, most, read, answer)
}

fn answer_lines<Q, T: Serialize, E: std::fmt::Display>(
    input: impl Read,
    output: impl Write,
    name: &str,
    most: usize,
    mut read: impl FnMut(usize, &str) -> Result<Q, E>,
    mut answer: impl FnMut(Vec<Q>) -> anyhow::Result<Vec<T>>,
) -> anyhow::Result<()> {
    let mut input = BufReader::with_capacity(BUFFER, input);
    let mut output = BufWriter::with_capacity(BUFFER, output);
    let mut waiting = Vec::new();
    let mut reply = |waiting: &mut Vec<Q>, output: &mut BufWriter<_>| -> anyhow::Result<()> {
        if waiting.is_empty() {
            return Ok(());
        }
        for value in answer(std::mem::take(waiting))? {
            let line = serde_json::to_string(&value)?;
            output
                .write_all(line.as_bytes())
                .and_then(|()| output.write_all(b"\n"))
                .map_err(OutputError::from)?;
        }
        Ok(())
    };
    let mut line = Vec::new();
    for number in 1.. {
        if !input.buffer().contains(&b'\n') {
            reply(&mut waiting, &mut output)?;
            output.flush().map_err(OutputError::from)?;
        }
        let got = read_line(&mut input, &mut line, MAX_LINE);
        if got.with_context(|| format!("reading {name}, line {number}")).or_bad()? == 0 {
            break;
        }
        let question = match std::str::from_utf8(&line) {
            Ok(text) if text.trim().is_empty() => continue,
            Ok(text) => {
                read(number, text.trim_start_matches(BYTE_ORDER_MARK).trim_end()).map_err(|e| e.to_string())
            }
            Err(e) => Err(format!("line {number}: not UTF-8 text: {e}")),
        };
        match question {
            Ok(question) => waiting.push(question),
            Err(message) => {
                reply(&mut waiting, &mut output)?;
                output.flush().map_err(OutputError::from)?;
                return Err(bad(format!("{name}, {message}")));
            }
        }
        if waiting.len() >= most {
            reply(&mut waiting, &mut output)?;
        }
    }
    reply(&mut waiting, &mut output)?;
    Ok(output.flush().map_err(OutputError::from)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    fn length(number: usize, text: &str) -> Result<usize, String> {
        if text == "bad" { Err(format!("line {number}: bad")) } else { Ok(text.len()) }
    }

    /// Lengths of lines, each beside the number of lines that were answered with it.
    fn lengths(input: impl Read, output: impl Write, most: usize) -> anyhow::Result<()> {
        answer_lines(input, output, "standard input", most, length, |lengths| {
            let together = lengths.len();
            Ok(lengths.into_iter().map(|length| (length, together)).collect())
        })
    }

    #[test]
    fn one_answer_a_line_until_a_bad_one() {
        let mut out = Vec::new();
        lengths("\u{feff}a\n\nbbb\r\ncc".as_bytes(), &mut out, 1).expect("good lines");
        assert_eq!(out, b"[1,1]\n[3,1]\n[2,1]\n");
        let mut out = Vec::new();
        let error = lengths(&b"a\n\nbad\nccc\n"[..], &mut out, 9).expect_err("a bad line");
        assert_eq!(error.to_string(), "standard input, line 3: bad");
        assert_eq!(out, b"[1,1]\n", "what came before is written");
        let error = lengths(&b"\xff\n"[..], Vec::new(), 1).expect_err("not text");
        assert!(error.to_string().contains("line 1: not UTF-8"), "{error}");
    }

    #[test]
    fn lines_that_have_arrived_are_answered_together() {
        let mut out = Vec::new();
        lengths(&b"a\nbb\nccc\ndddd\neeeee"[..], &mut out, 3).expect("good lines");
        assert_eq!(out, b"[1,3]\n[2,3]\n[3,3]\n[4,1]\n[5,1]\n", "the last line may continue");
    }

    /// Input that gives a line only after the answer to the line before has arrived.
    struct Conversation {
        lines: Vec<&'static [u8]>,
        answers: Receiver<()>,
        asked: usize,
    }

    impl Read for Conversation {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            if self.asked > 0 {
                self.answers.try_recv().map_err(|_| std::io::Error::other("an answer was held back"))?;
            }
            let Some(line) = self.lines.get(self.asked) else { return Ok(0) };
            self.asked += 1;
            buffer[..line.len()].copy_from_slice(line);
            Ok(line.len())
        }
    }

    struct Listener(Sender<()>);

    impl Write for Listener {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.send(()).map_err(std::io::Error::other)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn answers_are_not_held_back() {
        for most in [1, 16] {
            let (sender, answers) = channel();
            let input = Conversation { lines: vec![b"a\n", b"bb\n", b"ccc\n"], answers, asked: 0 };
            lengths(input, Listener(sender), most).expect("no deadlock");
        }
    }
}
