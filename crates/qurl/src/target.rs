//! Directories and files that commands write to, looked at before the work that fills them.

use crate::input::{OrBad, bad};
use anyhow::Context;
use qurl_files::disk;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// Refuses whatever is no new name and no empty directory; with `force`, any directory will do.
pub fn check(dir: &Path, force: bool) -> anyhow::Result<()> {
    let name = dir.display();
    if !dir.exists() {
        return Ok(());
    }
    if !dir.is_dir() {
        return Err(bad(format!("{name}: is a file, expected a directory or a new name")));
    }
    let mut entries = std::fs::read_dir(dir).map_err(|e| bad(format!("{name}: cannot be listed: {e}")))?;
    if entries.next().is_some() && !force {
        return Err(bad(format!("{name}: is not empty; give --force to write into it")));
    }
    Ok(())
}

/// Refuses the directory of the model that is read, whatever else is allowed.
pub fn check_apart(dir: &Path, model: &Path) -> anyhow::Result<()> {
    let place = |path: &Path| path.canonicalize().ok();
    match place(dir).is_some_and(|dir| Some(dir) == place(model)) {
        true => Err(bad(format!("{}: is the model itself, expected another directory", dir.display()))),
        false => Ok(()),
    }
}

/// Refuses a name that no file can be written under, before the work whose result goes there. What is there
/// stays as it is.
pub fn check_file(file: &Path) -> anyhow::Result<()> {
    let new = !file.exists();
    File::options().append(true).create(true).open(file).with_context(|| unwritten(file)).or_bad()?;
    if new {
        std::fs::remove_file(file).with_context(|| unwritten(file))?;
    }
    Ok(())
}

/// Puts a file into its place, whole or not at all: where the disk is full, what was there stays.
pub fn write(file: &Path, text: &str) -> anyhow::Result<()> {
    place(file, text.as_bytes()).with_context(|| unwritten(file))
}

fn unwritten(file: &Path) -> String {
    format!("{}: cannot be written", file.display())
}

fn place(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let Ok(there) = file.metadata() else { return disk::replace(file, bytes) };
    if !there.is_file() {
        // A terminal, a pipe or /dev/null takes what it is given; nothing may stand in its place.
        return std::fs::write(file, bytes);
    }
    // Links stay, and so does who may read it.
    match file.is_symlink() {
        true => disk::replace(&file.canonicalize()?, bytes)?,
        false => disk::replace(file, bytes)?,
    }
    std::fs::set_permissions(file, there.permissions())
}

/// A directory that is made for what is written into it, and removed where nothing was.
pub struct NewDir {
    /// Those that were not there before, the innermost first.
    made: Vec<PathBuf>,
}

impl NewDir {
    /// Makes a directory and those above it.
    pub fn make(dir: &Path) -> io::Result<NewDir> {
        let missing = dir.ancestors().take_while(|dir| !dir.as_os_str().is_empty() && !dir.exists());
        let made = missing.map(Path::to_path_buf).collect();
        std::fs::create_dir_all(dir)?;
        Ok(NewDir { made })
    }
}

impl Drop for NewDir {
    fn drop(&mut self) {
        // What holds something cannot be removed so.
        let _ = self.made.iter().try_for_each(std::fs::remove_dir);
    }
}

/// The first of runs/KIND-1, runs/KIND-2, ... that is not there.
pub fn free_run(kind: &str) -> PathBuf {
    let mut candidates = (1u32..).map(|n| PathBuf::from(format!("runs/{kind}-{n}")));
    candidates.find(|dir| !dir.exists()).unwrap_or_else(|| PathBuf::from(format!("runs/{kind}")))
}
