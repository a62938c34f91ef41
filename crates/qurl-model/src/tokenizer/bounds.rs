//! What a tokenizer may take: while its file is read, and of every text before tokens are looked up.
//!
//! Normalizers and decoders replace parts of a text by others, and put texts before it. One that puts a
//! thousand letters in place of each, three times over, asks for more memory than there is; published ones at
//! most triple the bytes. Templates add tokens to every text, patterns are compiled before the first, and the
//! words of a WordPiece model cost the cube of their length. All of that is counted in the JSON, before
//! anything is made of it; what remains is watched while it is read.

use std::time::Duration;

use qurl_files::Patience;
use serde_json::Value;

/// Bytes of one of a tokenizer's files; the largest published ones have some 40 million.
pub(super) const MAX_FILE: u64 = 64 * qurl_files::MIB;
/// Values of such a file, and objects among them, which take the most memory. The largest published ones have
/// some two million values, nearly all of them merges, and ten thousand objects.
pub(super) const MAX_VALUES: usize = 3 << 20;
pub(super) const MAX_OBJECTS: usize = 1 << 18;
/// Lines of `merges.txt`.
pub(super) const MAX_MERGES: usize = 1 << 20;
/// What reading a tokenizer may take; the largest published ones take some seconds and 300 MiB.
pub(super) const PATIENCE: Patience =
    Patience { time: Duration::from_secs(60), memory: 1 << 30, stack: 16 << 20 };

/// Most bytes that one byte of a text may become.
const MAX_GROWTH: f64 = 1024.0;
/// Most bytes that are put before a text, or between words, and what later replacements make of them.
const MAX_ADDED: f64 = 4096.0;
/// Normalizers, pre-tokenizers or decoders: each looks at the whole text.
const MAX_STEPS: usize = 256;
/// Regular expressions, and bytes of one.
const MAX_PATTERNS: usize = 64;
const MAX_PATTERN: usize = 4 << 10;
/// Tokens that a post-processor adds to a text, and how often it may give the text itself.
const MAX_SPECIALS: usize = 4096;
const MAX_COPIES: usize = 2;
/// Bytes of a token. The longest published ones are runs of a few hundred spaces.
const MAX_TOKEN: usize = 64 << 10;
/// Bytes of any other text; the longest published ones are tables of normal forms.
const MAX_TEXT: usize = 1 << 20;
/// Characters of a word of WordPiece, which takes their cube; BERT's has 100.
const MAX_WORD: u64 = 1000;

/// A limit that a file breaks: what is there, and what was expected.
pub(super) type Broken = (String, String);

/// What in a `tokenizer.json` takes too much, if anything.
pub(super) fn too_much(json: &Value) -> Option<Broken> {
    ["normalizer", "pre_tokenizer", "decoder"]
        .iter()
        .find_map(|part| steps(part, json.get(part)?))
        .or_else(|| json.get("post_processor").and_then(specials))
        .or_else(|| json.get("model").and_then(model))
        .or_else(|| added_tokens(json.get("added_tokens")?))
        .or_else(|| long_text(json))
}

/// What the steps of a part do to a text, one after the other.
struct Growth {
    /// How many times as long it becomes.
    factor: f64,
    /// Bytes that are put before it.
    added: f64,
    steps: usize,
    patterns: usize,
    longest_pattern: usize,
}

fn steps(part: &str, value: &Value) -> Option<Broken> {
    let mut growth = Growth { factor: 1.0, added: 0.0, steps: 0, patterns: 0, longest_pattern: 0 };
    walk(value, &mut growth);
    let Growth { factor, added, steps, patterns, longest_pattern } = growth;
    let broken = |found: String, expected: String| Some((format!("`{part}` {found}"), expected));
    if factor > MAX_GROWTH {
        let found = format!("makes a text up to {factor:.0} times as long");
        return broken(found, format!("at most {MAX_GROWTH} times"));
    }
    if added > MAX_ADDED {
        return broken(format!("adds up to {added:.0} bytes to a text"), format!("at most {MAX_ADDED}"));
    }
    if steps > MAX_STEPS {
        return broken(format!("has {steps} steps"), format!("at most {MAX_STEPS}"));
    }
    if patterns > MAX_PATTERNS {
        return broken(format!("has {patterns} regular expressions"), format!("at most {MAX_PATTERNS}"));
    }
    if longest_pattern > MAX_PATTERN {
        let found = format!("has a regular expression of {longest_pattern} bytes");
        return broken(found, format!("at most {MAX_PATTERN}"));
    }
    None
}

/// Follows a text through the steps, wherever they are nested.
fn walk(value: &Value, growth: &mut Growth) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| walk(item, growth)),
        Value::Object(map) => {
            growth.steps += usize::from(map.contains_key("type"));
            if let Some(pattern) = map.get("pattern") {
                // A regular expression may match between any two bytes.
                let replaced = length(pattern.get("String")).max(1);
                let between = usize::from(pattern.get("String").is_none());
                let factor = ((length(map.get("content")) + between) as f64 / replaced as f64).max(1.0);
                growth.factor *= factor;
                growth.added *= factor;
                if let Some(regex) = pattern.get("Regex") {
                    growth.patterns += 1;
                    growth.longest_pattern = growth.longest_pattern.max(length(Some(regex)));
                }
            }
            if let Some(table) = map.get("precompiled_charsmap").and_then(Value::as_str) {
                let factor = longest_normal_form(table).max(1) as f64;
                growth.factor *= factor;
                growth.added *= factor;
            }
            for key in ["prepend", "replacement", "suffix", "prefix"] {
                growth.added += length(map.get(key)) as f64;
            }
            map.values().for_each(|item| walk(item, growth));
        }
        _ => {}
    }
}

/// Bytes of a text; 0 of anything else.
fn length(value: Option<&Value>) -> usize {
    value.and_then(Value::as_str).map_or(0, str::len)
}

/// Bytes of the longest text that a SentencePiece table puts in place of a character. The table is base64 of
/// the length of a trie (4 bytes), the trie, and texts with a zero after each.
fn longest_normal_form(table: &str) -> usize {
    let digit = |byte: u8| {
        Some(match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None, // what fills up the end; anything else is refused by its reader
        })
    };
    let digits: Vec<u8> = table.bytes().filter_map(digit).collect();
    let three = |four: &[u8]| {
        let bits = four.iter().fold(0, |bits: u32, &digit| bits << 6 | u32::from(digit));
        (bits << (6 * (4 - four.len()))).to_be_bytes()
    };
    let bytes: Vec<u8> = digits.chunks(4).flat_map(|four| three(four)[1..four.len()].to_vec()).collect();
    let trie = bytes.first_chunk().map_or(0, |length| u32::from_le_bytes(*length) as usize);
    let texts = bytes.get(4_usize.saturating_add(trie)..).unwrap_or_default();
    texts.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(0)
}

/// A post-processor that adds too many tokens to every text, wherever its templates are nested.
fn specials(value: &Value) -> Option<Broken> {
    let (mut added, mut copies) = (0, 0);
    fn walk(value: &Value, added: &mut usize, copies: &mut usize) {
        match value {
            Value::Array(items) => items.iter().for_each(|item| walk(item, added, copies)),
            Value::Object(map) => {
                for key in ["single", "pair"] {
                    let pieces = map.get(key).and_then(Value::as_array);
                    let mut texts = 0;
                    for piece in pieces.into_iter().flatten() {
                        let ids = |id: &str| map.get("special_tokens")?.get(id)?.get("ids")?.as_array();
                        let id = piece.pointer("/SpecialToken/id").and_then(Value::as_str);
                        *added += id.and_then(ids).map_or(0, Vec::len);
                        texts += usize::from(piece.get("Sequence").is_some());
                    }
                    *copies = (*copies).max(texts);
                }
                map.values().for_each(|item| walk(item, added, copies));
            }
            _ => {}
        }
    }
    walk(value, &mut added, &mut copies);
    if added > MAX_SPECIALS {
        let found = format!("`post_processor` adds {added} tokens to a text");
        return Some((found, format!("at most {MAX_SPECIALS}")));
    }
    (copies > MAX_COPIES).then(|| {
        let found = format!("`post_processor` has a template with {copies} texts");
        (found, format!("at most {MAX_COPIES}"))
    })
}

/// Words and tokens of a model that are too long.
fn model(model: &Value) -> Option<Broken> {
    if let Some(word) = model.get("max_input_chars_per_word")
        && word.as_u64().is_none_or(|word| word > MAX_WORD)
    {
        let found = format!("`model.max_input_chars_per_word` is {}", shown(word));
        return Some((found, format!("a whole number of at most {MAX_WORD}")));
    }
    let vocab = model.get("vocab")?;
    let named = vocab.as_object().into_iter().flat_map(|map| map.keys().map(String::len));
    let listed = vocab.as_array().into_iter().flatten().map(|token| length(token.get(0)));
    token(named.chain(listed).max()?, "model.vocab")
}

fn added_tokens(added: &Value) -> Option<Broken> {
    let tokens = added.as_array().into_iter().flatten();
    token(tokens.map(|token| length(token.get("content"))).max()?, "added_tokens")
}

fn token(longest: usize, key: &str) -> Option<Broken> {
    (longest > MAX_TOKEN)
        .then(|| (format!("`{key}` has a token of {longest} bytes"), format!("at most {MAX_TOKEN}")))
}

/// A text that is too long, wherever it is.
fn long_text(value: &Value) -> Option<Broken> {
    match value {
        Value::String(text) if text.len() > MAX_TEXT => {
            Some((format!("a text of {} bytes", text.len()), format!("at most {MAX_TEXT}")))
        }
        Value::Array(items) => items.iter().find_map(long_text),
        Value::Object(map) => map.values().find_map(long_text),
        _ => None,
    }
}

/// The beginning of a value.
fn shown(value: &Value) -> String {
    value.to_string().chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_of_a_table_are_after_its_trie() {
        // A trie of 2 bytes, "abc", "d" and "ef" without an end.
        assert_eq!(longest_normal_form("AgAAAP//YWJjAGQAZWY="), 3);
        assert_eq!(longest_normal_form("AgAAAP//YQ=="), 1);
        for broken in ["", "A", "AgAA", "/////wAA", "é"] {
            assert_eq!(longest_normal_form(broken), 0, "{broken}");
        }
    }
}
