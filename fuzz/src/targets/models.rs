//! Model directories: tokenizers, chat templates, configurations and weights.

use super::{Run, Target};
use crate::input::Input;
use qurl_model::config::Dtype;
use qurl_model::hf::{self, SaveOptions};
use qurl_model::tokenizer::CharacterSpecials;
use qurl_model::{ChatTemplate, Dims, Family, GenerationConfig, ModelConfig, Tokenizer, params};
use qurl_train::start::Start;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

/// What tokenizers are asked to read.
const TEXTS: [&str; 4] =
    ["", "12+34=46", "<|im_start|>user\nDie Straße, 3 \u{1f600}\u{200d} \u{0} \r\n", "aaaa    bb"];
/// The time that templates are told.
const NOW: u64 = 1_700_000_000;

pub const TOKENIZER: Target = Target {
    name: "tokenizer",
    about: "tokenizer.json and the files beside it: text to ids and back",
    words: &[
        "BPE",
        "WordPiece",
        "Unigram",
        "WordLevel",
        "ByteLevel",
        "Split",
        "Regex",
        "Sequence",
        "Metaspace",
        "Replace",
        "TemplateProcessing",
        "Precompiled",
        "NFC",
        "Strip",
        "Prepend",
        "Fuse",
        "model",
        "vocab",
        "merges",
        "type",
        "normalizer",
        "pre_tokenizer",
        "post_processor",
        "decoder",
        "added_tokens",
        "content",
        "special",
        "pattern",
        "(?i:a|b)*",
        "(a*)*$",
        "unk_token",
        "byte_fallback",
        "ignore_merges",
        "Digits",
        "Truncate",
        "max_length",
        "stride",
        "direction",
        "strategy",
        "padding",
        "truncation",
        "Punctuation",
        "behavior",
        "Isolated",
        "prefix",
    ],
    made: |_| {
        let tokenizer = Tokenizer::characters("0123456789+= ab<>|", &CharacterSpecials::default())?;
        Ok(vec![Input::new(tokenizer.files().to_vec())])
    },
    open: |_| {
        Ok(Box::new(|input| {
            let Ok(tokenizer) = Tokenizer::from_files(input.parts.clone(), "input") else { return false };
            for text in TEXTS {
                if let Ok(ids) = tokenizer.encode(text, true) {
                    _ = tokenizer.decode(&ids, false);
                }
            }
            _ = tokenizer.decode(&[0, 1, 2, 3, 4, 5, 1 << 20, u32::MAX], true);
            _ = (
                tokenizer.special_tokens(),
                tokenizer.id_to_token(u32::MAX),
                ChatTemplate::of(&tokenizer).is_ok(),
            );
            true
        }))
    },
};

pub const TEMPLATE: Target = Target {
    name: "template",
    about: "chat templates and the messages they are given",
    words: &[
        "{{",
        "}}",
        "{%",
        "%}",
        "{%- for m in messages %}",
        "{%- endfor %}",
        "{% if true %}",
        "{% endif %}",
        "{% set x = x + [x] %}",
        "range(1000000000)",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}",
        "loop.index",
        "| tojson",
        "| tojson(indent=1000000)",
        "* 1000000000",
        "~",
        "namespace()",
        ".split('')",
        ".replace('', 'aa')",
        "|join",
        "|length",
        "|trim",
        "messages",
        "messages[-1]",
        "content",
        "role",
        "raise_exception('no')",
        "strftime_now('%d %B %Y')",
        "{# #}",
        "'a' * 100000",
        "%s",
        "dict(a=1)",
        "|batch(1)",
        "[::-1]",
        ".items()",
        "{% generation %}",
        "{% endgeneration %}",
        "**",
        "//",
        "%",
        "is defined",
        "|indent(100000)",
        "|int",
    ],
    made: |_| Ok(Vec::new()),
    open: |_| {
        Ok(Box::new(|input| {
            let Ok(template) = ChatTemplate::new(&input.text("template.jinja"), "template.jinja") else {
                return false;
            };
            let messages = serde_json::from_slice(input.bytes("messages.json")).unwrap_or(Value::Null);
            template.with_time(NOW).render_json(&messages, true, &Map::new()).is_ok()
        }))
    },
};

pub const MODEL: Target = Target {
    name: "model",
    about: "model directories: config.json, generation_config.json, safetensors",
    words: &[
        "F32",
        "F16",
        "BF16",
        "I8",
        "F8_E4M3",
        "U64",
        "qwen2",
        "qwen3",
        "llama",
        "mistral",
        "model_type",
        "dtype",
        "shape",
        "data_offsets",
        "rope_scaling",
        "llama3",
        "yarn",
        "linear",
        "dynamic",
        "factor",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_key_value_heads",
        "head_dim",
        "tie_word_embeddings",
        "rms_norm_eps",
        "model.embed_tokens.weight",
        "lm_head.weight",
        "score.weight",
        "__metadata__",
        "sliding_window",
        "layer_types",
        "quantization_config",
        "eos_token_id",
        "max_position_embeddings",
        "torch_dtype",
        "weight_map",
    ],
    made: models,
    open: |scratch| {
        let mut folder = Folder::new(scratch.join("model"));
        let run: Run = Box::new(move |input| {
            folder.hold(&input.parts).expect("the files of an input");
            Start::load(folder.path()).is_ok()
        });
        Ok(run)
    },
};

/// A folder that holds the files of one input after the other. Only what differs is written: most inputs have
/// most of their files from the same seed.
pub struct Folder {
    path: PathBuf,
    there: BTreeMap<String, Vec<u8>>,
}

impl Folder {
    /// An empty folder.
    pub fn new(path: PathBuf) -> Folder {
        Folder { path, there: BTreeMap::new() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes these files, and no others, be there.
    pub fn hold(&mut self, parts: &[(String, Vec<u8>)]) -> io::Result<()> {
        let gone = |name: &&String| !parts.iter().any(|(part, _)| part == *name);
        let gone: Vec<String> = self.there.keys().filter(gone).cloned().collect();
        for name in gone {
            self.there.remove(&name);
            std::fs::remove_file(self.path.join(name))?;
        }
        let there = &self.there;
        let new = parts.iter().filter(|(name, bytes)| there.get(name) != Some(bytes)).cloned().collect();
        let new = Input { parts: new };
        new.write(&self.path)?;
        self.there.extend(new.parts);
        Ok(())
    }
}

/// Small models of three families, one in several files.
fn models(folder: &Path) -> Result<Vec<Input>, Box<dyn Error>> {
    let tokenizer = Tokenizer::characters("0123456789+=", &CharacterSpecials::default())?;
    let dims = Dims {
        vocab_size: tokenizer.vocab_size(),
        hidden_size: 8,
        intermediate_size: 8,
        num_layers: 1,
        num_heads: 2,
        num_kv_heads: 1,
    };
    let mut inputs = Vec::new();
    for (family, dtype, max_shard_bytes) in [
        (Family::Qwen2, Dtype::Bf16, u64::MAX),
        (Family::Llama, Dtype::F32, 600),
        (Family::Qwen3, Dtype::F16, u64::MAX),
    ] {
        let config = ModelConfig::from_dims(family, dims)?;
        let generation = GenerationConfig { eos_token_ids: vec![1], ..GenerationConfig::default() };
        let options = SaveOptions {
            tokenizer_files: tokenizer.files(),
            max_shard_bytes,
            ..SaveOptions::new(dtype, &generation)
        };
        let place = folder.join(family.model_type());
        hf::save(&place, &config, &params::init(&config, 1, false), &options)?;
        inputs.push(Input::read(&place)?);
    }
    Ok(inputs)
}
