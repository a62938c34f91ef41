//! A directory for one unit test, which goes away with it.

use std::ops::Deref;
use std::path::{Path, PathBuf};

/// An empty directory of its own.
pub struct Scratch(PathBuf);

impl Scratch {
    /// Makes the directory; `name` is unique among the tests.
    pub fn new(name: &str) -> Scratch {
        let dir = std::env::temp_dir().join(format!("qurl-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("created");
        Scratch(dir)
    }
}

impl Deref for Scratch {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.0);
    }
}
