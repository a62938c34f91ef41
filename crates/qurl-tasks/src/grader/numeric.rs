//! Numeric evaluation, for what has no exact normal form: two formulas are equal when they agree at seeded random points.
//!
//! Values are complex, so that i and roots of negative numbers work. Points are positive first, because answers assume
//! the domain where their roots and logarithms exist; negative points count only where both formulas stay real (they
//! tell |x| from x). Formulas with floors, factorials and the like are tried at whole numbers.

use num_traits::ToPrimitive;

use super::budget::{Budget, Stop};
use super::expr::{Big, BigKind, Constant, Expr, Func, to_f64};
use crate::rng::mix;

mod complex;
pub use complex::Complex;

/// Relative error that is still rounding.
const RELATIVE: f64 = 1e-9;
/// Relative error of the largest intermediate value that is still rounding.
const CANCELLATION: f64 = 1e-13;
/// Points that are tried.
const POINTS: u64 = 10;
/// Points that must agree.
const NEEDED: usize = 3;

/// Values of the variables, and what happened on the way.
pub struct Evaluation<'a> {
    values: &'a [(String, f64)],
    /// Largest absolute value seen.
    largest: f64,
    /// A real argument gave a value that is not real.
    left_reals: bool,
}

/// The value at a point, with the size of the rounding error to expect.
pub struct Value {
    /// The value itself.
    pub value: Complex,
    /// Error that rounding may have caused.
    pub error: f64,
    /// Whether a root or logarithm of a negative number was taken.
    pub left_reals: bool,
}

/// Evaluates a formula; `None` where it has no finite value.
pub fn evaluate(expr: &Expr, values: &[(String, f64)], budget: &mut Budget) -> Result<Option<Value>, Stop> {
    let mut evaluation = Evaluation { values, largest: 0.0, left_reals: false };
    let value = evaluation.run(expr, budget)?;
    Ok(value.filter(|v| v.is_finite()).map(|value| Value {
        value,
        error: CANCELLATION * evaluation.largest,
        left_reals: evaluation.left_reals,
    }))
}

/// The real value of a formula without variables.
pub fn real_constant(expr: &Expr, budget: &mut Budget) -> Result<Option<f64>, Stop> {
    if let Expr::Const(Constant::Infinity) = expr {
        return Ok(Some(f64::INFINITY));
    }
    if let Expr::Mul(factors) = expr
        && factors.iter().any(|f| matches!(f, Expr::Const(Constant::Infinity)))
    {
        let negative =
            factors.iter().filter(|f| f.as_number().is_some_and(num_traits::Signed::is_negative)).count() % 2 == 1;
        return Ok(Some(if negative { f64::NEG_INFINITY } else { f64::INFINITY }));
    }
    if !expr.variables().is_empty() {
        return Ok(None);
    }
    let value = evaluate(expr, &[], budget)?;
    Ok(value.filter(|v| v.value.im.abs() <= v.error.max(RELATIVE * v.value.abs())).map(|v| v.value.re))
}

/// Whether two formulas agree at random points; `None` when too few points have a value.
pub fn agree(a: &Expr, b: &Expr, budget: &mut Budget) -> Result<Option<bool>, Stop> {
    compare_at_points(&[a, b], budget, |values| {
        let (a, b) = (&values[0], &values[1]);
        let distance = a.value.minus(b.value).abs();
        let scale = a.value.abs().max(b.value.abs());
        distance <= RELATIVE * scale + a.error + b.error
    })
}

/// The constant k with a = k·b at random points, if there is one.
pub fn proportion(a: &Expr, b: &Expr, budget: &mut Budget) -> Result<Option<f64>, Stop> {
    let mut factor: Option<f64> = None;
    let same = compare_at_points(&[a, b], budget, |values| {
        let (a, b) = (values[0].value, values[1].value);
        let Some(k) = a.over(b).filter(|k| k.im.abs() <= RELATIVE * k.abs() && k.re != 0.0) else {
            return false;
        };
        let first = *factor.get_or_insert(k.re);
        (k.re - first).abs() <= 1e-8 * first.abs()
    })?;
    Ok(factor.filter(|_| same == Some(true)))
}

fn compare_at_points(
    exprs: &[&Expr; 2],
    budget: &mut Budget,
    mut same: impl FnMut(&[Value; 2]) -> bool,
) -> Result<Option<bool>, Stop> {
    let mut names: Vec<String> = exprs.iter().flat_map(|e| e.variables()).collect();
    names.sort();
    names.dedup();
    let wants_whole = exprs.iter().any(|e| e.any(&is_discrete));
    let is_complex = exprs.iter().any(|e| e.any(&|n| matches!(n, Expr::Const(Constant::I))));
    let mut agreed = 0;
    for point in 0..POINTS {
        let negative = point % 3 == 2;
        if negative && (is_complex || wants_whole) {
            continue;
        }
        let values: Vec<(String, f64)> = names
            .iter()
            .enumerate()
            .map(|(i, name)| (name.clone(), coordinate(point, i as u64, wants_whole, negative)))
            .collect();
        let (Some(a), Some(b)) = (evaluate(exprs[0], &values, budget)?, evaluate(exprs[1], &values, budget)?) else {
            continue;
        };
        if negative && (a.left_reals || b.left_reals) {
            continue;
        }
        if !same(&[a, b]) {
            return Ok(Some(false));
        }
        agreed += 1;
        if names.is_empty() {
            return Ok(Some(true));
        }
    }
    Ok((agreed >= NEEDED).then_some(true))
}

/// A variable's value: positive in (0.3, 3.3), negative, or a small whole number.
fn coordinate(point: u64, variable: u64, whole: bool, negative: bool) -> f64 {
    let bits = mix(&[0x9a11, point, variable]);
    let unit = (bits >> 11) as f64 / (1u64 << 53) as f64;
    if whole {
        return 2.0 + (unit * 11.0).floor() + if point >= 5 { 7.0 } else { 0.0 };
    }
    let size = 0.3 + 3.0 * unit;
    if negative && (bits & 1 == 0 || variable == 0) { -size } else { size }
}

fn is_discrete(e: &Expr) -> bool {
    match e {
        Expr::Call(f, _) => {
            matches!(f, Func::Floor | Func::Ceil | Func::Factorial | Func::Binomial | Func::Gcd | Func::Lcm | Func::Mod)
        }
        Expr::Pow(base, power) => {
            let negative_base = base.as_number().is_some_and(num_traits::Signed::is_negative);
            negative_base && !power.variables().is_empty()
        }
        Expr::Big(_) => true,
        _ => false,
    }
}

impl Evaluation<'_> {
    fn run(&mut self, expr: &Expr, budget: &mut Budget) -> Result<Option<Complex>, Stop> {
        budget.charge(1)?;
        let value = match expr {
            Expr::Num(n) => Some(Complex::real(to_f64(&n.value))),
            Expr::Sym(name) => {
                let found = self.values.iter().find(|(n, _)| n == name);
                found.map(|(_, v)| Complex::real(*v))
            }
            Expr::Const(c) => match c {
                Constant::Pi => Some(Complex::real(std::f64::consts::PI)),
                Constant::E => Some(Complex::real(std::f64::consts::E)),
                Constant::I => Some(Complex { re: 0.0, im: 1.0 }),
                Constant::Infinity => None,
            },
            Expr::Add(terms) => {
                let mut sum = Complex::real(0.0);
                for term in terms {
                    let Some(value) = self.run(term, budget)? else { return Ok(None) };
                    sum = sum.plus(value);
                }
                Some(sum)
            }
            Expr::Mul(factors) => {
                let mut product = Complex::real(1.0);
                for factor in factors {
                    let Some(value) = self.run(factor, budget)? else { return Ok(None) };
                    product = product.times(value);
                }
                Some(product)
            }
            Expr::Pow(base, power) => {
                let (Some(b), Some(p)) = (self.run(base, budget)?, self.run(power, budget)?) else {
                    return Ok(None);
                };
                let denominator = power.as_number().and_then(|r| r.denom().to_i64()).unwrap_or(0);
                self.power(b, p, denominator)
            }
            Expr::Call(func, arguments) => self.call(func, arguments, budget)?,
            Expr::Percent(inner) => self.run(inner, budget)?.map(|v| v.times(Complex::real(0.01))),
            Expr::Degrees(inner) | Expr::Quantity(inner, _) => self.run(inner, budget)?,
            Expr::Ratio(parts) if parts.len() == 2 => {
                let (Some(a), Some(b)) = (self.run(&parts[0], budget)?, self.run(&parts[1], budget)?) else {
                    return Ok(None);
                };
                a.over(b)
            }
            Expr::Big(big) => self.big(big, budget)?,
            _ => None,
        };
        if let Some(v) = value {
            self.largest = self.largest.max(v.abs());
        }
        Ok(value)
    }

    /// `b^p`; odd roots of negative numbers are real.
    fn power(&mut self, b: Complex, p: Complex, denominator: i64) -> Option<Complex> {
        if b.is_real() && p.is_real() {
            if b.re < 0.0 && p.re.fract() != 0.0 {
                if denominator % 2 == 1 {
                    let odd = (p.re * denominator as f64).round().rem_euclid(2.0) == 1.0;
                    let size = (-b.re).powf(p.re);
                    return Some(Complex::real(if odd { -size } else { size }));
                }
                self.left_reals = true;
                return Some(b.power(p));
            }
            return Some(Complex::real(b.re.powf(p.re)));
        }
        Some(b.power(p))
    }

    fn call(&mut self, func: &Func, arguments: &[Expr], budget: &mut Budget) -> Result<Option<Complex>, Stop> {
        let mut values = Vec::with_capacity(arguments.len());
        for argument in arguments {
            let Some(mut value) = self.run(argument, budget)? else { return Ok(None) };
            let degrees = matches!(func, Func::Sin | Func::Cos | Func::Tan | Func::Cot | Func::Sec | Func::Csc)
                && argument.any(&|e| matches!(e, Expr::Degrees(_)));
            if degrees {
                value = value.times(Complex::real(std::f64::consts::PI / 180.0));
            }
            values.push(value);
        }
        if let [x] = values[..]
            && !x.is_real()
        {
            return Ok(match func {
                Func::Abs => Some(Complex::real(x.abs())),
                Func::Exp => Some(x.exp()),
                Func::Ln => Some(x.ln()),
                Func::Re => Some(Complex::real(x.re)),
                Func::Im => Some(Complex::real(x.im)),
                Func::Sin => Some(x.sin()),
                Func::Cos => Some(x.cos()),
                Func::Tan => x.sin().over(x.cos()),
                _ => None,
            });
        }
        if !values.iter().all(Complex::is_real) {
            return Ok(None);
        }
        let reals: Vec<f64> = values.iter().map(|v| v.re).collect();
        if matches!((func, &reals[..]), (Func::Ln, [x]) | (Func::Log, [x, ..]) if *x < 0.0) {
            self.left_reals = true;
            return Ok(Some(values[0].ln()).filter(|_| *func == Func::Ln));
        }
        Ok(real_call(func, &reals).filter(|v| v.is_finite()).map(Complex::real))
    }

    fn big(&mut self, big: &Big, budget: &mut Budget) -> Result<Option<Complex>, Stop> {
        let (BigKind::Sum | BigKind::Product, Some(var), Some(lower), Some(upper)) =
            (big.kind, &big.var, &big.lower, &big.upper)
        else {
            return Ok(None);
        };
        let (Some(from), Some(to)) = (self.run(lower, budget)?, self.run(upper, budget)?) else {
            return Ok(None);
        };
        let (from, to) = (from.re, to.re);
        if from.fract() != 0.0 || to.fract() != 0.0 || to - from > 200.0 {
            return Ok(None);
        }
        let is_sum = big.kind == BigKind::Sum;
        let mut total = Complex::real(if is_sum { 0.0 } else { 1.0 });
        let mut n = from;
        while n <= to {
            let mut values = self.values.to_vec();
            values.retain(|(name, _)| name != var);
            values.push((var.clone(), n));
            let Some(term) = evaluate(&big.body, &values, budget)? else { return Ok(None) };
            total = if is_sum { total.plus(term.value) } else { total.times(term.value) };
            n += 1.0;
        }
        Ok(Some(total))
    }
}

fn real_call(func: &Func, x: &[f64]) -> Option<f64> {
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
        (Func::Lcm, [a, b]) if whole(*a) && whole(*b) && a * b < 1e12 => num_integer::lcm(*a as u64, *b as u64) as f64,
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

/// A function of the problem has no known values: a fixed, arbitrary one stands in, the same for arguments that differ
/// by rounding only.
fn made_up_value(name: &str, arguments: &[f64]) -> f64 {
    let letters = name.bytes().map(u64::from);
    let rounded = arguments.iter().flat_map(|x| format!("{x:.9e}|").into_bytes()).map(u64::from);
    let bits = mix(&letters.chain([0xf]).chain(rounded).collect::<Vec<_>>());
    0.5 + (bits >> 11) as f64 / (1u64 << 53) as f64
}
