//! How much longer a tokenizer makes a text before it looks up tokens.
//!
//! Normalizers and decoders replace parts of a text by others. One that puts a thousand letters in place of
//! each, three times over, asks for more memory than there is; published ones at most triple the bytes.

use serde_json::Value;

/// Most bytes that one byte of a text may become.
const MAX_GROWTH: f64 = 1024.0;
/// Most bytes that are put before a text, or between words.
const MAX_TEXT: usize = 4096;

/// What in a `tokenizer.json` makes texts too long, if anything.
pub(super) fn too_much(json: &Value) -> Option<String> {
    ["normalizer", "pre_tokenizer", "decoder"].iter().find_map(|part| {
        let (mut growth, mut longest) = (1.0, 0);
        walk(json.get(part)?, &mut growth, &mut longest);
        if longest > MAX_TEXT {
            return Some(format!("`{part}` adds {longest} bytes in one place"));
        }
        (growth > MAX_GROWTH).then(|| format!("`{part}` makes a text up to {growth:.0} times as long"))
    })
}

/// Multiplies what replacements do, wherever they are nested.
fn walk(value: &Value, growth: &mut f64, longest: &mut usize) {
    let text = |value: Option<&Value>| value.and_then(Value::as_str).map_or(0, str::len);
    match value {
        Value::Array(items) => items.iter().for_each(|item| walk(item, growth, longest)),
        Value::Object(map) => {
            if let Some(pattern) = map.get("pattern") {
                // A regular expression may match between any two bytes.
                let replaced = text(pattern.get("String")).max(1);
                let content = text(map.get("content"));
                let between = usize::from(pattern.get("String").is_none());
                *growth *= ((content + between) as f64 / replaced as f64).max(1.0);
                *longest = (*longest).max(content);
            }
            for key in ["prepend", "replacement", "suffix", "prefix"] {
                *longest = (*longest).max(text(map.get(key)));
            }
            map.values().for_each(|item| walk(item, growth, longest));
        }
        _ => {}
    }
}
