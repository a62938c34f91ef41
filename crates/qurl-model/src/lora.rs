//! LoRA: which linear layers have a low-rank adapter, and how large it is.
//!
//! Beside the frozen weights W of a module stand A `[rank, inputs]` and B `[outputs, rank]`, and what is
//! computed is `x W^T + scale (x A^T) B^T`. A begins as PEFT begins it (uniform, as wide as a fresh linear
//! layer) and B at zero, so that training starts from the base. Projections that are fused into one leaf
//! here (query, key, value; gate, up) share an adapter: their A stacked, their B stacked by outputs in the
//! leaf that is trained and block-diagonal in the GEMM ([`Lora::blocks`]).

use crate::config::ModelConfig;
use crate::params::{
    Adapter, LayerAdapters, LeafLayout, ParamInfo, ParamKind, Params, adapter_names, shapes,
};
use crate::rng::{CounterRng, text_key};
use qurl_kernels::types::{AdapterBlock, AdapterBlocks};
use std::fmt;

/// A linear layer of a block, by its name in a Hugging Face model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Module {
    /// Queries.
    QProj,
    /// Keys.
    KProj,
    /// Values.
    VProj,
    /// Output projection of attention.
    OProj,
    /// Gate projection of the MLP.
    GateProj,
    /// Up projection of the MLP.
    UpProj,
    /// Down projection of the MLP.
    DownProj,
}

impl Module {
    /// All of them, in the order of a block.
    pub const ALL: [Module; 7] = [
        Module::QProj,
        Module::KProj,
        Module::VProj,
        Module::OProj,
        Module::GateProj,
        Module::UpProj,
        Module::DownProj,
    ];

    /// The name, as PEFT's `target_modules` has it.
    pub fn name(self) -> &'static str {
        match self {
            Module::QProj => "q_proj",
            Module::KProj => "k_proj",
            Module::VProj => "v_proj",
            Module::OProj => "o_proj",
            Module::GateProj => "gate_proj",
            Module::UpProj => "up_proj",
            Module::DownProj => "down_proj",
        }
    }

    /// The one with this name.
    pub fn of_name(name: &str) -> Option<Module> {
        Module::ALL.into_iter().find(|module| module.name() == name)
    }

    /// The part of the block it is in, as tensors are named after it.
    pub(crate) fn parent(self) -> &'static str {
        match self {
            Module::QProj | Module::KProj | Module::VProj | Module::OProj => "self_attn",
            Module::GateProj | Module::UpProj | Module::DownProj => "mlp",
        }
    }

    /// The modules of a fused leaf, in the order of its rows, with their outputs; and its inputs.
    pub(crate) fn of_leaf(config: &ModelConfig, leaf: ParamKind) -> (Vec<(Module, usize)>, usize) {
        let (d, f, q, kv) = (config.hidden_size, config.intermediate_size, config.q_dim(), config.kv_dim());
        match leaf {
            ParamKind::Qkv => (vec![(Module::QProj, q), (Module::KProj, kv), (Module::VProj, kv)], d),
            ParamKind::AttnOut => (vec![(Module::OProj, d)], q),
            ParamKind::GateUp => (vec![(Module::GateProj, f), (Module::UpProj, f)], d),
            ParamKind::Down => (vec![(Module::DownProj, d)], f),
            _ => (Vec::new(), 0),
        }
    }
}

/// Linear layers of all blocks that have an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Modules(u8);

impl Modules {
    /// All linear layers.
    pub const ALL: Modules = Modules(0x7f);

    /// These.
    pub fn of(modules: impl IntoIterator<Item = Module>) -> Modules {
        Modules(modules.into_iter().fold(0, |bits, module| bits | 1 << module as u8))
    }

    /// Whether it is one of them.
    pub fn has(self, module: Module) -> bool {
        self.0 & (1 << module as u8) != 0
    }

    /// They, in the order of a block.
    pub fn iter(self) -> impl Iterator<Item = Module> {
        Module::ALL.into_iter().filter(move |module| self.has(*module))
    }
}

impl fmt::Display for Modules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.iter().map(Module::name).collect();
        f.write_str(&names.join(", "))
    }
}

/// The adapters of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lora {
    /// Rows of A and columns of B of a module.
    pub rank: usize,
    /// What the scale is made of.
    pub alpha: f64,
    /// Scale by alpha / sqrt(rank) (rsLoRA) instead of alpha / rank.
    pub rslora: bool,
    /// Which linear layers.
    pub targets: Modules,
}

impl Lora {
    /// What the update is multiplied by.
    pub fn scale(&self) -> f32 {
        let rank = self.rank as f64;
        (self.alpha / if self.rslora { rank.sqrt() } else { rank }) as f32
    }

    /// The modules of a fused leaf that have an adapter; `None` where none of them has.
    pub fn blocks(&self, config: &ModelConfig, leaf: ParamKind) -> Option<AdapterBlocks> {
        let (mut first, mut blocks) = (0, Vec::new());
        for (module, outputs) in Module::of_leaf(config, leaf).0 {
            if self.targets.has(module) {
                blocks.push(AdapterBlock { first, outputs, at: blocks.len() * self.rank });
            }
            first += outputs;
        }
        let width = blocks.len() * self.rank;
        (width > 0).then(|| AdapterBlocks { blocks, rank: self.rank, width, scale: self.scale() })
    }

    /// What is trained, as a tree: the leaves of the base have no numbers.
    pub fn shapes(&self, config: &ModelConfig) -> Params<ParamInfo> {
        self.names(config).map(|leaf| leaf.info)
    }

    /// The same with the tensors of a PEFT directory.
    pub fn names(&self, config: &ModelConfig) -> Params<LeafLayout> {
        let frozen =
            |info: ParamInfo| LeafLayout { info: ParamInfo { rows: 0, ..info }, tensors: Vec::new() };
        Params { adapters: adapter_names(config, self), ..shapes(config, false).map(frozen) }
    }

    /// Fresh adapters, the same on every run with the same seed: they change nothing yet.
    pub fn init(&self, config: &ModelConfig, seed: u64) -> Params<Vec<f32>> {
        self.shapes(config).map(|info| match info.kind {
            ParamKind::LoraA => {
                let random = CounterRng::new(&[seed, text_key("init"), text_key(&info.name)]);
                let bound = 1.0 / (info.cols as f32).sqrt();
                (0..info.len() as u64).map(|i| bound * (2.0 * random.uniform_f32_at(i) - 1.0)).collect()
            }
            _ => vec![0.0; info.len()],
        })
    }

    /// Numbers that are trained.
    pub fn param_count(&self, config: &ModelConfig) -> u64 {
        self.shapes(config).iter().map(|info| info.len() as u64).sum()
    }

    /// Adds the update of these adapters to whole weights: the model that they make, without adapters.
    ///
    /// # Panics
    /// If the adapters are those of another model.
    pub fn merge(&self, config: &ModelConfig, adapters: &Params<Vec<f32>>, weights: &mut Params<Vec<f32>>) {
        for (layer, low) in weights.layers.iter_mut().zip(&adapters.adapters) {
            let crate::params::MlpParams::Dense(mlp) = &mut layer.mlp;
            let leaves = [
                (ParamKind::Qkv, &mut layer.qkv, &low.qkv),
                (ParamKind::AttnOut, &mut layer.o, &low.o),
                (ParamKind::GateUp, &mut mlp.gate_up, &low.gate_up),
                (ParamKind::Down, &mut mlp.down, &low.down),
            ];
            for (kind, w, low) in leaves {
                if let (Some(blocks), Some(low)) = (self.blocks(config, kind), low) {
                    merge_leaf(&blocks, low, w);
                }
            }
        }
    }
}

impl fmt::Display for Lora {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lora { rank, alpha, rslora, targets } = self;
        write!(f, "rank {rank}, alpha {alpha}, rslora {rslora} and the modules {targets}")
    }
}

/// `w += scale B A`, summed in f64.
fn merge_leaf(blocks: &AdapterBlocks, Adapter { a, b }: &Adapter<Vec<f32>>, w: &mut [f32]) {
    let (rank, k) = (blocks.rank, a.len() / blocks.width);
    let mut sums = vec![0.0f64; k];
    let mut stacked = b.chunks_exact(rank);
    for block in &blocks.blocks {
        for (w, b) in w.chunks_exact_mut(k).skip(block.first).take(block.outputs).zip(&mut stacked) {
            sums.fill(0.0);
            for (&b, a) in b.iter().zip(a.chunks_exact(k).skip(block.at)) {
                sums.iter_mut().zip(a).for_each(|(sum, &a)| *sum += f64::from(b) * f64::from(a));
            }
            let scaled = sums.iter().map(|sum| f64::from(blocks.scale) * sum);
            w.iter_mut().zip(scaled).for_each(|(w, low)| *w = (f64::from(*w) + low) as f32);
        }
    }
}

/// Blocks without adapters.
pub(crate) fn no_adapters<T>() -> LayerAdapters<T> {
    LayerAdapters { qkv: None, o: None, gate_up: None, down: None }
}
