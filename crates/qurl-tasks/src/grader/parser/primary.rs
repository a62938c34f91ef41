//! Powers and everything that stands by itself: numbers, names, brackets, sets, fractions, roots.

use num_bigint::BigInt;
use num_traits::{One, ToPrimitive, Zero};

use super::{Parser, bracket};
use crate::grader::budget::Stop;
use crate::grader::expr::{Expr, Func, Number, Rational};
use crate::grader::lexer::{NumTok, Tok};
use crate::grader::words;

/// Most postfix operators on one primary.
const MAX_POSTFIX: usize = 8;

impl Parser {
    /// Whether the next token can continue a product without an operator.
    pub(super) fn starts_factor(&self) -> bool {
        match self.peek() {
            Some(Tok::Num(_)) => {
                let previous = self.at.checked_sub(1).map(|i| &self.tokens[i].tok);
                !matches!(previous, Some(Tok::Num(_)))
            }
            Some(
                Tok::Sym(_)
                | Tok::Func(_)
                | Tok::Const(_)
                | Tok::Big(_)
                | Tok::Accent(_)
                | Tok::Begin(_)
                | Tok::LBracket
                | Tok::LBrace
                | Tok::LFloor
                | Tok::LCeil
                | Tok::Frac
                | Tok::Binom
                | Tok::Sqrt,
            ) => true,
            Some(Tok::LParen) => self.peek_at(1) != Some(&Tok::Mod),
            Some(Tok::Bar) => self.bars == 0 && !self.bar_separates,
            _ => false,
        }
    }

    /// A primary with its postfix operators and exponents.
    pub(super) fn power(&mut self) -> Result<Expr, Stop> {
        self.deeper(|p| {
            let base = p.primary()?;
            p.postfix(base)
        })
    }

    /// Postfix operators and exponents of a value.
    pub(super) fn postfix(&mut self, value: Expr) -> Result<Expr, Stop> {
        self.deeper(|p| {
            let mut base = value;
            for _ in 0..MAX_POSTFIX {
                base = match p.peek() {
                    Some(Tok::Bang) => {
                        p.at += 1;
                        Expr::Call(Func::Factorial, vec![base])
                    }
                    Some(Tok::Percent) => {
                        p.at += 1;
                        Expr::Percent(Box::new(base))
                    }
                    Some(Tok::Word(w)) if matches!(w.as_str(), "percent" | "pct" | "percents") => {
                        p.at += 1;
                        Expr::Percent(Box::new(base))
                    }
                    Some(Tok::Degree) => p.degrees(base),
                    Some(Tok::Prime) => {
                        p.at += 1;
                        primed(base, 1)
                    }
                    Some(Tok::Caret) => {
                        p.at += 1;
                        p.raised(base)?
                    }
                    _ => return Ok(base),
                };
            }
            Err(Stop)
        })
    }

    /// What `^` makes of a base: a power, degrees, primes.
    fn raised(&mut self, base: Expr) -> Result<Expr, Stop> {
        let braced = self.peek() == Some(&Tok::LBrace);
        let inner = if braced { self.peek_at(1) } else { self.peek() };
        match inner {
            Some(Tok::Degree) => {
                self.at += usize::from(braced);
                let value = self.degrees(base);
                if braced {
                    self.expect(&Tok::RBrace)?;
                    self.take_temperature_scale();
                }
                Ok(value)
            }
            Some(Tok::Prime) => {
                self.at += usize::from(braced);
                let mut count = 0;
                while self.take(&Tok::Prime) {
                    count += 1;
                }
                if braced {
                    self.expect(&Tok::RBrace)?;
                }
                Ok(primed(base, count))
            }
            _ => {
                let exponent = self.deeper(|p| match p.peek() {
                    Some(Tok::LBrace) => p.argument(),
                    _ => p.signed_power(),
                })?;
                let exponent = match exponent {
                    Expr::Set(mut items) if items.len() == 1 => items.swap_remove(0),
                    other => other,
                };
                Ok(Expr::Pow(Box::new(base), Box::new(exponent)))
            }
        }
    }

    /// `°`, `°C` and `°F`; the next token is the degree sign.
    fn degrees(&mut self, base: Expr) -> Expr {
        self.at += 1;
        self.take_temperature_scale();
        Expr::Degrees(Box::new(base))
    }

    fn take_temperature_scale(&mut self) {
        if matches!(self.peek(), Some(Tok::Sym(s) | Tok::Word(s)) if matches!(s.as_str(), "C" | "F")) {
            self.at += 1;
        }
    }

    /// A braced group, or one primary.
    pub(super) fn argument(&mut self) -> Result<Expr, Stop> {
        if self.take(&Tok::LBrace) {
            let inner = self.bracketed(false, Self::list)?;
            self.expect(&Tok::RBrace)?;
            return Ok(inner);
        }
        self.deeper(Self::primary)
    }

    /// An argument of `\frac`: of an unbraced number only the first digit.
    fn fraction_argument(&mut self) -> Result<Expr, Stop> {
        if let Some(Tok::Num(NumTok { digits, .. })) = self.peek()
            && digits.len() > 1
        {
            let (first, rest) = digits.split_at(1);
            let (first, rest) = (integer_token(first)?, integer_token(rest)?);
            self.tokens[self.at].tok = Tok::Num(rest);
            return Ok(Expr::rational(first.value));
        }
        self.argument()
    }

    pub(super) fn primary(&mut self) -> Result<Expr, Stop> {
        let tok = self.peek().cloned().ok_or(Stop)?;
        self.at += 1;
        match tok {
            Tok::Num(n) => self.number(n),
            Tok::Sym(name) => self.symbol(name),
            Tok::Word(w) if w.chars().count() == 1 => Ok(Expr::Sym(w)),
            Tok::Const(c) => Ok(Expr::Const(c)),
            Tok::Dots => Ok(Expr::Sym("...".into())),
            Tok::Func(f) => self.call(f),
            Tok::Big(kind) => self.big(kind),
            Tok::Accent(name) => {
                let inner = self.argument()?;
                let mut name = name;
                if self.take(&Tok::Under) {
                    name.push('_');
                    name += &self.subscript()?;
                }
                Ok(Expr::Call(Func::Apply(name), vec![inner]))
            }
            Tok::Begin(env) => self.matrix(&env),
            Tok::NamedSet('R') => Ok(Expr::Reals),
            Tok::NamedSet(c) => Ok(Expr::NamedSet(c)),
            Tok::Empty => Ok(Expr::Empty),
            Tok::Frac => {
                let top = self.fraction_argument()?;
                let bottom = self.fraction_argument()?;
                Ok(top.over(bottom))
            }
            Tok::Binom => {
                let n = self.fraction_argument()?;
                let k = self.fraction_argument()?;
                Ok(Expr::Call(Func::Binomial, vec![n, k]))
            }
            Tok::Sqrt => self.root(),
            Tok::LBrace => {
                let inner = self.bracketed(false, Self::list)?;
                self.expect(&Tok::RBrace)?;
                Ok(inner)
            }
            Tok::LParen | Tok::LBracket | Tok::LAngle => self.brackets(&tok),
            Tok::LSet => self.set(),
            Tok::Bar => self.absolute(),
            Tok::LFloor => self.enclosed(&Tok::RFloor, Func::Floor),
            Tok::LCeil => self.enclosed(&Tok::RCeil, Func::Ceil),
            _ => Err(Stop),
        }
    }

    /// A number, possibly in another base: `204_5`.
    fn number(&mut self, n: NumTok) -> Result<Expr, Stop> {
        if self.peek() == Some(&Tok::Under) && !n.digits.is_empty() {
            self.at += 1;
            let base = match self.argument()? {
                Expr::Text(word) => Expr::int(words::number_word(&word).ok_or(Stop)?),
                other => other,
            };
            let base = base.as_number().filter(|b| b.denom().is_one()).and_then(|b| b.numer().to_u32());
            let value = base.and_then(|base| in_base(&n.digits, base)).ok_or(Stop)?;
            return Ok(Expr::rational(value));
        }
        Ok(Expr::Num(Number { value: n.value, decimal: n.decimal }))
    }

    /// A name with subscript and primes, or a function of the problem such as f(x).
    fn symbol(&mut self, mut name: String) -> Result<Expr, Stop> {
        loop {
            if self.take(&Tok::Under) {
                name.push('_');
                name += &self.subscript()?;
            } else if self.take(&Tok::Prime) {
                name.push('\'');
            } else {
                break;
            }
        }
        if self.peek() == Some(&Tok::LParen) {
            let head = name.trim_end_matches('\'');
            let always = matches!(head, "f" | "g" | "h" | "F" | "G" | "P");
            let single = matches!(self.peek_at(1), Some(Tok::Num(_) | Tok::Sym(_)))
                && self.peek_at(2) == Some(&Tok::RParen);
            if always || single {
                self.at += 1;
                let inner = self.bracketed(false, Self::list)?;
                self.expect(&Tok::RParen)?;
                let arguments = match inner {
                    Expr::List(_, items) => items,
                    one => vec![one],
                };
                return Ok(Expr::Call(Func::Apply(name), arguments));
            }
        }
        Ok(Expr::Sym(name))
    }

    /// The text of a subscript, without braces and spaces.
    fn subscript(&mut self) -> Result<String, Stop> {
        let mut depth = 0usize;
        let mut text = String::new();
        loop {
            let tok = self.peek().ok_or(Stop)?;
            match tok {
                Tok::LBrace => depth += 1,
                Tok::RBrace => depth = depth.checked_sub(1).ok_or(Stop)?,
                Tok::Num(n) => text += &n.digits,
                Tok::Sym(s) | Tok::Word(s) => text += s,
                Tok::Const(c) => text += &format!("{c:?}"),
                Tok::Func(f) => text += &format!("{f:?}"),
                Tok::Comma => text.push(','),
                Tok::Plus => text.push('+'),
                Tok::Minus => text.push('-'),
                Tok::Under | Tok::Caret if depth > 0 => text.push('_'),
                Tok::Times => text.push('*'),
                Tok::Degree => text.push('o'),
                _ => return Err(Stop),
            }
            self.at += 1;
            if depth == 0 {
                return Ok(text);
            }
        }
    }

    pub(super) fn brackets(&mut self, open: &Tok) -> Result<Expr, Stop> {
        let opening = bracket(open).ok_or(Stop)?;
        let inner = self.bracketed(false, Self::list)?;
        let closing = self.peek().and_then(bracket).ok_or(Stop)?;
        self.at += 1;
        Ok(match inner {
            Expr::List(_, items) => Expr::Seq(opening, closing, items),
            one if opening == closing => one,
            _ => return Err(Stop),
        })
    }

    fn set(&mut self) -> Result<Expr, Stop> {
        if self.take(&Tok::RSet) {
            return Ok(Expr::Empty);
        }
        let inner = self.bracketed(true, Self::list)?;
        if matches!(self.peek(), Some(Tok::Bar | Tok::Mid | Tok::Colon)) {
            self.at += 1;
            let condition = self.bracketed(false, Self::list)?;
            self.expect(&Tok::RSet)?;
            return Ok(Expr::Builder(Box::new(condition)));
        }
        self.expect(&Tok::RSet)?;
        Ok(match inner {
            Expr::List(_, items) => Expr::Set(items),
            one => Expr::Set(vec![one]),
        })
    }

    fn absolute(&mut self) -> Result<Expr, Stop> {
        let saved = (self.bars, self.bar_separates);
        (self.bars, self.bar_separates) = (1, false);
        let inner = self.deeper(Self::sum);
        (self.bars, self.bar_separates) = saved;
        self.expect(&Tok::Bar)?;
        Ok(Expr::Call(Func::Abs, vec![inner?]))
    }

    fn enclosed(&mut self, close: &Tok, func: Func) -> Result<Expr, Stop> {
        let inner = self.bracketed(false, Self::sum)?;
        self.expect(close)?;
        Ok(Expr::Call(func, vec![inner]))
    }

    fn root(&mut self) -> Result<Expr, Stop> {
        let degree = if self.take(&Tok::LBracket) {
            let degree = self.bracketed(false, Self::sum)?;
            self.expect(&Tok::RBracket)?;
            degree
        } else {
            Expr::int(2)
        };
        let inner = self.argument()?;
        Ok(Expr::Pow(Box::new(inner), Box::new(Expr::int(1).over(degree))))
    }
}

/// A primed name, function value or number (arc minutes, feet).
fn primed(base: Expr, count: usize) -> Expr {
    match base {
        Expr::Sym(name) => Expr::Sym(name + &"'".repeat(count)),
        Expr::Num(_) => Expr::Quantity(Box::new(base), "'".repeat(count)),
        other => Expr::Call(Func::Apply("'".repeat(count)), vec![other]),
    }
}

fn integer_token(digits: &str) -> Result<NumTok, Stop> {
    let value: BigInt = digits.parse().map_err(|_| Stop)?;
    Ok(NumTok { value: Rational::from_integer(value), decimal: false, digits: digits.into() })
}

/// The value of digits in a base from 2 to 36.
fn in_base(digits: &str, base: u32) -> Option<Rational> {
    if !(2..=36).contains(&base) {
        return None;
    }
    let mut value = BigInt::zero();
    for c in digits.chars() {
        value = value * base + c.to_digit(base)?;
    }
    Some(Rational::from_integer(value))
}
