//! Text while tokens arrive.
//!
//! A character may be spread over several byte-level tokens, and some decoders treat the first token
//! differently. So a token is decoded together with those before it, and text is handed out only once it
//! ends in a whole character: what was handed out never has to be taken back.

use super::{Tokenizer, TokenizerError};

/// A character has at most 4 bytes, hence at most 4 tokens: after that, bytes are simply invalid.
const MAX_HELD: usize = 4;

/// Decodes one sequence token by token.
#[derive(Clone, Debug)]
pub struct StreamDecoder {
    skip_special: bool,
    /// Tokens that were handed out last and serve as context, then those being held back.
    ids: Vec<u32>,
    /// How many of `ids` have been handed out.
    done: usize,
}

impl StreamDecoder {
    /// A decoder at the beginning of a sequence.
    pub fn new(skip_special: bool) -> StreamDecoder {
        StreamDecoder { skip_special, ids: Vec::new(), done: 0 }
    }

    /// Takes the next token and returns the text that is now certain; often one word, sometimes nothing.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, TokenizerError> {
        self.ids.push(id);
        let text = self.held_text(tokenizer)?;
        let incomplete = text.ends_with('\u{FFFD}');
        if incomplete && self.ids.len() - self.done < MAX_HELD {
            return Ok(String::new());
        }
        if incomplete {
            // Invalid bytes: start over, so that they cannot join with what follows.
            self.ids.clear();
        } else {
            self.ids.drain(..self.done);
        }
        self.done = self.ids.len();
        Ok(text)
    }

    /// The end of the sequence: whatever was held back.
    pub fn finish(self, tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
        self.held_text(tokenizer)
    }

    /// What the held tokens add to the text of those before.
    fn held_text(&self, tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
        let before = tokenizer.decode(&self.ids[..self.done], self.skip_special)?;
        let all = tokenizer.decode(&self.ids, self.skip_special)?;
        Ok(all.get(before.len()..).unwrap_or_default().to_string())
    }
}
