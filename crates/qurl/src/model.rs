//! Model directories as commands load them: what a user should know of the files is said on standard error.

use crate::input::OrBad;
use crate::output::err;
use qurl_model::hf::{self, LoadedModel};
use std::path::{Path, PathBuf};

/// A model directory as `--model` names it: an id of the hub stands for its snapshot in the local cache.
pub fn directory(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match hf::hub::id(&path).filter(|_| !path.exists()) {
        Some(id) => hf::hub::cached(id).ok_or_else(|| hf::hub::how_to_get(id)),
        None => Ok(path),
    }
}

/// Loads a directory; one that cannot be used is bad input.
pub fn load(dir: &Path) -> anyhow::Result<LoadedModel> {
    let model = hf::load(dir).or_bad()?;
    warn(model.warning(dir).as_deref());
    Ok(model)
}

/// Says the warning, if there is one.
pub fn warn(warning: Option<&str>) {
    if let Some(warning) = warning {
        err!("warning: {warning}");
    }
}
