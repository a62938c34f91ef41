//! One page that shows runs: plots, settings and sampled responses, from the files of their directories.
//!
//! The page is HTML, a style sheet and a few hand-written scripts, all in this folder and embedded in the
//! binary. `qurl report` writes it as one file that loads nothing; `qurl dash` serves the same page and sends
//! it what is new. Reading is forgiving, because a run may be in progress: a line that is half written, a
//! file that is not there yet or a field that an older version did not write leaves a gap in the page and
//! nothing worse.

mod facts;
mod follow;
mod labels;
mod page;
mod places;
mod rollouts;
mod series;
mod supervised;

pub use facts::figures;
pub use follow::Follower;
pub use labels::name_runs;
pub use page::{SCRIPT, STYLE, live_page, render};
pub use places::Place;
pub use series::Steps;

use rollouts::StepRollouts;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use supervised::Kind;

/// Everything that the page shows of one run.
#[derive(Clone, Debug, Default)]
pub struct RunData {
    /// Its directory.
    pub dir: PathBuf,
    /// Its name in the page.
    pub label: String,
    /// The name that it shares with runs of the same recipe and other seeds, where there are any.
    pub group: Option<String>,
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
        let mut runs = read_runs(&[dir.to_path_buf()])?;
        match runs.len() {
            1 => Ok(runs.remove(0)),
            count => {
                let what = format!("is a comparison of {count} runs, expected the directory of one");
                Err(crate::input::bad(format!("{}: {what}", dir.display())))
            }
        }
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

    /// Whether the run is over: its summary says how it ended, or its last step is there.
    pub fn finished(&self) -> bool {
        let reached = self.total_steps().zip(self.steps.last()).is_some_and(|(total, last)| last >= total);
        reached || ["accuracy_after", "broken"].iter().any(|key| self.summary.contains_key(*key))
    }

    /// The run as the page wants it.
    pub fn to_json(&self) -> Value {
        let mut run = self.since(0, true, true);
        run["label"] = json!(self.label);
        run["group"] = json!(self.group);
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
            "alarms": facts::alarms(self),
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

/// Reads the runs of all these directories, each that of a run or of a comparison, and names them. Runs of a
/// comparison that have not made a step are left out.
pub fn read_runs(dirs: &[PathBuf]) -> anyhow::Result<Vec<RunData>> {
    let mut runs = Vec::new();
    for dir in dirs {
        let before = runs.len();
        for place in Place::of(dir)?.runs(dir)? {
            let mut follower = Follower::new(&place);
            follower.poll()?;
            let run = follower.run();
            if !run.steps.is_empty() || !run.warm.is_empty() {
                runs.push(follower.into_run());
            }
        }
        if runs.len() == before {
            let name = dir.display();
            return Err(crate::input::bad(format!("{name}: no step has been made: metrics.jsonl has none")));
        }
    }
    name_runs(&mut runs);
    Ok(runs)
}

#[cfg(test)]
mod tests;
