//! One process per run directory.
//!
//! The lock is the operating system's: it goes with the process that holds it, however that ends, so a lock
//! is never stale. The file also names the process, for people and for the error message of the second one.

use super::LogError;
use std::fs::{File, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

/// Held while a process trains in a run directory.
#[derive(Debug)]
pub struct RunLock {
    file: File,
}

impl RunLock {
    /// Name of its file in the run directory.
    pub const FILE: &str = "run.lock";

    /// Takes the lock of a run directory, which must exist.
    pub fn take(dir: &Path) -> Result<RunLock, LogError> {
        let path = dir.join(RunLock::FILE);
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(LogError::io(&path, "be written"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut text = String::new();
                // Only for the message: a lock whose process cannot be read is a lock all the same.
                let _ = file.read_to_string(&mut text);
                return Err(LogError::InUse { dir: dir.to_path_buf(), pid: text.trim().parse().ok() });
            }
            // A file system without locks: the run is worth more than the guard.
            Err(TryLockError::Error(e)) if e.kind() == std::io::ErrorKind::Unsupported => {
                tracing::warn!(path = %path.display(), "the file system has no locks; two processes would \
                                                        not be noticed");
            }
            Err(TryLockError::Error(e)) => return Err(LogError::io(&path, "be locked")(e)),
        }
        let lock = RunLock { file };
        lock.name(&format!("{}\n", std::process::id())).map_err(LogError::io(&path, "be written"))?;
        Ok(lock)
    }

    fn name(&self, text: &str) -> std::io::Result<()> {
        let mut file = &self.file;
        file.set_len(0)?;
        file.seek(SeekFrom::Start(0))?;
        file.write_all(text.as_bytes())
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // The system releases the lock; an old number in the file does no harm.
        let _ = self.name("");
    }
}
