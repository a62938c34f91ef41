//! Which runs a directory on the command line stands for: one run, or all runs of a comparison.

use crate::input::bad;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Files by which the directory of a run is known: the recipe is there from the beginning.
const OF_A_RUN: [&str; 2] = ["recipe.toml", "metrics.jsonl"];
/// What the directory of a comparison has from the beginning.
const OF_A_COMPARISON: &str = "plan.json";

/// What a directory is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A run.
    Run,
    /// A comparison: its runs that have begun, seed by seed, in the order of its methods.
    Comparison(Vec<PathBuf>),
    /// Not there, or empty: a run may begin here.
    Free,
    /// Something else; what it holds.
    Other(String),
}

impl Place {
    /// Looks at a directory; an error where that cannot be, or where it is a file.
    pub fn of(dir: &Path) -> anyhow::Result<Place> {
        let name = dir.display();
        match std::fs::metadata(dir) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Place::Free),
            Err(e) => return Err(bad(format!("{name}: {e}"))),
            Ok(facts) if !facts.is_dir() => {
                return Err(bad(format!("{name}: is a file, expected the directory of a run")));
            }
            Ok(_) => {}
        }
        if is_run(dir) {
            return Ok(Place::Run);
        }
        let entries = names(dir).map_err(|e| bad(format!("{name}: cannot be listed: {e}")))?;
        let runs = runs_of_comparison(dir, &entries);
        if !runs.is_empty() || dir.join(OF_A_COMPARISON).is_file() {
            return Ok(Place::Comparison(runs));
        }
        Ok(entries.into_iter().find(|name| name != "run.lock").map_or(Place::Free, Place::Other))
    }

    /// The directories of the runs, or what is wrong with this place.
    pub fn runs(self, dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
        let name = dir.display();
        match self {
            Place::Run => Ok(vec![dir.to_path_buf()]),
            Place::Comparison(runs) if runs.is_empty() => {
                Err(bad(format!("{name}: no run of this comparison has begun")))
            }
            Place::Comparison(runs) => Ok(runs),
            Place::Free if dir.exists() => Err(bad(format!("{name}: is empty: no run has begun here"))),
            Place::Free => Err(bad(format!("{name}: there is no such directory"))),
            Place::Other(found) => Err(bad(format!(
                "{name}: is no run: it holds {found}, but neither recipe.toml nor metrics.jsonl; \
                 expected a directory that `qurl train` or `qurl compare` made"
            ))),
        }
    }
}

fn is_run(dir: &Path) -> bool {
    OF_A_RUN.iter().any(|file| dir.join(file).is_file())
}

fn names(dir: &Path) -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// The directories `seed-N/METHOD` that are runs.
fn runs_of_comparison(dir: &Path, entries: &[String]) -> Vec<PathBuf> {
    let plan = std::fs::read_to_string(dir.join(OF_A_COMPARISON)).unwrap_or_default();
    let plan: Value = serde_json::from_str(&plan).unwrap_or_default();
    let planned: Vec<&str> =
        plan["methods"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut seeds: Vec<(u64, &String)> =
        entries.iter().filter_map(|name| Some((name.strip_prefix("seed-")?.parse().ok()?, name))).collect();
    seeds.sort_unstable();
    let mut runs = Vec::new();
    for (_, seed) in seeds {
        let mut methods = names(&dir.join(seed)).unwrap_or_default();
        let rank = |name: &String| planned.iter().position(|p| p == name).unwrap_or(planned.len());
        // Stable: those that are not planned stay in the order of their names.
        methods.sort_by_key(|name| rank(name));
        runs.extend(methods.iter().map(|method| dir.join(seed).join(method)).filter(|run| is_run(run)));
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn touch(path: PathBuf) {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        std::fs::write(path, "").expect("written");
    }

    #[test]
    fn runs_comparisons_and_what_is_neither() {
        let dir = Scratch::new("places");
        assert_eq!(Place::of(&dir).expect("looked"), Place::Free);
        assert_eq!(Place::of(&dir.join("absent")).expect("looked"), Place::Free);
        touch(dir.join("run.lock"));
        assert_eq!(Place::of(&dir).expect("looked"), Place::Free, "a lock comes before the recipe");
        touch(dir.join("other/notes.txt"));
        let other = Place::of(&dir.join("other")).expect("looked");
        assert_eq!(other, Place::Other("notes.txt".to_string()));
        let message = other.runs(&dir.join("other")).expect_err("no run").to_string();
        let expected = "other: is no run: it holds notes.txt, but neither recipe.toml nor metrics.jsonl; \
                        expected a directory that `qurl train` or `qurl compare` made";
        assert!(message.ends_with(expected), "{message}");
        touch(dir.join("run/recipe.toml"));
        assert_eq!(Place::of(&dir.join("run")).expect("looked"), Place::Run);
    }

    #[test]
    fn a_comparison_has_its_runs_by_seed_and_method() {
        let dir = Scratch::new("places-compare");
        for run in ["seed-2/full", "seed-10/tis", "seed-10/full", "seed-2/acr", "seed-2/tis"] {
            touch(dir.join(run).join("recipe.toml"));
        }
        touch(dir.join("seed-2/full.txt"));
        let runs = |dir: &Path| match Place::of(dir).expect("looked") {
            Place::Comparison(runs) => {
                runs.iter().map(|r| r.strip_prefix(dir).expect("inside").display().to_string()).collect()
            }
            other => panic!("{other:?}"),
        };
        let found: Vec<String> = runs(&dir);
        assert_eq!(found, ["seed-2/acr", "seed-2/full", "seed-2/tis", "seed-10/full", "seed-10/tis"]);
        std::fs::write(dir.join(OF_A_COMPARISON), "{\"methods\": [\"full\", \"tis\", \"acr\"]}")
            .expect("written");
        let found: Vec<String> = runs(&dir);
        assert_eq!(found[..3], ["seed-2/full", "seed-2/tis", "seed-2/acr"]);
        let empty = dir.join("empty");
        touch(empty.join(OF_A_COMPARISON));
        let message = Place::of(&empty).and_then(|p| p.runs(&empty)).expect_err("no runs").to_string();
        assert!(message.ends_with("no run of this comparison has begun"), "{message}");
    }
}
