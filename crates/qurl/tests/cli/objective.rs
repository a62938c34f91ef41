//! `qurl objective`.

use crate::common::qurl;
use serde_json::{Value, json};

/// Two tokens; ratio 1.1 over prox for the first, rho = e^0.1 and 1.
fn case(objective: Value) -> Value {
    json!({
        "theta": [-1.0, -2.0], "prox": [-1.1, -2.0], "behav": [-1.2, -2.0], "adv": [1.0, -1.0],
        "mask": [1, 1], "seq": [0, 1], "objective": objective, "loss_agg_mode": "token-mean",
    })
}

#[test]
fn losses_and_derivatives() {
    let naive = case(json!({"type": "naive", "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}));
    let tis = case(json!({"type": "tis", "c": 2.0}));
    let run = qurl(&["objective"], &format!("{naive}\n{tis}\n"));
    assert_eq!(run.status, 0, "{}", run.stderr);
    let out: Vec<Value> = run.stdout.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    assert_eq!(out.len(), 2);
    let close = |value: &Value, expected: f64| {
        assert!((value.as_f64().expect("a number") - expected).abs() < 1e-12, "{value} {expected}");
    };
    // -(r1 - 1) / 2 with r1 = e^0.1, weighted by e^0.1 where the rollout is corrected.
    let r = 0.1f64.exp();
    close(&out[0]["loss"], -(r - 1.0) / 2.0);
    close(&out[0]["dlogp"][0], -r / 2.0);
    close(&out[0]["dlogp"][1], 0.5);
    close(&out[0]["clip_fraction"], 0.0);
    close(&out[1]["loss"], -(r * r - 1.0) / 2.0);
    close(&out[1]["dlogp"][0], -r * r / 2.0);
}

#[test]
fn every_type_of_the_paper_is_known() {
    for kind in ["naive", "quantized-is", "decoupled", "tis", "acr"] {
        let run = qurl(&["objective"], &case(json!({ "type": kind })).to_string());
        let out: Value = run.json();
        let keys: Vec<&String> = out.as_object().expect("an object").keys().collect();
        assert_eq!(keys, ["loss", "dlogp", "clip_fraction"], "{kind}");
    }
}

#[test]
fn bad_lines_are_named() {
    let good = case(json!({"type": "acr"}));
    let mut short = good.clone();
    short["adv"] = json!([1.0]);
    let unknown = case(json!({"type": "mood"}));
    for (bad, expected) in
        [(short.to_string(), "`adv`"), (unknown.to_string(), "mood"), ("{".to_string(), "JSON")]
    {
        let run = qurl(&["objective"], &format!("{good}\n{bad}\n"));
        run.assert_bad(&["line 2", expected]);
        assert_eq!(run.stdout.lines().count(), 1);
    }
}

/// The goldens of the objectives, made by PyTorch, as lines.
#[test]
fn lines_give_the_goldens() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../qurl-rl/tests/goldens/goldens.json");
    let goldens: Value =
        serde_json::from_str(&std::fs::read_to_string(path).expect("goldens")).expect("JSON");
    let cases = goldens["objectives"].as_array().expect("objectives");
    let mut lines = String::new();
    for case in cases {
        let mut line = goldens["tokens"].clone();
        for key in ["objective", "loss_agg_mode", "loss_scale_factor"] {
            if let Some(value) = case.get(key) {
                line[key] = value.clone();
            }
        }
        lines += &format!("{line}\n");
    }
    let run = qurl(&["objective"], &lines);
    assert_eq!((run.status, run.stdout.lines().count()), (0, cases.len()), "{}", run.stderr);
    let close = |a: &Value, b: f64| (a.as_f64().expect("a number") - b).abs() <= 1e-7 * b.abs().max(1.0);
    for (line, case) in run.stdout.lines().zip(cases) {
        let out: Value = serde_json::from_str(line).expect("JSON");
        let number = |key: &str| case[key].as_f64().expect("a number");
        assert!(close(&out["loss"], number("loss")), "{out} {case}");
        assert!(close(&out["clip_fraction"], number("upper") + number("lower")), "{out} {case}");
        let expected = case["dlogp"].as_array().expect("a list");
        let found = out["dlogp"].as_array().expect("a list");
        assert_eq!(found.len(), expected.len());
        assert!(
            found.iter().zip(expected).all(|(a, b)| close(a, b.as_f64().expect("a number"))),
            "{out} {case}"
        );
    }
}

/// The last of two keys used to win.
#[test]
fn what_a_line_says_twice_is_refused() {
    let line = r#"{"theta":[-1],"prox":[-1],"behav":[-1],"adv":[1],"objective":{"type":"naive"},"adv":[2]}"#;
    qurl(&["objective"], line).assert_bad(&["line 1", "key `adv` is there twice"]);
    let inside =
        r#"{"theta":[-1],"prox":[-1],"behav":[-1],"adv":[1],"objective":{"type":"tis","c":2,"c":3}}"#;
    qurl(&["objective"], inside).assert_bad(&["line 1", "key `c` is there twice"]);
}
