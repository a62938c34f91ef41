//! Gzip files that do not unpack to much more than a data set would.

use std::cell::Cell;
use std::io::{self, BufRead, Read};
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;
use qurl_files::MIB;

/// How many times its length a file may unpack to: texts shrink to a third or a tenth, zeros to a thousandth.
const MAX_RATIO: u64 = 200;
/// What every file may unpack to.
const ALWAYS: u64 = 64 * MIB;

/// The contents of a gzip file.
pub(super) struct Unpacked<R> {
    decoder: MultiGzDecoder<Counted<R>>,
    packed: Rc<Cell<u64>>,
    unpacked: u64,
}

impl<R: BufRead> Unpacked<R> {
    pub fn new(file: R) -> Unpacked<R> {
        let packed = Rc::new(Cell::new(0));
        let decoder = MultiGzDecoder::new(Counted { file, read: packed.clone() });
        Unpacked { decoder, packed, unpacked: 0 }
    }
}

impl<R: BufRead> Read for Unpacked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.decoder.read(buffer)?;
        self.unpacked += read as u64;
        if self.unpacked > ALWAYS.max(MAX_RATIO * self.packed.get()) {
            let (packed, unpacked) = (self.packed.get(), self.unpacked);
            let what = format!("{packed} bytes unpack to more than {unpacked}, expected a data set");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        Ok(read)
    }
}

/// Counts what is taken from a file.
struct Counted<R> {
    file: R,
    read: Rc<Cell<u64>>,
}

impl<R: BufRead> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.read.set(self.read.get() + read as u64);
        Ok(read)
    }
}

impl<R: BufRead> BufRead for Counted<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.file.fill_buf()
    }

    fn consume(&mut self, bytes: usize) {
        self.read.set(self.read.get() + bytes as u64);
        self.file.consume(bytes);
    }
}
