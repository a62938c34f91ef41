//! Shared data for tests: used where it exists, never copied.

use std::path::PathBuf;

/// The folder of shared data sets, or `None` (with a message) where it is absent.
pub fn shared_data() -> Option<PathBuf> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
    if path.is_dir() {
        return Some(path);
    }
    println!("skipped: the shared data sets are not here");
    None
}
