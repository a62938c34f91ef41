//! Operations that CUDA does in fewer kernels where nothing is kept for a backward pass, and backward
//! operations that round their operands in other kernels than their parts do: the bits are the same.

use crate::cuda::{device, fits};
use crate::fused::check_linear_backward;
use crate::naive;
use crate::ops::{Ops, Tables, cpus};
use crate::paged::{Paged, heads};
use crate::support::{Random, assert_bits, distance, round_bf16};
use qurl_kernels::ops::{
    Attend, Head, HeadBackward, HeadTraining, KeptAttention, Linear, LinearBackward, Mlp, MlpBackward,
    MlpPass, Norm, NormBackward, Output,
};
use qurl_kernels::types::{Batch, HeadGradient, HeadOutput, KvFormat, LossGradient};
use qurl_kernels::{Device, DeviceError, Format, Queue};

const EPS: f32 = 1e-6;

/// Rows of an MLP have the bits they have alone, with projections that are kept and with weights that are
/// trained, and what its parts give within rounding: the sums of bf16 and fp8 are cut elsewhere.
#[test]
fn an_mlp_equals_its_parts_and_does_not_depend_on_the_batch() {
    let Some(cuda) = device() else { return };
    // From the fourth on, gate and up projections of int8 have tiles of 40, 48, 64 and, two rounds of them,
    // 40 columns (`cuda/gemm.rs`); in the last those of bf16 have tiles of 192 tokens, with sums cut inside
    // tiles.
    let shapes = [
        (300, 136, 192),
        (300, 72, 320),
        (300, 256, 8512),
        (300, 896, 4864),
        (300, 512, 6144),
        (300, 512, 8192),
        (300, 1024, 8960),
        (1700, 1024, 8960),
    ];
    for (rows, d, f) in shapes.into_iter().filter(|&(rows, d, f)| fits(rows, 2 * f, d)) {
        check_mlp(&cuda, rows, d, f);
    }
}

/// The check itself, where there is no GPU; so for the others below.
#[test]
fn an_mlp_on_the_cpu_equals_its_parts() {
    for cpu in cpus(2) {
        check_mlp(&cpu, 300, 32, 48);
    }
}

fn check_mlp<D: Device>(ops: &Ops<D>, rows: usize, d: usize, f: usize) {
    let mut random = Random::new(4);
    let (x, gain) = (random.normals(rows * d), ops.up(&random.normals(d)));
    let small = |values: Vec<f32>| values.into_iter().map(|v| 0.05 * v).collect::<Vec<f32>>();
    let (gate_up, down) = (small(random.normals(2 * f * d)), small(random.normals(d * f)));
    let norm = || Norm { gain: &gain, eps: EPS };
    for format in [Format::F32, Format::Bf16, Format::Int8, Format::Fp8, Format::Int4, Format::Nvfp4] {
        let run = |[gate_up, down]: &[D::Weight; 2], from: usize, count: usize, keep: bool| {
            let mut y = ops.up(&x[from * d..][..count * d]);
            // Quantized weights keep for gradients in bf16.
            let gradients = if format.is_quantized() { Format::Bf16 } else { format };
            let mut kept = keep.then(|| ops.kept_mlp(count, f, gradients));
            let kept = kept.as_mut();
            ops.queue().mlp(Mlp {
                gate_up_adapter: None,
                down_adapter: None,
                x: &mut y,
                rows: count,
                norm: norm(),
                gate_up,
                down,
                pass: kept.map_or(MlpPass::Forward, MlpPass::Keep),
            });
            ops.down(&y)
        };
        let weights = [ops.frozen(&gate_up, 2 * f, d, format), ops.frozen(&down, d, f, format)];
        let all = run(&weights, 0, rows, false);
        let off = off_its_parts(ops, &weights, &x, norm(), f, &all);
        println!("mlp of {d} and {f}, {format}: {off:.1e} from its parts");
        assert!(off < 2e-3, "{format}: {off:.1e}");
        if !format.is_quantized() {
            let trained = [ops.trained(&gate_up, 2 * f, d, format), ops.trained(&down, d, f, format)];
            for (from, count) in [(0, rows), (7, 5), (3, 64), (20, 128), (50, 250)] {
                for kept in [false, true] {
                    let what = format!("trained mlp {format}: {count} rows from {from}, kept: {kept}");
                    assert_bits(&what, &run(&trained, from, count, kept), &all[from * d..][..count * d]);
                }
            }
        }
        for (from, count) in
            [(0, 1), (299, 1), (7, 5), (30, 16), (100, 33), (3, 64), (20, 128), (2, 200), (50, 250)]
        {
            for kept in [false, format.is_quantized()] {
                let what = format!("mlp {format}: {count} rows from {from}, kept: {kept}");
                assert_bits(&what, &run(&weights, from, count, kept), &all[from * d..][..count * d]);
            }
        }
    }
}

/// How far an MLP of width `f` is from a normed linear layer, SwiGLU on the host and another linear layer.
fn off_its_parts<D: Device>(
    ops: &Ops<D>,
    [gate_up, down]: &[D::Weight; 2],
    x: &[f32],
    norm: Norm<D>,
    f: usize,
    all: &[f64],
) -> f64 {
    let (mut y, rows) = (ops.up(x), x.len() / D::len(norm.gain));
    let projected = projections(ops, &y, rows, norm, gate_up, f);
    let activated = naive::swiglu(&ops.down(&projected), rows, f);
    let activated = ops.up(&activated.iter().map(|&x| x as f32).collect::<Vec<f32>>());
    ops.linear(&activated, rows, down, None, Output::Add, &mut y);
    distance(all, &ops.down(&y))
}

/// Gate and up projections by a linear layer.
fn projections<D: Device>(
    ops: &Ops<D>,
    x: &D::Tensor,
    rows: usize,
    norm: Norm<D>,
    w: &D::Weight,
    f: usize,
) -> D::Tensor {
    let (mut out, output) = (ops.stale(rows * 2 * f), Output::Store);
    ops.queue().linear(Linear {
        adapter: None,
        x,
        rows,
        norm: Some(norm),
        w,
        bias: None,
        output,
        out: &mut out,
    });
    out
}

/// The backward pass rounds its operands in other kernels than its parts do, and nothing may come of it but
/// what [`Rounding`] says. Shapes go up and down, so that workspace is used again; rows of 36 and 37 are too
/// odd for cuBLASLt, those of 37 for words of four.
#[test]
fn a_backward_pass_equals_its_parts() {
    let Some(cuda) = device() else { return };
    for (d, f) in [(256, 512), (64, 36), (48, 37), (896, 1032), (128, 2056)] {
        for rows in [1, 7, 300, 64].into_iter().filter(|&rows| fits(rows, 2 * f, d)) {
            check_linear_backward(&cuda, rows, d, 2 * f);
            check_mlp_backward(&cuda, Rounding::Kept, rows, d, f);
        }
    }
    if fits(300, 2 * 8960, 1536) {
        check_linear_backward(&cuda, 300, 1536, 2 * 8960);
        // Whole tiles of many tokens keep their projections.
        check_mlp_backward(&cuda, Rounding::Kept, 600, 512, 1024);
    }
}

#[test]
fn a_backward_pass_on_the_cpu_equals_its_parts() {
    for cpu in cpus(2) {
        check_mlp_backward(&cpu, Rounding::Operands, 7, 24, 37);
    }
}

/// What a device rounds to bf16 in the backward pass of an MLP with bf16 weights.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rounding {
    /// Operands of GEMMs, in the bits of the parts.
    Operands,
    /// Kept projections and the gradient of SwiGLU's output, too; the latter by another GEMM than that of the
    /// parts, whose sums may have another order.
    Kept,
}

/// Backward of an MLP, in one and in its parts.
fn check_mlp_backward<D: Device>(ops: &Ops<D>, rounding: Rounding, rows: usize, d: usize, f: usize) {
    let mut random = Random::new(35);
    let (stream, gain) = (random.normals(rows * d), &ops.up(&random.normals(d)));
    let x = &ops.up(&stream);
    let (dy, old_dgain) = (random.normals(rows * d), random.normals(d));
    let (first, second) = (random.normals(2 * f * d), random.normals(d * f));
    let (old_first, old_second) = (random.normals(2 * f * d), random.normals(d * f));
    // Far gates too, where the slope of SwiGLU is next to nothing.
    let first: Vec<f32> = first.iter().map(|v| 4.0 * v / (d as f32).sqrt()).collect();
    // The format of the gradients, and that of the weights that ran forward.
    let (bf16, f32) = (Format::Bf16, Format::F32);
    for (format, ran) in [(f32, f32), (bf16, bf16), (bf16, Format::Int8), (bf16, Format::Fp8)] {
        let (gate_up, down) = (&ops.trained(&first, 2 * f, d, format), &ops.trained(&second, d, f, format));
        let frozen = [ops.frozen(&first, 2 * f, d, ran), ops.frozen(&second, d, f, ran)];
        let [ran_gate_up, ran_down] = match ran == format {
            true => [gate_up, down],
            false => [&frozen[0], &frozen[1]],
        };
        let rounds = format == Format::Bf16 && rounding == Rounding::Kept;
        let run = |together: bool, trained: bool| {
            let mut dx = ops.up(&dy);
            let [mut dfirst, mut dsecond, mut dgain] =
                [&old_first, &old_second, &old_dgain].map(|old| ops.up(old));
            let norm = NormBackward { gain, eps: EPS, dgain: trained.then_some(&mut dgain) };
            let (dgate_up, ddown) = (trained.then_some(&mut dfirst), trained.then_some(&mut dsecond));
            if together {
                let (kept, mut y) = (&mut ops.kept_mlp(rows, f, format), ops.up(&stream));
                let forward = Norm { gain, eps: EPS };
                ops.queue().mlp(Mlp {
                    gate_up_adapter: None,
                    down_adapter: None,
                    x: &mut y,
                    rows,
                    norm: forward,
                    gate_up: ran_gate_up,
                    down: ran_down,
                    pass: MlpPass::Keep(kept),
                });
                ops.queue().mlp_backward(MlpBackward {
                    gate_up_adapter: None,
                    down_adapter: None,
                    x,
                    rows,
                    norm,
                    gate_up,
                    down,
                    kept,
                    dgate_up,
                    ddown,
                    dx: &mut dx,
                });
            } else {
                let [unread, mut dactivated] = [(); 2].map(|_| ops.stale(rows * f));
                let part = LinearBackward {
                    adapter: None,
                    x: &unread,
                    rows,
                    norm: None,
                    w: down,
                    dy: &dx,
                    dw: None,
                    dbias: None,
                    dx: Some(&mut dactivated),
                };
                ops.queue().linear_backward(part);
                let gates = projections(ops, x, rows, Norm { gain, eps: EPS }, ran_gate_up, f);
                let (gates, dactivated) = (ops.down(&gates), ops.down(&dactivated));
                let (activated, mut dprojected) = swiglu_backward(ops, &gates, &dactivated, rows, f);
                if rounds {
                    let [gates, dactivated] =
                        [gates, dactivated].map(|v| v.into_iter().map(round_bf16).collect::<Vec<f64>>());
                    (_, dprojected) = swiglu_backward(ops, &gates, &dactivated, rows, f);
                }
                let part = LinearBackward {
                    adapter: None,
                    x: &activated,
                    rows,
                    norm: None,
                    w: down,
                    dy: &dx,
                    dw: ddown,
                    dbias: None,
                    dx: None,
                };
                ops.queue().linear_backward(part);
                let (dy, dw, dx) = (&dprojected, dgate_up, Some(&mut dx));
                let (norm, w) = (Some(norm), gate_up);
                ops.queue().linear_backward(LinearBackward {
                    adapter: None,
                    x,
                    rows,
                    norm,
                    w,
                    dy,
                    dw,
                    dbias: None,
                    dx,
                });
            }
            [dx, dgain, dfirst, dsecond].map(|t| ops.down(&t))
        };
        let (got, want) = (run(true, true), run(false, true));
        let what = format!("an mlp {format} run in {ran}, {rows} rows of {d} and {f} on {}", ops.name());
        for (name, (got, want)) in ["dx", "dgain", "dgate_up", "ddown"].iter().zip(got.iter().zip(&want)) {
            let what = format!("{name} of {what}");
            match rounds {
                false => assert_bits(&what, got, want),
                // One rounding more or less would be a distance of 1e-3.
                true => assert!(distance(got, want) < 4e-4, "{what}: {:.1e}", distance(got, want)),
            }
        }
        assert_bits(&format!("dx of frozen {what}"), &run(true, false)[0], &got[0]);
    }
}

/// SwiGLU's output and the gradient of the projections, by the f32 MLP between weights that move numbers and
/// nothing else; the norm of rows of zeros with an eps of one does nothing either.
fn swiglu_backward<D: Device>(
    ops: &Ops<D>,
    projected: &[f64],
    dactivated: &[f64],
    rows: usize,
    f: usize,
) -> (D::Tensor, D::Tensor) {
    let backward = |d: usize, gate_up: &[f32], down: &[f32], dy: &[f32]| {
        let gate_up = &ops.trained(gate_up, 2 * f, d, Format::F32);
        let down = &ops.trained(down, d, f, Format::F32);
        let (x, gain) = (&ops.up(&vec![0.0; rows * d]), &ops.up(&vec![1.0; d]));
        let mut kept = kept_of(ops, projected, rows, f);
        let (mut dx, mut ddown) = (ops.up(dy), ops.up(&vec![0.0; d * f]));
        ops.queue().mlp_backward(MlpBackward {
            gate_up_adapter: None,
            down_adapter: None,
            x,
            rows,
            norm: NormBackward { gain, eps: 1.0, dgain: None },
            gate_up,
            down,
            kept: &mut kept,
            dgate_up: None,
            ddown: Some(&mut ddown),
            dx: &mut dx,
        });
        (dx, ddown)
    };
    let unit = |same: bool| if same { 1.0 } else { 0.0 };
    // Each row has a column of its own, whose gradient is one: that of the weights is the activated row.
    let dy: Vec<f32> = (0..rows * rows).map(|i| unit(i / rows == i % rows)).collect();
    let (_, activated) = backward(rows, &vec![0.0; 2 * f * rows], &vec![0.0; rows * f], &dy);
    // The gradient of the output comes in the first f columns, that of the projections goes to the other 2 f.
    let d = 3 * f;
    let down: Vec<f32> = (0..d * f).map(|i| unit(i / f == i % f)).collect();
    let gate_up: Vec<f32> = (0..2 * f * d).map(|i| unit(f + i / d == i % d)).collect();
    let given: Vec<f32> = dactivated.iter().map(|&x| x as f32).collect();
    let dy: Vec<f32> = given.chunks_exact(f).flat_map(|row| [row, &vec![0.0; 2 * f]].concat()).collect();
    let (dx, _) = backward(d, &gate_up, &down, &dy);
    let dx: Vec<f32> = ops.down(&dx).iter().map(|&x| x as f32).collect();
    let dprojected: Vec<f32> = dx.chunks_exact(d).flat_map(|row| &row[f..]).copied().collect();
    (activated, ops.up(&dprojected))
}

/// What an f32 MLP keeps whose projections are these: the identity of rows whose norm does nothing, since eps
/// is so large that its root, a power of two, is all there is of the rows' mean squares.
fn kept_of<D: Device>(ops: &Ops<D>, projected: &[f64], rows: usize, f: usize) -> D::KeptMlp {
    let values: Vec<f32> = projected.iter().map(|&x| x as f32).collect();
    let (mut x, gain) = (ops.up(&values), ops.up(&vec![2f32.powi(50); 2 * f]));
    let norm = Norm { gain: &gain, eps: 2f32.powi(100) };
    let (gate_up, down) = (&ops.identity(2 * f), &ops.trained(&vec![0.0; 2 * f * f], 2 * f, f, Format::F32));
    let mut kept = ops.kept_mlp(rows, f, Format::F32);
    ops.queue().mlp(Mlp {
        gate_up_adapter: None,
        down_adapter: None,
        x: &mut x,
        rows,
        norm,
        gate_up,
        down,
        pass: MlpPass::Keep(&mut kept),
    });
    kept
}

/// The head with its gradients in one pass leaves the bits of two passes, and asks for all targets in order.
#[test]
fn a_head_in_one_pass_equals_two() {
    let Some(cuda) = device() else { return };
    // The second in three parts, the last of them a small one.
    let sizes = [(70, 1501), (2700, 200_000)];
    for (rows, vocabulary) in sizes.into_iter().filter(|&(rows, vocabulary)| fits(rows, vocabulary, 64)) {
        check_head_training(&cuda, rows, vocabulary, 64);
    }
}

#[test]
fn a_head_in_one_pass_on_the_cpu_equals_two() {
    for cpu in cpus(2) {
        check_head_training(&cpu, 70, 1501, 64);
    }
}

fn check_head_training<D: Device>(ops: &Ops<D>, rows: usize, vocabulary: usize, d: usize) {
    let mut random = Random::new(6);
    let (hidden, targets) = (&ops.up(&random.normals(rows * d)), &random.ids(rows, vocabulary)[..]);
    let weights: Vec<f32> = random.normals(vocabulary * d).iter().map(|x| 0.2 * x).collect();
    let (dlogp, dentropy) = (random.normals(rows), random.normals(rows));
    for (format, temperature, entropy) in
        [(Format::F32, 1.0, true), (Format::Bf16, 1.0, false), (Format::Bf16, 0.7, true)]
    {
        let head = &ops.trained(&weights, vocabulary, d, format);
        let dentropy = if entropy { &dentropy[..] } else { &[] };
        let gradient = HeadGradient { dlogp: &dlogp, dentropy };
        let [mut want_hidden, mut got_hidden] = [(); 2].map(|_| ops.stale(rows * d));
        let [mut want_weight, mut got_weight] = [(); 2].map(|_| ops.up(&weights));
        let out = ops.queue().head(Head { hidden, head, targets, temperature }).expect("scores");
        ops.queue().head_backward(HeadBackward {
            hidden,
            head,
            trained: head,
            targets,
            temperature,
            out: &out,
            gradient,
            dhidden: &mut want_hidden,
            dweight: Some(&mut want_weight),
        });
        let mut seen = HeadOutput::default();
        let (dhidden, dweight) = (&mut got_hidden, Some(&mut got_weight));
        let training = HeadTraining { hidden, head, trained: head, targets, temperature, dhidden, dweight };
        let asked = ops.queue().head_training(training, |range, out| {
            assert_eq!((range.start, range.len()), (seen.logp.len(), out.logp.len()), "targets in order");
            seen.extend(out.clone());
            let HeadGradient { dlogp, dentropy } = gradient.part(range);
            Ok::<_, DeviceError>(LossGradient { dlogp: dlogp.to_vec(), dentropy: dentropy.to_vec() })
        });
        asked.expect("gradients");
        let what = format!("{rows} rows of {vocabulary} tokens, {format} at {temperature}");
        assert_eq!(seen, out, "{what}");
        assert_bits(&format!("dhidden of {what}"), &ops.down(&got_hidden), &ops.down(&want_hidden));
        assert_bits(&format!("dweight of {what}"), &ops.down(&got_weight), &ops.down(&want_weight));
    }
}

/// A decode step that rotates, stores, attends and converts in one kernel leaves the bits of one that keeps
/// its output, in the result and in the pages.
#[test]
fn a_decode_step_equals_its_parts() {
    let Some(cuda) = device() else { return };
    for (shape, page, kv_format) in [(2, 7, 64), (4, 7, 128), (8, 5, 128), (1, 12, 64), (2, 3, 80)]
        .into_iter()
        .flat_map(|shape| [16, 64].map(|page| (shape, page)))
        .flat_map(|(shape, page)| KvFormat::ALL.map(|format| (shape, page, format)))
    {
        check_decode(&cuda, shape, page, kv_format);
    }
}

#[test]
fn a_decode_step_on_the_cpu_equals_its_parts() {
    for cpu in cpus(2) {
        check_decode(&cpu, (2, 3, 80), 16, KvFormat::Int8);
    }
}

fn check_decode<D: Device>(
    ops: &Ops<D>,
    (kv_heads, group, head_dim): (usize, usize, usize),
    page: usize,
    kv_format: KvFormat,
) {
    // One token more than these is decoded, and then another.
    let lengths = [69, 0, 63, 130, 511, 16];
    let heads = heads(kv_heads, group, head_dim);
    let (width, inner, d) = (heads.qkv_width(), heads.q_width(), 192);
    let mut random = Random::new(5);
    let paged = Paged::scattered(&mut random, &lengths.map(|len| len + 2), page);
    let (cos, sin) = (random.normals(513 * head_dim / 2), random.normals(513 * head_dim / 2));
    let tables = Tables::new(ops, &cos, &sin);
    let earlier = random.normals(lengths.iter().sum::<usize>() * width);
    let [first, second] = [(); 2].map(|_| random.normals(lengths.len() * width));
    let (x, weights) = (random.normals(lengths.len() * d), random.normals(d * inner));
    let runs = |from: usize| lengths.into_iter().enumerate().map(move |(i, len)| (i, len + from));
    let prompts = paged.batch(lengths.into_iter().enumerate().map(|(i, len)| (i, 0..len)));
    let [one, two] = [0, 1].map(|from| paged.batch(runs(from).map(|(i, at)| (i, at..at + 1))));
    for format in [Format::F32, Format::Bf16, Format::Int8, Format::Fp8, Format::Nvfp4] {
        let o = &ops.frozen(&weights, d, inner, format);
        let attend = |rows: &Batch, qkv: &[f32], kv: &mut D::Kv, keep: bool| {
            let (batch, count) = (&ops.load(rows), rows.rows());
            let stream: Vec<f32> = x.iter().copied().cycle().take(count * d).collect();
            let (mut qkv, mut y) = (ops.up(qkv), ops.up(&stream));
            let (mut out, mut lse) = (ops.stale(count * inner), ops.stale(count * heads.heads));
            let kept = keep.then_some(KeptAttention { raw: None, out: &mut out, lse: &mut lse });
            let rope = tables.rope();
            let (qkv, x) = (&mut qkv, &mut y);
            ops.queue().attend(Attend {
                adapter: None,
                heads,
                batch,
                qkv,
                qk_norm: None,
                rope,
                kv,
                o,
                x,
                kept,
            });
            ops.down(&y)
        };
        let run = |keep: bool| {
            let mut kv = paged.stale_store(ops, heads, kv_format);
            let prompts = attend(&prompts, &earlier, &mut kv, keep);
            let decoded = attend(&one, &first, &mut kv, keep);
            // The next token sees what the pages hold now.
            [prompts, decoded, attend(&two, &second, &mut kv, true)]
        };
        let what = format!("{kv_format:?} {kv_heads}x{group}x{head_dim} pages of {page}, {format}");
        for (name, (got, want)) in
            ["prompts", "result", "pages"].iter().zip(run(false).iter().zip(&run(true)))
        {
            assert!(want.iter().all(|x| x.is_finite()), "{name}, {what}");
            assert_bits(&format!("{name}, {what}"), got, want);
        }
    }
}
