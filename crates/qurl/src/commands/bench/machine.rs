//! What a device can do at best, measured in the same run: the limits beside the figures.

use qurl_kernels::cpu::CpuQueue;
use qurl_kernels::cpu::peak::{self as cpu_peak, Unit};
use qurl_kernels::cuda::{CudaQueue, peak as cuda_peak};
use qurl_kernels::{Cpu, Cuda, Device, Format, Queue};

/// A device whose limits can be measured.
pub trait Machine: Device {
    /// Bytes a second from memory.
    fn bandwidth(queue: &mut Self::Queue) -> anyhow::Result<f64>;
    /// Bytes a second from an array of this size, which may be in the caches.
    fn bandwidth_of(queue: &mut Self::Queue, bytes: usize) -> anyhow::Result<f64>;
    /// Bytes a second from these arrays.
    fn bandwidth_from(queue: &mut Self::Queue, arrays: &[&Self::Tensor]) -> anyhow::Result<f64>;
    /// Operations a second (in 1e9) of GEMMs in a format.
    fn peak_gflops(queue: &mut Self::Queue, format: Format) -> anyhow::Result<f64>;
    /// Groups of weights that are packed between two measurements of the bandwidth.
    const PACKED_TOGETHER: usize;
}

/// The unit that bounds GEMMs in a format on the CPU.
fn unit(format: Format) -> Unit {
    match format {
        Format::F32 => Unit::F32,
        Format::Int8 => Unit::Int8,
        // The other formats are decoded to bf16 on the way into the GEMM.
        Format::Bf16 | Format::Fp8 | Format::Fp8Block | Format::Int4 | Format::Nvfp4 => Unit::Bf16,
    }
}

impl Machine for Cpu {
    const PACKED_TOGETHER: usize = 1;

    fn bandwidth(queue: &mut CpuQueue) -> anyhow::Result<f64> {
        Ok(cpu_peak::read_bandwidth(queue.device().context()))
    }

    fn bandwidth_of(queue: &mut CpuQueue, bytes: usize) -> anyhow::Result<f64> {
        Ok(cpu_peak::read_bandwidth_of(queue.device().context(), bytes))
    }

    fn bandwidth_from(queue: &mut CpuQueue, arrays: &[&Self::Tensor]) -> anyhow::Result<f64> {
        let arrays: Vec<&[f32]> = arrays.iter().map(|array| &array[..]).collect();
        let bytes = 4 * arrays.iter().map(|array| array.len()).sum::<usize>();
        Ok(bytes as f64 / cpu_peak::read_seconds(queue.device().context(), &arrays))
    }

    fn peak_gflops(queue: &mut CpuQueue, format: Format) -> anyhow::Result<f64> {
        Ok(cpu_peak::operations_per_second(queue.device().context(), unit(format)) / 1e9)
    }
}

impl Machine for Cuda {
    /// More than one: a measurement takes longer than a packing.
    const PACKED_TOGETHER: usize = 8;

    /// A copy's, read and written bytes together.
    fn bandwidth(queue: &mut CudaQueue) -> anyhow::Result<f64> {
        Ok(cuda_peak::copy_bandwidth(queue)?)
    }

    fn bandwidth_of(queue: &mut CudaQueue, _bytes: usize) -> anyhow::Result<f64> {
        Self::bandwidth(queue)
    }

    fn bandwidth_from(queue: &mut CudaQueue, _arrays: &[&Self::Tensor]) -> anyhow::Result<f64> {
        Self::bandwidth(queue)
    }

    /// A large bf16 GEMM's; tensor cores do twice as much in eight bits, and plain f32 arithmetic a
    /// fifteenth.
    fn peak_gflops(queue: &mut CudaQueue, format: Format) -> anyhow::Result<f64> {
        let bf16 = cuda_peak::bf16_rate(queue)? / 1e9;
        Ok(match format {
            Format::F32 => bf16 / 15.0,
            Format::Int8 | Format::Fp8 => 2.0 * bf16,
            Format::Bf16 | Format::Fp8Block | Format::Int4 | Format::Nvfp4 => bf16,
        })
    }
}
