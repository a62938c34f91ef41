//! Exact normal forms: a formula becomes a fraction of polynomials over atoms (see [`super::poly`]).
//!
//! Values that exist exactly are taken (sin 30°, log₂ 8, 16 choose 2, 0.1 + 0.2); what has none becomes an
//! opaque atom named after its normalised argument, and the comparison then asks [`super::numeric`].

use num_bigint::BigInt;
use num_integer::Integer;
use num_rational::Ratio;
use num_traits::{One, Signed, ToPrimitive, Zero};

use super::budget::{Budget, MAX_BITS, Stop};
use super::expr::{Big, BigKind, Constant, Expr, Func, Rational};
use super::poly::{
    Atom, Exponent, Form, Poly, exponent, factor, integer_power, product, reduce, to_exponent,
};

/// Largest power to which a sum is multiplied out.
const MAX_EXPANSION: u64 = 40;
/// Longest name of an opaque atom, in bytes.
const MAX_NAME: usize = 1000;
/// Most terms of a Σ or Π that are written out.
const MAX_UNROLL: i64 = 200;
/// Largest n of n! and of n choose k.
const MAX_FACTORIAL: i64 = 2500;

/// The normal form of a formula.
pub fn normal(expr: &Expr, budget: &mut Budget) -> Result<Form, Stop> {
    budget.charge(5)?;
    match expr {
        Expr::Num(n) => {
            if n.value.numer().bits() + n.value.denom().bits() > MAX_BITS {
                return Err(Stop);
            }
            Ok(Form::constant(n.value.clone()))
        }
        Expr::Sym(name) => Form::atom(Atom::Sym(name.clone()), Exponent::one()),
        Expr::Const(c) => Form::atom(constant_atom(*c), Exponent::one()),
        Expr::Add(terms) => {
            let mut sum = Form::constant(Rational::zero());
            for term in terms {
                sum = sum.plus(&normal(term, budget)?, budget)?;
            }
            Ok(sum)
        }
        Expr::Mul(factors) => {
            let mut product = Form::constant(Rational::one());
            for item in factors {
                product = product.times(&normal(item, budget)?, budget)?;
            }
            Ok(product)
        }
        Expr::Pow(base, power) => {
            let base = normal(base, budget)?;
            let power = normal(power, budget)?;
            raise(&base, &power, budget)
        }
        Expr::Call(func, arguments) => call(func, arguments, budget),
        Expr::Percent(inner) => {
            let hundredth = Form::constant(Ratio::new(1.into(), 100.into()));
            normal(inner, budget)?.times(&hundredth, budget)
        }
        Expr::Degrees(inner) | Expr::Quantity(inner, _) => normal(inner, budget),
        Expr::Big(big) => unrolled(big, budget),
        Expr::Ratio(parts) if parts.len() == 2 => {
            let den = normal(&parts[1], budget)?.inverted(budget)?;
            normal(&parts[0], budget)?.times(&den, budget)
        }
        _ => Err(Stop),
    }
}

fn constant_atom(c: Constant) -> Atom {
    match c {
        Constant::Pi => Atom::Pi,
        Constant::E => Atom::E,
        Constant::I => Atom::I,
        Constant::Infinity => Atom::Infinity,
    }
}

fn opaque(name: String) -> Result<Form, Stop> {
    if name.len() > MAX_NAME {
        return Err(Stop);
    }
    Form::atom(Atom::Opaque(name), Exponent::one())
}

/// `base^power`
pub fn raise(base: &Form, power: &Form, budget: &mut Budget) -> Result<Form, Stop> {
    match power.as_constant() {
        Some(value) if value.denom().is_one() => whole_power(base, &value, budget),
        Some(value) => root_power(base, &value, budget),
        None => symbolic_power(base, power, budget),
    }
}

fn whole_power(base: &Form, power: &Rational, budget: &mut Budget) -> Result<Form, Stop> {
    let n = power.numer().to_i64().ok_or(Stop)?;
    if n == 0 {
        return if base.num.is_zero() { Err(Stop) } else { Ok(Form::constant(Rational::one())) };
    }
    if base.is_polynomial()
        && let Some((monomial, coefficient)) = base.num.single()
    {
        let mut powers = Vec::with_capacity(monomial.len());
        for (atom, e) in monomial {
            powers.push((atom.clone(), exponent(e * exponent(Exponent::from_integer(n))?)?));
        }
        let raised = integer_power(coefficient, n)?;
        budget.charge(raised.numer().bits() / 16)?;
        let (monomial, moved) = reduce(powers)?;
        let mut num = Poly::default();
        num.terms.insert(monomial, product(&raised, &moved));
        return Ok(Form { num, den: Poly::constant(Rational::one()) });
    }
    if n.unsigned_abs() > MAX_EXPANSION {
        return Err(Stop);
    }
    let start = if n < 0 { base.inverted(budget)? } else { base.clone() };
    let mut product = start.clone();
    for _ in 1..n.unsigned_abs() {
        product = product.times(&start, budget)?;
    }
    Ok(product)
}

/// `base^(p/q)` with q > 1: roots of numbers go to primes, odd roots of negative numbers are real.
fn root_power(base: &Form, power: &Rational, budget: &mut Budget) -> Result<Form, Stop> {
    let power = to_exponent(power)?;
    let (p, q) = (*power.numer(), *power.denom());
    if base.num.is_zero() {
        return if p > 0 { Ok(base.clone()) } else { Err(Stop) };
    }
    let as_opaque = || {
        let root = Atom::Opaque(format!("root{q}({})", base.key()));
        Form::atom(root, Exponent::from_integer(p))
    };
    if !base.is_polynomial() {
        return as_opaque();
    }
    let Some((monomial, coefficient)) = base.num.single() else {
        return as_opaque();
    };
    let mut powers: Vec<(Atom, Exponent)> = Vec::new();
    let mut sign = Rational::one();
    if coefficient.is_negative() {
        match q {
            2 => powers.push((Atom::I, Exponent::from_integer(p))),
            q if q % 2 == 1 => {
                if p % 2 != 0 {
                    sign = -sign;
                }
            }
            _ => return as_opaque(),
        }
    }
    let Some(primes) = prime_powers(&coefficient.abs(), budget)? else {
        return as_opaque();
    };
    for (prime, k) in primes {
        powers.push((Atom::Prime(prime), exponent(power * k)?));
    }
    for (atom, e) in monomial {
        let positive = matches!(atom, Atom::Prime(_) | Atom::Pi | Atom::E);
        let hides_sign = e.is_integer() && e.to_integer() % 2 == 0 && q % 2 == 0;
        if *atom == Atom::I || !positive && hides_sign {
            return as_opaque();
        }
        powers.push((atom.clone(), exponent(e * power)?));
    }
    let (monomial, moved) = reduce(powers)?;
    let mut num = Poly::default();
    num.terms.insert(monomial, sign * moved);
    Ok(Form { num, den: Poly::constant(Rational::one()) })
}

/// Primes of a positive fraction with signed powers.
fn prime_powers(value: &Rational, budget: &mut Budget) -> Result<Option<Vec<(BigInt, i64)>>, Stop> {
    let (Some(top), Some(bottom)) = (factor(value.numer(), budget)?, factor(value.denom(), budget)?) else {
        return Ok(None);
    };
    let below = bottom.into_iter().map(|(p, k)| (p, -k));
    Ok(Some(top.into_iter().chain(below).collect()))
}

/// `base^(sum)` is a product of powers, one for each term of the exponent.
fn symbolic_power(base: &Form, power: &Form, budget: &mut Budget) -> Result<Form, Stop> {
    let as_opaque = || opaque(format!("pow({}|{})", base.key(), power.key()));
    let single = base.num.single().filter(|_| base.is_polynomial() && power.is_polynomial());
    let Some((monomial, coefficient)) = single else {
        return as_opaque();
    };
    let mut parts: Vec<(String, Exponent)> = Vec::new();
    if coefficient.is_negative() {
        parts.push(("-1".into(), Exponent::one()));
    }
    let Some(primes) = prime_powers(&coefficient.abs(), budget)? else {
        return as_opaque();
    };
    parts.extend(primes.iter().map(|(p, k)| (p.to_string(), Exponent::from_integer(*k))));
    for (atom, e) in monomial {
        if *atom == Atom::I {
            return as_opaque();
        }
        let name = match atom {
            Atom::Prime(p) => p.to_string(),
            Atom::Sym(name) | Atom::Opaque(name) => name.clone(),
            other => format!("{other:?}"),
        };
        parts.push((name, *e));
    }
    // e^(iπ) and its multiples have exact values.
    if let Some(value) = turn_of_unit(base, power, budget)? {
        return Ok(value);
    }
    let mut product = Form::constant(Rational::one());
    for (term, scale) in &power.num.terms {
        budget.charge(20)?;
        let value = if term.is_empty() {
            raise(base, &Form::constant(scale.clone()), budget)?
        } else {
            let unit = Poly { terms: [(term.clone(), Rational::one())].into() };
            let scale = to_exponent(scale)?;
            let mut factors = Vec::new();
            for (name, e) in &parts {
                factors.push((Atom::Opaque(format!("pow({name}|{})", unit.key())), exponent(e * scale)?));
            }
            let (monomial, moved) = reduce(factors)?;
            let mut num = Poly::default();
            num.terms.insert(monomial, moved);
            Form { num, den: Poly::constant(Rational::one()) }
        };
        product = product.times(&value, budget)?;
    }
    Ok(product)
}

/// e^(iπr) for a fraction r with known sine and cosine.
fn turn_of_unit(base: &Form, power: &Form, budget: &mut Budget) -> Result<Option<Form>, Stop> {
    let is_e =
        base.num.single().is_some_and(|(m, c)| c.is_one() && m.as_slice() == [(Atom::E, Exponent::one())]);
    let Some((monomial, r)) = power.num.single().filter(|_| is_e && power.is_polynomial()) else {
        return Ok(None);
    };
    let i_pi = [(Atom::Pi, Exponent::one()), (Atom::I, Exponent::one())];
    if monomial.as_slice() != i_pi.as_slice() {
        return Ok(None);
    }
    let quarter = Rational::new(1.into(), 2.into());
    match (sine_of_pi_times(&(r + quarter)), sine_of_pi_times(r)) {
        (Some(cosine), Some(sine)) => {
            let i = Form::atom(Atom::I, Exponent::one())?;
            cosine?.plus(&sine?.times(&i, budget)?, budget).map(Some)
        }
        _ => Ok(None),
    }
}

/// sin(πr) where it is built from 0, 1, √2 and √3 alone.
fn sine_of_pi_times(r: &Rational) -> Option<Result<Form, Stop>> {
    let two = Rational::from_integer(2.into());
    let mut turn = r - (r / &two).floor() * &two;
    let mut negative = false;
    if turn >= Rational::one() {
        turn -= Rational::one();
        negative = true;
    }
    if turn > Rational::new(1.into(), 2.into()) {
        turn = Rational::one() - turn;
    }
    let parts = (turn.numer().to_i64()?, turn.denom().to_i64()?);
    let (root, halves) = match parts {
        (0, _) => (1, 0),
        (1, 6) => (1, 1),
        (1, 4) => (2, 1),
        (1, 3) => (3, 1),
        (1, 2) => (1, 2),
        _ => return None,
    };
    let scale = Rational::new(BigInt::from(if negative { -halves } else { halves }), 2.into());
    let value = if root == 1 {
        Ok(Form::constant(scale))
    } else {
        Form::atom(Atom::Prime(root.into()), Exponent::new(1, 2)).map(|mut form| {
            for c in form.num.terms.values_mut() {
                *c *= &scale;
            }
            form
        })
    };
    Some(value)
}

/// Degrees in the argument of a trigonometric function become radians.
fn in_radians(argument: &Expr) -> Expr {
    argument.map(&|e| match e {
        Expr::Degrees(inner) => Expr::Mul(vec![
            *inner,
            Expr::Const(Constant::Pi),
            Expr::rational(Ratio::new(1.into(), 180.into())),
        ]),
        other => other,
    })
}

fn call(func: &Func, arguments: &[Expr], budget: &mut Budget) -> Result<Form, Stop> {
    let trigonometric = matches!(func, Func::Sin | Func::Cos | Func::Tan | Func::Cot | Func::Sec | Func::Csc);
    let mut forms = Vec::with_capacity(arguments.len());
    for argument in arguments {
        forms.push(if trigonometric {
            normal(&in_radians(argument), budget)?
        } else {
            normal(argument, budget)?
        });
    }
    let keys = || forms.iter().map(Form::key).collect::<Vec<_>>().join("|");
    let values: Option<Vec<Rational>> = forms.iter().map(Form::as_constant).collect();
    if let (Some(first), true) = (forms.first(), trigonometric)
        && let Some(value) = exact_trigonometry(func, first, budget)
    {
        return value;
    }
    match (func, &forms[..]) {
        (Func::Apply(name), _) => Form::atom(Atom::Sym(format!("{name}({})", keys())), Exponent::one()),
        (Func::Exp, [x]) => raise(&Form::atom(Atom::E, Exponent::one())?, x, budget),
        (Func::Ln, [x]) => logarithm(x, budget),
        (Func::Log, [x, base]) => {
            let below = logarithm(base, budget)?.inverted(budget)?;
            logarithm(x, budget)?.times(&below, budget)
        }
        (Func::Abs, [x]) => match x.as_constant() {
            Some(value) => Ok(Form::constant(value.abs())),
            None => {
                let leading_negative = x.num.terms.values().next().is_some_and(Signed::is_negative);
                let x = if leading_negative { x.negated() } else { x.clone() };
                opaque(format!("Abs({})", x.key()))
            }
        },
        _ => match values.and_then(|values| rational_call(func, &values, budget).transpose()) {
            Some(value) => Ok(Form::constant(value?)),
            None => opaque(format!("{func:?}({})", keys())),
        },
    }
}

/// Functions of fractions with a fraction as value.
fn rational_call(func: &Func, values: &[Rational], budget: &mut Budget) -> Result<Option<Rational>, Stop> {
    let whole = |v: &Rational| {
        let small = v.denom().is_one().then(|| v.numer().to_i64()).flatten();
        small.filter(|n| (0..=MAX_FACTORIAL).contains(n))
    };
    Ok(match (func, values) {
        (Func::Floor, [x]) => Some(x.floor()),
        (Func::Ceil, [x]) => Some(x.ceil()),
        (Func::Sign, [x]) => Some(x.signum()),
        (Func::Re, [x]) => Some(x.clone()),
        (Func::Im, [_]) => Some(Rational::zero()),
        (Func::Min, [_, ..]) => values.iter().min().cloned(),
        (Func::Max, [_, ..]) => values.iter().max().cloned(),
        (Func::Mod, [a, m]) if !m.is_zero() => Some(a - (a / m).floor() * m),
        (Func::Gcd, [_, ..]) => Some(fold_gcd(values)),
        (Func::Lcm, [first, rest @ ..]) => {
            let mut all = first.abs();
            for v in rest {
                let common = fold_gcd(&[all.clone(), v.clone()]);
                if common.is_zero() {
                    return Ok(None);
                }
                all = (all * v / common).abs();
                budget.charge(4 + all.numer().bits() / 32)?;
            }
            Some(all)
        }
        (Func::Factorial, [n]) => match whole(n) {
            Some(n) => Some(Rational::from_integer(product_of_range(1, n, budget)?)),
            None => None,
        },
        (Func::Binomial, [n, k]) => match (whole(n), whole(k)) {
            (Some(n), Some(k)) if k <= n => {
                let k = k.min(n - k);
                let top = product_of_range(n - k + 1, n, budget)?;
                Some(Rational::from_integer(top / product_of_range(1, k, budget)?))
            }
            (Some(_), Some(_)) => Some(Rational::zero()),
            _ => None,
        },
        _ => None,
    })
}

fn fold_gcd(values: &[Rational]) -> Rational {
    let mut values = values.iter();
    let first = values.next().cloned().unwrap_or_else(Rational::zero).abs();
    values.fold(first, |a, b| Rational::new(a.numer().gcd(b.numer()), a.denom().lcm(b.denom())))
}

fn product_of_range(from: i64, to: i64, budget: &mut Budget) -> Result<BigInt, Stop> {
    let mut product = BigInt::one();
    for n in from..=to {
        budget.charge(1 + product.bits() / 512)?;
        product *= n;
        if product.bits() > MAX_BITS {
            return Err(Stop);
        }
    }
    Ok(product)
}

/// ln of a product is a sum over its primes and atoms.
fn logarithm(x: &Form, budget: &mut Budget) -> Result<Form, Stop> {
    let as_opaque = || opaque(format!("ln({})", x.key()));
    let Some((monomial, coefficient)) = x.num.single().filter(|_| x.is_polynomial()) else {
        return as_opaque();
    };
    let safe = |(atom, e): &(Atom, Exponent)| match atom {
        Atom::Prime(_) | Atom::Pi | Atom::E => true,
        Atom::Sym(_) | Atom::Opaque(_) => e.is_one(),
        Atom::I | Atom::Infinity => false,
    };
    if !coefficient.is_positive() || !monomial.iter().all(safe) {
        return as_opaque();
    }
    let Some(primes) = prime_powers(coefficient, budget)? else {
        return as_opaque();
    };
    let mut sum = Form::constant(Rational::zero());
    let mut add = |name: String, scale: Exponent, budget: &mut Budget| -> Result<(), Stop> {
        let scale = Ratio::new(BigInt::from(*scale.numer()), BigInt::from(*scale.denom()));
        let term = if name == "E" {
            Form::constant(scale)
        } else {
            opaque(format!("ln({name})"))?.times(&Form::constant(scale), budget)?
        };
        sum = sum.plus(&term, budget)?;
        Ok(())
    };
    for (p, k) in primes {
        add(p.to_string(), Exponent::from_integer(k), budget)?;
    }
    for (atom, e) in monomial {
        let name = match atom {
            Atom::Prime(p) => p.to_string(),
            Atom::Sym(name) | Atom::Opaque(name) => name.clone(),
            other => format!("{other:?}"),
        };
        add(name, *e, budget)?;
    }
    Ok(sum)
}

/// Trigonometric functions of multiples of 30° and 45°.
fn exact_trigonometry(func: &Func, x: &Form, budget: &mut Budget) -> Option<Result<Form, Stop>> {
    let turns = if x.num.is_zero() {
        Rational::zero()
    } else {
        let (monomial, r) = x.num.single().filter(|_| x.is_polynomial())?;
        (monomial.as_slice() == [(Atom::Pi, Exponent::one())]).then(|| r.clone())?
    };
    let half = Rational::new(1.into(), 2.into());
    let sine = sine_of_pi_times(&turns)?;
    let cosine = sine_of_pi_times(&(&turns + half))?;
    let quotient = |a: Result<Form, Stop>, b: Result<Form, Stop>, budget: &mut Budget| {
        let below = b?.inverted(budget)?;
        a?.times(&below, budget)
    };
    let one = Ok(Form::constant(Rational::one()));
    Some(match func {
        Func::Sin => sine,
        Func::Cos => cosine,
        Func::Tan => quotient(sine, cosine, budget),
        Func::Cot => quotient(cosine, sine, budget),
        Func::Sec => quotient(one, cosine, budget),
        Func::Csc => quotient(one, sine, budget),
        _ => return None,
    })
}

/// A Σ or Π with whole bounds is written out; every other one is an atom named after its parts.
fn unrolled(big: &Big, budget: &mut Budget) -> Result<Form, Stop> {
    let part = |e: &Option<Expr>, budget: &mut Budget| match e {
        Some(e) => normal(e, budget).map(Some),
        None => Ok(None),
    };
    let lower = part(&big.lower, budget)?;
    let upper = part(&big.upper, budget)?;
    let whole = |form: &Option<Form>| {
        let value = form.as_ref()?.as_constant()?;
        value.denom().is_one().then(|| value.numer().to_i64()).flatten()
    };
    if let (BigKind::Sum | BigKind::Product, Some(var), Some(from), Some(to)) =
        (big.kind, &big.var, whole(&lower), whole(&upper))
        && (0..MAX_UNROLL).contains(&to.saturating_sub(from))
    {
        let is_sum = big.kind == BigKind::Sum;
        let mut total = Form::constant(if is_sum { Rational::zero() } else { Rational::one() });
        for n in from..=to {
            budget.charge(20)?;
            let body = big.body.map(&|e| match e {
                Expr::Sym(name) if name == *var => Expr::int(n),
                other => other,
            });
            let term = normal(&body, budget)?;
            total = if is_sum { total.plus(&term, budget)? } else { total.times(&term, budget)? };
        }
        return Ok(total);
    }
    let key = |form: &Option<Form>| form.as_ref().map(Form::key).unwrap_or_default();
    let body = normal(&big.body, budget)?.key();
    let name = format!("{:?}({:?}|{}|{}|{body})", big.kind, big.var, key(&lower), key(&upper));
    let computable = matches!(big.kind, BigKind::Sum | BigKind::Product) && big.var.is_some();
    if computable {
        return opaque(name);
    }
    Form::atom(Atom::Sym(name), Exponent::one())
}
