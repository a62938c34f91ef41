//! Equations and inequalities up to rearrangement, and names that stand before an answer (`x = 5`, `f(x) =
//! 2x`).

use num_traits::{One, Signed, Zero};

use super::budget::Stop;
use super::compare::Comparer;
use super::exact::normal;
use super::expr::{Expr, Func, RelOp, Relation, to_f64};
use super::numeric;
use super::poly::{Atom, Exponent, Monomial, Poly, reduce};

/// Whether this only names a value: a variable, f(x), |AB|, NO/BO, (x, y), ∠ABC.
pub fn is_label(e: &Expr) -> bool {
    let named_part = |e: &Expr| match e {
        Expr::Sym(name) => name.starts_with(|c: char| c.is_ascii_uppercase() || c == '\\'),
        other => is_label(other),
    };
    match e {
        Expr::Sym(_) | Expr::Text(_) => true,
        Expr::Call(Func::Apply(_), _) => true,
        Expr::Call(_, arguments) => {
            arguments.iter().all(|a| is_label(a) || a.as_number().is_some())
                && !arguments.iter().all(|a| a.as_number().is_some())
        }
        Expr::Mul(factors) => factors.iter().all(named_part) || is_derivative(factors),
        Expr::Pow(base, power) => {
            power.as_number().is_some_and(|p| *p == -super::expr::Rational::one()) && named_part(base)
        }
        Expr::Ratio(parts) | Expr::Seq(_, _, parts) => parts.iter().all(is_label),
        _ => false,
    }
}

/// `dy/dx`
fn is_derivative(factors: &[Expr]) -> bool {
    let differential = |e: &Expr| match e {
        Expr::Mul(parts) => matches!(&parts[..], [Expr::Sym(d), Expr::Sym(_)] if d == "d"),
        _ => false,
    };
    match factors {
        [top, Expr::Pow(bottom, _)] => differential(top) && differential(bottom),
        _ => false,
    }
}

/// The name and the value of `name = value` (or of a chain that ends in a value).
pub fn assignment(relation: &Relation) -> Option<(&Expr, &Expr)> {
    if !relation.ops.iter().all(|op| matches!(op, RelOp::Eq | RelOp::Equiv)) {
        return None;
    }
    let (first, last) = (relation.sides.first()?, relation.sides.last()?);
    if relation.sides.len() > 2 || is_label(first) || first.variables().is_empty() && !is_label(last) {
        return Some((first, last));
    }
    is_label(last).then_some((last, first))
}

/// One inequality or equation as `difference op 0` with op one of =, ≠, >, ≥.
struct Condition {
    difference: Expr,
    op: RelOp,
}

fn conditions(relation: &Relation) -> Option<Vec<Condition>> {
    let pairs = relation.sides.windows(2).zip(&relation.ops);
    pairs
        .map(|(pair, op)| {
            let (left, right) = (pair[0].clone(), pair[1].clone());
            Some(match op {
                RelOp::Eq | RelOp::Ne => Condition { difference: left.minus(right), op: *op },
                RelOp::Gt | RelOp::Ge => Condition { difference: left.minus(right), op: *op },
                RelOp::Lt => Condition { difference: right.minus(left), op: RelOp::Gt },
                RelOp::Le => Condition { difference: right.minus(left), op: RelOp::Ge },
                _ => return None,
            })
        })
        .collect()
}

impl Comparer {
    /// Whether two relations say the same.
    pub(super) fn same_relation(&mut self, gold: &Relation, pred: &Relation) -> Result<bool, Stop> {
        match (&gold.modulus, &pred.modulus) {
            (Some(a), Some(b)) if !self.same_formula(a, b)? => return Ok(false),
            _ => {}
        }
        if let (Some((gold_name, gold_value)), Some((pred_name, pred_value))) =
            (assignment(gold), assignment(pred))
        {
            let free = !plain_letter(gold_name) || !plain_letter(pred_name);
            // f(x) = 1 says nothing of x.
            let about =
                |name: &Expr, other: &Expr| matches!(other, Expr::Sym(s) if name.variables().contains(s));
            let confused = about(gold_name, pred_name) || about(pred_name, gold_name);
            let same_name = gold_name == pred_name || free && !confused;
            if same_name && self.same(gold_value, pred_value)? {
                return Ok(true);
            }
        }
        let (Some(gold_parts), Some(pred_parts)) = (conditions(gold), conditions(pred)) else {
            return self.same_sides(gold, pred);
        };
        if gold_parts.len() != pred_parts.len() {
            return Ok(false);
        }
        for part in &gold_parts {
            let mut found = false;
            for other in &pred_parts {
                if part.op == other.op && self.same_condition(part, other)? {
                    found = true;
                    break;
                }
            }
            if !found {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Relations without a rule of their own: same operators, same sides.
    fn same_sides(&mut self, gold: &Relation, pred: &Relation) -> Result<bool, Stop> {
        if gold.ops != pred.ops {
            return Ok(false);
        }
        for (a, b) in gold.sides.iter().zip(&pred.sides) {
            if !self.same(a, b)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Equations may be scaled by any constant, inequalities by a positive one.
    fn same_condition(&mut self, a: &Condition, b: &Condition) -> Result<bool, Stop> {
        let any_sign = matches!(a.op, RelOp::Eq | RelOp::Ne);
        let exact = self.exact_proportion(&a.difference, &b.difference, any_sign);
        if let Ok(Some(sign)) = exact {
            return Ok(any_sign || sign > 0.0);
        }
        let opaque = |e: &Expr| e.any(&|n| matches!(n, Expr::Call(..) | Expr::Pow(..) | Expr::Big(_)));
        if exact.is_ok() && !opaque(&a.difference) && !opaque(&b.difference) {
            return Ok(false);
        }
        let factor = numeric::proportion(&a.difference, &b.difference, &mut self.budget)?;
        Ok(factor.is_some_and(|k| any_sign || k > 0.0))
    }

    /// The sign of k where a = k·b for a constant k. For equations a common factor of variables is cancelled
    /// first.
    fn exact_proportion(&mut self, a: &Expr, b: &Expr, equation: bool) -> Result<Option<f64>, Stop> {
        let (a, b) = (normal(a, &mut self.budget)?, normal(b, &mut self.budget)?);
        let same_denominator = a.den == b.den;
        if !equation && !same_denominator {
            return Ok(None);
        }
        let (x, y) = if equation { (cleared(&a.num)?, cleared(&b.num)?) } else { (a.num, b.num) };
        let Some(lead) = x.terms.keys().map(variables_of).max() else {
            return Ok(y.is_zero().then_some(1.0));
        };
        let (lead_x, lead_y) = (coefficient_of(&x, &lead), coefficient_of(&y, &lead));
        if lead_y.is_zero() {
            return Ok(None);
        }
        let left = x.times(&lead_y, &mut self.budget)?;
        let right = y.times(&lead_x, &mut self.budget)?;
        let minus = -super::expr::Rational::one();
        if !left.plus(&right, &minus, &mut self.budget)?.is_zero() {
            return Ok(None);
        }
        // Most coefficients are plain fractions; only those with roots need their sign worked out.
        let sign = |p: &Poly| match p.as_constant() {
            Some(c) => Some(if c.is_negative() { -1.0 } else { 1.0 }),
            None => real_sign(p),
        };
        Ok(match (sign(&lead_x), sign(&lead_y)) {
            (Some(p), Some(q)) => Some(p * q),
            _ => equation.then_some(1.0),
        })
    }
}

/// Different one-letter variables are different unknowns; other names (f(x), S_max, |AB|) are free to differ.
fn plain_letter(name: &Expr) -> bool {
    matches!(name, Expr::Sym(s) if s.chars().count() == 1)
}

/// Only the variables of a monomial.
fn variables_of(monomial: &Monomial) -> Monomial {
    let is_variable = |atom: &Atom| matches!(atom, Atom::Sym(_) | Atom::Opaque(_) | Atom::Infinity);
    monomial.iter().filter(|(atom, _)| is_variable(atom)).cloned().collect()
}

/// The constant coefficient of a product of variables.
fn coefficient_of(poly: &Poly, variables: &Monomial) -> Poly {
    let mut coefficient = Poly::default();
    for (monomial, value) in &poly.terms {
        if variables_of(monomial) == *variables {
            let constant = monomial.iter().filter(|part| !variables.contains(part)).cloned().collect();
            coefficient.terms.insert(constant, value.clone());
        }
    }
    coefficient
}

/// Divides by the lowest power of each variable, so that y = 1/x and xy = 1 are the same equation.
fn cleared(poly: &Poly) -> Result<Poly, Stop> {
    let mut lowest: Vec<(Atom, Exponent)> = Vec::new();
    for monomial in poly.terms.keys() {
        for (atom, power) in monomial {
            if matches!(atom, Atom::Sym(_)) && *power < Exponent::zero() {
                match lowest.iter_mut().find(|(a, _)| a == atom) {
                    Some((_, low)) => *low = (*low).min(*power),
                    None => lowest.push((atom.clone(), *power)),
                }
            }
        }
    }
    let mut out = Poly::default();
    for (monomial, value) in &poly.terms {
        let shift = lowest.iter().map(|(atom, power)| (atom.clone(), -power));
        let (monomial, moved) = reduce(monomial.iter().cloned().chain(shift))?;
        out.terms.insert(monomial, value * moved);
    }
    Ok(out)
}

/// The sign of a sum of roots and multiples of π, numerically.
fn real_sign(poly: &Poly) -> Option<f64> {
    use num_traits::ToPrimitive;
    let mut sum = 0.0f64;
    for (monomial, coefficient) in &poly.terms {
        let mut term = to_f64(coefficient);
        for (atom, power) in monomial {
            let base = match atom {
                Atom::Prime(p) => p.to_f64()?,
                Atom::Pi => std::f64::consts::PI,
                Atom::E => std::f64::consts::E,
                _ => return None,
            };
            term *= base.powf(power.to_f64()?);
        }
        sum += term;
    }
    (sum.is_finite() && sum != 0.0).then(|| sum.signum())
}
