//! A run that has made all of its steps: resuming it says so and changes nothing, and its times add up.

use super::support::{place, train, trained};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

/// Every file of a directory with its bytes and its time.
fn files(dir: &Path, found: &mut BTreeMap<String, (Vec<u8>, SystemTime)>) {
    for entry in std::fs::read_dir(dir).expect("a directory").flatten() {
        let path = entry.path();
        if path.is_dir() {
            files(&path, found);
        } else if entry.file_name() != "run.lock" {
            let changed = entry.metadata().and_then(|m| m.modified()).expect("a time");
            found.insert(path.display().to_string(), (std::fs::read(&path).expect("a file"), changed));
        }
    }
}

#[test]
fn resuming_a_finished_run_changes_nothing() {
    let dir = place("finished");
    let first = trained(&dir, "run", &["--steps", "4", "--json"]).json();
    let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
    files(&dir.join("run"), &mut before);
    let again = train(&dir, "run", &["--resume", "--steps", "4"]);
    assert_eq!(again.status, 0, "{}", again.stderr);
    assert!(again.stdout.contains("is finished: it has made its 4 steps"), "{}", again.stdout);
    let json = train(&dir, "run", &["--resume", "--steps", "4", "--json"]).json();
    assert_eq!(json, first, "the same summary");
    let other = train(&dir, "run", &["--resume", "--steps", "4", "--set", "trainer.save_freq=1"]);
    assert!(other.status == 0 && other.stdout.contains("is finished"), "{}{}", other.stdout, other.stderr);
    files(&dir.join("run"), &mut after);
    assert!(before == after, "a file was changed");
}

#[test]
fn the_times_of_all_processes_add_up() {
    let dir = place("finished-longer");
    trained(&dir, "run", &["--steps", "4"]);
    let whole = trained(&dir, "run", &["--resume", "--steps", "8", "--json"]).json();
    let steps = std::fs::read_to_string(dir.join("run/metrics.jsonl")).expect("metrics");
    let seconds =
        |line: &str| serde_json::from_str::<Value>(line).expect("a record")["timing"]["total"].as_f64();
    let total: f64 = steps.lines().filter_map(seconds).sum();
    let by_phase = whole["seconds_by_phase"]["total"].as_f64().expect("seconds");
    assert!((by_phase - total).abs() < 1e-9, "{by_phase} {total}");
    assert!(whole["seconds"].as_f64() >= Some(total), "{whole}");
}
