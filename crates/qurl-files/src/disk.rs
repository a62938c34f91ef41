//! Changes of files that must survive a crash: those of run directories and checkpoints.
//!
//! Everything such a directory is changed by is here and nowhere else, for two reasons. What makes a change
//! last is easily forgotten: a file needs a sync, and so does the directory that names it. And a test can
//! stand in for the disk: [`watch`] sees every change below a folder before and after it is made, may refuse
//! it as a full disk would, and can replay it onto a disk that loses whatever was not synced.
//!
//! The watches are found by path, in one list of the process, so that no function between a run and the last
//! of its files has to carry a disk that only tests replace. Without a watch a change costs one look at a
//! flag.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// A change, or what makes changes last.
#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    /// An empty file, new or in the place of what it held.
    Create(&'a Path),
    /// A file that is opened as it is, or a new one.
    Open(&'a Path),
    /// Bytes at a place of a file.
    Write(&'a Path, u64, &'a [u8]),
    /// The length of a file.
    SetLen(&'a Path, u64),
    /// What is in a file so far.
    SyncFile(&'a Path),
    /// A directory.
    CreateDir(&'a Path),
    /// What a directory names so far.
    SyncDir(&'a Path),
    /// Another name in the same directory, perhaps in the place of another file.
    Rename(&'a Path, &'a Path),
    /// A file or a directory with all that is in it.
    Remove(&'a Path),
}

impl Change<'_> {
    fn path(&self) -> &Path {
        match self {
            Change::Create(path) | Change::Open(path) | Change::Write(path, ..) | Change::SetLen(path, _) => {
                path
            }
            Change::SyncFile(path) | Change::CreateDir(path) | Change::SyncDir(path) => path,
            Change::Rename(path, _) | Change::Remove(path) => path,
        }
    }
}

/// Sees the changes below a folder.
pub trait Watch: Send + Sync {
    /// Before a change; an error takes its place (of a write the first half is still made).
    fn before(&self, change: Change) -> io::Result<()>;
    /// After a change that was made.
    fn after(&self, change: Change);
}

type Watches = Vec<(PathBuf, Arc<dyn Watch>)>;

static WATCHES: RwLock<Watches> = RwLock::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Shows all changes below a folder to a watch, until the guard is dropped.
pub fn watch(below: &Path, watch: Arc<dyn Watch>) -> Watching {
    let mut watches = WATCHES.write().unwrap_or_else(PoisonError::into_inner);
    watches.push((below.to_path_buf(), watch.clone()));
    COUNT.store(watches.len(), Ordering::SeqCst);
    Watching(watch)
}

/// A watch that is at work.
pub struct Watching(Arc<dyn Watch>);

impl Drop for Watching {
    fn drop(&mut self) {
        let mut watches = WATCHES.write().unwrap_or_else(PoisonError::into_inner);
        watches.retain(|(_, watch)| !Arc::ptr_eq(watch, &self.0));
        COUNT.store(watches.len(), Ordering::SeqCst);
    }
}

/// Makes a change under the eyes of whoever watches.
fn make<T>(change: Change, made: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    if COUNT.load(Ordering::SeqCst) == 0 {
        return made();
    }
    let watch = {
        let watches = WATCHES.read().unwrap_or_else(PoisonError::into_inner);
        watches.iter().find(|(below, _)| change.path().starts_with(below)).map(|(_, watch)| watch.clone())
    };
    let Some(watch) = watch else { return made() };
    watch.before(change)?;
    let result = made()?;
    watch.after(change);
    Ok(result)
}

/// A file that is written.
#[derive(Debug)]
pub struct DiskFile {
    path: PathBuf,
    file: File,
    at: u64,
}

impl DiskFile {
    /// Makes a file, or empties the one that is there.
    pub fn create(path: &Path) -> io::Result<DiskFile> {
        let create = || File::options().read(true).write(true).create(true).truncate(true).open(path);
        let file = make(Change::Create(path), create)?;
        Ok(DiskFile { path: path.to_path_buf(), file, at: 0 })
    }

    /// Opens a file to be cut to `length` bytes and continued, or makes it.
    pub fn open_at(path: &Path, length: u64) -> io::Result<DiskFile> {
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(path);
        let mut file = make(Change::Open(path), open)?;
        if file.metadata()?.len() != length {
            make(Change::SetLen(path, length), || file.set_len(length))?;
        }
        file.seek(SeekFrom::Start(length))?;
        Ok(DiskFile { path: path.to_path_buf(), file, at: length })
    }

    /// Waits until what was written, and the file's name, are on disk.
    pub fn sync(&self) -> io::Result<()> {
        make(Change::SyncFile(&self.path), || self.file.sync_all())?;
        sync_dir(parent(&self.path))
    }

    /// Waits until what was written is on disk; the directory is synced by whoever gives the file its name.
    pub fn sync_contents(&self) -> io::Result<()> {
        make(Change::SyncFile(&self.path), || self.file.sync_all())
    }

    /// Another handle to the file, to be synced elsewhere.
    pub fn another(&self) -> io::Result<DiskFile> {
        Ok(DiskFile { path: self.path.clone(), file: self.file.try_clone()?, at: self.at })
    }

    /// What is in the file, from its beginning, even where it has lost its name. The place of the next write
    /// stays.
    pub fn reader(&self) -> io::Result<impl Read + '_> {
        #[cfg(unix)]
        return Ok(AtPlace { file: &self.file, at: 0 });
        #[cfg(not(unix))]
        File::open(&self.path)
    }

    /// Whether the file is still there under its name.
    pub fn is_there(&self) -> bool {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let place = |m: std::fs::Metadata| (m.dev(), m.ino());
            let both = self.path.metadata().and_then(|named| Ok((named, self.file.metadata()?)));
            both.is_ok_and(|(named, held)| place(named) == place(held))
        }
        #[cfg(not(unix))]
        self.path.exists()
    }
}

/// Reads a file without moving the place that its handles share.
#[cfg(unix)]
struct AtPlace<'a> {
    file: &'a File,
    at: u64,
}

#[cfg(unix)]
impl Read for AtPlace<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = std::os::unix::fs::FileExt::read_at(self.file, buffer, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

impl Write for DiskFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let change = Change::Write(&self.path, self.at, bytes);
        let written = make(change, || self.file.write_all(bytes));
        if let Err(error) = written {
            // Disks fill up in the middle.
            if COUNT.load(Ordering::SeqCst) > 0 {
                let _ = self.file.write_all(&bytes[..bytes.len() / 2]);
            }
            return Err(error);
        }
        self.at += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Makes a directory and those above it, and waits until they are on disk.
pub fn create_dir_all(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let above = parent(path);
    if !above.is_dir() {
        create_dir_all(above)?;
    }
    match make(Change::CreateDir(path), || std::fs::create_dir(path)) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
        made => made?,
    }
    sync_dir(above)
}

/// Gives a file or a directory another name in the same directory.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    make(Change::Rename(from, to), || std::fs::rename(from, to))
}

/// Removes a file, or a directory with all that is in it. What is not there need not be removed.
pub fn remove(path: &Path) -> io::Result<()> {
    let removed = make(Change::Remove(path), || match path.is_dir() {
        true => std::fs::remove_dir_all(path),
        false => std::fs::remove_file(path),
    });
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Waits until the names in a directory are on disk.
pub fn sync_dir(path: &Path) -> io::Result<()> {
    make(Change::SyncDir(path), || {
        #[cfg(unix)]
        File::open(path)?.sync_all()?;
        Ok(())
    })
}

/// Puts a file into its place, all or nothing, and waits until it is there.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.part"));
    let mut file = DiskFile::create(&temporary)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_contents());
    let placed = written.and_then(|()| rename(&temporary, path)).and_then(|()| sync_dir(parent(path)));
    if placed.is_err() {
        let _ = remove(&temporary); // the error that matters is the one at hand
    }
    placed
}

/// The directory that something is in.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(above) if above.as_os_str().is_empty() => Path::new("."),
        Some(above) => above,
        None => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Writes down what is done, and refuses one of it.
    struct Diary(Mutex<Vec<String>>, usize);

    impl Watch for Diary {
        fn before(&self, _: Change) -> io::Result<()> {
            let full = self.0.lock().expect("a diary").len() == self.1;
            if full { Err(io::Error::from(io::ErrorKind::StorageFull)) } else { Ok(()) }
        }

        fn after(&self, change: Change) {
            let entry = format!("{change:?}");
            self.0.lock().expect("a diary").push(entry.split('(').next().unwrap_or_default().to_string());
        }
    }

    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let dir = std::env::temp_dir().join(format!("qurl-disk-{}", std::process::id()));
        let path = dir.join("a/b/file");
        let mut expected = vec!["CreateDir", "SyncDir", "CreateDir", "SyncDir"];
        expected.extend(["Create", "Write", "SyncFile", "Rename", "SyncDir"]);
        for refused in 0..=expected.len() {
            std::fs::create_dir_all(&dir).expect("a folder");
            let diary = Arc::new(Diary(Mutex::new(Vec::new()), refused));
            let watching = watch(&dir, diary.clone());
            let written = create_dir_all(&dir.join("a/b")).and_then(|()| replace(&path, b"new"));
            drop(watching);
            assert_eq!(written.is_ok(), refused == expected.len());
            assert_eq!(path.exists(), refused >= expected.len() - 1, "{refused}");
            assert_eq!(diary.0.lock().expect("a diary")[..], expected[..refused]);
            std::fs::remove_dir_all(&dir).expect("removed");
        }
        // Elsewhere nobody watches.
        std::fs::create_dir_all(&dir).expect("a folder");
        let mut file = DiskFile::open_at(&dir.join("log"), 0).expect("opened");
        file.write_all(b"abc").expect("written");
        file.sync().expect("synced");
        assert!(file.is_there());
        remove(&dir.join("log")).expect("removed");
        assert!(!file.is_there());
        // Its contents are still there for whoever holds it.
        #[cfg(unix)]
        for more in ["d", "e"] {
            let mut held = String::new();
            file.reader().and_then(|mut reader| reader.read_to_string(&mut held)).expect("read");
            assert!(held.starts_with("abc") && !held.contains(more), "{held}");
            file.write_all(more.as_bytes()).expect("written");
        }
        remove(&dir.join("log")).expect("nothing to remove");
        let mut file = DiskFile::open_at(&dir.join("log"), 2).expect("opened");
        file.write_all(b"c").expect("written");
        assert_eq!(std::fs::read(dir.join("log")).expect("read"), b"\0\0c");
        std::fs::remove_dir_all(&dir).expect("removed");
    }
}
