//! Text to token ids and back, as Hugging Face does it.
//!
//! A thin layer over the `tokenizers` crate: it finds the files of a model directory (`tokenizer.json`,
//! or `vocab.json` and `merges.txt`), knows which ids begin and end a text, decodes while tokens arrive,
//! and refuses a tokenizer with ids the model has no embedding for. [`Tokenizer::characters`] makes a
//! character-level tokenizer for models trained from nothing; it is a plain `tokenizer.json` too.
//!
//! Files come with models that nobody vouches for, and the crate trusts them in places: a value that it has
//! not checked makes it panic, while reading or on the first text. Every call that depends on a file is
//! therefore made through [`caught`], and `bounds` says what a file and a text may take.

mod bounds;
mod build;
mod special;
mod stream;

use std::path::{Path, PathBuf};

use qurl_files::{caught, watched};
use serde_json::Value;

pub use build::{AddedToken, BytePattern, CharacterSpecials};
pub use special::{Special, Specials};
pub use stream::StreamDecoder;

use crate::config::ModelConfig;

pub(crate) const TOKENIZER_JSON: &str = "tokenizer.json";
pub(crate) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const VOCAB_JSON: &str = "vocab.json";
const MERGES_TXT: &str = "merges.txt";

/// Everything in a model directory that belongs to the tokenizer.
pub(crate) const FILES: [&str; 9] = [
    TOKENIZER_JSON,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    VOCAB_JSON,
    MERGES_TXT,
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
];

/// Why a tokenizer could not be loaded or used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The system refused to read.
    #[error("{}: cannot be read: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// No tokenizer in the directory.
    #[error("{}: no tokenizer, expected tokenizer.json, or vocab.json and merges.txt", dir.display())]
    NotFound {
        /// The directory.
        dir: PathBuf,
    },
    /// A file has the wrong contents.
    #[error("{file}: {found}, expected {expected}")]
    Contents {
        /// The file.
        file: String,
        /// What is there.
        found: String,
        /// What should be.
        expected: String,
    },
    /// An added token would get another id than its file says.
    #[error(
        "{file}: token {token:?} gets the id {found}, expected {expected} (ids must follow the vocabulary \
         without gaps)"
    )]
    AddedTokenId {
        /// The file.
        file: String,
        /// The token.
        token: String,
        /// The id in the file.
        expected: u64,
        /// The id it would get.
        found: u32,
    },
    /// A text has parts that the vocabulary does not cover.
    #[error("cannot encode {text:?}: {reason}")]
    Encode {
        /// The beginning of the text.
        text: String,
        /// What the tokenizer said.
        reason: String,
    },
    /// Ids could not be decoded.
    #[error("cannot decode {count} ids: {reason}")]
    Decode {
        /// How many.
        count: usize,
        /// What the tokenizer said.
        reason: String,
    },
    /// The tokenizer has ids that the model cannot embed.
    #[error(
        "wrong tokenizer: it needs a vocabulary of {tokenizer}, but the model's vocab_size is {model}; its \
         files are those of another model"
    )]
    TooLarge {
        /// Largest id plus one.
        tokenizer: usize,
        /// Rows of the embedding.
        model: usize,
    },
}

/// A loaded tokenizer.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    specials: Specials,
    files: Vec<(String, Vec<u8>)>,
    /// Where they are, for messages.
    dir: String,
    vocab_size: usize,
    /// Bytes of the longest token.
    longest: usize,
}

impl Tokenizer {
    /// Loads the tokenizer of a model directory.
    pub fn load(dir: &Path) -> Result<Tokenizer, TokenizerError> {
        let mut files = Vec::new();
        for name in FILES {
            let file = dir.join(name);
            match qurl_files::read(&file, bounds::MAX_FILE) {
                Ok(contents) => files.push((name.to_string(), contents)),
                Err(source) if source.kind() == std::io::ErrorKind::NotFound => {}
                Err(source) => return Err(TokenizerError::Io { file, source }),
            }
        }
        Self::from_files(files, &dir.display().to_string())
    }

    /// Makes a tokenizer from file names and contents; `dir` names their place in messages.
    pub fn from_files(files: Vec<(String, Vec<u8>)>, dir: &str) -> Result<Tokenizer, TokenizerError> {
        let find = |name: &str| {
            let found = files.iter().find(|(file, _)| file == name);
            found.map(|(_, contents)| (contents.as_slice(), format!("{dir}/{name}")))
        };
        let settings = match find(TOKENIZER_CONFIG) {
            Some((contents, file)) => parse_object(contents, &file)?,
            None => Value::Null,
        };
        let (json, file) = match (find(TOKENIZER_JSON), find(VOCAB_JSON), find(MERGES_TXT)) {
            (Some((contents, file)), _, _) => (parse_object(contents, &file)?, file),
            (None, Some((vocab, vocab_file)), Some((merges, merges_file))) => {
                let vocab = parse_object(vocab, &vocab_file)?;
                let merges = String::from_utf8_lossy(merges);
                let added = special::added_tokens(&settings, find("added_tokens.json"))?;
                let pattern = BytePattern::of_class(&settings);
                let json = build::byte_level_bpe(vocab, &merges, &merges_file, pattern, &added)?;
                (json, vocab_file)
            }
            _ => return Err(TokenizerError::NotFound { dir: dir.into() }),
        };
        let map = match find("special_tokens_map.json") {
            Some((contents, file)) => parse_object(contents, &file)?,
            None => Value::Null,
        };
        Self::from_json(&json, &file, |inner| Specials::read(&[&settings, &map], inner))
            .map(|tokenizer| Tokenizer { files, dir: dir.to_string(), ..tokenizer })
    }

    /// A byte-level BPE tokenizer from the contents of `vocab.json` and `merges.txt`.
    ///
    /// `added` are tokens outside the vocabulary, in the order of their ids.
    pub fn byte_level_bpe(
        vocab_json: &str,
        merges_txt: &str,
        pattern: BytePattern,
        added: &[AddedToken],
    ) -> Result<Tokenizer, TokenizerError> {
        let vocab = parse_object(vocab_json.as_bytes(), VOCAB_JSON)?;
        let json = build::byte_level_bpe(vocab, merges_txt, MERGES_TXT, pattern, added)?;
        let mut tokenizer = Self::from_json(&json, VOCAB_JSON, |_| Specials::default())?;
        tokenizer.files = vec![(TOKENIZER_JSON.to_string(), json.to_string().into_bytes())];
        Ok(tokenizer)
    }

    /// A tokenizer with one token per character of `alphabet`; other characters are an error.
    ///
    /// Special tokens get the first ids in the order pad, bos, eos; the characters follow in the order
    /// given.
    pub fn characters(alphabet: &str, specials: &CharacterSpecials) -> Result<Tokenizer, TokenizerError> {
        let (json, settings) = build::characters(alphabet, specials)?;
        let file = |name: &str, value: &Value| (name.to_string(), format!("{value:#}\n").into_bytes());
        let files = vec![file(TOKENIZER_JSON, &json), file(TOKENIZER_CONFIG, &settings)];
        Self::from_files(files, "character tokenizer")
    }

    fn from_json(
        json: &Value,
        file: &str,
        specials: impl FnOnce(&tokenizers::Tokenizer) -> Specials,
    ) -> Result<Tokenizer, TokenizerError> {
        let wrong = |found: String, expected: &str| TokenizerError::Contents {
            file: file.to_string(),
            found,
            expected: expected.to_string(),
        };
        if let Some((found, expected)) = bounds::too_much(json) {
            return Err(wrong(found, &expected));
        }
        let expected = "a tokenizer in the format of Hugging Face";
        let fails = |panic: String| wrong(format!("something that its reader fails on ({panic})"), expected);
        let text = json.to_string();
        let read = watched(bounds::PATIENCE, move || {
            caught(|| {
                let mut inner = tokenizers::Tokenizer::from_bytes(text)?;
                // Both are left over from training in some files; transformers resets them as well.
                inner.with_padding(None);
                inner.with_truncation(None)?;
                let ids = inner.get_vocab(true);
                let vocab_size = ids.values().max().map_or(0, |&max| max as usize + 1);
                let longest = ids.keys().map(String::len).max().unwrap_or(0);
                Ok::<_, tokenizers::Error>((vocab_size, longest, inner))
            })
        });
        let (vocab_size, longest, inner) = read
            .map_err(|gave_up| {
                wrong(format!("something that takes its reader too long ({gave_up})"), expected)
            })?
            .map_err(fails)?
            .map_err(|error| wrong(error.to_string(), expected))?;
        let specials = caught(|| specials(&inner)).map_err(fails)?;
        check_added_ids(json, file, &inner)?;
        Ok(Tokenizer { specials, inner, files: Vec::new(), dir: String::new(), vocab_size, longest })
    }

    /// The ids of a text. `add_special` lets the tokenizer add what it adds by itself (often bos).
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let failed =
            |reason: String| TokenizerError::Encode { text: text.chars().take(80).collect(), reason };
        match caught(|| self.inner.encode_fast(text, add_special)) {
            Ok(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(panic) => Err(failed(format!("{TOKENIZER_JSON} has something that fails on it ({panic})"))),
        }
    }

    /// The text of ids. Ids without a token (padding rows of the embedding) give nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        let failed = |reason: String| TokenizerError::Decode { count: ids.len(), reason };
        match caught(|| self.inner.decode(ids, skip_special)) {
            Ok(decoded) => decoded.map_err(|error| failed(error.to_string())),
            Err(panic) => Err(failed(format!("{TOKENIZER_JSON} has something that fails on them ({panic})"))),
        }
    }

    /// How many tokens a text has at least, by its length: no token has more bytes than the longest one.
    /// Finding the tokens of a text takes hundreds of times its memory, so one that is too long anyway is
    /// better not looked at.
    pub fn tokens_at_least(&self, text: &str) -> usize {
        text.len() / self.longest.max(1)
    }

    /// Bytes of the longest token.
    pub fn longest_token(&self) -> usize {
        self.longest
    }

    /// A file's name with its directory, for messages.
    pub(crate) fn place_of(&self, file: &str) -> String {
        if self.dir.is_empty() { file.to_string() } else { format!("{}/{file}", self.dir) }
    }

    /// Largest id plus one: the smallest `vocab_size` a model needs.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// An error where the tokenizer has ids that the model cannot embed. Spare rows are fine.
    pub fn check_fits(&self, config: &ModelConfig) -> Result<(), TokenizerError> {
        if self.vocab_size > config.vocab_size {
            return Err(TokenizerError::TooLarge { tokenizer: self.vocab_size, model: config.vocab_size });
        }
        Ok(())
    }

    /// The id of a token given literally.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token of an id, as stored in the vocabulary.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Begin, end, padding and unknown token.
    pub fn specials(&self) -> &Specials {
        &self.specials
    }

    /// The id that ends a text, if the tokenizer names one.
    pub fn eos(&self) -> Option<u32> {
        self.specials.eos.as_ref().map(|token| token.id)
    }

    /// All tokens marked as special, by id.
    pub fn special_tokens(&self) -> Vec<Special> {
        let added = self.inner.get_added_tokens_decoder();
        let mut tokens: Vec<Special> = added
            .into_iter()
            .filter(|(_, token)| token.special)
            .map(|(id, token)| Special { content: token.content, id })
            .collect();
        tokens.sort_by_key(|token| token.id);
        tokens
    }

    /// Names and contents of the tokenizer's files, to be saved beside a model.
    pub fn files(&self) -> &[(String, Vec<u8>)] {
        &self.files
    }

    /// The contents of one of the tokenizer's files.
    pub(crate) fn file(&self, name: &str) -> Option<&[u8]> {
        let found = self.files.iter().find(|(file, _)| file == name);
        found.map(|(_, contents)| contents.as_slice())
    }
}

/// A JSON object from bytes; `file` names it in messages.
pub(crate) fn parse_object(bytes: &[u8], file: &str) -> Result<Value, TokenizerError> {
    let wrong = |found: String| TokenizerError::Contents {
        file: file.to_string(),
        found,
        expected: "a JSON object".to_string(),
    };
    let size = qurl_files::json_size(bytes);
    for (found, unit, most) in
        [(size.values, "values", bounds::MAX_VALUES), (size.objects, "objects", bounds::MAX_OBJECTS)]
    {
        if found > most {
            let (file, found) = (file.to_string(), format!("{found} {unit}"));
            return Err(TokenizerError::Contents { file, found, expected: format!("at most {most}") });
        }
    }
    match serde_json::from_slice::<Value>(bytes) {
        Ok(value) if value.is_object() => Ok(value),
        Ok(_) => Err(wrong("another JSON value".to_string())),
        Err(error) => Err(wrong(format!("invalid JSON ({error})"))),
    }
}

/// The library numbers added tokens itself; a file with gaps would silently shift all ids.
fn check_added_ids(json: &Value, file: &str, inner: &tokenizers::Tokenizer) -> Result<(), TokenizerError> {
    let added = json.get("added_tokens").and_then(Value::as_array);
    for token in added.into_iter().flatten() {
        let content = token.get("content").and_then(Value::as_str);
        let id = token.get("id").and_then(Value::as_u64);
        if let (Some(content), Some(expected)) = (content, id)
            && let Some(found) = inner.token_to_id(content)
            && u64::from(found) != expected
        {
            return Err(TokenizerError::AddedTokenId {
                file: file.to_string(),
                token: content.to_string(),
                expected,
                found,
            });
        }
    }
    Ok(())
}
