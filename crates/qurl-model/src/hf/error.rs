//! What can be wrong with a model directory.

use std::path::PathBuf;

use crate::config::ConfigError;

/// Why a directory could not be read or written. Every message names the file.
#[derive(Debug, thiserror::Error)]
pub enum HfError {
    /// `config.json` or `generation_config.json` was not accepted.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The system refused to read or write.
    #[error("{}: cannot {action}: {source}", file.display())]
    Io {
        /// The file or directory.
        file: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The weights do not fit into memory.
    #[error(
        "{}: {} MiB of weights in f32, expected at most the {} MiB of memory that are free",
        dir.display(), need >> 20, free >> 20
    )]
    Memory {
        /// The directory.
        dir: PathBuf,
        /// Bytes that they take.
        need: u64,
        /// Bytes that can be had.
        free: u64,
    },
    /// No weight file in the directory.
    #[error("{}: no weights, expected model.safetensors or \
             model.safetensors.index.json{hint}", dir.display())]
    NoWeights {
        /// The directory.
        dir: PathBuf,
        /// What was found instead, if anything.
        hint: &'static str,
    },
    /// The index of a sharded model is malformed.
    #[error("{}: {found}, expected {expected}", file.display())]
    Index {
        /// The index file.
        file: PathBuf,
        /// What is there.
        found: String,
        /// What should be.
        expected: &'static str,
    },
    /// A file that the index names does not exist.
    #[error("{}: names the shard {shard}, which is not in the directory", index.display())]
    MissingShard {
        /// The index file.
        index: PathBuf,
        /// The shard's file name.
        shard: String,
    },
    /// A weight file is shorter or longer than its header says.
    #[error("{}: {found} bytes, expected {expected} (truncated or damaged)", file.display())]
    Length {
        /// The weight file.
        file: PathBuf,
        /// Bytes according to the header.
        expected: u64,
        /// Bytes in the file.
        found: u64,
    },
    /// The header of a weight file is not valid.
    #[error("{}: not a valid safetensors file: {reason}", file.display())]
    Header {
        /// The weight file.
        file: PathBuf,
        /// What the parser said.
        reason: String,
    },
    /// The model needs a tensor that no file has.
    #[error("{}: tensor {tensor} is missing, expected shape {expected:?}", file.display())]
    MissingTensor {
        /// The weight file that should hold it, or the directory.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape the configuration asks for.
        expected: Vec<usize>,
    },
    /// Two files hold the same tensor.
    #[error("tensor {tensor} is in {} and again in {}", first.display(), second.display())]
    Duplicate {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// A tensor does not have the shape that the configuration asks for.
    #[error("{}: tensor {tensor} has shape {found:?}, expected {expected:?}", file.display())]
    Shape {
        /// The weight file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape the configuration asks for.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor is stored in a format we do not read.
    #[error("{}: tensor {tensor} is stored as {found}, expected F32, BF16 or F16", file.display())]
    StoredAs {
        /// The weight file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The stored format.
        found: String,
    },
    /// A weight is NaN or infinite (or becomes so in the format it is written in).
    #[error("{}: tensor {tensor} has {value} at element {index}, expected finite {dtype} \
             weights", file.display())]
    NotFinite {
        /// The weight file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Index into the tensor, row-major.
        index: usize,
        /// The value.
        value: f32,
        /// The stored format.
        dtype: &'static str,
    },
    /// The files have weights of blocks that the configuration does not ask for.
    #[error(
        "{}: config.json has `{key}` = {value}, which does not use the tensor {tensor} and {more} more under \
         model.layers; expected a configuration that uses all of them",
        dir.display()
    )]
    UnusedInBlock {
        /// The directory.
        dir: PathBuf,
        /// The key that decides about it.
        key: &'static str,
        /// Its value.
        value: String,
        /// The first such tensor.
        tensor: String,
        /// How many others there are.
        more: usize,
    },
    /// `tie_word_embeddings` is true but the file has another head.
    #[error("{}: tensor {tensor} differs from {tied_to}, expected equal because config.json sets \
             tie_word_embeddings", file.display())]
    TiedHeadDiffers {
        /// The weight file.
        file: PathBuf,
        /// The head.
        tensor: String,
        /// The embedding.
        tied_to: String,
    },
    /// An adapter's directory asks for what is not computed, or does not hold what it promises.
    #[error("{}: {found}, expected {expected}", file.display())]
    Adapter {
        /// The file.
        file: PathBuf,
        /// What is there.
        found: String,
        /// What should be.
        expected: String,
    },
    /// The weights given for saving do not match the configuration.
    #[error("{}: cannot save parameter {name}: {found}, expected {expected}", dir.display())]
    Leaf {
        /// The directory being written.
        dir: PathBuf,
        /// The fused parameter.
        name: String,
        /// What was given.
        found: String,
        /// What the configuration asks for.
        expected: String,
    },
}
