//! From tokens to a tree: recursive descent with a depth limit.
//!
//! Levels, loosest first: list (`a, b and c`), relation (`a < b`), set algebra, ratio (`a : b`), sum,
//! product, power, primary. `primary.rs` holds the last one. What is not mathematics and not plain words is
//! an error; the caller then falls back to comparing text.

use num_traits::{One, Signed};

use super::budget::{MAX_DEPTH, MAX_ITEMS, Stop};
use super::expr::{Bracket, Expr, Func, Join, RelOp, Relation, SetOp};
use super::lexer::{NumTok, Reading, Tok, Token, lex};
use super::matrix;

mod calls;
mod primary;

/// Parses a whole answer.
pub fn parse(text: &str, reading: Reading) -> Result<Expr, Stop> {
    let mut tokens = lex(text, reading)?;
    drop_condition(&mut tokens);
    while matches!(
        tokens.last().map(|t| &t.tok),
        Some(Tok::Comma | Tok::Semicolon | Tok::Colon | Tok::Dots | Tok::NewRow)
    ) {
        tokens.pop();
    }
    let mut parser = Parser { tokens, at: 0, depth: 0, bars: 0, bar_separates: false };
    // `= 5` and `\approx 5` continue something that is not part of the answer.
    if matches!(parser.peek(), Some(Tok::Rel(RelOp::Eq | RelOp::Approx))) {
        parser.at += 1;
    }
    let answer = parser.list()?;
    if parser.at < parser.tokens.len() {
        return Err(Stop);
    }
    Ok(answer)
}

/// Cuts off `..., where n is an integer` and `... for all x`.
fn drop_condition(tokens: &mut Vec<Token>) {
    if matches!(tokens.first().map(|t| &t.tok), Some(Tok::Word(w)) if w.len() > 1) {
        return;
    }
    let mut depth = 0i32;
    for (i, token) in tokens.iter().enumerate() {
        match &token.tok {
            Tok::LParen | Tok::LBracket | Tok::LSet | Tok::LBrace => depth += 1,
            Tok::RParen | Tok::RBracket | Tok::RSet | Tok::RBrace => depth -= 1,
            Tok::Word(w)
                if i > 0 && depth == 0 && matches!(w.as_str(), "where" | "for" | "when" | "with") =>
            {
                tokens.truncate(i);
                return;
            }
            _ => {}
        }
    }
}

struct Parser {
    tokens: Vec<Token>,
    at: usize,
    depth: usize,
    /// Open absolute value bars.
    bars: usize,
    /// Directly inside `\{ ... \}`: a bar after an expression means "such that".
    bar_separates: bool,
}

impl Parser {
    fn peek(&self) -> Option<&Tok> {
        self.tokens.get(self.at).map(|t| &t.tok)
    }

    fn peek_at(&self, ahead: usize) -> Option<&Tok> {
        self.tokens.get(self.at + ahead).map(|t| &t.tok)
    }

    fn take(&mut self, tok: &Tok) -> bool {
        let found = self.peek() == Some(tok);
        if found {
            self.at += 1;
        }
        found
    }

    fn expect(&mut self, tok: &Tok) -> Result<(), Stop> {
        if self.take(tok) { Ok(()) } else { Err(Stop) }
    }

    fn deeper<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T, Stop>) -> Result<T, Stop> {
        if self.depth >= MAX_DEPTH {
            return Err(Stop);
        }
        self.depth += 1;
        let result = parse(self);
        self.depth -= 1;
        result
    }

    /// Inside brackets the state of bars starts anew.
    fn bracketed<T>(
        &mut self,
        separates: bool,
        parse: impl FnOnce(&mut Self) -> Result<T, Stop>,
    ) -> Result<T, Stop> {
        let saved = (self.bars, self.bar_separates);
        (self.bars, self.bar_separates) = (0, separates);
        let result = self.deeper(parse);
        (self.bars, self.bar_separates) = saved;
        result
    }

    fn connective(&self) -> Option<Join> {
        match self.peek()? {
            Tok::Comma | Tok::Semicolon => Some(Join::Comma),
            Tok::Word(w) if w.eq_ignore_ascii_case("and") => Some(Join::And),
            Tok::Word(w) if w.eq_ignore_ascii_case("or") => Some(Join::Or),
            Tok::NewRow => Some(Join::Comma),
            _ => None,
        }
    }

    fn list(&mut self) -> Result<Expr, Stop> {
        self.deeper(|p| {
            while p.take(&Tok::NewRow) {}
            let mut join = Join::Comma;
            let mut items = vec![p.item()?];
            while let Some(next) = p.connective() {
                if next != Join::Comma {
                    join = next;
                }
                p.at += 1;
                // `a, and b`, `a,, b` and a trailing comma are one separator.
                while let Some(more) = p.connective() {
                    if more != Join::Comma {
                        join = more;
                    }
                    p.at += 1;
                }
                if p.at_list_end() {
                    break;
                }
                if items.len() >= MAX_ITEMS {
                    return Err(Stop);
                }
                items.push(p.item()?);
            }
            Ok(match items.len() {
                1 => items.swap_remove(0),
                _ => Expr::List(join, items),
            })
        })
    }

    fn at_list_end(&self) -> bool {
        matches!(
            self.peek(),
            None | Some(
                Tok::RParen
                    | Tok::RBracket
                    | Tok::RSet
                    | Tok::RBrace
                    | Tok::RAngle
                    | Tok::Amp
                    | Tok::End(_)
                    | Tok::Mid
            )
        )
    }

    /// One item of a list: words, or a relation with an optional unit.
    fn item(&mut self) -> Result<Expr, Stop> {
        if let Some(words) = self.plain_words() {
            if self.peek() != Some(&Tok::Rel(RelOp::Eq)) {
                return Ok(words);
            }
            // `\text{Area} = 12`
            self.at += 1;
            let value = self.deeper(Self::relation)?;
            return Ok(Expr::Relation(Relation {
                sides: vec![words, value],
                ops: vec![RelOp::Eq],
                modulus: None,
            }));
        }
        self.take(&Tok::Amp);
        self.relation()
    }

    /// Words up to the end of the item, when there is nothing else in it.
    fn plain_words(&mut self) -> Option<Expr> {
        let mut end = self.at;
        let mut long_word = false;
        let mut text = String::new();
        while let Some(tok) = self.tokens.get(end).map(|t| &t.tok) {
            let piece = match tok {
                Tok::Word(w) if w.eq_ignore_ascii_case("and") || w.eq_ignore_ascii_case("or") => break,
                Tok::Word(w) => w.clone(),
                Tok::Sym(s) if s.len() == 1 => s.clone(),
                Tok::Minus if end > self.at => "-".into(),
                Tok::Comma
                | Tok::Semicolon
                | Tok::RParen
                | Tok::RBracket
                | Tok::RSet
                | Tok::RBrace
                | Tok::RAngle
                | Tok::Amp
                | Tok::NewRow
                | Tok::End(_)
                | Tok::Rel(RelOp::Eq) => break,
                _ => return None,
            };
            long_word |= matches!(tok, Tok::Word(w) if w.len() > 1);
            if !text.is_empty() {
                text.push(' ');
            }
            text.push_str(&piece);
            end += 1;
        }
        if !long_word {
            return None;
        }
        self.at = end;
        Some(Expr::Text(text.to_lowercase()))
    }

    fn relation_op(&self) -> Option<RelOp> {
        match self.peek()? {
            Tok::Rel(op) => Some(*op),
            Tok::Mid if !self.bar_separates => Some(RelOp::Divides),
            _ => None,
        }
    }

    fn relation(&mut self) -> Result<Expr, Stop> {
        let mut sides = vec![self.set_algebra()?];
        let mut ops = Vec::new();
        let mut modulus = self.modulus()?;
        while let Some(op) = self.relation_op() {
            self.at += 1;
            if op == RelOp::Approx && self.at >= self.tokens.len() {
                break;
            }
            ops.push(op);
            sides.push(self.set_algebra()?);
            if modulus.is_none() {
                modulus = self.modulus()?;
            }
        }
        cut_approximation(&mut sides, &mut ops);
        Ok(if ops.is_empty() && modulus.is_none() {
            sides.swap_remove(0)
        } else {
            Expr::Relation(Relation { sides, ops, modulus })
        })
    }

    /// `\pmod{7}` or `(mod 7)`.
    fn modulus(&mut self) -> Result<Option<Box<Expr>>, Stop> {
        if self.take(&Tok::PMod) {
            let m = self.argument()?;
            return Ok(Some(Box::new(m)));
        }
        if self.peek() == Some(&Tok::LParen) && self.peek_at(1) == Some(&Tok::Mod) {
            self.at += 2;
            let m = self.bracketed(false, Self::sum)?;
            self.expect(&Tok::RParen)?;
            return Ok(Some(Box::new(m)));
        }
        Ok(None)
    }

    fn set_algebra(&mut self) -> Result<Expr, Stop> {
        let mut parts = vec![(SetOp::Union, self.ratio()?)];
        loop {
            let op = match self.peek() {
                Some(Tok::Union) => SetOp::Union,
                Some(Tok::Intersection) => SetOp::Intersection,
                Some(Tok::SetMinus) => SetOp::Difference,
                _ => break,
            };
            self.at += 1;
            parts.push((op, self.ratio()?));
        }
        Ok(match parts.len() {
            1 => parts.swap_remove(0).1,
            _ => Expr::SetAlgebra(parts),
        })
    }

    fn ratio(&mut self) -> Result<Expr, Stop> {
        let mut parts = vec![self.sum()?];
        while self.peek() == Some(&Tok::Colon) && !self.bar_separates {
            self.at += 1;
            parts.push(self.sum()?);
        }
        Ok(match parts.len() {
            1 => parts.swap_remove(0),
            _ => Expr::Ratio(parts),
        })
    }

    fn sum(&mut self) -> Result<Expr, Stop> {
        self.deeper(|p| {
            let mut terms = Vec::new();
            let mut sign = p.sign();
            loop {
                let term = p.product()?;
                terms.push(match sign {
                    None | Some(Sign::Plus) => term,
                    Some(Sign::Minus) => term.negated(),
                    Some(Sign::Unknown(flipped)) => Expr::Mul(vec![Expr::PlusMinus(flipped), term]),
                });
                sign = p.sign();
                if sign.is_none() {
                    break;
                }
            }
            let mut value = match terms.len() {
                1 => terms.swap_remove(0),
                _ => matrix::add(terms)?,
            };
            if p.take(&Tok::Mod) {
                value = Expr::Call(Func::Mod, vec![value, p.sum()?]);
            }
            p.unit(value)
        })
    }

    /// Any run of signs, folded into one.
    fn sign(&mut self) -> Option<Sign> {
        let mut sign = None;
        loop {
            let next = match self.peek() {
                Some(Tok::Plus) => Sign::Plus,
                Some(Tok::Minus) => Sign::Minus,
                Some(Tok::PlusMinus(flipped)) => Sign::Unknown(*flipped),
                _ => return sign,
            };
            self.at += 1;
            sign = Some(match (sign, next) {
                (None | Some(Sign::Plus), next) => next,
                (Some(Sign::Minus), Sign::Plus) => Sign::Minus,
                (Some(Sign::Minus), Sign::Minus) => Sign::Plus,
                (Some(Sign::Minus), Sign::Unknown(f)) => Sign::Unknown(!f),
                (Some(Sign::Unknown(f)), Sign::Minus) => Sign::Unknown(!f),
                (Some(Sign::Unknown(f)), _) => Sign::Unknown(f),
            });
        }
    }

    fn product(&mut self) -> Result<Expr, Stop> {
        let mut factors = vec![self.mixed_or_power()?];
        loop {
            if self.take(&Tok::Times) {
                let factor = self.signed_power()?;
                factors.push(factor);
            } else if self.take(&Tok::Slash) {
                let divisor = self.signed_power()?;
                if factors.len() == 1 {
                    factors = vec![factors.swap_remove(0).over(divisor)];
                } else {
                    factors.push(divisor.inverted());
                }
            } else if self.starts_factor() {
                let factor = self.mixed_or_power()?;
                factors.push(factor);
            } else {
                break;
            }
        }
        match factors.len() {
            1 => Ok(factors.swap_remove(0)),
            _ => matrix::multiply(factors),
        }
    }

    /// A factor after an explicit operator may carry a sign: `2 \cdot -3`.
    fn signed_power(&mut self) -> Result<Expr, Stop> {
        match self.sign() {
            None | Some(Sign::Plus) => self.mixed_or_power(),
            Some(Sign::Minus) => Ok(self.mixed_or_power()?.negated()),
            Some(Sign::Unknown(flipped)) => {
                let factor = self.mixed_or_power()?;
                Ok(Expr::Mul(vec![Expr::PlusMinus(flipped), factor]))
            }
        }
    }

    /// `3\frac{1}{2}` and `3 1/2` are sums; everything else is a power.
    fn mixed_or_power(&mut self) -> Result<Expr, Stop> {
        let Some(whole) = self.small_integer(0) else {
            return self.power();
        };
        if self.peek_at(1) == Some(&Tok::Frac) {
            let start = self.at;
            self.at += 1;
            let fraction = self.deeper(Self::primary)?;
            let proper = fraction.as_number().filter(|f| f.is_positive() && !f.denom().is_one());
            // `3\frac{1}{2}^2` is no mixed number, `3\frac{1}{2}^\circ` is one.
            let raised = self.peek() == Some(&Tok::Caret) && !self.caret_means_degrees();
            if let Some(part) = proper.filter(|_| !raised) {
                let value = Expr::rational(whole + part);
                return self.postfix(value);
            }
            self.at = start;
        } else if let (Some(top), Some(Tok::Slash), Some(bottom)) =
            (self.small_integer(1), self.peek_at(2), self.small_integer(3))
            && self.tokens.get(self.at + 1).is_some_and(|t| t.spaced)
            && bottom.is_positive()
        {
            self.at += 4;
            return Ok(Expr::rational(whole + top / bottom));
        } else if let Some(Tok::Num(half)) = self.peek_at(1)
            && half.digits.is_empty()
            && !half.value.denom().is_one()
            && !half.decimal
        {
            let value = whole + &half.value;
            self.at += 2;
            return Ok(Expr::rational(value));
        }
        self.power()
    }

    /// Whether the exponent at hand is a degree sign.
    fn caret_means_degrees(&self) -> bool {
        let inner = if self.peek_at(1) == Some(&Tok::LBrace) { self.peek_at(2) } else { self.peek_at(1) };
        matches!(inner, Some(Tok::Degree | Tok::Prime))
    }

    /// The whole number `ahead` tokens away.
    fn small_integer(&self, ahead: usize) -> Option<super::expr::Rational> {
        match self.peek_at(ahead)? {
            Tok::Num(NumTok { value, digits, .. }) if !digits.is_empty() => Some(value.clone()),
            _ => None,
        }
    }
}

#[derive(Clone, Copy)]
enum Sign {
    Plus,
    Minus,
    Unknown(bool),
}

/// `exact ≈ rounded` is `exact`; `x ≈ 3.14` with a bare name on the left is `x = 3.14`.
fn cut_approximation(sides: &mut Vec<Expr>, ops: &mut Vec<RelOp>) {
    let Some(first) = ops.iter().position(|op| *op == RelOp::Approx) else {
        return;
    };
    if first == 0 && matches!(sides.first(), Some(Expr::Sym(_) | Expr::Call(Func::Apply(_), _))) {
        ops[0] = RelOp::Eq;
        return;
    }
    ops.truncate(first);
    sides.truncate(first + 1);
}

/// The brackets that a token opens or closes.
fn bracket(tok: &Tok) -> Option<Bracket> {
    match tok {
        Tok::LParen | Tok::RParen | Tok::LAngle | Tok::RAngle => Some(Bracket::Round),
        Tok::LBracket | Tok::RBracket => Some(Bracket::Square),
        _ => None,
    }
}
