//! Tokenizers that do not come as a `tokenizer.json`: both are written as one, so that there is a single
//! way in and Hugging Face reads what we use.

use serde_json::{Map, Value, json};

use super::TokenizerError;
use super::bounds::MAX_MERGES;

/// The regular expression by which Qwen2 and Qwen3 cut text into words before merging bytes.
const QWEN2_WORDS: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// How a byte-level BPE tokenizer cuts text into words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BytePattern {
    /// As GPT-2.
    Gpt2,
    /// As Qwen2, Qwen2.5 and Qwen3: digits one by one, text in normal form C.
    Qwen2,
}

impl BytePattern {
    /// By `tokenizer_class` of `tokenizer_config.json`; Qwen2 where it does not say GPT-2.
    pub(super) fn of_class(settings: &Value) -> BytePattern {
        match settings.get("tokenizer_class").and_then(Value::as_str) {
            Some(class) if class.starts_with("GPT2") => BytePattern::Gpt2,
            _ => BytePattern::Qwen2,
        }
    }
}

/// A token outside the vocabulary of a byte-level BPE tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedToken {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub content: String,
    /// Whether decoding may leave it out.
    pub special: bool,
}

impl AddedToken {
    fn to_json(&self) -> Value {
        json!({
            "id": self.id,
            "content": self.content,
            "single_word": false,
            "lstrip": false,
            "rstrip": false,
            "normalized": false,
            "special": self.special,
        })
    }
}

/// The special tokens of a character-level tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CharacterSpecials {
    /// Padding, id 0.
    pub pad: String,
    /// Beginning of text, if wanted.
    pub bos: Option<String>,
    /// End of text.
    pub eos: String,
}

impl Default for CharacterSpecials {
    fn default() -> Self {
        CharacterSpecials {
            pad: "<pad>".to_string(),
            bos: Some("<bos>".to_string()),
            eos: "<eos>".to_string(),
        }
    }
}

/// The `tokenizer.json` of a byte-level BPE tokenizer.
pub(super) fn byte_level_bpe(
    vocab: Value,
    merges_txt: &str,
    merges_file: &str,
    pattern: BytePattern,
    added: &[AddedToken],
) -> Result<Value, TokenizerError> {
    let count = merges_txt.lines().count();
    if count > MAX_MERGES {
        return Err(TokenizerError::Contents {
            file: merges_file.to_string(),
            found: format!("{count} lines"),
            expected: format!("at most {MAX_MERGES}"),
        });
    }
    let mut merges = Vec::new();
    for (number, line) in merges_txt.lines().enumerate() {
        if line.is_empty() || (number == 0 && line.starts_with("#version")) {
            continue;
        }
        match line.split_once(' ') {
            Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
                merges.push(json!([left, right]));
            }
            _ => {
                return Err(TokenizerError::Contents {
                    file: merges_file.to_string(),
                    found: format!("line {} is {line:?}", number + 1),
                    expected: "two tokens with one space between".to_string(),
                });
            }
        }
    }
    let byte_level = |use_regex: bool| {
        json!({
            "type": "ByteLevel",
            "add_prefix_space": false,
            "trim_offsets": false,
            "use_regex": use_regex,
        })
    };
    let (normalizer, pre_tokenizer) = match pattern {
        BytePattern::Gpt2 => (Value::Null, byte_level(true)),
        BytePattern::Qwen2 => (
            json!({"type": "NFC"}),
            json!({
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "Split",
                        "pattern": {"Regex": QWEN2_WORDS},
                        "behavior": "Isolated",
                        "invert": false,
                    },
                    byte_level(false),
                ],
            }),
        ),
    };
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.iter().map(AddedToken::to_json).collect::<Vec<_>>(),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": byte_level(false),
        "decoder": byte_level(false),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": merges,
        },
    }))
}

/// `tokenizer.json` and `tokenizer_config.json` of a character-level tokenizer.
///
/// A word-level model over single characters. Its unknown token is deliberately not in the vocabulary:
/// an unexpected character is then an error here and in Hugging Face, not a silent loss.
pub(super) fn characters(
    alphabet: &str,
    specials: &CharacterSpecials,
) -> Result<(Value, Value), TokenizerError> {
    let wrong = |found: String, expected: &str| TokenizerError::Contents {
        file: "character tokenizer".to_string(),
        found,
        expected: expected.to_string(),
    };
    if alphabet.is_empty() {
        return Err(wrong("empty alphabet".to_string(), "one character or more"));
    }
    let mut vocab = Map::new();
    let mut added = Vec::new();
    let named = [Some(&specials.pad), specials.bos.as_ref(), Some(&specials.eos)];
    for token in named.into_iter().flatten() {
        if token.chars().count() < 2 {
            let expected = "two characters or more, to be told from the alphabet";
            return Err(wrong(format!("special token {token:?}"), expected));
        }
        let id = vocab.len() as u32;
        if vocab.insert(token.clone(), json!(id)).is_some() {
            let found = format!("special token {token:?} twice");
            return Err(wrong(found, "different special tokens"));
        }
        added.push(AddedToken { id, content: token.clone(), special: true });
    }
    for character in alphabet.chars() {
        let id = vocab.len();
        if vocab.insert(character.to_string(), json!(id)).is_some() {
            let found = format!("character {character:?} twice");
            return Err(wrong(found, "each character once"));
        }
    }
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.iter().map(AddedToken::to_json).collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "[\\s\\S]"},
            "behavior": "Isolated",
            "invert": false,
        },
        "post_processor": null,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    });
    let settings = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": specials.pad,
        "bos_token": specials.bos,
        "eos_token": specials.eos,
        "clean_up_tokenization_spaces": false,
    });
    Ok((tokenizer, settings))
}
