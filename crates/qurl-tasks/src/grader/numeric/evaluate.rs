//! The value of a formula at a point, with a running estimate of its rounding error.
//!
//! The estimate matters where terms cancel: only then is a large difference between two equal formulas
//! rounding. It follows the usual rules (errors of a sum add up, relative errors of a product add up), to
//! first order.

use num_traits::ToPrimitive;

use super::SAFETY;
use super::complex::Complex;
use super::functions::{real_call, sensitivity};
use crate::grader::budget::{Budget, Stop};
use crate::grader::expr::{Big, BigKind, Constant, Expr, Func, to_f64};

/// Longest Σ or Π that is added up.
const MAX_TERMS: f64 = 200.0;

/// The largest rounding error of a number that is rounded to a whole one, which forgives twice as much.
const WHOLE_ERROR: f64 = 5e-10;

/// The value at a point.
#[derive(Clone, Copy, Debug)]
pub struct Value {
    /// The value itself.
    pub value: Complex,
    /// Estimate of the absolute error from rounding.
    pub error: f64,
    /// Whether a root or logarithm of a negative number was taken.
    pub left_reals: bool,
}

impl Value {
    fn exact(value: Complex) -> Value {
        Value { value, error: 0.0, left_reals: false }
    }

    fn rounded(value: Complex) -> Value {
        Value { value, error: f64::EPSILON * value.abs(), left_reals: false }
    }

    fn times(self, other: Value) -> Value {
        let value = self.value.times(other.value);
        let (a, b) = (self.value.abs(), other.value.abs());
        Value {
            value,
            error: a * other.error + b * self.error + f64::EPSILON * value.abs(),
            left_reals: self.left_reals || other.left_reals,
        }
    }

    fn plus(self, other: Value) -> Value {
        let value = self.value.plus(other.value);
        let rounding = f64::EPSILON * (self.value.abs() + other.value.abs());
        Value {
            value,
            error: self.error + other.error + rounding,
            left_reals: self.left_reals || other.left_reals,
        }
    }
}

/// Evaluates a formula; `None` where it has no finite value.
pub fn evaluate(expr: &Expr, values: &[(String, f64)], budget: &mut Budget) -> Result<Option<Value>, Stop> {
    Ok(run(expr, values, budget)?.filter(|v| v.value.is_finite()))
}

fn run(expr: &Expr, values: &[(String, f64)], budget: &mut Budget) -> Result<Option<Value>, Stop> {
    budget.charge(1)?;
    Ok(match expr {
        Expr::Num(n) => Some(Value::rounded(Complex::real(to_f64(&n.value)))),
        Expr::Sym(name) => {
            let found = values.iter().find(|(n, _)| n == name);
            found.map(|(_, v)| Value::exact(Complex::real(*v)))
        }
        Expr::Const(c) => match c {
            Constant::Pi => Some(Value::rounded(Complex::real(std::f64::consts::PI))),
            Constant::E => Some(Value::rounded(Complex::real(std::f64::consts::E))),
            Constant::I => Some(Value::exact(Complex { re: 0.0, im: 1.0 })),
            Constant::Infinity => None,
        },
        Expr::Add(terms) => fold(terms, Value::exact(Complex::real(0.0)), Value::plus, values, budget)?,
        Expr::Mul(factors) => fold(factors, Value::exact(Complex::real(1.0)), Value::times, values, budget)?,
        Expr::Pow(base, power) => {
            let (Some(b), Some(p)) = (run(base, values, budget)?, run(power, values, budget)?) else {
                return Ok(None);
            };
            let denominator = power.as_number().and_then(|r| r.denom().to_i64()).unwrap_or(0);
            Some(raised(b, p, denominator))
        }
        Expr::Call(func, arguments) => call(func, arguments, values, budget)?,
        Expr::Percent(inner) => {
            run(inner, values, budget)?.map(|v| v.times(Value::rounded(Complex::real(0.01))))
        }
        Expr::Degrees(inner) | Expr::Quantity(inner, _) => run(inner, values, budget)?,
        Expr::Ratio(parts) if parts.len() == 2 => {
            let (Some(a), Some(b)) = (run(&parts[0], values, budget)?, run(&parts[1], values, budget)?)
            else {
                return Ok(None);
            };
            Some(a.times(raised(b, Value::exact(Complex::real(-1.0)), 1)))
        }
        Expr::Big(big) => series(big, values, budget)?,
        _ => None,
    })
}

fn fold(
    items: &[Expr],
    start: Value,
    combine: fn(Value, Value) -> Value,
    values: &[(String, f64)],
    budget: &mut Budget,
) -> Result<Option<Value>, Stop> {
    let mut total = start;
    for item in items {
        let Some(value) = run(item, values, budget)? else { return Ok(None) };
        total = combine(total, value);
    }
    Ok(Some(total))
}

/// `b^p`; odd roots of negative numbers are real.
fn raised(b: Value, p: Value, denominator: i64) -> Value {
    let (base, power) = (b.value, p.value);
    let mut left_reals = b.left_reals || p.left_reals;
    let value = if base.is_real() && power.is_real() {
        if base.re < 0.0 && power.re.fract() != 0.0 {
            if denominator % 2 == 1 {
                let odd = (power.re * denominator as f64).round().rem_euclid(2.0) == 1.0;
                let size = (-base.re).powf(power.re);
                Complex::real(if odd { -size } else { size })
            } else {
                left_reals = true;
                base.power(power)
            }
        } else {
            Complex::real(base.re.powf(power.re))
        }
    } else {
        base.power(power)
    };
    let size = base.abs();
    let logarithm = if size > 0.0 { size.ln().abs() } else { 0.0 };
    let relative = if size > 0.0 { power.abs() * b.error / size } else { 0.0 };
    let spread = relative + logarithm * p.error + f64::EPSILON * (1.0 + power.abs() * logarithm);
    // Near zero a root magnifies the error of its argument without bound.
    let near_zero =
        if size <= 16.0 * b.error && power.re > 0.0 { b.error.powf(power.re.min(1.0)) } else { 0.0 };
    Value { value, error: (spread * value.abs()).max(near_zero), left_reals }
}

fn call(
    func: &Func,
    arguments: &[Expr],
    values: &[(String, f64)],
    budget: &mut Budget,
) -> Result<Option<Value>, Stop> {
    let trigonometric = matches!(func, Func::Sin | Func::Cos | Func::Tan | Func::Cot | Func::Sec | Func::Csc);
    let mut inputs = Vec::with_capacity(arguments.len());
    for argument in arguments {
        let Some(mut value) = run(argument, values, budget)? else { return Ok(None) };
        if trigonometric && argument.any(&|e| matches!(e, Expr::Degrees(_))) {
            value = value.times(Value::rounded(Complex::real(std::f64::consts::PI / 180.0)));
        }
        inputs.push(value);
    }
    if is_torn(func, &inputs) {
        return Ok(None);
    }
    let mut left_reals = inputs.iter().any(|v| v.left_reals);
    let first = inputs.first().map_or(Complex::real(0.0), |v| v.value);
    let value = if inputs.iter().all(|v| v.value.is_real()) {
        let reals: Vec<f64> = inputs.iter().map(|v| v.value.re).collect();
        if *func == Func::Ln && first.re < 0.0 {
            left_reals = true;
            Some(first.ln())
        } else {
            real_call(func, &reals).map(Complex::real)
        }
    } else if inputs.len() == 1 {
        complex_call(func, first)
    } else {
        None
    };
    Ok(value.filter(Complex::is_finite).map(|value| {
        let magnified: f64 =
            inputs.iter().map(|v| v.error * sensitivity(func, v.value.abs(), value.abs())).sum();
        Value { value, error: magnified + f64::EPSILON * value.abs(), left_reals }
    }))
}

/// Whether rounding decides which whole number a function gives.
fn is_torn(func: &Func, inputs: &[Value]) -> bool {
    let (size, error) = match (func, inputs) {
        (Func::Floor | Func::Ceil, [x]) => (x.value.re, x.error),
        (Func::Mod, [a, m]) if m.value.re != 0.0 => {
            let quotient = a.value.re / m.value.re;
            (quotient, (a.error + quotient.abs() * m.error) / m.value.re.abs())
        }
        _ => return false,
    };
    error > WHOLE_ERROR && (size - size.round()).abs() <= SAFETY * error
}

fn complex_call(func: &Func, x: Complex) -> Option<Complex> {
    match func {
        Func::Abs => Some(Complex::real(x.abs())),
        Func::Exp => Some(x.exp()),
        Func::Ln => Some(x.ln()),
        Func::Re => Some(Complex::real(x.re)),
        Func::Im => Some(Complex::real(x.im)),
        Func::Sin => Some(x.sin()),
        Func::Cos => Some(x.cos()),
        Func::Tan => x.sin().over(x.cos()),
        _ => None,
    }
}

/// A Σ or Π with whole bounds.
fn series(big: &Big, values: &[(String, f64)], budget: &mut Budget) -> Result<Option<Value>, Stop> {
    let (BigKind::Sum | BigKind::Product, Some(var), Some(lower), Some(upper)) =
        (big.kind, &big.var, &big.lower, &big.upper)
    else {
        return Ok(None);
    };
    let (Some(from), Some(to)) = (run(lower, values, budget)?, run(upper, values, budget)?) else {
        return Ok(None);
    };
    let (from, to) = (from.value.re, to.value.re);
    if from.fract() != 0.0 || to.fract() != 0.0 || to - from > MAX_TERMS {
        return Ok(None);
    }
    let is_sum = big.kind == BigKind::Sum;
    let mut total = Value::exact(Complex::real(if is_sum { 0.0 } else { 1.0 }));
    let mut inner: Vec<(String, f64)> = values.iter().filter(|(name, _)| name != var).cloned().collect();
    inner.push((var.clone(), from));
    let mut n = from;
    while n <= to {
        if let Some(last) = inner.last_mut() {
            last.1 = n;
        }
        let Some(term) = run(&big.body, &inner, budget)? else { return Ok(None) };
        total = if is_sum { total.plus(term) } else { total.times(term) };
        n += 1.0;
    }
    Ok(Some(total))
}
