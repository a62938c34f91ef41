//! Any answer beside any gold answer, under any policy: the grader ends within its fuel and says the same
//! twice.

use super::Target;
use crate::input::Input;
use qurl_tasks::grader::budget::FUEL;
use qurl_tasks::grader::{Policy, grade};

pub const GRADER: Target = Target {
    name: "grader",
    about: "gold answers and responses under every policy",
    words: &[
        "\\frac{1}{2}",
        "\\boxed{",
        "}",
        "\\sqrt{",
        "\\text{",
        "\\left(",
        "\\right)",
        "####",
        "\\pi",
        "^",
        "_",
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "\\cup",
        "\\infty",
        "[",
        ")",
        ",",
        "=",
        "<answer>",
        "%",
        "\\%",
        "$",
        "x",
        "sin",
        "log",
        "!",
        "/",
        "*",
        "e",
        "i",
        "\\pm",
        "^{\\circ}",
        "and",
        "or",
        "hours",
        "\\le",
        "mod",
    ],
    made: |_| {
        let pairs = [
            ("72", "So it is.\n#### 72"),
            ("\\frac{3}{4}", "The answer is \\boxed{0.75}."),
            ("x^2+2x+1", "\\boxed{(x+1)^2}"),
            ("(-\\infty, 2] \\cup (3, 5)", "\\boxed{x \\le 2 \\text{ or } 3 < x < 5}"),
            (
                "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
                "\\boxed{\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}}",
            ),
            ("2\\sqrt{3}", "<think>\\sqrt{12}</think> <answer>\\sqrt{12}</answer>"),
            ("1,234,567", "1234567 hours and 3 minutes, or 5\\%"),
            ("B", "Answer: (B) because 2^{100!} mod 7 = \\log_{2} 8 e^{i\\pi}"),
        ];
        let policies = Policy::ALL.len();
        let input = |(i, (gold, response)): (usize, &(&str, &str))| {
            Input::new([
                ("gold", *gold),
                ("response", *response),
                ("policy", &i.rem_euclid(policies).to_string()),
            ])
        };
        Ok(pairs.iter().enumerate().map(input).collect())
    },
    open: |_| {
        Ok(Box::new(|input| {
            let (gold, response) = (input.text("gold"), input.text("response"));
            let choice = input.bytes("policy").iter().map(|byte| usize::from(*byte)).sum::<usize>();
            let (_, policy) = Policy::ALL[choice % Policy::ALL.len()];
            let first = grade(&gold, &response, policy);
            assert!(first.fuel <= FUEL, "{} of {FUEL} units of fuel", first.fuel);
            assert_eq!(first, grade(&gold, &response, policy), "a verdict depends on nothing but its input");
            first.equal
        }))
    },
};
