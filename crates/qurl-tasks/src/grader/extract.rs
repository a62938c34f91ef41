//! Finding the answer in a response: `\boxed{}`, `#### x`, `Answer: x`, `<answer>` tags, text after
//! `</think>`, the last formula, the last number. All scans are linear, whatever the text.

use super::expr::Expr;
use super::lexer::Reading;
use super::parser::parse;

/// Longest text between two boxes that still joins them.
const MAX_GAP: usize = 80;

/// An answer found in a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The answer.
    pub answer: String,
    /// It is only the last number of a text without any marker: right for numeric answers only.
    pub last_number: bool,
}

/// The end of the text, cut at a character.
pub fn tail(text: &str, bytes: usize) -> &str {
    let mut start = text.len().saturating_sub(bytes);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

/// The last `count` characters.
pub fn tail_chars(text: &str, count: usize) -> &str {
    match text.char_indices().rev().nth(count.saturating_sub(1)) {
        Some((start, _)) => &text[start..],
        None => text,
    }
}

/// Cuts off chat markup such as `<|im_end|>` and all that follows it.
pub fn without_special_tokens(text: &str) -> &str {
    let mut end = text.len();
    for marker in ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>", "<|end|>", "<｜end▁of▁sentence｜>"]
    {
        if let Some(at) = text.find(marker) {
            end = end.min(at);
        }
    }
    if let Some(at) = text[..end].find("<|im_start|>").filter(|at| !text[..*at].trim().is_empty()) {
        end = at;
    }
    &text[..end]
}

/// The text after the last end-of-thought marker, if there is one.
pub fn after_thought(text: &str) -> Option<&str> {
    let ends = ["</think>", "###Response"].iter().filter_map(|m| text.rfind(m).map(|at| at + m.len()));
    ends.max().map(|at| &text[at..])
}

/// A box: where its command starts and where its content lies.
struct BoxedSpan {
    start: usize,
    content: std::ops::Range<usize>,
    end: usize,
}

/// All boxes that are not inside another one, in order. One pass with a stack of open braces.
fn boxes(text: &str) -> Vec<BoxedSpan> {
    let bytes = text.as_bytes();
    let mut open: Vec<(usize, Option<usize>)> = Vec::new();
    let mut found: Vec<BoxedSpan> = Vec::new();
    let mut i = 0;
    while i < bytes.len() {
        match bytes[i] {
            b'\\' => {
                // An escaped brace is not a group; two backslashes are one character.
                i += if matches!(bytes.get(i + 1), Some(b'{' | b'}' | b'\\')) { 2 } else { 1 };
                continue;
            }
            b'{' => open.push((i, box_command(text, i))),
            b'}' => {
                if let Some((brace, Some(start))) = open.pop() {
                    while found.last().is_some_and(|inner: &BoxedSpan| inner.start > start) {
                        found.pop();
                    }
                    found.push(BoxedSpan { start, content: brace + 1..i, end: i + 1 });
                }
            }
            _ => {}
        }
        i += 1;
    }
    found.retain(|b| !text[b.content.clone()].trim().is_empty());
    found
}

/// Where the `\boxed` before a brace starts, if there is one.
fn box_command(text: &str, brace: usize) -> Option<usize> {
    let before = text[..brace].trim_end_matches(' ');
    let name = ["boxed", "fbox", "framebox"].iter().find(|name| before.ends_with(*name))?;
    let start = before.len() - name.len();
    let slashes = before[..start].bytes().rev().take_while(|b| *b == b'\\').count();
    (slashes > 0).then(|| start - slashes)
}

/// Whether the text between two boxes only connects them: "and", commas, `y_2 =`, "for part (a) and".
fn connects(gap: &str) -> bool {
    if gap.len() > MAX_GAP {
        return false;
    }
    let mut plain = gap.to_lowercase();
    for markup in
        ["\\text", "\\quad", "\\qquad", "\\mbox", "\\(", "\\)", "\\,", "\\ ", "\\;", "$", "{", "}", "&", "**"]
    {
        plain = plain.replace(markup, " ");
    }
    if plain.contains(". ") || plain.contains('\n') && plain.contains("\n\n") {
        return false;
    }
    let spaced = plain.replace(',', " , ").replace(';', " ; ");
    let mut joined = false;
    for word in spaced.split_whitespace() {
        match word {
            "and" | "or" | "," | ";" => joined = true,
            "for" | "part" | "parts" | "with" | "case" | "respectively" | "=" | ":" => {}
            w if w.bytes().all(|b| b == b'+') => joined = true,
            w if w.trim_matches(['(', ')']).len() <= 1 => {}
            w if w.len() <= 6 && w.contains('_') => {}
            _ => return false,
        }
    }
    joined
}

/// The content of the last box, or of the last run of boxes that belong together, and where it starts.
pub fn boxed(text: &str) -> Option<(usize, String)> {
    let spans = boxes(text);
    let mut first = spans.len().checked_sub(1)?;
    while first > 0 && connects(&text[spans[first - 1].end..spans[first].start]) {
        first -= 1;
    }
    let contents: Vec<&str> = spans[first..].iter().map(|b| text[b.content.clone()].trim()).collect();
    Some((spans[first].start, contents.join(", ")))
}

/// `\boxed 42` without braces.
fn unbraced_box(text: &str) -> Option<String> {
    let at = text.rfind("\\boxed ")?;
    let rest = text[at + 7..].trim_start();
    let end = rest.find(|c: char| c.is_whitespace() || c == '$').unwrap_or(rest.len());
    let word = rest[..end].trim_end_matches(['.', ',']);
    (!word.is_empty() && !word.starts_with('{')).then(|| word.to_string())
}

/// The content of the last `<answer>` element.
pub fn tagged(text: &str) -> Option<&str> {
    let end = text.rfind("</answer>")?;
    let start = text[..end].rfind("<answer>")? + "<answer>".len();
    Some(text[start..end].trim())
}

/// The content of the last pair of square brackets on one line.
pub fn bracketed(text: &str) -> Option<&str> {
    let end = text.rfind(']')?;
    let start = text[..end].rfind('[')? + 1;
    Some(text[start..end].trim()).filter(|s| !s.is_empty() && !s.contains('\n'))
}

/// The number of the last `#### number`: an optional minus, then digits, points and commas, right after one
/// space.
pub fn hash_number(text: &str) -> Option<&str> {
    const MARK: &str = "#### ";
    let number = |at: usize| {
        let rest = &text[at + MARK.len()..];
        let digits = rest.strip_prefix('-').unwrap_or(rest);
        let length = digits.find(|c: char| !matches!(c, '0'..='9' | '.' | ',')).unwrap_or(digits.len());
        (length > 0).then(|| &rest[..rest.len() - digits.len() + length])
    };
    text.rmatch_indices(MARK).find_map(|(at, _)| number(at))
}

/// The rest of the last line that has an answer marker.
pub fn answer_line(text: &str) -> Option<&str> {
    let lower = text.to_ascii_lowercase();
    let after = |marker: &str| lower.rfind(marker).map(|at| at + marker.len());
    let start = ["answer:", "answer：", "答案:", "答案："].iter().filter_map(|m| after(m)).max()?;
    let line = text[start..].lines().next().unwrap_or("");
    let line = line.trim().trim_start_matches('*').trim();
    Some(line).filter(|l| !l.is_empty())
}

/// The sentence that starts at `start`: up to a line break, or a full stop before a space.
fn sentence(text: &str, start: usize) -> &str {
    let rest = text[start..].trim_start_matches([':', '*', ' ', '=']);
    let rest = rest.trim_start();
    let mut end = rest.len();
    let bytes = rest.as_bytes();
    for (i, b) in bytes.iter().enumerate() {
        let stop = match b {
            b'\n' => true,
            b'.' => bytes.get(i + 1).is_none_or(|next| next.is_ascii_whitespace()),
            _ => false,
        };
        if stop {
            end = i;
            break;
        }
    }
    rest[..end].trim_end_matches(['*', ' '])
}

/// The last formula between math delimiters: where it ends and what it is.
fn last_formula(text: &str) -> Option<(usize, &str)> {
    let mut last = None;
    let mut i = 0;
    let pairs = [("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")];
    while i < text.len() {
        let rest = &text[i..];
        let escaped_dollar = rest.starts_with("\\$");
        let pair = pairs.iter().find(|(open, _)| rest.starts_with(open) && !escaped_dollar);
        match pair {
            Some((open, close)) => {
                let inner = &rest[open.len()..];
                let Some(length) = inner.find(close) else { break };
                if !inner[..length].trim().is_empty() {
                    last = Some((i + open.len() + length + close.len(), inner[..length].trim()));
                }
                i += open.len() + length + close.len();
            }
            None => i += if escaped_dollar { 2 } else { rest.chars().next().map_or(1, char::len_utf8) },
        }
    }
    last
}

/// The last number that stands by itself, with its sign, fraction and percent sign: where it starts and what
/// it is.
pub(super) fn last_number(text: &str) -> Option<(usize, &str)> {
    let bytes = text.as_bytes();
    let mut end = bytes.len();
    loop {
        let last_digit = bytes[..end].iter().rposition(u8::is_ascii_digit)?;
        let is_part = |b: u8| b.is_ascii_digit() || matches!(b, b'.' | b',' | b'/');
        let mut start = last_digit;
        while start > 0 && is_part(bytes[start - 1]) {
            start -= 1;
        }
        while start < last_digit && matches!(bytes[start], b',' | b'/')
            || bytes[start] == b'.' && !bytes[start + 1].is_ascii_digit()
        {
            start += 1;
        }
        let inside_word = start > 0 && bytes[start - 1].is_ascii_alphabetic();
        if !inside_word {
            let signed = start > 0 && bytes[start - 1] == b'-';
            let sign_is_free =
                start < 2 || !(bytes[start - 2].is_ascii_alphanumeric() || bytes[start - 2] == b')');
            if signed && sign_is_free {
                start -= 1;
            }
            let mut stop = last_digit + 1;
            let rest = &text[stop..];
            if rest.starts_with('%') || rest.starts_with("\\%") {
                stop += if rest.starts_with('%') { 1 } else { 2 };
            }
            return Some((start, &text[start..stop]));
        }
        end = start;
        if end == 0 {
            return None;
        }
    }
}

/// What joins a number with what stands before or after it.
const OPERATORS: [char; 16] =
    ['+', '*', '/', '×', '÷', '·', '&', '±', '∓', '↑', '√', '∑', '∫', '⋅', '∗', '∕'];
/// What says that the number after it is not the value.
const RELATIONS: [char; 4] = ['<', '≤', '≥', '≠'];

/// Whether the last number of a text that could not be read stands in prose. In a formula it is a part of
/// something whose value nobody knows: the 1 of `9^{9^{9^9}} + 1` is no answer.
fn stands_alone(text: &str, number: &str) -> bool {
    let command = |at: usize| text[at + 1..].starts_with(|c: char| c.is_ascii_alphabetic());
    let in_tex = text.contains(['^', '{']) || text.match_indices('\\').any(|(at, _)| command(at));
    let Some(at) = text.rfind(number) else { return false };
    let before = text[..at].trim_end();
    let after = text[at + number.len()..].trim_start();
    let bold = before.ends_with("**") && after.starts_with("**");
    let operand = |c: char| c.is_alphanumeric() || matches!(c, ')' | ']');
    let minus = before.strip_suffix(['-', '−']).is_some_and(|left| left.trim_end().ends_with(operand));
    // "x => 1", "-> 1", a quoted line and a tag are prose; "x > 1" is not.
    let above = before
        .strip_suffix('>')
        .is_some_and(|left| left.trim_end() != left && left.trim_end().ends_with(operand));
    let joined = before.ends_with(OPERATORS) || after.starts_with(OPERATORS) || above;
    let joined = joined || before.ends_with(RELATIONS) || after.starts_with('!');
    !in_tex && (bold || !joined && !minus)
}

/// The text without "Therefore," and its kin.
fn without_discourse(text: &str) -> &str {
    const WORDS: [&str; 7] = ["therefore", "thus", "hence", "so", "then", "finally", "answer"];
    let end = text.find([',', ' ', ':']).unwrap_or(text.len());
    let first = &text[..end];
    if WORDS.iter().any(|w| first.eq_ignore_ascii_case(w)) {
        return text[end..].trim_start_matches([',', ' ', ':']);
    }
    text
}

fn is_formula(text: &str) -> bool {
    parse(text, Reading::Usual).is_ok_and(|e| !matches!(e, Expr::Text(_)))
}

/// Reads a sentence or a text without markers: all of it, what follows the last "is", the last formula or
/// number.
fn from_prose(text: &str) -> Option<Found> {
    let found = |answer: &str| Some(Found { answer: answer.into(), last_number: false });
    let text = without_discourse(text.trim());
    if text.is_empty() {
        return None;
    }
    let sentence = || text.split_whitespace().count() > 3 && text.contains(" is ");
    match parse(text, Reading::Usual) {
        // Words that say "... is B": what follows is the answer.
        Ok(Expr::Text(_)) if sentence() => {
            let said = text.rsplit(" is ").next().unwrap_or(text);
            return found(said.trim().trim_end_matches('.'));
        }
        Ok(_) => return found(text),
        Err(_) => {}
    }
    let after_verb = [" is ", " are ", " equals "]
        .iter()
        .filter_map(|verb| text.rfind(verb).map(|at| at + verb.len()))
        .max();
    if let Some(rest) = after_verb.map(|at| text[at..].trim().trim_end_matches('.'))
        && is_formula(rest)
    {
        return found(rest);
    }
    let formula = last_formula(text);
    let number = last_number(text).filter(|(start, number)| {
        stands_alone(&text[formula.map_or(0, |(end, _)| end).min(*start)..], number)
    });
    match (formula, number) {
        (Some((end, _)), Some((start, number))) if start >= end => {
            Some(Found { answer: number.into(), last_number: true })
        }
        (Some((_, formula)), _) => found(formula),
        (None, Some((_, number))) => Some(Found { answer: number.into(), last_number: true }),
        (None, None) => found(text),
    }
}

/// Finds the answer of a response by the conventions that most projects share.
///
/// The latest of a box, a "final answer", a `####` line and an `<answer>` element wins; then "answer is" and
/// "answer:"; then the text itself.
pub fn answer(response: &str) -> Option<Found> {
    let visible = without_special_tokens(response);
    let text = after_thought(visible).filter(|rest| !rest.trim().is_empty()).unwrap_or(visible);
    let found = |answer: &str| Some(Found { answer: answer.trim().into(), last_number: false });
    let lower = text.to_ascii_lowercase();
    let boxed = boxed(text);
    let box_start = boxed.as_ref().map_or(0, |(start, _)| *start);
    let after = |marker: &str| lower.rfind(marker).map(|at| at + marker.len());
    let strong =
        ["final answer is", "final answer:", "final answer**", "####"].iter().filter_map(|m| after(m)).max();
    if let Some(content) = tagged(text).filter(|c| !c.is_empty()) {
        return match self::boxed(content) {
            Some((_, inner)) => found(&inner),
            None => from_prose(content),
        };
    }
    if let Some(at) = strong.filter(|at| boxed.is_none() || *at > box_start) {
        let said = sentence(text, at);
        if let Some(found) = from_prose(said) {
            return Some(found);
        }
    }
    if let Some((_, content)) = boxed {
        return found(&content);
    }
    if let Some(content) = unbraced_box(text) {
        return found(&content);
    }
    let weak = ["answer is", "answer:", "answers are", "answer：", "答案是", "答案:", "答案："];
    if let Some(at) = weak.iter().filter_map(|m| after(m)).max()
        && let Some(found) = from_prose(sentence(text, at))
    {
        return Some(found);
    }
    from_prose(text)
}
