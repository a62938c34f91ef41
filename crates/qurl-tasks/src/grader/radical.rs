//! Numbers with one square root: a + b√n for fractions a and b and a positive whole number n of any size.
//!
//! The normal form ([`super::exact`]) writes roots as powers of primes, and numbers that are too large to be
//! factored as something opaque, which is then compared at fifteen digits: √(10³⁰ + 1) was 10¹⁵. Numbers of
//! this shape are decided without factoring: a whole number is a square or it is not, and √m, √n and 1 are
//! independent over the fractions unless m, n or mn is a square.

use num_bigint::BigInt;
use num_traits::{One, Signed, ToPrimitive, Zero};

use super::budget::{Budget, MAX_BITS, Stop};
use super::expr::{Expr, Rational};
use super::poly::integer_power;

/// `a + b√n`; n is no square, or 1 where b is zero.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Surd {
    a: Rational,
    b: Rational,
    n: BigInt,
}

impl Surd {
    fn rational(a: Rational) -> Surd {
        Surd { a, b: Rational::zero(), n: BigInt::one() }
    }

    /// The value of a formula, if it has this shape.
    pub fn of(expr: &Expr, budget: &mut Budget) -> Result<Option<Surd>, Stop> {
        budget.charge(5)?;
        match expr {
            Expr::Num(n) => Ok(Some(Surd::rational(n.value.clone()))),
            Expr::Add(terms) => fold(terms, Surd::rational(Rational::zero()), Surd::plus, budget),
            Expr::Mul(factors) => fold(factors, Surd::rational(Rational::one()), Surd::times, budget),
            Expr::Pow(base, power) => {
                let Some(power) = Surd::of(power, budget)?.filter(|p| p.b.is_zero()) else { return Ok(None) };
                let Some(base) = Surd::of(base, budget)? else { return Ok(None) };
                let power = power.a;
                let half = Rational::new(1.into(), 2.into());
                match () {
                    () if power == Rational::one() => Ok(Some(base)),
                    () if power == -Rational::one() => base.inverted(budget),
                    () if power == half => base.root(budget),
                    () if power == -half => match base.root(budget)? {
                        Some(root) => root.inverted(budget),
                        None => Ok(None),
                    },
                    () if power == Rational::from_integer(2.into()) => base.clone().times(base, budget),
                    () if base.b.is_zero() && power.is_integer() && !base.a.is_zero() => {
                        let Some(n) = power.to_integer().to_i64() else { return Ok(None) };
                        Surd::rational(integer_power(&base.a, n)?).checked(budget)
                    }
                    () => Ok(None),
                }
            }
            _ => Ok(None),
        }
    }

    /// Whether two of them are the same number.
    pub fn same(self, other: Surd, budget: &mut Budget) -> Result<bool, Stop> {
        if self.b.is_zero() || other.b.is_zero() {
            return Ok(self.b.is_zero() && other.b.is_zero() && self.a == other.a);
        }
        let equal_parts = self.a == other.a && self.b.is_positive() == other.b.is_positive();
        // The parts with roots have the same squares.
        let square = |s: &Surd| &s.b * &s.b * &s.n;
        charge(&self, budget)?;
        Ok(equal_parts && square(&self) == square(&other))
    }

    fn plus(self, other: Surd, budget: &mut Budget) -> Result<Option<Surd>, Stop> {
        let a = &self.a + &other.a;
        let Some((b, other_b, n)) = aligned(&self, &other, budget)? else { return Ok(None) };
        Surd { a, b: b + other_b, n }.checked(budget)
    }

    fn times(self, other: Surd, budget: &mut Budget) -> Result<Option<Surd>, Stop> {
        if self.a.is_zero() && other.a.is_zero() {
            // b√m · d√n, whatever m and n are.
            let product = root_of_whole(&self.n * &other.n, budget)?;
            let scale = &self.b * &other.b;
            return product.scaled(&scale).checked(budget);
        }
        let Some((b, d, n)) = aligned(&self, &other, budget)? else { return Ok(None) };
        let a = &self.a * &other.a + &b * &d * &n;
        Surd { a, b: &self.a * d + &other.a * b, n }.checked(budget)
    }

    fn inverted(self, budget: &mut Budget) -> Result<Option<Surd>, Stop> {
        let norm = &self.a * &self.a - &self.b * &self.b * &self.n;
        if norm.is_zero() {
            return Ok(None); // zero itself: √n is no fraction
        }
        let conjugate = Surd { b: -self.b, ..self };
        conjugate.scaled(&norm.recip()).checked(budget)
    }

    /// The square root of a fraction.
    fn root(self, budget: &mut Budget) -> Result<Option<Surd>, Stop> {
        if !self.b.is_zero() || self.a.is_negative() {
            return Ok(None);
        }
        // √(p/q) = √(pq) / q
        let denom = Rational::from_integer(self.a.denom().clone());
        root_of_whole(self.a.numer() * self.a.denom(), budget)?.scaled(&denom.recip()).checked(budget)
    }

    fn scaled(self, scale: &Rational) -> Surd {
        Surd { a: self.a * scale, b: self.b * scale, n: self.n }
    }

    /// The number itself, unless it has grown too large.
    fn checked(self, budget: &mut Budget) -> Result<Option<Surd>, Stop> {
        charge(&self, budget)?;
        Ok(Some(if self.b.is_zero() { Surd::rational(self.a) } else { self }))
    }
}

fn charge(surd: &Surd, budget: &mut Budget) -> Result<(), Stop> {
    let bits = |value: &Rational| value.numer().bits() + value.denom().bits();
    let bits = bits(&surd.a) + bits(&surd.b) + surd.n.bits();
    budget.charge(5 + bits / 16)?;
    if bits > MAX_BITS { Err(Stop) } else { Ok(()) }
}

type Operation = fn(Surd, Surd, &mut Budget) -> Result<Option<Surd>, Stop>;

fn fold(items: &[Expr], start: Surd, with: Operation, budget: &mut Budget) -> Result<Option<Surd>, Stop> {
    let mut all = start;
    for item in items {
        let Some(item) = Surd::of(item, budget)? else { return Ok(None) };
        match with(all, item, budget)? {
            Some(value) => all = value,
            None => return Ok(None),
        }
    }
    Ok(Some(all))
}

/// Both factors of roots over one root, where there is one: √8 is 2√2.
fn aligned(x: &Surd, y: &Surd, budget: &mut Budget) -> Result<Option<(Rational, Rational, BigInt)>, Stop> {
    if x.b.is_zero() {
        return Ok(Some((Rational::zero(), y.b.clone(), y.n.clone())));
    }
    if y.b.is_zero() || x.n == y.n {
        return Ok(Some((x.b.clone(), y.b.clone(), x.n.clone())));
    }
    // √m = √(mn) / n · √n, which helps if mn is a square.
    let product = root_of_whole(&x.n * &y.n, budget)?;
    if !product.b.is_zero() {
        return Ok(None);
    }
    let b = &y.b * product.a / Rational::from_integer(x.n.clone());
    Ok(Some((x.b.clone(), b, x.n.clone())))
}

/// The square root of a whole number that is not negative.
fn root_of_whole(n: BigInt, budget: &mut Budget) -> Result<Surd, Stop> {
    if n.bits() > MAX_BITS {
        return Err(Stop);
    }
    budget.charge(5 + n.bits() * n.bits() / 4096)?;
    let root = n.sqrt();
    match &root * &root == n {
        true => Ok(Surd::rational(Rational::from_integer(root))),
        false => Ok(Surd { a: Rational::zero(), b: Rational::one(), n }),
    }
}
