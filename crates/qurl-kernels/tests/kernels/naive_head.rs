//! Naive twin in f64 of the log-probability head, with all logits written out.

use crate::naive;

/// The sizes of a head and the temperature of its softmax.
#[derive(Clone, Copy)]
pub struct HeadShape {
    pub rows: usize,
    pub vocabulary: usize,
    pub d: usize,
    pub temperature: f64,
}

/// What the head says about each row.
pub struct Head {
    pub logp: Vec<f64>,
    pub entropy: Vec<f64>,
    pub argmax: Vec<f64>,
    pub lse: Vec<f64>,
    /// Log-probabilities of the whole vocabulary.
    all: Vec<f64>,
}

/// Scores the targets under `softmax(hidden W^T / temperature)`.
pub fn head(shape: HeadShape, hidden: &[f64], w: &[f64], targets: &[u32]) -> Head {
    let HeadShape { rows, vocabulary, d, temperature } = shape;
    let logits = naive::linear(hidden, w, None, rows, vocabulary, d);
    let mut head = Head { logp: vec![], entropy: vec![], argmax: vec![], lse: vec![], all: vec![] };
    for (logits, &target) in logits.chunks_exact(vocabulary).zip(targets) {
        let scaled: Vec<f64> = logits.iter().map(|x| x / temperature).collect();
        let mut best = 0;
        for (i, x) in scaled.iter().enumerate() {
            if *x > scaled[best] {
                best = i;
            }
        }
        let lse = scaled[best] + scaled.iter().map(|x| (x - scaled[best]).exp()).sum::<f64>().ln();
        let log_p: Vec<f64> = scaled.iter().map(|x| x - lse).collect();
        head.logp.push(log_p[target as usize]);
        head.entropy.push(-log_p.iter().map(|l| l.exp() * l).sum::<f64>());
        head.argmax.push(best as f64);
        head.lse.push(lse);
        head.all.extend(log_p);
    }
    head
}

/// Gradients of hidden rows and weights, given `dL/dlogp` and `dL/dentropy`; logit gradients are passed
/// through `round` first, as a GEMM in a narrow format does.
pub fn head_backward(
    shape: HeadShape,
    hidden: &[f64],
    w: &[f64],
    targets: &[u32],
    dlogp: &[f64],
    dentropy: &[f64],
    round: fn(f64) -> f64,
) -> (Vec<f64>, Vec<f64>) {
    let HeadShape { rows, vocabulary, d, temperature } = shape;
    let out = head(shape, hidden, w, targets);
    let mut dlogits = Vec::with_capacity(rows * vocabulary);
    for row in 0..rows {
        for token in 0..vocabulary {
            let log_p = out.all[row * vocabulary + token];
            let hit = if targets[row] as usize == token { 1.0 } else { 0.0 };
            let of_logp = dlogp[row] * (hit - log_p.exp());
            let of_entropy = -dentropy[row] * log_p.exp() * (log_p + out.entropy[row]);
            dlogits.push(round((of_logp + of_entropy) / temperature));
        }
    }
    let dhidden = naive::linear_input_gradient(&dlogits, w, rows, vocabulary, d);
    let dweight = naive::linear_weight_gradient(hidden, &dlogits, rows, vocabulary, d);
    (dhidden, dweight)
}
