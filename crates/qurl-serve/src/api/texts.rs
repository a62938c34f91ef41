//! Text to tokens and back, as a server needs it: for prompts, conversations, and answers that grow.

use super::error::ApiError;
use qurl_model::chat::{ChatTemplate, Renderer};
use qurl_model::tokenizer::{StreamDecoder, Tokenizer};
use qurl_model::{ChatError, GenerationConfig, ModelConfig};
use qurl_rollout::{FinishReason, TextDecoder};
use serde_json::{Map, Value};
use std::sync::Arc;

/// What a model directory says of text.
pub struct Texts {
    tokenizer: Option<Arc<Tokenizer>>,
    template: Option<Renderer>,
    /// Tokens that end a sample of this model.
    pub stop_ids: Vec<u32>,
}

impl Texts {
    /// From a model and its tokenizer; without one, prompts are ids and answers have no text. `renderer` is
    /// the command that starts a process for its chat template ([`qurl_model::chat::Renderer`]).
    pub fn new(
        config: &ModelConfig,
        generation: &GenerationConfig,
        tokenizer: Option<Tokenizer>,
        renderer: Vec<String>,
    ) -> Result<Texts, ChatError> {
        let template = tokenizer.as_ref().map(ChatTemplate::of).transpose()?.flatten();
        let template = template.map(|template| Renderer::new(template, renderer));
        let mut stop_ids = generation.eos_token_ids.clone();
        stop_ids.extend(&config.eos_token_ids);
        stop_ids.extend(tokenizer.as_ref().and_then(Tokenizer::eos));
        stop_ids.sort_unstable();
        stop_ids.dedup();
        Ok(Texts { tokenizer: tokenizer.map(Arc::new), template, stop_ids })
    }

    /// Neither tokenizer nor stop tokens: ids in, ids out.
    pub fn none() -> Texts {
        Texts { tokenizer: None, template: None, stop_ids: Vec::new() }
    }

    /// How the engine makes text, to look for stop strings in.
    pub fn decoder(&self) -> Option<TextDecoder> {
        let tokenizer = self.tokenizer.clone()?;
        // A decoder fails on ids without a token only, and the engine's are the model's own.
        Some(Arc::new(move |ids: &[u32]| tokenizer.decode(ids, true).unwrap_or_default()))
    }

    /// Whether there is text at all.
    pub fn has_tokenizer(&self) -> bool {
        self.tokenizer.is_some()
    }

    fn tokenizer(&self) -> Result<&Tokenizer, ApiError> {
        let missing = || ApiError::bad("this model has no tokenizer: give token ids");
        self.tokenizer.as_deref().ok_or_else(missing)
    }

    /// Tokens of a text, of which there may be so many: a text that is longer than that whatever its tokens
    /// are is refused unread, since finding its tokens takes a hundred times its memory.
    pub fn encode(
        &self,
        key: &str,
        text: &str,
        add_special: bool,
        most: usize,
    ) -> Result<Vec<u32>, ApiError> {
        let tokenizer = self.tokenizer()?;
        let (len, longest) = (text.len(), tokenizer.longest_token());
        if len > most.saturating_mul(longest) {
            let message = format!(
                "This model's maximum context length is {most} tokens, none of which has more than {longest} \
                 bytes; the text has {len}."
            );
            return Err(ApiError::invalid(key, message));
        }
        let ids = tokenizer.encode(text, add_special);
        ids.map_err(|error| ApiError::invalid(key, error.to_string()))
    }

    /// Text of tokens.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, ApiError> {
        self.tokenizer()?.decode(ids, skip_special).map_err(|error| ApiError::bad(error.to_string()))
    }

    /// The text of a conversation that the model is to answer.
    pub fn render(
        &self,
        messages: &Value,
        prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<String, ApiError> {
        self.tokenizer()?;
        let missing = || ApiError::bad("this model has no chat template: use /v1/completions");
        let template = self.template.as_ref().ok_or_else(missing)?;
        let rendered = template.render_json(messages, prompt, variables);
        rendered.map_err(|error| ApiError::invalid("messages", error.to_string()))
    }

    /// The id of a text that is one special token.
    pub fn special(&self, text: &str) -> Option<u32> {
        let tokenizer = self.tokenizer.as_deref()?;
        let id = tokenizer.token_to_id(text)?;
        tokenizer.special_tokens().iter().any(|token| token.id == id).then_some(id)
    }

    /// The text of a single token; special ones are shown.
    pub fn token(&self, id: u32) -> String {
        let decoded = self.tokenizer.as_deref().map(|tokenizer| tokenizer.decode(&[id], false));
        decoded.and_then(Result::ok).unwrap_or_default()
    }

    /// The bytes of a token whose text is this, which has replacement characters where it is only a part of a
    /// character; nothing where the vocabulary does not spell bytes.
    pub fn bytes(&self, id: u32, text: &str) -> Option<Vec<u8>> {
        let spelling = self.spelling(id)?;
        // One byte in the way of SentencePiece, or a letter for each in the way of GPT-2.
        let bytes = match spelling.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')) {
            Some(digits) => vec![u8::from_str_radix(digits, 16).ok()?],
            None => spelling.chars().map(byte_of).collect::<Option<Vec<u8>>>()?,
        };
        (String::from_utf8_lossy(&bytes) == text).then_some(bytes)
    }

    /// How the vocabulary spells a token.
    pub fn spelling(&self, id: u32) -> Option<String> {
        self.tokenizer.as_deref()?.id_to_token(id)
    }

    /// The text of a sample that is about to grow.
    pub fn grow(&self, stop: &[String], skip_special: bool, keep_stop: bool) -> Growing {
        Growing {
            tokenizer: self.tokenizer.clone(),
            decoder: StreamDecoder::new(skip_special),
            held: String::new(),
            stop: stop.to_vec(),
            keep_stop,
        }
    }
}

/// The byte that a letter stands for in vocabularies of bytes: those that can be seen for themselves, the
/// others in their order from U+0100 on.
fn byte_of(letter: char) -> Option<u8> {
    let visible = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    match u8::try_from(u32::from(letter)) {
        Ok(byte) => Some(byte).filter(|byte| visible(*byte)),
        Err(_) => (0..=255).filter(|byte| !visible(*byte)).nth(u32::from(letter) as usize - 256),
    }
}

/// The text of a sample, piece by piece. What may turn out to be the beginning of a stop string is held back
/// until it is certain.
pub struct Growing {
    tokenizer: Option<Arc<Tokenizer>>,
    decoder: StreamDecoder,
    held: String,
    stop: Vec<String>,
    keep_stop: bool,
}

impl Growing {
    /// Takes a token; gives the text that is now certain.
    pub fn push(&mut self, id: u32, finish: Option<FinishReason>) -> String {
        let Some(tokenizer) = self.tokenizer.clone() else { return String::new() };
        // The token that ends a sample is no part of its text, unless that is wanted.
        if self.keep_stop || !matches!(finish, Some(FinishReason::StopId(_))) {
            self.held.push_str(&self.decoder.push(&tokenizer, id).unwrap_or_default());
        }
        match finish {
            Some(FinishReason::StopString(ended)) => return self.end(Some(ended)),
            Some(_) => return self.end(None),
            None => {}
        }
        let certain = self.held.len() - self.may_be_stop();
        self.held.drain(..certain).collect()
    }

    /// The rest of the text; cut at the stop string that `ended` the sample, if one did.
    pub fn end(&mut self, ended: Option<usize>) -> String {
        let decoder = std::mem::replace(&mut self.decoder, StreamDecoder::new(false));
        if let Some(tokenizer) = &self.tokenizer {
            self.held.push_str(&decoder.finish(tokenizer).unwrap_or_default());
        }
        let mut text = std::mem::take(&mut self.held);
        if let Some(stop) = ended.and_then(|ended| self.stop.get(ended))
            && let Some(at) = text.find(stop.as_str())
        {
            text.truncate(if self.keep_stop { at + stop.len() } else { at });
        }
        text
    }

    /// Bytes at the end that a stop string begins with.
    fn may_be_stop(&self) -> usize {
        let begins = |stop: &String| {
            let longest = self.held.len().min(stop.len());
            let fits = |len: &usize| stop.is_char_boundary(*len) && self.held.ends_with(&stop[..*len]);
            (1..=longest).rev().find(fits).unwrap_or(0)
        };
        self.stop.iter().map(begins).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qurl_model::tokenizer::{BytePattern, CharacterSpecials};

    fn texts(tokenizer: Tokenizer) -> Texts {
        Texts { tokenizer: Some(Arc::new(tokenizer)), template: None, stop_ids: Vec::new() }
    }

    fn characters() -> Texts {
        let tokenizer = Tokenizer::characters("abcdef", &CharacterSpecials::default());
        texts(tokenizer.expect("a tokenizer"))
    }

    /// What is handed out after each token of a text; the last ends it.
    fn pieces(texts: &Texts, text: &str, stop: &[&str], keep: bool, last: FinishReason) -> Vec<String> {
        let stop: Vec<String> = stop.iter().map(|s| s.to_string()).collect();
        let mut growing = texts.grow(&stop, true, keep);
        let ids = texts.encode("text", text, false, 100).expect("ids");
        let end = ids.len() - 1;
        ids.iter().enumerate().map(|(i, id)| growing.push(*id, (i == end).then_some(last))).collect()
    }

    fn grown(text: &str, stop: &[&str], keep: bool, last: FinishReason) -> Vec<String> {
        pieces(&characters(), text, stop, keep, last)
    }

    #[test]
    fn what_may_be_a_stop_string_is_held_back() {
        let stopped = FinishReason::StopString(0);
        assert_eq!(grown("abcd", &["cd"], false, stopped), ["a", "b", "", ""]);
        assert_eq!(grown("abcd", &["cd"], true, stopped), ["a", "b", "", "cd"]);
        assert_eq!(grown("abcabe", &["abd"], false, FinishReason::Length), ["", "", "abc", "", "", "abe"]);
        assert_eq!(
            grown("aab", &["ab"], false, stopped),
            ["", "a", ""],
            "the earliest place it can begin at"
        );
        assert_eq!(grown("abc", &["cx"], false, FinishReason::Length), ["a", "b", "c"]);
        // Of two that the last token completes it is cut at the one that is said to have ended it.
        assert_eq!(grown("dab", &["b", "ab"], false, stopped), ["d", "", "a"]);
        assert_eq!(grown("dab", &["ab", "b"], false, stopped), ["d", "", ""]);
        // The token that ended it is no text of its own.
        assert_eq!(grown("abc", &[], false, FinishReason::StopId(5)), ["a", "b", ""]);
        assert_eq!(grown("abc", &[], true, FinishReason::StopId(5)), ["a", "b", "c"]);
    }
    /// A token is a byte: characters and stop strings are spread over several.
    #[test]
    fn characters_and_stop_strings_span_tokens() {
        // As GPT-2 spells bytes: those that cannot be seen are letters further on.
        let visible = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let others = (0..256).filter(|byte| !visible(byte)).zip(256..).map(|(_, letter)| letter);
        let letters = (0..256).filter(visible).chain(others).filter_map(char::from_u32);
        let vocab: Map<String, Value> = letters.map(String::from).zip((0..).map(Value::from)).collect();
        let vocab = Value::Object(vocab).to_string();
        let bytes = texts(
            Tokenizer::byte_level_bpe(&vocab, "#version: 0.2\n", BytePattern::Qwen2, &[])
                .expect("a tokenizer"),
        );
        // Each is told by its byte, though none of them is a text.
        let ids = bytes.encode("text", " €", false, 100).expect("ids");
        let told: Option<Vec<Vec<u8>>> = ids.iter().map(|id| bytes.bytes(*id, &bytes.token(*id))).collect();
        assert_eq!(told.map(|told| told.concat()).as_deref(), Some(" €".as_bytes()));
        assert_eq!(bytes.bytes(ids[0], "another text"), None);
        let all = |text, stop: &[&str], last| pieces(&bytes, text, stop, false, last);
        assert_eq!(all("aä€b", &[], FinishReason::Length), ["a", "", "ä", "", "", "€", "b"]);
        assert_eq!(all("a€ä", &["€ä"], FinishReason::StopString(0)), ["a", "", "", "", "", ""]);
        assert_eq!(all("a€b", &["€ä"], FinishReason::Length), ["a", "", "", "", "€b"]);
        // Cut off in the middle of a character: what there is of it is told, and only at the end.
        let ids = bytes.encode("text", "a€", false, 100).expect("ids");
        let mut growing = bytes.grow(&["€€".to_string()], true, false);
        let told: Vec<String> = ids[..3].iter().map(|id| growing.push(*id, None)).collect();
        assert_eq!((told.concat(), growing.end(None)), ("a".to_string(), "\u{FFFD}".to_string()));
    }
}
