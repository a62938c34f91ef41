//! What can go wrong with a reward command, with the line that shows it.

use super::process::MAX_LINE;

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
    #[error(
        "the reward command {command:?} ended ({status}) after {answered} of {expected} scores of this batch"
    )]
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
    #[error(
        "the reward command {command:?} gave {answered} of {expected} scores within {seconds} s, and none \
         for request {missing}"
    )]
    TimeLimit {
        /// The command.
        command: String,
        /// The limit in seconds.
        seconds: f64,
        /// Scores received in this batch.
        answered: usize,
        /// Scores expected in this batch.
        expected: usize,
        /// The first request without a score.
        missing: u64,
    },
    /// The command wrote a line that it should not have written: no score of this batch can be trusted.
    #[error("the reward command {command:?} wrote {line:?}: {slip}")]
    Line {
        /// The command.
        command: String,
        /// The line, shortened.
        line: String,
        /// What is wrong with it.
        slip: Slip,
    },
    /// A server could not be asked, or did not answer.
    #[error("the reward server {url:?}: {reason}")]
    Server {
        /// Its address.
        url: String,
        /// What happened.
        reason: String,
    },
    /// The run was told to end, and does not wait for scores.
    #[error("stopped waiting for the scores of the reward command {command:?}")]
    Cancelled {
        /// The command.
        command: String,
    },
}

impl ExternalError {
    /// Whether the run was told to end, which is nobody's failure.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, ExternalError::Cancelled { .. })
    }
}

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Slip {
    /// It is not a score.
    #[error("expected a number, or an object with one under `score`")]
    NotAScore,
    /// A number that is none, and where.
    #[error("{0}, expected a finite number")]
    NotFinite(String),
    /// A number that f32 does not hold, and where.
    #[error("{0}, expected a number from -3.4e38 to 3.4e38: rewards are 32-bit floating-point numbers")]
    TooLarge(String),
    /// Whether it is right is neither yes nor no.
    #[error("expected true or false under `correct`; how good a response is says `score`")]
    NotCorrect,
    /// The parts are no names with numbers.
    #[error("expected numbers under `parts`, with names of letters, digits, `_`, `-` and spaces")]
    NotParts,
    /// It does not say whether the response is right, but earlier ones did.
    #[error("expected `correct`, as in earlier replies")]
    NoCorrect,
    /// It says whether the response is right, but earlier ones did not.
    #[error("expected no `correct`, as in earlier replies")]
    Correct,
    /// It has other parts than earlier ones.
    #[error("expected {0}, as in earlier replies")]
    Parts(String),
    /// It was there before anything was asked.
    #[error("expected nothing before the requests of a batch")]
    Unasked,
    /// It came after the last score of a batch.
    #[error("expected nothing after the {0} scores of a batch")]
    Extra(usize),
    /// It has no end.
    #[error("expected lines of at most {MAX_LINE} bytes")]
    TooLong,
    /// The command ended in the middle of it.
    #[error("expected a line break at its end")]
    Unfinished,
    /// It is not text.
    #[error("expected UTF-8 text")]
    NotText,
    /// It names no request, but earlier ones did.
    #[error("expected the number of its request under `request`, as in earlier replies")]
    NoRequest,
    /// It names a request, but earlier ones did not.
    #[error("expected no `request`, as in earlier replies")]
    Request,
    /// It names a request that was never made.
    #[error("expected a `request` from {first} to {last}")]
    UnknownRequest {
        /// First request of the batch.
        first: u64,
        /// Last request of the batch.
        last: u64,
    },
    /// It names a request that has a score.
    #[error("request {0} has a score already")]
    Doubled(u64),
}
