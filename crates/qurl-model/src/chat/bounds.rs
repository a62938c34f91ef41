//! What a chat template may use up. It comes with a model, so nobody vouches for it.
//!
//! - Instructions are counted (`fuel`), and so are levels of recursion: loops in loops end.
//! - Templates are compiled and rendered on a thread of their own with a stack for the largest program that
//!   the limits on the source allow, because parser, code generator and values recurse.
//! - What a single argument could blow up (an indentation of 10^12) is refused before it is computed.
//! - The text that comes out is bounded while it is written.
//! - What is left are values that double in few instructions, and comparisons of values that were made so:
//!   the thread is watched from outside ([`qurl_files::watched`]).

use std::io::{self, Write};
use std::time::Duration;

use minijinja::value::{Kwargs, Rest, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use qurl_files::Patience;

/// Bytes of a template (the longest published ones have some 30 thousand).
pub(super) const MAX_SOURCE: usize = 256 << 10;
/// Bytes of one `{{ .. }}` or `{% .. %}`, texts in quotes not counted.
const MAX_TAG: usize = 16 << 10;
/// Levels of macros and recursive loops.
const MAX_RECURSION: usize = 200;
/// Instructions of a rendering, and how many more each byte of the messages allows.
const FUEL: u64 = 500_000;
const FUEL_PER_BYTE: u64 = 4;
/// Bytes of a rendered conversation, beside those of its messages.
const MAX_OUTPUT: usize = 64 << 20;
/// Largest number that a filter takes as a width, a count or an indentation.
const MAX_ARGUMENT: i64 = 10_000;
/// Address space of the thread's stack; only what is used becomes memory.
const STACK: usize = 256 << 20;

/// When the caller of a rendering gives up.
pub(super) const PATIENCE: Patience =
    Patience { time: Duration::from_secs(20), memory: 1 << 30, stack: STACK };

/// Sets the limits that the template engine keeps by itself, and replaces what it leaves unbounded.
pub(super) fn set(environment: &mut Environment) {
    environment.set_recursion_limit(MAX_RECURSION);
    // A name with a space cannot be written in a template.
    environment.add_filter("builtin indent", filters::indent);
    environment.add_filter("builtin format", filters::format);
    environment.add_filter("builtin batch", filters::batch);
    environment.add_filter("builtin slice", filters::slice);
    environment.add_filter("builtin replace", filters::replace);
    for name in ["indent", "format", "batch", "slice", "replace"] {
        let builtin = format!("builtin {name}");
        environment.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            check_call(name, &args)?;
            state.apply_filter(&builtin, &args)
        });
    }
    environment.set_unknown_method_callback(|state, value, method, args| {
        if matches!(method, "format" | "replace") {
            let all: Vec<Value> = std::iter::once(value.clone()).chain(args.iter().cloned()).collect();
            check_call(method, &all)?;
        }
        minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
    });
}

/// Instructions for messages of so many bytes.
pub(super) fn fuel(message_bytes: usize) -> u64 {
    FUEL.saturating_add(FUEL_PER_BYTE.saturating_mul(message_bytes as u64))
}

/// A call of something that makes a text as long as its arguments say.
fn check_call(name: &str, args: &[Value]) -> Result<(), Error> {
    let refused = |what: String| Err(Error::new(ErrorKind::InvalidOperation, format!("{name}: {what}")));
    for arg in args {
        let named = Kwargs::try_from(arg.clone()).ok();
        let names = named.as_ref().map(|kwargs| kwargs.args().map(str::to_string).collect::<Vec<_>>());
        let named = names.into_iter().flatten().filter_map(|key| arg.get_attr(&key).ok());
        for number in named.chain([arg.clone()]) {
            if number.is_number() && i64::try_from(number.clone()).is_ok_and(|n| n > MAX_ARGUMENT) {
                return refused(format!("{number} is above {MAX_ARGUMENT}"));
            }
        }
    }
    let text = |at: usize| args.get(at).and_then(Value::as_str).unwrap_or_default();
    if name == "format"
        && let Some(width) = long_number(text(0))
    {
        return refused(format!("a width of {width} is above {MAX_ARGUMENT}"));
    }
    if name == "replace" {
        let matches = text(0).len() / text(1).len().max(1) + 1;
        if matches.saturating_mul(text(2).len()) > MAX_OUTPUT {
            return refused(format!("the result could have more than {MAX_OUTPUT} bytes"));
        }
    }
    Ok(())
}

/// A number in a text that is longer than a width may be.
fn long_number(text: &str) -> Option<&str> {
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let large = |digits: &&str| digits.parse::<i64>().is_ok_and(|n| n <= MAX_ARGUMENT);
    numbers.filter(|digits| !large(digits)).map(|digits| &digits[..digits.len().min(20)]).next()
}

/// What is wrong with the size of a source, and the line where. Comments, raw blocks, texts and brackets end
/// where they end for the template engine: where the two differed, an expression could be hidden from its
/// limit.
pub(super) fn check_source(source: &str) -> Result<(), (usize, String)> {
    if source.len() > MAX_SOURCE {
        return Err((1, format!("{} bytes, expected at most {MAX_SOURCE}", source.len())));
    }
    let bytes = source.as_bytes();
    let mut at = 0;
    while let Some(open) = find(bytes, at, b"{") {
        at = open + 2;
        let close = match bytes.get(open + 1) {
            Some(b'{') => b"}}",
            Some(b'%') => b"%}",
            Some(b'#') => {
                at = find(bytes, at, b"#}").map_or(bytes.len(), |end| end + 2);
                continue;
            }
            _ => {
                at = open + 1;
                continue;
            }
        };
        if close == b"%}"
            && let Some(raw) = skip_tag(&bytes[at..], b"raw")
        {
            at = end_of_raw(bytes, at + raw);
            continue;
        }
        let length = tag(bytes, &mut at, close);
        if length > MAX_TAG {
            let line = 1 + source[..open].matches('\n').count();
            return Err((line, format!("an expression of {length} bytes, expected at most {MAX_TAG}")));
        }
    }
    Ok(())
}

/// Where a pattern is next.
fn find(bytes: &[u8], from: usize, pattern: &[u8]) -> Option<usize> {
    let rest = bytes.get(from..)?;
    rest.windows(pattern.len()).position(|window| window == pattern).map(|found| from + found)
}

/// Bytes of a tag's body without its texts; `at` moves from its beginning to after its end. Inside of
/// brackets no tag ends.
fn tag(bytes: &[u8], at: &mut usize, close: &[u8]) -> usize {
    let (mut length, mut quote, mut brackets) = (0, None, 0_i64);
    while let Some(&byte) = bytes.get(*at) {
        match (quote, byte) {
            (Some(_), b'\\') => *at += 1,
            (Some(open), _) if byte == open => quote = None,
            (Some(_), _) => {}
            (None, _) if brackets == 0 && bytes[*at..].starts_with(close) => {
                *at += close.len();
                break;
            }
            (None, b'"' | b'\'') => quote = Some(byte),
            (None, _) => {
                length += 1;
                brackets += i64::from(matches!(byte, b'(' | b'[' | b'{'));
                brackets -= i64::from(matches!(byte, b')' | b']' | b'}'));
            }
        }
        *at += 1;
    }
    length
}

/// The length of what follows `{%` if that is a tag of one word, with its end.
fn skip_tag(after: &[u8], word: &[u8]) -> Option<usize> {
    let sign = |rest: &[u8]| usize::from(matches!(rest.first(), Some(b'-' | b'+')));
    let space = |rest: &[u8]| rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
    let mut at = sign(after);
    at += space(&after[at..]);
    at += after[at..].starts_with(word).then_some(word.len())?;
    at += space(&after[at..]);
    at += sign(&after[at..]);
    after[at..].starts_with(b"%}").then_some(at + 2)
}

/// The end of a raw block whose text begins at `at`.
fn end_of_raw(bytes: &[u8], mut at: usize) -> usize {
    while let Some(open) = find(bytes, at, b"{%") {
        at = open + 2;
        if let Some(end) = skip_tag(&bytes[at..], b"endraw") {
            return at + end;
        }
    }
    bytes.len()
}

/// A text that may not become longer than its limit.
pub(super) struct Output {
    text: Vec<u8>,
    max: usize,
}

impl Output {
    pub fn new(message_bytes: usize) -> Output {
        Output { text: Vec::new(), max: MAX_OUTPUT.saturating_add(message_bytes) }
    }

    pub fn into_text(self) -> String {
        String::from_utf8_lossy(&self.text).into_owned()
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > self.max {
            return Err(io::Error::other(format!("a text of more than {} bytes", self.max)));
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_measured_without_their_texts() {
        let long = "x".repeat(MAX_TAG + 1);
        assert!(check_source(&format!("{{{{ '{long}' }}}} {long} {{# {long} #}}")).is_ok());
        assert!(check_source(&format!("{{{{ 'it\\'s {long}' }}}}é{{ {{%é")).is_ok());
        assert!(check_source(&format!("{{% raw -%}}{{{{ {long}{{% endraw %}}")).is_ok());
        let (line, reason) = check_source(&format!("a\nb {{% set x = {long} %}}")).unwrap_err();
        assert_eq!(line, 2);
        assert!(reason.starts_with("an expression of 16395 bytes"), "{reason}");
        // What only looks like the beginning or the end of a text or a tag hides nothing.
        for start in
            ["{# {{ ' #}", "{%- raw %}{{ \"{%+ endraw -%}", "{{ {'a': {}}, ", "{{ '}}' ", "{# {% raw %} #}"]
        {
            for tag in ["{{ ", "{%- set x = "] {
                assert!(check_source(&format!("{start}{tag}{long}}}}} ' \"")).is_err(), "{start} {tag}");
            }
        }
    }
}
