//! One table of operations and shapes. Each case can run on any backend and say what should come out; the test here
//! compares every level of the CPU with the naive twins, and `determinism` runs the same table on several threads.
//!
//! Shapes are odd on purpose: single rows, widths that fill no register, sums longer than one pass along k (512
//! packed words), more rows than one block of strips (192), more tokens than one block of a weight gradient (512),
//! vocabularies of more than one chunk (512) and more than one backward group (2048).

mod attention;
mod head;
mod linear;
mod rows;

use crate::support::{assert_close, cpus};
use qurl_kernels::backend::Backend;

/// Everything an operation and its backward write.
pub type Outputs = Vec<Vec<f64>>;

/// An operation at one shape.
pub struct Case<B: Backend> {
    pub name: String,
    /// The outputs of a backend.
    pub run: Box<dyn Fn(&B) -> Outputs>,
    /// Those of the naive twin.
    pub want: Box<dyn Fn() -> Vec<Want>>,
}

/// One expected output.
pub struct Want {
    pub name: &'static str,
    pub values: Vec<f64>,
    /// Allowed error in roundings of a typical value.
    pub units: f64,
}

impl Want {
    fn new(name: &'static str, values: Vec<f64>, units: f64) -> Want {
        Want { name, values, units }
    }
}

/// Roundings to allow for a sum of `k` products of random signs. The error grows like the root of k; the factor was
/// chosen about three times above the worst seen.
fn sum_units(k: usize) -> f64 {
    4.0 + 3.0 * (k as f64).sqrt()
}

/// All operations.
pub fn table<B: Backend>() -> Vec<Case<B>> {
    let mut cases = linear::cases();
    cases.extend(rows::cases());
    cases.extend(attention::cases());
    cases.extend(head::cases());
    cases
}

#[test]
fn every_level_equals_the_naive_twin() {
    let cpus = cpus(2);
    for case in table() {
        let wants = (case.want)();
        for cpu in &cpus {
            let outputs = (case.run)(cpu);
            assert_eq!(outputs.len(), wants.len(), "{}: outputs", case.name);
            for (output, want) in outputs.iter().zip(&wants) {
                let what = format!("{} {} on {}", case.name, want.name, cpu.describe());
                assert_close(&what, output, &want.values, want.units);
            }
        }
    }
}
