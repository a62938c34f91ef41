//! Are two formulas the same value? Exactly where possible, else at random points; percent signs, units and
//! rounded decimals have their rules here.

use num_traits::{One, Zero};

use super::budget::Stop;
use super::compare::{Comparer, PercentRule};
use super::exact::normal;
use super::expr::{Constant, Expr, Rational};
use super::numeric;
use super::poly::{Atom, Form};
use super::radical::Surd;
use super::words::{UnitSize, unit_size};

/// Two decimals are the same when they round to the same six places ...
const DECIMAL_ABSOLUTE: f64 = 5e-7;
/// ... and are not both so small that six places say nothing.
const DECIMAL_RELATIVE: f64 = 1e-6;

/// A value without its decoration.
struct Peeled {
    value: Expr,
    percent: bool,
    unit: Option<String>,
}

fn peel(expr: &Expr) -> Peeled {
    match expr {
        Expr::Percent(inner) => Peeled { percent: true, ..peel(inner) },
        Expr::Degrees(inner) => Peeled { unit: Some("degree".into()), ..peel(inner) },
        Expr::Quantity(inner, unit) => {
            let inner = peel(inner);
            Peeled { percent: inner.percent, value: inner.value, unit: Some(unit.clone()) }
        }
        Expr::Mul(factors) => match &factors[..] {
            [Expr::Num(minus), decorated @ (Expr::Percent(_) | Expr::Degrees(_) | Expr::Quantity(..))]
                if minus.value == -Rational::one() =>
            {
                let inner = peel(decorated);
                Peeled { value: inner.value.negated(), ..inner }
            }
            _ => plain(expr),
        },
        _ => plain(expr),
    }
}

fn plain(expr: &Expr) -> Peeled {
    Peeled { value: expr.clone(), percent: false, unit: None }
}

/// The size of a unit as written after a value; `None` for words that are not measures.
fn size_of(unit: &str) -> Option<(UnitSize, u32)> {
    let (words, power) = match unit.split_once('^') {
        Some((words, power)) => (words, power.parse().ok()?),
        None => (unit, 1),
    };
    let mut power: u32 = power;
    let mut found = None;
    for word in words.split(' ') {
        match word {
            "square" | "sq" => power *= 2,
            "cubic" | "cu" => power *= 3,
            _ if found.is_none() => found = Some(unit_size(word)?),
            _ => return None,
        }
    }
    found.filter(|_| power <= 3).map(|size| (size, power))
}

impl Comparer {
    /// Whether two scalars are the same, with their percent signs and units.
    pub(super) fn same_scalar(&mut self, gold: &Expr, pred: &Expr) -> Result<bool, Stop> {
        let (mut g, mut p) = (peel(gold), peel(pred));
        if let (Some(gu), Some(pu)) = (&g.unit, &p.unit)
            && let (Some((gs, gp)), Some((ps, pp))) = (size_of(gu), size_of(pu))
        {
            if gs.dimension != ps.dimension || gp != pp {
                return Ok(false);
            }
            g.value = in_base_units(g.value, gs, gp);
            p.value = in_base_units(p.value, ps, pp);
        }
        if g.percent && p.unit.is_some() && !p.percent || p.percent && g.unit.is_some() && !g.percent {
            return Ok(false);
        }
        let degrees = (g.unit.as_deref() == Some("degree"), p.unit.as_deref() == Some("degree"));
        let has_pi = |e: &Expr| e.any(&|n| matches!(n, Expr::Const(Constant::Pi)));
        if degrees == (true, false) && has_pi(&p.value) {
            g.value = in_radians(g.value);
        } else if degrees == (false, true) && has_pi(&g.value) {
            p.value = in_radians(p.value);
        }
        match self.options.percent {
            PercentRule::IsRatio => {
                let ratio = |side: Peeled| {
                    if side.percent { Expr::Percent(Box::new(side.value)) } else { side.value }
                };
                let (g, p) = (ratio(g), ratio(p));
                self.same_formula(&g, &p)
            }
            PercentRule::Ignored => {
                if self.same_formula(&g.value, &p.value)? {
                    return Ok(true);
                }
                if g.percent == p.percent {
                    return Ok(false);
                }
                let ratio = |side: Peeled| {
                    if side.percent { Expr::Percent(Box::new(side.value)) } else { side.value }
                };
                let (g, p) = (ratio(g), ratio(p));
                self.same_formula(&g, &p)
            }
        }
    }

    /// Whether two formulas have the same value for all values of their variables.
    pub(super) fn same_formula(&mut self, a: &Expr, b: &Expr) -> Result<bool, Stop> {
        if a == b {
            return Ok(true);
        }
        if let (Some(x), Some(y)) = (a.as_number(), b.as_number()) {
            return Ok(x == y || self.same_rounded(a, b)?);
        }
        // Running out of fuel in the exact form leaves the numeric comparison its own share.
        let mut budget = self.budget.half();
        let exact = normal(a, &mut budget).and_then(|x| {
            let y = normal(b, &mut budget)?;
            let zero = x.difference(&y, &mut budget)?.is_zero();
            Ok((zero, is_decided(&x) && is_decided(&y)))
        });
        self.budget.charge(budget.used())?;
        match exact {
            Ok((true, _)) => Ok(true),
            Ok((false, true)) => self.same_rounded(a, b),
            // A number is no formula of pieces with a variable that exact rules cannot remove: such a formula
            // can be that number wherever it is tried.
            _ if a.variables().is_empty() != b.variables().is_empty()
                && [a, b].iter().any(|e| e.any(&numeric::is_piecewise)) =>
            {
                Ok(false)
            }
            _ => {
                let same = match self.same_surds(a, b)? {
                    None => numeric::agree(a, b, &mut self.budget)?,
                    same => same,
                };
                if same == Some(true) { Ok(true) } else { self.same_rounded(a, b) }
            }
        }
    }

    /// Numbers with at most one square root of a whole number, of any size.
    fn same_surds(&mut self, a: &Expr, b: &Expr) -> Result<Option<bool>, Stop> {
        let mut budget = self.budget.half();
        let both = Surd::of(a, &mut budget).and_then(|x| Ok(x.zip(Surd::of(b, &mut budget)?)));
        let same = both.and_then(|both| both.map(|(x, y)| x.same(y, &mut budget)).transpose());
        self.budget.charge(budget.used())?;
        Ok(same.unwrap_or(None))
    }

    /// Constants of which at least one is written as a decimal may differ by rounding.
    fn same_rounded(&mut self, a: &Expr, b: &Expr) -> Result<bool, Stop> {
        let decimal = |e: &Expr| e.any(&|n| matches!(n, Expr::Num(n) if n.decimal));
        if !decimal(a) && !decimal(b) {
            return Ok(false);
        }
        let (Some(x), Some(y)) =
            (numeric::real_constant(a, &mut self.budget)?, numeric::real_constant(b, &mut self.budget)?)
        else {
            return Ok(false);
        };
        let distance = (x - y).abs();
        Ok(distance <= DECIMAL_ABSOLUTE && distance <= DECIMAL_RELATIVE * x.abs().max(y.abs()))
    }

    /// Whether a formula is exactly zero.
    pub(super) fn is_zero(&mut self, e: &Expr) -> Result<bool, Stop> {
        Ok(normal(e, &mut self.budget)?.as_constant().is_some_and(|c| c.is_zero()))
    }
}

/// An angle in degrees, to be compared with one that is given as a multiple of π.
fn in_radians(value: Expr) -> Expr {
    let turn = Expr::rational(Rational::new(1.into(), 180.into()));
    Expr::Mul(vec![value, Expr::Const(Constant::Pi), turn])
}

fn in_base_units(value: Expr, size: UnitSize, power: u32) -> Expr {
    let factor = Rational::new(size.numerator.into(), size.denominator.into());
    let factor = (0..power).fold(Rational::one(), |product, _| product * &factor);
    if factor.is_one() { value } else { Expr::Mul(vec![value, Expr::rational(factor)]) }
}

/// Whether a difference that is not zero in this form is certainly not zero.
fn is_decided(form: &Form) -> bool {
    form.atoms().all(|atom| !matches!(atom, Atom::Opaque(_)))
}
