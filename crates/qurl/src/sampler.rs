//! A model that answers prompts: what `generate` and `chat` have in common.

use crate::adapter::AdapterArg;
use crate::device::DeviceArg;
use crate::input::{OrBad, bad};
use crate::model;
use crate::packing::Packing;
use qurl_kernels::{Device, Queue};
use qurl_model::chat::{ChatTemplate, Message};
use qurl_model::compute::NetworkOptions;
use qurl_model::hf::OpenModel;
use qurl_model::tokenizer::{StreamDecoder, Tokenizer, TokenizerError};
use qurl_rollout::{Engine, EngineOptions, Group, Request, SampleKey, Sampling, WeightVersion};
use std::path::PathBuf;
use std::sync::Arc;

/// Memory for keys and values is what the samples need, but no more than this unless a single one needs it.
const KV_BYTES: usize = 2 << 30;

/// Which model, and how it is sampled from.
#[derive(clap::Args)]
pub struct SamplerArgs {
    /// Hugging Face directory, or an id of the hub whose snapshot is in the local cache
    #[arg(long, value_parser = crate::model::directory)]
    pub model: PathBuf,
    #[command(flatten)]
    adapter: AdapterArg,
    #[command(flatten)]
    packing: Packing,
    #[command(flatten)]
    pub device: DeviceArg,
    /// Most new tokens of a sample
    #[arg(long, default_value_t = 256)]
    pub max_new: usize,
    /// Softmax temperature; 0 takes the argmax
    #[arg(long, default_value_t = 1.0)]
    temperature: f32,
    /// Keep the smallest set of tokens with at least this probability
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Keep this many of the most probable tokens; 0 keeps all
    #[arg(long, default_value_t = 0)]
    top_k: u32,
    /// Keep tokens with at least this share of the largest probability
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Text that ends a sample; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Seed of the random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// The parts of a directory that turn text into tokens and back.
pub struct Texts {
    dir: PathBuf,
    /// Missing where nothing asks for text.
    pub tokenizer: Option<Arc<Tokenizer>>,
    template: Option<ChatTemplate>,
    /// Tokens of the model's context.
    context: usize,
}

impl Texts {
    fn load(args: &SamplerArgs, model: &OpenModel, needed: bool) -> anyhow::Result<Texts> {
        let dir = args.model.clone();
        model.generation.check_end_tokens(&model.config, &dir).or_bad()?;
        let tokenizer = match Tokenizer::load(&dir) {
            Err(TokenizerError::NotFound { .. }) if !needed && args.stop.is_empty() => None,
            Err(error) => return Err(bad(error)),
            Ok(tokenizer) => {
                tokenizer.check_fits(&model.config).map_err(|e| bad(format!("{}: {e}", dir.display())))?;
                Some(Arc::new(tokenizer))
            }
        };
        let template = match &tokenizer {
            Some(tokenizer) => ChatTemplate::of(tokenizer).or_bad()?,
            None => None,
        };
        Ok(Texts { dir, tokenizer, template, context: model.config.max_position_embeddings })
    }

    fn tokenizer(&self) -> anyhow::Result<&Tokenizer> {
        self.tokenizer
            .as_deref()
            .ok_or_else(|| bad(format!("{} has no tokenizer: give ids", self.dir.display())))
    }

    /// Tokens of a text to continue.
    pub fn of_text(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        if text.is_empty() {
            return Err(bad("the prompt is empty: expected some text"));
        }
        self.encode(text, true)
    }

    /// Tokens of a conversation that the model is to answer; `asked` is what asked for the chat template.
    pub fn of_chat(&self, messages: &[Message], asked: &str) -> anyhow::Result<Vec<u32>> {
        let dir = self.dir.display();
        self.tokenizer()?;
        let missing = || format!("{asked}: {dir} has no chat template; only text to continue can be given");
        let template = self.template.as_ref().ok_or_else(|| bad(missing()))?;
        self.encode(&template.render(messages, true).or_bad()?, false)
    }

    /// Tokens of a text; one that is too long whatever they are is refused before they are looked for.
    fn encode(&self, text: &str, add_special: bool) -> anyhow::Result<Vec<u32>> {
        let (tokenizer, bytes, context) = (self.tokenizer()?, text.len(), self.context);
        if tokenizer.tokens_at_least(text) > context {
            let why = "more tokens than the model's context, which has";
            return Err(bad(format!("the prompt has {bytes} bytes and so {why} {context}")));
        }
        tokenizer.encode(text, add_special).or_bad()
    }
}

/// A model with its engine.
pub struct Sampler<D: Device> {
    /// Where it computes.
    pub queue: D::Queue,
    /// The engine.
    pub engine: Engine<D>,
    /// Text to tokens and back.
    pub texts: Texts,
    request: Request,
}

/// How much is asked of a sampler at a time.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Sequences that run together.
    pub sequences: usize,
    /// Longest sequence, prompt included; the model's context where that is shorter.
    pub positions: usize,
}

impl<D: Device> Sampler<D> {
    /// Loads model and tokenizer, which must be there if text is `needed`. How much it is asked for follows
    /// from the texts.
    pub fn load(
        device: Arc<D>,
        args: &SamplerArgs,
        needed: bool,
        size: impl FnOnce(&Texts) -> anyhow::Result<Size>,
    ) -> anyhow::Result<Sampler<D>> {
        let model = model::open(&args.model)?;
        let texts = Texts::load(args, &model, needed)?;
        let Size { sequences, positions } = size(&texts)?;
        let request = Request {
            sampling: Sampling {
                temperature: args.temperature,
                top_p: args.top_p,
                top_k: args.top_k,
                min_p: args.min_p,
            },
            key: SampleKey { seed: args.seed, ..SampleKey::default() },
            stop_ids: stop_ids(&model, texts.tokenizer.as_deref()),
            stop_strings: args.stop.clone(),
            ..Request::new(Vec::new(), args.max_new)
        };
        let mut queue = device.queue()?;
        let mut engine = engine(&mut queue, args, &model, sequences, positions)?;
        if let Some(tokenizer) = &texts.tokenizer {
            let tokenizer = tokenizer.clone();
            // A decoder fails on ids without a token only, and the engine's are the model's own.
            engine.set_text_decoder(Arc::new(move |ids| tokenizer.decode(ids, true).unwrap_or_default()));
        }
        Ok(Sampler { queue, engine, texts, request })
    }

    /// A request for `n` samples of a prompt; `number` sets its random numbers apart from those of other
    /// prompts.
    pub fn request(&self, prompt: Vec<u32>, n: usize, number: u64) -> Request {
        let key = SampleKey { prompt: number, ..self.request.key };
        Request { prompt, n, key, ..self.request.clone() }
    }

    /// Gives the text of the only sample of a request piece by piece as it is made.
    pub fn stream(
        &mut self,
        request: Request,
        mut show: impl FnMut(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<Option<Group>> {
        let Some(tokenizer) = self.texts.tokenizer.clone() else {
            return Ok(self.engine.generate(&mut self.queue, &[request])?.pop());
        };
        let mut decoder = StreamDecoder::new(true);
        self.engine.submit(request)?;
        while self.engine.unfinished() > 0 {
            for emitted in self.engine.step(&mut self.queue)? {
                show(&decoder.push(&tokenizer, emitted.token)?)?;
            }
        }
        show(&decoder.finish(&tokenizer)?)?;
        Ok(self.engine.finished().pop())
    }
}

/// Tokens that end a sample.
fn stop_ids(model: &OpenModel, tokenizer: Option<&Tokenizer>) -> Vec<u32> {
    let mut ids = model.generation.eos_token_ids.clone();
    ids.extend(&model.config.eos_token_ids);
    ids.extend(tokenizer.and_then(Tokenizer::eos));
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn engine<D: Device>(
    queue: &mut D::Queue,
    args: &SamplerArgs,
    model: &OpenModel,
    sequences: usize,
    positions: usize,
) -> anyhow::Result<Engine<D>> {
    let config = &model.config;
    let positions = positions.min(config.max_position_embeddings);
    let options = NetworkOptions { positions, ..args.packing.options(config) };
    let (network, _) = args.adapter.network::<D>(queue, &args.model, model, options)?;
    let defaults = EngineOptions::default();
    let device = queue.device().clone();
    let layer_page = device.kv_page_bytes(network.kv_shape(1, defaults.page_size));
    let sample = layer_page * config.num_layers * (positions.div_ceil(defaults.page_size) + 1);
    let kv_bytes = sample.saturating_mul(sequences.max(1)).min(sample.max(KV_BYTES));
    let max_num_seqs = sequences.clamp(1, defaults.max_num_seqs);
    let options = EngineOptions { kv_bytes, max_num_seqs, ..defaults };
    Engine::new(device, network, WeightVersion::default(), options).or_bad()
}
