//! Numeric evaluation, for what has no exact normal form: two formulas are equal when they agree at seeded
//! random points.
//!
//! Values are complex, so that i and roots of negative numbers work. Points are positive first, because
//! answers assume the domain where their roots and logarithms exist; negative points count only where both
//! formulas stay real (they tell |x| from x). Formulas with floors, factorials and the like are tried at
//! whole numbers. Some points are far away: a floor of x/1000 is nothing near zero.

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
/// Points that are tried near zero.
const POINTS: u64 = 10;
/// Sizes of those that are tried far away, after them.
const FAR: [f64; 3] = [1e3, 1e6, -1e3];
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
    let wants_natural = exprs.iter().any(|e| e.any(&|n| is_discrete(n) && !is_rounding(n)));
    let is_complex = exprs.iter().any(|e| e.any(&|n| matches!(n, Expr::Const(Constant::I))));
    let mut agreed = 0;
    for point in 0..POINTS + FAR.len() as u64 {
        let far = point.checked_sub(POINTS).map(|far| FAR[far as usize]);
        let negative = far.map_or(point % 3 == 2, |size| size < 0.0);
        if negative && (is_complex || wants_natural) {
            continue;
        }
        let coordinate = |variable| match far {
            None => near(point, variable, wants_whole, negative),
            Some(size) => away(point, variable, wants_whole, size),
        };
        let values: Vec<(String, f64)> =
            names.iter().zip(0..).map(|(name, variable)| (name.clone(), coordinate(variable))).collect();
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

/// A number in [0, 1) for a variable at a point, and whether it comes with a minus.
fn unit(point: u64, variable: u64) -> (f64, bool) {
    let bits = mix(&[0x9a11, point, variable]);
    ((bits >> 11) as f64 / (1u64 << 53) as f64, bits & 1 == 0 || variable == 0)
}

/// A variable's value: in (0.3, 3.3), or a small whole number; perhaps negative.
fn near(point: u64, variable: u64, whole: bool, negative: bool) -> f64 {
    let (unit, minus) = unit(point, variable);
    let size = match whole {
        true => 2.0 + (unit * 11.0).floor() + if point >= 5 { 7.0 } else { 0.0 },
        false => 0.3 + 3.0 * unit,
    };
    if negative && minus { -size } else { size }
}

/// A value of this size and sign.
fn away(point: u64, variable: u64, whole: bool, size: f64) -> f64 {
    let (unit, _) = unit(point, variable);
    let value = size * (1.0 + unit);
    if whole { value.round() } else { value }
}

/// Whether random points can miss where a formula changes, since it is made of pieces.
pub fn is_piecewise(e: &Expr) -> bool {
    match e {
        Expr::Call(f, _) => matches!(f, Func::Max | Func::Min | Func::Abs | Func::Sign) || is_discrete(e),
        Expr::Pow(base, power) => {
            let root = power.as_number().is_some_and(|power| !power.is_integer());
            root && !base.variables().is_empty() || is_discrete(e)
        }
        other => is_discrete(other),
    }
}

/// Functions of all reals that are only tried at whole numbers.
fn is_rounding(e: &Expr) -> bool {
    matches!(e, Expr::Call(Func::Floor | Func::Ceil | Func::Mod, _))
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
