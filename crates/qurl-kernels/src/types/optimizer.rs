//! Constants of the optimizer.

/// Values whose squares are one partial sum of a norm: fixed, so that neither threads nor ranks change the
/// order of summation. Pieces of a tensor that are cut at multiples of it have the same partial sums.
pub const SQUARES_BLOCK: usize = 1 << 14;

/// One AdamW update's constants, as PyTorch names them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay: `w -= lr * weight_decay * w`.
    pub weight_decay: f32,
    /// Number of this update, from 1.
    pub step: u64,
    /// Factor on the gradients (clipping by the global norm).
    pub grad_scale: f32,
}
