//! Vocabulary: which words and commands mean what.
//!
//! Plain data, kept apart from the code that uses it: function names, Greek letters, units with their sizes,
//! number words, and the small English words that tell prose from a product of variables.

use super::expr::{Constant, Func};

/// A function by its LaTeX or plain name.
pub fn function(name: &str) -> Option<Func> {
    Some(match name {
        "sin" => Func::Sin,
        "cos" => Func::Cos,
        "tan" | "tg" => Func::Tan,
        "cot" | "ctg" => Func::Cot,
        "sec" => Func::Sec,
        "csc" | "cosec" => Func::Csc,
        "arcsin" | "asin" => Func::Asin,
        "arccos" | "acos" => Func::Acos,
        "arctan" | "atan" | "arctg" => Func::Atan,
        "arccot" | "acot" => Func::Acot,
        "sinh" => Func::Sinh,
        "cosh" => Func::Cosh,
        "tanh" => Func::Tanh,
        "arcsinh" | "arsinh" | "asinh" => Func::Asinh,
        "arccosh" | "arcosh" | "acosh" => Func::Acosh,
        "arctanh" | "artanh" | "atanh" => Func::Atanh,
        "ln" => Func::Ln,
        "log" | "lg" => Func::Log,
        "exp" => Func::Exp,
        "abs" => Func::Abs,
        "floor" => Func::Floor,
        "ceil" => Func::Ceil,
        "factorial" => Func::Factorial,
        "gcd" => Func::Gcd,
        "lcm" => Func::Lcm,
        "min" => Func::Min,
        "max" => Func::Max,
        "sgn" | "sign" => Func::Sign,
        "Re" => Func::Re,
        "Im" => Func::Im,
        "det" => Func::Det,
        _ => return None,
    })
}

/// The inverse that an exponent −1 on a function name means.
pub fn inverse(func: &Func) -> Option<Func> {
    Some(match func {
        Func::Sin => Func::Asin,
        Func::Cos => Func::Acos,
        Func::Tan => Func::Atan,
        Func::Cot => Func::Acot,
        Func::Sinh => Func::Asinh,
        Func::Cosh => Func::Acosh,
        Func::Tanh => Func::Atanh,
        _ => return None,
    })
}

const GREEK: &[(&str, char)] = &[
    ("alpha", 'α'),
    ("beta", 'β'),
    ("gamma", 'γ'),
    ("delta", 'δ'),
    ("epsilon", 'ε'),
    ("zeta", 'ζ'),
    ("eta", 'η'),
    ("theta", 'θ'),
    ("iota", 'ι'),
    ("kappa", 'κ'),
    ("lambda", 'λ'),
    ("mu", 'μ'),
    ("nu", 'ν'),
    ("xi", 'ξ'),
    ("rho", 'ρ'),
    ("sigma", 'σ'),
    ("tau", 'τ'),
    ("upsilon", 'υ'),
    ("phi", 'φ'),
    ("chi", 'χ'),
    ("psi", 'ψ'),
    ("omega", 'ω'),
    ("Gamma", 'Γ'),
    ("Delta", 'Δ'),
    ("Theta", 'Θ'),
    ("Lambda", 'Λ'),
    ("Xi", 'Ξ'),
    ("Sigma", 'Σ'),
    ("Phi", 'Φ'),
    ("Psi", 'Ψ'),
    ("Omega", 'Ω'),
];

/// A Greek letter by name; the variants of a letter share its name.
pub fn greek_name(name: &str) -> Option<&'static str> {
    let plain = name.strip_prefix("var").unwrap_or(name);
    GREEK.iter().find(|(n, _)| *n == plain).map(|(n, _)| *n)
}

/// The name of a Greek letter.
pub fn greek_char(c: char) -> Option<&'static str> {
    GREEK.iter().find(|(_, g)| *g == c).map(|(n, _)| *n)
}

/// Constants by plain name.
pub fn constant(name: &str) -> Option<Constant> {
    Some(match name {
        "pi" | "Pi" => Constant::Pi,
        "infinity" | "infty" | "inf" => Constant::Infinity,
        _ => return None,
    })
}

/// Small words that are English before they are products of variables.
pub fn is_small_word(word: &str) -> bool {
    matches!(
        word,
        "It" | "So" | "We" | "If" | "Is" | "The" | "No" | "Yes" | "For" | "Let" | "And" | "Or" | "Then"
    ) || matches!(
        word,
        "is" | "are"
            | "the"
            | "and"
            | "or"
            | "of"
            | "to"
            | "so"
            | "we"
            | "it"
            | "its"
            | "at"
            | "by"
            | "an"
            | "as"
            | "if"
            | "no"
            | "yes"
            | "not"
            | "all"
            | "per"
            | "in"
            | "for"
            | "odd"
            | "was"
            | "has"
            | "can"
            | "but"
            | "let"
            | "any"
            | "one"
            | "two"
            | "six"
            | "ten"
            | "may"
            | "day"
            | "on"
            | "does"
            | "be"
            | "both"
            | "new"
            | "sum"
            | "you"
            | "our"
            | "his"
            | "her"
            | "get"
    )
}

/// Size of a unit: its dimension and how many of the base unit of that dimension it holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnitSize {
    /// Units of the same dimension can be converted.
    pub dimension: &'static str,
    /// Numerator of the size in base units.
    pub numerator: i64,
    /// Denominator of the size in base units.
    pub denominator: i64,
}

const UNITS: &[(&[&str], &str, i64, i64)] = &[
    (&["mm", "millimeter", "millimetre"], "length", 1, 1000),
    (&["cm", "centimeter", "centimetre"], "length", 1, 100),
    (&["m", "meter", "metre"], "length", 1, 1),
    (&["km", "kilometer", "kilometre"], "length", 1000, 1),
    (&["in", "inch", "inche"], "imperial length", 1, 1),
    (&["ft", "foot", "feet"], "imperial length", 12, 1),
    (&["yd", "yard"], "imperial length", 36, 1),
    (&["mi", "mile"], "imperial length", 63_360, 1),
    (&["mg", "milligram"], "mass", 1, 1000),
    (&["g", "gram"], "mass", 1, 1),
    (&["kg", "kilogram"], "mass", 1000, 1),
    (&["oz", "ounce"], "imperial mass", 1, 1),
    (&["lb", "pound"], "imperial mass", 16, 1),
    (&["s", "sec", "second"], "time", 1, 1),
    (&["min", "minute"], "time", 60, 1),
    (&["h", "hr", "hour"], "time", 3600, 1),
    (&["day"], "time", 86_400, 1),
    (&["week"], "time", 604_800, 1),
    (&["month"], "months", 1, 1),
    (&["year", "yr"], "months", 12, 1),
    (&["ml", "milliliter", "millilitre"], "volume", 1, 1000),
    (&["l", "liter", "litre"], "volume", 1, 1),
    (&["cup"], "imperial volume", 1, 1),
    (&["pint", "pt"], "imperial volume", 2, 1),
    (&["quart", "qt"], "imperial volume", 4, 1),
    (&["gallon", "gal"], "imperial volume", 16, 1),
    (&["cent"], "money", 1, 100),
    (&["dollar", "usd"], "money", 1, 1),
    (&["mph"], "speed mph", 1, 1),
    (&["kph", "kmh"], "speed kmh", 1, 1),
    (&["degree", "deg"], "degree", 1, 1),
];

/// Size of a unit given as one lower-case word, singular or plural.
pub fn unit_size(word: &str) -> Option<UnitSize> {
    let singular = word.strip_suffix('s').filter(|w| w.len() > 1);
    UNITS.iter().find_map(|(names, dimension, numerator, denominator)| {
        (names.contains(&word) || singular.is_some_and(|s| names.contains(&s))).then_some(UnitSize {
            dimension,
            numerator: *numerator,
            denominator: *denominator,
        })
    })
}

/// Short unit words that are read as units when they follow a number.
pub fn is_short_unit(word: &str) -> bool {
    word.len() >= 2 && unit_size(word).is_some()
        || matches!(
            word,
            "Hz" | "kHz" | "MHz" | "eV" | "keV" | "kW" | "nm" | "pct" | "am" | "pm" | "kJ" | "mol" | "sq"
        )
}

/// A small whole number in English words.
pub fn number_word(text: &str) -> Option<i64> {
    const ONES: [&str; 20] = [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
    ];
    const TENS: [&str; 8] = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];
    let small = |w: &str| ONES.iter().position(|o| *o == w).map(|i| i as i64);
    let tens = |w: &str| TENS.iter().position(|t| *t == w).map(|i| (i as i64 + 2) * 10);
    let mut parts = text.split([' ', '-']).filter(|w| !w.is_empty());
    let (first, second, rest) = (parts.next()?, parts.next(), parts.next());
    match (second, rest) {
        (None, None) => small(first).or_else(|| tens(first)),
        (Some("hundred"), None) => small(first).map(|n| n * 100),
        (Some("thousand"), None) => small(first).or_else(|| tens(first)).map(|n| n * 1000),
        (Some(ones), None) => Some(tens(first)? + small(ones).filter(|n| (1..10).contains(n))?),
        _ => None,
    }
}
