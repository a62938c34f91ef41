//! AdamW over all parameters of a model, with clipping by the global norm.
//!
//! Weight decay applies to every parameter, as PyTorch's optimizer and the trainers built on it do. A
//! gradient that is not finite is never applied: the step is skipped and reported.

use qurl_kernels::ops::Update;
use qurl_kernels::types::AdamW;
use qurl_kernels::{Device, DeviceError, Queue};
use qurl_model::Params;
use schemars::JsonSchema;
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
}

impl Default for AdamWOptions {
    fn default() -> Self {
        AdamWOptions { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, clip_grad: 1.0 }
    }
}

/// Moments of all parameters, and the number of updates made.
pub struct Optimizer<D: Device> {
    options: AdamWOptions,
    /// Updates made so far.
    pub steps: u64,
    /// First moments.
    pub first: Params<D::Tensor>,
    /// Second moments.
    pub second: Params<D::Tensor>,
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
    /// Zero moments for these parameters.
    pub fn new(device: &D, params: &Params<D::Tensor>, options: AdamWOptions) -> Result<Self, DeviceError> {
        let zeros = || params.as_ref().try_map(|p| device.zeros(D::len(p)));
        Ok(Optimizer { options, steps: 0, first: zeros()?, second: zeros()? })
    }

    /// Begins again: zero moments, no updates made.
    pub fn reset(&mut self, queue: &mut D::Queue) {
        for moment in self.first.iter_mut().chain(self.second.iter_mut()) {
            let len = D::len(moment);
            queue.clear(moment, len);
        }
        self.steps = 0;
    }

    /// Clips, updates the parameters and clears the gradients.
    pub fn step(
        &mut self,
        queue: &mut D::Queue,
        lr: f64,
        params: &mut Params<D::Tensor>,
        grads: &mut Params<D::Tensor>,
    ) -> Result<UpdateReport, DeviceError> {
        let grad_norm = queue.sum_squares(&grads.iter().collect::<Vec<_>>())?.sqrt();
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
            let moments = self.first.iter_mut().zip(self.second.iter_mut());
            for ((w, g), (m, v)) in params.iter_mut().zip(grads.iter()).zip(moments) {
                queue.adamw(Update { adamw, w, g, m, v });
            }
        }
        for g in grads.iter_mut() {
            let len = D::len(g);
            queue.clear(g, len);
        }
        Ok(UpdateReport { grad_norm, applied })
    }
}
