//! Shared data for tests: used where it exists, never copied.

use std::io::Read;
use std::path::PathBuf;

use serde_json::Value;

/// The folder of shared data sets, or `None` (with a message) where it is absent.
pub fn shared_data() -> Option<PathBuf> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
    if path.is_dir() {
        return Some(path);
    }
    println!("skipped: the shared data sets are not here");
    None
}

/// All rows of a JSONL file, gzip or not.
pub fn rows(file: &std::path::Path) -> Vec<Value> {
    let bytes = std::fs::read(file).unwrap();
    let text = if file.extension().is_some_and(|e| e == "gz") {
        let mut text = String::new();
        flate2::read::GzDecoder::new(&bytes[..]).read_to_string(&mut text).unwrap();
        text
    } else {
        String::from_utf8(bytes).unwrap()
    };
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
