//! A reward from outside: a command that reads JSON lines and writes one score per line.
//!
//! The command is started once and kept running. Every batch is written as one JSON object per response
//! (`id`, `prompt`, `answer`, `response`, and `extra` where the task has it); the command answers each with one line: a
//! number in [0, 1], or an object with such a number under `score`. Reading and writing happen on threads of their own,
//! so that a command that stops reading or answering runs into the time limit instead of blocking the trainer.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::task::Problem;

/// Longest part of a wrong line that an error shows.
const SHOWN: usize = 200;

/// Why the reward command gave no scores.
#[derive(Debug, thiserror::Error)]
pub enum ExternalError {
    /// There is no command.
    #[error("the reward command is empty: expected a program and its arguments")]
    Empty,
    /// The command could not be started.
    #[error("could not start the reward command {command:?}: {source}")]
    Start {
        /// The command.
        command: String,
        /// What went wrong.
        source: std::io::Error,
    },
    /// The command ended.
    #[error("the reward command {command:?} ended ({status}) after {answered} of {expected} scores of this batch")]
    Died {
        /// The command.
        command: String,
        /// Its exit status in words.
        status: String,
        /// Scores received in this batch.
        answered: usize,
        /// Scores expected in this batch.
        expected: usize,
    },
    /// The command took too long.
    #[error("the reward command {command:?} gave {answered} of {expected} scores within {seconds} s")]
    TimeLimit {
        /// The command.
        command: String,
        /// The limit in seconds.
        seconds: f64,
        /// Scores received in this batch.
        answered: usize,
        /// Scores expected in this batch.
        expected: usize,
    },
    /// The command wrote something that is not a score.
    #[error(
        "the reward command {command:?} wrote {line:?} as score {number} of {expected}: expected a number in [0, 1]"
    )]
    NotAScore {
        /// The command.
        command: String,
        /// The line, shortened.
        line: String,
        /// Which score of the batch, from 1.
        number: usize,
        /// Scores expected in this batch.
        expected: usize,
    },
}

/// A running reward command.
pub struct ExternalReward {
    command: String,
    child: Child,
    to_child: Option<Sender<String>>,
    from_child: Receiver<String>,
    limit: Duration,
}

impl ExternalReward {
    /// Starts a command (program and arguments). `limit` bounds the time of one batch.
    pub fn start(command: &[String], limit: Duration) -> Result<ExternalReward, ExternalError> {
        let (program, arguments) = command.split_first().ok_or(ExternalError::Empty)?;
        let shown = command.join(" ");
        let failed = |source| ExternalError::Start { command: shown.clone(), source };
        let mut ready = Command::new(program);
        ready.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        // A Ctrl-C at the terminal is for the run, which ends its step first and needs the scores for it.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut ready, 0);
        let mut child = ready.spawn().map_err(failed)?;
        let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed(std::io::Error::other("its pipes could not be opened")));
        };
        let (to_child, lines_in) = channel::<String>();
        let (lines_out, from_child) = channel::<String>();
        std::thread::spawn(move || {
            for batch in lines_in {
                // A command that no longer reads shows as ended or late on the other side.
                if stdin.write_all(batch.as_bytes()).and_then(|()| stdin.flush()).is_err() {
                    break;
                }
            }
        });
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { break };
                if lines_out.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(ExternalReward { command: shown, child, to_child: Some(to_child), from_child, limit })
    }

    /// Scores a batch of responses, in order.
    pub fn score(&mut self, batch: &[(&Problem, &str)]) -> Result<Vec<f64>, ExternalError> {
        let expected = batch.len();
        let mut text = String::new();
        for (problem, response) in batch {
            let mut line = json!({
                "id": problem.id,
                "prompt": problem.prompt,
                "answer": problem.answer,
                "response": response,
            });
            if !problem.extra.is_null() {
                line["extra"] = problem.extra.clone();
            }
            text.push_str(&line.to_string());
            text.push('\n');
        }
        let deadline = Instant::now() + self.limit;
        if let Some(to_child) = &self.to_child {
            // A writer that is gone means a command that is gone: the read below reports it.
            let _ = to_child.send(text);
        }
        let mut scores = Vec::with_capacity(expected);
        while scores.len() < expected {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.from_child.recv_timeout(left) {
                Ok(line) => match score_of(&line) {
                    Some(score) => scores.push(score),
                    None => return Err(self.not_a_score(line, scores.len() + 1, expected)),
                },
                Err(RecvTimeoutError::Timeout) => {
                    self.stop();
                    return Err(ExternalError::TimeLimit {
                        command: self.command.clone(),
                        seconds: self.limit.as_secs_f64(),
                        answered: scores.len(),
                        expected,
                    });
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.stop();
                    return Err(ExternalError::Died {
                        command: self.command.clone(),
                        status,
                        answered: scores.len(),
                        expected,
                    });
                }
            }
        }
        Ok(scores)
    }

    fn not_a_score(&mut self, line: String, number: usize, expected: usize) -> ExternalError {
        self.stop();
        ExternalError::NotAScore {
            command: self.command.clone(),
            line: line.chars().take(SHOWN).collect(),
            number,
            expected,
        }
    }

    /// Ends the command and says how it ended. Once stopped, every later batch reports that it is gone.
    fn stop(&mut self) -> String {
        self.to_child = None;
        let ended = match self.child.try_wait() {
            Ok(Some(status)) => Some(status),
            _ => {
                // It closed its output a moment ago, or it hangs: a short grace tells the two apart.
                std::thread::sleep(Duration::from_millis(50));
                self.child.try_wait().ok().flatten()
            }
        };
        match ended {
            Some(status) => status.to_string(),
            None => {
                // Killing can only fail when the process is gone already.
                let _ = self.child.kill();
                let _ = self.child.wait();
                "stopped".into()
            }
        }
    }
}

impl Drop for ExternalReward {
    fn drop(&mut self) {
        // The threads end with the pipes. They are not waited for: a grandchild may keep a pipe open.
        self.stop();
    }
}

/// A score: a bare number, or an object with one.
fn score_of(line: &str) -> Option<f64> {
    let value: Value = serde_json::from_str(line.trim()).ok()?;
    let score = match &value {
        Value::Object(fields) => fields.get("score")?.as_f64()?,
        other => other.as_f64()?,
    };
    (0.0..=1.0).contains(&score).then_some(score)
}
