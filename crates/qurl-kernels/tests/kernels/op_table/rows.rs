//! The operations on rows and single values: norms, embeddings, the critic's dot products, AdamW and the sum
//! of squares.

use super::{Case, Want, sum_units};
use crate::naive;
use crate::ops::Ops;
use crate::paged::sampling;
use crate::support::{Random, plus, wide};
use qurl_kernels::ops::{
    AddPieces, Gather, Index, Narrow, NormBackward, RmsNormBackward, RowDots, RowDotsBackward, Sample,
    ScatterAdd, Slice, Update, Widen,
};
use qurl_kernels::types::{
    AdamW, MomentFormat, MomentShape, MomentValues, Moments, Rows, SQUARES_BLOCK, SampleRow, Token,
};
use qurl_kernels::{Device, DeviceError, Queue};

/// (rows, width)
const SHAPES: [(usize, usize); 11] = [
    (1, 1),
    (1, 5),
    (1, 61),
    (13, 17),
    (200, 33),
    (70, 256),
    (3, 1101),
    (401, 16),
    (37, 1536),
    (5, 3584),
    (18, 5120),
];
const EPS: f32 = 1e-5;

pub fn cases<D: Device>() -> Vec<Case<D>> {
    let mut cases = Vec::new();
    for (seed, (rows, width)) in SHAPES.into_iter().enumerate() {
        let seed = seed as u64;
        cases.extend([rmsnorm(rows, width, seed), embedding(rows, width, seed), row_dots(rows, width, seed)]);
    }
    for (seed, len) in [1, 17, 513, 40_003].into_iter().enumerate() {
        cases.extend([
            adamw(len, 1, seed as u64),
            adamw(len, 1000, seed as u64),
            adamw_of_pieces(len, seed as u64),
            adamw_in_fewer_bits(len, seed as u64),
            sum_squares(len, seed as u64),
        ]);
        cases.extend([1, 2, 8].map(|count| add_pieces(count, len, seed as u64)));
        cases.push(narrow(len, seed as u64));
    }
    cases
}

fn rmsnorm<D: Device>(rows: usize, width: usize, seed: u64) -> Case<D> {
    let mut random = Random::new(seed);
    let [x, dy, old_dx] = [(); 3].map(|_| random.normals(rows * width));
    let [gain, old_dgain] = [(); 2].map(|_| random.normals(width));
    let given = (x.clone(), dy.clone(), old_dx.clone(), gain.clone(), old_dgain.clone());
    let run = move |ops: &Ops<D>| {
        let (x, dy, old_dx, gain, old_dgain) = &given;
        let (x, gain) = (ops.up(x), ops.up(gain));
        let mut out = ops.stale(rows * width);
        ops.rmsnorm(&x, rows, &gain, EPS, &mut out);
        let mut dgain = ops.up(old_dgain);
        let backward = |dgain: Option<&mut D::Tensor>| {
            let (mut dy, mut dx) = (ops.up(dy), ops.up(old_dx));
            let norm = NormBackward { gain: &gain, eps: EPS, dgain };
            ops.queue().rmsnorm_backward(RmsNormBackward { x: &x, rows, norm, dy: &mut dy, dx: &mut dx });
            dx
        };
        let (dx, frozen) = (backward(Some(&mut dgain)), backward(None));
        [out, dx, dgain, frozen].iter().map(|t| ops.down(t)).collect()
    };
    let want = move || {
        let (x, gain, shape) = (wide(&x), wide(&gain), Rows::dense(rows, width));
        let (dx, dgain) = naive::norm_backward(&x, &gain, shape, EPS as f64, &wide(&dy));
        let dx = plus(dx, &old_dx);
        vec![
            Want::new("out", naive::norm(&x, &gain, shape, EPS as f64), sum_units(width)),
            Want::new("dx", dx.clone(), sum_units(width)),
            Want::new("dgain", plus(dgain, &old_dgain), sum_units(rows.max(width))),
            Want::new("dx, gain frozen", dx, sum_units(width)),
        ]
    };
    Case { name: format!("rmsnorm {rows}x{width}"), run: Box::new(run), want: Box::new(want) }
}

/// Rows of a table by numbers, by the tokens of a batch, of which every second is named by the row of a
/// sample that gave it, and by the rows that a batch samples.
fn embedding<D: Device>(rows: usize, d: usize, seed: u64) -> Case<D> {
    let mut random = Random::new(seed);
    let vocabulary = 37;
    let table = random.normals(vocabulary * d);
    let gradients = random.normals(rows * d);
    let ids = random.ids(rows, vocabulary);
    let given = (table.clone(), gradients.clone(), ids.clone());
    let run = move |ops: &Ops<D>| {
        let (table, gradients, ids) = &given;
        let mut named = sampling(vec![SampleRow::greedy(); rows]);
        named.tokens = ids.iter().map(|&id| Token::Id(id)).collect();
        // The argmax of a row of the identity is its number: this samples all tokens.
        let identity = ops.identity(vocabulary);
        let one_hot = |&id: &u32| (0..vocabulary).map(move |i| if i == id as usize { 1.0 } else { 0.0 });
        let hidden = ops.up(&ids.iter().flat_map(one_hot).collect::<Vec<f32>>());
        let mut sampled = ops.device().tokens(rows).expect("memory for a test");
        let batch = &ops.load(&named);
        ops.queue().sample(Sample { hidden: &hidden, head: &identity, batch, out: &mut sampled });

        let gathered = |table: &D::Tensor, index: Index<D>| {
            let mut out = ops.stale(rows * d);
            ops.queue().gather(Gather { table, index, width: d, out: &mut out });
            ops.down(&out)
        };
        let table = &ops.up(table);
        let by_rows = gathered(table, Index::Rows(ids));
        let by_tokens = gathered(table, Index::Tokens { batch, sampled: None });
        for (row, token) in named.tokens.iter_mut().enumerate().step_by(2) {
            *token = Token::Sampled(row as u32);
        }
        let mixed = &ops.load(&named);
        let by_samples = gathered(table, Index::Tokens { batch: mixed, sampled: Some(&sampled) });
        // As many rows, some of them more than once.
        named.sampled_rows = ids.iter().map(|&id| id % rows as u32).collect();
        let stream = &ops.up(gradients);
        let picked = gathered(stream, Index::Rows(&named.sampled_rows));
        let picking = &ops.load(&named);
        let by_sampled_rows = gathered(stream, Index::Sampled(picking));
        assert_eq!(by_sampled_rows, picked, "rows that are sampled");

        let scattered = |index: Index<D>| {
            let mut table = ops.up(&given.0);
            let rows = &ops.up(gradients);
            ops.queue().scatter_add(ScatterAdd { rows, index, width: d, table: &mut table });
            ops.down(&table)
        };
        let scattered = [scattered(Index::Rows(ids)), scattered(Index::Tokens { batch, sampled: None })];
        [by_rows, by_tokens, by_samples].into_iter().chain(scattered).collect()
    };
    let want = move || {
        let mut table = wide(&table);
        let out = naive::gather(&table, &ids, d);
        naive::scatter_add(&wide(&gradients), &ids, d, &mut table);
        vec![
            Want::new("gathered", out.clone(), 0.0),
            Want::new("gathered tokens", out.clone(), 0.0),
            Want::new("gathered samples", out, 0.0),
            Want::new("scattered", table.clone(), sum_units(rows / vocabulary)),
            Want::new("scattered tokens", table, sum_units(rows / vocabulary)),
        ]
    };
    Case { name: format!("embedding {rows}x{d}"), run: Box::new(run), want: Box::new(want) }
}

fn row_dots<D: Device>(rows: usize, d: usize, seed: u64) -> Case<D> {
    let mut random = Random::new(seed);
    let (hidden, w, gradient, old_dw) =
        (random.normals(rows * d), random.normals(d), random.normals(rows), random.normals(d));
    let given = (hidden.clone(), w.clone(), gradient.clone(), old_dw.clone());
    let run = move |ops: &Ops<D>| {
        let (hidden, w, gradient, old_dw) = &given;
        let (hidden, w) = (ops.up(hidden), ops.up(w));
        let out = ops.queue().row_dots(RowDots { hidden: &hidden, rows, w: &w }).expect("dot products");
        let (mut dhidden, mut dw) = (ops.stale(rows * d), ops.up(old_dw));
        ops.queue().row_dots_backward(RowDotsBackward {
            hidden: &hidden,
            w: &w,
            gradient,
            dhidden: &mut dhidden,
            dw: &mut dw,
        });
        vec![wide(&out), ops.down(&dhidden), ops.down(&dw)]
    };
    let want = move || {
        let (hidden, w) = (wide(&hidden), wide(&w));
        let (dhidden, dw) = naive::row_dots_backward(&hidden, rows, &w, &wide(&gradient));
        let dw = plus(dw, &old_dw);
        vec![
            Want::new("out", naive::row_dots(&hidden, rows, &w), sum_units(d)),
            Want::new("dhidden", dhidden, 2.0),
            Want::new("dw", dw, sum_units(rows)),
        ]
    };
    Case { name: format!("row_dots {rows}x{d}"), run: Box::new(run), want: Box::new(want) }
}

fn adamw<D: Device>(len: usize, step: u64, seed: u64) -> Case<D> {
    let mut random = Random::new(seed);
    let [w, g, m] = [(); 3].map(|_| random.normals(len));
    let v: Vec<f32> = random.normals(len).iter().map(|x| x * x).collect();
    let constants =
        AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, step, grad_scale: 0.5 };
    let given = (w.clone(), g.clone(), m.clone(), v.clone());
    let run = move |ops: &Ops<D>| {
        let (w, g, m, v) = given.clone();
        let (mut w, g) = (ops.up(&w), &ops.up(&g));
        let mut moments = ops.device().moments(shape(len, MomentFormat::F32)).expect("memory for a test");
        let start = Moments { first: MomentValues::F32(m), second: MomentValues::F32(v) };
        ops.queue().write_moments(&mut moments, &start).expect("written");
        let moments_mut = &mut moments;
        ops.queue().adamw(Update { adamw: constants, w: &mut w, g, at: 0, moments: moments_mut });
        let moments = ops.queue().read_moments(&moments).expect("moments");
        let Moments { first: MomentValues::F32(m), second: MomentValues::F32(v) } = moments else {
            panic!("moments of another format")
        };
        vec![ops.down(&w), wide(&m), wide(&v)]
    };
    let want = move || {
        let one = |i: usize| naive::adamw(&constants, w[i] as f64, g[i] as f64, m[i] as f64, v[i] as f64);
        let all: Vec<_> = (0..len).map(one).collect();
        vec![
            Want::new("w", all.iter().map(|x| x.0).collect(), 8.0),
            Want::new("m", all.iter().map(|x| x.1).collect(), 4.0),
            Want::new("v", all.iter().map(|x| x.2).collect(), 8.0),
        ]
    };
    Case { name: format!("adamw {len} step {step}"), run: Box::new(run), want: Box::new(want) }
}

/// A tensor updated piece by piece, with moments of each piece, has the bits of the tensor updated as a
/// whole, and so has one whose moments are on the host: weights and moments, in every format.
fn adamw_of_pieces<D: Device>(len: usize, seed: u64) -> Case<D> {
    let mut random = Random::new(seed);
    let [w, g] = [(); 2].map(|_| random.normals(len));
    let run = move |ops: &Ops<D>| {
        let g = &ops.up(&g);
        for format in MomentFormat::ALL {
            let whole = updated(ops, &w, g, shape(len, format));
            for of in [shape(SQUARES_BLOCK, format), MomentShape { on_host: true, ..shape(len, format) }] {
                assert_eq!(updated(ops, &w, g, of), whole, "{of:?} of {len}");
            }
        }
        Vec::new()
    };
    Case { name: format!("adamw of pieces {len}"), run: Box::new(run), want: Box::new(Vec::new) }
}

/// Moments on the device.
fn shape(len: usize, format: MomentFormat) -> MomentShape {
    MomentShape { len, format, on_host: false }
}

/// Weights and the bits of the moments after three updates of pieces with at most such moments.
pub(crate) fn updated<D: Device>(
    ops: &Ops<D>,
    w: &[f32],
    g: &D::Tensor,
    of: MomentShape,
) -> (Vec<f64>, Vec<u32>) {
    let MomentShape { len: piece, format, .. } = of;
    let bits = |values: MomentValues| -> Vec<u32> {
        match values {
            MomentValues::F32(values) => values.into_iter().map(f32::to_bits).collect(),
            MomentValues::Bf16(values) => values.into_iter().map(u32::from).collect(),
            MomentValues::EightBit { values, .. } => values.into_iter().map(u32::from).collect(),
        }
    };
    let (mut weights, mut first, mut second) = (Vec::new(), Vec::new(), Vec::new());
    for (at, w) in (0..w.len()).step_by(piece).zip(w.chunks(piece)) {
        let mut moments =
            ops.device().moments(MomentShape { len: w.len(), ..of }).expect("memory for a test");
        let (w_len, mut w) = (w.len(), ops.up(w));
        for step in 1..4 {
            let grad_scale = 0.5 / step as f32;
            let adamw =
                AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, step, grad_scale };
            ops.queue().adamw(Update { adamw, w: &mut w, g, at, moments: &mut moments });
        }
        weights.extend(ops.down(&w));
        let read = ops.queue().read_moments(&moments).expect("moments");
        // What was read is written as it was.
        ops.queue().write_moments(&mut moments, &read).expect("written");
        for other in MomentFormat::ALL.into_iter().filter(|other| *other != format) {
            let refused = ops.queue().write_moments(&mut moments, &Moments::zeros(w_len, other));
            assert_eq!(refused, Err(DeviceError::Moments { found: other, expected: format }));
        }
        assert_eq!(ops.queue().read_moments(&moments), Ok(read.clone()));
        first.extend(bits(read.first));
        second.extend(bits(read.second));
    }
    first.extend(second);
    (weights, first)
}

/// An update with moments in fewer bits: weights as an update in f32 from the same rounded moments gives
/// them, new moments next to what it gives, and their mean over updates right.
fn adamw_in_fewer_bits<D: Device>(len: usize, seed: u64) -> Case<D> {
    let mut random = Random::new(seed);
    let [w, g] = [(); 2].map(|_| random.normals(len));
    let run = move |ops: &Ops<D>| {
        let g_up = &ops.up(&g);
        let adamw = |step| AdamW {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-8,
            weight_decay: 0.1,
            step,
            grad_scale: 1.0,
        };
        // A single number may be off by more than many in the mean.
        let few = if len < 100 { 8.0 } else { 1.0 };
        for (format, far, off) in [(MomentFormat::Bf16, 2e-3, 1e-3), (MomentFormat::EightBit, 2e-2, 1e-2)] {
            let [mut exact, mut rounded] = [MomentFormat::F32, format]
                .map(|format| ops.device().moments(shape(len, format)).expect("memory for a test"));
            let [mut w_exact, mut w_rounded] = [(); 2].map(|_| ops.up(&w));
            for step in 1..=200 {
                for (w, moments) in [(&mut w_exact, &mut exact), (&mut w_rounded, &mut rounded)] {
                    ops.queue().adamw(Update { adamw: adamw(step), w, g: g_up, at: 0, moments });
                }
            }
            // The same gradient two hundred times: what an update takes off is 1e-3 in both.
            let [a, b] = [&w_exact, &w_rounded].map(|w| ops.down(w));
            let moved = |x: &[f64]| x.iter().zip(&w).map(|(x, w)| (x - *w as f64).abs()).sum::<f64>();
            let apart: f64 = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).sum::<f64>() / moved(&a);
            assert!(apart < few * far, "{format:?}: weights are {apart} apart");
            let bias = moved(&b) / moved(&a) - 1.0;
            assert!(bias.abs() < few * off, "{format:?}: updates are {bias} too large");
        }
        Vec::new()
    };
    Case { name: format!("adamw in fewer bits {len}"), run: Box::new(run), want: Box::new(Vec::new) }
}

/// To bf16 and back: what rounding to the nearest gives, to the bit, from a place in the middle on.
fn narrow<D: Device>(len: usize, seed: u64) -> Case<D> {
    let mut random = Random::new(seed);
    let values = random.normals(len);
    let given = values.clone();
    let run = move |ops: &Ops<D>| {
        let (from, mut words) = (&ops.up(&given), ops.up(&vec![0.0; len.div_ceil(2) + 3]));
        ops.queue().narrow(Narrow { from, len, to: &mut words, at: 6 });
        let mut all = ops.up(&vec![9.0; len + 7]);
        ops.queue().widen(Widen { from: &words, to: &mut all, len: len + 6 });
        vec![ops.down(&all)]
    };
    let want = move || {
        let round = |x: &f32| {
            let bits = x.to_bits();
            f64::from(f32::from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000))
        };
        let expected: Vec<f64> = [0.0; 6].into_iter().chain(values.iter().map(round)).chain([9.0]).collect();
        vec![Want::new("rounded", expected, 0.0)]
    };
    Case { name: format!("narrow {len}"), run: Box::new(run), want: Box::new(want) }
}

/// The tree in f32, as the documentation has it, to the bit; and plain addition.
fn add_pieces<D: Device>(count: usize, len: usize, seed: u64) -> Case<D> {
    fn tree(pieces: &[&[f32]], i: usize) -> f32 {
        match pieces {
            [piece] => piece[i],
            _ => {
                let (left, right) = pieces.split_at(pieces.len() / 2);
                tree(left, i) + tree(right, i)
            }
        }
    }
    let mut random = Random::new(seed);
    let (pieces, old) = (random.normals(count * len), random.normals(len + 3));
    let given = (pieces.clone(), old.clone());
    let run = move |ops: &Ops<D>| {
        let (pieces, mut to) = (&ops.up(&given.0), ops.up(&given.1));
        let (mut added, mut drained, mut filled) = (ops.up(&given.1), ops.up(&given.0), ops.up(&given.1));
        ops.queue().add_pieces(AddPieces { pieces, count, len, to: &mut to, at: 3 });
        ops.queue().add(pieces, &mut added, len);
        ops.queue().drain(&mut drained, &mut filled, len);
        // A rank may have no piece of a small tensor.
        let empty = ops.device().zeros(0).expect("memory for a test");
        ops.queue().add_pieces(AddPieces { pieces: &empty, count: 1, len: 0, to: &mut to, at: 3 });
        assert_eq!(ops.queue().checksum(&empty), Ok(qurl_kernels::checksum::values(&[])));
        vec![ops.down(&to), ops.down(&added), ops.down(&filled), ops.down(&drained)]
    };
    let want = move || {
        let each: Vec<&[f32]> = pieces.chunks(len).collect();
        let sums = (0..len).map(|i| tree(&each, i)).collect::<Vec<f32>>();
        let added = (0..len).map(|i| old[i] + pieces[i]);
        let added: Vec<f32> = added.chain(old[len..].iter().copied()).collect();
        let drained = [&vec![0.0; len][..], &pieces[len..]].concat();
        vec![
            Want::new("sum", wide(&[&old[..3], &sums].concat()), 0.0),
            Want::new("added", wide(&added), 0.0),
            Want::new("filled", wide(&added), 0.0),
            Want::new("drained", wide(&drained), 0.0),
        ]
    };
    Case { name: format!("add_pieces {count}x{len}"), run: Box::new(run), want: Box::new(want) }
}

fn sum_squares<D: Device>(len: usize, seed: u64) -> Case<D> {
    let mut random = Random::new(seed);
    // One tensor, and three of different lengths.
    let tensors = [len, 3, 20_000].map(|len| random.normals(len));
    let given = tensors.clone();
    let run = move |ops: &Ops<D>| {
        let [x, y, z] = given.each_ref().map(|values| ops.up(values));
        let sum = |tensors: &[&D::Tensor]| ops.queue().sum_squares(tensors).expect("a sum");
        let all = sum(&[&y, &x, &z]);
        // The same from blocks that several ranks have summed: bit for bit.
        let blocks = [&y, &x, &z].map(|tensor| {
            let starts = (0..D::len(tensor)).step_by(SQUARES_BLOCK);
            let slices: Vec<Slice<D>> =
                starts.map(|at| Slice { tensor, at, len: SQUARES_BLOCK.min(D::len(tensor) - at) }).collect();
            ops.queue().block_squares(&slices).expect("sums").concat()
        });
        assert_eq!(ops.queue().add_block_squares(&blocks).expect("a sum"), all);
        vec![vec![sum(&[&x]), all]]
    };
    let want = move || {
        let [x, y, z] = tensors.each_ref().map(|values| wide(values).iter().map(|x| x * x).sum::<f64>());
        // Summed in f64: far better than a rounding of f32.
        vec![Want::new("sums", vec![x, y + x + z], 1e-5)]
    };
    Case { name: format!("sum_squares {len}"), run: Box::new(run), want: Box::new(want) }
}
