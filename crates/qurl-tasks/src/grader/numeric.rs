//! Numeric evaluation, for what has no exact normal form: two formulas are equal when they agree at seeded
//! random points.
//!
//! Values are complex, so that i and roots of negative numbers work. Points are positive first, because
//! answers assume the domain where their roots and logarithms exist; negative points count only where both
//! formulas stay real (they tell |x| from x). Formulas with floors, factorials and the like are tried at
//! whole numbers.

use super::budget::{Budget, Stop};
use super::expr::{Constant, Expr, Func};
use crate::rng::mix;

mod complex;
mod evaluate;
mod functions;
pub use complex::Complex;
pub use evaluate::{Value, evaluate};

/// Relative difference that is still rounding.
const RELATIVE: f64 = 1e-10;
/// How far the estimate of the rounding error may be off.
const SAFETY: f64 = 16.0;
/// A value whose rounding error may be this large, absolutely and relatively, says nothing.
const UNRELIABLE: f64 = 1e-6;
/// Points that are tried.
const POINTS: u64 = 10;
/// Points that must agree.
const NEEDED: usize = 3;

/// The real value of a formula without variables.
pub fn real_constant(expr: &Expr, budget: &mut Budget) -> Result<Option<f64>, Stop> {
    if let Expr::Const(Constant::Infinity) = expr {
        return Ok(Some(f64::INFINITY));
    }
    if let Expr::Mul(factors) = expr
        && factors.iter().any(|f| matches!(f, Expr::Const(Constant::Infinity)))
    {
        let negative =
            factors.iter().filter(|f| f.as_number().is_some_and(num_traits::Signed::is_negative)).count() % 2
                == 1;
        return Ok(Some(if negative { f64::NEG_INFINITY } else { f64::INFINITY }));
    }
    if !expr.variables().is_empty() {
        return Ok(None);
    }
    let value = evaluate(expr, &[], budget)?;
    Ok(value
        .filter(|v| v.value.im.abs() <= (SAFETY * v.error).max(RELATIVE * v.value.abs()))
        .map(|v| v.value.re))
}

/// Whether two formulas agree at random points; `None` when too few points have a value.
pub fn agree(a: &Expr, b: &Expr, budget: &mut Budget) -> Result<Option<bool>, Stop> {
    compare_at_points(&[a, b], budget, |values| {
        let (a, b) = (&values[0], &values[1]);
        let distance = a.value.minus(b.value).abs();
        let scale = a.value.abs().max(b.value.abs());
        distance <= RELATIVE * scale + SAFETY * (a.error + b.error)
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
        let (Some(a), Some(b)) = (evaluate(exprs[0], &values, budget)?, evaluate(exprs[1], &values, budget)?)
        else {
            continue;
        };
        let unreliable = |v: &Value| v.error > UNRELIABLE && v.error > UNRELIABLE * v.value.abs();
        if negative && (a.left_reals || b.left_reals) || unreliable(&a) || unreliable(&b) {
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
            matches!(
                f,
                Func::Floor
                    | Func::Ceil
                    | Func::Factorial
                    | Func::Binomial
                    | Func::Gcd
                    | Func::Lcm
                    | Func::Mod
            )
        }
        Expr::Pow(base, power) => {
            let negative_base = base.as_number().is_some_and(num_traits::Signed::is_negative);
            negative_base && !power.variables().is_empty()
        }
        Expr::Big(_) => true,
        _ => false,
    }
}
