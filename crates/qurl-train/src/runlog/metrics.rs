//! `metrics.jsonl`: one line per step.

use super::LogError;
use serde::Serialize;
use serde_json::Value;
use std::fs::File;
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The file and what it held when it was opened.
pub struct MetricsFile {
    path: PathBuf,
    file: File,
    kept: Vec<Value>,
}

impl MetricsFile {
    /// Opens or makes the file; keeps its lines up to `step` and cuts off the rest, and whatever is torn. A
    /// step that is there again, or after a later one, is dropped: it would be counted twice.
    pub fn open(path: &Path, step: u64) -> Result<MetricsFile, LogError> {
        let text = match std::fs::read(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            read => read.map_err(LogError::io(path, "be read"))?,
        };
        let (mut kept, mut bytes, mut last) = (Vec::new(), Vec::new(), None);
        for line in text.split_inclusive(|&b| b == b'\n') {
            let value: Option<Value> =
                line.strip_suffix(b"\n").and_then(|line| serde_json::from_slice(line).ok());
            let number = |v: &Value| v.get("step").and_then(Value::as_u64);
            let Some((value, number)) = value.and_then(|v| number(&v).map(|n| (v, n))) else { break };
            if number > step {
                break;
            }
            if last.is_none_or(|last| number > last) {
                last = Some(number);
                kept.push(value);
                bytes.extend_from_slice(line);
            }
        }
        if !text.starts_with(&bytes) {
            replace(path, &bytes).map_err(LogError::io(path, "be written"))?;
        }
        let file = File::options().write(true).create(true).truncate(false).open(path);
        let mut file = file.map_err(LogError::io(path, "be opened"))?;
        let length = bytes.len() as u64;
        file.set_len(length).map_err(LogError::io(path, "be cut"))?;
        file.seek(SeekFrom::Start(length)).map_err(LogError::io(path, "be cut"))?;
        Ok(MetricsFile { path: path.to_path_buf(), file, kept })
    }

    /// The lines that were kept.
    pub fn kept(&self) -> &[Value] {
        &self.kept
    }

    /// Writes a line.
    pub fn write(&mut self, record: &impl Serialize) -> Result<(), LogError> {
        let line = serde_json::to_string(record)
            .map_err(|source| LogError::Json { file: self.path.clone(), source })?;
        self.file.write_all(format!("{line}\n").as_bytes()).map_err(LogError::io(&self.path, "be written"))
    }

    /// Another handle to the file.
    pub fn file(&self) -> Result<File, LogError> {
        self.file.try_clone().map_err(LogError::io(&self.path, "be opened again"))
    }
}

/// Puts other contents in the place of a file, all or nothing.
fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension("part");
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_is_there_twice_is_kept_once() {
        let path = std::env::temp_dir().join(format!("qurl-metrics-{}.jsonl", std::process::id()));
        let line = |step: u64, note: &str| format!("{{\"step\":{step},\"note\":\"{note}\"}}\n");
        let text = [(1, "a"), (2, "a"), (2, "again"), (1, "again"), (3, "a"), (4, "later")];
        let text: String = text.iter().map(|(step, note)| line(*step, note)).collect();
        std::fs::write(&path, text).expect("written");
        let opened = MetricsFile::open(&path, 3).expect("opened");
        let left = std::fs::read_to_string(&path).expect("read");
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(left, [line(1, "a"), line(2, "a"), line(3, "a")].concat());
        assert_eq!(opened.kept().len(), 3);
    }
}
