//! Names and shapes of the leaves, and which tensors of a Hugging Face directory each is made of.

use super::{Adapter, DenseMlp, LayerAdapters, LayerParams, MlpParams, ParamInfo, ParamKind, Params};
use crate::config::ModelConfig;
use crate::lora::{Lora, Module};

/// A tensor of a Hugging Face directory and the rows of the fused leaf that it fills.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfTensor {
    /// Name in the file, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Shape in the file: `[rows, cols]` or, for vectors, `[n]`.
    pub shape: Vec<usize>,
    /// First element of the leaf that it fills (row-major, hence whole rows).
    pub offset: usize,
}

impl HfTensor {
    /// Numbers in the tensor.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the tensor holds no numbers.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A leaf and its parts on disk, in the order of their rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeafLayout {
    /// Name and shape of the fused leaf.
    pub info: ParamInfo,
    /// The tensors it consists of.
    pub tensors: Vec<HfTensor>,
}

/// The tree of names and shapes of a model.
pub fn shapes(config: &ModelConfig, value_head: bool) -> Params<ParamInfo> {
    hf_names(config, value_head).map(|leaf| leaf.info)
}

/// The tree of leaves with the tensors that make up each.
pub fn hf_names(config: &ModelConfig, value_head: bool) -> Params<LeafLayout> {
    let (v, d) = (config.vocab_size, config.hidden_size);
    let whole = |kind, name: &str, hf: &str, shape: &[usize]| {
        leaf(kind, None, name.to_string(), &[(hf.to_string(), shape)])
    };
    Params {
        embed: whole(ParamKind::Embed, "embed", "model.embed_tokens.weight", &[v, d]),
        layers: (0..config.num_layers).map(|index| layer(config, index)).collect(),
        final_norm: whole(ParamKind::FinalNorm, "final_norm", "model.norm.weight", &[d]),
        head: (!config.tie_word_embeddings)
            .then(|| whole(ParamKind::Head, "head", "lm_head.weight", &[v, d])),
        value_head: value_head.then(|| whole(ParamKind::ValueHead, "value_head", "score.weight", &[1, d])),
        adapters: Vec::new(),
    }
}

/// The adapters of a model with the tensors of a PEFT directory that make up each.
pub fn adapter_names(config: &ModelConfig, lora: &Lora) -> Vec<LayerAdapters<LeafLayout>> {
    (0..config.num_layers).map(|index| layer_adapters(config, lora, index)).collect()
}

fn layer_adapters(config: &ModelConfig, lora: &Lora, index: usize) -> LayerAdapters<LeafLayout> {
    let adapter = |of: ParamKind, name: &str| {
        let (modules, inputs) = Module::of_leaf(config, of);
        let modules: Vec<_> = modules.into_iter().filter(|(module, _)| lora.targets.has(*module)).collect();
        let part = |module: Module, matrix: &str| {
            let (parent, module) = (module.parent(), module.name());
            format!("base_model.model.model.layers.{index}.{parent}.{module}.lora_{matrix}.weight")
        };
        let (a, b): (Vec<[usize; 2]>, Vec<[usize; 2]>) =
            modules.iter().map(|&(_, outputs)| ([lora.rank, inputs], [outputs, lora.rank])).unzip();
        let stacked = |kind, matrix: &str, shapes: &[[usize; 2]]| {
            let parts: Vec<(String, &[usize])> = modules
                .iter()
                .zip(shapes)
                .map(|((module, _), shape)| (part(*module, matrix), shape.as_slice()))
                .collect();
            leaf(kind, Some(index), format!("layers.{index}.{name}.lora_{matrix}"), &parts)
        };
        (!modules.is_empty())
            .then(|| Adapter { a: stacked(ParamKind::LoraA, "A", &a), b: stacked(ParamKind::LoraB, "B", &b) })
    };
    LayerAdapters {
        qkv: adapter(ParamKind::Qkv, "qkv"),
        o: adapter(ParamKind::AttnOut, "o"),
        gate_up: adapter(ParamKind::GateUp, "gate_up"),
        down: adapter(ParamKind::Down, "down"),
    }
}

fn layer(config: &ModelConfig, index: usize) -> LayerParams<LeafLayout> {
    let (d, f, hd) = (config.hidden_size, config.intermediate_size, config.head_dim);
    let (q, kv) = (config.q_dim(), config.kv_dim());
    let fused = |kind, name: &str, parts: &[(&str, &[usize])]| {
        let parts: Vec<(String, &[usize])> =
            parts.iter().map(|&(hf, shape)| (format!("model.layers.{index}.{hf}"), shape)).collect();
        leaf(kind, Some(index), format!("layers.{index}.{name}"), &parts)
    };
    LayerParams {
        attn_norm: fused(ParamKind::AttnNorm, "attn_norm", &[("input_layernorm.weight", &[d])]),
        qkv: fused(
            ParamKind::Qkv,
            "qkv",
            &[
                ("self_attn.q_proj.weight", &[q, d]),
                ("self_attn.k_proj.weight", &[kv, d]),
                ("self_attn.v_proj.weight", &[kv, d]),
            ],
        ),
        qkv_bias: config.qkv_bias.then(|| {
            fused(
                ParamKind::QkvBias,
                "qkv_bias",
                &[
                    ("self_attn.q_proj.bias", &[q]),
                    ("self_attn.k_proj.bias", &[kv]),
                    ("self_attn.v_proj.bias", &[kv]),
                ],
            )
        }),
        q_norm: config
            .qk_norm
            .then(|| fused(ParamKind::QNorm, "q_norm", &[("self_attn.q_norm.weight", &[hd])])),
        k_norm: config
            .qk_norm
            .then(|| fused(ParamKind::KNorm, "k_norm", &[("self_attn.k_norm.weight", &[hd])])),
        o: fused(ParamKind::AttnOut, "o", &[("self_attn.o_proj.weight", &[d, q])]),
        mlp_norm: fused(ParamKind::MlpNorm, "mlp_norm", &[("post_attention_layernorm.weight", &[d])]),
        mlp: MlpParams::Dense(DenseMlp {
            gate_up: fused(
                ParamKind::GateUp,
                "gate_up",
                &[("mlp.gate_proj.weight", &[f, d]), ("mlp.up_proj.weight", &[f, d])],
            ),
            down: fused(ParamKind::Down, "down", &[("mlp.down_proj.weight", &[d, f])]),
        }),
    }
}

/// Stacks the parts: matrices by rows, vectors end to end.
fn leaf(kind: ParamKind, layer: Option<usize>, name: String, parts: &[(String, &[usize])]) -> LeafLayout {
    let mut tensors = Vec::with_capacity(parts.len());
    let (mut rows, mut cols, mut offset) = (0, 0, 0);
    for (hf, shape) in parts {
        match **shape {
            [r, c] => {
                rows += r;
                cols = c;
            }
            _ => {
                rows = 1;
                cols += shape.iter().product::<usize>();
            }
        }
        tensors.push(HfTensor { name: hf.clone(), shape: shape.to_vec(), offset });
        offset += shape.iter().product::<usize>();
    }
    LeafLayout { info: ParamInfo { name, rows, cols, kind, layer }, tensors }
}
