//! `metrics.jsonl`: one line per step.

use super::LogError;
use crate::rl::StepRecord;
use serde_json::Value;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The file and what it held when it was opened.
pub struct MetricsFile {
    path: PathBuf,
    file: File,
    kept: Vec<Value>,
}

impl MetricsFile {
    /// Opens or makes the file; keeps its lines up to `step` and cuts off the rest, and whatever is torn.
    pub fn open(path: &Path, step: u64) -> Result<MetricsFile, LogError> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
        let mut file = file.map_err(LogError::io(path, "be opened"))?;
        let text = std::fs::read(path).map_err(LogError::io(path, "be read"))?;
        let (mut kept, mut length) = (Vec::new(), 0);
        for line in text.split_inclusive(|&b| b == b'\n') {
            let value: Option<Value> = line.strip_suffix(b"\n").and_then(|line| serde_json::from_slice(line).ok());
            let number = |v: &Value| v.get("step").and_then(Value::as_u64);
            let Some(value) = value.filter(|v| number(v).is_some_and(|n| n <= step)) else { break };
            kept.push(value);
            length += line.len() as u64;
        }
        file.set_len(length).map_err(LogError::io(path, "be cut"))?;
        file.seek(SeekFrom::Start(length)).map_err(LogError::io(path, "be cut"))?;
        Ok(MetricsFile { path: path.to_path_buf(), file, kept })
    }

    /// The lines that were kept.
    pub fn kept(&self) -> &[Value] {
        &self.kept
    }

    /// Writes a line.
    pub fn write(&mut self, record: &StepRecord) -> Result<(), LogError> {
        let line =
            serde_json::to_string(record).map_err(|source| LogError::Json { file: self.path.clone(), source })?;
        self.file.write_all(format!("{line}\n").as_bytes()).map_err(LogError::io(&self.path, "be written"))
    }

    /// Another handle to the file.
    pub fn file(&self) -> Result<File, LogError> {
        self.file.try_clone().map_err(LogError::io(&self.path, "be opened again"))
    }
}
