//! How a model is packed for inference: the options that several commands share.

use qurl_kernels::Format;
use qurl_kernels::KvFormat;
use qurl_model::ModelConfig;
use qurl_model::compute::NetworkOptions;

/// Number formats of weights, head and cache.
#[derive(clap::Args)]
pub struct Packing {
    /// Number format to compute in: f32, bf16, int8, fp8, fp8-block, int4 or nvfp4
    #[arg(long, default_value_t = Format::F32)]
    format: Format,
    #[command(flatten)]
    extent: Extent,
}

/// What besides the blocks' linear layers is in few bits.
#[derive(clap::Args, Clone, Copy)]
pub struct Extent {
    /// Put the output head into the format, too
    #[arg(long)]
    quantize_head: bool,
    /// Number format of keys and values: f32, bf16, int8 or fp8; f32 or bf16 by the format of the weights if
    /// not given
    #[arg(long)]
    kv: Option<KvFormat>,
}

impl Packing {
    /// Options for the whole context of the model.
    pub fn options(&self, config: &ModelConfig) -> NetworkOptions {
        self.extent.options(config, self.format)
    }
}

impl Extent {
    /// Options for the whole context of the model with linear layers in this format.
    pub fn options(&self, config: &ModelConfig, format: Format) -> NetworkOptions {
        let mut options = NetworkOptions::inference(config, format);
        if self.quantize_head {
            options = options.quantize_head();
        }
        options.kv_format = self.kv.unwrap_or(options.kv_format);
        options
    }
}
