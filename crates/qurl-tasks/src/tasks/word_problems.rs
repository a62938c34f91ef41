//! Grade-school word problems with their worked solution.
//!
//! A story keeps one quantity (how many marbles Mia has) and changes it in `level` steps: she gets more, gives some away,
//! fills boxes, shares, spends. The numbers are chosen so that every step gives a whole number of things. The solution
//! names each step in words and as a calculation, in the manner of GSM8K.

use serde_json::json;

use super::synthetic::Generated;
use crate::rng::Rng;

/// All characters of prompts and solutions.
pub const ALPHABET: &str = "\n #$'*+,-./0123456789:;=?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

const NAMES: &[&str] = &[
    "Mia", "Noah", "Lena", "Omar", "Ruth", "Ivan", "Zoe", "Paul", "Aisha", "Leo", "Nora", "Sam", "Yuki", "Carla",
    "Finn", "Tara",
];

const THINGS: &[&str] = &[
    "marbles", "apples", "stickers", "books", "coins", "shells", "pencils", "cards", "cookies", "stamps", "buttons",
    "beads",
];

const HELPERS: &[&str] = &["a friend", "a neighbor", "an uncle", "a teacher", "a cousin", "a sister"];

/// One step of a story: what is told, and the calculation.
fn step(level: u32, value: i64, thing: &str, name: &str, rng: &mut Rng) -> (String, String, i64) {
    let most = 10 + 10 * i64::from(level);
    let helper = *rng.pick(HELPERS);
    let divisors: Vec<i64> = (2..=9).filter(|d| value % d == 0 && value / d >= 1).collect();
    let can_grow = value <= 300;
    loop {
        match rng.below(6) {
            0 if can_grow => {
                let n = rng.between(2, most);
                let told = format!("Then {helper} gives {name} {n} more {thing}.");
                return (told, format!("{value}+{n}={}", value + n), value + n);
            }
            1 if value >= 4 => {
                let n = rng.between(1, value - 1);
                let told = format!("Then {name} gives {n} {thing} to {helper}.");
                return (told, format!("{value}-{n}={}", value - n), value - n);
            }
            2 if can_grow => {
                let n = rng.between(2, if level < 3 { 3 } else { 6 });
                let told = format!("Then {name} works until there are {n} times as many {thing}.");
                return (told, format!("{value}*{n}={}", value * n), value * n);
            }
            3 if !divisors.is_empty() => {
                let n = *rng.pick(&divisors);
                let told = format!("Then {name} shares the {thing} equally among {n} people and keeps one share.");
                return (told, format!("{value}/{n}={}", value / n), value / n);
            }
            4 if can_grow => {
                let (packs, size) = (rng.between(2, 5), rng.between(2, 4 + i64::from(level)));
                let told = format!("Then {name} buys {packs} packs with {size} {thing} each.");
                let added = packs * size;
                let sum = value + added;
                return (told, format!("{packs}*{size}={added}\n{value}+{added}={sum}"), sum);
            }
            5 if value >= 6 && value % 2 == 0 => {
                let half = value / 2;
                let told = format!("Then {name} loses half of the {thing}.");
                return (told, format!("{value}/2={half}"), half);
            }
            _ => {}
        }
    }
}

/// A story with `level` steps.
pub fn generate(level: u32, rng: &mut Rng) -> Generated {
    let (name, thing) = (*rng.pick(NAMES), *rng.pick(THINGS));
    let mut value = rng.between(4, 10 + 10 * i64::from(level));
    let mut story = format!("{name} has {value} {thing}.");
    let mut work = String::new();
    for _ in 0..level {
        let (told, calculation, next) = step(level, value, thing, name, rng);
        story.push(' ');
        story.push_str(&told);
        work.push_str(&calculation);
        work.push('\n');
        value = next;
    }
    Generated {
        prompt: format!("{story} How many {thing} does {name} have now?\n"),
        answer: value.to_string(),
        solution: format!("{work}#### {value}\n"),
        extra: json!({}),
    }
}
