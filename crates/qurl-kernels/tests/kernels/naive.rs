//! Naive twins in f64 of the operations around attention and the head: what each one means, in plain loops.

use qurl_kernels::types::{AdamW, Rows};

/// `sum_l a(i, l) b(l, j)` for an m by n result.
fn matmul(
    m: usize,
    n: usize,
    k: usize,
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    let mut c = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            c.push((0..k).map(|l| a(i, l) * b(l, j)).sum());
        }
    }
    c
}

/// `x[rows, k] W[n, k]^T + bias`.
pub fn linear(x: &[f64], w: &[f64], bias: Option<&[f64]>, rows: usize, n: usize, k: usize) -> Vec<f64> {
    let mut out = matmul(rows, n, k, |i, l| x[i * k + l], |l, j| w[j * k + l]);
    if let Some(bias) = bias {
        for (i, out) in out.iter_mut().enumerate() {
            *out += bias[i % n];
        }
    }
    out
}

/// `dy[rows, n] W[n, k]`.
pub fn linear_input_gradient(dy: &[f64], w: &[f64], rows: usize, n: usize, k: usize) -> Vec<f64> {
    matmul(rows, k, n, |i, l| dy[i * n + l], |l, j| w[l * k + j])
}

/// `dy^T x`.
pub fn linear_weight_gradient(x: &[f64], dy: &[f64], rows: usize, n: usize, k: usize) -> Vec<f64> {
    matmul(n, k, rows, |i, l| dy[l * n + i], |l, j| x[l * k + j])
}

/// Sums of the columns of `x[rows, n]`: the gradient of a bias.
pub fn column_sums(x: &[f64], rows: usize, n: usize) -> Vec<f64> {
    (0..n).map(|j| (0..rows).map(|i| x[i * n + j]).sum()).collect()
}

/// Offsets of the rows.
fn offsets(rows: Rows) -> impl Iterator<Item = usize> {
    (0..rows.outer)
        .flat_map(move |run| (0..rows.per).map(move |r| rows.start + run * rows.stride + r * rows.width))
}

fn inverse_rms(x: &[f64], eps: f64) -> f64 {
    1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + eps).sqrt()
}

/// RMSNorm of the rows; the rest stays.
pub fn norm(x: &[f64], gain: &[f64], rows: Rows, eps: f64) -> Vec<f64> {
    let mut out = x.to_vec();
    for at in offsets(rows) {
        let scale = inverse_rms(&x[at..at + rows.width], eps);
        for (j, gain) in gain.iter().enumerate() {
            out[at + j] = x[at + j] * scale * gain;
        }
    }
    out
}

/// Gradients of [`norm`]'s input (what is no row passes through) and gain.
pub fn norm_backward(x: &[f64], gain: &[f64], rows: Rows, eps: f64, dy: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (mut dx, mut dgain) = (dy.to_vec(), vec![0.0; gain.len()]);
    for at in offsets(rows) {
        let (x, dy) = (&x[at..at + rows.width], &dy[at..at + rows.width]);
        let scale = inverse_rms(x, eps);
        let mean = (0..rows.width).map(|j| dy[j] * gain[j] * x[j]).sum::<f64>() / rows.width as f64;
        for j in 0..rows.width {
            dgain[j] += dy[j] * x[j] * scale;
            dx[at + j] = scale * (dy[j] * gain[j] - x[j] * scale * scale * mean);
        }
    }
    (dx, dgain)
}

/// Rotates the first heads of rows of `stride` by their positions, or back.
pub fn rope(
    x: &[f64],
    stride: usize,
    heads: usize,
    head_dim: usize,
    positions: &[u32],
    angle: impl Fn(usize, usize) -> (f64, f64),
    inverse: bool,
) -> Vec<f64> {
    let mut out = x.to_vec();
    let half = head_dim / 2;
    for (row, &position) in positions.iter().enumerate() {
        for head in 0..heads {
            for i in 0..half {
                let (first, second) =
                    (row * stride + head * head_dim + i, row * stride + head * head_dim + half + i);
                let (cos, sin) = angle(position as usize, i);
                let sin = if inverse { -sin } else { sin };
                out[first] = x[first] * cos - x[second] * sin;
                out[second] = x[second] * cos + x[first] * sin;
            }
        }
    }
    out
}

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `silu(gate) * up` of `gate_up[rows, 2 f]`.
pub fn swiglu(gate_up: &[f64], rows: usize, f: usize) -> Vec<f64> {
    let gate_and_up = |i: usize| (gate_up[i / f * 2 * f + i % f], gate_up[i / f * 2 * f + f + i % f]);
    (0..rows * f).map(gate_and_up).map(|(g, u)| g * sigmoid(g) * u).collect()
}

/// Gradient of `gate_up`.
pub fn swiglu_backward(gate_up: &[f64], dout: &[f64], rows: usize, f: usize) -> Vec<f64> {
    let mut gradient = vec![0.0; rows * 2 * f];
    for (i, dout) in dout.iter().enumerate().take(rows * f) {
        let at = i / f * 2 * f + i % f;
        let (g, u) = (gate_up[at], gate_up[at + f]);
        let s = sigmoid(g);
        gradient[at] = dout * u * (s + g * s * (1.0 - s));
        gradient[at + f] = dout * g * s;
    }
    gradient
}

/// `table[ids[i]]`.
pub fn gather(table: &[f64], ids: &[u32], d: usize) -> Vec<f64> {
    ids.iter().flat_map(|&id| table[id as usize * d..][..d].iter().copied()).collect()
}

/// `table[ids[i]] += rows[i]`.
pub fn scatter_add(rows: &[f64], ids: &[u32], d: usize, table: &mut [f64]) {
    for (i, &id) in ids.iter().enumerate() {
        for j in 0..d {
            table[id as usize * d + j] += rows[i * d + j];
        }
    }
}

/// `hidden[row] . w`.
pub fn row_dots(hidden: &[f64], rows: usize, w: &[f64]) -> Vec<f64> {
    linear(hidden, w, None, rows, 1, w.len())
}

/// Gradients of [`row_dots`]: of the hidden rows and of the weights.
pub fn row_dots_backward(hidden: &[f64], rows: usize, w: &[f64], gradient: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let d = w.len();
    (linear_input_gradient(gradient, w, rows, 1, d), linear_weight_gradient(hidden, gradient, rows, 1, d))
}

/// One AdamW update of one weight: the new weight and moments.
pub fn adamw(a: &AdamW, w: f64, g: f64, m: f64, v: f64) -> (f64, f64, f64) {
    let (beta1, beta2) = (a.beta1 as f64, a.beta2 as f64);
    let g = g * a.grad_scale as f64;
    let m = beta1 * m + (1.0 - beta1) * g;
    let v = beta2 * v + (1.0 - beta2) * g * g;
    let m_hat = m / (1.0 - beta1.powi(a.step as i32));
    let v_hat = v / (1.0 - beta2.powi(a.step as i32));
    let lr = a.lr as f64;
    (w - lr * a.weight_decay as f64 * w - lr * m_hat / (v_hat.sqrt() + a.eps as f64), m, v)
}
