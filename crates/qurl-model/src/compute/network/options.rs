//! How a network is packed.

use crate::config::ModelConfig;
use crate::lora::Lora;
use qurl_kernels::{Format, KvFormat};

/// How a network is packed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NetworkOptions {
    /// Format of the blocks' linear layers.
    pub format: Format,
    /// Format of the output head.
    pub head_format: Format,
    /// Number format of keys and values.
    pub kv_format: KvFormat,
    /// Whether gradients will be computed: of the adapters alone where there are some.
    pub trained: bool,
    /// Whether the blocks' weights are packed for the forward pass alone, and unpacked layer by layer where a
    /// backward pass needs them: half the memory of packed weights, and the same bits.
    pub pack_once: bool,
    /// Longest sequence.
    pub positions: usize,
    /// Adapters beside the blocks' linear layers, which then are frozen like all else.
    pub lora: Option<Lora>,
}

impl NetworkOptions {
    /// Inference in one format of the blocks; the head stays in full (f32 or bf16).
    pub fn inference(config: &ModelConfig, format: Format) -> Self {
        let head_format = if format == Format::F32 { Format::F32 } else { Format::Bf16 };
        let kv_format = if format == Format::F32 { KvFormat::F32 } else { KvFormat::Bf16 };
        NetworkOptions {
            format,
            head_format,
            kv_format,
            trained: false,
            pack_once: false,
            positions: config.max_position_embeddings,
            lora: None,
        }
    }

    /// The same with the output head in the format of the blocks.
    pub fn quantize_head(self) -> Self {
        NetworkOptions { head_format: self.format, ..self }
    }

    /// The format of adapters: in full beside a base in full, else bf16.
    pub fn adapter_format(&self) -> Format {
        if self.format == Format::F32 { Format::F32 } else { Format::Bf16 }
    }

    /// Whether the blocks' linear layers are packed for the gradient of their input, too.
    pub(super) fn packs_twice(&self) -> bool {
        self.trained && !self.pack_once && self.lora.is_none()
    }

    /// Whether there is a second head for gradients: the one that runs is quantized and frozen.
    pub(super) fn packs_head_beside(&self) -> bool {
        self.trained && self.lora.is_some() && self.head_format.is_quantized()
    }

    /// Training in f32 or bf16.
    pub fn training(config: &ModelConfig, format: Format) -> Self {
        NetworkOptions { trained: true, ..Self::inference(config, format) }
    }
}
