//! `tojson` as Hugging Face defines it: Python's `json.dumps` with its spaces after commas and colons,
//! where Jinja's own filter would write compactly and escape HTML.

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde_json::Value as Json;

/// Most spaces of one level, and bytes of one result.
const MAX_INDENT: usize = 64;
const MAX_BYTES: usize = 64 << 20;

/// The filter. `indent` spreads over lines; `ensure_ascii` and `sort_keys` are understood as in Python.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    options.assert_all_used()?;
    let refused = |what| Err(Error::new(ErrorKind::InvalidOperation, what));
    if let Some(indent) = indent.filter(|&indent| indent > MAX_INDENT) {
        return refused(format!("tojson: an indent of {indent}, expected at most {MAX_INDENT}"));
    }
    let json = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, format!("tojson: {error}")))?;
    let mut text = String::new();
    let style = Style { indent, sort_keys, ensure_ascii };
    style.write(&json, 0, &mut text);
    if text.len() > MAX_BYTES {
        return refused(format!("tojson: a result of more than {MAX_BYTES} bytes"));
    }
    Ok(Value::from_safe_string(text))
}

struct Style {
    indent: Option<usize>,
    sort_keys: bool,
    ensure_ascii: bool,
}

impl Style {
    /// Stops where the result is too long anyway.
    fn write(&self, value: &Json, depth: usize, out: &mut String) {
        match value {
            _ if out.len() > MAX_BYTES => {}
            Json::Array(items) => {
                let items = items.iter().map(|item| (None, item)).collect();
                self.write_items(['[', ']'], items, depth, out);
            }
            Json::Object(map) => {
                let mut items: Vec<_> = map.iter().map(|(key, item)| (Some(key), item)).collect();
                if self.sort_keys {
                    items.sort_by_key(|(key, _)| *key);
                }
                self.write_items(['{', '}'], items, depth, out);
            }
            Json::String(text) => self.write_text(text, out),
            scalar => out.push_str(&scalar.to_string()),
        }
    }

    fn write_items(
        &self,
        brackets: [char; 2],
        items: Vec<(Option<&String>, &Json)>,
        depth: usize,
        out: &mut String,
    ) {
        out.push(brackets[0]);
        let empty = items.is_empty();
        for (at, (key, item)) in items.into_iter().enumerate() {
            if at > 0 {
                out.push_str(if self.indent.is_some() { "," } else { ", " });
            }
            self.new_line(depth + 1, out);
            if let Some(key) = key {
                self.write_text(key, out);
                out.push_str(": ");
            }
            self.write(item, depth + 1, out);
        }
        if !empty {
            self.new_line(depth, out);
        }
        out.push(brackets[1]);
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn write_text(&self, text: &str, out: &mut String) {
        let quoted = Json::from(text).to_string();
        if !self.ensure_ascii {
            out.push_str(&quoted);
            return;
        }
        let mut units = [0; 2];
        for character in quoted.chars() {
            if character.is_ascii() {
                out.push(character);
                continue;
            }
            for unit in character.encode_utf16(&mut units) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
}
