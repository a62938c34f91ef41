//! How many answers one thread grades in a second.
//!
//! `cargo run --release -p qurl-tasks --example grade_speed`
#![forbid(unsafe_code)]

use std::time::Instant;

use qurl_tasks::grader::{Policy, grade};
use qurl_tasks::rng::Rng;

fn main() {
    let mut rng = Rng::new(&[1]);
    let mut number = |low, high| rng.between(low, high);
    let response = |answer: String, words: usize| {
        let steps = "First we add the two numbers and then we divide. ".repeat(words / 10);
        format!("{steps}Therefore the answer is $\\boxed{{{answer}}}$.")
    };
    let workloads: Vec<(&str, Vec<(String, String)>)> = vec![
        (
            "whole numbers",
            (0..1000).map(|_| (number(0, 999).to_string(), number(0, 999).to_string())).collect(),
        ),
        (
            "boxed numbers in a short response",
            (0..1000).map(|_| (number(0, 99).to_string(), response(number(0, 99).to_string(), 20))).collect(),
        ),
        (
            "boxed numbers in a long response (10 kB)",
            (0..100)
                .map(|_| (number(0, 99).to_string(), response(number(0, 99).to_string(), 2000)))
                .collect(),
        ),
        (
            "fractions and decimals",
            (0..1000)
                .map(|_| {
                    let (a, b) = (number(1, 99), number(1, 20));
                    (format!("\\frac{{{a}}}{{{b}}}"), format!("{}/{}", number(1, 99), 2 * b))
                })
                .collect(),
        ),
        (
            "roots and pi",
            (0..1000)
                .map(|_| {
                    (
                        format!("{}\\sqrt{{{}}}", number(1, 9), number(2, 50)),
                        format!("\\sqrt{{{}}}+\\pi", number(2, 90)),
                    )
                })
                .collect(),
        ),
        (
            "polynomials",
            (0..1000)
                .map(|_| {
                    let (a, b) = (number(1, 9), number(1, 9));
                    (format!("x^2+{}x+{}", a + b, a * b), format!("(x+{a})(x+{b})"))
                })
                .collect(),
        ),
    ];
    println!("{:44} {:>14} {:>8}", "workload", "answers / s", "equal");
    for (name, pairs) in workloads {
        let (mut graded, mut equal) = (0u64, 0u64);
        let started = Instant::now();
        while started.elapsed().as_secs_f64() < 1.0 {
            for (gold, pred) in &pairs {
                equal += u64::from(grade(gold, pred, Policy::Equivalence).equal);
                graded += 1;
            }
        }
        let speed = graded as f64 / started.elapsed().as_secs_f64();
        println!("{name:44} {speed:>14.0} {:>7.1}%", 100.0 * equal as f64 / graded as f64);
    }
}
