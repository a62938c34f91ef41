//! What runs are called in a page, and which of them are the same run with different seeds.

use super::RunData;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Names runs by their directories, with as much of the path as tells them apart. Runs whose recipes differ
/// in `trainer.seed` and nowhere else become a group with one name, which a page shows as mean and band.
pub fn name_runs(runs: &mut [RunData]) {
    let mut families: BTreeMap<Vec<(String, String)>, Vec<usize>> = BTreeMap::new();
    for (index, run) in runs.iter().enumerate() {
        // A run without a seed, which may not have begun, is like no other.
        let seedless = run.setting("trainer.seed").is_none().then(|| (String::new(), index.to_string()));
        let settings = run.settings.iter().filter(|(key, _)| key != "trainer.seed").cloned();
        families.entry(settings.chain(seedless).collect()).or_default().push(index);
    }
    let is_group = |members: &Vec<usize>| {
        let seeds: BTreeSet<Option<&str>> =
            members.iter().map(|&i| runs[i].setting("trainer.seed")).collect();
        members.len() > 1 && seeds.len() == members.len()
    };
    let (groups, apart): (Vec<Vec<usize>>, Vec<Vec<usize>>) = families.into_values().partition(is_group);
    // One name for each group and each run of its own; a group is called like its first run.
    let mut named: Vec<Vec<usize>> = groups;
    named.extend(apart.into_iter().flatten().map(|index| vec![index]));
    let names = names_apart(named.iter().map(|members| &runs[members[0]].dir));
    for (members, name) in named.iter().zip(names) {
        for &index in members {
            let group = (members.len() > 1).then(|| name.clone());
            let seed = runs[index].setting("trainer.seed").unwrap_or_default();
            runs[index].label = group.as_ref().map_or(name.clone(), |group| format!("{group}, seed {seed}"));
            runs[index].group = group;
        }
    }
}

/// The last part of each path, and more parts where names would be equal.
fn names_apart<'a>(dirs: impl Iterator<Item = &'a PathBuf>) -> Vec<String> {
    let whole: Vec<PathBuf> = dirs.map(|dir| dir.canonicalize().unwrap_or_else(|_| dir.clone())).collect();
    let name = |dir: &Path, parts: usize| {
        let all: Vec<String> =
            dir.components().map(|c| c.as_os_str().to_string_lossy().into_owned()).collect();
        match all[all.len().saturating_sub(parts)..].join("/") {
            name if name.is_empty() => "run".to_string(),
            name => name,
        }
    };
    let mut names: Vec<String> = whole.iter().map(|dir| name(dir, 1)).collect();
    for parts in 2..=8 {
        let before = names.clone();
        for (found, dir) in names.iter_mut().zip(&whole) {
            if before.iter().filter(|other| *other == found).count() > 1 {
                *found = name(dir, parts);
            }
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(settings: &[(&str, &str)]) -> RunData {
        let settings = settings.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        RunData { settings, ..RunData::default() }
    }

    fn named(runs: &mut [RunData], dirs: &[&str]) -> Vec<(String, Option<String>)> {
        runs.iter_mut().zip(dirs).for_each(|(run, dir)| run.dir = dir.into());
        name_runs(runs);
        runs.iter().map(|run| (run.label.clone(), run.group.clone())).collect()
    }

    #[test]
    fn equal_names_are_told_apart() {
        let mut runs = vec![run(&[("a", "1")]), run(&[("a", "2")]), run(&[("a", "3")])];
        let labels = named(&mut runs, &["a/x/run", "b/x/run", "c/other"]);
        assert_eq!(labels, ["a/x/run", "b/x/run", "other"].map(|name| (name.to_string(), None)));
    }

    #[test]
    fn seeds_of_one_recipe_are_a_group() {
        let of = |lr, seed| run(&[("actor.lr", lr), ("trainer.seed", seed)]);
        let mut runs = vec![of("1", "1"), of("2", "1"), of("1", "2"), of("2", "2"), of("3", "1")];
        let labels =
            named(&mut runs, &["c/seed-1/full", "c/seed-1/acr", "c/seed-2/full", "c/seed-2/acr", "x"]);
        let group = |name: &str, seed: u64| (format!("{name}, seed {seed}"), Some(name.to_string()));
        let expected = [group("full", 1), group("acr", 1), group("full", 2), group("acr", 2)];
        assert_eq!(labels[..4], expected);
        assert_eq!(labels[4], ("x".to_string(), None), "one seed is no group");
        // The same recipe with the same seed is the same run twice: there is nothing to average.
        let labels = named(&mut [of("1", "1"), of("1", "1")], &["a", "b"]);
        assert_eq!(labels, ["a", "b"].map(|name| (name.to_string(), None)));
    }
}
