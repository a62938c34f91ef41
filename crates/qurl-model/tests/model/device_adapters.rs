//! Adapters beside a frozen base on a GPU: training, scoring and decoding have the same bits in every format
//! that the GPU has, and log-probs and gradients are those of the CPU. Says so and passes where there is no
//! GPU.

use crate::common::golden::{ADAPTED, flatten, gradients_of, load_adapted, upload, whole, zeros_like};
use qurl_kernels::cpu::level::Level;
use qurl_kernels::types::HeadGradient;
use qurl_kernels::{Cpu, Cuda, Device, Format, Queue};
use qurl_model::compute::{
    Base, BaseLeaves, Network, NetworkOptions, Recompute, Tape, TapeOptions, Targets, score, whole_batch,
};
use qurl_model::lora::{Module, Modules};
use qurl_model::rng::CounterRng;
use qurl_model::{Dims, Family, Lora, ModelConfig, Params, params};
use std::sync::Arc;

fn device() -> Option<Arc<Cuda>> {
    let cuda = Cuda::open(0).map_err(|reason| eprintln!("skipped: {reason}"));
    cuda.ok().map(Arc::new)
}

/// A base with adapters that do something.
struct Model {
    config: ModelConfig,
    base: Params<Vec<f32>>,
    lora: Lora,
    adapters: Params<Vec<f32>>,
    ids: Vec<Vec<u32>>,
}

impl Model {
    /// Wide enough for the GEMMs on tensor cores.
    fn wide(lora: Lora) -> Model {
        let dims = Dims {
            vocab_size: 320,
            hidden_size: 256,
            intermediate_size: 512,
            num_layers: 3,
            num_heads: 4,
            num_kv_heads: 2,
        };
        let config = ModelConfig::from_dims(Family::Qwen2, dims).expect("a configuration");
        let base = params::init(&config, 5, false);
        let mut adapters = lora.init(&config, 6);
        let random = CounterRng::new(&[7]);
        let numbers = adapters.iter_mut().flatten().enumerate();
        numbers.for_each(|(i, x)| *x += 0.05 * random.normal_at(i as u64) as f32);
        let sequence = |len: u64| (0..len).map(|i| random.below_at(1000 * len + i, 320) as u32).collect();
        Model { config, base, lora, adapters, ids: [150, 1, 33, 97].map(sequence).into() }
    }
}

/// What a device computes.
struct Computed {
    logp: Vec<f32>,
    gradients: Vec<Vec<f32>>,
}

fn compute<D: Device>(device: &Arc<D>, model: &Model, format: Format) -> Computed {
    let Model { config, base, lora, adapters, ids } = model;
    let queue = &mut device.queue().expect("a queue");
    let options = NetworkOptions { lora: Some(*lora), ..NetworkOptions::training(config, format) };
    let mut base = BaseLeaves::<D>::new(Base::Host(base));
    let mut net = Network::<D>::of_leaves(queue, config, false, &mut base, options).expect("network");
    let options = NetworkOptions { trained: false, ..options };
    let mut sharing = net.sharing(queue, options).expect("network");
    let uploaded = upload::<D>(queue, adapters);
    net.refresh(queue, &uploaded).expect("adapters");
    sharing.refresh(queue, &uploaded).expect("adapters");
    let batch = whole_batch(ids);
    let targets = || Targets::of(ids, |_, _| true);
    let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let what = format!("{format}, rank {}", lora.rank);
    // All gradients have the same bits, whatever is computed again.
    let trained = Recompute::ALL.map(|recompute| {
        let tape = TapeOptions { rows: batch.rows(), sequences: ids.len(), recompute };
        let mut tape = Tape::new(&**device, &net, tape).expect("memory");
        let forward = tape.forward(queue, &net, &batch, targets(), 1.0).expect("forward");
        let logp = forward.out.logp.clone();
        let dlogp: Vec<f32> = (0..logp.len()).map(|i| 1.0 - 0.1 * (i % 7) as f32).collect();
        let mut gradients = zeros_like(&**device, adapters);
        let gradient = HeadGradient { dlogp: &dlogp, dentropy: &[] };
        tape.backward(queue, &net, forward, gradient, &mut gradients).expect("backward");
        let scored = tape.score(queue, &sharing, &batch, &targets(), 1.0).expect("scores");
        assert!(bits(&scored.logp) == bits(&logp), "{what}: training and scoring differ");
        let gradients = gradients.as_ref().map(|g| queue.read(g, D::len(g)).expect("memory")).into_leaves();
        (logp, gradients)
    });
    let [(logp, gradients), others @ ..] = trained;
    for (other_logp, other) in &others {
        let same = other.iter().zip(&gradients).all(|(a, b)| bits(a) == bits(b));
        assert!(same && bits(other_logp) == bits(&logp), "{what}: recomputation changes bits");
    }
    for chunk in [1, 5, 64, 1000] {
        let outs = score(queue, &sharing, ids, 1.0, chunk).expect("scores");
        let chunked: Vec<f32> = outs.into_iter().flat_map(|out| out.logp).collect();
        assert!(bits(&chunked) == bits(&logp), "{what}: training and chunks of {chunk} differ");
    }
    Computed { logp, gradients }
}

/// The distance of all numbers as one vector, relative.
fn apart(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let off = squares(&mut got.iter().zip(want).map(|(a, b)| f64::from(a - b)));
    (off / squares(&mut want.iter().map(|&x| f64::from(x)))).sqrt()
}

fn loras() -> [Lora; 3] {
    let some = Modules::of([Module::QProj, Module::VProj, Module::DownProj]);
    let all = Lora { rank: 16, alpha: 8.0, rslora: false, targets: Modules::ALL };
    [all, Lora { rank: 5, ..all }, Lora { rank: 32, targets: some, rslora: true, ..all }]
}

#[test]
fn adapters_on_a_gpu_have_the_same_bits_everywhere_and_the_gradients_of_the_cpu() {
    let Some(cuda) = device() else { return };
    let cpu = Arc::new(Cpu::new(Level::best(), 4));
    for (format, most_logp, most_gradient) in [
        (Format::F32, 1e-4, 1e-4),
        (Format::Bf16, 2e-2, 2e-2),
        (Format::Int8, 5e-2, 5e-2),
        (Format::Fp8, 1e-1, 1e-1),
    ] {
        for lora in loras() {
            let model = Model::wide(lora);
            let (here, there) = (compute(&cuda, &model, format), compute(&cpu, &model, format));
            let worst = here.logp.iter().zip(&there.logp).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let gradient = apart(&here.gradients.concat(), &there.gradients.concat());
            println!(
                "{format}, rank {}: log-probs within {worst:.1e} of the CPU's, gradients {gradient:.1e}",
                lora.rank
            );
            assert!(worst <= most_logp && gradient <= most_gradient, "{format}: {worst}, {gradient}");
        }
    }
}

#[test]
fn adapters_of_peft_on_a_gpu() {
    let Some(cuda) = device() else { return };
    for name in ADAPTED {
        let (case, adapter) = load_adapted(name);
        let queue = &mut cuda.queue().expect("a queue");
        let lora = adapter.lora;
        let options =
            NetworkOptions { lora: Some(lora), ..NetworkOptions::training(&case.config, Format::F32) };
        let mut base = BaseLeaves::<Cuda>::new(Base::Host(&case.params));
        let mut net = Network::of_leaves(queue, &case.config, false, &mut base, options).expect("network");
        let uploaded = upload::<Cuda>(queue, &adapter.params);
        net.refresh(queue, &uploaded).expect("adapters");
        for scoring in &case.golden.scorings {
            let ids = &case.golden.ids;
            let mut tape = Tape::new(&*cuda, &net, whole(&case.golden)).expect("memory");
            let targets = Targets::of(ids, |_, _| true);
            let forward =
                tape.forward(queue, &net, &whole_batch(ids), targets, scoring.temperature).expect("forward");
            let want = flatten(&scoring.sequences, |s| s.logprobs.clone());
            let off = forward.out.logp.iter().zip(&want).map(|(a, b)| (a - b.expect("a log-prob")).abs());
            let off = off.fold(0.0, f32::max);
            let dlogp = flatten(&scoring.sequences, |s| s.g.clone());
            let dentropy = flatten(&scoring.sequences, |s| s.e.clone());
            let mut gradients = zeros_like(&*cuda, &adapter.params);
            let gradient = HeadGradient { dlogp: &dlogp, dentropy: &dentropy };
            tape.backward(queue, &net, forward, gradient, &mut gradients).expect("backward");
            let want = gradients_of(&case, &scoring.gradients, lora.names(&case.config));
            let got = gradients.as_ref().map(|g| queue.read(g, <Cuda as Device>::len(g)).expect("memory"));
            let gradient = apart(&got.into_leaves().concat(), &want.into_leaves().concat());
            println!("{name}, T = {}: log-probs {off:.1e}, gradients {gradient:.1e}", scoring.temperature);
            assert!(off <= 1e-4 && gradient <= 1e-4, "{name}: {off}, {gradient}");
        }
    }
}
