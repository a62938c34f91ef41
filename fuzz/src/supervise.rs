//! Runs a target's inputs in workers, one after the other, and keeps what failed.

use crate::mutate;
use crate::targets::{self, Target};
use crate::worker::TOO_SLOW;
use std::collections::BTreeMap;
use std::error::Error;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Inputs that are kept of every failure.
const KEPT: usize = 3;
/// Failures after which a target is given up.
const MAX_FAILURES: usize = 1000;
/// How long a worker's file of errors is quoted.
const QUOTED: usize = 160;

/// What is to be run.
pub struct Plan {
    /// Of all inputs.
    pub seed: u64,
    /// Number of the first one.
    pub from: u64,
    /// How many.
    pub inputs: u64,
    /// Where failing inputs are written.
    pub keep: PathBuf,
}

/// What came out.
#[derive(Debug, Default)]
pub struct Outcome {
    /// That were run.
    pub inputs: u64,
    /// That were accepted; those of a worker that ended early are not counted.
    pub accepted: u64,
    /// The numbers of the inputs, by what happened.
    pub failures: BTreeMap<String, Vec<u64>>,
    /// From the first to the last.
    pub time: Duration,
}

impl Outcome {
    /// One line, and one for each kind of failure.
    pub fn summary(&self, name: &str) -> String {
        let failed: usize = self.failures.values().map(Vec::len).sum();
        let mut text = format!(
            "{name:<11}{:>9} inputs {:>9} accepted {failed:>5} failed {:>9.1} s",
            self.inputs,
            self.accepted,
            self.time.as_secs_f64()
        );
        for (what, inputs) in &self.failures {
            let first: Vec<String> = inputs.iter().take(KEPT).map(u64::to_string).collect();
            text.push_str(&format!("\n  {} times, first {}: {what}", inputs.len(), first.join(", ")));
        }
        text
    }
}

/// Runs the inputs of a plan.
pub fn run(target: &'static Target, plan: &Plan, scratch: &Path) -> Result<Outcome, Box<dyn Error>> {
    let start = Instant::now();
    let mut outcome = Outcome::default();
    let (mut next, end) = (plan.from, plan.from + plan.inputs);
    let mut failures = 0;
    while next < end && failures < MAX_FAILURES {
        let worker = Worker::new(scratch)?;
        let output = worker.run(target, plan.seed, next, end)?;
        for line in output.text.lines() {
            match line.split_once(' ') {
                Some(("done", accepted)) => outcome.accepted += accepted.parse::<u64>()?,
                Some(("panic", rest)) => {
                    let (index, what) = rest.split_once(' ').ok_or("a panic without a place")?;
                    outcome.failures.entry(format!("panic at {what}")).or_default().push(index.parse()?);
                }
                _ => return Err(format!("a worker said: {line}").into()),
            }
        }
        next = match output.ended_at {
            None => end,
            Some((index, what)) => {
                outcome.failures.entry(what).or_default().push(index);
                index + 1
            }
        };
        failures = outcome.failures.values().map(Vec::len).sum();
    }
    outcome.inputs = next - plan.from;
    outcome.time = start.elapsed();
    keep(target, plan, &outcome, scratch)?;
    Ok(outcome)
}

/// Writes the first inputs of every failure.
fn keep(target: &Target, plan: &Plan, outcome: &Outcome, scratch: &Path) -> Result<(), Box<dyn Error>> {
    if outcome.failures.is_empty() {
        return Ok(());
    }
    let seeds = targets::seeds(target, scratch)?;
    for index in outcome.failures.values().flat_map(|inputs| inputs.iter().take(KEPT)) {
        let input = mutate::nth(target.name, plan.seed, *index, &seeds, target.words);
        input.write(&plan.keep.join(target.name).join(index.to_string()))?;
    }
    Ok(())
}

/// A worker's folder, removed with it.
struct Worker {
    folder: PathBuf,
}

struct Output {
    text: String,
    /// The input that ended the process, and how.
    ended_at: Option<(u64, String)>,
}

impl Worker {
    fn new(scratch: &Path) -> Result<Worker, Box<dyn Error>> {
        let folder = scratch.join("worker");
        if folder.exists() {
            std::fs::remove_dir_all(&folder)?;
        }
        std::fs::create_dir_all(folder.join("scratch"))?;
        Ok(Worker { folder })
    }

    fn run(&self, target: &Target, seed: u64, from: u64, to: u64) -> Result<Output, Box<dyn Error>> {
        let (progress, errors) = (self.folder.join("progress"), self.folder.join("errors"));
        let output = Command::new(std::env::current_exe()?)
            .args(["worker", target.name])
            .args([seed, from, to].map(|number| number.to_string()))
            .args([&self.folder.join("scratch"), &progress])
            .stderr(Stdio::from(std::fs::File::create(&errors)?))
            .output()?;
        let text = String::from_utf8(output.stdout)?;
        if output.status.success() {
            return Ok(Output { text, ended_at: None });
        }
        let said = std::fs::read_to_string(&errors)?;
        let number = std::fs::read(&progress).ok().and_then(|bytes| bytes.first_chunk::<8>().copied());
        let Some(number) = number else {
            return Err(format!("the worker of {} did not begin: {said}", target.name).into());
        };
        Ok(Output { text, ended_at: Some((u64::from_le_bytes(number), how(output.status, &said))) })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn how(status: ExitStatus, said: &str) -> String {
    if status.code() == Some(TOO_SLOW) {
        return "takes too long".to_string();
    }
    let ended = match status.signal() {
        Some(signal) => format!("signal {signal}"),
        None => status.to_string(),
    };
    let said = said.trim().lines().last().unwrap_or_default();
    format!("{ended}: {}", said.chars().take(QUOTED).collect::<String>())
}
