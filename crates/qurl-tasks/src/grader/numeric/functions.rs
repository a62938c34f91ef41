//! Functions of real numbers, and how much they magnify an error of their argument.

use crate::grader::expr::Func;
use crate::rng::mix;

/// The value of a function; `None` where it has none.
pub(super) fn real_call(func: &Func, x: &[f64]) -> Option<f64> {
    let whole = |v: f64| v.fract() == 0.0 && v >= 0.0;
    Some(match (func, x) {
        (Func::Sin, [x]) => x.sin(),
        (Func::Cos, [x]) => x.cos(),
        (Func::Tan, [x]) => x.tan(),
        (Func::Cot, [x]) => 1.0 / x.tan(),
        (Func::Sec, [x]) => 1.0 / x.cos(),
        (Func::Csc, [x]) => 1.0 / x.sin(),
        (Func::Asin, [x]) => x.asin(),
        (Func::Acos, [x]) => x.acos(),
        (Func::Atan, [x]) => x.atan(),
        (Func::Acot, [x]) => (1.0 / x).atan(),
        (Func::Sinh, [x]) => x.sinh(),
        (Func::Cosh, [x]) => x.cosh(),
        (Func::Tanh, [x]) => x.tanh(),
        (Func::Asinh, [x]) => x.asinh(),
        (Func::Acosh, [x]) => x.acosh(),
        (Func::Atanh, [x]) => x.atanh(),
        (Func::Ln, [x]) => x.ln(),
        (Func::Log, [x, base]) => x.ln() / base.ln(),
        (Func::Exp, [x]) => x.exp(),
        (Func::Abs, [x]) => x.abs(),
        (Func::Floor, [x]) => (x + 1e-9).floor(),
        (Func::Ceil, [x]) => (x - 1e-9).ceil(),
        (Func::Factorial, [x]) if whole(*x) && *x <= 170.0 => (1..=*x as u32).map(f64::from).product(),
        (Func::Binomial, [n, k]) if whole(*n) && whole(*k) && *n <= 500.0 && k <= n => {
            (1..=*k as u32).map(|i| (n - k + f64::from(i)) / f64::from(i)).product()
        }
        (Func::Binomial, [n, k]) if whole(*n) && whole(*k) && k > n => 0.0,
        (Func::Mod, [a, m]) if *m != 0.0 => a - (a / m).floor() * m,
        (Func::Gcd, [a, b]) if whole(*a) && whole(*b) => num_integer::gcd(*a as u64, *b as u64) as f64,
        (Func::Lcm, [a, b]) if whole(*a) && whole(*b) && a * b < 1e12 => {
            num_integer::lcm(*a as u64, *b as u64) as f64
        }
        (Func::Min, [_, ..]) => x.iter().copied().fold(f64::INFINITY, f64::min),
        (Func::Max, [_, ..]) => x.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        (Func::Sign, [x]) => {
            if *x == 0.0 {
                0.0
            } else {
                x.signum()
            }
        }
        (Func::Re, [x]) => *x,
        (Func::Im, [_]) => 0.0,
        (Func::Apply(name), x) => made_up_value(name, x),
        _ => return None,
    })
}

/// A function of the problem has no known values: a fixed, arbitrary one stands in, the same for arguments
/// that differ by rounding only.
fn made_up_value(name: &str, arguments: &[f64]) -> f64 {
    let letters = name.bytes().map(u64::from);
    let rounded = arguments.iter().flat_map(|x| format!("{x:.9e}|").into_bytes()).map(u64::from);
    let bits = mix(&letters.chain([0xf]).chain(rounded).collect::<Vec<_>>());
    0.5 + (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// Roughly the absolute derivative at `x`, given the value there.
pub(super) fn sensitivity(func: &Func, x: f64, value: f64) -> f64 {
    match func {
        Func::Tan | Func::Cot | Func::Sec | Func::Csc => 1.0 + value * value,
        Func::Ln | Func::Log => 1.0 / x.abs().max(f64::MIN_POSITIVE),
        Func::Exp => value.abs(),
        Func::Sinh | Func::Cosh => 1.0 + value.abs(),
        Func::Asin | Func::Acos | Func::Atanh | Func::Acosh => 1.0 / (1.0 - x * x).abs().max(1e-12),
        Func::Floor
        | Func::Ceil
        | Func::Factorial
        | Func::Binomial
        | Func::Gcd
        | Func::Lcm
        | Func::Apply(_) => 0.0,
        _ => 1.0,
    }
}
