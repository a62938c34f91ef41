//! Countdown: reach a target with given numbers, each used exactly once, and + − × ÷.
//!
//! The response's expression is parsed and evaluated exactly; nothing is executed. It is the content of the
//! last `<answer>` element, else the `####` line, else the last box; a right-hand side (`... = 24`) is
//! ignored.

use num_bigint::BigInt;
use num_rational::Ratio;
use num_traits::Zero;
use serde_json::{Value, json};

use super::synthetic::{Generated, marked_answer};
use crate::grader::expr::Rational;
use crate::grader::extract;
use crate::rng::Rng;
use crate::task::{Problem, Verdict};

/// All characters of prompts and solutions.
pub const ALPHABET: &str = "\n #()*+-/0123456789;=>";

/// Longest expression that is read.
const MAX_EXPRESSION: usize = 400;
/// Deepest nesting of brackets.
const MAX_NESTING: usize = 32;

/// `level + 1` numbers and a target that an expression over all of them reaches.
pub fn generate(level: u32, rng: &mut Rng) -> Generated {
    loop {
        let numbers: Vec<i64> =
            (0..=level).map(|_| rng.between(1, if level == 1 { 20 } else { 50 })).collect();
        let mut value = numbers[0];
        let mut expression = value.to_string();
        let mut steps = String::new();
        let mut sum_outside = false;
        for n in &numbers[1..] {
            let before = value;
            let sign = match rng.below(4) {
                0 => '+',
                1 => '-',
                2 => '*',
                _ if value % n == 0 => '/',
                _ => '+',
            };
            value = match sign {
                '+' => value + n,
                '-' => value - n,
                '*' => value * n,
                _ => value / n,
            };
            let bracketed = sum_outside && matches!(sign, '*' | '/');
            expression =
                if bracketed { format!("({expression}){sign}{n}") } else { format!("{expression}{sign}{n}") };
            sum_outside = matches!(sign, '+' | '-');
            steps.push_str(&format!("{before}{sign}{n}={value};"));
        }
        if !(1..=999).contains(&value) {
            continue;
        }
        let mut shown = numbers.clone();
        for i in (1..shown.len()).rev() {
            shown.swap(i, rng.below(i as u64 + 1) as usize);
        }
        let listed: Vec<String> = shown.iter().map(i64::to_string).collect();
        return Generated {
            prompt: format!("{}>{value}=", listed.join(" ")),
            answer: value.to_string(),
            solution: format!("{steps}#### {expression}\n"),
            extra: json!({"nums": shown, "target": value}),
        };
    }
}

/// The numbers and the target of a problem, when it is a Countdown problem.
pub fn numbers_and_target(extra: &Value) -> Option<(Vec<i64>, i64)> {
    let numbers: Option<Vec<i64>> = extra["nums"].as_array()?.iter().map(Value::as_i64).collect();
    Some((numbers?, extra["target"].as_i64()?))
}

/// Judges the expression in a response. `format` is a well-formed expression over exactly the given numbers.
pub fn verify(problem: &Problem, response: &str, format_weight: f64) -> Verdict {
    let wrong = |extracted| Verdict::new(false, false, format_weight, extracted);
    let Some((numbers, target)) = numbers_and_target(&problem.extra) else {
        return wrong(None);
    };
    let response = extract::tail(response, 64 * 1024);
    let boxed = || extract::boxed(response).map(|(_, inner)| inner);
    let found =
        extract::tagged(response).or_else(|| marked_answer(response)).map(str::to_string).or_else(boxed);
    let Some(text) = found else { return wrong(None) };
    let left = text.split('=').next().unwrap_or("").trim().to_string();
    let Some((value, mut used)) = evaluate(&left) else {
        return wrong(Some(left));
    };
    let mut given: Vec<BigInt> = numbers.into_iter().map(BigInt::from).collect();
    given.sort();
    used.sort();
    let format = given == used;
    let correct = format && value == Ratio::from_integer(target.into());
    Verdict::new(correct, format, format_weight, Some(left))
}

/// The exact value of an expression and the numbers in it; `None` when it is malformed or divides by zero.
pub fn evaluate(text: &str) -> Option<(Rational, Vec<BigInt>)> {
    if text.len() > MAX_EXPRESSION {
        return None;
    }
    let plain = text.replace("\\times", "*").replace("\\cdot", "*").replace("\\div", "/");
    let plain = plain.replace(['×', '·'], "*").replace('÷', "/").replace(['−', '–'], "-");
    let mut reader = Reader { text: plain.as_bytes(), at: 0, nesting: 0, used: Vec::new() };
    let value = reader.sum()?;
    reader.skip_spaces();
    (reader.at == reader.text.len()).then_some((value, reader.used))
}

struct Reader<'a> {
    text: &'a [u8],
    at: usize,
    nesting: usize,
    used: Vec<BigInt>,
}

impl Reader<'_> {
    fn skip_spaces(&mut self) {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
    }

    fn next_is(&mut self, wanted: &[u8]) -> Option<u8> {
        self.skip_spaces();
        let found = self.text.get(self.at).copied().filter(|b| wanted.contains(b))?;
        self.at += 1;
        Some(found)
    }

    fn sum(&mut self) -> Option<Rational> {
        let mut value = self.product()?;
        while let Some(sign) = self.next_is(b"+-") {
            let term = self.product()?;
            value = if sign == b'+' { value + term } else { value - term };
        }
        Some(value)
    }

    fn product(&mut self) -> Option<Rational> {
        let mut value = self.factor()?;
        while let Some(sign) = self.next_is(b"*/") {
            let factor = self.factor()?;
            if sign == b'*' {
                value *= factor;
            } else if factor.is_zero() {
                return None;
            } else {
                value /= factor;
            }
        }
        Some(value)
    }

    fn factor(&mut self) -> Option<Rational> {
        if self.next_is(b"(").is_some() {
            if self.nesting == MAX_NESTING {
                return None;
            }
            self.nesting += 1;
            let value = self.sum()?;
            self.nesting -= 1;
            self.next_is(b")")?;
            return Some(value);
        }
        self.skip_spaces();
        let digits = self.text[self.at..].iter().take_while(|b| b.is_ascii_digit()).count();
        let number = std::str::from_utf8(&self.text[self.at..self.at + digits]).ok()?;
        let number: BigInt = number.parse().ok()?;
        self.at += digits;
        self.used.push(number.clone());
        Some(Ratio::from_integer(number))
    }
}
