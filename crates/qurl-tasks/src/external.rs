//! A reward from outside: a command that reads JSON lines and writes one reply per line, or a server
//! ([`http`]).
//!
//! The command is started once and kept running. Every response is written as one JSON object with a number
//! of its own under `request` (`protocol` has what else is in it). A reply is best an object `{"request": 17,
//! "score": 0.5}`: such replies may come in any order and can never go to another response. A bare number, or
//! an object with one under `score` and no `request`, is taken for the oldest request without a reply; since
//! one stray line would then move all later scores by one, nothing may be waiting before a batch, and nothing
//! may follow within a moment after it. The first reply of a command decides which of the two it uses.
//!
//! Any line that is wrong ends the command: which of its scores are right cannot be known. `process` has
//! the pipes, [`guard`] ends what the command started, however the run ends.

mod error;
#[cfg(unix)]
pub mod guard;
pub mod http;
mod process;
mod protocol;

use crate::task::Attempt;
pub use error::{ExternalError, Slip};
pub use process::MAX_LINE;
use process::{Line, Process, shown};
use protocol::{Replies, Style};
pub use protocol::{Reply, is_name};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

/// How long nothing may follow a batch without request numbers, at least and at most. In between it is twice
/// the longest time between two of its replies: a command that is one line ahead writes the last one then.
const QUIET: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// How often a wait looks at [`Launch::cancel`].
const TICK: Duration = Duration::from_millis(50);
/// How long a command may take to end after the end of its input: at the end of a run, and after it closed
/// its output.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_millis(200));

/// How a reward command is started and given up.
#[derive(Clone, Debug, Default)]
pub struct Launch {
    /// Program and arguments that start the command (as further arguments) and end with it all that it
    /// started: a program that calls [`guard::run`]. Without it the command's process group is ended, when
    /// the reward is dropped.
    pub guard: Vec<String>,
    /// Once this is set, nothing waits for scores any more.
    pub cancel: Arc<AtomicBool>,
    /// Where it runs, and what a relative path of a program is relative to; without one where this process
    /// does.
    pub directory: Option<PathBuf>,
}

/// A running reward command.
pub struct ExternalReward {
    command: String,
    process: Process,
    /// How it ended, once it was stopped.
    ended: Option<String>,
    style: Option<Style>,
    /// The number of the next request.
    next_request: u64,
    limit: Duration,
    cancel: Arc<AtomicBool>,
}

/// Why a batch has no scores; the command is still to be ended.
enum Trouble {
    Line(String, Slip),
    Ended,
    Late,
    Cancelled,
}

impl ExternalReward {
    /// Starts a command (program and arguments). `limit` bounds the time of one batch.
    pub fn start(
        command: &[String],
        limit: Duration,
        launch: &Launch,
    ) -> Result<ExternalReward, ExternalError> {
        if command.first().is_none_or(String::is_empty) {
            return Err(ExternalError::Empty);
        }
        let shown = command.join(" ");
        let started = Process::start(&launch.guard, command, launch.directory.as_deref());
        let process = started.map_err(|source| ExternalError::Start { command: shown.clone(), source })?;
        let cancel = launch.cancel.clone();
        Ok(ExternalReward {
            command: shown,
            process,
            ended: None,
            style: None,
            next_request: 0,
            limit,
            cancel,
        })
    }

    /// Scores a batch of responses, in order. After an error every later batch reports that the command is
    /// gone.
    pub fn score(&mut self, batch: &[Attempt]) -> Result<Vec<Reply>, ExternalError> {
        let mut replies = Replies::new(self.next_request, batch.len());
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let outcome = match self.ended {
            None => self.ask(batch, &mut replies),
            Some(_) => Err(Trouble::Ended),
        };
        let (answered, expected) = (replies.answered, batch.len());
        let Err(trouble) = outcome else { return Ok(replies.all()) };
        let status = self.stop(if matches!(trouble, Trouble::Ended) { PATIENCE.1 } else { Duration::ZERO });
        let command = self.command.clone();
        Err(match trouble {
            Trouble::Line(line, slip) => ExternalError::Line { command, line, slip },
            Trouble::Ended => ExternalError::Died { command, status, answered, expected },
            Trouble::Cancelled => ExternalError::Cancelled { command },
            Trouble::Late => {
                let seconds = self.limit.as_secs_f64();
                ExternalError::TimeLimit { command, seconds, answered, expected, missing: replies.missing() }
            }
        })
    }

    fn ask(&mut self, batch: &[Attempt], replies: &mut Replies) -> Result<(), Trouble> {
        match self.process.replies.try_recv() {
            Ok(line) => return Err(Trouble::Line(shown(&text_of(line)?), Slip::Unasked)),
            Err(TryRecvError::Disconnected) => return Err(Trouble::Ended),
            Err(TryRecvError::Empty) => {}
        }
        let line = |(number, attempt)| format!("{}\n", protocol::request(number, attempt));
        let requests: String = (self.next_request..).zip(batch).map(line).collect();
        self.next_request += batch.len() as u64;
        let deadline = Instant::now() + self.limit;
        if let Some(to_command) = &self.process.requests {
            // A writer that is gone means a command that is gone: the wait below reports it.
            let _ = to_command.send(requests);
        }
        let (mut last, mut longest) = (None, Duration::ZERO);
        while replies.answered < batch.len() {
            let line = text_of(self.line_until(deadline)?.ok_or(Trouble::Late)?)?;
            let taken = protocol::parse(&line).and_then(|value| replies.take(value, &mut self.style));
            taken.map_err(|slip| Trouble::Line(shown(&line), slip))?;
            let now = Instant::now();
            longest = last.map_or(longest, |last| longest.max(now - last));
            last = Some(now);
        }
        if self.style.as_ref().is_some_and(|style| !style.by_request) {
            let quiet = Instant::now() + (2 * longest).clamp(QUIET.0, QUIET.1);
            match self.line_until(quiet) {
                Ok(Some(line)) => {
                    return Err(Trouble::Line(shown(&text_of(line)?), Slip::Extra(batch.len())));
                }
                // All scores are there: an end is for the next batch to report.
                Ok(None) | Err(Trouble::Ended) => {}
                Err(trouble) => return Err(trouble),
            }
        }
        Ok(())
    }

    /// The next line of the command, unless the deadline comes first.
    fn line_until(&self, deadline: Instant) -> Result<Option<Line>, Trouble> {
        loop {
            if self.cancel.load(Ordering::SeqCst) {
                return Err(Trouble::Cancelled);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.process.replies.recv_timeout(left.min(TICK)) {
                Ok(line) => return Ok(Some(line)),
                Err(RecvTimeoutError::Disconnected) => return Err(Trouble::Ended),
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Ends the command, once; says how it ended.
    fn stop(&mut self, patience: Duration) -> String {
        self.ended.get_or_insert_with(|| self.process.stop(patience)).clone()
    }
}

impl Drop for ExternalReward {
    fn drop(&mut self) {
        // The threads of the pipes end with the command. They are not waited for.
        self.stop(PATIENCE.0);
    }
}

/// The text of a line, if it is a whole line of text.
fn text_of(line: Line) -> Result<String, Trouble> {
    match line {
        Line::Text(text) => Ok(text),
        Line::TooLong(line) => Err(Trouble::Line(line, Slip::TooLong)),
        Line::Unfinished(line) => Err(Trouble::Line(line, Slip::Unfinished)),
        Line::NotText(line) => Err(Trouble::Line(line, Slip::NotText)),
    }
}
