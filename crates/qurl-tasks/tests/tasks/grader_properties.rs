//! Properties on random input: the grader always ends within its budget, and numbers are equal exactly when
//! their values are, however they are written.

use std::time::{Duration, Instant};

use qurl_tasks::grader::budget::FUEL;
use qurl_tasks::grader::{Policy, equivalent, grade};
use qurl_tasks::rng::Rng;

const PIECES: &[&str] = &[
    "\\frac",
    "\\sqrt",
    "\\left(",
    "\\right)",
    "{",
    "}",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "\\{",
    "\\}",
    "^",
    "_",
    "^{",
    "_{",
    "+",
    "-",
    "*",
    "/",
    "\\cdot",
    "\\times",
    "=",
    "<",
    "\\le",
    "\\ge",
    "\\ne",
    "\\in",
    "\\cup",
    "\\cap",
    "\\setminus",
    "\\pm",
    "\\mp",
    ",",
    ";",
    ":",
    "|",
    "\\mid",
    "!",
    "%",
    "\\%",
    "^\\circ",
    "'",
    "x",
    "y",
    "n",
    "e",
    "i",
    "f",
    "A",
    "B",
    "\\pi",
    "\\theta",
    "\\infty",
    "\\sin",
    "\\cos",
    "\\log_2",
    "\\ln",
    "\\lfloor",
    "\\rfloor",
    "\\lceil",
    "\\rceil",
    "\\binom",
    "\\sum_{k=1}^{9}",
    "\\prod_{k=1}^{99}",
    "\\int",
    "\\lim_{x\\to 0}",
    "\\begin{pmatrix}",
    "\\end{pmatrix}",
    "&",
    "\\\\",
    "\\text{",
    "\\mathrm{",
    "\\boxed{",
    "and",
    "or",
    "cm",
    "percent",
    "answer is ",
    "#### ",
    "<answer>",
    "</answer>",
    "</think>",
    "$",
    "$$",
    "\\(",
    "\\)",
    " ",
    "\n",
    "0",
    "1",
    "2",
    "3",
    "9",
    "10",
    "12345",
    "0.5",
    "1,234",
    "1e5",
    "999999999",
    "²",
    "√",
    "π",
    "½",
    "→",
    "é",
    "答案",
    "\u{0}",
    "\\",
    "\\\\frac",
    "\\overline{3}",
    "0.\\overline{3}",
    "\\operatorname{lcm}",
    "\\pmod{7}",
    "\\mod",
    "\\emptyset",
    "\\mathbb{R}",
    "\\$",
    "kg",
    "k",
    "9^{9^{9",
    "\\sqrt[",
    "(x+1)^{40}",
    "(x+y+z)^9",
    "100!",
    "2000!",
    "10^{1000}",
];

const ANSWERS: &[&str] = &[
    "42",
    "-\\frac{3}{4}",
    "1,234,567",
    "3\\sqrt{13}",
    "\\frac{5\\sqrt{42}}{27}",
    "(3, \\frac{\\pi}{2})",
    "[-2, 7)",
    "(-\\infty,1)\\cup(2,3]",
    "x^2+2x+1",
    "y = 2x + 3",
    "\\begin{pmatrix} 1 & 0 \\\\ 0 & 1 \\end{pmatrix}",
    "\\text{odd}",
    "\\text{(B)}",
    "28\\%",
    "\\$32,\\!348.50",
    "10\\text{ cm}^2",
    "\\{1\\pm\\sqrt{5},-2\\}",
    "-2 \\le x \\le 7",
    "2.5 \\times 10^{-3}",
    "\\sin^2 x + \\cos(2x)",
    "\\binom{2n}{n}",
    "204_5",
    "e^{i\\pi}",
    "1:2:3",
    "\\frac{1}{b-a}\\left(e^{-at}-e^{-bt}\\right)",
    "N \\equiv 672 \\pmod{1000}",
    "The answer is \\boxed{7}.",
    "#### 18",
];

fn random_text(rng: &mut Rng) -> String {
    let count = 1 + rng.below(60);
    (0..count).map(|_| *rng.pick(PIECES)).collect()
}

fn mutated_answer(rng: &mut Rng) -> String {
    let mut chars: Vec<char> = rng.pick(ANSWERS).chars().collect();
    for _ in 0..1 + rng.below(4) {
        let at = rng.below(chars.len() as u64 + 1) as usize;
        match rng.below(4) {
            0 if at < chars.len() => {
                chars.remove(at);
            }
            1 if at < chars.len() => {
                let from = rng.below(chars.len() as u64) as usize;
                chars[at] = chars[from];
            }
            2 => {
                let piece: Vec<char> = rng.pick(PIECES).chars().collect();
                chars.splice(at..at, piece);
            }
            _ => {
                let copy = chars.clone();
                chars.splice(at..at, copy);
                chars.truncate(400);
            }
        }
    }
    chars.into_iter().collect()
}

#[test]
fn random_and_mutated_answers_end_within_the_budget() {
    let mut rng = Rng::new(&[2024]);
    let mut slowest = (Duration::ZERO, String::new(), String::new());
    let mut most_fuel = 0;
    let started = Instant::now();
    for round in 0..100_000 {
        let gold = if round % 4 == 0 { random_text(&mut rng) } else { mutated_answer(&mut rng) };
        let pred = match round % 3 {
            0 => random_text(&mut rng),
            1 => mutated_answer(&mut rng),
            _ => format!("{gold} "),
        };
        let (_, policy) = Policy::ALL[if round % 5 == 0 { rng.below(10) as usize } else { 0 }];
        let clock = Instant::now();
        let verdict = grade(&gold, &pred, policy);
        let took = clock.elapsed();
        assert!(verdict.fuel <= FUEL);
        most_fuel = most_fuel.max(verdict.fuel);
        if took > slowest.0 {
            slowest = (took, gold, pred);
        }
    }
    println!(
        "100,000 gradings in {:.2?}; most fuel {most_fuel} of {FUEL}; slowest {:.2?}: {:?} against {:?}",
        started.elapsed(),
        slowest.0,
        slowest.1,
        slowest.2
    );
}

#[test]
fn hostile_answers_end_and_are_not_equal() {
    let deep = |open: &str, close: &str, n: usize| format!("{}1{}", open.repeat(n), close.repeat(n));
    let hostile = [
        "9^{9^{9^9}}".to_string(),
        "9^9^9^9^9".to_string(),
        "10^{10^{10}}".to_string(),
        "1e999999999".to_string(),
        "((x+y+z+w)^{30})^{30}".to_string(),
        "(x+y+z+w+u+v)^{40}".to_string(),
        "99999999999!".to_string(),
        "((2000!)!)!".to_string(),
        "\\binom{10^9}{5\\cdot 10^8}".to_string(),
        "\\sum_{k=1}^{10^{12}} k".to_string(),
        "\\sum_{a=1}^{200}\\sum_{b=1}^{200}\\sum_{c=1}^{200} abc".to_string(),
        "{".repeat(1_000_000),
        "}".repeat(1_000_000),
        "\\boxed{".repeat(150_000),
        "\\boxed{}".repeat(100_000),
        "$".repeat(1_000_000),
        "(".repeat(1_000_000),
        "\\frac".repeat(200_000),
        "answer is ".repeat(100_000),
        "-".repeat(100_000) + "1",
        "1,".repeat(100_000),
        "1+".repeat(1500) + "1",
        "9".repeat(1_000_000),
        "9".repeat(1400) + "^{9999}",
        deep("(", ")", 30),
        deep("(", ")", 2000),
        deep("{", "}", 2000),
        deep("\\sqrt{", "}", 500),
        deep("\\frac{1}{", "}", 300),
        deep("\\left[", "\\right]", 200),
        deep("\\text{", "}", 600),
        deep("|", "|", 500),
        deep("x^{", "}", 900),
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}".repeat(60),
        "!".repeat(2000) + "5!!!!!!!!!!!!!!!!!",
        (0..300).map(|i| format!("(x+{i})")).collect::<String>(),
        (0..200).map(|i| format!("\\sqrt{{{i}}}+")).collect::<String>() + "1",
        (0..250).map(|i| format!("[{i},{}]\\cup", i + 1)).collect::<String>() + "[0,1]",
        "\u{0}\u{1}\u{fffd}".repeat(1000),
        "\\sin(".repeat(35) + "x" + &")".repeat(35),
    ];
    for pred in &hostile {
        let clock = Instant::now();
        let verdict = grade("17", pred, Policy::Equivalence);
        let shown: String = pred.chars().take(30).collect();
        assert!(!verdict.equal || shown.contains("17"), "{shown} is not 17");
        assert!(verdict.fuel <= FUEL);
        let twice = grade(pred, &format!("\\boxed{{{pred} }}"), Policy::Equivalence);
        assert!(twice.fuel <= FUEL);
        println!("{:>10.2?}  {shown}", clock.elapsed());
    }
}

/// A fraction spelled in one of many ways.
fn spelled(rng: &mut Rng, numerator: i64, denominator: i64) -> String {
    let scale = rng.between(1, 5);
    let (n, d) = (numerator * scale, denominator * scale);
    let sign = if n < 0 { "-" } else { "" };
    let whole = numerator.abs() / denominator;
    let rest = numerator.abs() % denominator;
    match rng.below(8) {
        0 => format!("\\frac{{{n}}}{{{d}}}"),
        1 => format!("{n}/{d}"),
        2 => format!("{sign}\\dfrac{{{}}}{{{d}}}", n.abs()),
        3 if rest != 0 && whole != 0 => format!("{sign}{whole}\\frac{{{rest}}}{{{denominator}}}"),
        4 if 1000 % denominator == 0 => {
            let thousandths = numerator.abs() * (1000 / denominator);
            format!("{sign}{}.{:03}", thousandths / 1000, thousandths % 1000)
        }
        5 => format!("$x = \\frac{{{n}}}{{{d}}}$"),
        6 => format!(
            "{} + {}/{denominator}",
            numerator.div_euclid(denominator),
            numerator.rem_euclid(denominator)
        ),
        _ => format!("\\left({n} \\div {d}\\right)"),
    }
}

#[test]
fn numbers_are_equal_exactly_when_their_values_are() {
    let mut rng = Rng::new(&[7]);
    for _ in 0..20_000 {
        let denominators = [1, 2, 3, 4, 5, 7, 8, 10, 20, 125];
        let (n1, d1) = (rng.between(-400, 400), *rng.pick(&denominators));
        let (n2, d2) = match rng.below(3) {
            0 => (n1, d1),
            1 => (n1 + rng.between(-1, 1), d1),
            _ => (rng.between(-400, 400), *rng.pick(&denominators)),
        };
        let (a, b) = (spelled(&mut rng, n1, d1), spelled(&mut rng, n2, d2));
        assert_eq!(equivalent(&a, &b), n1 * d2 == n2 * d1, "{a}   |   {b}");
    }
}

#[test]
fn polynomials_are_equal_exactly_when_their_coefficients_are() {
    let mut rng = Rng::new(&[8]);
    for _ in 0..3_000 {
        let coefficients: Vec<i64> = (0..4).map(|_| rng.between(-9, 9)).collect();
        let plain = |c: &[i64]| {
            let terms = c.iter().enumerate().map(|(i, c)| format!("{c:+}x^{i}y^{{{}}}", 3 - i));
            terms.collect::<String>()
        };
        let mut shuffled: Vec<(usize, i64)> = coefficients.iter().copied().enumerate().collect();
        shuffled.rotate_left(rng.below(4) as usize);
        let factored: String = shuffled
            .iter()
            .map(|(i, c)| format!("+\\frac{{{}xy^{{{}}}}}{{3}}x^{{{}}}", 3 * c, 3 - i, *i as i64 - 1))
            .collect();
        let gold = plain(&coefficients);
        assert!(equivalent(&gold, &factored), "{gold}   |   {factored}");
        let mut other = coefficients.clone();
        let at = rng.below(4) as usize;
        other[at] += 1;
        assert!(!equivalent(&gold, &plain(&other)));
    }
}
