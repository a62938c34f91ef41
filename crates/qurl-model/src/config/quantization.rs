//! Which quantized weights can be read: compressed-tensors of eight bits, as `qurl quantize` writes them and
//! as they are published for other engines.
//!
//! A linear layer is a `weight` of signed bytes or E4M3 and a `weight_scale` for each output channel (or one
//! for all). It is read as the numbers it stands for; activations are quantized by whoever computes, per
//! token. What was rounded stays rounded: in the same format the same quantized values come out again.

use super::ConfigError;
use crate::keys::Keys;

/// An error where `quantization_config` asks for something else.
pub(super) fn check(keys: &Keys) -> Result<(), ConfigError> {
    let Some(config) = keys.object("quantization_config", "quantization_config.")? else { return Ok(()) };
    if config.str("quant_method")? != Some("compressed-tensors") {
        return Err(
            config.unsupported("quant_method", "compressed-tensors, or weights stored as f32, bf16 or f16")
        );
    }
    let layouts = ["int-quantized", "float-quantized", "naive-quantized"];
    if !config.str("format")?.is_some_and(|layout| layouts.contains(&layout)) {
        return Err(config.unsupported("format", &layouts.join(", ")));
    }
    let Some(groups) = config.object("config_groups", "quantization_config.config_groups.")? else {
        return Err(config.missing("config_groups", "at least one group"));
    };
    for name in groups.map.keys() {
        let Some(group) = groups.object(name, "quantization_config.config_groups.*.")? else { continue };
        let Some(weights) = group.object("weights", "quantization_config.config_groups.*.weights.")? else {
            return Err(group.missing("weights", "their number format"));
        };
        let holds = [
            ("num_bits", weights.usize("num_bits")? == Some(8), "8"),
            ("type", matches!(weights.str("type")?, Some("int" | "float")), "int or float"),
            ("symmetric", weights.bool("symmetric")? != Some(false), "true"),
            ("strategy", matches!(weights.str("strategy")?, Some("channel" | "tensor")), "channel or tensor"),
        ];
        if let Some((key, _, supported)) = holds.into_iter().find(|(_, ok, _)| !ok) {
            return Err(weights.unsupported(key, supported));
        }
        let prefix = "quantization_config.config_groups.*.input_activations.";
        if let Some(activations) = group.object("input_activations", prefix)?
            && activations.bool("dynamic")? != Some(true)
        {
            return Err(activations.unsupported("dynamic", "true: scales of activations are found per token"));
        }
    }
    Ok(())
}
