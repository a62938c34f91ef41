//! What the device can do, measured: copy bandwidth and the rate of a large bf16 product.

use super::backend::Cuda;
use super::linear::{self, CudaWeight, Rows};
use super::memory::Buffer;
use crate::backend::{Backend, Output};
use crate::{DeviceError, Format};
use std::time::Instant;

/// Bytes of each side of the copy.
const COPIED: usize = 1 << 30;
const PRODUCT: usize = 8192;

/// Bytes a second of a copy inside the device's memory, read and written together: the best of several.
pub fn copy_bandwidth(cuda: &Cuda) -> Result<f64, DeviceError> {
    let gpu = cuda.gpu();
    let from = Buffer::zeros(gpu, COPIED, "measuring bandwidth")?;
    let to = Buffer::zeros(gpu, COPIED, "measuring bandwidth")?;
    let seconds = best_of(cuda, 5, || gpu.copy(from.at(), to.at(), COPIED))?;
    Ok(2.0 * COPIED as f64 / seconds)
}

/// Operations a second (multiply and add counted apart) of a large bf16 product on random numbers: the library's, as on the
/// way back, or our own, whichever is faster.
pub fn bf16_rate(cuda: &Cuda) -> Result<f64, DeviceError> {
    let gpu = cuda.gpu();
    let mut w = cuda.zeros(PRODUCT * PRODUCT)?;
    cuda.fill_random(&mut w, 1, 1.0);
    let mut packed = CudaWeight::new(gpu, PRODUCT, PRODUCT, Format::Bf16, true)?;
    packed.fill(gpu, w.at(), crate::Rounding::Nearest)?;
    let out = Buffer::new(gpu, 4 * PRODUCT * PRODUCT, "measuring products")?;
    let x = linear::left(gpu, Format::Bf16, Rows::Plain(w.at()), PRODUCT, PRODUCT);
    let forward = best_of(cuda, 5, || linear::forward(gpu, x, PRODUCT, &packed, 0, Output::Store, out.at()))?;
    let back = best_of(cuda, 5, || linear::input_gradient(gpu, x.data, PRODUCT, &packed, out.at()))?;
    Ok(2.0 * (PRODUCT as f64).powi(3) / forward.min(back))
}

/// Seconds of one run: the best of several groups of eight.
fn best_of(cuda: &Cuda, groups: usize, run: impl Fn()) -> Result<f64, DeviceError> {
    run();
    cuda.synchronize()?;
    let mut best = f64::INFINITY;
    for _ in 0..groups {
        let start = Instant::now();
        (0..8).for_each(|_| run());
        cuda.synchronize()?;
        best = best.min(start.elapsed().as_secs_f64() / 8.0);
    }
    Ok(best)
}
