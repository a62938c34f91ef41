//! Event files for TensorBoard.
//!
//! The format is a sequence of framed records (length, masked checksum of the length, data, masked checksum
//! of the data), each an `Event` message of protocol buffers. We write two kinds: the file's version, once,
//! and the scalars of a step. That is a handful of fields, so they are written by hand:
//!
//! `Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; }`,
//! `Summary { repeated Value value = 1; }`, `Value { string tag = 1; float simple_value = 2; }`.

use super::LogError;
use crate::crc32c::crc32c;
use qurl_files::disk::{self, DiskFile};
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// TensorBoard takes every file with `tfevents` in its name; ours is always the same, so that it can be cut.
const NAME: &str = "events.out.tfevents.qurl";

/// Wire types of protocol buffers.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const BYTES: u64 = 2;
const FIXED32: u64 = 5;

/// An event file that is being written.
pub struct EventFile {
    path: PathBuf,
    file: DiskFile,
}

impl EventFile {
    /// Opens or makes the event file of a directory; events after `step` and torn ones are cut off. Steps
    /// that are missing of those that were `kept` make it be written anew.
    pub fn open(dir: &Path, step: u64, kept: &[Value]) -> Result<EventFile, LogError> {
        disk::create_dir_all(dir).map_err(LogError::io(dir, "be created"))?;
        let path = dir.join(NAME);
        let bytes = match std::fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            read => read.map_err(LogError::io(&path, "be read"))?,
        };
        let mut reader = EventReader::new(&bytes);
        let (mut length, mut steps) = (0, 0);
        while let Some(event) = reader.next().filter(|event| event.step <= step) {
            length = reader.position();
            steps += usize::from(!event.scalars.is_empty());
        }
        if steps < kept.len() {
            length = 0;
        }
        let file = DiskFile::open_at(&path, length).map_err(LogError::io(&path, "be cut"))?;
        let mut file = EventFile { path, file };
        if length == 0 {
            let mut event = wall_time();
            bytes_field(&mut event, 3, b"brain.Event:2");
            file.file.write_all(&frame(&event)).map_err(LogError::io(&file.path, "be written"))?;
            for line in kept {
                file.write(line["step"].as_u64().unwrap_or_default(), &flatten(line))?;
            }
        }
        Ok(file)
    }

    /// Writes the scalars of a step.
    pub fn write(&mut self, step: u64, scalars: &[(String, f64)]) -> Result<(), LogError> {
        let mut summary = Vec::new();
        for (tag, value) in scalars {
            let mut scalar = Vec::new();
            bytes_field(&mut scalar, 1, tag.as_bytes());
            key(&mut scalar, 2, FIXED32);
            scalar.extend((*value as f32).to_le_bytes());
            bytes_field(&mut summary, 1, &scalar);
        }
        let mut event = wall_time();
        key(&mut event, 2, VARINT);
        varint(&mut event, step);
        bytes_field(&mut event, 5, &summary);
        self.file.write_all(&frame(&event)).map_err(LogError::io(&self.path, "be written"))
    }

    /// Another handle to the file.
    pub fn file(&self) -> Result<DiskFile, LogError> {
        self.file.another().map_err(LogError::io(&self.path, "be opened again"))
    }
}

/// All numbers of a record, named by their path: `mismatch/kl`, `weight_update/layers/0`. The step is no
/// scalar.
pub fn flatten(record: &Value) -> Vec<(String, f64)> {
    fn walk(name: String, value: &Value, scalars: &mut Vec<(String, f64)>) {
        let child = |key: &str| if name.is_empty() { key.to_string() } else { format!("{name}/{key}") };
        match value {
            Value::Object(fields) => fields.iter().for_each(|(key, value)| walk(child(key), value, scalars)),
            Value::Array(items) => {
                items.iter().enumerate().for_each(|(i, value)| walk(child(&i.to_string()), value, scalars))
            }
            Value::Number(number) => {
                scalars.extend(number.as_f64().filter(|_| name != "step").map(|x| (name, x)))
            }
            _ => {}
        }
    }
    let mut scalars = Vec::new();
    walk(String::new(), record, &mut scalars);
    scalars
}

fn wall_time() -> Vec<u8> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |t| t.as_secs_f64());
    let mut event = Vec::new();
    key(&mut event, 1, FIXED64);
    event.extend(now.to_le_bytes());
    event
}

fn key(out: &mut Vec<u8>, field: u64, wire: u64) {
    varint(out, field << 3 | wire);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn bytes_field(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    key(out, field, BYTES);
    varint(out, bytes.len() as u64);
    out.extend(bytes);
}

/// A checksum of data that may hold checksums itself is rotated and shifted.
fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut out = Vec::with_capacity(data.len() + 16);
    out.extend(length);
    out.extend(masked(&length).to_le_bytes());
    out.extend(data);
    out.extend(masked(data).to_le_bytes());
    out
}

/// An event as far as we read it.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Its step; 0 for the file's version.
    pub step: u64,
    /// Names and values.
    pub scalars: Vec<(String, f32)>,
}

/// Reads events until the end or the first that is torn or damaged.
pub struct EventReader<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> EventReader<'a> {
    /// A reader of a file's bytes.
    pub fn new(bytes: &'a [u8]) -> EventReader<'a> {
        EventReader { bytes, position: 0 }
    }

    /// Bytes read so far: the end of the last event.
    pub fn position(&self) -> u64 {
        self.position as u64
    }
}

impl Iterator for EventReader<'_> {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        let mut rest = self.bytes.get(self.position..)?;
        let length = take::<8>(&mut rest)?;
        let head = take::<4>(&mut rest)?;
        let size = usize::try_from(u64::from_le_bytes(length)).ok()?;
        let data = rest.get(..size).filter(|_| masked(&length) == u32::from_le_bytes(head))?;
        let tail = rest.get(size..)?.first_chunk::<4>()?;
        if masked(data) != u32::from_le_bytes(*tail) {
            return None;
        }
        self.position += 16 + size;
        let mut event = Event { step: 0, scalars: Vec::new() };
        fields(data, |field, content| match (field, content) {
            (2, Content::Number(step)) => event.step = step,
            (5, Content::Bytes(summary)) => fields(summary, |_, content| {
                let Content::Bytes(value) = content else { return };
                let (mut tag, mut number) = (String::new(), 0.0);
                fields(value, |field, content| match (field, content) {
                    (1, Content::Bytes(bytes)) => tag = String::from_utf8_lossy(bytes).into_owned(),
                    (2, Content::Number(bits)) => number = f32::from_bits(bits as u32),
                    _ => {}
                });
                event.scalars.push((tag, number));
            }),
            _ => {}
        });
        Some(event)
    }
}

enum Content<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// Calls back with every field of a message, up to the first that is not understood.
fn fields<'a>(mut message: &'a [u8], mut each: impl FnMut(u64, Content<'a>)) {
    while let Some(key) = read_varint(&mut message) {
        let content = match key & 7 {
            VARINT => read_varint(&mut message).map(Content::Number),
            FIXED64 => take::<8>(&mut message).map(|b| Content::Number(u64::from_le_bytes(b))),
            FIXED32 => take::<4>(&mut message).map(|b| Content::Number(u64::from(u32::from_le_bytes(b)))),
            BYTES => read_varint(&mut message).and_then(|length| {
                let (bytes, rest) = message.split_at_checked(usize::try_from(length).ok()?)?;
                message = rest;
                Some(Content::Bytes(bytes))
            }),
            _ => None,
        };
        let Some(content) = content else { return };
        each(key >> 3, content);
    }
}

fn read_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let [byte] = take::<1>(bytes)?;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk::<N>()?;
    *bytes = rest;
    Some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn records_become_flat_names() {
        let mismatch = json!({"kl": 1e-3, "corr": null});
        let record = json!({"step": 3, "reward": 0.5, "mismatch": mismatch, "layers": [1.0, 2], "x": "y"});
        let expected = [("reward", 0.5), ("mismatch/kl", 1e-3), ("layers/0", 1.0), ("layers/1", 2.0)];
        assert_eq!(flatten(&record), expected.map(|(name, value)| (name.to_string(), value)));
    }

    #[test]
    fn what_is_later_or_torn_is_cut_off() {
        let dir = std::env::temp_dir().join(format!("qurl-events-{}", std::process::id()));
        let path = dir.join(NAME);
        let mut file = EventFile::open(&dir, 0, &[]).expect("opened");
        for step in 1..=300 {
            file.write(step, &[("a/b".to_string(), step as f64), ("c".to_string(), f64::NAN)])
                .expect("written");
        }
        drop(file);
        let whole = std::fs::read(&path).expect("a file");
        let events: Vec<Event> = EventReader::new(&whole).collect();
        assert_eq!((events.len(), events[0].scalars.len(), events[300].step), (301, 0, 300));
        assert_eq!(events[200].scalars[0], ("a/b".to_string(), 200.0));
        let ends: Vec<usize> = {
            let mut reader = EventReader::new(&whole);
            std::iter::from_fn(|| reader.next().map(|_| reader.position)).collect()
        };
        // Every way to tear the event of step 2: the reader stops before it, and opening cuts it off.
        for length in ends[1]..ends[2] {
            assert_eq!(EventReader::new(&whole[..length]).count(), 2, "{length} bytes");
        }
        std::fs::write(&path, &whole[..ends[2] - 1]).expect("written");
        drop(EventFile::open(&dir, 100, &[]).expect("opened"));
        assert_eq!(std::fs::read(&path).expect("a file"), whole[..ends[1]]);
        let mut damaged = whole.clone();
        damaged[ends[1] + 20] ^= 4;
        assert_eq!(EventReader::new(&damaged).count(), 2);
        // Continuing from step 150 writes the same events again.
        std::fs::write(&path, &whole).expect("written");
        let mut file = EventFile::open(&dir, 150, &[]).expect("opened");
        file.write(151, &[("a/b".to_string(), 151.0)]).expect("written");
        let steps: Vec<u64> =
            EventReader::new(&std::fs::read(&path).expect("a file")).map(|e| e.step).collect();
        assert_eq!(steps, (0..=151).collect::<Vec<u64>>());
        std::fs::remove_dir_all(&dir).expect("removed");
    }
}
