//! A file as the parquet crate reads it, that ends where it ends.
//!
//! What the crate skips may be as long as the file says: beyond its end it skips nothing, two thousand
//! million times over, and it reserves memory for a piece before it looks whether the file has one.

use std::fs::File;
use std::io::{self, BufReader, Read};

use bytes::Bytes;
use parquet::errors::{ParquetError, Result};
use parquet::file::reader::{ChunkReader, Length};

/// How often a reader may be told that there is no more.
const MAX_ENDS: usize = 16;

/// A regular file.
pub(super) struct Source {
    pub file: File,
    pub length: u64,
}

impl Length for Source {
    fn len(&self) -> u64 {
        self.length
    }
}

impl ChunkReader for Source {
    type T = Ended<BufReader<File>>;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        Ok(Ended { reader: self.file.get_read(start)?, ends: 0 })
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        let end = start.checked_add(length as u64);
        if end.is_none_or(|end| end > self.length) {
            let found = format!("{length} bytes from byte {start} of a file of {} bytes", self.length);
            return Err(ParquetError::EOF(found));
        }
        self.file.get_bytes(start, length)
    }
}

/// A reader that fails where it is asked for more again and again after its end.
pub(super) struct Ended<R> {
    reader: R,
    ends: usize,
}

impl<R: Read> Read for Ended<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        if read == 0 && !buffer.is_empty() {
            self.ends += 1;
            if self.ends > MAX_ENDS {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_an_end() {
        let mut reader = Ended { reader: &b"ab"[..], ends: 0 };
        let mut text = String::new();
        assert_eq!(reader.read_to_string(&mut text).expect("read"), 2);
        let skipped = (0..1000).map(|_| io::copy(&mut reader.by_ref().take(8), &mut io::sink()));
        assert!(skipped.filter(io::Result::is_ok).count() < MAX_ENDS);
    }
}
