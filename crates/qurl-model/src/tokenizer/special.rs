//! Which tokens begin, end and pad a text, from `tokenizer_config.json` and its companions.

use serde_json::Value;

use super::build::AddedToken;
use super::{TOKENIZER_CONFIG, TokenizerError, parse_object};

/// A token with a role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Special {
    /// The token's text.
    pub content: String,
    /// Its id.
    pub id: u32,
}

/// The tokens with a role; `None` where the tokenizer does not have one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Specials {
    /// Begins a text.
    pub bos: Option<Special>,
    /// Ends a text.
    pub eos: Option<Special>,
    /// Fills up a batch.
    pub pad: Option<Special>,
    /// Stands for what the vocabulary does not cover.
    pub unk: Option<Special>,
}

impl Specials {
    /// Reads `bos_token` and so on from the first of `sources` that names it. A name that is not in the
    /// vocabulary counts as none.
    pub(super) fn read(sources: &[&Value], inner: &tokenizers::Tokenizer) -> Specials {
        let find = |key: &str| {
            let content = sources.iter().find_map(|source| token_text(source.get(key)?))?;
            let id = inner.token_to_id(content)?;
            Some(Special { content: content.to_string(), id })
        };
        Specials {
            bos: find("bos_token"),
            eos: find("eos_token"),
            pad: find("pad_token"),
            unk: find("unk_token"),
        }
    }
}

/// A token is written as a text or as an object with `content`.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// Tokens outside `vocab.json`: `added_tokens_decoder` of the settings, else `added_tokens.json`.
pub(super) fn added_tokens(
    settings: &Value,
    added_json: Option<(&[u8], String)>,
) -> Result<Vec<AddedToken>, TokenizerError> {
    let wrong = |file: &str, found: String, expected: &str| TokenizerError::Contents {
        file: file.to_string(),
        found,
        expected: expected.to_string(),
    };
    let mut tokens = Vec::new();
    if let Some(decoder) = settings.get("added_tokens_decoder").and_then(Value::as_object) {
        for (id, token) in decoder {
            let content = token.get("content").and_then(Value::as_str);
            let (Ok(id), Some(content)) = (id.parse(), content) else {
                let found = format!("added_tokens_decoder has {id}: {token}");
                let expected = "ids with an object that has `content`";
                return Err(wrong(TOKENIZER_CONFIG, found, expected));
            };
            let special = token.get("special").and_then(Value::as_bool);
            tokens.push(AddedToken { id, content: content.to_string(), special: special.unwrap_or(false) });
        }
    } else if let Some((contents, file)) = added_json {
        let map = parse_object(contents, &file)?;
        for (content, id) in map.as_object().into_iter().flatten() {
            let Some(id) = id.as_u64().and_then(|id| u32::try_from(id).ok()) else {
                return Err(wrong(&file, format!("{content:?}: {id}"), "a token id"));
            };
            tokens.push(AddedToken { id, content: content.clone(), special: true });
        }
    }
    tokens.sort_by_key(|token| token.id);
    Ok(tokens)
}
