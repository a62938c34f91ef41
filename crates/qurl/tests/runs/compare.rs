//! `qurl compare`: every method has a run of its own, all from the same start.

use super::common::qurl_in;
use super::support::place;

#[test]
fn methods_side_by_side_from_one_start() {
    let dir = place("compare");
    let few = ["--set", "sft.steps=10", "--steps", "2", "--set", "run.test_freq=1", "--seeds", "2", "--json"];
    let args: Vec<&str> = ["compare", "tiny.toml", "--methods", "full,naive,acr-uaq", "--run", "c"]
        .into_iter()
        .chain(few)
        .collect();
    let document = qurl_in(&dir, &args, "").json();
    let rows = document["rows"].as_array().expect("rows");
    assert_eq!(
        rows.iter().map(|r| r["method"].as_str()).collect::<Vec<_>>(),
        [Some("full"), Some("naive"), Some("acr-uaq")]
    );
    for (row, other) in rows.iter().zip(&rows[1..]) {
        assert_eq!(row["runs"][0]["accuracy_before"], other["runs"][0]["accuracy_before"]);
    }
    // Without quantization the two policies are one; with it they are not.
    assert_eq!(rows[0]["mismatch_kl"]["mean"], 0.0);
    assert_eq!(rows[0]["rho_max"], 1.0);
    assert_eq!(rows[0]["speed_up"], 1.0);
    assert!(rows[1]["rho_max"].as_f64().is_some_and(|rho| rho > 1.0));
    for seed in ["seed-1", "seed-2"] {
        for method in ["full", "naive", "acr-uaq"] {
            let metrics =
                std::fs::read_to_string(dir.join("c").join(seed).join(method).join("metrics.jsonl"));
            assert_eq!(metrics.expect("metrics").lines().count(), 2);
        }
    }
    let report = std::fs::read_to_string(dir.join("c/report.html")).expect("report");
    assert!(report.contains("acr-uaq") && report.contains("naive"));

    qurl_in(&dir, &args, "").assert_bad(&["--run c", "empty"]);
    qurl_in(&dir, &["compare", "tiny.toml", "--methods", "full,ppo2"], "")
        .assert_bad(&["ppo2", "quantized-is"]);
}
