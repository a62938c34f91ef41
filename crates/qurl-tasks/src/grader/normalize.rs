//! A textual normal form in the spirit of the Minerva and DAPO evaluations: two answers are equal when their
//! texts are after units, wrappers, dollar signs and spelling variants are gone. No mathematics happens here.

use super::extract;

/// Words that only say what is counted.
const COUNTED: &[&str] = &[
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "hours",
    "km",
    "units",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "childrentickets",
    "multiples",
    "miles",
    "percent",
    "sq",
    "days",
    "yards",
    "seconds",
];

/// The normal form of an answer.
pub fn final_answer(text: &str) -> String {
    let text = extract::without_special_tokens(extract::tail(text, 8192)).trim();
    let text = match extract::boxed(text) {
        Some((_, inner)) => inner,
        None => text.to_string(),
    };
    let mut answer = unwrapped(&text);
    if let Some((_, right)) = answer.rsplit_once('=') {
        answer = right.to_string();
    }
    for (from, to) in [
        ("\\$", ""),
        ("$", ""),
        ("\\%", ""),
        ("%", ""),
        ("^{\\circ}", ""),
        ("^\\circ", ""),
        ("\\left", ""),
        ("\\right", ""),
        ("\\!", ""),
        ("{,}", ","),
        ("tfrac", "frac"),
        ("dfrac", "frac"),
    ] {
        answer = answer.replace(from, to);
    }
    let words: Vec<&str> = answer.split_whitespace().filter(|w| !COUNTED.contains(w)).collect();
    let mut answer = words.concat();
    answer = braced_arguments(&answer);
    let digits = answer.replace(',', "");
    if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) {
        answer = digits;
    }
    answer.trim_end_matches('.').to_string()
}

/// Replaces `\text{x}`, `\textbf{x}` and the like by x.
fn unwrapped(text: &str) -> String {
    let mut out = text.to_string();
    for wrapper in ["\\textbf{", "\\text{", "\\mathrm{", "\\mbox{", "\\overline{"] {
        while let Some(at) = out.find(wrapper) {
            let inner = at + wrapper.len();
            let Some(end) = out[inner..].find('}') else { break };
            out = format!("{}{}{}", &out[..at], &out[inner..inner + end], &out[inner + end + 1..]);
        }
    }
    out
}

/// Writes `\frac12` as `\frac{1}{2}` and `\sqrt2` as `\sqrt{2}`.
fn braced_arguments(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let arguments = if rest.starts_with("\\frac") {
            2
        } else if rest.starts_with("\\sqrt") {
            1
        } else {
            0
        };
        if arguments == 0 {
            out.push(c);
            rest = &rest[c.len_utf8()..];
            continue;
        }
        out.push_str(&rest[..5]);
        rest = &rest[5..];
        for _ in 0..arguments {
            match rest.chars().next() {
                Some(c) if c.is_ascii_alphanumeric() => {
                    out.push('{');
                    out.push(c);
                    out.push('}');
                    rest = &rest[1..];
                }
                Some('{') => {
                    let end = rest.find('}').map_or(rest.len(), |e| e + 1);
                    out.push_str(&rest[..end]);
                    rest = &rest[end..];
                }
                _ => {}
            }
        }
    }
    out
}
