//! MLflow's store of plain files, as its `FileStore` reads it:
//!
//! | file below the store | holds |
//! |---|---|
//! | `EXPERIMENT/meta.yaml` | id and name of an experiment |
//! | `EXPERIMENT/RUN/meta.yaml` | id, name, times and status of a run |
//! | `EXPERIMENT/RUN/metrics/mismatch/kl` | a line `milliseconds value step` for each step |
//! | `EXPERIMENT/RUN/params/actor.lr` | the value of a key of the recipe |
//! | `EXPERIMENT/RUN/tags/...`, `artifacts/...` | its directory; recipe, summary and report |
//!
//! A run has the id of its directory, so that writing it again, when it has gone further, takes the place of
//! what was there. It is written aside and moved, so that a reader never sees half a run.

use crate::input::OrBad;
use crate::report::RunData;
use crate::target::{self, NewDir};
use anyhow::Context;
use qurl_train::runlog::flatten;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Files of a run that go along with it.
const ARTIFACTS: [&str; 3] = ["recipe.toml", "summary.json", "report.html"];
/// MLflow's numbers for the status of a run, and for what started it.
const RUNNING: u64 = 1;
const FINISHED: u64 = 3;
const FAILED: u64 = 4;
const LOCAL: u64 = 4;

/// An experiment in a store.
pub struct Store {
    /// The store; absolute, because MLflow wants places as URIs.
    root: PathBuf,
    experiment: String,
}

impl Store {
    /// Makes the store and the experiment, or takes those that are there.
    pub fn open(root: &Path, experiment: &str) -> anyhow::Result<Store> {
        let name = root.display();
        let _new = NewDir::make(root).with_context(|| format!("--out {name}: cannot be made")).or_bad()?;
        let root = root.canonicalize().with_context(|| format!("--out {name}")).or_bad()?;
        if let Some(id) = find_experiment(&root, experiment)? {
            return Ok(Store { root, experiment: id });
        }
        let id = (hash(experiment) % 10u128.pow(18)).to_string();
        let (dir, now) = (root.join(&id), milliseconds(SystemTime::now()));
        let unwritten = || format!("--out {name}: cannot be written to");
        let _experiment = NewDir::make(&dir).with_context(unwritten).or_bad()?;
        let meta = json!({
            "artifact_location": uri(&dir), "creation_time": now, "experiment_id": id,
            "last_update_time": now, "lifecycle_stage": "active", "name": experiment,
        });
        target::write(&dir.join("meta.yaml"), &yaml(&meta))?;
        Ok(Store { root, experiment: id })
    }

    /// Its id.
    pub fn experiment_id(&self) -> &str {
        &self.experiment
    }
}

/// The id of the experiment with this name. Only one line of its file matters, so that no YAML reader is
/// needed.
fn find_experiment(root: &Path, name: &str) -> anyhow::Result<Option<String>> {
    let quoted = serde_json::to_string(name)?;
    for entry in std::fs::read_dir(root).with_context(|| format!("reading {}", root.display()))? {
        let dir = entry.with_context(|| format!("reading {}", root.display()))?.path();
        let meta = std::fs::read_to_string(dir.join("meta.yaml")).unwrap_or_default();
        let found = meta.lines().filter_map(|line| line.strip_prefix("name:")).map(str::trim);
        if found.into_iter().any(|found| found == name || found == quoted || found == format!("'{name}'")) {
            return Ok(dir.file_name().map(|id| id.to_string_lossy().into_owned()));
        }
    }
    Ok(None)
}

/// Writes a run, or writes it anew; its id.
pub fn write_run(store: &Store, run: &RunData) -> anyhow::Result<String> {
    let place = run.dir.canonicalize().unwrap_or_else(|_| run.dir.clone());
    let id = format!("{:032x}", hash(&place.display().to_string()));
    let home = store.root.join(&store.experiment).join(&id);
    // MLflow looks for no experiments in its own folder for what was deleted.
    let aside = store.root.join(".trash").join(format!("{id}.part"));
    remove(&aside)?;
    let written = write_aside(store, run, &id, &place, &home, &aside);
    if written.is_err() {
        _ = remove(&aside); // the error that matters is the one at hand
    }
    written?;
    remove(&home)?;
    std::fs::rename(&aside, &home).with_context(|| format!("writing {}", home.display()))?;
    Ok(id)
}

/// Writes all files of a run where nobody looks for them.
fn write_aside(
    store: &Store,
    run: &RunData,
    id: &str,
    place: &Path,
    home: &Path,
    aside: &Path,
) -> anyhow::Result<()> {
    for folder in ["metrics", "params", "tags", "artifacts"] {
        let folder = aside.join(folder);
        std::fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    }
    let metrics = Metrics::read(&run.dir.join("metrics.jsonl"))?;
    let status = match run.summary.contains_key("broken") {
        true => FAILED,
        false if run.finished() => FINISHED,
        false => RUNNING,
    };
    let meta = json!({
        "artifact_uri": uri(&home.join("artifacts")), "end_time": (status != RUNNING).then_some(metrics.end),
        "entry_point_name": "", "experiment_id": store.experiment, "lifecycle_stage": "active", "run_id": id,
        "run_name": run.label, "source_name": "", "source_type": LOCAL, "source_version": "",
        "start_time": metrics.start, "status": status, "tags": [], "user_id": "",
    });
    write(&aside.join("meta.yaml"), &yaml(&meta))?;
    for (name, lines) in &metrics.lines {
        let name = beside_its_parts(name, metrics.lines.keys());
        write(&aside.join("metrics").join(file_name(&name)), lines)?;
    }
    for (key, value) in &run.settings {
        write(&aside.join("params").join(file_name(key)), value)?;
    }
    let directory = place.display().to_string();
    for (tag, value) in [("mlflow.runName", &run.label), ("qurl.run", &directory)] {
        write(&aside.join("tags").join(tag), value)?;
    }
    for name in ARTIFACTS.iter().filter(|name| run.dir.join(name).is_file()) {
        let (from, to) = (run.dir.join(name), aside.join("artifacts").join(name));
        std::fs::copy(&from, &to).with_context(|| format!("copying {}", from.display()))?;
    }
    Ok(())
}

/// The lines of all metrics by name, and when the run began and ended, in milliseconds.
struct Metrics {
    lines: BTreeMap<String, String>,
    start: u64,
    end: u64,
}

impl Metrics {
    /// Reads `metrics.jsonl`. Steps carry no date: the last one was made when the file was last written, and
    /// how long each took is known.
    fn read(path: &Path) -> anyhow::Result<Metrics> {
        let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let changed = std::fs::metadata(path).and_then(|facts| facts.modified());
        let end = milliseconds(changed.unwrap_or_else(|_| SystemTime::now()));
        let records: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let took =
            |record: &Value| 1e3 * record.pointer("/timing/total").and_then(Value::as_f64).unwrap_or(0.0);
        let start = end.saturating_sub(records.iter().map(took).sum::<f64>() as u64);
        let (mut lines, mut elapsed): (BTreeMap<String, String>, f64) = (BTreeMap::new(), 0.0);
        for record in &records {
            let Some(step) = record.get("step").and_then(Value::as_u64) else { continue };
            elapsed += took(record);
            let at = start + elapsed as u64;
            for (name, value) in flatten(record) {
                writeln!(lines.entry(name).or_default(), "{at} {value} {step}")?;
            }
        }
        Ok(Metrics { lines, start, end })
    }
}

/// A metric's name, with `.value` after it where others are parts of it (a command's score and
/// `SCORE/PART`): a name is a file here, and cannot be a folder, too.
fn beside_its_parts<'a>(name: &str, all: impl IntoIterator<Item = &'a String>) -> String {
    let is_part = |other: &String| other.strip_prefix(name).is_some_and(|rest| rest.starts_with('/'));
    match all.into_iter().any(is_part) {
        true => format!("{name}.value"),
        false => name.to_string(),
    }
}

/// A name as MLflow allows it (letters, digits, `_-. :/`), and as a path that stays where it belongs.
fn file_name(name: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || "_-. :/".contains(c) { c } else { '_' };
    let clean: String = name.chars().map(allowed).collect();
    let part = |part: &str| match part.trim_matches(['.', ' ']).is_empty() {
        true => "_".repeat(part.len().max(1)),
        false => part.to_string(),
    };
    clean.split('/').map(part).collect::<Vec<_>>().join("/")
}

/// An object of plain values in YAML, which takes JSON's way of writing them.
fn yaml(object: &Value) -> String {
    let fields = object.as_object().into_iter().flatten();
    fields.map(|(key, value)| format!("{key}: {value}\n")).collect()
}

/// A path as MLflow writes places, with everything escaped that could mean something else.
fn uri(path: &Path) -> String {
    let mut uri = "file://".to_string();
    for byte in path.display().to_string().bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' | b'~' => {
                uri.push(byte as char)
            }
            byte => uri += &format!("%{byte:02X}"),
        }
    }
    uri
}

/// FNV-1a, 128 bits: the same id for the same text, always.
fn hash(text: &str) -> u128 {
    text.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash: u128, byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}

fn milliseconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |t| t.as_millis() as u64)
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    let folder = path.parent().unwrap_or(path);
    std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

fn remove(dir: &Path) -> anyhow::Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("removing {}", dir.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_where_they_belong() {
        assert_eq!(file_name("mismatch/kl"), "mismatch/kl");
        assert_eq!(file_name("reward_parts/my reward: 1.5"), "reward_parts/my reward: 1.5");
        assert_eq!(file_name("../../etc/passwd"), "__/__/etc/passwd");
        assert_eq!(file_name("/a//<b>"), "_/a/_/_b_");
    }

    #[test]
    fn a_metric_with_parts_stands_beside_them() {
        let all = ["r/judge", "r/judge/style", "r/judges"].map(String::from);
        let names: Vec<String> = all.iter().map(|name| beside_its_parts(name, &all)).collect();
        assert_eq!(names, ["r/judge.value", "r/judge/style", "r/judges"]);
    }

    #[test]
    fn places_are_escaped() {
        assert_eq!(uri(Path::new("/a b/ü#")), "file:///a%20b/%C3%BC%23");
        assert_eq!(hash(""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_ne!(hash("a"), hash("b"));
    }
}
