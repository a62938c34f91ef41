//! Words: the comparison of last resort, and the first one, because equal texts are equal answers.

/// The answer with everything removed that only affects how it looks: white space, math delimiters, `\left`,
/// sizes and spacing. Equal results mean equal answers.
pub fn appearance(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text.trim().trim_end_matches('.');
    let mut gap = false;
    const INVISIBLE: [&str; 12] = [
        "\\left",
        "\\right",
        "\\displaystyle",
        "\\qquad",
        "\\quad",
        "\\!",
        "\\,",
        "\\;",
        "\\:",
        "\\ ",
        "\\(",
        "\\)",
    ];
    'outer: while let Some(c) = rest.chars().next() {
        if c == '\\' {
            for command in INVISIBLE {
                let Some(after) = rest.strip_prefix(command) else { continue };
                let longer = command.len() > 2 && after.starts_with(|c: char| c.is_ascii_alphabetic());
                if !longer {
                    rest = after;
                    continue 'outer;
                }
            }
            if let Some(after) = rest.strip_prefix("\\dfrac").or_else(|| rest.strip_prefix("\\tfrac")) {
                out.push_str("\\frac");
                rest = after;
                continue;
            }
        }
        if !c.is_whitespace() && c != '$' {
            // "4 2" is not "42".
            let split = c.is_ascii_digit() && gap && out.ends_with(|last: char| last.is_ascii_digit());
            if split {
                out.push(' ');
            }
            out.push(c);
        }
        gap = c.is_whitespace();
        rest = &rest[c.len_utf8()..];
    }
    out
}

/// The words of an answer in lower case, without markup, punctuation and leading articles. Empty when the
/// answer is not words.
pub fn words(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    const WRAPPERS: [&str; 9] = [
        "\\textbf",
        "\\textit",
        "\\textrm",
        "\\textnormal",
        "\\text",
        "\\mathrm",
        "\\mathbf",
        "\\mbox",
        "\\operatorname",
    ];
    'outer: while let Some(c) = rest.chars().next() {
        if c == '\\' {
            for wrapper in WRAPPERS {
                if let Some(after) = rest.strip_prefix(wrapper) {
                    rest = after;
                    continue 'outer;
                }
            }
        }
        plain.push(c);
        rest = &rest[c.len_utf8()..];
    }
    let is_markup =
        |c: char| matches!(c, '{' | '}' | '$' | '(' | ')' | '.' | ',' | '"' | '\'' | '*' | '-' | '!' | '~');
    let spaced: String = plain.chars().map(|c| if is_markup(c) { ' ' } else { c }).collect();
    // Digits are fine after a word: "October 30".
    let starts_with_word =
        spaced.split_whitespace().next().is_some_and(|w| w.len() >= 3 && w.chars().all(char::is_alphabetic));
    let is_prose = |c: char| c.is_alphabetic() || c.is_whitespace() || starts_with_word && c.is_ascii_digit();
    if !spaced.chars().all(is_prose) {
        return String::new();
    }
    let mut words: Vec<&str> = spaced.split_whitespace().collect();
    if words.len() > 1 && words[1].len() > 1 && matches!(words[0].to_lowercase().as_str(), "the" | "a" | "an")
    {
        words.remove(0);
    }
    // A single letter is a variable or a choice: its case matters.
    match words[..] {
        [word] if word.chars().count() == 1 => word.into(),
        _ => words.join(" ").to_lowercase(),
    }
}

/// The first word of a sentence that answers a yes-or-no question.
pub fn verdict(text: &str) -> Option<String> {
    let first = text.trim().split(|c: char| !c.is_alphabetic()).next()?.to_lowercase();
    matches!(first.as_str(), "yes" | "no" | "true" | "false").then_some(first)
}

/// The letter of a multiple-choice answer: `B`, `(B)`, `\text{(B)}`, `B. 12`, `(B) 12`; and what follows it.
pub fn choice(text: &str) -> Option<(char, String)> {
    let mut plain = text.trim().to_string();
    for wrapper in ["\\textbf{", "\\text{", "\\mathrm{", "\\mathbf{", "\\boxed{"] {
        plain = plain.replace(wrapper, "{");
    }
    let mut plain = plain.trim_matches(['$', ' ', '*']);
    for word in ["option", "choice", "answer"] {
        if plain.get(..word.len()).is_some_and(|start| start.eq_ignore_ascii_case(word)) {
            plain = plain[word.len()..].trim_start();
        }
    }
    let mut chars = plain.char_indices().skip_while(|(_, c)| matches!(c, '(' | '{' | '[' | ' ' | '*'));
    let (start, letter) = chars.next().filter(|(_, c)| c.is_ascii_uppercase())?;
    let rest = &plain[start + 1..];
    let closed = rest.trim_start_matches(['}', '*']);
    if closed.is_empty() {
        return Some((letter, String::new()));
    }
    let after = closed.strip_prefix([')', ']', '.', ':'])?;
    // `(E) + 1` is a sum, `(E) -1` a choice with its text.
    let said = after.trim_start_matches([' ', '}', '\\']);
    let operator = said.starts_with(['+', '*', '/', '=', '^', '_', '<', '>', '!']) || said.starts_with("- ");
    if operator {
        return None;
    }
    let opened = plain[..start].contains(['(', '[']);
    let separated = after.is_empty() || after.starts_with([' ', '}', '\\', '$', '*']);
    (opened || separated).then(|| (letter, after.trim_matches(['}', ' ', '*', '\\', ':', '.']).to_string()))
}
