//! One table of operations and shapes. Each case can run on any device and say what should come out; the test
//! here compares every level of the CPU with the naive twins, and `determinism` runs the same table on
//! several threads.
//!
//! Shapes are odd on purpose: single rows, widths that fill no register, sums longer than one pass along k
//! (512 packed words), more rows than one block of strips (192), more tokens than one block of a weight
//! gradient (512), vocabularies of more than one chunk (512) and more than one backward group (2048).

mod adapter;
mod attend;
mod attention;
mod bits4;
mod head;
mod linear;
mod mlp;
mod rows;
mod sample;

use crate::ops::{Ops, cpus};
use crate::support::{distance, units_off};
use qurl_kernels::{Device, Format};
pub(crate) use rows::updated;

/// Everything an operation and its backward write.
pub type Outputs = Vec<Vec<f64>>;

type Run<D> = dyn Fn(&Ops<D>) -> Outputs;

/// An operation at one shape.
pub struct Case<D: Device> {
    pub name: String,
    /// The outputs of a device.
    pub run: Box<Run<D>>,
    /// Those of the naive twin.
    pub want: Box<dyn Fn() -> Vec<Want>>,
}

/// One expected output.
pub struct Want {
    pub name: &'static str,
    pub values: Vec<f64>,
    /// Allowed error in roundings of a typical value.
    pub units: f64,
    /// Allowed [`distance`] of all values together, where that says more than the worst of them.
    pub distance: f64,
    /// Allowed [`distance`] on tensor cores, where they are in it: attention over bf16 pages has all operands
    /// in bf16 there. 0 where they are not.
    pub tensor_cores: f64,
}

impl Want {
    fn new(name: &'static str, values: Vec<f64>, units: f64) -> Want {
        Want { name, values, units, distance: f64::INFINITY, tensor_cores: 0.0 }
    }

    /// What is computed from operands that were themselves computed. In bf16 such an operand may fall to the
    /// other side of a rounding, by a step of 2^-8: that shows in single values and not in all of them
    /// together, where a rounding too many or too few would be 2^-10.
    fn of_operands(format: Format, name: &'static str, values: Vec<f64>, units: f64) -> Want {
        let want = Want::new(name, values, units);
        match format {
            Format::Bf16 => Want { units: (1u64 << 16) as f64, distance: 2f64.powi(-12), ..want },
            _ => want,
        }
    }

    fn on_tensor_cores(self, distance: f64) -> Want {
        Want { tensor_cores: distance, ..self }
    }

    /// What is wrong with an output, if anything.
    pub fn complaint(&self, got: &[f64], tensor_cores: bool) -> Option<String> {
        let (units, off) = (units_off(got, &self.values), distance(got, &self.values));
        // Written so that a NaN is wrong.
        let close = units <= self.units && (self.distance.is_infinite() || off <= self.distance);
        let close = close || tensor_cores && off <= self.tensor_cores;
        (!close).then(|| format!("{}: {units:.1} of {:.1} units, {off:.1e} in all", self.name, self.units))
    }
}

/// Roundings to allow for a sum of `k` products of random signs. The error grows like the root of k; the
/// factor was chosen about three times above the worst seen.
fn sum_units(k: usize) -> f64 {
    4.0 + 3.0 * (k as f64).sqrt()
}

/// All operations that every device has.
pub fn table<D: Device>() -> Vec<Case<D>> {
    let mut cases = linear::cases();
    cases.extend(adapter::cases());
    cases.extend(bits4::cases());
    cases.extend(rows::cases());
    cases.extend(mlp::cases());
    cases.extend(attention::cases());
    cases.extend(attend::cases());
    cases.extend(head::cases());
    cases.extend(sample::cases());
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
                let complaint = want.complaint(output, false);
                assert!(complaint.is_none(), "{} on {}: {complaint:?}", case.name, cpu.name());
            }
        }
    }
}
