//! Random models with the shape of the paper's three: two blocks and a narrow residual stream, but the real
//! context, heads, head size, vocabulary size, head tying, rotary base and end of text. Their tokenizer is
//! Qwen's where the shared data is there, else one of characters.

use crate::common::shared_data;
use qurl_model::hf::{SaveOptions, save};
use qurl_model::tokenizer::{AddedToken, BytePattern, CharacterSpecials, Tokenizer};
use qurl_model::{GenerationConfig, ModelConfig, params};
use serde_json::{Value, json};
use std::path::Path;

/// Width of the residual stream; the published ones have 896, 3584 and 1536.
const HIDDEN: usize = 64;
/// Width of the MLP.
const INTERMEDIATE: usize = 128;

/// A published model, as far as it matters here.
pub struct Published {
    /// The shape it shares, among those known by name.
    shape: &'static str,
    context: usize,
    tied: bool,
    rope_theta: f64,
    /// Special tokens from the first id after the vocabulary of 151643.
    added: &'static [&'static str],
    eos: &'static str,
    chat_template: &'static str,
}

const CHATML: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// ChatML as Qwen2.5 has it, with a default system message of its own.
const QWEN: &str = "{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are \
                    helpful.<|im_end|>\\n' }}\
    {%- endif %}{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' \
    }}{%- endfor %}\
    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}";

pub const QWEN25_05B_INSTRUCT: Published = Published {
    shape: "qwen2.5-0.5b",
    context: 32_768,
    tied: true,
    rope_theta: 1e6,
    added: &CHATML,
    eos: "<|im_end|>",
    chat_template: QWEN,
};

pub const QWEN25_MATH_7B: Published = Published {
    shape: "qwen2.5-7b",
    context: 4096,
    tied: false,
    rope_theta: 1e4,
    added: &CHATML,
    eos: "<|endoftext|>",
    chat_template: QWEN,
};

pub const R1_DISTILL_15B: Published = Published {
    shape: "qwen2.5-1.5b",
    context: 131_072,
    tied: false,
    rope_theta: 1e4,
    added: &[
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜begin▁of▁sentence｜>",
        "<|EOT|>",
        "<think>",
        "</think>",
    ],
    eos: "<｜end▁of▁sentence｜>",
    chat_template: "<｜begin▁of▁sentence｜>{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + \
                    m.content }}\
                    {% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% \
                    endif %}",
};

impl Published {
    /// Saves a random model of this shape with Qwen's tokenizer; false where the shared data is not there.
    pub fn save_with_qwen_tokenizer(&self, dir: &Path) -> bool {
        let Some(vocab) = shared_data("tokenizers/qwen2/vocab.json") else { return false };
        let read =
            |name: &str| std::fs::read_to_string(vocab.with_file_name(name)).expect("a tokenizer file");
        let added: Vec<AddedToken> = (151_643..)
            .zip(self.added)
            .map(|(id, name)| AddedToken {
                id,
                content: name.to_string(),
                special: !name.ends_with("think>"),
            })
            .collect();
        let tokenizer =
            Tokenizer::byte_level_bpe(&read("vocab.json"), &read("merges.txt"), BytePattern::Qwen2, &added);
        let tokenizer = tokenizer.expect("a tokenizer");
        let vocab_size = ModelConfig::named(self.shape).expect("a shape").vocab_size;
        self.save(dir, &tokenizer, vocab_size, self.eos, self.chat_template);
        true
    }

    /// The same with a tokenizer of characters, and as many rows of the embedding.
    pub fn save_with_characters(&self, dir: &Path) {
        let printable: String = ('\n'..='\n').chain(' '..='~').collect();
        let specials = CharacterSpecials::default();
        let tokenizer = Tokenizer::characters(&printable, &specials).expect("a tokenizer");
        let template =
            "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{{ 'assistant:' }}";
        self.save(dir, &tokenizer, tokenizer.vocab_size(), &specials.eos, template);
    }

    fn save(&self, dir: &Path, tokenizer: &Tokenizer, vocab_size: usize, eos: &str, template: &str) {
        let mut config = ModelConfig::named(self.shape).expect("a shape");
        config.vocab_size = vocab_size;
        (config.hidden_size, config.intermediate_size, config.num_layers) = (HIDDEN, INTERMEDIATE, 2);
        config.max_position_embeddings = self.context;
        config.tie_word_embeddings = self.tied;
        config.rope.theta = self.rope_theta;
        config.bos_token_id = None;
        config.eos_token_ids = tokenizer.token_to_id(eos).into_iter().collect();
        assert_eq!(config.eos_token_ids.len(), 1, "{eos} is a token");
        config.initializer_range = 0.05; // so that some tokens are clearly likelier than others
        config.check("this test").expect("a configuration");
        let weights = params::init(&config, 11, false);
        let generation =
            GenerationConfig { eos_token_ids: config.eos_token_ids.clone(), ..GenerationConfig::default() };
        let mut files = tokenizer.files().to_vec();
        let place = files.iter().position(|(name, _)| name == "tokenizer_config.json");
        let mut settings: Value =
            place.map_or(json!({}), |i| serde_json::from_slice(&files.remove(i).1).expect("settings"));
        settings["eos_token"] = json!(eos);
        settings["chat_template"] = json!(template);
        files.push(("tokenizer_config.json".to_string(), settings.to_string().into_bytes()));
        let options = SaveOptions { tokenizer_files: &files, ..SaveOptions::new(config.dtype, &generation) };
        save(dir, &config, &weights, &options).expect("saved");
    }
}
