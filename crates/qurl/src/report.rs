//! One page that shows runs: plots, settings and sampled responses, from the files of their directories.
//!
//! The page is HTML, a style sheet and a few hand-written scripts, all in this folder and embedded in the binary. `qurl
//! report` writes it as one file that loads nothing; `qurl dash` serves the same page and sends it what is new. Reading is
//! forgiving, because a run may be going on: a line that is half written, a file that is not there yet or a field that an
//! older version did not write leaves a gap in the page and nothing worse.

mod facts;
mod follow;
mod page;
mod rollouts;
mod series;
mod supervised;

pub use facts::figures;
pub use follow::{Change, Follower};
pub use page::{SCRIPT, STYLE, live_page, render};
pub use series::Steps;

use rollouts::StepRollouts;
use serde_json::{Map, Value, json};
use std::path::Path;
use supervised::Kind;

/// Everything that the page shows of one run.
#[derive(Clone, Debug, Default)]
pub struct RunData {
    /// Its name in the page.
    pub label: String,
    /// The recipe, key by key.
    pub settings: Vec<(String, String)>,
    /// `summary.json`: what no step knows; empty where there is none.
    pub summary: Map<String, Value>,
    /// The figures of the steps.
    pub steps: Steps,
    /// The figures of its warm start.
    pub warm: Steps,
    /// Some of the sampled responses.
    pub rollouts: Vec<StepRollouts>,
    /// What could not be read, for the reader to know.
    pub warnings: Vec<String>,
}

impl RunData {
    /// Reads a run's directory. An error is bad input: no directory, or nothing of a run in it.
    pub fn read(dir: &Path) -> anyhow::Result<RunData> {
        let mut follower = Follower::open(dir)?;
        follower.poll()?;
        let run = follower.into_run();
        if run.steps.is_empty() && run.warm.is_empty() {
            return Err(crate::input::bad(format!(
                "{}: no steps in metrics.jsonl; expected the directory of a run",
                dir.display()
            )));
        }
        Ok(run)
    }

    /// The value of a setting.
    pub fn setting(&self, key: &str) -> Option<&str> {
        self.settings.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// Steps that the run was planned for.
    pub fn total_steps(&self) -> Option<u64> {
        let key = if self.kind() == Kind::Sft { "sft.steps" } else { "run.total_steps" };
        self.setting(key)?.parse().ok()
    }

    /// Whether the run is over: its summary is complete, or its last step is there.
    pub fn finished(&self) -> bool {
        let reached = self.total_steps().zip(self.steps.last()).is_some_and(|(total, last)| last >= total);
        reached || self.summary.contains_key("accuracy_after")
    }

    /// The run as the page wants it.
    pub fn to_json(&self) -> Value {
        let mut run = self.since(0, true, true);
        run["label"] = json!(self.label);
        run["settings"] = json!(self.settings);
        run["total_steps"] = json!(self.total_steps());
        run["kind"] = json!(self.kind());
        run["warm"] = self.warm.columns_from(0);
        run
    }

    /// What is new since `from` steps were there; layers and rollouts, which are large, only where asked for.
    pub fn since(&self, from: usize, layers: bool, rollouts: bool) -> Value {
        let mut more = json!({
            "from": from,
            "series": self.steps.columns_from(from),
            "figures": figures(self),
            "facts": facts::facts(self),
            "finished": self.finished(),
            "warnings": self.warnings,
        });
        if layers {
            more["layers"] = self.steps.layers_json();
        }
        if rollouts {
            more["rollouts"] = json!(self.rollouts);
        }
        more
    }
}

/// Gives runs with the same directory name longer names, until all differ or there is no more of the path.
pub fn label_apart(runs: &mut [RunData], dirs: &[std::path::PathBuf]) {
    let name = |dir: &Path, parts: usize| {
        let all: Vec<String> =
            dir.components().map(|c| c.as_os_str().to_string_lossy().into_owned()).collect();
        all[all.len().saturating_sub(parts)..].join("/")
    };
    for parts in 2..=8 {
        let labels: Vec<String> = runs.iter().map(|run| run.label.clone()).collect();
        for (run, dir) in runs.iter_mut().zip(dirs) {
            if labels.iter().filter(|label| **label == run.label).count() > 1 {
                run.label = name(dir, parts);
            }
        }
    }
}

#[cfg(test)]
mod tests;
