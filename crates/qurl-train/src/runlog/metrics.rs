//! `metrics.jsonl`: one line per step.
//!
//! A file that somebody removes from under a run is written again at once, from the handle that the run
//! holds. Checkpoints have the lines, too (without times), and a run that continues takes from its checkpoint
//! what the file has lost. Nothing here grows with the steps: lines are read from the file where they are
//! wanted.

use super::LogError;
use qurl_files::disk::{self, DiskFile};
use serde::Serialize;
use serde_json::Value;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// The file and what is in it.
pub struct MetricsFile {
    path: PathBuf,
    file: DiskFile,
    /// Its bytes.
    length: u64,
    kept: Vec<Value>,
    /// Steps that were there when it was opened.
    steps: usize,
    /// Steps of them that were taken from the checkpoint.
    restored: usize,
}

/// The lines of the file up to some moment.
#[derive(Debug)]
pub struct Lines {
    file: DiskFile,
    length: u64,
}

impl Lines {
    /// Bytes that a checkpoint needs for them, at most.
    pub fn bytes(&self) -> u64 {
        self.length
    }

    /// Writes them as checkpoints hold them: without what differs between two equal runs. What somebody has
    /// made of the file that is no line of ours is left out.
    pub fn write_untimed(&self, to: &mut impl Write) -> io::Result<()> {
        let mut lines = BufReader::with_capacity(1 << 16, self.file.reader()?.take(self.length));
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line)? > 0 {
            if let Ok(value) = serde_json::from_slice(&line) {
                to.write_all(without_times(value).as_bytes())?;
            }
            line.clear();
        }
        Ok(())
    }
}

impl MetricsFile {
    /// Opens or makes the file; keeps its lines up to `step` and cuts off the rest, and whatever is torn. A
    /// step that is there again, or after a later one, is dropped: it would be counted twice. Steps that are
    /// missing are taken from `saved`, the lines in the checkpoint that the run continues from.
    pub fn open(path: &Path, step: u64, saved: &str) -> Result<MetricsFile, LogError> {
        let bytes = match std::fs::read(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            read => read.map_err(LogError::io(path, "be read"))?,
        };
        let there = lines_up_to(&bytes, step);
        let mut saved = lines_up_to(saved.as_bytes(), step).into_iter().peekable();
        let (mut all, mut restored) = (Vec::new(), 0);
        for line in there {
            while let Some(lost) = saved.next_if(|lost| lost.0 < line.0) {
                all.push(lost);
                restored += 1;
            }
            saved.next_if(|same| same.0 == line.0);
            all.push(line);
        }
        let left = all.len();
        all.extend(saved);
        restored += all.len() - left;
        let text: String = all.iter().map(|(_, _, line)| format!("{line}\n")).collect();
        if !bytes.starts_with(text.as_bytes()) {
            disk::replace(path, text.as_bytes()).map_err(LogError::io(path, "be written"))?;
        }
        let length = text.len() as u64;
        let file = DiskFile::open_at(path, length).map_err(LogError::io(path, "be opened"))?;
        let kept: Vec<Value> = all.into_iter().map(|(_, value, _)| value).collect();
        let steps = kept.len();
        Ok(MetricsFile { path: path.to_path_buf(), file, length, kept, steps, restored })
    }

    /// The lines that were kept.
    pub fn kept(&self) -> &[Value] {
        &self.kept
    }

    /// The lines that were kept; afterwards they are only in the file.
    pub fn take_kept(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.kept)
    }

    /// How many lines were kept.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// How many of them the file had lost.
    pub fn restored(&self) -> usize {
        self.restored
    }

    /// Writes a line. Returns whether the file had vanished and was written again.
    pub fn write(&mut self, record: &impl Serialize) -> Result<bool, LogError> {
        let line = serde_json::to_string(record)
            .map_err(|source| LogError::Json { file: self.path.clone(), source })?;
        let vanished = !self.file.is_there();
        if vanished {
            let mut text = Vec::new();
            let reader = self.file.reader().map_err(LogError::io(&self.path, "be read"))?;
            let read = reader.take(self.length).read_to_end(&mut text);
            read.map_err(LogError::io(&self.path, "be read"))?;
            let written = disk::replace(&self.path, &text);
            written.map_err(LogError::io(&self.path, "be written again"))?;
            self.length = text.len() as u64;
            let opened = DiskFile::open_at(&self.path, self.length);
            self.file = opened.map_err(LogError::io(&self.path, "be opened again"))?;
        }
        let line = format!("{line}\n");
        self.file.write_all(line.as_bytes()).map_err(LogError::io(&self.path, "be written"))?;
        self.length += line.len() as u64;
        Ok(vanished)
    }

    /// All lines so far.
    pub fn lines(&self) -> Result<Lines, LogError> {
        Ok(Lines { file: self.file()?, length: self.length })
    }

    /// Another handle to the file.
    pub fn file(&self) -> Result<DiskFile, LogError> {
        self.file.another().map_err(LogError::io(&self.path, "be opened again"))
    }
}

/// Step, value and text of every line up to a step, in order of the steps.
fn lines_up_to(bytes: &[u8], step: u64) -> Vec<(u64, Value, String)> {
    let mut all: Vec<(u64, Value, String)> = Vec::new();
    for line in bytes.split_inclusive(|&b| b == b'\n') {
        let Some(line) = line.strip_suffix(b"\n").and_then(|line| std::str::from_utf8(line).ok()) else {
            break;
        };
        let Ok(value) = serde_json::from_str::<Value>(line) else { break };
        let Some(number) = value.get("step").and_then(Value::as_u64).filter(|&n| n <= step) else { break };
        if all.last().is_none_or(|last| number > last.0) {
            all.push((number, value, line.to_string()));
        }
    }
    all
}

/// A line as checkpoints hold it.
fn without_times(mut value: Value) -> String {
    if let Some(record) = value.as_object_mut() {
        record.shift_remove("timing");
    }
    format!("{value}\n")
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
        let opened = MetricsFile::open(&path, 3, "").expect("opened");
        let left = std::fs::read_to_string(&path).expect("read");
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(left, [line(1, "a"), line(2, "a"), line(3, "a")].concat());
        assert_eq!(opened.kept().len(), 3);
    }

    #[test]
    fn what_is_lost_is_taken_from_the_checkpoint_or_written_again() {
        let path = std::env::temp_dir().join(format!("qurl-metrics-lost-{}.jsonl", std::process::id()));
        let line = |step: u64, timing: &str| format!("{{\"step\":{step}{timing}}}\n");
        let saved: String = (1..=4).map(|step| line(step, "")).collect();
        let timed = ",\"timing\":{\"total\":1.5}";
        // Steps 1 and 4 are gone, and the end is torn.
        std::fs::write(&path, [line(2, timed), line(3, timed), "{\"ste".to_string()].concat())
            .expect("written");
        let mut opened = MetricsFile::open(&path, 4, &saved).expect("opened");
        assert_eq!((opened.restored(), opened.kept().len()), (2, 4));
        let all = [line(1, ""), line(2, timed), line(3, timed), line(4, "")].concat();
        let left = || std::fs::read_to_string(&path).expect("read");
        let untimed = |opened: &MetricsFile| {
            let mut text = Vec::new();
            opened.lines().expect("a handle").write_untimed(&mut text).expect("read");
            String::from_utf8(text).expect("text")
        };
        assert_eq!((left(), untimed(&opened)), (all.clone(), saved.clone()));
        let earlier = opened.lines().expect("a handle");
        // Removed from under the run.
        assert!(!opened.write(&serde_json::json!({"step": 5})).expect("written"));
        std::fs::remove_file(&path).expect("removed");
        assert!(opened.write(&serde_json::json!({"step": 6, "timing": {}})).expect("written"));
        assert_eq!(left(), [all, line(5, ""), line(6, ",\"timing\":{}")].concat());
        assert_eq!(untimed(&opened), [saved.clone(), line(5, ""), line(6, "")].concat());
        // What a checkpoint took before is as it was then.
        let mut text = Vec::new();
        earlier.write_untimed(&mut text).expect("read");
        assert_eq!(String::from_utf8(text).expect("text"), saved);
        std::fs::remove_file(&path).expect("removed");
    }
}
