//! Reading run directories as they are found: whole, half written, growing, resumed.

use super::follow::Change;
use super::*;
use crate::scratch::Scratch;

fn line(step: u64, reward: f64) -> String {
    json!({"step": step, "reward": reward, "response_tokens": 10, "timing": {"rollout": 1.0, "total": 2.0}})
        .to_string()
        + "\n"
}

fn write(dir: &Path, file: &str, text: &str) {
    std::fs::write(dir.join(file), text).expect("written");
}

#[test]
fn what_is_not_a_run_is_named() {
    let dir = Scratch::new("report-none");
    let error = RunData::read(&dir.join("absent")).expect_err("no directory");
    assert!(error.is::<crate::input::BadInput>() && error.to_string().contains("absent"), "{error}");
    let error = RunData::read(&dir).expect_err("nothing there");
    assert!(error.to_string().ends_with("is empty: no run has begun here"), "{error}");
    write(&dir, "recipe.toml", "");
    let error = RunData::read(&dir).expect_err("no metrics");
    assert!(error.to_string().ends_with("no step has been made: metrics.jsonl has none"), "{error}");
    write(&dir, "file", "");
    assert!(RunData::read(&dir.join("file")).expect_err("a file").to_string().contains("is a file"));
}

#[test]
fn broken_lines_and_missing_files_leave_gaps() {
    let dir = Scratch::new("report-gaps");
    write(&dir, "metrics.jsonl", &format!("{}not json\n{}{{\"step\":3,\"rew", line(1, 0.5), line(2, 1.0)));
    write(
        &dir,
        "recipe.toml",
        "[run]\ntotal_steps = 2\n[algorithm]\nobjective = { type = \"acr\", c = 2.0 }\n",
    );
    write(
        &dir,
        "summary.json",
        "{\"accuracy_before\":0.25,\"parameters\":791168,\
                             \"rollout_speed\":{\"tokens_per_s\":3,\"bf16_tokens_per_s\":2}}",
    );
    std::fs::create_dir_all(dir.join("rollouts")).expect("created");
    write(
        &dir,
        "rollouts/step-000002.jsonl",
        "{\"step\":2,\"tokens\":[\"a\",\"b\"],\"rho\":[1.5]}\n{\"step\":2,\"tok",
    );
    write(&dir, "rollouts/notes.txt", "not a step");
    let run = RunData::read(&dir).expect("read");
    assert_eq!(run.steps.len(), 2, "the half-written line is not there yet");
    assert_eq!(run.warnings.len(), 1);
    assert!(run.warnings[0].contains("line 2"), "{:?}", run.warnings);
    assert_eq!(run.setting("algorithm.objective.c"), Some("2.0"));
    assert!(run.finished());
    let page = run.to_json();
    assert_eq!(page["figures"]["accuracy_before"], 0.25);
    assert_eq!(page["figures"]["rollout_tokens_per_s"], 10.0);
    assert_eq!(page["figures"]["rollout_speedup"], 1.5);
    assert_eq!(page["facts"], json!(["791k parameters", "ACR"]));
    assert_eq!(page["rollouts"][0]["samples"][0]["rho"], json!([1.5, null]));
    assert_eq!(page["rollouts"][0]["samples"].as_array().map(Vec::len), Some(1));
}

#[test]
fn only_what_is_new_is_read_and_a_cut_is_noticed() {
    let dir = Scratch::new("report-grows");
    let mut follower = Follower::new(&dir);
    assert_eq!(follower.poll().expect("nothing yet"), Change::default());
    write(&dir, "metrics.jsonl", &(line(1, 1.0) + &line(2, 2.0)));
    assert_eq!(follower.poll().expect("two").steps_from, Some(0));
    assert_eq!(follower.poll().expect("nothing new"), Change::default());
    let third = line(3, 3.0);
    write(&dir, "metrics.jsonl", &(line(1, 1.0) + &line(2, 2.0) + &third[..9]));
    assert_eq!(follower.poll().expect("half a line"), Change::default());
    write(&dir, "metrics.jsonl", &(line(1, 1.0) + &line(2, 2.0) + &third));
    assert_eq!(follower.poll().expect("one more").steps_from, Some(2));
    assert_eq!(follower.run().since(2, false, false)["series"]["reward"], json!([3.0]));
    // Resumed after step 1, and already further than before.
    write(&dir, "metrics.jsonl", &(line(1, 1.0) + &line(2, 20.0) + &line(3, 30.0) + &line(4, 40.0)));
    assert_eq!(follower.poll().expect("anew").steps_from, Some(0));
    assert_eq!(follower.run().steps.columns_from(0)["reward"], json!([1.0, 20.0, 30.0, 40.0]));
    write(&dir, "summary.json", "{\"accuracy_bef");
    assert!(!follower.poll().expect("half").about);
    write(&dir, "summary.json", "{\"accuracy_before\":0.5,\"accuracy_after\":0.75}");
    assert!(follower.poll().expect("whole").about && follower.run().finished());
}

fn tested(step: u64, accuracy: f64, avg_at_k: Option<f64>) -> String {
    json!({"step": step, "reward": 1.0, "test_accuracy": accuracy, "test_avg_at_k": avg_at_k}).to_string()
        + "\n"
}

#[test]
fn the_best_is_by_avg_at_k_where_measured_and_may_be_the_start() {
    let dir = Scratch::new("report-best");
    write(&dir, "metrics.jsonl", &(tested(1, 0.9, None) + &tested(2, 0.9, None) + &tested(3, 0.8, None)));
    let figures = |dir: &Path| figures(&RunData::read(dir).expect("read"));
    assert_eq!((figures(&dir).accuracy_best, figures(&dir).best_step), (Some(0.9), Some(2)));
    write(&dir, "summary.json", "{\"accuracy_before\": 0.95, \"avg_at_k_before\": 0.5}");
    assert_eq!((figures(&dir).accuracy_best, figures(&dir).best_step), (Some(0.95), Some(0)));
    write(&dir, "metrics.jsonl", &(tested(1, 0.9, Some(0.25)) + &tested(2, 0.1, Some(0.75))));
    assert_eq!((figures(&dir).accuracy_best, figures(&dir).best_step), (Some(0.75), Some(2)));
}

#[test]
fn a_collapse_and_broken_training_are_told_on_top() {
    let dir = Scratch::new("report-alarms");
    write(&dir, "recipe.toml", "[run]\ntest_problems = 200\n");
    write(&dir, "metrics.jsonl", &(tested(1, 0.9, None) + &tested(2, 0.85, None)));
    let alarms = |dir: &Path| RunData::read(dir).expect("read").to_json()["alarms"].clone();
    assert_eq!(alarms(&dir), json!([]));
    write(&dir, "metrics.jsonl", &(tested(1, 0.9, None) + &tested(2, 0.25, None)));
    let collapsed =
        "Held-out accuracy has collapsed: from its best, 90.0% after step 1, to 25.0% after step 2.";
    assert_eq!(alarms(&dir), json!([collapsed]));
    write(&dir, "summary.json", "{\"best\": {\"model\": \"runs/a/checkpoints/step-1\"}}");
    assert_eq!(alarms(&dir), json!([format!("{collapsed} The best model is in runs/a/checkpoints/step-1.")]));
    write(&dir, "summary.json", "{\"accuracy_before\": 0.95, \"broken\": \"training is broken: step 3\"}");
    let start = collapsed.replace("90.0% after step 1", "95.0% before the first step");
    assert_eq!(alarms(&dir), json!(["training is broken: step 3", start]));
    assert!(RunData::read(&dir).expect("read").finished(), "a run that broke is over");
}

#[test]
fn supervised_runs_and_warm_starts_are_read() {
    let dir = Scratch::new("report-sft");
    let line = |step: u64, loss: f64, more: &str| {
        format!(
            "{{\"step\":{step},\"loss\":{loss},\"tokens\":100,\"updates\":1,{more}\
             \"timing\":{{\"update\":0.5,\"total\":1.0}}}}\n"
        )
    };
    let lines = line(1, 3.0, "")
        + &line(2, 2.0, "\"validation_loss\":2.5,")
        + &line(3, 1.5, "\"validation_loss\":2.75,");
    write(&dir, "metrics.jsonl", &lines);
    write(&dir, "recipe.toml", "[sft]\nsteps = 4\n");
    write(&dir, "summary.json", "{\"validation_loss_before\":4.0,\"parameters\":1000}");
    let run = RunData::read(&dir).expect("read");
    assert!(run.total_steps() == Some(4) && !run.finished());
    let page = run.to_json();
    assert_eq!((&page["kind"], &page["facts"]), (&json!("sft"), &json!(["1k parameters", "supervised"])));
    let figures = &page["figures"]["supervised"];
    assert_eq!((&figures["loss_first"], &figures["loss_last"]), (&json!(3.0), &json!(1.5)));
    assert_eq!(
        (&figures["validation_loss_before"], &figures["validation_loss_after"]),
        (&json!(4.0), &json!(2.75))
    );
    assert_eq!((&figures["validation_loss_best"], &figures["tokens_per_s"]), (&json!(2.5), &json!(200.0)));
    assert_eq!(page["series"]["validation_loss"], json!([null, 2.5, 2.75]));

    // The same lines as the warm start of a run that has not made a step yet.
    std::fs::rename(dir.join("metrics.jsonl"), dir.join("warm_start.jsonl")).expect("renamed");
    write(&dir, "recipe.toml", "[sft]\nsteps = 4\n[run]\ntotal_steps = 9\n");
    let mut follower = Follower::new(&dir);
    let news = follower.poll().expect("a warm start");
    assert!(news.about && news.steps_from.is_none());
    assert!(!follower.poll().expect("nothing new").about);
    write(&dir, "warm_start.jsonl", &(lines + &line(4, 1.25, "")));
    assert!(follower.poll().expect("one more").about);
    let page = follower.run().to_json();
    assert_eq!((&page["kind"], &page["total_steps"]), (&json!("train"), &json!(9)));
    assert_eq!(page["warm"]["loss"], json!([3.0, 2.0, 1.5, 1.25]));
    assert_eq!((&page["figures"]["warm_start"]["steps"], &page["figures"]["steps"]), (&json!(4), &json!(0)));
    assert!(page["figures"].get("supervised").is_none());
    RunData::read(&dir).expect("a run in its warm start is a run");
}
