//! The optimizer and a short training run against PyTorch (files made by `crates/qurl-model/tests/goldens`).

use qurl_kernels::cpu::level::Level;
use qurl_kernels::ops::Update;
use qurl_kernels::types::{AdamW, MomentFormat, MomentShape};
use qurl_kernels::{Cpu, Device, DeviceError, Format, Queue};
use qurl_model::compute::{Recompute, TapeOptions, score};
use qurl_model::hf;
use qurl_train::learner::{Learner, LearnerOptions, LossGradient, LossScope};
use qurl_train::optimizer::AdamWOptions;
use qurl_train::sft::{Example, train_step};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../qurl-model/tests/goldens")
}

fn read(name: &str) -> Value {
    let text = std::fs::read_to_string(goldens().join(name)).expect(name);
    serde_json::from_str(&text).expect(name)
}

fn floats(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(items) => items.iter().flat_map(floats).collect(),
        Value::Object(items) => {
            ["matrix", "vector", "scalar"].iter().flat_map(|key| floats(&items[*key])).collect()
        }
        number => vec![number.as_f64().expect("a number") as f32],
    }
}

#[test]
fn twenty_steps_of_adamw() {
    let golden = read("adamw.json");
    for level in Level::available() {
        let cpu = Arc::new(Cpu::new(level, 2));
        let mut queue = cpu.queue().expect("a queue");
        for run in golden["runs"].as_array().expect("runs") {
            let mut w = queue.upload(&floats(&run["initial"])).expect("memory");
            let shape = MomentShape { len: w.len(), format: MomentFormat::F32, on_host: false };
            let mut moments = cpu.moments(shape).expect("memory");
            for (i, step) in run["trace"].as_array().expect("trace").iter().enumerate() {
                let g = queue.upload(&floats(&step["gradients"])).expect("memory");
                let norm = queue.sum_squares(&[&g]).expect("norm").sqrt();
                let want = step["norm"].as_f64().expect("norm");
                assert!((norm - want).abs() < 1e-5 * want, "norm {norm}, expected {want}");
                let adamw = AdamW {
                    lr: step["lr"].as_f64().expect("lr") as f32,
                    beta1: 0.9,
                    beta2: 0.999,
                    eps: 1e-8,
                    weight_decay: run["weight_decay"].as_f64().expect("weight decay") as f32,
                    step: i as u64 + 1,
                    grad_scale: (1.0 / (norm + 1e-6)).min(1.0) as f32,
                };
                queue.adamw(Update { adamw, w: &mut w, g: &g, at: 0, moments: &mut moments });
                for (k, (got, want)) in w.iter().zip(floats(&step["parameters"])).enumerate() {
                    assert!(
                        (got - want).abs() < 1e-5 * (1.0 + want.abs()),
                        "{level}, step {i}, {k}: {got}, expected {want}"
                    );
                }
            }
        }
    }
}

#[test]
fn ten_steps_of_training() {
    let golden = read("training.json");
    let ids: Vec<Vec<u32>> = serde_json::from_value(read("qwen2/golden.json")["ids"].clone()).expect("ids");
    let model = hf::load(&goldens().join("qwen2")).expect("model");
    let tape = TapeOptions { rows: 64, sequences: 4, recompute: Recompute::None };
    let adamw = AdamWOptions { weight_decay: 0.01, ..AdamWOptions::default() };
    let options = LearnerOptions {
        lora: None,
        compute: Format::F32,
        positions: 64,
        pack_once: false,
        kv_format: None,
        tape,
        adamw,
    };
    let queue = &mut Arc::new(Cpu::new(Level::best(), 2)).queue().expect("a queue");
    let mut learner = Learner::<Cpu>::new(queue, &model.config, &model.params, options).expect("learner");
    let examples: Vec<Example> =
        ids.iter().map(|ids| Example { ids: ids.clone(), loss: vec![true; ids.len()] }).collect();
    let (losses, norms) = (floats(&golden["losses"]), floats(&golden["gradient_norms"]));
    assert_eq!(losses.len(), 10);
    for (step, (loss, norm)) in losses.iter().zip(&norms).enumerate() {
        let (got, report) =
            train_step(queue, &mut learner, &examples, tape, golden["optimizer"]["lr"].as_f64().expect("lr"))
                .expect("step");
        assert!(report.applied);
        assert!((got as f32 - loss).abs() < 1e-4 * loss, "step {step}: loss {got}, expected {loss}");
        assert!(
            (report.grad_norm as f32 - norm).abs() < 1e-3 * norm,
            "step {step}: norm {}, expected {norm}",
            report.grad_norm
        );
    }
    let outs = score(queue, learner.network(), &ids, 1.0, 1000).expect("score");
    let logprobs: Vec<f32> = outs.into_iter().flat_map(|o| o.logp).collect();
    let want: Vec<f32> = golden["final_logprobs"]
        .as_array()
        .expect("log-probs")
        .iter()
        .flat_map(|s| {
            s.as_array()
                .expect("sequence")
                .iter()
                .skip(1)
                .map(|x| x.as_f64().expect("number") as f32)
                .collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(logprobs.len(), want.len());
    for (got, want) in logprobs.iter().zip(&want) {
        assert!((got - want).abs() < 2e-3, "log-prob after training {got}, expected {want}");
    }
}

/// A gradient that is not finite changes nothing.
#[test]
fn non_finite_gradients_are_not_applied() {
    let model = hf::load(&goldens().join("qwen2")).expect("model");
    let tape = TapeOptions { rows: 64, sequences: 4, recompute: Recompute::None };
    let options = LearnerOptions {
        lora: None,
        compute: Format::F32,
        positions: 64,
        pack_once: false,
        kv_format: None,
        tape,
        adamw: AdamWOptions::default(),
    };
    let queue = &mut Arc::new(Cpu::new(Level::best(), 1)).queue().expect("a queue");
    let mut learner = Learner::<Cpu>::new(queue, &model.config, &model.params, options).expect("learner");
    let ids = [vec![1u32, 2, 3]];
    let batch = qurl_model::compute::whole_batch(&ids);
    let targets = qurl_model::compute::Targets::of(&ids, |_, _| true);
    learner
        .accumulate(queue, &batch, targets, 1.0, LossScope::Token, |_, _| {
            let dlogp = vec![f32::NAN, 1.0];
            Ok::<_, DeviceError>(LossGradient { dlogp, dentropy: Vec::new() })
        })
        .expect("backward");
    let report = learner.update(queue, 1e-3).expect("update");
    assert!(!report.applied && learner.optimizer.steps == 0);
    assert!(learner.weights(queue).expect("weights") == model.params);
}
