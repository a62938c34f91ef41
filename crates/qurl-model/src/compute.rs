//! Forward and backward of the model on any [`Device`](qurl_kernels::Device).
//!
//! [`Network`] is a model ready to compute: linear layers packed in one number format, everything else in
//! full. [`layer`] holds the one forward pass of a block that inference and training share, so that the
//! engine's prefill and decode and the trainer's log-probs are the same operations in the same order.
//! [`infer`] runs it over rows with keys and values kept in pages; [`train`] runs it over whole sequences,
//! keeps what the hand-written backward pass needs, and walks back. The loss enters as one number per token:
//! `dL/dlogp`.

mod adapters;
pub mod batch;
pub mod infer;
pub mod layer;
pub mod leaves;
pub mod network;
pub mod rope;
pub mod train;
pub mod weights;

pub use batch::{PAGE, Targets, whole_batch};
pub use infer::{Inference, score};
pub use leaves::{Base, BaseLeaves, Leaves};
pub use network::{Block, Network, NetworkOptions, random_leaf};
pub use qurl_kernels::types::Batch;
pub use train::{Recompute, Tape, TapeOptions};
pub use weights::{BlockGradients, GradientSink, Part, Weights, idle_forward, idle_training};
