//! Files that appear all at once.
//!
//! Every file is first written under a temporary name and synced to disk; [`Staged::publish`] then
//! renames them one after the other. Until then an existing directory stays as it was, and whatever is
//! left of a failed attempt is removed, a directory that was made for it included.

use std::collections::BTreeSet;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use qurl_files::disk::{self, DiskFile};

use super::error::HfError;

/// A set of files being written into one directory.
pub(super) struct Staged {
    dir: PathBuf,
    /// (temporary path, final path), in the order of publication
    files: Vec<(PathBuf, PathBuf)>,
    /// Directories that were not there before, the innermost first.
    made: Vec<PathBuf>,
}

impl Staged {
    /// Starts a set in `dir`, which is created where needed.
    pub fn new(dir: &Path) -> Result<Staged, HfError> {
        let missing = dir.ancestors().take_while(|dir| !dir.as_os_str().is_empty() && !dir.exists());
        let made = missing.map(Path::to_path_buf).collect();
        disk::create_dir_all(dir).map_err(|source| HfError::Io {
            file: dir.to_path_buf(),
            action: "be created",
            source,
        })?;
        Ok(Staged { dir: dir.to_path_buf(), files: Vec::new(), made })
    }

    /// Writes one file under its temporary name and syncs it.
    pub fn write(
        &mut self,
        name: &str,
        contents: impl FnOnce(&mut BufWriter<DiskFile>) -> Result<(), HfError>,
    ) -> Result<(), HfError> {
        let path = self.dir.join(name);
        let temporary = self.dir.join(format!(".{name}.{}.part", std::process::id()));
        self.files.push((temporary.clone(), path.clone()));
        let failed = |source| HfError::Io { file: path.clone(), action: "be written", source };
        let mut writer = BufWriter::with_capacity(1 << 20, DiskFile::create(&temporary).map_err(failed)?);
        contents(&mut writer)?;
        let file = writer.into_inner().map_err(|error| failed(error.into_error()))?;
        file.sync_contents().map_err(failed)
    }

    /// Writes a file from bytes at hand.
    pub fn write_bytes(&mut self, name: &str, bytes: &[u8]) -> Result<(), HfError> {
        let path = self.dir.join(name);
        self.write(name, |file| {
            file.write_all(bytes).map_err(|source| HfError::Io { file: path, action: "be written", source })
        })
    }

    /// Gives every file its name, removes the `stale` ones and syncs the directory.
    pub fn publish(mut self, stale: &[PathBuf]) -> Result<(), HfError> {
        let failed = |file: &Path, action| {
            let file = file.to_path_buf();
            move |source| HfError::Io { file, action, source }
        };
        for (temporary, path) in std::mem::take(&mut self.files) {
            disk::rename(&temporary, &path).map_err(failed(&path, "be renamed into place"))?;
        }
        for path in stale {
            disk::remove(path).map_err(failed(path, "be removed"))?;
        }
        disk::sync_dir(&self.dir).map_err(failed(&self.dir, "be synced"))
    }
}

/// Whether a file is one of these under the temporary name of another process.
pub(super) fn is_left_over(file: &str, names: &BTreeSet<&str>) -> bool {
    let inner = file.strip_prefix('.').and_then(|rest| rest.strip_suffix(".part"));
    inner.and_then(|inner| inner.rsplit_once('.')).is_some_and(|(name, process)| {
        let number = process.parse::<u32>();
        names.contains(name) && number.is_ok_and(|number| number != std::process::id())
    })
}

impl Drop for Staged {
    fn drop(&mut self) {
        for (temporary, _) in &self.files {
            // Nothing to report to: the attempt already failed with the error that matters.
            let _ = disk::remove(temporary);
        }
        let is_empty =
            |dir: &&PathBuf| std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none());
        let _ = self.made.iter().take_while(is_empty).try_for_each(|dir| disk::remove(dir));
    }
}
