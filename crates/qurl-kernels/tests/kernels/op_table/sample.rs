//! Sampling with biases: greedy rows, rows at several temperatures, rows that keep some tokens.

use super::{Case, Want, sum_units};
use crate::naive;
use crate::ops::Ops;
use crate::paged::sampling;
use crate::support::{Random, as_operand, wide};
use qurl_kernels::types::{Batch, Bias, SampleRow};
use qurl_kernels::{Device, Format};
use std::rc::Rc;

/// (rows, vocabulary, d)
const SHAPES: [(usize, usize, usize); 5] =
    [(1, 7, 3), (5, 61, 17), (33, 513, 24), (7, 2100, 40), (130, 97, 8)];
/// Columns that are summed up at a time: the larger of the devices' chunks.
const CHUNK: u32 = 1024;

pub fn cases<D: Device>() -> Vec<Case<D>> {
    let mut cases = Vec::new();
    for format in [Format::F32, Format::Bf16] {
        for (seed, shape) in SHAPES.into_iter().enumerate() {
            cases.push(case(format, shape, &mut Random::new(seed as u64)));
        }
    }
    cases
}

/// What a row gives: token, log-probability and entropy.
type Sampled = [f64; 3];

fn case<D: Device>(
    format: Format,
    (rows, vocabulary, d): (usize, usize, usize),
    random: &mut Random,
) -> Case<D> {
    let factor = 2.0 / (d as f32).sqrt();
    let hidden = random.normals(rows * d);
    let w: Vec<f32> = random.normals(vocabulary * d).iter().map(|x| factor * x).collect();
    let logits =
        naive::linear(&as_operand(format, &hidden), &as_operand(format, &w), None, rows, vocabulary, d);
    let biases: Vec<Bias> = (0..rows as u32).flat_map(|row| biases(row, vocabulary as u32)).collect();
    let (mut samples, mut wants) = (Vec::new(), Vec::new());
    for (row, logits) in logits.chunks_exact(vocabulary).enumerate() {
        let own = biases.iter().filter(|bias| bias.row as usize == row);
        let (how, want) = twin(row, logits.to_vec(), own);
        samples.push(how);
        wants.push(want);
    }
    let batch = Rc::new(Batch { biases, ..sampling(samples) });
    let run = move |ops: &Ops<D>| {
        let sampled = ops.sample(&ops.up(&hidden), &ops.frozen(&w, vocabulary, d, format), &batch);
        let part = |number: fn(&qurl_kernels::types::Sampled) -> f32| {
            wide(&sampled.iter().map(number).collect::<Vec<_>>())
        };
        vec![part(|s| s.token as f32), part(|s| s.logp), part(|s| s.entropy)]
    };
    let want = move || {
        let part = |i: usize| wants.iter().map(|want| want[i]).collect();
        vec![
            Want::new("token", part(0), 0.0),
            Want::new("logp", part(1), 2.0 * sum_units(d)),
            Want::new("entropy", part(2), 2.0 * sum_units(d)),
        ]
    };
    let name = format!("sample with biases {format} {rows}x{vocabulary}x{d}");
    Case { name, run: Box::new(run), want: Box::new(want) }
}

/// Some rows have no bias; of others every third token, a whole chunk, or all but one are not sampled.
fn biases(row: u32, vocabulary: u32) -> Vec<Bias> {
    let banned = |token: u32| match row % 5 {
        0 => token % 3 == row % 3,
        1 => false,
        2 => token < CHUNK.min(vocabulary - 1),
        3 => token != vocabulary / 2,
        _ => token == row % vocabulary,
    };
    let add = |token: u32| match (row % 5, token % 7) {
        (1, _) => None,
        (_, 3) => Some(2.5),
        (_, 5) => Some(-1.25),
        _ => None,
    };
    let of = |token: u32| if banned(token) { Some(f32::NEG_INFINITY) } else { add(token) };
    (0..vocabulary).filter_map(|token| of(token).map(|add| Bias { row, token, add })).collect()
}

/// How a row is sampled, with a random number in the middle of a token's share, and what comes of it.
fn twin<'a>(row: usize, mut x: Vec<f64>, biases: impl Iterator<Item = &'a Bias>) -> (SampleRow, Sampled) {
    for bias in biases {
        x[bias.token as usize] += bias.add as f64;
    }
    let temperature = [0.0, 0.7, 1.0, 1.5][row % 4];
    let top_k = if row % 3 == 2 { 2 } else { 0 };
    let scale = if temperature == 0.0 { 1.0 } else { 1.0 / f64::from(temperature) };
    x.iter_mut().for_each(|x| *x *= scale);
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|&a, &b| x[b].total_cmp(&x[a]));
    let keeps = temperature != 0.0 && top_k > 0;
    // Kept tokens stand in this order, others in that of the vocabulary.
    let mut kept = order.clone();
    match keeps {
        true => kept.truncate(top_k as usize),
        false => kept.sort_unstable(),
    }
    let weight = |token: usize| (x[token] - x[order[0]]).exp();
    let total: f64 = kept.iter().map(|&token| weight(token)).sum();
    let token = order[0];
    let before: f64 = kept.iter().take_while(|&&kept| kept != token).map(|&kept| weight(kept)).sum();
    let uniform = (before + weight(token) / 2.0) / total;
    let logs = kept.iter().map(|&token| weight(token) / total).filter(|p| *p > 0.0).map(|p| p * p.ln());
    let how = SampleRow { temperature, top_k, uniform, ..SampleRow::greedy() };
    (how, [token as f64, (weight(token) / total).ln(), -logs.sum::<f64>()])
}
