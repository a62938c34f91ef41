//! Every naive backward against central differences of its naive forward, all in f64.
//!
//! The loss is a fixed random weighting of the outputs; each input value is moved by `STEP` to both sides.

use crate::naive;
use crate::naive_attention::{self, Store};
use crate::naive_head::{self, HeadShape};
use crate::paged::{Paged, heads};
use crate::support::{Random, wide};
use qurl_kernels::types::{Heads, Rows};

const STEP: f64 = 1e-4;
const EPS: f64 = 1e-5;

fn numbers(random: &mut Random, len: usize) -> Vec<f64> {
    wide(&random.normals(len))
}

fn weigh(weights: &[f64], values: &[f64]) -> f64 {
    assert_eq!(weights.len(), values.len());
    weights.iter().zip(values).map(|(w, v)| w * v).sum()
}

/// `gradient` must be that of `loss` at `x`, within 1e-6 of a typical value of it.
fn check(what: &str, x: &[f64], gradient: &[f64], loss: impl Fn(&[f64]) -> f64) {
    assert_eq!(x.len(), gradient.len(), "{what}: length");
    let rms = (gradient.iter().map(|g| g * g).sum::<f64>() / gradient.len() as f64).sqrt();
    assert!(rms > 0.0, "{what}: no gradient to check");
    let mut moved = x.to_vec();
    for (i, &gradient) in gradient.iter().enumerate() {
        let mut loss_at = |offset: f64| {
            moved[i] = x[i] + offset;
            loss(&moved)
        };
        // Fourth order: the error is far below the tolerance at a step that is far above the rounding of f64.
        let near = loss_at(STEP) - loss_at(-STEP);
        let far = loss_at(2.0 * STEP) - loss_at(-2.0 * STEP);
        moved[i] = x[i];
        let difference = (8.0 * near - far) / (12.0 * STEP);
        let allowed = 1e-6 * (gradient.abs() + rms);
        assert!(
            (gradient - difference).abs() <= allowed,
            "{what}[{i}]: {gradient:e}, by differences {difference:e}"
        );
    }
}

#[test]
fn linear() {
    let mut random = Random::new(1);
    let (rows, n, k) = (3, 4, 5);
    let (x, w, bias) = (numbers(&mut random, rows * k), numbers(&mut random, n * k), numbers(&mut random, n));
    let dy = numbers(&mut random, rows * n);
    let loss = |x: &[f64], w: &[f64], bias: &[f64]| weigh(&dy, &naive::linear(x, w, Some(bias), rows, n, k));
    check("dx", &x, &naive::linear_input_gradient(&dy, &w, rows, n, k), |x| loss(x, &w, &bias));
    check("dw", &w, &naive::linear_weight_gradient(&x, &dy, rows, n, k), |w| loss(&x, w, &bias));
    check("dbias", &bias, &naive::column_sums(&dy, rows, n), |bias| loss(&x, &w, bias));
}

#[test]
fn norms() {
    let mut random = Random::new(2);
    let inside = Rows { start: 3, outer: 2, stride: 14, per: 2, width: 4 };
    for rows in [Rows::dense(3, 7), inside] {
        let x = numbers(&mut random, 28);
        let (gain, dy) = (numbers(&mut random, rows.width), numbers(&mut random, 28));
        let (dx, dgain) = naive::norm_backward(&x, &gain, rows, EPS, &dy);
        check("dx", &x, &dx, |x| weigh(&dy, &naive::norm(x, &gain, rows, EPS)));
        check("dgain", &gain, &dgain, |gain| weigh(&dy, &naive::norm(&x, gain, rows, EPS)));
    }
}

#[test]
fn inverse_rope_is_its_gradient() {
    let mut random = Random::new(3);
    let (stride, heads, head_dim, positions) = (14, 3, 4, [0, 7, 2]);
    let (x, dy) = (numbers(&mut random, 3 * stride), numbers(&mut random, 3 * stride));
    let angle = |position: usize, i: usize| {
        let angle = position as f64 / (1.0 + i as f64);
        (angle.cos(), angle.sin())
    };
    let rotate = |x: &[f64], inverse| naive::rope(x, stride, heads, head_dim, &positions, angle, inverse);
    check("dx", &x, &rotate(&dy, true), |x| weigh(&dy, &rotate(x, false)));
}

#[test]
fn attention() {
    for (group, window) in [(1, None), (2, None), (7, None), (2, Some(1)), (2, Some(2)), (7, Some(3))] {
        let mut random = Random::new(4 + group as u64);
        let (heads, lengths) = (Heads { window, ..heads(2, group, 3) }, [1, 4, 3]);
        let paged = Paged::scattered(&mut random, &lengths, 2);
        let rows = paged.batch((0..3).map(|i| (i, 0..lengths[i])));
        let qkv = numbers(&mut random, rows.rows() * heads.qkv_width());
        let dout = numbers(&mut random, rows.rows() * heads.q_width());
        let forward = |qkv: &[f64]| {
            let mut kv = Store::new(paged.store_pages, paged.page_size, heads);
            kv.write(qkv, heads, &rows.slots);
            naive_attention::attention(heads, qkv, &kv, &rows.spans, &rows.pages, rows.rows()).0
        };
        let dqkv = naive_attention::attention_backward(heads, &qkv, &rows.spans, &dout);
        check(&format!("dqkv, window {window:?}"), &qkv, &dqkv, |qkv| weigh(&dout, &forward(qkv)));
    }
}

/// A query of a window sees its own key and those of the `window - 1` positions before, and no other.
#[test]
fn windows() {
    let (len, window) = (7, 3);
    let heads = Heads { window: Some(window), ..heads(1, 1, 2) };
    let mut random = Random::new(5);
    let paged = Paged::scattered(&mut random, &[len], 2);
    let rows = paged.batch([(0, 0..len)]);
    let qkv = numbers(&mut random, len * heads.qkv_width());
    let attend = |qkv: &[f64]| {
        let mut kv = Store::new(paged.store_pages, paged.page_size, heads);
        kv.write(qkv, heads, &rows.slots);
        naive_attention::attention(heads, qkv, &kv, &rows.spans, &rows.pages, len).0
    };
    let whole = attend(&qkv);
    for changed in 0..len {
        let mut moved = qkv.clone();
        moved[changed * heads.qkv_width() + heads.q_width()..][..2 * heads.head_dim].fill(0.7);
        for (row, (a, b)) in attend(&moved).chunks(2).zip(whole.chunks(2)).enumerate() {
            assert_eq!(a != b, (changed..changed + window).contains(&row), "key {changed}, query {row}");
        }
    }
}

#[test]
fn swiglu() {
    let mut random = Random::new(12);
    let (rows, f) = (3, 5);
    let (gate_up, dout) = (numbers(&mut random, rows * 2 * f), numbers(&mut random, rows * f));
    let gradient = naive::swiglu_backward(&gate_up, &dout, rows, f);
    check("gate_up", &gate_up, &gradient, |gate_up| weigh(&dout, &naive::swiglu(gate_up, rows, f)));
}

#[test]
fn embedding() {
    let mut random = Random::new(13);
    let (d, ids) = (3, [4, 0, 4, 4, 2]);
    let (table, dout) = (numbers(&mut random, 5 * d), numbers(&mut random, ids.len() * d));
    let mut gradient = vec![0.0; table.len()];
    naive::scatter_add(&dout, &ids, d, &mut gradient);
    check("table", &table, &gradient, |table| weigh(&dout, &naive::gather(table, &ids, d)));
}

#[test]
fn head() {
    let mut random = Random::new(14);
    for temperature in [1.0, 0.7, 1.6] {
        let shape = HeadShape { rows: 3, vocabulary: 7, d: 4, temperature };
        let (hidden, w) = (numbers(&mut random, 12), numbers(&mut random, 28));
        let (dlogp, dentropy, targets) = (numbers(&mut random, 3), numbers(&mut random, 3), random.ids(3, 7));
        let loss = |hidden: &[f64], w: &[f64]| {
            let out = naive_head::head(shape, hidden, w, &targets);
            weigh(&dlogp, &out.logp) + weigh(&dentropy, &out.entropy)
        };
        let (dhidden, dw) = naive_head::head_backward(shape, &hidden, &w, &targets, &dlogp, &dentropy, |x| x);
        check("dhidden", &hidden, &dhidden, |hidden| loss(hidden, &w));
        check("dw", &w, &dw, |w| loss(&hidden, w));
    }
}

#[test]
fn row_dots() {
    let mut random = Random::new(15);
    let (rows, d) = (3, 5);
    let (hidden, w, g) =
        (numbers(&mut random, rows * d), numbers(&mut random, d), numbers(&mut random, rows));
    let (dhidden, dw) = naive::row_dots_backward(&hidden, rows, &w, &g);
    check("dhidden", &hidden, &dhidden, |hidden| weigh(&g, &naive::row_dots(hidden, rows, &w)));
    check("dw", &w, &dw, |w| weigh(&g, &naive::row_dots(&hidden, rows, w)));
}
