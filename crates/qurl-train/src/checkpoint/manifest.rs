//! Length and checksum of every file of a checkpoint: what tells a whole one from a torn one.

use super::CheckpointError;
use crate::crc32c::Crc32c;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// The file's name inside a checkpoint.
pub const MANIFEST: &str = "manifest.json";

/// What a file should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    bytes: u64,
    crc32c: u32,
}

/// All files of a checkpoint but the manifest itself, by their path inside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    files: BTreeMap<String, Entry>,
    /// Checksum of the entries above, so that the manifest vouches for itself too.
    entries_crc32c: u32,
}

impl Manifest {
    /// Reads every file of a directory.
    pub fn of(dir: &Path) -> Result<Manifest, CheckpointError> {
        let mut files = BTreeMap::new();
        collect(dir, "", &mut files)?;
        files.remove(MANIFEST);
        let entries_crc32c = entries_crc32c(&files);
        Ok(Manifest { files, entries_crc32c })
    }

    /// The text of the file.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string_pretty(self)
    }

    /// Reads the manifest of a checkpoint and checks every file against it.
    pub fn check(dir: &Path) -> Result<Manifest, CheckpointError> {
        let path = dir.join(MANIFEST);
        let text = qurl_files::read_text(&path, 64 * qurl_files::MIB)
            .map_err(CheckpointError::io(&path, "be read"))?;
        let expected = "the manifest of a checkpoint";
        let manifest: Manifest = serde_json::from_str(&text)
            .map_err(|e| CheckpointError::damaged(&path, format!("{e}"), expected))?;
        if entries_crc32c(&manifest.files) != manifest.entries_crc32c {
            return Err(CheckpointError::damaged(&path, "entries with another checksum", expected));
        }
        for (name, entry) in &manifest.files {
            let file = dir.join(name);
            let length = std::fs::metadata(&file).map_err(CheckpointError::io(&file, "be read"))?.len();
            let bytes = |n: u64| format!("{n} bytes");
            if length != entry.bytes {
                return Err(CheckpointError::damaged(&file, bytes(length), bytes(entry.bytes)));
            }
            let found = read_entry(&file)?;
            if found != *entry {
                let sum = |e: &Entry| format!("{} bytes with checksum {:08x}", e.bytes, e.crc32c);
                return Err(CheckpointError::damaged(&file, sum(&found), sum(entry)));
            }
        }
        Ok(manifest)
    }

    /// An error unless it lists a file.
    pub fn expect(&self, dir: &Path, name: &str) -> Result<(), CheckpointError> {
        match self.files.contains_key(name) {
            true => Ok(()),
            false => {
                let found = format!("a list without {name}");
                Err(CheckpointError::damaged(&dir.join(MANIFEST), found, "all files of a checkpoint"))
            }
        }
    }

    /// Whether it lists a file.
    pub fn has(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }
}

fn entries_crc32c(files: &BTreeMap<String, Entry>) -> u32 {
    let mut crc = Crc32c::default();
    for (name, entry) in files {
        crc.update(name.as_bytes());
        crc.update(&entry.bytes.to_le_bytes());
        crc.update(&entry.crc32c.to_le_bytes());
    }
    crc.value()
}

fn collect(dir: &Path, prefix: &str, files: &mut BTreeMap<String, Entry>) -> Result<(), CheckpointError> {
    for entry in std::fs::read_dir(dir).map_err(CheckpointError::io(dir, "be listed"))? {
        let entry = entry.map_err(CheckpointError::io(dir, "be listed"))?;
        let (path, name) = (entry.path(), format!("{prefix}{}", entry.file_name().to_string_lossy()));
        if path.is_dir() {
            collect(&path, &format!("{name}/"), files)?;
        } else {
            files.insert(name, read_entry(&path)?);
        }
    }
    Ok(())
}

fn read_entry(path: &Path) -> Result<Entry, CheckpointError> {
    let mut file = qurl_files::open(path).map_err(CheckpointError::io(path, "be opened"))?;
    let (mut crc, mut bytes) = (Crc32c::default(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer).map_err(CheckpointError::io(path, "be read"))?;
        let Some(part) = buffer.get(..read).filter(|part| !part.is_empty()) else { break };
        crc.update(part);
        bytes += read as u64;
    }
    Ok(Entry { bytes, crc32c: crc.value() })
}
