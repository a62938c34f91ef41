//! Read-only memory maps of weight files.
//!
//! Mapping is `unsafe` in Rust because another process may change or truncate the file while it is
//! mapped, so it lives in the one crate where `unsafe` is allowed. Callers see plain bytes.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

/// The bytes of a file, mapped into memory until dropped.
#[derive(Debug)]
pub struct Mapped {
    map: memmap2::Mmap,
    file: File,
}

impl Mapped {
    /// Bytes that the file has now. Where they are fewer than those mapped, somebody has cut it, and to read
    /// what is gone would end the process.
    pub fn file_len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

/// Maps a whole file for reading. An empty file gives no bytes.
pub fn map_file(path: &Path) -> io::Result<Mapped> {
    let file = File::open(path)?;
    // SAFETY: the map is read-only, and our own writers never change a file in place: they rename a new
    // one over it, which leaves the mapped one intact. A foreign program that truncates the file while
    // it is mapped ends this process with a bus error; that is the accepted price of not copying it.
    let map = unsafe { memmap2::Mmap::map(&file)? };
    Ok(Mapped { map, file })
}
