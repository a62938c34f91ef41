//! What a device can do at best, measured in the same run: the limits beside the figures.

use qurl_kernels::cpu::peak::{self as cpu_peak, Unit};
use qurl_kernels::cuda::peak as cuda_peak;
use qurl_kernels::{Backend, Cpu, Cuda, Format};
use qurl_rollout::EngineOptions;

/// A device whose limits can be measured.
pub trait Machine: Backend {
    /// Bytes a second from memory.
    fn bandwidth(&self) -> anyhow::Result<f64>;
    /// Bytes a second from an array of this size, which may be in the caches.
    fn bandwidth_of(&self, bytes: usize) -> anyhow::Result<f64>;
    /// Bytes a second from these arrays.
    fn bandwidth_from(&self, arrays: &[&Self::Tensor]) -> anyhow::Result<f64>;
    /// Operations a second (in 1e9) of products in a format.
    fn peak_gflops(&self, format: Format) -> anyhow::Result<f64>;
    /// Groups of weights that are packed between two measurements of the bandwidth.
    fn packed_together(&self) -> usize;
    /// Size of an engine that keeps the device busy.
    fn engine(&self) -> EngineOptions;
}

/// The unit that bounds products in a format on the CPU.
fn unit(format: Format) -> Unit {
    match format {
        Format::F32 => Unit::F32,
        Format::Int8 => Unit::Int8,
        // The other formats are decoded to bf16 on the way into the product.
        Format::Bf16 | Format::Fp8 | Format::Fp8Block | Format::Int4 | Format::Nvfp4 => Unit::Bf16,
    }
}

impl Machine for Cpu {
    fn bandwidth(&self) -> anyhow::Result<f64> {
        Ok(cpu_peak::read_bandwidth(self.context()))
    }

    fn bandwidth_of(&self, bytes: usize) -> anyhow::Result<f64> {
        Ok(cpu_peak::read_bandwidth_of(self.context(), bytes))
    }

    fn bandwidth_from(&self, arrays: &[&Self::Tensor]) -> anyhow::Result<f64> {
        let arrays: Vec<&[f32]> = arrays.iter().map(|array| &array[..]).collect();
        let bytes = 4 * arrays.iter().map(|array| array.len()).sum::<usize>();
        Ok(bytes as f64 / cpu_peak::read_seconds(self.context(), &arrays))
    }

    fn peak_gflops(&self, format: Format) -> anyhow::Result<f64> {
        Ok(cpu_peak::operations_per_second(self.context(), unit(format)) / 1e9)
    }

    fn packed_together(&self) -> usize {
        1
    }

    fn engine(&self) -> EngineOptions {
        EngineOptions::default()
    }
}

impl Machine for Cuda {
    /// A copy's, read and written bytes together.
    fn bandwidth(&self) -> anyhow::Result<f64> {
        Ok(cuda_peak::copy_bandwidth(self)?)
    }

    fn bandwidth_of(&self, _bytes: usize) -> anyhow::Result<f64> {
        self.bandwidth()
    }

    fn bandwidth_from(&self, _arrays: &[&Self::Tensor]) -> anyhow::Result<f64> {
        self.bandwidth()
    }

    /// A large bf16 product's; tensor cores do twice as much in eight bits, and plain f32 arithmetic a fifteenth.
    fn peak_gflops(&self, format: Format) -> anyhow::Result<f64> {
        let bf16 = cuda_peak::bf16_rate(self)? / 1e9;
        Ok(match format {
            Format::F32 => bf16 / 15.0,
            Format::Int8 | Format::Fp8 => 2.0 * bf16,
            _ => bf16,
        })
    }

    /// More than one: a measurement takes longer than a packing.
    fn packed_together(&self) -> usize {
        8
    }

    fn engine(&self) -> EngineOptions {
        EngineOptions { max_num_batched_tokens: 8192, page_size: 64, ..EngineOptions::default() }
    }
}
