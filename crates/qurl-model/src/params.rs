//! The weights of a model as one plain tree, generic over what sits at its leaves.
//!
//! The same tree holds host vectors, device buffers, packed weights, gradients, shapes or names. Projections
//! that read the same input are fused into one leaf (query, key, value; gate, up), because that is how they
//! are computed; `layout` knows which tensors of a Hugging Face directory make up each leaf. The fields of a
//! tree are listed once, below; all walks visit them in that order.

mod init;
mod layout;
mod tree;

pub use init::{init, init_leaf};
pub use layout::{HfTensor, LeafLayout, adapter_names, hf_names, shapes};

use tree::tree;

tree! {
    /// The weights of a dense MLP with SwiGLU.
    pub struct DenseMlp {
        /// [2 f, d]: rows of the gate, then of the up projection.
        gate_up: leaf(T),
        /// [d, f]: down projection.
        down: leaf(T),
    }
}

tree! {
    /// The weights of one transformer block.
    pub struct LayerParams {
        /// [d]: RMSNorm before attention.
        attn_norm: leaf(T),
        /// [(H + 2 KV) hd, d]: rows of the queries, then keys, then values.
        qkv: leaf(T),
        /// [(H + 2 KV) hd]: bias in the same order (Qwen2).
        qkv_bias: optional(Option<T>),
        /// [hd]: RMSNorm of every query head (Qwen3).
        q_norm: optional(Option<T>),
        /// [hd]: RMSNorm of every key head (Qwen3).
        k_norm: optional(Option<T>),
        /// [d, H hd]: output projection of attention.
        o: leaf(T),
        /// [d]: RMSNorm before the MLP.
        mlp_norm: leaf(T),
        /// The MLP.
        mlp: mlp(MlpParams<T>),
    }
}

tree! {
    /// A low-rank update of a fused linear layer ([`crate::lora`]), of r rows in each of its adapted modules.
    pub struct Adapter {
        /// [modules r, inputs]: of all modules, one after the other.
        a: leaf(T),
        /// [outputs of these modules, r]: stacked by outputs.
        b: leaf(T),
    }
}

tree! {
    /// The adapters of one transformer block.
    pub struct LayerAdapters {
        /// Queries, keys and values.
        qkv: adapter(Option<Adapter<T>>),
        /// Output projection of attention.
        o: adapter(Option<Adapter<T>>),
        /// Gate and up projections.
        gate_up: adapter(Option<Adapter<T>>),
        /// Down projection.
        down: adapter(Option<Adapter<T>>),
    }
}

tree! {
    /// The weights of a model.
    pub struct Params {
        /// [V, d]: token embedding.
        embed: leaf(T),
        /// The transformer blocks, first to last.
        layers: layers(Vec<LayerParams<T>>),
        /// [d]: RMSNorm before the head.
        final_norm: leaf(T),
        /// [V, d]: output head; `None` where it is the embedding.
        head: optional(Option<T>),
        /// [1, d]: scalar value head of a critic.
        value_head: optional(Option<T>),
        /// Adapters beside frozen weights, a block after the other; none where all weights are trained.
        adapters: adapters(Vec<LayerAdapters<T>>),
    }
}

/// The weights of a block's MLP: layers of a model may be of different kinds.
#[derive(Clone, Debug, PartialEq)]
pub enum MlpParams<T> {
    /// All weights work on all tokens.
    Dense(DenseMlp<T>),
}

impl<T> MlpParams<T> {
    fn try_map<U, E>(self, f: &mut impl FnMut(T) -> Result<U, E>) -> Result<MlpParams<U>, E> {
        match self {
            MlpParams::Dense(mlp) => Ok(MlpParams::Dense(mlp.map_leaves(f)?)),
        }
    }

    fn as_ref(&self) -> MlpParams<&T> {
        match self {
            MlpParams::Dense(mlp) => MlpParams::Dense(mlp.as_ref()),
        }
    }

    fn as_mut(&mut self) -> MlpParams<&mut T> {
        match self {
            MlpParams::Dense(mlp) => MlpParams::Dense(mlp.as_mut()),
        }
    }

    fn layout(&self, to: &mut Vec<&'static str>) {
        match self {
            MlpParams::Dense(mlp) => mlp.layout(to),
        }
    }
}

/// What a leaf is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParamKind {
    /// Token embedding.
    Embed,
    /// RMSNorm before attention.
    AttnNorm,
    /// Fused query, key, value projection.
    Qkv,
    /// Bias of the fused projection.
    QkvBias,
    /// RMSNorm of query heads.
    QNorm,
    /// RMSNorm of key heads.
    KNorm,
    /// Output projection of attention.
    AttnOut,
    /// RMSNorm before the MLP.
    MlpNorm,
    /// Fused gate and up projection.
    GateUp,
    /// Down projection of the MLP.
    Down,
    /// RMSNorm before the head.
    FinalNorm,
    /// Output head.
    Head,
    /// Scalar value head.
    ValueHead,
    /// First matrix of an adapter.
    LoraA,
    /// Second matrix of an adapter.
    LoraB,
}

impl ParamKind {
    /// One of the four linear layers of a block: what a quantized rollout quantizes.
    pub fn is_block_linear(self) -> bool {
        matches!(self, ParamKind::Qkv | ParamKind::AttnOut | ParamKind::GateUp | ParamKind::Down)
    }

    /// An RMSNorm weight: starts at one.
    pub fn is_norm(self) -> bool {
        matches!(
            self,
            ParamKind::AttnNorm
                | ParamKind::QNorm
                | ParamKind::KNorm
                | ParamKind::MlpNorm
                | ParamKind::FinalNorm
        )
    }

    /// Whether weight decay applies by convention: matrices yes, norms and biases no.
    pub fn decays(self) -> bool {
        !self.is_norm() && self != ParamKind::QkvBias
    }
}

/// Name and shape of a leaf. Vectors have one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamInfo {
    /// Fused name such as `layers.0.qkv`.
    pub name: String,
    /// Rows; 1 for vectors.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// What the leaf is for.
    pub kind: ParamKind,
    /// The block it belongs to, if any.
    pub layer: Option<usize>,
}

impl ParamInfo {
    /// Numbers in the leaf.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// Whether the leaf holds no numbers.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Two trees that should have the same leaves do not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("parameter trees differ: {what}")]
pub struct LayoutMismatch {
    /// The first difference.
    pub what: String,
}

impl<T> LayerParams<T> {
    /// A block of the same layout with `f` applied to every leaf in order; stops at the first error.
    pub fn try_map<U, E>(self, f: &mut impl FnMut(T) -> Result<U, E>) -> Result<LayerParams<U>, E> {
        self.map_leaves(f)
    }

    /// All leaves in order.
    pub fn into_leaves(self) -> Vec<T> {
        let mut leaves = Vec::new();
        let Ok(_) = self.map_leaves(&mut |leaf| {
            leaves.push(leaf);
            Ok::<(), std::convert::Infallible>(())
        });
        leaves
    }
}

impl<T> LayerAdapters<T> {
    /// The same adapters with `f` applied to every leaf in order; stops at the first error.
    pub fn try_map<U, E>(self, f: &mut impl FnMut(T) -> Result<U, E>) -> Result<LayerAdapters<U>, E> {
        self.map_leaves(f)
    }

    /// All leaves in order.
    pub fn into_leaves(self) -> Vec<T> {
        let mut leaves = Vec::new();
        let Ok(_) = self.map_leaves(&mut |leaf| {
            leaves.push(leaf);
            Ok::<(), std::convert::Infallible>(())
        });
        leaves
    }
}

impl<T> Params<T> {
    /// A tree of the same layout with `f` applied to every leaf in order; stops at the first error.
    pub fn try_map<U, E>(self, mut f: impl FnMut(T) -> Result<U, E>) -> Result<Params<U>, E> {
        self.map_leaves(&mut f)
    }

    /// A tree of the same layout with `f` applied to every leaf in order.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Params<U> {
        let Ok(mapped) = self.try_map(|leaf| Ok::<U, std::convert::Infallible>(f(leaf)));
        mapped
    }

    /// All leaves in order.
    pub fn into_leaves(self) -> Vec<T> {
        let mut leaves = Vec::new();
        self.map(|leaf| leaves.push(leaf));
        leaves
    }

    /// Borrowed leaves in order.
    pub fn iter(&self) -> std::vec::IntoIter<&T> {
        self.as_ref().into_leaves().into_iter()
    }

    /// Mutably borrowed leaves in order.
    pub fn iter_mut(&mut self) -> std::vec::IntoIter<&mut T> {
        self.as_mut().into_leaves().into_iter()
    }

    /// Pairs up the leaves of two trees of the same layout.
    pub fn zip<U>(self, other: Params<U>) -> Result<Params<(T, U)>, LayoutMismatch> {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        self.layout(&mut ours);
        other.layout(&mut theirs);
        if let Some(what) = first_difference(&ours, &theirs) {
            return Err(LayoutMismatch { what });
        }
        let mut leaves = other.into_leaves().into_iter();
        self.try_map(|leaf| match leaves.next() {
            Some(theirs) => Ok((leaf, theirs)),
            None => Err(LayoutMismatch { what: "one tree has fewer leaves".to_string() }),
        })
    }
}

/// What two lists of fields say differently.
fn first_difference(a: &[&'static str], b: &[&'static str]) -> Option<String> {
    let layers = |fields: &[&'static str]| fields.iter().filter(|field| **field == "attn_norm").count();
    if layers(a) != layers(b) {
        return Some(format!("{} layers against {}", layers(a), layers(b)));
    }
    let at = a.iter().zip(b).position(|(x, y)| x != y);
    let at = at.or_else(|| (a.len() != b.len()).then_some(a.len().min(b.len())))?;
    let name = |fields: &[&'static str]| fields.get(at).map_or("nothing", |field| field);
    let place = match layers(&a[..at]) {
        0 => "at the beginning".to_string(),
        after => format!("in or after layer {}", after - 1),
    };
    Some(format!("{} against {} {place}", name(a), name(b)))
}

impl<T> IntoIterator for Params<T> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        self.into_leaves().into_iter()
    }
}
