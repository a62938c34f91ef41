//! Addition and multiplication with every column written down.
//!
//! `47+85=` is solved as `7+5+0=12;4+8+1=13;#### 132`: from the right, digit plus digit plus carry. A model
//! that learns one column has learned them all, which makes the easiest levels a matter of seconds of
//! training.
//!
//! Worked additions can be made by a careless teacher who now and then forgets a carry and continues
//! consistently from there. A model that imitates it knows how to add but does not do so reliably: the state
//! in which reinforcement learning finds most pretrained models, and what a reward for right answers can
//! change.

use serde_json::json;

use super::synthetic::Generated;
use crate::rng::Rng;

/// All characters of prompts and solutions.
pub const ALPHABET: &str = "\n #*+0123456789;=";

/// A number with exactly `digits` digits (0 to 9 for one digit).
fn number(digits: u32, rng: &mut Rng) -> u64 {
    let low = if digits == 1 { 0 } else { 10u64.pow(digits - 1) };
    low + rng.below(10u64.pow(digits) - low)
}

/// Digits from the right.
fn digits_of(mut n: u64) -> Vec<u64> {
    let mut digits = vec![n % 10];
    while n >= 10 {
        n /= 10;
        digits.push(n % 10);
    }
    digits
}

/// The columns of `a + b`, and what they give: the sum, unless `forgets` says of a due carry that it is
/// forgotten.
fn add_steps(a: u64, b: u64, mut forgets: impl FnMut() -> bool, steps: &mut String) -> u64 {
    let (x, y) = (digits_of(a), digits_of(b));
    let (mut carry, mut result, mut place) = (0, 0, 1);
    let columns = x.len().max(y.len());
    for i in 0..columns {
        let (p, q) = (x.get(i).copied().unwrap_or(0), y.get(i).copied().unwrap_or(0));
        let sum = p + q + carry;
        steps.push_str(&format!("{p}+{q}+{carry}={sum};"));
        let last = i + 1 == columns;
        result += if last { sum } else { sum % 10 } * place;
        carry = if !last && sum >= 10 && !forgets() { 1 } else { 0 };
        place *= 10;
    }
    result
}

/// The columns of `a · digit`.
fn multiply_steps(a: u64, digit: u64, steps: &mut String) -> u64 {
    let mut carry = 0;
    for p in digits_of(a) {
        let product = p * digit + carry;
        steps.push_str(&format!("{p}*{digit}+{carry}={product};"));
        carry = product / 10;
    }
    a * digit
}

fn finished(prompt: String, mut steps: String, answer: u64) -> Generated {
    steps.push_str(&format!("#### {answer}\n"));
    Generated { prompt, answer: answer.to_string(), solution: steps, extra: json!({}) }
}

/// Two numbers with `level` digits each; the worked solution forgets a due carry with probability `slips`.
pub fn addition(level: u32, slips: f64, rng: &mut Rng) -> Generated {
    let (a, b) = (number(level, rng), number(level, rng));
    let mut steps = String::new();
    let written = add_steps(a, b, || rng.chance(slips), &mut steps);
    Generated { answer: (a + b).to_string(), ..finished(format!("{a}+{b}="), steps, written) }
}

/// Numbers with 2×1, 3×1, 4×1, 2×2, 3×2, 3×3 digits.
pub fn multiplication(level: u32, rng: &mut Rng) -> Generated {
    let (long, short) = match level {
        1 => (2, 1),
        2 => (3, 1),
        3 => (4, 1),
        4 => (2, 2),
        5 => (3, 2),
        _ => (3, 3),
    };
    let (a, b) = (number(long, rng), number(short, rng));
    let mut steps = String::new();
    let mut total = 0;
    for (place, digit) in digits_of(b).into_iter().enumerate() {
        let shifted = a * 10u64.pow(place as u32);
        let partial = multiply_steps(shifted, digit, &mut steps);
        steps.push_str(&format!("{shifted}*{digit}={partial};"));
        if place == 0 {
            total = partial;
        } else {
            let before = total;
            total = add_steps(before, partial, || false, &mut steps);
            steps.push_str(&format!("{before}+{partial}={total};"));
        }
    }
    finished(format!("{a}*{b}="), steps, total)
}
