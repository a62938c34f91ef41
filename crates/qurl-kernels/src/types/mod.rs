//! The vocabulary of the seam: plain data that both sides of it speak. Imports nothing from a device.

mod adapter;
mod attention;
mod batch;
mod device_kind;
mod error;
mod format;
mod head;
mod moments;
mod optimizer;
mod rows;
mod sampling;

pub use adapter::{AdapterBlock, AdapterBlocks};
pub use attention::{Heads, KvFormat, KvShape, Span, UnknownKvFormat};
pub use batch::{Batch, Token};
pub use device_kind::{DeviceKind, UnknownDeviceKind};
pub use error::DeviceError;
pub use format::{Format, Rounding, UnknownFormat, WeightShape};
pub use head::{HeadGradient, HeadOutput, LossGradient};
pub use moments::{MOMENT_BLOCK, MomentFormat, MomentShape, MomentValues, Moments};
pub use optimizer::{AdamW, SQUARES_BLOCK};
pub use rows::Rows;
pub use sampling::{BANNED_LOGIT, Bias, SampleRow, Sampled};
