//! The problems of an evaluation: files and generated tasks, each a set with a name of its own.
//!
//! A file of several data sets (rows with different `data_source`) counts as several sets.

use crate::input::{OrBad, bad};
use qurl_tasks::data::{self, DataError, Row, Taken};
use qurl_tasks::grader::ExtractRule;
use qurl_tasks::rng::{mix, mix_text};
use qurl_tasks::task::{Problem, Split, Task};
use qurl_tasks::tasks::{Kind, Synthetic};
use qurl_train::evaluate::EvalSet;
use qurl_train::recipe::DatasetSource;
use qurl_train::solve::draw_problems;
use std::path::{Path, PathBuf};

/// Generated problems where no limit is given.
const GENERATED: usize = 200;

/// Endings of data files that are no part of a set's name.
const ENDINGS: [&str; 4] = [".gz", ".jsonl", ".json", ".parquet"];

/// One set with its judge.
struct Source {
    name: String,
    task: Box<dyn Task>,
    problems: Vec<Problem>,
}

/// All sets of an evaluation.
pub struct Sources {
    sources: Vec<Source>,
    /// Name of the prompt template of data sets.
    pub template: &'static str,
    /// Name of the grading policy of data sets.
    pub policy: &'static str,
    /// What counts as their answer, where a recipe says so.
    pub extract: Option<ExtractRule>,
}

impl Sources {
    /// Reads files and generates problems.
    pub fn open(
        files: &[PathBuf],
        tasks: &[String],
        rules: &DatasetSource,
        limit: Option<usize>,
        seed: u64,
    ) -> anyhow::Result<Sources> {
        if files.is_empty() && tasks.is_empty() {
            return Err(bad(
                "nothing to evaluate on: give --data FILE.., --task KIND:LEVEL or a --recipe with test files",
            ));
        }
        let mut sources = Vec::new();
        for file in files {
            for (name, rows) in by_data_source(file, limit.unwrap_or(usize::MAX)).or_bad()? {
                let task = rules.over(&name, rows).or_bad()?;
                let problems = task.rows().iter().map(|row| task.problem(row)).collect();
                sources.push(Source { name, task: Box::new(task), problems });
            }
        }
        for given in tasks {
            let task = synthetic(given)?;
            let count = limit.unwrap_or(GENERATED) as u64;
            let problems = draw_problems(&task, Split::Test, seed, 0, count).or_bad()?;
            sources.push(Source { name: given.clone(), task: Box::new(task), problems });
        }
        for (i, source) in sources.iter().enumerate() {
            if sources[..i].iter().any(|other| other.name == source.name) {
                let name = &source.name;
                return Err(bad(format!(
                    "two data sets have the name {name:?}; is a file or task given twice?"
                )));
            }
        }
        let (template, policy) = (rules.template().or_bad()?.name, rules.policy().or_bad()?.name());
        Ok(Sources { sources, template, policy, extract: rules.extract.clone() })
    }

    /// A number that tells these problems from others.
    pub fn checksum(&self) -> u64 {
        let all = self.sources.iter().flat_map(|s| s.problems.iter().map(|p| (&s.name, p)));
        let words =
            all.flat_map(|(set, p)| [mix_text(set), mix_text(&p.prompt.plain()), mix_text(&p.answer)]);
        mix(&words.collect::<Vec<_>>())
    }

    /// What is evaluated.
    pub fn sets(&self) -> Vec<EvalSet<'_>> {
        let set = |s| {
            let Source { name, task, problems }: &Source = s;
            EvalSet { name: name.clone(), task: &**task, problems: problems.clone() }
        };
        self.sources.iter().map(set).collect()
    }
}

/// `addition:3`.
fn synthetic(given: &str) -> anyhow::Result<Synthetic> {
    let parts = given.split_once(':').and_then(|(kind, level)| Some((kind, level.parse().ok()?)));
    let Some((kind, level)) = parts else {
        return Err(bad(format!("--task {given}: expected a kind and a level, as in addition:3")));
    };
    let named = |e| bad(format!("--task {given}: {e}"));
    Synthetic::new(kind.parse::<Kind>().map_err(named)?, level).map_err(named)
}

/// The first `limit` rows of a file, of each `data_source` where there are several, in the order of the file.
/// Without data sources no more is read than that.
fn by_data_source(file: &Path, limit: usize) -> Result<Vec<(String, Vec<Row>)>, DataError> {
    let name = set_name(file);
    let mut sets: Vec<(Option<String>, Vec<Row>)> = Vec::new();
    data::each_row(file, |row| {
        let source = row.extra.get("data_source").and_then(|s| s.as_str()).map(str::to_string);
        match sets.iter_mut().find(|(other, _)| *other == source) {
            Some((_, rows)) if rows.len() >= limit => return Taken::Left,
            Some((_, rows)) => rows.push(row),
            None => sets.push((source, vec![row])),
        }
        match &sets[..] {
            [(None, rows)] if rows.len() >= limit => Taken::Last,
            _ => Taken::Kept,
        }
    })?;
    let several = sets.len() > 1;
    let named = |(source, rows): (Option<String>, Vec<Row>)| match source {
        Some(source) if several => (format!("{name}:{source}"), rows),
        _ => (name.clone(), rows),
    };
    Ok(sets.into_iter().map(named).collect())
}

/// The file's name without its endings, after that of its directory: most sets are called `test`.
fn set_name(file: &Path) -> String {
    let mut stem =
        file.file_name().map_or_else(|| file.display().to_string(), |n| n.to_string_lossy().into_owned());
    for ending in ENDINGS {
        if let Some(cut) = stem.strip_suffix(ending).filter(|cut| !cut.is_empty()) {
            stem = cut.to_string();
        }
    }
    match file.parent().and_then(Path::file_name) {
        Some(directory) => format!("{}/{stem}", directory.to_string_lossy()),
        None => stem,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_sets() {
        for (file, name) in [
            ("data/gsm8k/test.jsonl.gz", "gsm8k/test"),
            ("aime24.parquet", "aime24"),
            ("../x/math.v2.jsonl", "x/math.v2"),
            (".jsonl", ".jsonl"),
        ] {
            assert_eq!(set_name(Path::new(file)), name);
        }
    }
}
