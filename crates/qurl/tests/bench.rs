//! `qurl bench rollout`: what it reports, not how fast it is.

mod common;
mod models;

use models::qurl;

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
