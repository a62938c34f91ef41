//! `qurl bench rollout`: what it reports, not how fast it is.

use crate::common::directory;
use crate::models::qurl;

#[test]
fn rollout_reports_figures_beside_limits() {
    let document = qurl(&[
        "bench",
        "rollout",
        "--shape",
        "default",
        "--formats",
        "bf16,int8",
        "--batch",
        "1,3",
        "--prompt",
        "20",
        "--new",
        "5",
        "--rounds",
        "2",
        "--quantize-head",
        "--json",
    ])
    .json();
    let results = document["results"].as_array().expect("results");
    let cases: Vec<_> = results.iter().map(|r| (r["format"].as_str(), r["batch"].as_u64())).collect();
    assert_eq!(
        cases,
        [(Some("bf16"), Some(1)), (Some("int8"), Some(1)), (Some("bf16"), Some(3)), (Some("int8"), Some(3))]
    );
    for result in results {
        assert_eq!(result["case"], "rollout");
        assert_eq!(result["head_format"], result["format"]);
        for key in [
            "tokens_per_s",
            "limit_tokens_per_s",
            "share",
            "total_tokens_per_s",
            "prefill_tokens_per_s",
            "first_token_s",
            "requantize_s",
            "read_weights_s",
            "gb_per_s",
            "peak_gb_per_s",
            "gflops",
            "peak_gflops",
        ] {
            assert!(result[key].as_f64().is_some_and(|x| x.is_finite() && x > 0.0), "{key}: {result}");
        }
        let share =
            result["tokens_per_s"].as_f64().zip(result["limit_tokens_per_s"].as_f64()).map(|(a, b)| a / b);
        assert_eq!(result["share"].as_f64(), share);
    }
}

#[test]
fn rollout_at_a_context_has_no_prefill() {
    let document = qurl(&[
        "bench",
        "rollout",
        "--shape",
        "default",
        "--formats",
        "bf16,int8",
        "--batch",
        "3",
        "--context",
        "200",
        "--new",
        "5",
        "--rounds",
        "1",
        "--kv",
        "int8",
        "--json",
    ])
    .json();
    let results = document["results"].as_array().expect("results");
    assert_eq!(results.len(), 2);
    for result in results {
        assert_eq!((result["context"].as_u64(), result["kv_format"].as_str()), (Some(200), Some("int8")));
        for key in ["tokens_per_s", "limit_tokens_per_s", "share", "gb_per_s"] {
            assert!(result[key].as_f64().is_some_and(|x| x.is_finite() && x > 0.0), "{key}: {result}");
        }
        for key in ["prompt", "prefill_tokens_per_s", "first_token_s", "total_tokens_per_s"] {
            assert!(result.get(key).is_none(), "{key}: {result}");
        }
    }
}

#[test]
fn wrong_sizes_are_named() {
    let run = |more: &[&str]| qurl(&[&["bench", "rollout", "--shape", "default"], more].concat());
    run(&["--prompt", "200", "--new", "100"]).assert_bad(&["300", "256"]);
    run(&["--context", "250", "--new", "10"]).assert_bad(&["--context", "260", "256"]);
    run(&["--context", "100", "--prompt", "10"]).assert_bad(&["--context"]);
    run(&["--batch", "0"]).assert_bad(&["--batch"]);
    run(&["--formats", "int9"]).assert_bad(&["int9"]);
    qurl(&["bench", "rollout", "--shape", "qwen9"]).assert_bad(&["qwen9", "default, 5m, qwen2.5-0.5b"]);
}

/// `bench step` of the small default shape.
fn step(args: &[&str]) -> serde_json::Value {
    let sizes = ["--shape", "default", "--prompts", "4", "--n", "3", "--length", "40", "--prompt", "12"];
    let more = ["--max-num-seqs", "5", "--steps", "1", "--device", "cpu", "--json"];
    let document = qurl(&[&["bench", "step"], &sizes[..], &more, args].concat()).json();
    document["results"][0].clone()
}

#[test]
fn a_step_reports_its_phases_beside_limits() {
    for critic in [false, true] {
        let result = step(if critic { &["--critic", "--format", "bf16"] } else { &["--kv", "int8"] });
        assert_eq!((result["case"].as_str(), result["critic"].as_bool()), (Some("step"), Some(critic)));
        assert_eq!(result["response_tokens"].as_u64(), Some(4 * 3 * 40), "no response ends by itself");
        let number = |phase: &str, key: &str| result["phases"][phase][key].as_f64();
        let mut sum = 0.0;
        for phase in ["quantize", "rollout", "score", "update"] {
            let (seconds, limit) = (number(phase, "seconds"), number(phase, "limit_s"));
            assert!(seconds.is_some_and(|x| x > 0.0) && limit.is_some_and(|x| x > 0.0), "{phase}: {result}");
            assert_eq!(number(phase, "share"), seconds.zip(limit).map(|(s, l)| l / s), "{phase}");
            sum += seconds.unwrap_or(0.0);
        }
        assert!(number("verify", "limit_s").is_none() && sum <= result["seconds"].as_f64().expect("total"));
        let rollout = &result["rollout"];
        assert!(rollout["full_batch_tokens_per_s"].as_f64().is_some_and(|x| x > 0.0), "{result}");
        assert_eq!(rollout["preemptions"].as_u64(), Some(0));
    }
}

/// A trainer that began with other weights takes over the state after the first step, or the command fails.
#[test]
fn steps_are_made_again_from_a_checkpoint() {
    let dir = directory("bench-step-checkpoint");
    for (name, set) in
        [("whole", "actor.optim.moments=\"8bit\""), ("adapters", "lora={ rank = 4, alpha = 8 }")]
    {
        let at = dir.join(name).display().to_string();
        let result = step(&["--checkpoint", &at, "--set", set, "--set", "run.test_problems=3"]);
        let resumed = &result["resumed"];
        assert_eq!(resumed["checksum"], result["ranks"]["checksum"], "{result}");
        assert!(resumed["checkpoint_bytes"].as_u64() > Some(1000), "{result}");
        assert!(dir.join(name).join("step-1/manifest.json").exists());
    }
}

/// Beside adapters nothing of the frozen base is updated, and little of the copy that samples is packed; on a
/// CPU nobody counts what is allocated, so only the plan is told.
#[test]
fn limits_of_a_step_with_adapters_are_those_of_what_is_trained() {
    let lora = ["--set", "lora={ rank = 1, alpha = 2, target_modules = [\"k_proj\"] }"];
    let limit = |result: &serde_json::Value, phase: &str| {
        result["phases"][phase]["limit_s"].as_f64().unwrap_or_else(|| panic!("{phase}: {result}"))
    };
    let (whole, adapters) = (step(&["--format", "bf16"]), step(&[&["--format", "bf16"], &lora[..]].concat()));
    assert!(limit(&adapters, "quantize") < 0.05 * limit(&whole, "quantize"), "{adapters} {whole}");
    assert_eq!(adapters["ranks"]["ranks"][0]["peak_bytes"], 0);
    let sizes = ["--shape", "default", "--prompts", "4", "--n", "2", "--length", "8", "--prompt", "12"];
    let run = |more: &[&str]| {
        qurl(&[&["bench", "step"], &sizes[..], &["--steps", "1", "--device", "cpu"], more].concat())
    };
    let text = run(&[]).stdout;
    assert!(text.contains(" MiB planned") && !text.contains("memory 0 MiB"), "{text}");
    // What does not fit is refused on a CPU, too, before anything is made.
    run(&["--set", "trainer.memory_budget_mb=1"]).assert_bad(&[
        "trainer.memory_budget_mb = 1",
        "actor: moments",
        "lower trainer.micro_tokens",
    ]);
}

#[test]
fn training_that_the_machine_cannot_hold_is_refused() {
    let held_by = 700 << 30;
    if qurl_files::available_memory().is_none_or(|free| free > held_by) {
        println!("skipped: this machine could hold 32B in training");
        return;
    }
    qurl(&["bench", "train", "--shape", "qwen2.5-32b", "--device", "cpu"])
        .assert_bad(&["MiB of memory available", "model: moments"]);
}

/// Nothing is scored by the actor where the step makes one update, and with no reference nothing at all.
#[test]
fn an_on_policy_step_has_nothing_to_score() {
    let result = step(&["--mini-batches", "1", "--set", "algorithm.kl_loss_coef=0"]);
    assert_eq!(result["phases"]["score"]["limit_s"].as_f64(), Some(0.0), "{result}");
}

#[test]
fn lengths_of_a_step_can_spread() {
    let tokens = |args: &[&str]| step(args)["response_tokens"].as_u64().expect("tokens");
    let spread = tokens(&["--spread"]);
    assert!(spread > 12 && spread < 4 * 3 * 40 / 2, "a quarter of the longest in the mean: {spread}");
    assert_eq!(tokens(&["--spread"]), spread, "the same seed, the same lengths");
    let run = |more: &[&str]| qurl(&[&["bench", "step", "--shape", "default"], more].concat());
    run(&["--prompts", "5"]).assert_bad(&["--mini-batches", "5"]);
    run(&["--length", "0"]).assert_bad(&["--length"]);
    run(&["--n", "1", "--length", "20", "--prompt", "10"]).assert_bad(&["rollout.n"]);
    run(&["--length", "300"]).assert_bad(&["256"]);
}

/// Weights from one version to the next, whole and as changes; what came is what was sent, or it fails.
#[test]
fn weights_travel_whole_and_as_changes() {
    let args = ["bench", "sync", "--shape", "default", "--formats", "int8,f32", "--lr", "1e-6", "--json"];
    let document = qurl(&args).json();
    let results = document["results"].as_array().expect("results");
    let cases: Vec<_> = results.iter().map(|r| (r["format"].as_str(), r["case"].as_str())).collect();
    let (whole, changes) = (Some("whole"), Some("changes"));
    let (int8, f32) = (Some("int8"), Some("f32"));
    assert_eq!(cases, [(int8, whole), (int8, changes), (f32, whole), (f32, changes)]);
    let share = |case: usize| results[case]["share"].as_f64().expect("a share");
    assert!(share(0) > 1.0 && share(0) < 1.001 && share(1) < 0.5 && share(3) < 1.0, "{document}");
    for key in ["encode_s", "loopback_s", "decode_s", "export_s", "import_s"] {
        assert!(results[1][key].as_f64().is_some_and(|x| x.is_finite() && x > 0.0), "{key}: {document}");
    }
}
