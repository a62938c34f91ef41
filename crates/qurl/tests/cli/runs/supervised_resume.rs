//! Supervised training that is stopped, killed, lengthened and resumed: on files alone, without a task.

use super::support::{Outcome, lines, place, trained, wait_for};
use crate::common::{Run, directory, qurl_in, tiny_model};
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const RECIPE: &str = r#"
[model]
path = "model"

[sft]
files = ["sums.jsonl"]
held_out = 0.2
validation_freq = 3
steps = 24
batch_size = 4
max_length = 32
lr = 3e-3
warmup_steps = 4

[trainer]
compute = "f32"
micro_tokens = 64
save_freq = 4
keep_last = 2
keep_best = 1
"#;

/// A directory with a model, examples and a recipe.
fn files(name: &str) -> PathBuf {
    let dir = directory(name);
    tiny_model(&dir.join("model"), "0123456789+=");
    let mut rows = String::new();
    for a in 0..30 {
        let _ = writeln!(rows, "{{\"prompt\": \"{a}+{a}=\", \"response\": \"{}\"}}", 2 * a);
    }
    std::fs::write(dir.join("sums.jsonl"), rows).expect("written");
    std::fs::write(dir.join("sft.toml"), RECIPE).expect("written");
    dir
}

fn sft(dir: &Path, run: &str, more: &[&str]) -> Run {
    qurl_in(dir, &[&["sft", "sft.toml", "--run", run], more].concat(), "")
}

fn done(dir: &Path, run: &str, more: &[&str]) -> Run {
    let run = sft(dir, run, more);
    assert_eq!(run.status, 0, "{}", run.stderr);
    run
}

fn spawn(dir: &Path, run: &str, more: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_qurl"))
        .args(["sft", "sft.toml", "--run", run])
        .args(more)
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts")
}

fn records(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    text.lines().map(|line| serde_json::from_str(line).expect("a record")).collect()
}

#[test]
fn a_run_leaves_what_train_leaves() {
    let dir = files("sft-run");
    let summary = done(&dir, "run", &["--json"]).json();
    let steps = records(&dir.join("run"));
    assert_eq!(steps.len(), 24);
    assert_eq!(summary["first_loss"], steps[0]["loss"]);
    assert_eq!(summary["last_loss"], steps[23]["loss"]);
    assert!(summary["last_loss"].as_f64() < summary["first_loss"].as_f64(), "it learned nothing: {summary}");
    let validated: Vec<u64> = steps
        .iter()
        .filter(|step| step["validation_loss"].is_f64())
        .filter_map(|step| step["step"].as_u64())
        .collect();
    assert_eq!(validated, [3, 6, 9, 12, 15, 18, 21, 24]);
    assert_eq!(summary["validation_loss_after"], steps[23]["validation_loss"]);
    assert!(summary["validation_loss_before"].as_f64() > summary["validation_loss_after"].as_f64());
    // The lowest is the best, and its model is kept.
    let lowest = steps.iter().filter_map(|step| step["validation_loss"].as_f64()).reduce(f64::min);
    assert_eq!(summary["best"]["validation_loss"].as_f64(), lowest);
    let best = dir.join(summary["best"]["model"].as_str().expect("a model"));
    assert!(best.join("model.safetensors").exists(), "{summary}");
    assert!(summary["accuracy"].is_null(), "there is no task to be right at");
    for file in ["recipe.toml", "report.html", "model/config.json", "tensorboard/events.out.tfevents.qurl"] {
        assert!(dir.join("run").join(file).exists(), "{file}");
    }
    let kept: Vec<u64> =
        (0..=24).filter(|step| dir.join(format!("run/checkpoints/step-{step}")).exists()).collect();
    assert!(kept.ends_with(&[20, 24]) && kept.len() <= 3, "{kept:?}");
    let report = qurl_in(&dir, &["report", "run", "--json"], "").json();
    let figures = &report["runs"][0]["figures"]["supervised"];
    assert_eq!(
        (&figures["steps"], &figures["validation_loss_before"]),
        (&24.into(), &summary["validation_loss_before"])
    );

    let again = done(&dir, "run", &["--resume"]);
    assert!(again.stdout.contains("is finished: it has made its 24 steps"), "{}", again.stdout);
}

/// Killed by SIGKILL at many moments, once or twice: the same bits as if nothing had happened.
#[test]
fn kills_change_nothing() {
    let dir = files("sft-killed");
    done(&dir, "whole", &[]);
    let whole = Outcome::of(&dir.join("whole"));
    let mut kills = 0;
    for moments in [&[1][..], &[5], &[11], &[7, 19]] {
        let name = format!("killed-{}", moments[0]);
        for &step in moments {
            let mut child = spawn(&dir, &name, &["--resume"]);
            wait_for(&mut child, || lines(&dir.join(&name)) >= step);
            child.kill().expect("killed");
            kills += usize::from(child.wait().expect("ended").code().is_none());
        }
        done(&dir, &name, &["--resume"]);
        Outcome::of(&dir.join(&name)).assert_same(&whole, &format!("killed after steps {moments:?}"));
    }
    assert!(kills >= 3, "most runs were over before they were killed");
    done(&dir, "often", &["--set", "sft.validation_freq=1"]);
    assert!(Outcome::of(&dir.join("often")).weights() == whole.weights(), "validation changes nothing");
    done(&dir, "other", &["--set", "trainer.seed=2"]);
    assert_ne!(Outcome::of(&dir.join("other")).weights(), whole.weights(), "another seed is another run");
}

#[cfg(unix)]
#[test]
fn ctrl_c_saves_and_says_how_to_resume() {
    let dir = files("sft-stopped");
    // Only Ctrl-C saves here, so the checkpoint that the run resumes from is its own.
    let more = ["--set", "trainer.save_freq=0", "--set", "sft.steps=4000"];
    let mut child = spawn(&dir, "run", &more);
    assert!(wait_for(&mut child, || lines(&dir.join("run")) >= 3));
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill");
    assert!(sent.success());
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().expect("a pipe"), &mut said).expect("text");
    assert_eq!(child.wait().expect("ended").code(), Some(130), "{said}");
    let step = lines(&dir.join("run"));
    let wanted = format!("stopped after step {step}; resume with: qurl sft --run run --resume");
    assert!(said.contains(&wanted), "{said}");
    // As it says, without naming the recipe, but with another end; and the same as a run that was never
    // stopped.
    let end = (step + 5).to_string();
    let resumed = qurl_in(&dir, &["sft", "--run", "run", "--resume", "--steps", &end], "");
    assert_eq!(resumed.status, 0, "{}", resumed.stderr);
    done(&dir, "whole", &["--set", "trainer.save_freq=0", "--steps", &end]);
    let (resumed, whole) = (Outcome::of(&dir.join("run")), Outcome::of(&dir.join("whole")));
    assert_eq!(resumed.weights(), whole.weights());
}

#[test]
fn what_would_be_another_run_is_refused() {
    let dir = files("sft-refused");
    done(&dir, "run", &["--steps", "8"]);
    sft(&dir, "run", &["--resume", "--steps", "9", "--set", "sft.lr=1e-3"])
        .assert_bad(&["was begun with another recipe", "sft.lr: 0.003 -> 0.001"]);
    sft(&dir, "run", &["--resume", "--steps", "4"])
        .assert_bad(&["--resume: key `sft.steps` is 4, but the run in run has 8 already"]);
    done(&dir, "run", &["--resume", "--steps", "12"]);
    assert_eq!(lines(&dir.join("run")), 12);
    // A learning rate that decays looks ahead to the end.
    let cosine = ["--set", "sft.decay=cosine"];
    done(&dir, "cosine", &[&["--steps", "8"], &cosine[..]].concat());
    sft(&dir, "cosine", &[&["--resume", "--steps", "12"], &cosine[..]].concat())
        .assert_bad(&["another recipe", "sft.steps: 8 -> 12"]);
    // Other examples under the same name.
    let rows = std::fs::read_to_string(dir.join("sums.jsonl")).expect("rows");
    std::fs::write(dir.join("sums.jsonl"), rows.replace("\"58\"", "\"59\"")).expect("written");
    sft(&dir, "run", &["--resume", "--steps", "16"])
        .assert_bad(&["the examples are not those that the run was begun with: their files were changed"]);

    sft(&dir, "nowhere", &["--resume", "--set", "sft.steps=0"]).assert_bad(&["sft.steps"]);
    qurl_in(&dir, &["sft", "--run", "nowhere", "--resume"], "")
        .assert_bad(&["--resume: nowhere/recipe.toml does not exist: there is nothing to resume"]);
    let without = RECIPE.replace("files = [\"sums.jsonl\"]\nheld_out = 0.2\n", "");
    std::fs::write(dir.join("without.toml"), without).expect("written");
    qurl_in(&dir, &["sft", "without.toml"], "")
        .assert_bad(&["there is nothing to learn from: give `sft.files`"]);
}

/// `train` and `sft` do not continue each other's runs; the warm start of `train` is written down.
#[test]
fn the_warm_start_of_train_is_written_down() {
    let dir = place("sft-warm");
    trained(&dir, "run", &["--steps", "2", "--set", "sft.validation_freq=10"]);
    let text = std::fs::read_to_string(dir.join("run/warm_start.jsonl")).expect("the warm start");
    let steps: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("a record")).collect();
    assert_eq!(steps.len(), 40);
    let validated = steps.iter().filter(|step| step["validation_loss"].is_f64()).count();
    assert_eq!(validated, 4);
    assert!(dir.join("run/tensorboard/warm_start/events.out.tfevents.qurl").exists());
    let report = qurl_in(&dir, &["report", "run", "--json"], "").json();
    let figures = &report["runs"][0]["figures"];
    assert_eq!(figures["warm_start"]["steps"], 40);
    assert_eq!(
        figures["warm_start"]["loss_last"].as_f64().map(|x| (1e3 * x) as i64),
        steps[39]["loss"].as_f64().map(|x| (1e3 * x) as i64)
    );
    assert!(figures["supervised"].is_null());
    // What resumes after the warm start leaves it as it is.
    trained(&dir, "run", &["--steps", "4", "--resume", "--set", "sft.validation_freq=10"]);
    assert_eq!(std::fs::read_to_string(dir.join("run/warm_start.jsonl")).expect("the warm start"), text);

    qurl_in(&dir, &["sft", "tiny.toml", "--run", "run", "--resume"], "")
        .assert_bad(&["--resume: run holds a run of `qurl train`, not of `qurl sft`"]);
}
