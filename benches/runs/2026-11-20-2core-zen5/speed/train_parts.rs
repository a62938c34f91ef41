//! Time of the parts of a training step of the 5 M model.
use qurl_kernels::ops::*;
use qurl_kernels::types::WeightShape;
use qurl_kernels::{Cpu, Device, Format, Queue, Rounding};
use std::sync::Arc;
use std::time::Instant;
type T = <Cpu as Device>::Tensor;
type W = <Cpu as Device>::Weight;
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let rounds: usize = args.next().map_or(Ok(10), |t| t.parse())?;
    let format: Format = args.next().map_or(Ok(Format::F32), |t| t.parse())?;
    let d: usize = args.next().map_or(Ok(256), |t| t.parse())?;
    let f: usize = args.next().map_or(Ok(704), |t| t.parse())?;
    let cpu = Arc::new(Cpu::from_env()?);
    let mut q = cpu.queue()?;
    let layers = 6;
    let rows = 1024;
    let fill = |n: usize| -> Vec<f32> { (0..n).map(|i| ((i * 7919) % 1013) as f32 / 1013.0 - 0.5).collect() };
    let weight =
        |q: &mut <Cpu as Device>::Queue, n: usize, k: usize| -> Result<W, Box<dyn std::error::Error>> {
            let mut w = cpu.weight(WeightShape { n, k, format, trained: true })?;
            let from: T = q.upload(&fill(n * k))?;
            q.pack(Pack { from: &from, rounding: Rounding::Nearest, copy: None, to: &mut w })?;
            Ok(w)
        };
    let mut ws = Vec::new();
    for _ in 0..layers {
        ws.push((
            weight(&mut q, 3 * d, d)?,
            weight(&mut q, d, d)?,
            weight(&mut q, 2 * f, d)?,
            weight(&mut q, d, f)?,
        ));
    }
    let mut grads = Vec::new();
    for _ in 0..layers {
        grads.push((
            cpu.zeros(3 * d * d)?,
            cpu.zeros(d * d)?,
            cpu.zeros(2 * f * d)?,
            cpu.zeros(d * f)?,
            cpu.zeros(d)?,
        ));
    }
    let gain: T = q.upload(&vec![1.0; d])?;
    let mut x: T = q.upload(&fill(rows * d))?;
    let mut dx: T = q.upload(&fill(rows * d))?;
    let mut acts: Vec<(T, T)> = (0..layers)
        .map(|_| Ok((cpu.zeros(rows * 3 * d)?, cpu.zeros(rows * d)?)))
        .collect::<Result<_, qurl_kernels::DeviceError>>()?;
    let mut kept = Vec::new();
    for _ in 0..layers {
        kept.push(cpu.zeros(rows * 2 * f)?);
    }
    let mut spent = [0.0f64; 6];
    let mut best = [f64::INFINITY; 6];
    for round in 0..rounds {
        spent = [0.0; 6];
        for _ in 0..4 {
            q.write(&mut x, &fill(rows * d));
            for l in 0..layers {
                let (qkv, o, gate_up, down) = &ws[l];
                let t = Instant::now();
                q.linear(Linear {
                    adapter: None,
                    x: &x,
                    rows,
                    norm: Some(Norm { gain: &gain, eps: 1e-5 }),
                    w: qkv,
                    bias: None,
                    output: Output::Store,
                    out: &mut acts[l].0,
                });
                spent[0] += t.elapsed().as_secs_f64();
                let t = Instant::now();
                q.copy(&x, &mut acts[l].1, rows * d);
                q.linear(Linear {
                    adapter: None,
                    x: &acts[l].1,
                    rows,
                    norm: None,
                    w: o,
                    bias: None,
                    output: Output::Add,
                    out: &mut x,
                });
                spent[1] += t.elapsed().as_secs_f64();
                let t = Instant::now();
                q.mlp(Mlp {
                    x: &mut x,
                    rows,
                    norm: Norm { gain: &gain, eps: 1e-5 },
                    gate_up,
                    down,
                    gate_up_adapter: None,
                    down_adapter: None,
                    kept: Some(&mut kept[l]),
                });
                spent[2] += t.elapsed().as_secs_f64();
            }
            q.write(&mut dx, &fill(rows * d));
            for l in (0..layers).rev() {
                let (qkv, o, gate_up, down) = &ws[l];
                let g = &mut grads[l];
                let t = Instant::now();
                q.mlp_backward(MlpBackward {
                    x: &x,
                    rows,
                    norm: NormBackward { gain: &gain, eps: 1e-5, dgain: Some(&mut g.4) },
                    gate_up,
                    down,
                    gate_up_adapter: None,
                    down_adapter: None,
                    kept: &mut kept[l],
                    dgate_up: Some(&mut g.2),
                    ddown: Some(&mut g.3),
                    dx: &mut dx,
                });
                spent[3] += t.elapsed().as_secs_f64();
                let t = Instant::now();
                q.linear_backward(LinearBackward {
                    x: &acts[l].1,
                    rows,
                    norm: None,
                    w: o,
                    adapter: None,
                    dy: &dx,
                    dw: Some(&mut g.1),
                    dbias: None,
                    dx: Some(&mut x),
                });
                spent[4] += t.elapsed().as_secs_f64();
                let t = Instant::now();
                q.linear_backward(LinearBackward {
                    x: &x,
                    rows,
                    norm: Some(NormBackward { gain: &gain, eps: 1e-5, dgain: Some(&mut g.4) }),
                    w: qkv,
                    adapter: None,
                    dy: &acts[l].0,
                    dw: Some(&mut g.0),
                    dbias: None,
                    dx: Some(&mut dx),
                });
                spent[5] += t.elapsed().as_secs_f64();
            }
        }
        if round > 0 {
            for i in 0..6 {
                best[i] = best[i].min(spent[i]);
            }
        }
    }
    let _ = spent;
    let n = (4 * layers * rows * 2) as f64 / 1e9;
    let (d, f) = (d as f64, f as f64);
    let flops = [3.0 * d * d, d * d, 3.0 * f * d, 6.0 * f * d, 2.0 * d * d, 6.0 * d * d];
    let mut bits = 0u64;
    for g in &grads {
        for t in [&g.0, &g.1, &g.2, &g.3, &g.4] {
            for v in t.iter() {
                bits = bits.rotate_left(5).wrapping_mul(0x9E3779B97F4A7C15) ^ u64::from(v.to_bits());
            }
        }
    }
    for (i, name) in ["qkv", "o", "mlp", "mlp back", "o back", "qkv back"].iter().enumerate() {
        println!("{name:9} {:7.2} ms  {:6.1} GFLOP/s", best[i] * 1e3, flops[i] * n / best[i]);
    }
    let total: f64 = best.iter().sum();
    println!(
        "total     {:7.2} ms  {:6.1} GFLOP/s   bits {bits:016x}",
        total * 1e3,
        flops.iter().sum::<f64>() * n / total
    );
    Ok(())
}
