//! What is kept of a problem: one JSON line with all of its responses and their verdicts.
//!
//! A line is written in one piece when the problem is done. An interrupted evaluation can leave half a line
//! at the end of the file; it is cut off when the file is opened again. When all is done the file is written
//! once more in the order of the sets, so that it does not show how often it was interrupted.

use qurl_tasks::task::Prompt;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// One response with its verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResponseRecord {
    /// What the model wrote.
    pub text: String,
    /// 1 for right, 0 for wrong.
    pub correct: f64,
    /// What it would be rewarded with in training.
    pub reward: f64,
    /// The answer that was found in it.
    pub extracted: Option<String>,
    /// Its length.
    pub tokens: usize,
    /// Whether it was cut off.
    pub truncated: bool,
}

/// One problem with its responses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProblemRecord {
    /// The set it belongs to.
    pub set: String,
    /// Its number in the set, from 0.
    pub index: u64,
    /// Its id.
    pub id: String,
    /// What the model was given, before the chat template.
    pub prompt: Prompt,
    /// The right answer.
    pub answer: String,
    /// The greedy response.
    pub greedy: Option<ResponseRecord>,
    /// The sampled responses.
    pub samples: Vec<ResponseRecord>,
}

/// Why records could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The system refused.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A line before the last is not a record.
    #[error("{}, line {line}: not a record of an evaluation: {reason}", file.display())]
    Line {
        /// The file.
        file: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
}

/// A file that records are appended to.
pub struct Records {
    path: PathBuf,
    file: File,
}

impl Records {
    /// Starts a new file, or continues with one that is there: its records come along, and half a line at its
    /// end is cut off.
    pub fn open(path: &Path) -> Result<(Records, Vec<ProblemRecord>), RecordError> {
        let io = |source| RecordError::Io { file: path.into(), source };
        let bytes = match std::fs::read(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read.map_err(io)?,
        };
        let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |last| last + 1);
        let mut records = Vec::new();
        for (i, line) in bytes[..whole].split_inclusive(|b| *b == b'\n').enumerate() {
            let wrong = |error| {
                let reason = qurl_tasks::data::in_one_line(&error);
                RecordError::Line { file: path.into(), line: i + 1, reason }
            };
            records.push(serde_json::from_slice(line).map_err(wrong)?);
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(io)?;
        file.set_len(whole as u64).map_err(io)?;
        Ok((Records { path: path.into(), file }, records))
    }

    /// Appends one record in one piece.
    pub fn append(&mut self, record: &ProblemRecord) -> io::Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        self.file.write_all(&line)?;
        self.file.flush()
    }

    /// Writes the file once more with these records. The old file stays until the new one is complete.
    pub fn finish(self, records: &[ProblemRecord]) -> Result<(), RecordError> {
        let io = |source| RecordError::Io { file: self.path.clone(), source };
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        let new = PathBuf::from(name);
        let write = || {
            let mut out = BufWriter::new(File::create(&new)?);
            for record in records {
                serde_json::to_writer(&mut out, record)?;
                out.write_all(b"\n")?;
            }
            out.into_inner()?.sync_all()?;
            std::fs::rename(&new, &self.path)
        };
        let written = write();
        if written.is_err() {
            let _ = std::fs::remove_file(&new); // a full disk has room for nothing else then
        }
        written.map_err(io)
    }
}
