//! Grade-school word problems with their worked solution.
//!
//! A story keeps one quantity (how many marbles Mia has) and changes it in `level` steps: she gets more,
//! gives some away, fills boxes, shares, spends. The numbers are chosen so that every step gives a whole
//! number of things. The solution names each step in words and as a calculation, in the manner of GSM8K. A
//! careless teacher (see `arithmetic`) forgets carries in sums and differences, which puts them off by ten,
//! and continues from there.

use serde_json::json;

use super::synthetic::Generated;
use crate::rng::Rng;

/// All characters of prompts and solutions.
pub const ALPHABET: &str = "\n #$'*+,-./0123456789:;=?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

const NAMES: &[&str] = &[
    "Mia", "Noah", "Lena", "Omar", "Ruth", "Ivan", "Zoe", "Paul", "Aisha", "Leo", "Nora", "Sam", "Yuki",
    "Carla", "Finn", "Tara",
];

const THINGS: &[&str] = &[
    "marbles", "apples", "stickers", "books", "coins", "shells", "pencils", "cards", "cookies", "stamps",
    "buttons", "beads",
];

const HELPERS: &[&str] = &["a friend", "a neighbor", "an uncle", "a teacher", "a cousin", "a sister"];

/// What happens in one step of a story.
#[derive(Clone, Copy)]
enum Event {
    Gets(i64),
    Gives(i64),
    Multiplies(i64),
    Shares(i64),
    Buys { packs: i64, size: i64 },
    Halves,
}

impl Event {
    /// Something that can happen to `value` things.
    fn draw(level: u32, value: i64, rng: &mut Rng) -> Event {
        let most = 10 + 10 * i64::from(level);
        let divisors: Vec<i64> = (2..=9).filter(|d| value % d == 0 && value / d >= 1).collect();
        let can_grow = value <= 300;
        loop {
            match rng.below(6) {
                0 if can_grow => return Event::Gets(rng.between(2, most)),
                1 if value >= 4 => return Event::Gives(rng.between(1, value - 1)),
                2 if can_grow => return Event::Multiplies(rng.between(2, if level < 3 { 3 } else { 6 })),
                3 if !divisors.is_empty() => return Event::Shares(*rng.pick(&divisors)),
                4 if can_grow => {
                    return Event::Buys {
                        packs: rng.between(2, 5),
                        size: rng.between(2, 4 + i64::from(level)),
                    };
                }
                5 if value >= 6 && value % 2 == 0 => return Event::Halves,
                _ => {}
            }
        }
    }

    fn told(self, thing: &str, name: &str, helper: &str) -> String {
        match self {
            Event::Gets(n) => format!("Then {helper} gives {name} {n} more {thing}."),
            Event::Gives(n) => format!("Then {name} gives {n} {thing} to {helper}."),
            Event::Multiplies(n) => format!("Then {name} works until there are {n} times as many {thing}."),
            Event::Shares(n) => {
                format!("Then {name} shares the {thing} equally among {n} people and keeps one share.")
            }
            Event::Buys { packs, size } => {
                format!("Then {name} buys {packs} packs with {size} {thing} each.")
            }
            Event::Halves => format!("Then {name} loses half of the {thing}."),
        }
    }

    /// What it makes of `value`.
    fn result(self, value: i64) -> i64 {
        self.worked(value, || false).1
    }

    /// The calculation and its result, in which `forgets` says of a due carry that it is forgotten. After a
    /// forgotten one `value` may not suit the event any more: what is given away is then all there is, and
    /// the rest of a share is lost.
    fn worked(self, value: i64, mut forgets: impl FnMut() -> bool) -> (String, i64) {
        let mut sum = |a: i64, b: i64| a + b - if a % 10 + b % 10 >= 10 && forgets() { 10 } else { 0 };
        match self {
            Event::Gets(n) => {
                let result = sum(value, n);
                (format!("{value}+{n}={result}"), result)
            }
            Event::Gives(n) => {
                let exact = (value - n).max(0);
                let result = if value % 10 < n % 10 && forgets() { exact + 10 } else { exact };
                (format!("{value}-{n}={result}"), result)
            }
            Event::Multiplies(n) => (format!("{value}*{n}={}", value * n), value * n),
            Event::Shares(n) => (format!("{value}/{n}={}", value / n), value / n),
            Event::Buys { packs, size } => {
                let added = packs * size;
                let result = sum(value, added);
                (format!("{packs}*{size}={added}\n{value}+{added}={result}"), result)
            }
            Event::Halves => (format!("{value}/2={}", value / 2), value / 2),
        }
    }
}

/// A story with `level` steps; the worked solution forgets a due carry with probability `slips`.
pub fn generate(level: u32, slips: f64, rng: &mut Rng) -> Generated {
    let (name, thing) = (*rng.pick(NAMES), *rng.pick(THINGS));
    let first = rng.between(4, 10 + 10 * i64::from(level));
    let mut story = format!("{name} has {first} {thing}.");
    let mut answer = first;
    let mut events = Vec::new();
    for _ in 0..level {
        let helper = *rng.pick(HELPERS);
        let event = Event::draw(level, answer, rng);
        story.push(' ');
        story.push_str(&event.told(thing, name, helper));
        answer = event.result(answer);
        events.push(event);
    }
    let mut solution = String::new();
    let mut written = first;
    for event in events {
        let (calculation, result) = event.worked(written, || rng.chance(slips));
        solution.push_str(&calculation);
        solution.push('\n');
        written = result;
    }
    Generated {
        prompt: format!("{story} How many {thing} does {name} have now?\n"),
        answer: answer.to_string(),
        solution: format!("{solution}#### {written}\n"),
        extra: json!({}),
    }
}
