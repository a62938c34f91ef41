//! Opening what a user named.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, BufRead, Read};
use std::path::Path;

/// Bytes in a mebibyte.
pub const MIB: u64 = 1 << 20;

/// Opens a regular file for reading. Anything else (a FIFO, a device, a socket) is refused without waiting
/// for it; a directory is the system's own error.
pub fn open(path: &Path) -> io::Result<File> {
    // Before opening, because opening a device can already do something.
    check(path.metadata()?.file_type())?;
    let mut options = OpenOptions::new();
    options.read(true);
    // What has become a FIFO since then must not block.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        &mut options,
        rustix::fs::OFlags::NONBLOCK.bits() as i32, // no meaning for regular files
    );
    let file = options.open(path)?;
    check(file.metadata()?.file_type())?;
    Ok(file)
}

/// The contents of a regular file of at most `max` bytes.
pub fn read(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let length = file.metadata()?.len();
    let too_long = |found: String| {
        io::Error::new(io::ErrorKind::FileTooLarge, format!("{found} bytes, expected at most {max}"))
    };
    if length > max {
        return Err(too_long(length.to_string()));
    }
    let mut bytes = Vec::with_capacity(length as usize);
    // A file may grow, and those of /proc have a length of 0.
    file.take(max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max {
        return Err(too_long(format!("more than {max}")));
    }
    Ok(bytes)
}

/// As [`read`], for a file of UTF-8 text.
pub fn read_text(path: &Path, max: u64) -> io::Result<String> {
    String::from_utf8(read(path, max)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("not UTF-8 text: {error}")))
}

/// Reads a line of at most `max` bytes and its end; 0 bytes are the end of the input.
pub fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>, max: u64) -> io::Result<usize> {
    line.clear();
    let read = reader.by_ref().take(max + 1).read_until(b'\n', line)?;
    if read as u64 > max && line.last() != Some(&b'\n') {
        let what = format!("a line of more than {max} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(read)
}

fn check(kind: FileType) -> io::Result<()> {
    let refused = |what: &str| {
        let text = format!("{what}, expected a regular file");
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    };
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return refused("a FIFO");
        }
        if kind.is_char_device() || kind.is_block_device() {
            return refused("a device");
        }
        if kind.is_socket() {
            return refused("a socket");
        }
    }
    match kind.is_file() {
        true => Ok(()),
        false if kind.is_dir() => Err(io::Error::from(io::ErrorKind::IsADirectory)),
        false => refused("something else"),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_of_bounded_size() {
        let dir = std::env::temp_dir().join(format!("qurl-files-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let (fifo, text) = (dir.join("fifo"), dir.join("text"));
        let _ = std::fs::remove_file(&fifo);
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, kind, mode, 0).expect("a FIFO");
        std::fs::write(&text, "abc").expect("written");

        let message = |path: &Path| open(path).expect_err("refused").to_string();
        assert_eq!(message(&fifo), "a FIFO, expected a regular file");
        assert_eq!(message(Path::new("/dev/zero")), "a device, expected a regular file");
        assert_eq!(open(&dir).expect_err("refused").kind(), io::ErrorKind::IsADirectory);
        assert_eq!(read(&text, 3).expect("read"), b"abc");
        assert_eq!(read(&text, 2).expect_err("refused").to_string(), "3 bytes, expected at most 2");
        assert!(read_text(Path::new("/proc/self/status"), MIB).expect("read").contains("Pid"));
        assert!(read(Path::new("/proc/self/status"), 4).is_err());
        std::fs::write(&text, b"\xff").expect("written");
        assert!(read_text(&text, 9).expect_err("refused").to_string().starts_with("not UTF-8"));
        std::fs::remove_dir_all(&dir).expect("removed");
    }

    #[test]
    fn lines_are_bounded() {
        let (mut input, mut line) = (&b"abc\nabcd\n"[..], Vec::new());
        assert_eq!(read_line(&mut input, &mut line, 3).expect("a line"), 4);
        assert_eq!(line, b"abc\n");
        assert!(read_line(&mut input, &mut line, 3).is_err());
        assert_eq!(read_line(&mut &b"abc"[..], &mut line, 3).expect("a line"), 3);
        assert_eq!(read_line(&mut &b""[..], &mut line, 3).expect("the end"), 0);
    }
}
