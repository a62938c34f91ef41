//! A run that leaves its band is told of, and ends where the recipe says so.

use super::support::{lines, place, trained};

#[test]
fn an_alarm_warns_or_stops() {
    let dir = place("alarm");
    let few = ["--set", "sft.steps=10", "--steps", "3", "--set", "run.alarm.entropy_high=0.0001"];
    let warned = trained(&dir, "warns", &few);
    let said = |text: &str| text.matches("entropy").count();
    assert!(said(&warned.stderr) == 3 && warned.stderr.contains("run.alarm"), "{}", warned.stderr);
    assert_eq!(lines(&dir.join("warns")), 3);

    let stop = [&few[..], &["--set", "run.alarm.action=stop"]].concat();
    let stopped = trained(&dir, "stops", &stop);
    assert!(said(&stopped.stderr) == 1, "{}", stopped.stderr);
    assert!(stopped.stderr.contains("the run ends here"), "{}", stopped.stderr);
    assert_eq!(lines(&dir.join("stops")), 1);
    // Accuracy afterwards is that of the model that is left, not of the one before.
    let metrics = std::fs::read_to_string(dir.join("stops/metrics.jsonl")).expect("metrics");
    assert!(metrics.contains("\"test_accuracy\":"), "{metrics}");
    assert!(dir.join("stops/model/model.safetensors").exists(), "what was learned is kept");
}
