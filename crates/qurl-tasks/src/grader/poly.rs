//! Polynomials over atoms with rational exponents and rational coefficients: the currency of exact
//! comparison.
//!
//! Atoms are primes (√6 is 2^(1/2)·3^(1/2)), π, e, i, variables, and calls that have no exact value. A
//! product of atoms is reduced at once: whole powers of primes move into the coefficient and i² is −1, so
//! that 1/√6 and √6/6 are one thing. Products of fractional powers of distinct primes are linearly
//! independent over the rationals, hence a polynomial over primes is zero only when it has no terms.

use std::collections::BTreeMap;
use std::fmt::Write;

use num_bigint::BigInt;
use num_integer::Integer;
use num_rational::Ratio;
use num_traits::{One, ToPrimitive, Zero};

use super::budget::{Budget, MAX_BITS, MAX_TERMS, Stop};
use super::expr::Rational;

/// An exponent. Kept small: see [`exponent`].
pub type Exponent = Ratio<i64>;

/// What a monomial is a product of.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Atom {
    /// A prime number.
    Prime(BigInt),
    /// π
    Pi,
    /// e
    E,
    /// i
    I,
    /// ∞, never simplified.
    Infinity,
    /// A variable, or a call of a function that the problem defines.
    Sym(String),
    /// Something with a numeric value but no exact form here; equal ones may look different.
    Opaque(String),
}

/// A product of powers, sorted by atom.
pub type Monomial = Vec<(Atom, Exponent)>;

/// A sum of monomials with coefficients; zero has no terms.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Poly {
    /// Coefficient of each monomial.
    pub terms: BTreeMap<Monomial, Rational>,
}

/// A fraction of polynomials. A denominator of one term is folded into the numerator.
#[derive(Clone, Debug, PartialEq)]
pub struct Form {
    /// Numerator.
    pub num: Poly,
    /// Denominator, never zero.
    pub den: Poly,
}

/// Checks an exponent's size, so that sums and products of a few of them cannot overflow.
pub fn exponent(value: Exponent) -> Result<Exponent, Stop> {
    if value.numer().unsigned_abs() > 1_000_000 || *value.denom() > 10_000 {
        return Err(Stop);
    }
    Ok(value)
}

/// An exact fraction as an exponent, when it is small enough.
pub fn to_exponent(value: &Rational) -> Result<Exponent, Stop> {
    let numer = value.numer().to_i64().ok_or(Stop)?;
    let denom = value.denom().to_i64().ok_or(Stop)?;
    exponent(Ratio::new(numer, denom))
}

/// `a · b`. Whole numbers are multiplied without looking for common factors, which is slow for large ones.
pub fn product(a: &Rational, b: &Rational) -> Rational {
    if a.denom().is_one() && b.denom().is_one() {
        return Rational::from_integer(a.numer() * b.numer());
    }
    a * b
}

/// `a + b`, with the same short cut.
fn sum(a: &Rational, b: &Rational) -> Rational {
    if a.denom().is_one() && b.denom().is_one() {
        return Rational::from_integer(a.numer() + b.numer());
    }
    a + b
}

/// Fuel for arithmetic on two coefficients: reducing a large fraction takes quadratic time.
fn cost(a: &Rational, b: &Rational) -> u64 {
    let bits = a.numer().bits() + b.numer().bits();
    let below = a.denom().bits() + b.denom().bits();
    bits / 32 + if below > 2 { (bits + below) * (bits + below) / 8192 } else { 0 }
}

fn check_bits(value: &Rational) -> Result<(), Stop> {
    if value.numer().bits() + value.denom().bits() > MAX_BITS {
        return Err(Stop);
    }
    Ok(())
}

/// `base^power` within the size limit.
pub fn integer_power(base: &Rational, power: i64) -> Result<Rational, Stop> {
    if power < 0 && base.is_zero() {
        return Err(Stop);
    }
    if base.is_one() {
        return Ok(base.clone());
    }
    let size = (base.numer().bits() + base.denom().bits()).saturating_sub(1);
    if size.saturating_mul(power.unsigned_abs()) > MAX_BITS {
        return Err(Stop);
    }
    let n = u32::try_from(power.unsigned_abs()).map_err(|_| Stop)?;
    // Powers of a reduced fraction are reduced.
    let raised = Ratio::new_raw(base.numer().pow(n), base.denom().pow(n));
    Ok(if power < 0 { raised.recip() } else { raised })
}

/// Multiplies powers and reduces: returns the monomial and what moved into the coefficient.
pub fn reduce(factors: impl IntoIterator<Item = (Atom, Exponent)>) -> Result<(Monomial, Rational), Stop> {
    let mut merged: BTreeMap<Atom, Exponent> = BTreeMap::new();
    for (atom, power) in factors {
        let sum = merged.entry(atom).or_insert_with(Exponent::zero);
        *sum = exponent(*sum + power)?;
    }
    let mut coefficient = Rational::one();
    let mut monomial = Vec::with_capacity(merged.len());
    for (atom, power) in merged {
        let kept = match &atom {
            Atom::Prime(p) => {
                let whole = power.floor().to_integer();
                if whole != 0 {
                    coefficient =
                        product(&coefficient, &integer_power(&Rational::from_integer(p.clone()), whole)?);
                    check_bits(&coefficient)?;
                }
                power - whole
            }
            Atom::I if power.is_integer() => {
                let turns = power.to_integer().mod_floor(&4);
                if turns >= 2 {
                    coefficient = -coefficient;
                }
                Exponent::from_integer(turns % 2)
            }
            _ => power,
        };
        if !kept.is_zero() {
            monomial.push((atom, kept));
        }
    }
    Ok((monomial, coefficient))
}

impl Poly {
    /// A constant.
    pub fn constant(value: Rational) -> Poly {
        let mut poly = Poly::default();
        if !value.is_zero() {
            poly.terms.insert(Vec::new(), value);
        }
        poly
    }

    /// One atom to a power.
    pub fn atom(atom: Atom, power: Exponent) -> Result<Poly, Stop> {
        let (monomial, coefficient) = reduce([(atom, power)])?;
        Ok(Poly { terms: BTreeMap::from([(monomial, coefficient)]) })
    }

    /// Whether this is zero.
    pub fn is_zero(&self) -> bool {
        self.terms.is_empty()
    }

    /// The value, when there are no atoms.
    pub fn as_constant(&self) -> Option<Rational> {
        match self.terms.len() {
            0 => Some(Rational::zero()),
            1 => self.terms.get(&Vec::new()).cloned(),
            _ => None,
        }
    }

    /// The only term, when there is just one.
    pub fn single(&self) -> Option<(&Monomial, &Rational)> {
        if self.terms.len() == 1 { self.terms.iter().next() } else { None }
    }

    fn add_term(&mut self, monomial: Monomial, coefficient: Rational) -> Result<(), Stop> {
        if coefficient.is_zero() {
            return Ok(());
        }
        check_bits(&coefficient)?;
        match self.terms.get_mut(&monomial) {
            Some(total) => {
                *total = sum(total, &coefficient);
                if total.is_zero() {
                    self.terms.remove(&monomial);
                }
            }
            None => {
                if self.terms.len() >= MAX_TERMS {
                    return Err(Stop);
                }
                self.terms.insert(monomial, coefficient);
            }
        }
        Ok(())
    }

    /// `self + scale · other`
    pub fn plus(&self, other: &Poly, scale: &Rational, budget: &mut Budget) -> Result<Poly, Stop> {
        let mut sum = self.clone();
        for (monomial, coefficient) in &other.terms {
            budget.charge(4 + cost(coefficient, scale))?;
            sum.add_term(monomial.clone(), product(coefficient, scale))?;
        }
        Ok(sum)
    }

    /// `self · other`
    pub fn times(&self, other: &Poly, budget: &mut Budget) -> Result<Poly, Stop> {
        let mut result = Poly::default();
        for (a, ca) in &self.terms {
            for (b, cb) in &other.terms {
                budget.charge(12 + 4 * (a.len() + b.len()) as u64 + 2 * cost(ca, cb))?;
                let (monomial, moved) = reduce(a.iter().chain(b).cloned())?;
                let coefficient = product(&product(ca, cb), &moved);
                result.add_term(monomial, coefficient)?;
            }
        }
        Ok(result)
    }

    /// Spells the polynomial in a fixed order.
    pub fn key(&self) -> String {
        let mut text = String::new();
        for (monomial, coefficient) in &self.terms {
            let _ = write!(text, "{coefficient:+}");
            for (atom, power) in monomial {
                let _ = match atom {
                    Atom::Prime(p) => write!(text, "*{p}^{power}"),
                    Atom::Sym(name) | Atom::Opaque(name) => write!(text, "*{name}^{power}"),
                    other => write!(text, "*{other:?}^{power}"),
                };
            }
        }
        text
    }
}

impl Form {
    /// A constant.
    pub fn constant(value: Rational) -> Form {
        Form { num: Poly::constant(value), den: Poly::constant(Rational::one()) }
    }

    /// An atom to a power.
    pub fn atom(atom: Atom, power: Exponent) -> Result<Form, Stop> {
        Ok(Form { num: Poly::atom(atom, power)?, den: Poly::constant(Rational::one()) })
    }

    /// The exact value, when this is a plain fraction.
    pub fn as_constant(&self) -> Option<Rational> {
        let den = self.den.as_constant()?;
        Some(self.num.as_constant()? / den)
    }

    /// Whether the denominator is one.
    pub fn is_polynomial(&self) -> bool {
        self.den.as_constant().is_some_and(|c| c.is_one())
    }

    fn folded(self, budget: &mut Budget) -> Result<Form, Stop> {
        if self.den.is_zero() {
            return Err(Stop);
        }
        if self.is_polynomial() {
            return Ok(self);
        }
        if self.num.is_zero() {
            return Ok(Form::constant(Rational::zero()));
        }
        if self.num == self.den {
            return Ok(Form::constant(Rational::one()));
        }
        let Some((monomial, coefficient)) = self.den.single() else {
            return Ok(self);
        };
        let (inverse, moved) = reduce(monomial.iter().map(|(atom, power)| (atom.clone(), -power)))?;
        let inverse = Poly { terms: BTreeMap::from([(inverse, moved / coefficient)]) };
        Ok(Form { num: self.num.times(&inverse, budget)?, den: Poly::constant(Rational::one()) })
    }

    /// `self + other`
    pub fn plus(&self, other: &Form, budget: &mut Budget) -> Result<Form, Stop> {
        let one = Rational::one();
        if self.den == other.den {
            let num = self.num.plus(&other.num, &one, budget)?;
            return Form { num, den: self.den.clone() }.folded(budget);
        }
        let left = self.num.times(&other.den, budget)?;
        let right = other.num.times(&self.den, budget)?;
        Form { num: left.plus(&right, &one, budget)?, den: self.den.times(&other.den, budget)? }
            .folded(budget)
    }

    /// `self · other`
    pub fn times(&self, other: &Form, budget: &mut Budget) -> Result<Form, Stop> {
        Form { num: self.num.times(&other.num, budget)?, den: self.den.times(&other.den, budget)? }
            .folded(budget)
    }

    /// `-self`
    pub fn negated(&self) -> Form {
        let num = Poly { terms: self.num.terms.iter().map(|(m, c)| (m.clone(), -c)).collect() };
        Form { num, den: self.den.clone() }
    }

    /// `1 / self`
    pub fn inverted(&self, budget: &mut Budget) -> Result<Form, Stop> {
        Form { num: self.den.clone(), den: self.num.clone() }.folded(budget)
    }

    /// `self - other`, as a numerator that is zero exactly when the two are equal.
    pub fn difference(&self, other: &Form, budget: &mut Budget) -> Result<Poly, Stop> {
        let minus = -Rational::one();
        if self.den == other.den {
            return self.num.plus(&other.num, &minus, budget);
        }
        let left = self.num.times(&other.den, budget)?;
        let right = other.num.times(&self.den, budget)?;
        left.plus(&right, &minus, budget)
    }

    /// All atoms of numerator and denominator.
    pub fn atoms(&self) -> impl Iterator<Item = &Atom> {
        let monomials = self.num.terms.keys().chain(self.den.terms.keys());
        monomials.flatten().map(|(atom, _)| atom)
    }

    /// Spells the form in a fixed order; equal keys mean equal forms.
    pub fn key(&self) -> String {
        if self.is_polynomial() {
            return self.num.key();
        }
        let lead = self.den.terms.values().next().cloned().unwrap_or_else(Rational::one);
        let scaled =
            |poly: &Poly| Poly { terms: poly.terms.iter().map(|(m, c)| (m.clone(), c / &lead)).collect() };
        format!("({})/({})", scaled(&self.num).key(), scaled(&self.den).key())
    }
}

/// Prime factors of a positive integer with their powers; a large rest that may be composite is reported as
/// `None`.
pub fn factor(n: &BigInt, budget: &mut Budget) -> Result<Option<Vec<(BigInt, i64)>>, Stop> {
    const TRIAL: u64 = 4096;
    let mut rest = n.clone();
    let mut factors = Vec::new();
    if rest.bits() > MAX_BITS {
        return Err(Stop);
    }
    let mut p = 2u64;
    while p < TRIAL && !rest.is_one() {
        let small = rest.to_u64();
        budget.charge(if small.is_some() { 1 } else { 1 + rest.bits() / 64 })?;
        if small.is_some_and(|r| p * p > r) {
            break;
        }
        let divides = match small {
            Some(r) => r % p == 0,
            None => (&rest % p).is_zero(),
        };
        if divides {
            let mut power = 0;
            while (&rest % p).is_zero() {
                rest /= p;
                power += 1;
                budget.charge(2 + rest.bits() / 64)?;
            }
            factors.push((BigInt::from(p), power));
        }
        p += if p == 2 { 1 } else { 2 };
    }
    if rest.is_one() {
        return Ok(Some(factors));
    }
    let root = rest.sqrt();
    if &root * &root == rest && root < BigInt::from(TRIAL * TRIAL) {
        factors.push((root, 2));
        return Ok(Some(factors));
    }
    if rest < BigInt::from(TRIAL * TRIAL) {
        factors.push((rest, 1));
        return Ok(Some(factors));
    }
    Ok(None)
}
