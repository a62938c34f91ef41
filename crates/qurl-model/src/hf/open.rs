//! A model directory whose weights are read when they are wanted: a frozen base of many billions of weights
//! is packed leaf by leaf and never is on the host in full.

use std::path::Path;

use super::checkpoint::Checkpoint;
use super::error::HfError;
use crate::config::ModelConfig;
use crate::generation::GenerationConfig;
use crate::params::{LeafLayout, Params};

/// A model directory with its weight files mapped.
pub struct OpenModel {
    /// The checked configuration; `dtype` is that of the stored embedding.
    pub config: ModelConfig,
    /// Sampling defaults and stop tokens.
    pub generation: GenerationConfig,
    /// Tensors in the files that the model does not use; none of them belongs to a block.
    pub unused_tensors: Vec<String>,
    pub(super) checkpoint: Checkpoint,
    pub(super) layout: Params<LeafLayout>,
}

impl OpenModel {
    /// Whether it has a value head.
    pub fn has_value_head(&self) -> bool {
        self.layout.value_head.is_some()
    }

    /// How many leaves it has.
    pub fn leaves(&self) -> usize {
        self.layout.iter().len()
    }

    /// The numbers of a leaf, by its number in the order of [`Params`].
    ///
    /// # Panics
    /// If there is no such leaf.
    pub fn leaf(&self, index: usize) -> Result<Vec<f32>, HfError> {
        let leaf = self.layout.iter().nth(index);
        let leaf = leaf.unwrap_or_else(|| panic!("no leaf {index}"));
        self.checkpoint.read_leaf(leaf)
    }

    /// Names of the stored tensors, with a number that tells the first numbers of each from others.
    pub fn stored(&self) -> Vec<(&str, u64)> {
        self.checkpoint.names().map(|name| (name, self.checkpoint.fingerprint(name))).collect()
    }

    /// What a user should know of a model from `dir`: the tensors that it does not use.
    pub fn warning(&self, dir: &Path) -> Option<String> {
        super::unused_warning(dir, &self.unused_tensors)
    }
}
