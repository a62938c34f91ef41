//! A model as compressed-tensors, the layout in which vLLM and others read quantized checkpoints.
//!
//! Linear layers of the blocks become an 8-bit `weight` and a `weight_scale` of shape `[out, 1]`; activations
//! are quantized per token by the engine that loads them (`dynamic`). Everything else, the head included,
//! keeps the number format of the model. These are pure functions: names, shapes and bytes here, files
//! elsewhere.

use qurl_kernels::Format;
use qurl_model::{Dtype, ModelConfig, Params, params};
use serde_json::{Value, json};

use crate::error::QuantError;
use crate::reference;
use crate::uaq::check_layout;

/// Number format of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredDtype {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Signed bytes.
    I8,
    /// E4M3.
    F8E4m3,
}

impl StoredDtype {
    /// The name in the header of a safetensors file.
    pub fn name(self) -> &'static str {
        match self {
            StoredDtype::F32 => "F32",
            StoredDtype::Bf16 => "BF16",
            StoredDtype::F16 => "F16",
            StoredDtype::I8 => "I8",
            StoredDtype::F8E4m3 => "F8_E4M3",
        }
    }
}

/// A tensor as it is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredTensor {
    /// Such as `model.layers.0.self_attn.q_proj.weight_scale`.
    pub name: String,
    /// Number format.
    pub dtype: StoredDtype,
    /// Shape.
    pub shape: Vec<usize>,
    /// Little-endian values, row-major.
    pub bytes: Vec<u8>,
}

/// Formats that can be exported.
const EXPORTED: &str = "int8, fp8";

fn refuse(format: Format) -> QuantError {
    QuantError::Format {
        format,
        what: "written as compressed-tensors".to_string(),
        expected: EXPORTED.to_string(),
    }
}

/// The `quantization_config` of `config.json`.
pub fn quantization_config(format: Format) -> Result<Value, QuantError> {
    let (kind, layout) = match format {
        Format::Int8 => ("int", "int-quantized"),
        Format::Fp8 => ("float", "float-quantized"),
        _ => return Err(refuse(format)),
    };
    Ok(json!({
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": layout,
                "weights": {
                    "num_bits": 8, "type": kind, "strategy": "channel", "symmetric": true, "dynamic": false,
                    "group_size": null, "block_structure": null, "actorder": null, "observer": "minmax",
                    "observer_kwargs": {}
                },
                "input_activations": {
                    "num_bits": 8, "type": kind, "strategy": "token", "symmetric": true, "dynamic": true,
                    "group_size": null, "block_structure": null, "actorder": null, "observer": null,
                    "observer_kwargs": {}
                },
                "output_activations": null
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": null,
        "global_compression_ratio": null
    }))
}

/// All tensors of a model in the order of its parameters, calling `f` for each; the first error stops.
pub fn for_each_tensor<E: From<QuantError>>(
    weights: &Params<Vec<f32>>,
    config: &ModelConfig,
    format: Format,
    mut f: impl FnMut(StoredTensor) -> Result<(), E>,
) -> Result<(), E> {
    let code_dtype = match format {
        Format::Int8 => StoredDtype::I8,
        Format::Fp8 => StoredDtype::F8E4m3,
        _ => return Err(refuse(format).into()),
    };
    check_layout(weights, config)?;
    for (leaf, values) in
        params::hf_names(config, weights.value_head.is_some()).into_iter().zip(weights.iter())
    {
        for tensor in leaf.tensors {
            let part = &values[tensor.offset..tensor.offset + tensor.len()];
            if !leaf.info.kind.is_block_linear() {
                let (dtype, bytes) = full(config.dtype, part);
                f(StoredTensor { name: tensor.name, dtype, shape: tensor.shape, bytes })?;
                continue;
            }
            let (rows, cols) = (tensor.len() / leaf.info.cols, leaf.info.cols);
            let quantized = reference::quantize(format, &tensor.name, part, rows, cols)?;
            let scale_name = format!("{}_scale", tensor.name);
            let scales = quantized.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
            f(StoredTensor {
                name: tensor.name,
                dtype: code_dtype,
                shape: tensor.shape,
                bytes: quantized.codes,
            })?;
            f(StoredTensor {
                name: scale_name,
                dtype: StoredDtype::F32,
                shape: vec![rows, 1],
                bytes: scales,
            })?;
        }
    }
    Ok(())
}

/// All tensors of a model at once.
pub fn tensors(
    weights: &Params<Vec<f32>>,
    config: &ModelConfig,
    format: Format,
) -> Result<Vec<StoredTensor>, QuantError> {
    let mut all = Vec::new();
    for_each_tensor(weights, config, format, |tensor| {
        all.push(tensor);
        Ok::<(), QuantError>(())
    })?;
    Ok(all)
}

/// Unquantized values in the number format of the model.
fn full(dtype: Dtype, values: &[f32]) -> (StoredDtype, Vec<u8>) {
    match dtype {
        Dtype::F32 => (StoredDtype::F32, values.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Dtype::Bf16 => {
            let bytes = values.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect();
            (StoredDtype::Bf16, bytes)
        }
        Dtype::F16 => {
            let bytes = values.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect();
            (StoredDtype::F16, bytes)
        }
    }
}
