//! Hugging Face model directories, in and out.
//!
//! [`load`] maps the weight files, checks every tensor against what `config.json` promises and converts to
//! f32 on all threads (quantized ones to the numbers they stand for); [`save`] writes a directory that
//! transformers loads. Whatever is wrong is an [`HfError`] that names the file, the tensor, what was expected
//! and what was found: a model that loads is complete, of the right shape and finite.

mod checkpoint;
mod convert;
mod error;
pub mod hub;
mod open;
pub mod peft;
mod raw;
mod save;
mod staged;

use std::path::Path;

pub use checkpoint::{INDEX as WEIGHTS_INDEX, SINGLE as WEIGHTS, shards};
pub use error::HfError;
pub use open::OpenModel;
pub use raw::{RawTensor, save_raw};
pub use save::{SaveOptions, save};

use crate::config::ModelConfig;
use crate::generation::GenerationConfig;
use crate::params::{LeafLayout, Params, hf_names};
use checkpoint::{Checkpoint, scale_name};

const CONFIG: &str = "config.json";
const BLOCKS: &str = "model.layers.";
const EMBED: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
const VALUE_HEAD: &str = "score.weight";

/// A model as it came from a directory.
#[derive(Clone, Debug)]
pub struct LoadedModel {
    /// The checked configuration; `dtype` is that of the stored embedding.
    pub config: ModelConfig,
    /// The weights in f32.
    pub params: Params<Vec<f32>>,
    /// Sampling defaults and stop tokens.
    pub generation: GenerationConfig,
    /// Tensors in the files that the model does not use, to be shown as a warning; none of them belongs to a
    /// block.
    pub unused_tensors: Vec<String>,
}

impl LoadedModel {
    /// What a user should know of a model from `dir`: the tensors that it does not use.
    pub fn warning(&self, dir: &Path) -> Option<String> {
        unused_warning(dir, &self.unused_tensors)
    }
}

/// Says which tensors a model does not use, if there are some.
fn unused_warning(dir: &Path, names: &[String]) -> Option<String> {
    const SHOWN: usize = 3;
    let count = names.len();
    let first = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    let text = |what: String| format!("{}: the model does not use {what}", dir.display());
    match count {
        0 => None,
        1 => Some(text(format!("the tensor {first}"))),
        2..=SHOWN => Some(text(format!("{count} tensors: {first}"))),
        _ => Some(text(format!("{count} tensors: {first} and {} more", count - SHOWN))),
    }
}

/// Loads a model directory: `config.json`, `generation_config.json` and the weights.
///
/// A `score.weight` makes it a critic: it is loaded as the value head, and an output head that the
/// files then leave out is not missed (it is treated as tied).
pub fn load(dir: &Path) -> Result<LoadedModel, HfError> {
    let OpenModel { config, generation, unused_tensors, checkpoint, layout } = open(dir)?;
    check_memory(dir, config.param_count())?;
    let params = layout.try_map(|leaf| checkpoint.read_leaf(&leaf))?;
    Ok(LoadedModel { config, params, generation, unused_tensors })
}

/// [`load`] that leaves the weights where they are. All are there with their shapes; whether their numbers
/// are finite is seen when they are read, leaf by leaf.
pub fn open(dir: &Path) -> Result<OpenModel, HfError> {
    let file = dir.join(CONFIG);
    if peft::is_adapter(dir) && !file.exists() {
        return Err(peft::instead_of_model(dir));
    }
    let config = ModelConfig::read(&file)?;
    let generation = GenerationConfig::load(dir, &config)?;
    open_weights(dir, config, generation)
}

/// [`open`] for other weights of a model that is known: a directory that has no `config.json`, as trainers
/// write it for an engine, has that model's.
pub fn open_update(dir: &Path, known: &ModelConfig) -> Result<OpenModel, HfError> {
    match dir.join(CONFIG).exists() {
        true => open(dir),
        false => open_weights(dir, known.clone(), GenerationConfig::from_model(known)),
    }
}

fn open_weights(
    dir: &Path,
    mut config: ModelConfig,
    generation: GenerationConfig,
) -> Result<OpenModel, HfError> {
    let checkpoint = Checkpoint::open(dir)?;
    let value_head = checkpoint.contains(VALUE_HEAD);
    if value_head && !checkpoint.contains(HEAD) {
        config.tie_word_embeddings = true;
    }
    let layout = hf_names(&config, value_head);
    if let Some(dtype) = checkpoint.dtype(EMBED)? {
        config.dtype = dtype;
    }
    if config.tie_word_embeddings && checkpoint.contains(HEAD) {
        checkpoint.check_equal(EMBED, HEAD)?;
    }
    check_memory(dir, layout.iter().map(|leaf| leaf.info.len() as u64).max().unwrap_or(0))?;
    let unused_tensors = unused(&checkpoint, &layout, &config);
    check_blocks(dir, &config, &unused_tensors)?;
    layout.iter().try_for_each(|leaf| checkpoint.check_leaf(leaf))?;
    Ok(OpenModel { config, generation, unused_tensors, checkpoint, layout })
}

/// Refuses so many weights where they do not fit into memory, before any are read.
fn check_memory(dir: &Path, numbers: u64) -> Result<(), HfError> {
    let need = numbers.saturating_mul(4);
    match qurl_files::available_memory() {
        Some(free) if need > free => Err(HfError::Memory { dir: dir.to_path_buf(), need, free }),
        _ => Ok(()),
    }
}

/// A block without some of its weights, or a model without some of its blocks, is another model: refused.
fn check_blocks(dir: &Path, config: &ModelConfig, unused: &[String]) -> Result<(), HfError> {
    let of_block = |name: &String| name.strip_prefix(BLOCKS)?.split('.').next()?.parse::<usize>().ok();
    let mut blocks = unused.iter().filter_map(|name| Some((of_block(name)?, name)));
    let Some((block, tensor)) = blocks.next() else { return Ok(()) };
    let (key, value) = match block < config.num_layers {
        true => ("model_type", config.family.model_type().to_string()),
        false => ("num_hidden_layers", config.num_layers.to_string()),
    };
    let (dir, tensor, more) = (dir.to_path_buf(), tensor.clone(), blocks.count());
    Err(HfError::UnusedInBlock { dir, key, value, tensor, more })
}

/// Names in the files that no leaf asks for, without the buffers that old versions stored.
fn unused(checkpoint: &Checkpoint, layout: &Params<LeafLayout>, config: &ModelConfig) -> Vec<String> {
    let used: std::collections::HashSet<&str> =
        layout.iter().flat_map(|leaf| leaf.tensors.iter().map(|tensor| tensor.name.as_str())).collect();
    let quantized = used.iter().filter(|name| checkpoint.is_quantized(name));
    let scales: std::collections::HashSet<String> = quantized.map(|name| scale_name(name)).collect();
    checkpoint
        .names()
        .filter(|name| !used.contains(name))
        .filter(|name| !name.ends_with("rotary_emb.inv_freq"))
        .filter(|name| !scales.contains(*name))
        .filter(|name| !(config.tie_word_embeddings && *name == HEAD))
        .map(str::to_string)
        .collect()
}
