//! AdamW over all parameters of a model, with clipping by the global norm.
//!
//! Weight decay applies to every parameter, as PyTorch's optimizer and the trainers built on it do. A
//! gradient that is not finite is never applied: the step is skipped and reported.
//!
//! Several ranks share the work, the master weights and the moments: each leaf is cut into a piece for each
//! rank ([`Ranks::cuts`]), which has the sum of all gradients of its piece ([`crate::gradients`]) and updates
//! it; new weights are gathered where they are packed ([`crate::master`]). AdamW works on single numbers and
//! the norm is summed over fixed blocks, so no bit depends on how many ranks there are.

use crate::gradients::Sum;
use crate::ranks::Ranks;
use crate::recipe::schema;
use qurl_kernels::ops::{Slice, Update};
use qurl_kernels::types::{AdamW, MomentFormat, MomentShape, Moments};
use qurl_kernels::{Device, DeviceError, Queue};
use qurl_model::params::ParamKind;
use qurl_model::{ParamInfo, Params};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};

/// Constants of the optimizer, with the names and defaults of its peers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWOptions {
    /// Decay of the mean of past gradients.
    pub beta1: f64,
    /// Decay of the mean of their squares.
    pub beta2: f64,
    /// Added to the root of that mean, against a division by zero.
    pub eps: f64,
    /// Share of a weight that an update takes off, times the learning rate. It applies to every parameter.
    pub weight_decay: f64,
    /// Gradients with a larger norm over all parameters are scaled down to it.
    pub clip_grad: f64,
    /// Factor of the learning rate of the matrices after the norms of a block: Q, K and V, gate and up
    /// projections. With s here and 1/s for `lr_factor_norms` AdamW does in the function what
    /// `rollout.uaq = s` does.
    #[serde(skip_serializing_if = "is_one")]
    pub lr_factor_matrices: f64,
    /// Factor of the learning rate of the gains of these norms. Both are 1 where they are not set.
    #[serde(skip_serializing_if = "is_one")]
    pub lr_factor_norms: f64,
    /// Number format of the means: 8, 4 or 2 bytes of memory for a parameter. Fewer bits are rounded up or
    /// down, right in the mean; updates are computed in f32.
    #[serde(with = "moment_format_name")]
    #[schemars(schema_with = "moment_formats")]
    pub moments: MomentFormat,
    /// Keep the means in page-locked memory of the host, which updates read and write over the bus: less of
    /// the device's memory, the same bits, longer updates. On a CPU it changes nothing.
    #[serde(skip_serializing_if = "crate::recipe::is_false")]
    pub offload: bool,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        AdamWOptions {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            clip_grad: 1.0,
            lr_factor_matrices: 1.0,
            lr_factor_norms: 1.0,
            moments: MomentFormat::F32,
            offload: false,
        }
    }
}

fn is_one(factor: &f64) -> bool {
    *factor == 1.0
}

impl AdamWOptions {
    /// The factor of a leaf's learning rate.
    fn lr_factor(&self, of: ParamKind) -> f64 {
        match of {
            ParamKind::Qkv | ParamKind::GateUp => self.lr_factor_matrices,
            ParamKind::AttnNorm | ParamKind::MlpNorm => self.lr_factor_norms,
            _ => 1.0,
        }
    }
}

/// Moments of all parameters, or of this rank's pieces of them, and the number of updates made.
pub struct Optimizer<D: Device> {
    options: AdamWOptions,
    /// Updates made so far.
    pub steps: u64,
    /// First and second moments.
    pub moments: Params<D::Moments>,
    /// Of each leaf's learning rate.
    lr_factors: Vec<f64>,
    ranks: Ranks,
}

/// What an update did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateReport {
    /// Global norm of the gradients before clipping.
    pub grad_norm: f64,
    /// False where the norm was not finite: nothing was changed.
    pub applied: bool,
}

impl<D: Device> Optimizer<D> {
    /// Zero moments for leaves of these shapes, of which each of the ranks has its pieces.
    pub fn new(
        device: &D,
        shapes: &Params<ParamInfo>,
        options: AdamWOptions,
        ranks: &Ranks,
    ) -> Result<Self, DeviceError> {
        let AdamWOptions { moments: format, offload: on_host, .. } = options;
        let shape = |info: &ParamInfo| MomentShape { len: ranks.piece(info.len()).len(), format, on_host };
        let moments = shapes.as_ref().try_map(|info| device.moments(shape(info)))?;
        let lr_factors = shapes.iter().map(|info| options.lr_factor(info.kind)).collect();
        Ok(Optimizer { options, steps: 0, moments, lr_factors, ranks: ranks.clone() })
    }

    /// Begins again: zero moments, no updates made.
    pub fn reset(&mut self, queue: &mut D::Queue, lengths: &Params<usize>) -> Result<(), DeviceError> {
        let pieces: Vec<usize> = lengths.iter().map(|&len| self.ranks.piece(len).len()).collect();
        for (moments, len) in self.moments.iter_mut().zip(pieces) {
            queue.write_moments(moments, &Moments::zeros(len, self.options.moments))?;
        }
        self.steps = 0;
        Ok(())
    }

    /// This rank's piece of a gradient, where it begins in it and how long it is.
    fn own(&self, grads: &Sum<D>, g: &D::Tensor) -> std::ops::Range<usize> {
        if grads.pieces { 0..D::len(g) } else { self.ranks.piece(D::len(g)) }
    }

    /// The norm of all gradients.
    fn norm(&self, queue: &mut D::Queue, grads: &Sum<D>) -> Result<f64, DeviceError> {
        if self.ranks.size() == 1 {
            return Ok(queue.sum_squares(&grads.leaves.iter().collect::<Vec<_>>())?.sqrt());
        }
        let slice = |tensor| {
            let own = self.own(grads, tensor);
            Slice { tensor, at: own.start, len: own.len() }
        };
        let own = queue.block_squares(&grads.leaves.iter().map(slice).collect::<Vec<_>>())?;
        // Leaf by leaf, the pieces of rank 0 first: the order of one rank.
        let mut leaves = vec![Vec::new(); own.len()];
        for pieces in self.ranks.gather(own)? {
            leaves.iter_mut().zip(pieces).for_each(|(leaf, piece)| leaf.extend(piece));
        }
        Ok(queue.add_block_squares(&leaves)?.sqrt())
    }

    /// Clips the gradients and updates this rank's pieces of the weights.
    pub(crate) fn step(
        &mut self,
        queue: &mut D::Queue,
        lr: f64,
        lengths: &Params<usize>,
        pieces: &mut Params<D::Tensor>,
        grads: &Sum<D>,
    ) -> Result<UpdateReport, DeviceError> {
        let grad_norm = self.norm(queue, grads)?;
        let applied = grad_norm.is_finite();
        if applied {
            self.steps += 1;
            let o = &self.options;
            // As torch.nn.utils.clip_grad_norm_ does it.
            let scale = (o.clip_grad / (grad_norm + 1e-6)).min(1.0);
            let adamw = AdamW {
                lr: lr as f32,
                beta1: o.beta1 as f32,
                beta2: o.beta2 as f32,
                eps: o.eps as f32,
                weight_decay: o.weight_decay as f32,
                step: self.steps,
                grad_scale: scale as f32,
            };
            let starts = lengths.iter().map(|&len| self.ranks.piece(len).start).collect::<Vec<_>>();
            let leaves = pieces.iter_mut().zip(grads.leaves.iter()).zip(starts);
            let moments = self.moments.iter_mut().zip(&self.lr_factors);
            for (((w, g), at), (moments, factor)) in leaves.zip(moments) {
                let adamw = AdamW { lr: (lr * factor) as f32, ..adamw };
                queue.adamw(Update { adamw, w, g, at, moments });
            }
        }
        Ok(UpdateReport { grad_norm, applied })
    }
}

/// The formats that moments may have, for the reference of recipes.
fn moment_formats(_: &mut SchemaGenerator) -> Schema {
    schema::names(MomentFormat::ALL.map(MomentFormat::name))
}

/// A format of moments by its name.
mod moment_format_name {
    use qurl_kernels::types::MomentFormat;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(format: &MomentFormat, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(format.name())
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(deserializer: D) -> Result<MomentFormat, D::Error> {
        let name = String::deserialize(deserializer)?;
        let known = MomentFormat::ALL.into_iter().find(|format| format.name() == name);
        known.ok_or_else(|| {
            let names = MomentFormat::ALL.map(MomentFormat::name).join(", ");
            de::Error::custom(format!("unknown format of moments {name:?}; expected one of {names}"))
        })
    }
}
