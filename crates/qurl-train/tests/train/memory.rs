//! What is said of a run that does not fit: settings that make it smaller, for the sections that it has.

use qurl_kernels::cpu::level::Level;
use qurl_kernels::cuda::counting::GpuProfile;
use qurl_kernels::{Cpu, Cuda, Device};
use qurl_model::ModelConfig;
use qurl_train::memory::MemoryPlan;
use qurl_train::ranks::Ranks;
use qurl_train::recipe::Recipe;

const RL: &str = r#"
    [model]
    path = "a model"
    [data]
    train_batch_size = 4
    max_prompt_length = 64
    max_response_length = 1984
    [rollout]
    n = 8
    format = "bf16"
    kv_cache_mb = 400
    max_num_seqs = 32
    max_num_batched_tokens = 256
    [algorithm]
    adv_estimator = { type = "grpo" }
    [actor]
    lr = 1e-6
    ppo_mini_batch_size = 4
    [run]
    total_steps = 1
    [trainer]
    compute = "bf16"
    micro_tokens = 2048
    memory_budget_mb = 64
"#;
const SFT: &str = r#"
    [model]
    path = "a model"
    [sft]
    steps = 1
    batch_size = 4
    lr = 1e-5
    max_length = 256
    files = ["examples.jsonl"]
    [trainer]
    compute = "bf16"
    micro_tokens = 2048
    memory_budget_mb = 64
"#;

/// MiB that a refused run needs, its text, and the settings named with what is needed with them.
fn refused<D: Device>(device: &D, text: &str, set: &[&str]) -> (usize, String, Vec<(String, usize)>) {
    let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
    let recipe = Recipe::parse(text, "recipe", &set).expect("a recipe");
    let (config, ranks) = (ModelConfig::named("qwen2.5-0.5b").expect("a shape"), Ranks::alone());
    let (plan, checked) = match (&recipe.sft, &recipe.data) {
        (_, Some(_)) => {
            let rl = recipe.rl("recipe").expect("a plan");
            let plan = MemoryPlan::of_rl(device, &recipe, &rl, &config, &ranks).expect("a plan");
            (plan.clone(), plan.check_rl(device, &recipe, &rl, &config, &ranks))
        }
        (Some(sft), None) => {
            let plan = MemoryPlan::of_sft(device, &recipe, sft, &config, &ranks).expect("a plan");
            (plan.clone(), plan.check_sft(device, &recipe, sft, &config, &ranks))
        }
        (None, None) => panic!("neither trains"),
    };
    let error = checked.expect_err("too large").to_string();
    let settings = error.split("; with ").skip(1).map(|setting| {
        let setting = setting.split(" MiB").next().expect("a number");
        let (key, needed) = setting.rsplit_once(' ').expect("a key and a number");
        (key.trim_end_matches(" as well").to_string(), needed.parse().expect("MiB"))
    });
    let settings = settings.collect();
    (plan.needed(device) >> 20, error, settings)
}

fn keys(settings: &[(String, usize)]) -> Vec<&str> {
    settings.iter().map(|(key, _)| key.as_str()).collect()
}

/// Each setting takes something off what the one before it left; the sum named first is of the same kind.
fn assert_shrinks(needed: usize, error: &str, settings: &[(String, usize)]) {
    assert!(error.contains(&format!("together {needed} MiB")), "{needed}: {error}");
    let mut last = needed;
    for (key, with) in settings {
        assert!(*with < last, "{key}: {with} of {last}: {error}");
        last = *with;
    }
}

#[test]
fn a_run_that_does_not_fit_is_told_what_its_own_sections_can_save() {
    let gpu = Cuda::counting_as(&GpuProfile::h200());
    let cpu = Cpu::new(Level::best(), 1);
    let whole = [
        "trainer.pack_once = true",
        "actor.optim.offload = true",
        "trainer.recompute = \"mlp\"",
        "trainer.recompute = \"block\"",
        "actor.optim.moments = \"8bit\"",
        "rollout.kv_cache_mb = 200",
    ];
    let (needed, error, settings) = refused(&gpu, RL, &[]);
    assert_shrinks(needed, &error, &settings);
    // Moments that the host holds take nothing of the device, in whatever format.
    assert_eq!(keys(&settings), [&whole[..4], &whole[5..]].concat(), "{error}");
    // A CPU has one memory: what is on the host is there, too.
    let (needed, error, settings) = refused(&cpu, RL, &[]);
    assert_shrinks(needed, &error, &settings);
    assert_eq!(keys(&settings), [&whole[..1], &whole[2..]].concat(), "{error}");

    let critic =
        ["critic={ lr = 1e-6, ppo_mini_batch_size = 4 }", "algorithm.adv_estimator={ type = \"gae\" }"];
    let (needed, error, settings) = refused(&gpu, RL, &critic);
    assert_shrinks(needed, &error, &settings);
    assert!(keys(&settings).contains(&"critic.optim.offload = true"), "{error}");
    let (needed, error, settings) = refused(&cpu, RL, &critic);
    assert_shrinks(needed, &error, &settings);
    assert!(keys(&settings).contains(&"critic.optim.moments = \"8bit\""), "{error}");
}

#[test]
fn beside_adapters_a_smaller_base_and_cache_are_named_and_nothing_that_does_nothing() {
    for adapters in [vec!["lora.rank=8"], vec!["lora.rank=8", "lora.base_format=bf16"]] {
        let (needed, error, settings) = refused(&Cuda::counting_as(&GpuProfile::h200()), RL, &adapters);
        assert_shrinks(needed, &error, &settings);
        for key in ["rollout.format = \"int8\"", "rollout.format = \"int4\"", "rollout.kv_cache_mb = 200"] {
            assert!(keys(&settings).contains(&key), "{key}: {error}");
        }
        assert!(!error.contains("pack_once"), "{error}");
    }
    let (needed, error, settings) = refused(&Cpu::new(Level::best(), 1), SFT, &["lora.rank=8"]);
    assert_shrinks(needed, &error, &settings);
    assert!(keys(&settings).contains(&"lora.base_format = \"int8\""), "{error}");
    assert!(!error.contains("pack_once") && !error.contains("rollout."), "{error}");
}

#[test]
fn supervised_training_is_told_its_own_keys() {
    let (needed, error, settings) = refused(&Cuda::counting_as(&GpuProfile::h200()), SFT, &[]);
    assert_shrinks(needed, &error, &settings);
    let expected = [
        "trainer.pack_once = true",
        "sft.optim.offload = true",
        "trainer.recompute = \"mlp\"",
        "trainer.recompute = \"block\"",
    ];
    assert_eq!(keys(&settings), expected, "{error}");
    let (needed, error, settings) = refused(&Cpu::new(Level::best(), 1), SFT, &[]);
    assert_shrinks(needed, &error, &settings);
    assert!(keys(&settings).contains(&"sft.optim.moments = \"8bit\""), "{error}");
    assert!(!error.contains("rollout.") && error.contains("; lower trainer.micro_tokens;"), "{error}");
}
