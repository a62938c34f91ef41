//! What the device can do, measured: copy bandwidth and the rate of a large bf16 GEMM.

use super::linear::{self, Source};
use super::linear_backward::input_gradient;
use super::memory::Buffer;
use super::queue::CudaQueue;
use crate::ops::{Output, Pack};
use crate::types::{DeviceError, Format, Rounding, WeightShape};
use crate::{Device, Queue};
use std::time::Instant;

/// Bytes of each side of the copy.
const COPIED: usize = 1 << 30;
/// Rows, columns and length of sums of the GEMM.
const SIZE: usize = 8192;

/// Bytes a second of a copy inside the device's memory, read and written together: the best of several.
pub fn copy_bandwidth(queue: &mut CudaQueue) -> Result<f64, DeviceError> {
    let from = Buffer::zeros(&queue.context, COPIED, "measuring bandwidth")?;
    let to = Buffer::zeros(&queue.context, COPIED, "measuring bandwidth")?;
    let seconds = best_of(queue, |queue| queue.copy_bytes(from.at(), to.at(), COPIED))?;
    Ok(2.0 * COPIED as f64 / seconds)
}

/// Operations a second (multiply and add counted apart) of a large bf16 GEMM on random numbers: the
/// library's, as in the backward pass, or our own, whichever is faster.
pub fn bf16_rate(queue: &mut CudaQueue) -> Result<f64, DeviceError> {
    let device = queue.device().clone();
    let mut w = device.zeros(SIZE * SIZE)?;
    queue.fill_random(&mut w, 1, 1.0);
    let shape = WeightShape { n: SIZE, k: SIZE, format: Format::Bf16, trained: true };
    let mut packed = device.weight(shape)?;
    queue.pack(Pack { from: &w, rounding: Rounding::Nearest, copy: None, to: &mut packed })?;
    let out = Buffer::new(&queue.context, 4 * SIZE * SIZE, "measuring GEMMs")?;
    queue.begin();
    let x = linear::operand(queue, Format::Bf16, Source::Rows(w.at()), SIZE, SIZE);
    let forward = best_of(queue, |queue| linear::gemm(queue, x, SIZE, &packed, 0, Output::Store, out.at()))?;
    let back = best_of(queue, |queue| input_gradient(queue, x.data, SIZE, &packed, Output::Store, out.at()))?;
    Ok(2.0 * (SIZE as f64).powi(3) / forward.min(back))
}

/// Seconds of one run: the best of several groups of eight.
fn best_of(queue: &mut CudaQueue, run: impl Fn(&mut CudaQueue)) -> Result<f64, DeviceError> {
    const GROUPS: usize = 5;
    run(queue);
    queue.synchronize()?;
    let mut best = f64::INFINITY;
    for _ in 0..GROUPS {
        let start = Instant::now();
        (0..8).for_each(|_| run(queue));
        queue.synchronize()?;
        best = best.min(start.elapsed().as_secs_f64() / 8.0);
    }
    Ok(best)
}
