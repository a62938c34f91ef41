//! The weights of a model as one plain tree, generic over what sits at its leaves.
//!
//! The same tree holds host vectors, device buffers, gradients, shapes or names. Projections that read
//! the same input are fused into one leaf (query, key, value; gate, up), because that is how they are
//! computed; `layout` knows which tensors of a Hugging Face directory make up each leaf. All walks visit the
//! leaves in one fixed order: embedding, layers from first to last (fields as declared), final norm,
//! head, value head.

mod init;
mod layout;

pub use init::init;
pub use layout::{HfTensor, LeafLayout, hf_names, shapes};

/// The weights of one transformer block.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerParams<T> {
    /// [d]: RMSNorm before attention.
    pub attn_norm: T,
    /// [(H + 2 KV) hd, d]: rows of the queries, then keys, then values.
    pub qkv: T,
    /// [(H + 2 KV) hd]: bias in the same order (Qwen2).
    pub qkv_bias: Option<T>,
    /// [hd]: RMSNorm of every query head (Qwen3).
    pub q_norm: Option<T>,
    /// [hd]: RMSNorm of every key head (Qwen3).
    pub k_norm: Option<T>,
    /// [d, H hd]: output projection of attention.
    pub o: T,
    /// [d]: RMSNorm before the MLP.
    pub mlp_norm: T,
    /// [2 f, d]: rows of the gate, then of the up projection.
    pub gate_up: T,
    /// [d, f]: down projection.
    pub down: T,
}

/// The weights of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Params<T> {
    /// [V, d]: token embedding.
    pub embed: T,
    /// The transformer blocks, first to last.
    pub layers: Vec<LayerParams<T>>,
    /// [d]: RMSNorm before the head.
    pub final_norm: T,
    /// [V, d]: output head; `None` where it is the embedding.
    pub head: Option<T>,
    /// [1, d]: scalar value head of a critic.
    pub value_head: Option<T>,
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
    fn try_map<U, E>(self, f: &mut impl FnMut(T) -> Result<U, E>) -> Result<LayerParams<U>, E> {
        Ok(LayerParams {
            attn_norm: f(self.attn_norm)?,
            qkv: f(self.qkv)?,
            qkv_bias: self.qkv_bias.map(&mut *f).transpose()?,
            q_norm: self.q_norm.map(&mut *f).transpose()?,
            k_norm: self.k_norm.map(&mut *f).transpose()?,
            o: f(self.o)?,
            mlp_norm: f(self.mlp_norm)?,
            gate_up: f(self.gate_up)?,
            down: f(self.down)?,
        })
    }

    /// The same block over borrowed leaves.
    pub fn as_ref(&self) -> LayerParams<&T> {
        LayerParams {
            attn_norm: &self.attn_norm,
            qkv: &self.qkv,
            qkv_bias: self.qkv_bias.as_ref(),
            q_norm: self.q_norm.as_ref(),
            k_norm: self.k_norm.as_ref(),
            o: &self.o,
            mlp_norm: &self.mlp_norm,
            gate_up: &self.gate_up,
            down: &self.down,
        }
    }

    /// The same block over mutably borrowed leaves.
    pub fn as_mut(&mut self) -> LayerParams<&mut T> {
        LayerParams {
            attn_norm: &mut self.attn_norm,
            qkv: &mut self.qkv,
            qkv_bias: self.qkv_bias.as_mut(),
            q_norm: self.q_norm.as_mut(),
            k_norm: self.k_norm.as_mut(),
            o: &mut self.o,
            mlp_norm: &mut self.mlp_norm,
            gate_up: &mut self.gate_up,
            down: &mut self.down,
        }
    }
}

impl<T> Params<T> {
    /// A tree of the same layout with `f` applied to every leaf in order; stops at the first error.
    pub fn try_map<U, E>(self, mut f: impl FnMut(T) -> Result<U, E>) -> Result<Params<U>, E> {
        Ok(Params {
            embed: f(self.embed)?,
            layers: self.layers.into_iter().map(|layer| layer.try_map(&mut f)).collect::<Result<_, E>>()?,
            final_norm: f(self.final_norm)?,
            head: self.head.map(&mut f).transpose()?,
            value_head: self.value_head.map(&mut f).transpose()?,
        })
    }

    /// A tree of the same layout with `f` applied to every leaf in order.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Params<U> {
        let Ok(mapped) = self.try_map(|leaf| Ok::<U, std::convert::Infallible>(f(leaf)));
        mapped
    }

    /// The same tree over borrowed leaves.
    pub fn as_ref(&self) -> Params<&T> {
        Params {
            embed: &self.embed,
            layers: self.layers.iter().map(LayerParams::as_ref).collect(),
            final_norm: &self.final_norm,
            head: self.head.as_ref(),
            value_head: self.value_head.as_ref(),
        }
    }

    /// The same tree over mutably borrowed leaves.
    pub fn as_mut(&mut self) -> Params<&mut T> {
        Params {
            embed: &mut self.embed,
            layers: self.layers.iter_mut().map(LayerParams::as_mut).collect(),
            final_norm: &mut self.final_norm,
            head: self.head.as_mut(),
            value_head: self.value_head.as_mut(),
        }
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
        let [ours, theirs] = [self.slots(), other.slots()];
        if let Some(what) = first_difference(&ours, &theirs) {
            return Err(LayoutMismatch { what });
        }
        let mut leaves = other.into_leaves().into_iter();
        self.try_map(|leaf| match leaves.next() {
            Some(theirs) => Ok((leaf, theirs)),
            None => Err(LayoutMismatch { what: "one tree has fewer leaves".to_string() }),
        })
    }

    /// Which optional leaves exist, block by block and at the end.
    fn slots(&self) -> Vec<[bool; 3]> {
        let layers =
            self.layers.iter().map(|l| [l.qkv_bias.is_some(), l.q_norm.is_some(), l.k_norm.is_some()]);
        layers.chain([[self.head.is_some(), self.value_head.is_some(), false]]).collect()
    }
}

fn first_difference(a: &[[bool; 3]], b: &[[bool; 3]]) -> Option<String> {
    if a.len() != b.len() {
        return Some(format!("{} layers against {}", a.len() - 1, b.len() - 1));
    }
    let at = a.iter().zip(b).position(|(x, y)| x != y)?;
    let (what, names) = if at + 1 == a.len() {
        ("the model".to_string(), "head, value_head, -")
    } else {
        (format!("layer {at}"), "qkv_bias, q_norm, k_norm")
    };
    Some(format!("{what} has ({names}) = {:?} against {:?}", a[at], b[at]))
}

impl<T> IntoIterator for Params<T> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        self.into_leaves().into_iter()
    }
}
