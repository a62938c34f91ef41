//! Model directories as commands load them: what a user should know of the files is said on standard error.

use crate::input::{OrBad, bad};
use crate::output::err;
use qurl_kernels::Format;
use qurl_model::ModelConfig;
use qurl_model::compute::NetworkOptions;
use qurl_model::hf::{self, LoadedModel, OpenModel};
use qurl_model::params::{self, ParamKind};
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

/// Opens a directory whose weights are to be packed leaf by leaf; one that cannot be used is bad input.
pub fn open(dir: &Path) -> anyhow::Result<OpenModel> {
    let model = hf::open(dir).or_bad()?;
    warn(model.warning(dir).as_deref());
    Ok(model)
}

/// Refuses a model that does not fit into the host's memory once it is packed, before any of it is: on a CPU,
/// where packed weights are in that memory.
pub fn check_memory(dir: &Path, config: &ModelConfig, options: &NetworkOptions) -> anyhow::Result<()> {
    let need: u64 = params::shapes(config, false)
        .iter()
        .map(|leaf| {
            let format = match leaf.kind {
                kind if kind.is_block_linear() => options.format,
                ParamKind::Head => options.head_format,
                _ => Format::F32,
            };
            let eighths = match format {
                Format::F32 => 32,
                Format::Bf16 => 16,
                Format::Int8 | Format::Fp8 | Format::Fp8Block => 8,
                Format::Int4 | Format::Nvfp4 => 4,
            };
            leaf.len() as u64 * eighths / 8
        })
        .sum();
    match qurl_files::available_memory() {
        Some(free) if need > free => Err(bad(format!(
            "{}: {} MiB of weights in {}, expected at most the {} MiB of memory that are free",
            dir.display(),
            need >> 20,
            options.format,
            free >> 20
        ))),
        _ => Ok(()),
    }
}

/// Says the warning, if there is one.
pub fn warn(warning: Option<&str>) {
    if let Some(warning) = warning {
        err!("warning: {warning}");
    }
}
