//! What an evaluation leaves behind: a directory with settings, responses and figures, and a table.

use super::Sources;
use crate::input::{OrBad, bad};
use crate::target::{self, NewDir, free_run};
use anyhow::Context;
use qurl_kernels::Device;
use qurl_rollout::Engine;
use qurl_tasks::grader::ExtractRule;
use qurl_tasks::metrics::Estimate;
use qurl_train::evaluate::EvalOptions;
use qurl_train::evaluate::record::{ProblemRecord, Records};
use qurl_train::evaluate::summary::{MeanOverSets, Summary};
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

const SETTINGS: &str = "settings.json";
const RESPONSES: &str = "responses.jsonl";
const SUMMARY: &str = "summary.json";

/// Everything that the figures depend on; an evaluation is resumed only with the same.
#[derive(Clone, Serialize)]
pub struct Settings {
    model: String,
    /// Tells the weights from others.
    weights: String,
    format: &'static str,
    head_format: &'static str,
    kv_format: &'static str,
    k: usize,
    temperature: f32,
    top_p: f32,
    max_new: usize,
    seed: u64,
    template: &'static str,
    policy: &'static str,
    extract: Option<ExtractRule>,
    /// Tells the problems from others.
    problems: String,
}

impl Settings {
    /// The settings of this evaluation.
    pub fn new<D: Device>(
        model: &Path,
        engine: &Engine<D>,
        options: EvalOptions,
        sources: &Sources,
    ) -> Settings {
        let network = engine.network().options();
        Settings {
            model: model.display().to_string(),
            weights: format!("{:016x}", engine.weights().unwrap_or_default().checksum),
            format: network.format.name(),
            head_format: network.head_format.name(),
            kv_format: network.kv_format.name(),
            k: options.k,
            temperature: options.sampling.temperature,
            top_p: options.sampling.top_p,
            max_new: options.max_new,
            seed: options.seed,
            template: sources.template,
            policy: sources.policy,
            extract: sources.extract.clone(),
            problems: format!("{:016x}", sources.checksum()),
        }
    }

    /// All but where the model is, for ranks on other machines to compare.
    pub fn of_any_place(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string(&Settings { model: String::new(), ..self.clone() })?)
    }

    /// Refuses settings that differ from those in the file. The model may have moved: its weights count.
    fn check_same(&self, file: &Path) -> anyhow::Result<()> {
        let name = file.display();
        let text = qurl_files::read_text(file, qurl_files::MIB).with_context(|| name.to_string()).or_bad()?;
        let old: Map<String, Value> =
            serde_json::from_str(&text).with_context(|| name.to_string()).or_bad()?;
        // Through text, as the old ones: numbers are then rounded alike.
        let new: Map<String, Value> = serde_json::from_str(&serde_json::to_string(self)?)?;
        for (key, new) in new.iter().filter(|(key, _)| *key != "model") {
            let old = old.get(key).unwrap_or(&Value::Null);
            if old != new {
                return Err(bad(format!("--resume: {name} has `{key}` = {old}, this evaluation has {new}")));
            }
        }
        Ok(())
    }
}

/// The directory of an evaluation.
pub struct Output {
    dir: PathBuf,
    records: Records,
}

impl Output {
    /// Makes the directory, or opens it to continue; gives the records that are there.
    pub fn open(
        dir: Option<&Path>,
        resume: bool,
        settings: &Settings,
    ) -> anyhow::Result<(Output, Vec<ProblemRecord>)> {
        let dir = match dir {
            Some(dir) => dir.to_path_buf(),
            None => free_run("eval"),
        };
        let (file, responses) = (dir.join(SETTINGS), dir.join(RESPONSES));
        if resume && file.exists() {
            settings.check_same(&file)?;
        } else if responses.exists() {
            let why =
                if resume { "holds responses without settings.json" } else { "already holds an evaluation" };
            return Err(bad(format!(
                "--out {}: {why}; give --resume to continue it, or another directory",
                dir.display()
            )));
        } else {
            let _new = NewDir::make(&dir).with_context(|| format!("--out {}", dir.display())).or_bad()?;
            let text = serde_json::to_string_pretty(settings)? + "\n";
            target::write(&file, &text).or_bad()?;
        }
        let (records, done) = Records::open(&responses).or_bad()?;
        Ok((Output { dir, records }, done))
    }

    /// The file with all responses.
    pub fn responses(&self) -> PathBuf {
        self.dir.join(RESPONSES)
    }

    /// Saves a problem that is done.
    pub fn append(&mut self, record: &ProblemRecord) -> std::io::Result<()> {
        self.records.append(record)
    }

    /// Writes the records in order, and the figures.
    pub fn finish(self, records: &[ProblemRecord], summary: &impl Serialize) -> anyhow::Result<()> {
        self.records.finish(records)?;
        let file = self.dir.join(SUMMARY);
        let text = serde_json::to_string_pretty(summary)? + "\n";
        target::write(&file, &text)
    }
}

/// The figures for the terminal: percent with the 95% interval. Of several sets, the total over their
/// problems and the mean over the sets follow.
pub fn table(sets: &[Summary], total: &Summary, mean: &MeanOverSets, k: usize) -> String {
    let cell = |e: Option<Estimate>| match e {
        Some(e) => format!("{:.1} [{:.1}, {:.1}]", 100.0 * e.value, 100.0 * e.low, 100.0 * e.high),
        None => "-".to_string(),
    };
    let titles = ["data set", "problems", "Avg@1", "Avg@k", "pass@k", "maj@k", "tokens", "cut off"];
    let mut rows = vec![titles.map(|t| t.replace("@k", &format!("@{k}")))];
    if k == 1 {
        rows[0][2] = "greedy Avg@1".to_string();
        rows[0][3] = "sampled Avg@1".to_string();
    }
    let shown = sets.iter().chain((sets.len() > 1).then_some(total));
    rows.extend(shown.map(|s| {
        [
            s.name.clone(),
            s.problems.to_string(),
            cell(s.avg_at_1),
            cell(s.avg_at_k),
            cell(s.pass_at_k),
            cell(s.maj_at_k),
            format!("{:.0}", s.mean_tokens),
            format!("{:.0}%", 100.0 * s.truncated),
        ]
    }));
    if sets.len() > 1 {
        let figures = [mean.avg_at_1, mean.avg_at_k, mean.pass_at_k, mean.maj_at_k].map(cell);
        let [avg_at_1, avg_at_k, pass_at_k, maj_at_k] = figures;
        let name = format!("mean over {} sets", mean.sets);
        rows.push([
            name,
            String::new(),
            avg_at_1,
            avg_at_k,
            pass_at_k,
            maj_at_k,
            String::new(),
            String::new(),
        ]);
    }
    let mut text = String::new();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 8] = std::array::from_fn(width);
    for row in &rows {
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            let cell = if column == 0 { format!("{cell:<width$}") } else { format!("  {cell:>width$}") };
            text.push_str(&cell);
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text + "percent, with 95% intervals over problems\n"
}
