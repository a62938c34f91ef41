//! Dynamic sampling that does not find enough groups: an error that says so, or fewer updates where the
//! recipe allows it.

use super::support::{lines, place, train, trained};
use serde_json::Value;

/// The tiny recipe with groups in place of its critic, and this dynamic sampling.
fn place_with(name: &str, filter: &str) -> std::path::PathBuf {
    let dir = place(name);
    let text = std::fs::read_to_string(dir.join("tiny.toml")).expect("the recipe");
    let (before, after) = text.split_once("[algorithm]").expect("a section");
    let (_, actor) = after.split_once("[actor]").expect("a section");
    let (actor, rest) = actor.split_once("[critic]").expect("a section");
    let (_, run) = rest.split_once("[run]").expect("a section");
    let algorithm = format!("[algorithm]\nadv_estimator = {{ type = \"grpo\" }}\nfilter_groups = {filter}\n");
    let text = format!("{before}{algorithm}\n[actor]{actor}\n[run]{run}");
    std::fs::write(dir.join("tiny.toml"), text.replace("format_weight = 0.5", "format_weight = 0.0"))
        .expect("written");
    dir
}

#[test]
fn running_out_is_an_error_that_names_the_key_and_leaves_a_checkpoint() {
    let dir = place_with("dynamic-error", "{ max_num_gen_batches = 2 }");
    // One supervised step: nothing is ever right, so no group has different rewards.
    let out = train(&dir, "run", &["--set", "sft.steps=1"]);
    assert_eq!(out.status, 1, "{}", out.stderr);
    for text in
        ["step 1", "`algorithm.filter_groups.max_num_gen_batches` is 2", "only 0 of 4 groups", "8 all wrong"]
    {
        assert!(out.stderr.contains(text), "expected {text:?} in {}", out.stderr);
    }
    assert!(dir.join("run/checkpoints/step-0/manifest.json").exists(), "the warm start is kept");
    assert_eq!(lines(&dir.join("run")), 0);
}

#[test]
fn whole_mini_batches_are_trained_on_where_the_recipe_allows_it() {
    let dir = place_with("dynamic-fewer", "{ max_num_gen_batches = 1, allow_fewer = true }");
    let settings = ["--set", "sft.steps=150", "--set", "data.train_batch_size=8", "--steps", "6"];
    trained(&dir, "run", &settings);
    let text = std::fs::read_to_string(dir.join("run/metrics.jsonl")).expect("metrics");
    let records: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("a record")).collect();
    for record in &records {
        let groups = record["groups"].as_u64().expect("groups");
        assert!(groups.is_multiple_of(2), "mini-batches have two prompts: {record}");
        assert_eq!(record["updates"].as_u64(), Some(groups / 2), "{record}");
    }
    assert!(
        records.iter().any(|r| r["groups"].as_u64() < Some(8)),
        "this test needs a step that is not full: {text}"
    );
}

/// Dynamic sampling that runs out while the policy shows a symptom is what it is, until the symptom has
/// lasted for as many steps as the recipe says: with a patience of 0 it never breaks a run.
#[test]
fn running_out_with_a_symptom_breaks_a_run_only_when_its_patience_is_over() {
    let dir = place_with("dynamic-symptom", "{ max_num_gen_batches = 1 }");
    // Supervised steps that saturate the softmax: the policy is uniform, or always writes the same.
    let ruin = ["--set", "sft.steps=4", "--set", "sft.lr=10", "--steps", "3"];
    let out = |patience: &'static str| train(&dir, patience, &[&ruin[..], &["--set", patience]].concat());
    for patient in ["run.alarm.patience=0", "run.alarm.patience=2"] {
        let out = out(patient);
        assert_eq!(out.status, 1, "{}", out.stderr);
        assert!(out.stderr.contains("`algorithm.filter_groups.max_num_gen_batches` is 1"), "{}", out.stderr);
        assert!(!out.stderr.contains("training is broken"), "{}", out.stderr);
        assert!(dir.join(patient).join("checkpoints/step-0/manifest.json").exists(), "the state is saved");
    }
    let hasty = out("run.alarm.patience=1");
    assert_eq!(hasty.status, 1, "{}", hasty.stderr);
    assert!(hasty.stderr.contains("as 1 steps in a row show"), "{}", hasty.stderr);
}
