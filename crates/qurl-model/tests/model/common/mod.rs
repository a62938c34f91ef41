//! Shared by the integration tests: temporary directories, small models, Python where it is given.

pub mod golden;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use qurl_model::{Dims, Family, ModelConfig};

/// A directory that is removed when the test ends.
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new(name: &str) -> TempDir {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("qurl-model-{name}-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        TempDir(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A model small enough to write in a millisecond.
pub fn small(family: Family) -> ModelConfig {
    let dims = Dims {
        vocab_size: 40,
        hidden_size: 16,
        intermediate_size: 24,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
    };
    let mut config = ModelConfig::from_dims(family, dims).unwrap();
    config.eos_token_ids = vec![2];
    config
}

/// The directory of this package. Taken at run time, so that a test built here can run in a checkout
/// elsewhere.
pub fn package() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map_or(env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

/// Runs a script of `tests/python` with the interpreter named by `QURL_PYTHON`; `None` where it is not set.
pub fn python(script: &str, args: &[&str]) -> Option<String> {
    let Some(interpreter) = std::env::var_os("QURL_PYTHON") else {
        println!("skipped: QURL_PYTHON does not name a Python with torch and transformers");
        return None;
    };
    let path = package().join("tests/python").join(script);
    let output = Command::new(interpreter).arg(path).args(args).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script} {args:?}: {stderr}");
    Some(String::from_utf8(output.stdout).unwrap())
}

/// A file of the shared data sets, `None` (with a message) where they are not at hand.
pub fn shared_data(name: &str) -> Option<PathBuf> {
    let path = package().join("../../../shared/data").join(name);
    if !path.exists() {
        println!("skipped: no shared data file {name}");
        return None;
    }
    Some(path)
}
