//! A whole GRPO step, from given rollouts to new parameters, against PyTorch (made by
//! `goldens/make_grpo_step.py`).

use crate::common::{list, solved};
use qurl_kernels::Cpu;
use qurl_kernels::cpu::level::Level;
use qurl_model::tokenizer::{CharacterSpecials, Tokenizer};
use qurl_model::{Params, hf};
use qurl_train::recipe::Recipe;
use qurl_train::rl::RlTrainer;
use qurl_train::start::Start;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const RECIPE: &str = r#"
[model]
path = "golden"

[task]
type = "synthetic"
kind = "addition"
level = 1

[data]
train_batch_size = 4
max_prompt_length = 8
max_response_length = 16

[rollout]
n = 3
format = "f32"
kv_cache_mb = 1

[algorithm]
adv_estimator = { type = "grpo" }
loss_agg_mode = "token-mean"

[actor]
lr = 1.0
ppo_mini_batch_size = 1

[run]
total_steps = 1

[trainer]
compute = "f32"
"#;

fn here(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

#[test]
fn a_whole_grpo_step_agrees_with_pytorch() {
    let golden: Value =
        serde_json::from_str(&std::fs::read_to_string(here("grpo_step.json")).expect("golden"))
            .expect("JSON");
    let number = |key: &str| golden[key].as_f64().expect("a number");
    let objective = &golden["objective"];
    let overrides = [
        format!("rollout.temperature={}", number("temperature")),
        format!(
            "algorithm.objective={{ type = \"acr\", c = {:?}, clip_ratio_low = {}, clip_ratio_high = {} }}",
            objective["c"].as_f64().expect("c"),
            objective["clip_ratio_low"],
            objective["clip_ratio_high"]
        ),
        format!("actor.lr={}", number("lr")),
        format!("actor.ppo_epochs={}", number("epochs")),
        format!("actor.ppo_mini_batch_size={}", number("prompts_per_update")),
        format!("actor.optim.weight_decay={}", number("weight_decay")),
        format!("actor.optim.clip_grad={:?}", number("clip_grad")),
        format!("actor.optim.eps={:?}", number("eps")),
    ];
    let recipe = Recipe::parse(RECIPE, "golden", &overrides).expect("recipe");
    let model = hf::load(&start_model()).expect("model");
    let tokenizer = Tokenizer::characters("0123456789", &CharacterSpecials::default()).expect("tokenizer");
    let start = Start {
        adapters: None,
        generation: Default::default(),
        template: None,
        warning: None,
        tokenizer,
        config: model.config.clone(),
        weights: model.params,
    };
    let task = recipe.task().expect("[task]").task().expect("task");
    let cpu = Arc::new(Cpu::new(Level::best(), 2));
    let mut trainer = RlTrainer::new(&cpu, &recipe, "golden", start, task).expect("trainer");
    let groups: Vec<qurl_train::solve::Solved> =
        golden["groups"].as_array().expect("groups").iter().map(solved).collect();
    let record = trainer.train_on(groups).expect("step");

    let losses: Vec<f64> = list(&golden["losses"]);
    let norms: Vec<f64> = list(&golden["gradient_norms"]);
    let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
    assert_eq!(record.updates as usize, losses.len());
    assert!((record.loss - mean(&losses)).abs() < 1e-5, "loss {}, expected {}", record.loss, mean(&losses));
    let (got, want) = (record.grad_norm, mean(&norms));
    assert!((got - want).abs() < 1e-4 * want, "gradient norm {got}, expected {want}");

    let after = trainer.weights().expect("weights");
    let wrong = largest_difference(&after, &hf::load(&here("grpo_step")).expect("model").params);
    let moved = largest_difference(&after, &hf::load(&start_model()).expect("model").params);
    assert!(moved > 1e-2, "parameters moved by {moved} only");
    assert!(wrong < 2e-5, "parameters moved by {moved}, but are off by {wrong}");
}

fn start_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../qurl-model/tests/goldens/qwen2")
}

fn largest_difference(a: &Params<Vec<f32>>, b: &Params<Vec<f32>>) -> f32 {
    let pairs = a.as_ref().zip(b.as_ref()).expect("the same layout").into_leaves();
    let differences = pairs.into_iter().flat_map(|(a, b)| {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).map(|(x, y)| (x - y).abs())
    });
    differences.fold(0.0, f32::max)
}
