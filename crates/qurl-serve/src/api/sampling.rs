//! How a request wants to be sampled, in the words of each dialect.
//!
//! What a client asks for is done or refused: a setting that would change the answer and is not implemented
//! (penalties, grammars) is an error that names it, unless its value switches it off. Everything else
//! that is not known is ignored.

use super::error::ApiError;
use super::fields::{Fields, id, is_empty, is_number};
use super::texts::Texts;
use qurl_rollout::{MIN_TEMPERATURE, Request, SampleKey, Sampling};
use serde_json::Value;

/// Most tokens whose log-probs are given at a place.
pub const MAX_TOP: usize = 64;
/// Most stop strings, bytes of all of them, and stop tokens: the engine looks for each after every token.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 4096;
const MAX_STOP_IDS: usize = 1024;
/// Most tokens with a bias: all of them go to the device with every token.
const MAX_BIASES: usize = 1024;

/// Whose words a request speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's, with vLLM's further keys.
    OpenAi,
    /// SGLang's `sampling_params`.
    Sglang,
}

/// How to sample, whatever the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// Samples.
    pub n: usize,
    /// How tokens are sampled.
    pub sampling: Sampling,
    /// Names the random numbers; the server chooses where absent.
    pub seed: Option<u64>,
    /// What is added to the logits of tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Most new tokens; as many as there can be where absent.
    pub max_new: Option<usize>,
    /// Tokens before the first one that may end a sample.
    pub min_new: usize,
    /// Tokens that end a sample, beside those of the model.
    pub stop_ids: Vec<u32>,
    /// Texts that end a sample.
    pub stop: Vec<String>,
    /// Whether the model's own tokens do not end a sample.
    pub ignore_eos: bool,
    /// Whether special tokens are left out of the text.
    pub skip_special: bool,
    /// Whether the text that ended a sample stays in it.
    pub keep_stop: bool,
}

impl Wanted {
    /// Reads the settings; what cannot be done is refused.
    pub fn read(fields: Fields<'_>, dialect: Dialect) -> Result<Wanted, ApiError> {
        let (min_new, other) = match dialect {
            Dialect::OpenAi => ("min_tokens", "min_new_tokens"),
            Dialect::Sglang => ("min_new_tokens", "min_tokens"),
        };
        for key in ["presence_penalty", "frequency_penalty", other] {
            fields.refuse(key, is_number(0.0))?;
        }
        for key in ["repetition_penalty", "length_penalty"] {
            fields.refuse(key, is_number(1.0))?;
        }
        const UNKNOWN: [&str; 23] = [
            "logits_processors",
            "custom_logit_processor",
            "bad_words",
            "allowed_token_ids",
            "use_beam_search",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "json_schema",
            "regex",
            "ebnf",
            "structural_tag",
            "stop_regex",
            "truncate_prompt_tokens",
            "prompt_embeds",
            "input_embeds",
            "image_data",
            "lora_path",
            "features",
            "logprob_token_ids",
            "thinking_token_budget",
        ];
        for key in UNKNOWN {
            fields.refuse(key, is_empty)?;
        }
        if let Some(custom) = fields.object("custom_params")? {
            custom.refuse("return_top_p_token_ids", is_empty)?; // slime's, with a patched SGLang
        }
        fields.refuse("response_format", |format| format["type"] == "text")?;

        let n = fields.usize("n")?.unwrap_or(1);
        if n == 0 {
            return Err(fields.wrong("n", "at least 1"));
        }
        fields.refuse("best_of", |best| best.as_u64() == Some(n as u64))?;
        let top_k = match fields.i64("top_k")? {
            None | Some(-1 | 0) => 0,
            // More than a vocabulary has are all of it: AReaL says 100000000 where it wants no limit.
            Some(k @ 1..) => u32::try_from(k).unwrap_or(u32::MAX),
            Some(_) => return Err(fields.wrong("top_k", "-1 for all, or at least 1")),
        };
        let sampling = Sampling {
            temperature: match fields.f32("temperature")?.unwrap_or(1.0) {
                // As good as the argmax, and what clients say who mean it.
                tiny if (0.0..MIN_TEMPERATURE).contains(&tiny) => 0.0, // greedy
                temperature => temperature,
            },
            top_p: fields.f32("top_p")?.unwrap_or(1.0),
            top_k,
            min_p: fields.f32("min_p")?.unwrap_or(0.0),
        };
        let limits: &[&str] = match dialect {
            Dialect::OpenAi => &["max_completion_tokens", "max_tokens"],
            Dialect::Sglang => &["max_new_tokens"],
        };
        let mut max_new = None;
        for key in limits {
            max_new = max_new.or(fields.usize(key)?);
        }
        let most = max_new.map(|most| most.max(1));
        let min_new = match fields.usize(min_new)?.unwrap_or(0) {
            min if most.is_some_and(|most| min > most) => {
                return Err(fields.wrong(min_new, "at most as many as there may be new tokens"));
            }
            min => min,
        };
        let seed = match dialect {
            Dialect::OpenAi => fields.i64("seed")?,
            Dialect::Sglang => fields.i64("sampling_seed")?,
        };
        let stop = fields.texts("stop")?;
        if stop.iter().any(String::is_empty) {
            return Err(fields.wrong("stop", "texts that are not empty"));
        }
        if stop.len() > MAX_STOPS || stop.iter().map(String::len).sum::<usize>() > MAX_STOP_BYTES {
            return Err(
                fields.wrong("stop", &format!("at most {MAX_STOPS} texts of {MAX_STOP_BYTES} bytes in all"))
            );
        }
        // A tokenizer that has no such token says null, and clients send that on.
        let known = |list: &Vec<Value>| list.iter().filter(|id| !id.is_null()).map(id).collect();
        let stop_ids =
            fields.read("stop_token_ids", "a list of token ids", |list| list.as_array().and_then(known))?;
        let stop_ids: Vec<u32> = stop_ids.unwrap_or_default();
        if stop_ids.len() > MAX_STOP_IDS {
            return Err(fields.wrong("stop_token_ids", &format!("at most {MAX_STOP_IDS} tokens")));
        }
        let keep_stop = match dialect {
            Dialect::OpenAi => "include_stop_str_in_output",
            Dialect::Sglang => "no_stop_trim",
        };
        Ok(Wanted {
            n,
            sampling,
            logit_bias: logit_bias(fields)?,
            seed: seed.map(|seed| seed as u64),
            max_new,
            min_new,
            stop_ids,
            stop,
            ignore_eos: fields.is("ignore_eos")?,
            skip_special: fields.is_or("skip_special_tokens", true)?,
            keep_stop: fields.is(keep_stop)?,
        })
    }

    /// The request for a prompt. `number` sets apart the prompts of one call; `seed` is the server's, for
    /// calls that name none.
    pub fn request(
        &self,
        texts: &Texts,
        prompt: Vec<u32>,
        number: u64,
        seed: u64,
        context: usize,
    ) -> Request {
        let mut stop_ids = self.stop_ids.clone();
        if !self.ignore_eos {
            stop_ids.extend(&texts.stop_ids);
        }
        // A special token is not seen in the text that stop strings are looked for in.
        stop_ids.extend(self.stop.iter().filter_map(|stop| texts.special(stop)));
        let left = context.saturating_sub(prompt.len()).max(1);
        let key = SampleKey { seed: self.seed.unwrap_or(seed), step: 0, prompt: number };
        // A sample of no tokens is one of which none is given.
        let max_new = self.max_new.unwrap_or(left).clamp(1, left);
        Request {
            n: self.n,
            sampling: self.sampling,
            key,
            stop_ids,
            stop_strings: if texts.has_tokenizer() { self.stop.clone() } else { Vec::new() },
            logit_bias: self.logit_bias.clone(),
            min_new: self.min_new.min(max_new),
            ..Request::new(prompt, max_new)
        }
    }
}

/// What is added to the logits of tokens: an object from their ids to numbers from -100 to 100.
fn logit_bias(fields: Fields<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    const KEY: &str = "logit_bias";
    let expected = "an object from token ids to numbers from -100 to 100";
    let biases = fields.read(KEY, expected, |value| {
        let number = |value: &serde_json::Value| {
            value.as_f64().map(|x| x as f32).filter(|x| (-100.0..=100.0).contains(x))
        };
        value.as_object()?.iter().map(|(id, x)| Some((id.parse::<u32>().ok()?, number(x)?))).collect()
    });
    let biases: Vec<(u32, f32)> = biases?.unwrap_or_default();
    match biases.len() {
        0..=MAX_BIASES => Ok(biases),
        _ => Err(fields.wrong(KEY, &format!("at most {MAX_BIASES} tokens"))),
    }
}

/// How many of the most probable tokens are wanted: a number up to [`MAX_TOP`], or vLLM's -1 for the whole
/// vocabulary where it is no larger.
pub fn top(fields: Fields<'_>, key: &str, vocabulary: usize) -> Result<Option<usize>, ApiError> {
    let count = match fields.i64(key)? {
        Some(-1) => Some(vocabulary),
        Some(k) => {
            Some(usize::try_from(k).map_err(|_| fields.wrong(key, "0 or more, or -1 for all tokens"))?)
        }
        None => None,
    };
    match count {
        Some(k) if k > MAX_TOP => Err(fields.wrong(key, &format!("at most {MAX_TOP} tokens"))),
        k => Ok(k),
    }
}
