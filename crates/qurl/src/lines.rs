//! JSON lines from standard input to standard output, one answer a line, in order.
//!
//! Answers are written in large pieces, but never held back while the command waits for more input: a program that
//! writes one line and reads one answer does not wait for ever. Blank lines are passed over.

use crate::input::bad;
use serde::Serialize;
use std::io::{BufRead, BufReader, BufWriter, ErrorKind, Read, Write};

/// Size of the buffers in bytes.
const BUFFER: usize = 1 << 16;

/// Answers every line of standard input with `answer(line number from 1, text)`. The first line that cannot be answered
/// ends the command as bad input, after the answers before it have been written.
pub fn answer_stdin<T: Serialize, E: std::fmt::Display>(
    answer: impl FnMut(usize, &str) -> Result<T, E>,
) -> anyhow::Result<()> {
    match answer_lines(std::io::stdin().lock(), std::io::stdout().lock(), answer) {
        // Whoever read the answers has seen enough.
        Err(e) if e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) => Ok(()),
        result => result,
    }
}

fn answer_lines<T: Serialize, E: std::fmt::Display>(
    input: impl Read,
    output: impl Write,
    mut answer: impl FnMut(usize, &str) -> Result<T, E>,
) -> anyhow::Result<()> {
    let mut input = BufReader::with_capacity(BUFFER, input);
    let mut output = BufWriter::with_capacity(BUFFER, output);
    let mut line = Vec::new();
    for number in 1.. {
        if !input.buffer().contains(&b'\n') {
            output.flush()?;
        }
        line.clear();
        if input.read_until(b'\n', &mut line)? == 0 {
            break;
        }
        let answered = match std::str::from_utf8(&line) {
            Ok(text) if text.trim().is_empty() => continue,
            Ok(text) => answer(number, text.trim_end()).map_err(|e| e.to_string()),
            Err(e) => Err(format!("line {number}: not UTF-8 text: {e}")),
        };
        match answered {
            Ok(value) => {
                serde_json::to_writer(&mut output, &value).map_err(std::io::Error::from)?;
                output.write_all(b"\n")?;
            }
            Err(message) => {
                output.flush()?;
                return Err(bad(format!("standard input, {message}")));
            }
        }
    }
    output.flush()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    fn length(number: usize, text: &str) -> Result<usize, String> {
        if text == "bad" { Err(format!("line {number}: bad")) } else { Ok(text.len()) }
    }

    #[test]
    fn one_answer_a_line_until_a_bad_one() {
        let mut out = Vec::new();
        answer_lines(&b"a\n\nbbb\r\ncc"[..], &mut out, length).expect("good lines");
        assert_eq!(out, b"1\n3\n2\n");
        let mut out = Vec::new();
        let error = answer_lines(&b"a\n\nbad\nccc\n"[..], &mut out, length).expect_err("a bad line");
        assert_eq!(error.to_string(), "standard input, line 3: bad");
        assert_eq!(out, b"1\n", "what came before is written");
        let error = answer_lines(&b"\xff\n"[..], Vec::new(), length).expect_err("not text");
        assert!(error.to_string().contains("line 1: not UTF-8"), "{error}");
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
        let (sender, answers) = channel();
        let input = Conversation { lines: vec![b"a\n", b"bb\n", b"ccc\n"], answers, asked: 0 };
        answer_lines(input, Listener(sender), length).expect("no deadlock");
    }
}
