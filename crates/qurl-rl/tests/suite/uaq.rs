//! What invariant scaling does under Adam and under SGD, on a regression with a norm gain before a matrix:
//! the derivation of "What UAQ does under Adam" in `docs/math.md`, held numerically.

use crate::common::Random;

const INPUTS: usize = 6;
const OUTPUTS: usize = 4;

/// y = W (gain ∘ x) on some samples, with the gradients of the mean squared error.
struct Problem {
    x: Vec<[f64; INPUTS]>,
    y: Vec<[f64; OUTPUTS]>,
}

#[derive(Clone)]
struct Model {
    w: Vec<f64>,
    gain: Vec<f64>,
}

impl Problem {
    fn new(random: &mut Random) -> Problem {
        let mut row = |_: usize| std::array::from_fn(|_| random.within(-1.0, 1.0));
        let x: Vec<[f64; INPUTS]> = (0..40).map(&mut row).collect();
        let target: Vec<[f64; INPUTS]> = (0..OUTPUTS).map(&mut row).collect();
        let of =
            |x: &[f64; INPUTS]| std::array::from_fn(|o| (0..INPUTS).map(|i| 2.0 * target[o][i] * x[i]).sum());
        let y = x.iter().map(of).collect();
        Problem { x, y }
    }

    fn gradients(&self, model: &Model) -> Model {
        let (mut w, mut gain) = (vec![0.0; OUTPUTS * INPUTS], vec![0.0; INPUTS]);
        for (x, y) in self.x.iter().zip(&self.y) {
            for o in 0..OUTPUTS {
                let row = &model.w[o * INPUTS..][..INPUTS];
                let got: f64 = (0..INPUTS).map(|i| row[i] * model.gain[i] * x[i]).sum();
                let error = 2.0 * (got - y[o]) / self.x.len() as f64;
                for i in 0..INPUTS {
                    w[o * INPUTS + i] += error * model.gain[i] * x[i];
                    gain[i] += error * row[i] * x[i];
                }
            }
        }
        Model { w, gain }
    }
}

/// Adam with the same moments for all numbers.
struct Adam {
    m: Vec<f64>,
    v: Vec<f64>,
    steps: i32,
    eps: f64,
}

impl Adam {
    fn new(len: usize, eps: f64) -> Adam {
        Adam { m: vec![0.0; len], v: vec![0.0; len], steps: 0, eps }
    }

    fn step(&mut self, lr: f64, w: &mut [f64], g: &[f64]) {
        self.steps += 1;
        let (b1, b2) = (0.9, 0.999);
        for (i, w) in w.iter_mut().enumerate() {
            self.m[i] = b1 * self.m[i] + (1.0 - b1) * g[i];
            self.v[i] = b2 * self.v[i] + (1.0 - b2) * g[i] * g[i];
            let (m, v) = (self.m[i] / (1.0 - b1.powi(self.steps)), self.v[i] / (1.0 - b2.powi(self.steps)));
            *w -= lr * m / (v.sqrt() + self.eps);
        }
    }
}

/// Trains with these learning rates of matrix and gain; with s other than 1, the scaled model, whose function
/// is given back as a matrix and a gain without scaling.
fn train(problem: &Problem, start: &Model, s: f64, lrs: (f64, f64), eps: f64, steps: usize) -> Vec<Model> {
    let mut model = Model {
        w: start.w.iter().map(|w| w / s).collect(),
        gain: start.gain.iter().map(|g| g * s).collect(),
    };
    let (mut of_w, mut of_gain) = (Adam::new(model.w.len(), eps), Adam::new(INPUTS, eps));
    (0..steps)
        .map(|_| {
            let g = problem.gradients(&model);
            of_w.step(lrs.0, &mut model.w, &g.w);
            of_gain.step(lrs.1, &mut model.gain, &g.gain);
            Model {
                w: model.w.iter().map(|w| w * s).collect(),
                gain: model.gain.iter().map(|g| g / s).collect(),
            }
        })
        .collect()
}

fn start(random: &mut Random) -> Model {
    let mut numbers = |n: usize, low| (0..n).map(|_| random.within(low, 1.0)).collect::<Vec<f64>>();
    Model { w: numbers(OUTPUTS * INPUTS, -1.0), gain: numbers(INPUTS, 0.5) }
}

fn distance(a: &Model, b: &Model) -> f64 {
    let all = |m: &Model| m.w.iter().chain(&m.gain).copied().collect::<Vec<f64>>();
    all(a).iter().zip(all(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// int8 codes of each row of a matrix.
fn codes(w: &[f64]) -> Vec<i64> {
    let row = |row: &[f64]| {
        let scale = row.iter().fold(0.0f64, |m, x| m.max(x.abs())) / 127.0;
        row.iter().map(|x| (x / scale).round() as i64).collect::<Vec<i64>>()
    };
    w.chunks(INPUTS).flat_map(row).collect()
}

fn flipped(a: &[f64], b: &[f64]) -> usize {
    codes(a).iter().zip(codes(b)).filter(|(a, b)| **a != *b).count()
}

/// By how many steps of the quantizer all codes together differ.
fn moved(a: &[f64], b: &[f64]) -> f64 {
    codes(a).iter().zip(codes(b)).map(|(a, b)| (a - b).abs() as f64).sum()
}

#[test]
fn uaq_under_adam_is_a_learning_rate() {
    let mut random = Random(51);
    let (problem, first) = (Problem::new(&mut random), start(&mut random));
    let (lr, steps) = (1e-3, 100);
    for s in [1.5, 2.0, 3.0] {
        let scaled = train(&problem, &first, s, (lr, lr), 1e-30, steps);
        let rates = train(&problem, &first, 1.0, (s * lr, lr / s), 1e-30, steps);
        for (scaled, rates) in scaled.iter().zip(&rates) {
            assert!(distance(scaled, rates) < 1e-9, "s = {s}");
            // The same function has the same codes: nothing is left for the quantizer to tell apart.
            assert!(flipped(&scaled.w, &rates.w) <= 1);
        }
        // Neither factor alone does it.
        let matrix_alone = train(&problem, &first, 1.0, (s * lr, lr), 1e-30, steps);
        let gain_alone = train(&problem, &first, 1.0, (lr, lr / s), 1e-30, steps);
        let last = steps - 1;
        assert!(distance(&scaled[last], &matrix_alone[last]) > 1e-3);
        assert!(distance(&scaled[last], &gain_alone[last]) > 1e-3);
        // Codes move about s times as far in the first steps as without it: so far they have one direction.
        let plain = train(&problem, &first, 1.0, (lr, lr), 1e-30, steps);
        let [with, without] = [&scaled, &plain].map(|run| moved(&first.w, &run[49].w));
        assert!((with / without - s).abs() < 0.25 * s, "{with} {without}");
        // A large eps tells them apart, as a small one does not.
        let large = |s: f64, lrs| train(&problem, &first, s, lrs, 1e-2, steps);
        assert!(distance(&large(s, (lr, lr))[last], &large(1.0, (s * lr, lr / s))[last]) > 1e-5);
    }
}

#[test]
fn under_sgd_the_matrix_moves_s_squared_as_far() {
    let mut random = Random(52);
    let (problem, first) = (Problem::new(&mut random), start(&mut random));
    for s in [1.5, 2.0] {
        let scaled = Model {
            w: first.w.iter().map(|w| w / s).collect(),
            gain: first.gain.iter().map(|g| g * s).collect(),
        };
        let (g, of_scaled) = (problem.gradients(&first), problem.gradients(&scaled));
        for i in 0..g.w.len() {
            // In the function a step of V is s times as far, and its gradient is s times as large.
            assert!((s * of_scaled.w[i] - s * s * g.w[i]).abs() < 1e-12);
        }
        for i in 0..INPUTS {
            assert!((of_scaled.gain[i] / s - g.gain[i] / (s * s)).abs() < 1e-12);
        }
    }
}
