//! Chains of operations modulo a small number, from left to right: `3+5*2-4%7=` is solved as
//! `3+5=1;1*2=2;2-4=5;#### 5`.
//!
//! Every step is one look-up in a table that a tiny model can hold; the level is the length of the chain, so
//! that depth of reasoning grows while the facts stay the same.

use serde_json::json;

use super::synthetic::Generated;
use crate::rng::Rng;

/// All characters of prompts and solutions.
pub const ALPHABET: &str = "\n #%*+-0123456789;=";

/// A chain of `level` operations; the modulus is 7, from level 5 on 11 and from level 9 on 13.
pub fn generate(level: u32, rng: &mut Rng) -> Generated {
    let modulus = match level {
        1..=4 => 7,
        5..=8 => 11,
        _ => 13,
    };
    let mut value = rng.between(0, modulus - 1);
    let mut prompt = value.to_string();
    let mut steps = String::new();
    for _ in 0..level {
        let operand = rng.between(0, modulus - 1);
        let (sign, result) = match rng.below(3) {
            0 => ('+', value + operand),
            1 => ('-', value - operand),
            _ => ('*', value * operand),
        };
        let result = result.rem_euclid(modulus);
        prompt.push_str(&format!("{sign}{operand}"));
        steps.push_str(&format!("{value}{sign}{operand}={result};"));
        value = result;
    }
    Generated {
        prompt: format!("{prompt}%{modulus}="),
        answer: value.to_string(),
        solution: format!("{steps}#### {value}\n"),
        extra: json!({}),
    }
}
