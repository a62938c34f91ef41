//! Small random models and what the tests ask of them.

use qurl_kernels::cpu::level::Level;
use qurl_kernels::types::HeadOutput;
use qurl_kernels::{Cpu, Device, Format, KvFormat, Queue};
use qurl_model::compute::{Network, NetworkOptions};
use qurl_model::config::SlidingWindow;
use qurl_model::rng::{CounterRng, text_key};
use qurl_model::{Dims, Family, ModelConfig, Params, params};
use qurl_rollout::{
    Emitted, Engine, EngineOptions, Group, Request, RolloutError, SampleKey, Sampling, WeightVersion,
};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

pub const WEIGHTS: WeightVersion = WeightVersion { version: 3, checksum: 0xABCD };
pub const POSITIONS: usize = 160;

pub fn cpu(threads: usize) -> Arc<Cpu> {
    let level = *Level::available().last().expect("every machine has a level");
    Arc::new(Cpu::new(level, threads))
}

/// A model with sharp enough distributions, and with every bias and gain in use.
pub fn model(family: Family, vocab_size: usize, seed: u64) -> (ModelConfig, Params<Vec<f32>>) {
    model_of(family, vocab_size, 128, seed)
}

/// The same with another width, shared by four heads.
pub fn model_of(
    family: Family,
    vocab_size: usize,
    hidden_size: usize,
    seed: u64,
) -> (ModelConfig, Params<Vec<f32>>) {
    let dims = Dims {
        vocab_size,
        hidden_size,
        intermediate_size: 256,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
    };
    let mut config = ModelConfig::from_dims(family, dims).expect("dimensions");
    // As sharp at any width.
    config.initializer_range = 0.12 * (128.0 / hidden_size as f32).sqrt();
    let mut params = params::init(&config, seed, false);
    for (leaf, info) in params.iter_mut().zip(params::shapes(&config, false).iter()) {
        if info.rows == 1 {
            let mut noise = vec![0.0; leaf.len()];
            CounterRng::new(&[seed, text_key(&info.name)]).fill_normal(&mut noise, 0.3);
            leaf.iter_mut().zip(noise).for_each(|(x, noise)| *x += noise);
        }
    }
    (config, params)
}

/// Every second layer sees 21 positions, less than most requests have and no whole number of pages.
pub fn windowed(config: ModelConfig) -> ModelConfig {
    let layers = (0..config.num_layers).map(|layer| layer % 2 == 0).collect();
    ModelConfig { sliding_window: Some(SlidingWindow { size: 21, layers }), ..config }
}

pub fn queue<D: Device>(device: &Arc<D>) -> D::Queue {
    device.queue().expect("a queue")
}

pub fn upload<D: Device>(device: &Arc<D>, params: &Params<Vec<f32>>) -> Params<D::Tensor> {
    let mut queue = queue(device);
    let uploaded = params.as_ref().map(|p| queue.upload(p).expect("memory"));
    queue.synchronize().expect("uploaded");
    uploaded
}

/// [`qurl_model::compute::score`] on a queue of its own.
pub fn score<D: Device, S: AsRef<[u32]>>(
    device: &Arc<D>,
    net: &Network<D>,
    sequences: &[S],
    temperature: f32,
    chunk: usize,
) -> Vec<HeadOutput> {
    qurl_model::compute::score(&mut queue(device), net, sequences, temperature, chunk).expect("score")
}

pub fn options(config: &ModelConfig, format: Format) -> NetworkOptions {
    NetworkOptions { positions: POSITIONS, ..NetworkOptions::inference(config, format) }
}

pub fn network(
    cpu: &Arc<Cpu>,
    config: &ModelConfig,
    params: &Params<Vec<f32>>,
    format: Format,
    kv: Option<KvFormat>,
) -> Network<Cpu> {
    let mut options = options(config, format);
    options.kv_format = kv.unwrap_or(options.kv_format);
    Network::new(&mut queue(cpu), config, &upload(cpu, params), options).expect("network")
}

/// Pages for everything at once.
pub fn roomy() -> EngineOptions {
    EngineOptions {
        kv_bytes: 64 << 20,
        page_size: 16,
        max_num_seqs: 64,
        max_num_batched_tokens: 256,
        share_prefixes: false,
    }
}

/// An engine with the queue it works on.
pub struct Served<D: Device> {
    pub queue: D::Queue,
    pub engine: Engine<D>,
}

impl<D: Device> Served<D> {
    pub fn new(
        device: &Arc<D>,
        net: Network<D>,
        weights: WeightVersion,
        options: EngineOptions,
    ) -> Served<D> {
        let engine = Engine::new(device.clone(), net, weights, options).expect("engine");
        Served { queue: queue(device), engine }
    }

    pub fn generate(&mut self, requests: &[Request]) -> Result<Vec<Group>, RolloutError> {
        self.engine.generate(&mut self.queue, requests)
    }

    pub fn step(&mut self) -> Result<&[Emitted], RolloutError> {
        self.engine.step(&mut self.queue)
    }

    pub fn load(&mut self, params: &Params<D::Tensor>, weights: WeightVersion) -> Result<(), RolloutError> {
        self.engine.load(&mut self.queue, params, weights)
    }
}

impl<D: Device> Deref for Served<D> {
    type Target = Engine<D>;

    fn deref(&self) -> &Engine<D> {
        &self.engine
    }
}

impl<D: Device> DerefMut for Served<D> {
    fn deref_mut(&mut self) -> &mut Engine<D> {
        &mut self.engine
    }
}

pub fn engine(cpu: &Arc<Cpu>, net: Network<Cpu>, options: EngineOptions) -> Served<Cpu> {
    Served::new(cpu, net, WEIGHTS, options)
}

/// A small model, and engines that make text of its tokens: `<17>`.
pub struct Small {
    pub cpu: Arc<Cpu>,
    pub config: ModelConfig,
    pub params: Params<Vec<f32>>,
    pub format: Format,
}

impl Small {
    pub fn new(vocabulary: usize, format: Format) -> Small {
        let (config, params) = model(Family::Qwen2, vocabulary, 1);
        Small { cpu: cpu(2), config, params, format }
    }

    pub fn engine(&self, options: EngineOptions, ahead: bool) -> Served<Cpu> {
        let net = network(&self.cpu, &self.config, &self.params, self.format, None);
        let mut engine = engine(&self.cpu, net, options);
        engine.set_text_decoder(Arc::new(|ids| ids.iter().map(|id| format!("<{id}>")).collect()));
        engine.set_ahead(ahead);
        engine
    }
}

/// An engine with a budget of exactly this many pages.
pub fn engine_of_pages(
    cpu: &Arc<Cpu>,
    net: Network<Cpu>,
    pages: usize,
    options: EngineOptions,
) -> Served<Cpu> {
    let page = cpu.kv_page_bytes(net.kv_shape(1, options.page_size));
    let kv_bytes = page * net.config().num_layers * pages + page / 2;
    let engine = engine(cpu, net, EngineOptions { kv_bytes, ..options });
    assert_eq!(engine.pages().total(), pages);
    engine
}

/// Prompts and settings of many kinds.
pub fn mixed_requests(vocabulary: usize) -> Vec<Request> {
    let rng = CounterRng::new(&[text_key("prompts")]);
    let lens = [1, 5, 16, 17, 33, 60, 2, 31, 32, 48];
    let temperatures = [1.0, 0.7, 1.0, 1.3, 1.0, 0.7];
    lens.iter()
        .enumerate()
        .map(|(i, &len)| Request {
            n: 1 + i % 4,
            sampling: Sampling { temperature: temperatures[i % temperatures.len()], ..Sampling::default() },
            key: SampleKey { seed: 11, step: 2, prompt: i as u64 },
            stop_ids: (0..vocabulary as u32).filter(|t| t % 29 == i as u32).collect(),
            prompt_logprobs: i % 2 == 0,
            ..Request::new((0..len).map(|p| token(&rng, i, p, vocabulary)).collect(), 7 + 13 * i % 40)
        })
        .collect()
}

fn token(rng: &CounterRng, prompt: usize, position: usize, vocabulary: usize) -> u32 {
    rng.below_at((prompt * 1000 + position) as u64, vocabulary as u64) as u32
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Everything but the request's number is the same, bit for bit.
pub fn assert_same(what: &str, a: &[Group], b: &[Group]) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (a, b) in a.iter().zip(b) {
        assert_eq!((a.key, &a.prompt), (b.key, &b.prompt), "{what}");
        assert_eq!(bits(&a.prompt_logprobs), bits(&b.prompt_logprobs), "{what}: prompt {:?}", a.key);
        assert_eq!(a.samples.len(), b.samples.len(), "{what}");
        for (a, b) in a.samples.iter().zip(&b.samples) {
            assert_eq!((&a.tokens, a.finish, a.weights), (&b.tokens, b.finish, b.weights), "{what}");
            assert_eq!(bits(&a.logprobs), bits(&b.logprobs), "{what}");
            assert_eq!(bits(&a.entropies), bits(&b.entropies), "{what}");
        }
    }
}
