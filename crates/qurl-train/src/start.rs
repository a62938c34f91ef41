//! What a run starts from: configuration, weights, tokenizer and chat template.

use crate::learner::LearnerStart;
use crate::recipe::Recipe;
use qurl_model::chat::{self, ChatError, ChatTemplate};
use qurl_model::compute::Base;
use qurl_model::hf::{LoadedModel, OpenModel, hub, peft};
use qurl_model::rng::text_key;
use qurl_model::tokenizer::{CharacterSpecials, Tokenizer, TokenizerError};
use qurl_model::{ConfigError, GenerationConfig, HfError, Lora, ModelConfig, Params, hf, params};
use qurl_quant::checksum;
use qurl_tasks::task::{Prompt, Task};
use std::path::{Path, PathBuf};

/// The 26th of July 2024 in seconds since 1970: the date of Llama's chat templates where they are told none.
const TEMPLATE_DATE: u64 = 1_721_952_000;

/// A model with everything that belongs to it.
pub struct Start {
    /// Sizes and tokens.
    pub config: ModelConfig,
    /// Weights on the host; those of a base beside which adapters are trained stay in its files.
    pub weights: Params<Vec<f32>>,
    /// What is trained in place of the weights, where it is adapters.
    pub adapters: Option<StartAdapters>,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// How chats become text, if the tokenizer says.
    pub template: Option<ChatTemplate>,
    /// What is saved beside the model.
    pub generation: GenerationConfig,
    /// What a user should know of the model's files, if anything.
    pub warning: Option<String>,
}

/// Adapters beside a frozen base.
pub struct StartAdapters {
    /// Which, and how large.
    pub lora: Lora,
    /// Their weights; the leaves of the base have no numbers.
    pub weights: Params<Vec<f32>>,
    /// Where the base is.
    pub base: BaseSource,
    /// Where they are.
    pub dir: PathBuf,
}

/// Where the weights of a frozen base come from.
pub enum BaseSource {
    /// Its files.
    Files(Box<OpenModel>),
    /// Random numbers of a seed, made on the device: for benchmarks.
    Random(u64),
}

/// Why a run cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The directory of the model.
    #[error(transparent)]
    Hf(#[from] HfError),
    /// Its tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The tokenizer of another model.
    #[error("{dir}: {source}")]
    WrongTokenizer {
        /// The directory of the model.
        dir: String,
        /// What does not fit.
        source: TokenizerError,
    },
    /// A new model does not fit into memory.
    #[error(
        "[model.new]: {} MiB of weights in f32, expected at most the {} MiB of memory that are free",
        need >> 20, free >> 20
    )]
    Memory {
        /// Bytes that they take.
        need: u64,
        /// Bytes that can be had.
        free: u64,
    },
    /// The model is not where the recipe says.
    #[error("{place}: key `model.path` is {found}: {why}")]
    NoModel {
        /// File and line, or the override.
        place: String,
        /// The path, or the id of the hub.
        found: String,
        /// What is wrong, and what would help.
        why: String,
    },
    /// An adapter of other sizes than the recipe's.
    #[error("key `lora.path` is {path}, an adapter with {found}, expected {expected} as in [lora]")]
    OtherAdapter {
        /// The directory.
        path: String,
        /// What it has.
        found: String,
        /// What the recipe asks for.
        expected: String,
    },
    /// Its chat template.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// The sizes of a new model.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A context that is shorter than the model's.
    #[error(
        "key `model.max_position_embeddings` is {found}, expected at least the {own} of {file}: it is for \
         positions beyond them, and `data.max_prompt_length` and `data.max_response_length` bound what is \
         used"
    )]
    ShorterContext {
        /// What was asked for.
        found: usize,
        /// What the model has.
        own: usize,
        /// Its file.
        file: String,
    },
    /// A new model needs a tokenizer of characters, and the task has too many of them.
    #[error(
        "key `model.new`: the task {task:?} has no small alphabet to make a tokenizer of; give `model.path` \
         instead"
    )]
    NoAlphabet {
        /// The task.
        task: String,
    },
    /// A new model needs the alphabet of a task, and there is none.
    #[error(
        "key `model.new`: a new model takes its alphabet from the task, and there is no [task]; give one, or \
         `model.path` instead"
    )]
    NewWithoutTask,
    /// A chat prompt needs a template.
    #[error("the prompt is a chat and the tokenizer has no chat template")]
    NoTemplate,
    /// A text that is too long whatever its tokens are: they are not looked for.
    #[error("a text of {bytes} bytes has more tokens than the {most} of the model's context")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// Tokens of the context.
        most: usize,
    },
}

impl Start {
    /// Loads a Hugging Face directory.
    pub fn load(dir: &Path) -> Result<Start, StartError> {
        let model = hf::load(dir)?;
        let warning = model.warning(dir);
        let LoadedModel { config, params: weights, generation, .. } = model;
        Start::with_tokenizer(dir, config, weights, generation, warning)
    }

    /// Opens a Hugging Face directory to sample from it: its weights, of which there are none here, stay in
    /// its files.
    pub fn without_weights(dir: &Path) -> Result<(Start, OpenModel), StartError> {
        let model = hf::open(dir)?;
        let (config, generation) = (model.config.clone(), model.generation.clone());
        let nothing = params::shapes(&config, false).map(|_| Vec::new());
        let start = Start::with_tokenizer(dir, config, nothing, generation, model.warning(dir))?;
        Ok((start, model))
    }

    fn with_tokenizer(
        dir: &Path,
        config: ModelConfig,
        weights: Params<Vec<f32>>,
        generation: GenerationConfig,
        warning: Option<String>,
    ) -> Result<Start, StartError> {
        generation.check_end_tokens(&config, dir).map_err(qurl_model::HfError::from)?;
        let tokenizer = Tokenizer::load(dir)?;
        let wrong = |source| StartError::WrongTokenizer { dir: dir.display().to_string(), source };
        tokenizer.check_fits(&config).map_err(wrong)?;
        let template = ChatTemplate::of(&tokenizer)?;
        let warning = joined(warning, foreign_tokenizer(dir, &tokenizer, &config));
        Ok(Start { config, weights, adapters: None, tokenizer, template, generation, warning })
    }

    /// Opens a Hugging Face directory beside which adapters are trained: those of `path`, or new ones.
    fn open(dir: &Path, lora: Lora, path: Option<&Path>, seed: u64) -> Result<Start, StartError> {
        let (mut start, base) = Start::without_weights(dir)?;
        let weights = match path {
            Some(path) => {
                let adapter = peft::load(path, &base.config)?;
                if adapter.lora != lora {
                    let path = path.display().to_string();
                    let (found, expected) = (adapter.lora.to_string(), lora.to_string());
                    return Err(StartError::OtherAdapter { path, found, expected });
                }
                adapter.params
            }
            None => lora.init(&base.config, seed),
        };
        let base = BaseSource::Files(Box::new(base));
        start.adapters = Some(StartAdapters { lora, weights, base, dir: dir.to_path_buf() });
        Ok(start)
    }

    /// What a learner starts from.
    pub fn learner(&self) -> LearnerStart<'_> {
        match &self.adapters {
            Some(StartAdapters { base, weights, .. }) => {
                let base = match base {
                    BaseSource::Files(files) => Base::Files(files),
                    BaseSource::Random(seed) => Base::Random(&self.config, *seed),
                };
                LearnerStart::Adapters(base, weights)
            }
            None => LearnerStart::Whole(&self.weights),
        }
    }

    /// The start of supervised training, which may have no task. A chat template that asks for the date is
    /// told the 26th of July 2024, so that the examples are the same on every day.
    pub fn of_sft(recipe: &Recipe, task: Option<&dyn Task>) -> Result<Start, StartError> {
        let mut start = match task {
            Some(task) => Start::from_recipe(recipe, task)?,
            None => Start::given(recipe)?.ok_or(StartError::NewWithoutTask)?,
        };
        start.template = start.template.map(|template| template.with_time(TEMPLATE_DATE));
        Ok(start)
    }

    /// Loads the recipe's model, or makes a new one for the task's alphabet.
    pub fn from_recipe(recipe: &Recipe, task: &dyn Task) -> Result<Start, StartError> {
        if let Some(start) = Start::given(recipe)? {
            return Ok(start);
        }
        let alphabet =
            task.alphabet().ok_or_else(|| StartError::NoAlphabet { task: task.name().to_string() })?;
        let tokenizer = Tokenizer::characters(alphabet, &CharacterSpecials::default())?;
        let Some(new) = &recipe.model.new else {
            return Err(StartError::NoAlphabet { task: task.name().to_string() });
        };
        let mut config = new.config(tokenizer.vocab_size())?;
        let specials = tokenizer.specials();
        config.bos_token_id = specials.bos.as_ref().map(|s| s.id);
        config.pad_token_id = specials.pad.as_ref().map(|s| s.id);
        config.eos_token_ids = tokenizer.eos().into_iter().collect();
        let generation =
            GenerationConfig { eos_token_ids: config.eos_token_ids.clone(), ..GenerationConfig::default() };
        let need = config.param_count().saturating_mul(4);
        if let Some(free) = qurl_files::available_memory().filter(|&free| need > free) {
            return Err(StartError::Memory { need, free });
        }
        let weights = params::init(&config, recipe.trainer.seed, false);
        Ok(Start { config, weights, adapters: None, tokenizer, template: None, generation, warning: None })
    }

    /// The model of `model.path`; none where the recipe wants a new one.
    fn given(recipe: &Recipe) -> Result<Option<Start>, StartError> {
        if let Some(dir) = &recipe.model.path {
            if !dir.is_dir() {
                let why = match hub::id(dir) {
                    Some(id) => hub::how_to_get(id),
                    None if dir.exists() => {
                        "a file, expected the directory that holds config.json".to_string()
                    }
                    None => "there is no such directory".to_string(),
                };
                let (place, found) = (recipe.place(recipe.file(), "model.path"), dir.display().to_string());
                return Err(StartError::NoModel { place, found, why });
            }
            let start = match &recipe.lora {
                Some(lora) => Start::open(dir, lora.lora(), lora.path.as_deref(), recipe.trainer.seed)?,
                None => Start::load(dir)?,
            };
            return start.extended(dir, recipe.model.max_position_embeddings).map(Some);
        }
        Ok(None)
    }

    /// The same with a longer context, where one is asked for; says so, since the model never saw such
    /// positions.
    fn extended(mut self, dir: &Path, context: Option<usize>) -> Result<Start, StartError> {
        let own = self.config.max_position_embeddings;
        let Some(found) = context.filter(|&context| context != own) else { return Ok(self) };
        let file = dir.join("config.json").display().to_string();
        if found < own {
            return Err(StartError::ShorterContext { found, own, file });
        }
        self.config.max_position_embeddings = found;
        self.config.check("recipe, key `model.max_position_embeddings`")?;
        let note = format!(
            "{file} has max_position_embeddings = {own}; the recipe asks for {found}: positions from {own} \
             on are rotated as before, without scaling, and the model was not made for them"
        );
        self.warning = joined(self.warning, Some(note));
        Ok(self)
    }

    /// A number that tells these weights from others.
    pub fn checksum(&self) -> u64 {
        let Some(adapters) = &self.adapters else { return checksum::host_params(&self.weights) };
        // Configuration and sizes of the base's files stand for it here, since its weights are read while
        // they are packed; a run that resumes compares those ([`crate::base`]).
        let base = match &adapters.base {
            BaseSource::Files(files) => text_key(&format!("{:?}", files.stored())),
            BaseSource::Random(seed) => *seed,
        };
        base ^ checksum::host_params(&adapters.weights)
    }

    /// Tokens that end a response.
    pub fn stop_ids(&self) -> Vec<u32> {
        let mut ids = self.generation.eos_token_ids.clone();
        ids.extend(&self.config.eos_token_ids);
        ids.extend(self.tokenizer.eos());
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Tokens of a prompt.
    pub fn encode(&self, prompt: &Prompt) -> Result<Vec<u32>, StartError> {
        encode(&self.tokenizer, self.template.as_ref(), prompt, self.config.max_position_embeddings)
    }

    /// Tokens of a text, which fit into the model's context if it is no longer than that allows.
    pub fn encode_text(&self, text: &str, add_special: bool) -> Result<Vec<u32>, StartError> {
        encode_text(&self.tokenizer, text, add_special, self.config.max_position_embeddings)
    }
}

/// Tokens of a text for a context of `most`.
fn encode_text(
    tokenizer: &Tokenizer,
    text: &str,
    add_special: bool,
    most: usize,
) -> Result<Vec<u32>, StartError> {
    if tokenizer.tokens_at_least(text) > most {
        return Err(StartError::TooLong { bytes: text.len(), most });
    }
    Ok(tokenizer.encode(text, add_special)?)
}

/// Tokens of a prompt for a context of `most`.
pub fn encode(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    prompt: &Prompt,
    most: usize,
) -> Result<Vec<u32>, StartError> {
    match prompt {
        Prompt::Text(text) => encode_text(tokenizer, text, true, most),
        Prompt::Chat(messages) => {
            let template = template.ok_or(StartError::NoTemplate)?;
            let messages: Vec<chat::Message> =
                messages.iter().map(|m| chat::Message::new(&m.role, &m.content)).collect();
            encode_text(tokenizer, &template.render(&messages, true)?, false, most)
        }
    }
}

/// That a tokenizer leaves most of the model's vocabulary unused, as the tokenizer of another model does.
fn foreign_tokenizer(dir: &Path, tokenizer: &Tokenizer, config: &ModelConfig) -> Option<String> {
    let (used, there) = (tokenizer.vocab_size(), config.vocab_size);
    (2 * used < there).then(|| {
        let dir = dir.display();
        format!(
            "{dir}: the tokenizer has {used} of the model's {there} tokens; it may be that of another model"
        )
    })
}

/// Two warnings, a line each.
fn joined(first: Option<String>, second: Option<String>) -> Option<String> {
    let all: Vec<String> = first.into_iter().chain(second).collect();
    (!all.is_empty()).then(|| all.join("\n"))
}
