//! From characters to tokens: LaTeX, plain text and Unicode spellings of the same thing give the same tokens.
//!
//! The hard part is numbers ("1,234", "10{,}000", "32,\!348", "1,22", "2.5E2", "0.\overline{3}"), because a
//! comma may separate thousands, items or decimals. The caller says how to read it ([`Reading`]); the
//! comparison tries the other readings when the first one fails.

use num_bigint::BigInt;
use num_traits::{One, Zero};

use super::budget::{MAX_ANSWER_BYTES, MAX_DIGITS, MAX_TOKENS, Stop};
use super::expr::{BigKind, Constant, Func, Rational, RelOp};
use super::words;

/// How ambiguous numbers are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// A comma before exactly three digits separates thousands, another one separates items.
    Usual,
    /// Every comma separates items.
    CommaSeparates,
    /// A comma between digits is a decimal point.
    CommaIsPoint,
    /// `2e-1` is 2·e − 1.
    NoExponent,
}

/// A number token; `digits` are the digits as written, for `\frac12` and for other bases.
#[derive(Clone, Debug, PartialEq)]
pub struct NumTok {
    pub value: Rational,
    pub decimal: bool,
    pub digits: String,
}

/// What a token is.
#[derive(Clone, Debug, PartialEq)]
pub enum Tok {
    Num(NumTok),
    Sym(String),
    Word(String),
    Func(Func),
    Const(Constant),
    Big(BigKind),
    Rel(RelOp),
    Accent(String),
    Begin(String),
    End(String),
    NamedSet(char),
    Plus,
    Minus,
    PlusMinus(bool),
    Times,
    Slash,
    Caret,
    Under,
    Bang,
    Percent,
    Degree,
    Prime,
    LParen,
    RParen,
    LBracket,
    RBracket,
    LSet,
    RSet,
    LBrace,
    RBrace,
    LFloor,
    RFloor,
    LCeil,
    RCeil,
    LAngle,
    RAngle,
    Bar,
    Mid,
    Comma,
    Semicolon,
    Colon,
    Dots,
    Union,
    Intersection,
    SetMinus,
    Frac,
    Binom,
    Sqrt,
    Mod,
    PMod,
    To,
    Amp,
    NewRow,
    Empty,
}

/// A token, and whether white space came before it.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    pub tok: Tok,
    pub spaced: bool,
}

/// Splits an answer into tokens.
pub fn lex(text: &str, reading: Reading) -> Result<Vec<Token>, Stop> {
    if text.len() > MAX_ANSWER_BYTES {
        return Err(Stop);
    }
    let mut lexer = Lexer {
        chars: text.chars().collect(),
        at: 0,
        reading,
        tokens: Vec::new(),
        spaced: false,
        brackets: 0,
    };
    lexer.run()?;
    Ok(lexer.tokens)
}

struct Lexer {
    chars: Vec<char>,
    at: usize,
    reading: Reading,
    tokens: Vec<Token>,
    spaced: bool,
    /// Open round, square and set brackets: inside them a plain comma separates items.
    brackets: usize,
}

impl Lexer {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    fn digit(&self, index: usize) -> bool {
        self.chars.get(index).is_some_and(char::is_ascii_digit)
    }

    fn starts_with(&self, index: usize, text: &str) -> bool {
        text.chars().enumerate().all(|(i, c)| self.chars.get(index + i) == Some(&c))
    }

    fn push(&mut self, tok: Tok) -> Result<(), Stop> {
        if self.tokens.len() >= MAX_TOKENS {
            return Err(Stop);
        }
        match tok {
            Tok::LParen | Tok::LBracket | Tok::LSet => self.brackets += 1,
            Tok::RParen | Tok::RBracket | Tok::RSet => self.brackets = self.brackets.saturating_sub(1),
            _ => {}
        }
        self.tokens.push(Token { tok, spaced: std::mem::take(&mut self.spaced) });
        Ok(())
    }

    fn run(&mut self) -> Result<(), Stop> {
        while let Some(c) = self.peek(0) {
            if c.is_ascii_digit() || c == '.' && self.digit(self.at + 1) {
                self.number()?;
            } else if c.is_ascii_alphabetic() {
                let run = self.letters();
                self.letter_run(&run)?;
            } else if c == '\\' {
                self.command()?;
            } else {
                self.at += 1;
                self.symbol(c)?;
            }
        }
        Ok(())
    }

    fn letters(&mut self) -> String {
        let start = self.at;
        while self.peek(0).is_some_and(|c| c.is_ascii_alphabetic()) {
            self.at += 1;
        }
        self.chars[start..self.at].iter().collect()
    }

    /// The length of a thousands separator at `index` that is followed by exactly three digits.
    fn thousands_separator(&self, index: usize, group: usize) -> Option<usize> {
        if group > 3 || self.reading == Reading::CommaSeparates {
            return None;
        }
        let plain_comma = self.brackets == 0 && self.reading != Reading::CommaIsPoint;
        let mut length = if self.starts_with(index, "{,}") || self.starts_with(index, ",\\!") {
            3
        } else if self.starts_with(index, "\\,") || self.starts_with(index, "\\ ") {
            2
        } else if self.chars.get(index) == Some(&',') && plain_comma
            || self
                .chars
                .get(index)
                .is_some_and(|c| matches!(c, ' ' | '~' | '\u{a0}' | '\u{2009}' | '\u{202f}'))
        {
            1
        } else {
            return None;
        };
        if self.starts_with(index, ",\\!") {
            while self.chars.get(index + length) == Some(&' ') {
                length += 1;
            }
        }
        let digits = (0..4).take_while(|i| self.digit(index + length + i)).count();
        let mut after = index + length + 3;
        while self.chars.get(after) == Some(&' ') {
            after += 1;
        }
        let mixed = self.chars.get(index) == Some(&' ') && self.chars.get(after) == Some(&'/');
        (digits == 3 && !mixed).then_some(length)
    }

    fn number(&mut self) -> Result<(), Stop> {
        let mut digits = String::new();
        let mut group = 0;
        loop {
            while self.digit(self.at) {
                digits.push(self.chars[self.at]);
                self.at += 1;
                group += 1;
            }
            if digits.is_empty() || digits == "0" {
                break;
            }
            match self.thousands_separator(self.at, group) {
                Some(length) => {
                    self.at += length;
                    group = 0;
                }
                None => break,
            }
        }
        let mut fraction = String::new();
        let mut repeating = String::new();
        let point = self.peek(0) == Some('.')
            || self.peek(0) == Some(',') && self.reading == Reading::CommaIsPoint && self.digit(self.at + 1);
        if point && (self.digit(self.at + 1) || self.overline_digits(self.at + 1).is_some()) {
            self.at += 1;
            while self.digit(self.at) {
                fraction.push(self.chars[self.at]);
                self.at += 1;
            }
            if let Some((block, end)) = self.overline_digits(self.at) {
                repeating = block;
                self.at = end;
            }
        }
        let exponent = self.exponent();
        if digits.len() + fraction.len() + repeating.len() > MAX_DIGITS {
            return Err(Stop);
        }
        let value = decimal_value(&digits, &fraction, &repeating, exponent.unwrap_or(0)).ok_or(Stop)?;
        let decimal = !fraction.is_empty() && repeating.is_empty() || exponent.is_some_and(|e| e < 0);
        if fraction.is_empty() && repeating.is_empty() && exponent.is_none() {
            self.push(Tok::Num(NumTok { value, decimal, digits }))
        } else {
            self.push(Tok::Num(NumTok { value, decimal, digits: String::new() }))
        }
    }

    /// The digits of `\overline{36}` at `index`, and where it ends.
    fn overline_digits(&self, index: usize) -> Option<(String, usize)> {
        let open = ["\\overline{", "\\bar{"].iter().find(|name| self.starts_with(index, name))?;
        let start = index + open.len();
        let block: String = self.chars[start..].iter().take_while(|c| c.is_ascii_digit()).collect();
        let end = start + block.len();
        (!block.is_empty() && block.len() <= 64 && self.chars.get(end) == Some(&'}'))
            .then_some((block, end + 1))
    }

    /// Reads `e-5` or `E12` when digits follow.
    fn exponent(&mut self) -> Option<i32> {
        if self.reading == Reading::NoExponent || !matches!(self.peek(0), Some('e' | 'E')) {
            return None;
        }
        let signed = matches!(self.peek(1), Some('+' | '-' | '−'));
        let start = self.at + if signed { 2 } else { 1 };
        let text: String = self.chars.get(start..)?.iter().take_while(|c| c.is_ascii_digit()).collect();
        let end = start + text.len();
        let letter_follows = self.chars.get(end).is_some_and(|c| c.is_ascii_alphabetic());
        let value: i32 = text.parse().ok().filter(|e| *e <= 1000)?;
        if letter_follows {
            return None;
        }
        let negative = signed && self.peek(1) != Some('+');
        self.at = end;
        Some(if negative { -value } else { value })
    }

    /// Whether the letters just read have white space, punctuation or nothing on both sides: `at` in `e^{at}`
    /// has not.
    fn stands_alone(&self, length: usize) -> bool {
        let before = (self.at - length).checked_sub(1).map(|i| self.chars[i]);
        let after = self.peek(0);
        before.is_none_or(|c| c.is_whitespace() || matches!(c, ',' | '.' | '$'))
            && after.is_none_or(|c| c.is_whitespace() || matches!(c, ',' | '.' | ':' | '$'))
    }

    /// Whether an `x` stands between a number and `10^`: the times sign of people without one.
    fn before_power_of_ten(&self) -> bool {
        let rest: String = self.chars[self.at..].iter().filter(|c| **c != ' ').take(4).collect();
        let after_number = matches!(self.tokens.last().map(|t| &t.tok), Some(Tok::Num(_)));
        after_number && (rest.starts_with("10^") || rest.starts_with("10**"))
    }

    /// Whether letters start a unit such as `m/s`.
    fn is_unit_quotient(&self, run: &str) -> bool {
        let Some(rest) = self.chars.get(self.at + 1..) else { return false };
        let below: String = rest.iter().take_while(|c| c.is_ascii_alphabetic()).collect();
        self.peek(0) == Some('/') && words::unit_size(run).is_some() && words::unit_size(&below).is_some()
    }

    /// Letters outside of text: functions, units after numbers, words, or a product of variables.
    fn letter_run(&mut self, run: &str) -> Result<(), Stop> {
        let opens_call = self.peek(0) == Some('(');
        let after_value = matches!(
            self.tokens.last().map(|t| &t.tok),
            Some(Tok::Num(_) | Tok::RParen | Tok::RBrace | Tok::Degree)
        );
        let squared = matches!(self.peek(0), Some('²' | '³')) && words::unit_size(run).is_some();
        if run == "x" && self.before_power_of_ten() {
            return self.push(Tok::Times);
        }
        if after_value && !opens_call && (squared || words::is_short_unit(run) || self.is_unit_quotient(run))
        {
            return self.push(Tok::Word(run.into()));
        }
        match run {
            "e" => return self.push(Tok::Const(Constant::E)),
            "i" => return self.push(Tok::Const(Constant::I)),
            "sqrt" => return self.push(Tok::Sqrt),
            "mod" => return self.push(Tok::Mod),
            "oo" => return self.push(Tok::Const(Constant::Infinity)),
            _ => {}
        }
        if let Some(tok) = named(run) {
            return self.push(tok);
        }
        if run.len() == 1 {
            return self.push(Tok::Sym(run.into()));
        }
        let joins = matches!(run, "and" | "or");
        if joins || words::is_small_word(run) && self.stands_alone(run.len()) {
            return self.push(Tok::Word(run.into()));
        }
        for name in ["arcsin", "arccos", "arctan", "sin", "cos", "tan", "cot", "log", "ln", "pi", "sqrt"] {
            let rest = run.strip_prefix(name);
            if let Some(rest) =
                rest.filter(|rest| matches!(*rest, "x" | "y" | "z" | "xy" | "A" | "B" | "C" | "pi"))
            {
                if name == "sqrt" {
                    self.push(Tok::Sqrt)?;
                } else if let Some(tok) = named(name) {
                    self.push(tok)?;
                }
                return self.letter_run(rest);
            }
        }
        let upper = run.chars().all(|c| c.is_ascii_uppercase());
        let consecutive = run.as_bytes().windows(2).all(|w| w[1] == w[0] + 1);
        if run.len() >= 4 && !upper && !consecutive {
            return self.push(Tok::Word(run.into()));
        }
        for c in run.chars() {
            match c {
                'e' => self.push(Tok::Const(Constant::E))?,
                'i' => self.push(Tok::Const(Constant::I))?,
                _ => self.push(Tok::Sym(c.into()))?,
            }
        }
        Ok(())
    }

    fn symbol(&mut self, c: char) -> Result<(), Stop> {
        let tok = match c {
            c if c.is_whitespace() => {
                self.spaced = true;
                return Ok(());
            }
            '$' | '~' | '€' | '£' | '¥' | '₹' | '\u{200b}' => {
                self.spaced = true;
                return Ok(());
            }
            '+' => Tok::Plus,
            '-' | '−' | '–' => Tok::Minus,
            '±' => Tok::PlusMinus(false),
            '∓' => Tok::PlusMinus(true),
            '*' if self.peek(0) == Some('*') => {
                self.at += 1;
                Tok::Caret
            }
            '*' | '×' | '·' | '⋅' | '∗' => Tok::Times,
            '/' | '÷' => Tok::Slash,
            '^' => Tok::Caret,
            '_' => Tok::Under,
            '!' if self.peek(0) == Some('=') => {
                self.at += 1;
                Tok::Rel(RelOp::Ne)
            }
            '!' => Tok::Bang,
            '%' => Tok::Percent,
            '°' | 'º' => Tok::Degree,
            '\'' | '′' | '’' => Tok::Prime,
            '(' => Tok::LParen,
            ')' => Tok::RParen,
            '[' => Tok::LBracket,
            ']' => Tok::RBracket,
            '{' => Tok::LBrace,
            '}' => Tok::RBrace,
            '⌊' => Tok::LFloor,
            '⌋' => Tok::RFloor,
            '⌈' => Tok::LCeil,
            '⌉' => Tok::RCeil,
            '⟨' => Tok::LAngle,
            '⟩' => Tok::RAngle,
            '|' => Tok::Bar,
            ',' | '，' | '、' => Tok::Comma,
            ';' | '；' => Tok::Semicolon,
            ':' | '：' => Tok::Colon,
            '=' => {
                if self.peek(0) == Some('=') {
                    self.at += 1;
                }
                Tok::Rel(RelOp::Eq)
            }
            '<' | '>' => {
                let orequal = self.peek(0) == Some('=');
                if orequal {
                    self.at += 1;
                }
                Tok::Rel(match (c, orequal) {
                    ('<', false) => RelOp::Lt,
                    ('<', true) => RelOp::Le,
                    (_, false) => RelOp::Gt,
                    (_, true) => RelOp::Ge,
                })
            }
            '≤' | '⩽' => Tok::Rel(RelOp::Le),
            '≥' | '⩾' => Tok::Rel(RelOp::Ge),
            '≠' => Tok::Rel(RelOp::Ne),
            '≈' | '≃' => Tok::Rel(RelOp::Approx),
            '≡' => Tok::Rel(RelOp::Equiv),
            '∈' => Tok::Rel(RelOp::In),
            '∪' => Tok::Union,
            '∩' => Tok::Intersection,
            '√' => Tok::Sqrt,
            'π' => Tok::Const(Constant::Pi),
            '∞' => Tok::Const(Constant::Infinity),
            '∅' => Tok::Empty,
            'ℝ' => Tok::NamedSet('R'),
            '→' => Tok::To,
            '…' => Tok::Dots,
            '&' => Tok::Amp,
            '.' => {
                if self.starts_with(self.at, "..") {
                    self.at += 2;
                    Tok::Dots
                } else {
                    self.spaced = true;
                    return Ok(());
                }
            }
            '½' | '¼' | '¾' => {
                let (n, d) = match c {
                    '½' => (1, 2),
                    '¼' => (1, 4),
                    _ => (3, 4),
                };
                Tok::Num(NumTok {
                    value: Rational::new(n.into(), d.into()),
                    decimal: false,
                    digits: String::new(),
                })
            }
            c => match "⁰¹²³⁴⁵⁶⁷⁸⁹".chars().position(|s| s == c) {
                Some(first) => {
                    self.push(Tok::Caret)?;
                    let mut value = first;
                    while let Some(next) = self
                        .peek(0)
                        .and_then(|c| "⁰¹²³⁴⁵⁶⁷⁸⁹".chars().position(|s| s == c))
                        .filter(|_| value < 1000)
                    {
                        value = value * 10 + next;
                        self.at += 1;
                    }
                    Tok::Num(NumTok {
                        value: Rational::from_integer(value.into()),
                        decimal: false,
                        digits: value.to_string(),
                    })
                }
                None => match words::greek_char(c) {
                    Some(name) => Tok::Sym(name.into()),
                    None if c.is_alphabetic() => {
                        let mut word = String::from(c);
                        while let Some(c) = self.peek(0).filter(|c| c.is_alphabetic()) {
                            word.push(c);
                            self.at += 1;
                        }
                        Tok::Word(word)
                    }
                    None => Tok::Rel(RelOp::Other(c)),
                },
            },
        };
        self.push(tok)
    }
}

/// The exact value of digits, decimals, a repeating block and a power of ten.
fn decimal_value(digits: &str, fraction: &str, repeating: &str, exponent: i32) -> Option<Rational> {
    let integer = |text: &str| {
        if text.is_empty() { Some(BigInt::zero()) } else { text.parse::<BigInt>().ok() }
    };
    let ten = |power: usize| BigInt::from(10).pow(power as u32);
    let mut value = Rational::new(integer(&format!("{digits}{fraction}"))?, ten(fraction.len()));
    if !repeating.is_empty() {
        let nines = ten(repeating.len()) - BigInt::one();
        value += Rational::new(integer(repeating)?, nines * ten(fraction.len()));
    }
    let scale = Rational::from_integer(ten(exponent.unsigned_abs() as usize));
    Some(if exponent < 0 { value / scale } else { value * scale })
}

/// Functions and constants that are spelled the same in LaTeX and in plain text.
fn named(name: &str) -> Option<Tok> {
    words::function(name).map(Tok::Func).or_else(|| words::constant(name).map(Tok::Const))
}

mod commands;
