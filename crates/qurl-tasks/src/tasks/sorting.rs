//! Sorting by repeatedly taking the smallest number: `52 17 93>` is solved as `17;52;93;#### 17 52 93`.

use serde_json::json;

use super::synthetic::Generated;
use crate::rng::Rng;

/// All characters of prompts and solutions.
pub const ALPHABET: &str = "\n #0123456789;>|";

/// `level + 1` numbers below 100; each step writes the smallest one and what is left.
pub fn generate(level: u32, rng: &mut Rng) -> Generated {
    let mut left: Vec<u64> = (0..=level).map(|_| rng.below(100)).collect();
    let spelled = |numbers: &[u64]| {
        let words: Vec<String> = numbers.iter().map(u64::to_string).collect();
        words.join(" ")
    };
    let prompt = format!("{}>", spelled(&left));
    let mut sorted = left.clone();
    sorted.sort_unstable();
    let mut steps = String::new();
    for smallest in &sorted {
        if let Some(at) = left.iter().position(|n| n == smallest) {
            left.remove(at);
        }
        steps.push_str(&format!("{smallest}|{};", spelled(&left)));
    }
    let answer = spelled(&sorted);
    Generated { prompt, solution: format!("{steps}#### {answer}\n"), answer, extra: json!({}) }
}

/// Whether two lists have the same numbers in the same order; commas and spaces both separate.
pub fn same_order(gold: &str, answer: &str) -> bool {
    let numbers = |text: &str| -> Option<Vec<i64>> {
        let words = text.split([' ', ',', '[', ']']).filter(|w| !w.is_empty());
        words.map(|w| w.parse().ok()).collect()
    };
    match (numbers(gold), numbers(answer)) {
        (Some(a), Some(b)) => a == b,
        _ => false,
    }
}
