//! What takes arguments: functions, sums and limits, matrices; and the units after a value.

use num_traits::One;

use super::{Parser, Sign};
use crate::grader::budget::Stop;
use crate::grader::expr::{Big, BigKind, Expr, Func, Rational, RelOp, Relation};
use crate::grader::lexer::Tok;
use crate::grader::words;

impl Parser {
    /// A function name was read: exponent, base, arguments.
    pub(super) fn call(&mut self, func: Func) -> Result<Expr, Stop> {
        let mut func = func;
        let mut exponent = None;
        let mut base = None;
        for _ in 0..2 {
            if self.take(&Tok::Caret) {
                let power = match self.sign() {
                    Some(Sign::Minus) => self.argument()?.negated(),
                    _ => self.argument()?,
                };
                match words::inverse(&func) {
                    Some(inverse) if power.as_number() == Some(&-Rational::one()) => func = inverse,
                    _ => exponent = Some(power),
                }
            } else if self.take(&Tok::Under) {
                base = Some(self.argument()?);
            }
        }
        let mut arguments = self.call_arguments()?;
        if func == Func::Log {
            arguments.truncate(1);
            arguments.push(base.unwrap_or_else(|| Expr::int(10)));
        }
        let value = Expr::Call(func, arguments);
        Ok(match exponent {
            Some(power) => Expr::Pow(Box::new(value), Box::new(power)),
            None => value,
        })
    }

    fn call_arguments(&mut self) -> Result<Vec<Expr>, Stop> {
        let open = self.peek().cloned().ok_or(Stop)?;
        if matches!(open, Tok::LParen | Tok::LBracket | Tok::LBrace) {
            let inner = if open == Tok::LBrace {
                self.argument()?
            } else {
                self.at += 1;
                self.brackets(&open)?
            };
            return Ok(match inner {
                Expr::Seq(_, _, items) | Expr::List(_, items) => items,
                one => vec![one],
            });
        }
        // `\sin 2x \cos x`: factors up to the next function, bracket or operator.
        let mut factors = vec![match self.sign() {
            Some(Sign::Minus) => self.power()?.negated(),
            _ => self.power()?,
        }];
        while self.starts_factor()
            && !matches!(self.peek(), Some(Tok::Func(_) | Tok::LParen | Tok::LBracket | Tok::Bar))
        {
            factors.push(self.power()?);
        }
        Ok(vec![match factors.len() {
            1 => factors.swap_remove(0),
            _ => Expr::Mul(factors),
        }])
    }

    /// Σ, Π, ∫ and lim with their bounds in any order.
    pub(super) fn big(&mut self, kind: BigKind) -> Result<Expr, Stop> {
        let (mut var, mut lower, mut upper) = (None, None, None);
        for _ in 0..2 {
            if self.take(&Tok::Under) {
                let bound = if kind == BigKind::Limit { self.limit_bound()? } else { self.argument()? };
                match bound {
                    Expr::Relation(Relation { mut sides, ops, .. })
                        if ops == [RelOp::Eq] && matches!(sides[0], Expr::Sym(_) | Expr::Const(_)) =>
                    {
                        lower = sides.pop();
                        var = sides.pop().map(|side| match side {
                            Expr::Sym(name) => name,
                            other => format!("{other:?}"),
                        });
                    }
                    other => lower = Some(other),
                }
            } else if self.take(&Tok::Caret) {
                upper = Some(match self.peek() {
                    // A bare number here is not one in another base: `\sum^3_{k=1}`.
                    Some(Tok::Num(n)) => {
                        let value = n.value.clone();
                        self.at += 1;
                        Expr::rational(value)
                    }
                    _ => self.argument()?,
                });
            }
        }
        let body = self.deeper(Self::product)?;
        Ok(Expr::Big(Box::new(Big { kind, var, lower, upper, body })))
    }

    /// `{x \to 0}`
    fn limit_bound(&mut self) -> Result<Expr, Stop> {
        self.expect(&Tok::LBrace)?;
        let var = self.bracketed(false, Self::product)?;
        self.expect(&Tok::To)?;
        let target = self.bracketed(false, Self::sum)?;
        self.expect(&Tok::RBrace)?;
        Ok(Expr::Relation(Relation { sides: vec![var, target], ops: vec![RelOp::Eq], modulus: None }))
    }

    /// The rows of a matrix; its `\begin` was read.
    pub(super) fn matrix(&mut self, env: &str) -> Result<Expr, Stop> {
        if matches!(env, "array" | "tabular") && self.peek() == Some(&Tok::LBrace) {
            while !matches!(self.peek(), Some(Tok::RBrace) | None) {
                self.at += 1;
            }
            self.at += 1;
        }
        let mut rows = vec![Vec::new()];
        loop {
            match self.peek().ok_or(Stop)? {
                Tok::Amp => self.at += 1,
                Tok::NewRow => {
                    self.at += 1;
                    rows.push(Vec::new());
                }
                Tok::End(_) => {
                    self.at += 1;
                    break;
                }
                _ => {
                    let cell = self.bracketed(false, Self::relation)?;
                    rows.last_mut().ok_or(Stop)?.push(cell);
                    let ends_cell =
                        |tok: Option<&Tok>| matches!(tok, Some(Tok::NewRow | Tok::End(_) | Tok::Amp));
                    self.take(&Tok::Comma);
                    if !ends_cell(self.peek()) {
                        return Err(Stop);
                    }
                }
            }
        }
        rows.retain(|row| !row.is_empty());
        if rows.is_empty() {
            return Err(Stop);
        }
        Ok(Expr::Matrix(rows))
    }

    /// Words after a value are its unit: `5 \text{ cm}^2`, `3 m/s`, `10 square units`.
    pub(super) fn unit(&mut self, value: Expr) -> Result<Expr, Stop> {
        let mut unit = String::new();
        if !value.any(&|e| matches!(e, Expr::Num(_))) {
            return Ok(value);
        }
        loop {
            match self.peek() {
                Some(Tok::Word(w)) if w.eq_ignore_ascii_case("and") || w.eq_ignore_ascii_case("or") => break,
                Some(Tok::Word(w)) => {
                    if !unit.is_empty() && !unit.ends_with('/') {
                        unit.push(' ');
                    }
                    unit += &w.to_lowercase();
                    self.at += 1;
                }
                Some(Tok::Sym(s)) if unit.ends_with('/') && s.len() == 1 => {
                    unit += s;
                    self.at += 1;
                }
                Some(Tok::Slash) if !unit.is_empty() => {
                    unit.push('/');
                    self.at += 1;
                }
                Some(Tok::Caret) if !unit.is_empty() => {
                    self.at += 1;
                    let power = match self.peek() {
                        Some(Tok::LBrace) => self.argument()?,
                        _ => self.signed_power()?,
                    };
                    let power = power.as_number().ok_or(Stop)?;
                    unit += &format!("^{power}");
                }
                _ => break,
            }
        }
        Ok(if unit.is_empty() { value } else { Expr::Quantity(Box::new(value), unit) })
    }
}
