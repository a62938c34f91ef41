//! Damaged checkpoints: found, named, and passed over for the one before.

use super::support::{Outcome, copy, place, train, trained};
use qurl_train::checkpoint::Manifest;
use qurl_train::runlog::EventReader;
use std::path::{Path, PathBuf};

/// All files below a directory.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).expect("a directory").flatten() {
        if entry.path().is_dir() { found.extend(files(&entry.path())) } else { found.push(entry.path()) }
    }
    found.sort();
    found
}

type Damage = fn(&Path);

fn truncated(file: &Path) {
    let bytes = std::fs::read(file).expect("a file");
    std::fs::write(file, &bytes[..bytes.len() / 2]).expect("written");
}

fn emptied(file: &Path) {
    std::fs::write(file, "").expect("written");
}

fn removed(file: &Path) {
    std::fs::remove_file(file).expect("removed");
}

/// One bit in the middle, as a bad disk would have it.
fn flipped(file: &Path) {
    let mut bytes = std::fs::read(file).expect("a file");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(file, bytes).expect("written");
}

#[test]
fn every_file_of_a_checkpoint_torn_one_by_one() {
    let dir = place("runs-torn");
    let short = ["--set", "run.total_steps=8"];
    trained(&dir, "whole", &short);
    let whole = Outcome::of(&dir.join("whole"));
    let newest = dir.join("whole/checkpoints/step-8");
    let before = dir.join("whole/checkpoints/step-4");
    assert!(before.exists());
    let names: Vec<PathBuf> =
        files(&newest).iter().map(|f| f.strip_prefix(&newest).expect("below").to_path_buf()).collect();
    for part in [
        "model.safetensors",
        "optimizer.safetensors",
        "critic/model.safetensors",
        "state.json",
        "manifest.json",
    ] {
        assert!(names.contains(&PathBuf::from(part)), "{names:?}");
    }
    let damages: [(&str, Damage); 4] =
        [("truncated", truncated), ("emptied", emptied), ("removed", removed), ("flipped", flipped)];
    for (i, name) in names.iter().enumerate() {
        // Every file in two ways, large and small ones in all ways.
        for (how, damage) in [damages[i % 4], damages[(i + 2) % 4]] {
            let run = dir.join("torn");
            copy(&dir.join("whole"), &run);
            damage(&run.join("checkpoints/step-8").join(name));
            let what = format!("{} {how}", name.display());
            let done = trained(&dir, "torn", &["--resume", "--set", "run.total_steps=8"]);
            let file = name.file_name().expect("a name").to_string_lossy().into_owned();
            assert!(
                done.stderr.contains("step 8 is not whole") && done.stderr.contains(&file),
                "{what}: {}",
                done.stderr
            );
            assert!(done.stderr.contains("resumes after step 4"), "{what}: {}", done.stderr);
            // It was taken out of the way, so that its step could be saved again, and is not lost.
            let aside = run.join("checkpoints/damaged-step-8");
            assert!(done.stderr.contains("checkpoints/damaged-step-8"), "{what}: {}", done.stderr);
            std::fs::remove_dir_all(aside).expect("what is left of it");
            Outcome::of(&run).assert_same(&whole, &what);
        }
    }
}

#[test]
fn nothing_is_thrown_away_when_no_checkpoint_is_whole() {
    let dir = place("runs-all-torn");
    trained(&dir, "run", &["--set", "run.total_steps=4"]);
    for step in std::fs::read_dir(dir.join("run/checkpoints")).expect("checkpoints").flatten() {
        truncated(&step.path().join("optimizer.safetensors"));
    }
    let metrics = std::fs::read(dir.join("run/metrics.jsonl")).expect("metrics");
    let refused = train(&dir, "run", &["--resume", "--set", "run.total_steps=4"]);
    assert_eq!(refused.status, 1, "{}", refused.stderr);
    assert!(
        refused.stderr.contains("no checkpoint is whole") && refused.stderr.contains("optimizer.safetensors")
    );
    assert_eq!(std::fs::read(dir.join("run/metrics.jsonl")).expect("metrics"), metrics);
}

#[test]
fn the_newest_and_the_best_are_kept() {
    let dir = place("runs-kept");
    let more =
        ["--set", "trainer.keep_last=3", "--set", "trainer.keep_best=0", "--set", "run.total_steps=13"];
    trained(&dir, "last", &more);
    let steps = |run: &str| {
        let entries = std::fs::read_dir(dir.join(run).join("checkpoints")).expect("checkpoints").flatten();
        let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    };
    assert_eq!(steps("last"), ["step-12", "step-13", "step-8"]);
    // The best by test accuracy stays, however old, the start included: the newest among equals.
    let more = [
        "--set",
        "trainer.keep_last=1",
        "--set",
        "trainer.keep_best=2",
        "--set",
        "run.total_steps=14",
        "--set",
        "run.test_freq=4",
    ];
    trained(&dir, "best", &more);
    let metrics = std::fs::read_to_string(dir.join("best/metrics.jsonl")).expect("metrics");
    let summary = std::fs::read_to_string(dir.join("best/summary.json")).expect("a summary");
    let summary: serde_json::Value = serde_json::from_str(&summary).expect("JSON");
    let before = summary["accuracy_before"].as_f64().expect("an accuracy");
    let records =
        metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("a record"));
    let saved = |step: u64| step.is_multiple_of(4) || step == 14;
    let mut tested: Vec<(f64, u64)> = records
        .filter_map(|r| Some((r["test_accuracy"].as_f64()?, r["step"].as_u64()?)))
        .filter(|&(_, step)| saved(step))
        .chain([(before, 0)])
        .collect();
    assert!(tested.len() >= 3, "{tested:?}");
    tested.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
    let mut expected: Vec<String> = tested.iter().take(2).map(|(_, step)| format!("step-{step}")).collect();
    expected.push("step-14".to_string());
    expected.sort();
    expected.dedup();
    assert_eq!(steps("best"), expected);
}

/// A damaged checkpoint that was kept for its score is not kept for it any longer, nor named as the best.
#[test]
fn a_damaged_best_checkpoint_is_no_best() {
    let dir = place("runs-torn-best");
    // One supervised step solves nothing, and nothing is learned: all scores are equal.
    let settings = [
        ["--set", "sft.steps=1"],
        ["--set", "actor.lr=1e-12"],
        ["--set", "critic.lr=1e-12"],
        ["--set", "run.test_freq=2"],
        ["--set", "trainer.save_freq=100"],
        ["--set", "trainer.keep_last=1"],
        ["--set", "run.alarm.patience=0"],
    ]
    .concat();
    let steps = |keep_best: &'static str, steps: &'static str| -> Vec<&'static str> {
        [&settings[..], &["--set", keep_best, "--steps", steps]].concat()
    };
    let checkpoints = || {
        let entries = std::fs::read_dir(dir.join("run/checkpoints")).expect("checkpoints").flatten();
        let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    };
    trained(&dir, "run", &steps("trainer.keep_best=2", "5"));
    let tested = std::fs::read_to_string(dir.join("run/metrics.jsonl")).expect("metrics");
    let scores = tested.lines().filter_map(|line| line.split_once("\"test_accuracy\":")).map(|(_, rest)| {
        let end = rest.find([',', '}']).expect("an end");
        rest[..end].to_string()
    });
    let scores: Vec<String> = scores.collect();
    assert!(scores.len() == 3 && scores.iter().all(|s| *s == scores[0]), "this test needs ties: {scores:?}");
    assert_eq!(checkpoints(), ["step-4", "step-5"], "of equal ones the newest");
    truncated(&dir.join("run/checkpoints/step-4/model.safetensors"));
    let done = trained(&dir, "run", &[&steps("trainer.keep_best=2", "7")[..], &["--resume"]].concat());
    assert!(done.stderr.contains("step 4 is not whole"), "{}", done.stderr);
    assert!(done.stderr.contains("resumes after step 5"), "{}", done.stderr);
    assert_eq!(checkpoints(), ["damaged-step-4", "step-6", "step-7"]);
}

/// A manifest that vouches for what is there does not make a checkpoint whole.
#[test]
fn a_manifest_without_a_file_that_must_be_there() {
    let dir = place("runs-unlisted");
    trained(&dir, "whole", &["--set", "run.total_steps=8"]);
    let removed = ["optimizer.safetensors", "critic/config.json", "state.json", "reference.safetensors"];
    for name in removed {
        copy(&dir.join("whole"), &dir.join("run"));
        let newest = dir.join("run/checkpoints/step-8");
        std::fs::remove_file(newest.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let manifest = Manifest::of(&newest).expect("files").to_json().expect("JSON");
        std::fs::write(newest.join("manifest.json"), manifest).expect("written");
        let done = trained(&dir, "run", &["--resume", "--set", "run.total_steps=8"]);
        let said = format!("a list without {name}");
        assert!(
            done.stderr.contains("step 8 is not whole") && done.stderr.contains(&said),
            "{}",
            done.stderr
        );
        assert!(done.stderr.contains("resumes after step 4"), "{}", done.stderr);
    }
}

/// Metrics that somebody removed are told, and are those of the checkpoint then; TensorBoard's, too.
#[test]
fn metrics_that_vanish_are_taken_from_the_checkpoint() {
    let dir = place("runs-vanished");
    trained(&dir, "run", &["--set", "run.total_steps=4"]);
    copy(&dir.join("run"), &dir.join("whole"));
    std::fs::remove_file(dir.join("run/metrics.jsonl")).expect("removed");
    std::fs::remove_dir_all(dir.join("run/tensorboard")).expect("removed");
    let resumed = trained(&dir, "run", &["--resume", "--set", "run.total_steps=6"]);
    assert!(resumed.stderr.contains("metrics.jsonl had lost 4 of the 4 steps"), "{}", resumed.stderr);
    // Resumed as well: the last step of a run is tested, in the middle of a longer one it is not.
    trained(&dir, "whole", &["--resume", "--set", "run.total_steps=6"]);
    let records = |run: &str| -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(dir.join(run).join("metrics.jsonl")).expect("metrics");
        let untimed = |line: &str| {
            let mut record: serde_json::Value = serde_json::from_str(line).expect("a record");
            record.as_object_mut().expect("an object").remove("timing");
            record
        };
        text.lines().map(untimed).collect()
    };
    assert_eq!(records("run"), records("whole"));
    let events = std::fs::read(dir.join("run/tensorboard/events.out.tfevents.qurl")).expect("events");
    let steps: Vec<u64> =
        EventReader::new(&events).filter(|e| !e.scalars.is_empty()).map(|e| e.step).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6]);
}

/// Checkpoints that are gone altogether, where the metrics say that there were some; and a summary that is no
/// file, which used to be waited for.
#[cfg(unix)]
#[test]
fn a_run_is_not_begun_anew_over_steps_that_had_checkpoints() {
    let dir = place("runs-no-checkpoint");
    let more = ["--set", "run.total_steps=4", "--set", "trainer.save_freq=1"];
    trained(&dir, "run", &more);
    let summary = dir.join("run/summary.json");
    std::fs::remove_file(&summary).expect("removed");
    assert!(std::process::Command::new("mkfifo").arg(&summary).status().expect("mkfifo").success());
    trained(&dir, "run", &[&more[..], &["--resume"]].concat());
    assert!(summary.is_file(), "written again");

    std::fs::rename(dir.join("run/checkpoints"), dir.join("elsewhere")).expect("moved");
    let metrics = std::fs::read(dir.join("run/metrics.jsonl")).expect("metrics");
    train(&dir, "run", &[&more[..], &["--resume"]].concat()).assert_bad(&[
        "run/metrics.jsonl has 4 steps",
        "no checkpoint",
        "one every 1 steps",
        "put checkpoints back",
    ]);
    assert_eq!(std::fs::read(dir.join("run/metrics.jsonl")).expect("metrics"), metrics);
}
