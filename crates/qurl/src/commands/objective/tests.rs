//! The lines of `qurl objective`: results by hand, defaults, and errors that name what is wrong.

use super::case::{CaseError, CaseResult, run_line};

const TOKENS: &str = r#""theta":[-1.0,-2.0],"prox":[-1.0,-2.0],"behav":[-1.0,-2.0],"adv":[1.0,-3.0]"#;

fn run(rest: &str) -> Result<CaseResult, CaseError> {
    run_line(7, &format!("{{{TOKENS},{rest}}}"))
}

#[track_caller]
fn message(line: &str, parts: &[&str]) {
    let text = run_line(3, line).unwrap_err().to_string();
    for part in ["line 3"].iter().chain(parts) {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

#[test]
fn defaults_are_all_ones_one_sequence_and_token_mean() {
    let out = run(r#""objective":{"type":"acr"}"#).unwrap();
    assert_eq!((out.loss, out.dlogp.as_slice(), out.clip_fraction), (1.0, &[-0.5, 1.5][..], 0.0));
    let spelled = run(r#""objective":{"type":"acr","c":2.0,"clip_ratio_low":0.2,"clip_ratio_high":0.2},
           "mask":[1,true],"seq":[0,0],"loss_agg_mode":"token-mean","loss_scale_factor":null"#);
    assert_eq!(spelled.unwrap(), out);
    let sparse = run(r#""objective":{"type":"naive"},"seq":[900000000000,4],"mask":[1.0,0]"#).unwrap();
    assert_eq!(sparse.dlogp, [-1.0, 0.0]);
}

#[test]
fn the_example_of_a_widened_clip() {
    // ρ = 4, C = 2: the upper bound is 1.28·2 = 2.56; R = 2 passes under ACR and is clipped under TIS.
    let line = |kind: &str| {
        let (prox, theta) = (-2.0, -2.0 + 2f64.ln());
        let behav = -2.0 - 4f64.ln();
        format!(
            r#"{{"theta":[{theta}],"prox":[{prox}],"behav":[{behav}],"adv":[0.5],
            "objective":{{"type":"{kind}","c":2.0,"clip_ratio_low":0.2,"clip_ratio_high":0.28}}}}"#
        )
    };
    let acr = run_line(1, &line("acr")).unwrap();
    assert!((acr.loss + 2.0).abs() < 1e-12 && (acr.dlogp[0] + 2.0).abs() < 1e-12);
    assert_eq!(acr.clip_fraction, 0.0);
    let tis = run_line(1, &line("tis")).unwrap();
    assert!((tis.loss + 2.0 * 1.28 * 0.5).abs() < 1e-12);
    assert_eq!((tis.dlogp[0], tis.clip_fraction), (0.0, 1.0));
}

#[test]
fn results_print_without_negative_zeros() {
    let out = run(r#""objective":{"type":"naive"},"mask":[0,0]"#).unwrap();
    assert_eq!(serde_json::to_string(&out).unwrap(), r#"{"loss":0.0,"dlogp":[0.0,0.0],"clip_fraction":0.0}"#);
}

#[test]
fn lengths_must_agree() {
    message(
        r#"{"theta":[0,0],"prox":[0],"behav":[0,0],"adv":[1,1],"objective":{"type":"tis"}}"#,
        &["`prox` has 1 values", "expected 2"],
    );
    for (key, list) in [("mask", "[1]"), ("seq", "[0,0,0]")] {
        let line = format!(r#"{{{TOKENS},"objective":{{"type":"tis"}},"{key}":{list}}}"#);
        message(&line, &[&format!("`{key}`"), "expected 2"]);
    }
}

#[test]
fn numbers_must_be_finite() {
    let line = |theta: &str| {
        format!(r#"{{"prox":[0,0],"theta":{theta},"behav":[0,0],"adv":[1,1],"objective":{{"type":"tis"}}}}"#)
    };
    message(&line("[0,NaN]"), &["`theta`", "NaN"]);
    message(&line("[0, Infinity]"), &["`theta`", "Infinity"]);
    message(&line("[0,-Infinity]"), &["`theta`", "Infinity"]);
    message(&line("[0,1e999]"), &["`theta`", "1e999"]);
    message(&line("[0,null]"), &["`theta[1]`", "null", "finite number"]);
    message(&line("[\"a\",0]"), &["`theta[0]`", "\"a\""]);
    message(&line("3"), &["`theta`", "3", "list"]);
    message(
        r#"{"theta":[0],"prox":[0],"behav":[0],"adv":[1e308],"loss_agg_mode":"token-sum",
            "objective":{"type":"decoupled"}}"#
            .replace(r#""behav":[0]"#, r#""behav":[-9]"#)
            .as_str(),
        &["overflows", "adv"],
    );
}

#[test]
fn keys_and_types_must_be_known() {
    let with = |rest: &str| format!("{{{TOKENS},{rest}}}");
    message(&with(r#""objective":{"type":"tis"},"logp":[1]"#), &["`logp`", "[1]", "theta, prox"]);
    message(&with(r#""objective":{"type":"ppo"}"#), &["objective.type", "\"ppo\"", "quantized-is"]);
    message(&with(r#""objective":{"c":2}"#), &["objective.type", "naive"]);
    message(&with(r#""objective":"acr""#), &["`objective`", "\"acr\"", "object"]);
    message(&with(r#""objective":{"type":"acr","cap":2}"#), &["`objective.cap`", "2", "clip_ratio_low"]);
    message(&with(r#""objective":{"type":"acr","c":"two"}"#), &["`objective.c`", "two", "a number"]);
    message(&with(r#""objective":{"type":"acr","c":-2}"#), &["`objective.c`", "-2", "above 0"]);
    message(&with(r#""objective":{"type":"acr"},"loss_agg_mode":"mean"#), &["not valid JSON"]);
    message(
        &with(r#""objective":{"type":"acr"},"loss_agg_mode":"mean""#),
        &["loss_agg_mode", "mean", "token-sum"],
    );
    message(&with(r#""objective":{"type":"acr"},"mask":[1,2]"#), &["`mask[1]`", "2", "0 or 1"]);
    message(&with(r#""objective":{"type":"acr"},"seq":[0,-1]"#), &["`seq[1]`", "-1"]);
    message(&with(r#""objective":{"type":"acr"},"loss_scale_factor":0"#), &["loss_scale_factor", "0"]);
}

#[test]
fn required_keys_must_be_there() {
    message(&format!("{{{TOKENS}}}"), &["`objective` is missing"]);
    for key in ["theta", "prox", "behav", "adv"] {
        let line = format!(r#"{{{TOKENS},"objective":{{"type":"tis"}}}}"#);
        let start = line.find(&format!("\"{key}\"")).unwrap();
        let end = start + line[start..].find("],").unwrap() + 2;
        let without = format!("{}{}", &line[..start], &line[end..]);
        message(&without, &[&format!("`{key}` is missing")]);
    }
}

#[test]
fn any_text_gives_an_error_and_never_a_panic() {
    for text in ["", " ", "[", "{", "nul", "[1,2]", "\u{e9}\u{e9}", "{\"theta\":[\u{fc}", "\"", "{\"adv\":"] {
        let error = run_line(3, text).unwrap_err().to_string();
        assert!(error.starts_with("line 3"), "{error}");
    }
}
