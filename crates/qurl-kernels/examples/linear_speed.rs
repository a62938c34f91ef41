//! Speed of linear layers in every format beside the limits of the machine, all measured in the same run.
//!
//! `cargo run --release -p qurl-kernels --example linear_speed [rounds] [format ...]`
//!
//! The layers are those of a 0.5B model. Each format has so many copies of a layer that they do not stay in
//! the caches, as in a real model. Formats are interleaved within a round and the best round counts, so that
//! other work on the machine disturbs all of them alike. The limits are the rate of reading memory and the
//! speed of a GEMM that stays in the caches.

use qurl_kernels::ops::{Linear, Output, Pack};
use qurl_kernels::types::WeightShape;
use qurl_kernels::{Cpu, Device, DeviceError, Format, Queue, Rounding};
use std::sync::Arc;
use std::time::Instant;

/// (outputs, inputs)
const LAYERS: [(usize, usize); 2] = [(4864, 896), (896, 4864)];
const ROWS: [usize; 4] = [1, 8, 32, 64];
const COPIES: usize = 20;

type Tensor = <Cpu as Device>::Tensor;
type Weight = <Cpu as Device>::Weight;
/// Something to be timed.
type Timed<'a> = Box<dyn FnMut() -> Result<(), DeviceError> + 'a>;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let rounds: usize = arguments.next().map_or(Ok(12), |text| text.parse())?;
    let named: Vec<Format> = arguments.map(|name| name.parse()).collect::<Result<_, _>>()?;
    let formats = if named.is_empty() { Format::ALL.to_vec() } else { named };
    let cpu = Arc::new(Cpu::from_env()?);
    println!("{}", cpu.info().description);
    let memory = vec![1.0f32; 1 << 26];
    let bandwidth = (0..rounds).map(|_| read_rate(&cpu, &memory)).fold(0.0, f64::max);
    println!("reading memory: {bandwidth:.1} GB/s");
    for (n, k) in LAYERS {
        let layer = Layer::new(&cpu, n, k, &formats)?;
        println!("\n{n} x {k}");
        layer.gemm_speed(rounds, bandwidth)?;
        layer.pack_speed(rounds, bandwidth)?;
    }
    Ok(())
}

/// GB/s of reading a large array with all threads.
fn read_rate(cpu: &Cpu, memory: &[f32]) -> f64 {
    let start = Instant::now();
    std::thread::scope(|scope| {
        for part in memory.chunks(memory.len() / cpu.context().threads()) {
            scope.spawn(move || {
                let mut sums = [0u32; 64];
                for line in part.chunks_exact(64) {
                    for (sum, x) in sums.iter_mut().zip(line) {
                        *sum = sum.wrapping_add(x.to_bits());
                    }
                }
                std::hint::black_box(sums);
            });
        }
    });
    size_of_val(memory) as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// Runs all closures, `rounds` times interleaved, and returns the shortest time of each.
fn shortest(rounds: usize, cases: &mut [Timed]) -> Result<Vec<f64>, DeviceError> {
    let mut seconds = vec![f64::INFINITY; cases.len()];
    for _ in 0..rounds {
        for (case, best) in cases.iter_mut().zip(&mut seconds) {
            let start = Instant::now();
            case()?;
            *best = best.min(start.elapsed().as_secs_f64());
        }
    }
    Ok(seconds)
}

/// Packs weights `[n, k]`.
fn pack(cpu: &Arc<Cpu>, from: &Tensor, to: &mut Weight) -> Result<(), DeviceError> {
    cpu.queue()?.pack(Pack { from, rounding: Rounding::Nearest, copy: None, to })
}

/// Copies of one layer in every format.
struct Layer<'a> {
    cpu: &'a Arc<Cpu>,
    n: usize,
    k: usize,
    source: Vec<Tensor>,
    packed: Vec<(Format, Vec<Weight>)>,
}

impl<'a> Layer<'a> {
    fn new(cpu: &'a Arc<Cpu>, n: usize, k: usize, formats: &[Format]) -> Result<Self, DeviceError> {
        // Near a normal distribution, as a model's: how often values are small decides what fp8 costs.
        let mut state = 12345u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / 16_777_216.0 - 0.5
        };
        let weights: Vec<f32> = (0..n * k).map(|_| (0..6).map(|_| uniform()).sum()).collect();
        let mut queue = cpu.queue()?;
        let source = (0..COPIES).map(|_| queue.upload(&weights)).collect::<Result<Vec<_>, _>>()?;
        let mut packed = Vec::new();
        for &format in formats {
            let shape = WeightShape { n, k, format, trained: false };
            let copy = |from| {
                let mut to = cpu.weight(shape)?;
                pack(cpu, from, &mut to)?;
                Ok(to)
            };
            packed.push((format, source.iter().map(copy).collect::<Result<_, DeviceError>>()?));
        }
        Ok(Layer { cpu, n, k, source, packed })
    }

    fn gemm_speed(&self, rounds: usize, bandwidth: f64) -> Result<(), DeviceError> {
        let (cpu, n, k) = (self.cpu, self.n, self.k);
        for rows in ROWS {
            let x = cpu.queue()?.upload(&(0..rows * k).map(|i| (i % 17) as f32 - 8.0).collect::<Vec<_>>())?;
            let outs = self.packed.iter().map(|_| cpu.zeros(rows * n)).collect::<Result<Vec<_>, _>>()?;
            let mut cases: Vec<Timed> = Vec::new();
            for ((_, copies), mut out) in self.packed.iter().zip(outs) {
                let (x, mut queue) = (&x, cpu.queue()?);
                cases.push(Box::new(move || {
                    for w in copies {
                        linear(&mut queue, x, rows, w, &mut out);
                    }
                    Ok(())
                }));
            }
            let cached = [Format::F32, Format::Bf16, Format::Int8];
            for format in cached {
                cases.push(cached_gemm(cpu, format)?);
            }
            let seconds = shortest(rounds, &mut cases)?;
            let (seconds, cached) = seconds.split_at(self.packed.len());
            let peaks: Vec<String> = cached.iter().map(|s| format!("{:.0}", CACHED_GOP / s)).collect();
            println!("  {rows} rows (in the caches: f32, bf16, int8 reach {} GOP/s)", peaks.join(", "));
            for ((format, copies), seconds) in self.packed.iter().zip(seconds) {
                let gops = (2 * rows * n * k * COPIES) as f64 / seconds / 1e9;
                let bytes: usize = copies.iter().map(Cpu::weight_bytes).sum();
                let rate = bytes as f64 / seconds / 1e9;
                let share = 100.0 * rate / bandwidth;
                println!("    {:9} {gops:6.1} GOP/s  weights {rate:5.1} GB/s ({share:.0}%)", format.name());
            }
        }
        Ok(())
    }

    fn pack_speed(mut self, rounds: usize, bandwidth: f64) -> Result<(), DeviceError> {
        let (cpu, source) = (self.cpu, &self.source);
        let formats: Vec<Format> = self.packed.iter().map(|(format, _)| *format).collect();
        let mut cases: Vec<Timed> = Vec::new();
        for (_, copies) in &mut self.packed {
            cases.push(Box::new(move || {
                source.iter().zip(copies.iter_mut()).try_for_each(|(from, to)| pack(cpu, from, to))
            }));
        }
        let seconds = shortest(rounds, &mut cases)?;
        let read = (COPIES * self.n * self.k * 4) as f64 / bandwidth / 1e9;
        println!("  packing, in units of reading the f32 weights once");
        for (format, seconds) in formats.iter().zip(seconds) {
            println!("    {:9} {:5.2}", format.name(), seconds / read);
        }
        Ok(())
    }
}

/// 1e9 operations of [`cached_gemm`].
const CACHED_GOP: f64 = 2.0 * 192.0 * 512.0 * 1024.0 * 4.0 / 1e9;

/// A GEMM that stays in the caches, four times.
fn cached_gemm(cpu: &Arc<Cpu>, format: Format) -> Result<Timed<'_>, DeviceError> {
    let mut queue = cpu.queue()?;
    let mut w = cpu.weight(WeightShape { n: 512, k: 1024, format, trained: false })?;
    pack(cpu, &queue.upload(&vec![0.5; 512 * 1024])?, &mut w)?;
    let x = queue.upload(&vec![0.5; 192 * 1024])?;
    let mut out = cpu.zeros(192 * 512)?;
    Ok(Box::new(move || {
        for _ in 0..4 {
            linear(&mut queue, &x, 192, &w, &mut out);
        }
        Ok(())
    }))
}

fn linear(queue: &mut impl Queue<Device = Cpu>, x: &Tensor, rows: usize, w: &Weight, out: &mut Tensor) {
    queue.linear(Linear { adapter: None, x, rows, norm: None, w, bias: None, output: Output::Store, out });
}
