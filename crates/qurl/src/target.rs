//! Directories and files that commands write to, looked at before the work that fills them.

use crate::input::bad;
use std::fs::File;
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

/// Makes a file, or empties the one that is there.
pub fn create(file: &Path) -> anyhow::Result<File> {
    File::create(file).map_err(|e| bad(format!("{}: cannot be made: {e}", file.display())))
}

/// The first of runs/KIND-1, runs/KIND-2, ... that is not there.
pub fn free_run(kind: &str) -> PathBuf {
    let mut candidates = (1u32..).map(|n| PathBuf::from(format!("runs/{kind}-{n}")));
    candidates.find(|dir| !dir.exists()).unwrap_or_else(|| PathBuf::from(format!("runs/{kind}")))
}
