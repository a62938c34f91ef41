//! What dependencies may be, as `deny.toml` says: their licences, how many versions of each, where they come
//! from. In the gate this takes a second; `cargo deny`, which reads the same file, takes minutes to build.
//! Advisories are compared with a checkout of RustSec's database (`cargo xtask deny FOLDER`), since the gate
//! reads no network.

use crate::stages::cargo;
use semver::{Version, VersionReq};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use toml::Table;

/// How the source of cargo's own registry begins; other registries say `sparse+` or another address.
const REGISTRY: &str = "registry+";

/// A dependency that is not of this workspace.
struct Package {
    name: String,
    version: String,
    licence: String,
    source: String,
}

/// Checks all dependencies; with the folder of an advisory database, those against it, too.
pub fn run(root: &Path, advisories: Option<&Path>) -> Result<(), String> {
    let file = root.join("deny.toml");
    let text = std::fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    let rules: Table = text.parse().map_err(|e| format!("{}: {e}", file.display()))?;
    let packages = packages(root)?;
    let mut faults = licences(&packages, &strings(&rules, "licenses", "allow"));
    faults.extend(versions(&packages, &marked(&rules, "bans", "skip", "crate")));
    faults.extend(sources(&packages));
    let mut checked = "licences, versions and sources".to_string();
    if let Some(folder) = advisories {
        let known = marked(&rules, "advisories", "ignore", "id");
        let (read, found) = advised(&packages, folder, &known)?;
        faults.extend(found);
        checked.push_str(&format!(", {read} advisories"));
    }
    if faults.is_empty() {
        println!("{} dependencies: {checked} as deny.toml has them", packages.len());
        return Ok(());
    }
    Err(format!("not as deny.toml has them:\n  {}", faults.join("\n  ")))
}

fn packages(root: &Path) -> Result<Vec<Package>, String> {
    let output = cargo(root)
        .args(["metadata", "--format-version", "1", "--locked"])
        .output()
        .map_err(|e| format!("cargo does not start: {e}"))?;
    if !output.status.success() {
        return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let metadata: Value =
        serde_json::from_slice(&output.stdout).map_err(|e| format!("cargo metadata: {e}"))?;
    let string = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let others = metadata["packages"].as_array().into_iter().flatten().filter(|p| !p["source"].is_null());
    let package = |p: &Value| Package {
        name: string(&p["name"]),
        version: string(&p["version"]),
        licence: string(&p["license"]),
        source: string(&p["source"]),
    };
    Ok(others.map(package).collect())
}

fn strings(rules: &Table, section: &str, key: &str) -> BTreeSet<String> {
    let list = rules.get(section).and_then(|section| section.get(key)?.as_array());
    list.into_iter().flatten().filter_map(|value| Some(value.as_str()?.to_string())).collect()
}

/// The names in a list of tables that give a reason each.
fn marked(rules: &Table, section: &str, list: &str, key: &str) -> BTreeSet<String> {
    let list = rules.get(section).and_then(|section| section.get(list)?.as_array());
    let name = |table: &toml::Value| {
        table.get("reason")?.as_str()?;
        Some(table.get(key)?.as_str()?.to_string())
    };
    list.into_iter().flatten().filter_map(name).collect()
}

fn licences(packages: &[Package], allowed: &BTreeSet<String>) -> Vec<String> {
    let refused = packages.iter().filter(|package| !is_allowed(&package.licence, allowed));
    refused.map(|p| format!("{} {}: licence '{}' is not allowed", p.name, p.version, p.licence)).collect()
}

/// Whether an SPDX expression holds with the allowed licences. `/` is how `OR` was once written.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let holds = any(&mut words, allowed);
    words.next().is_none() && holds
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any(words: &mut Words, allowed: &BTreeSet<String>) -> bool {
    let mut holds = all(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        holds |= all(words, allowed);
    }
    holds
}

fn all(words: &mut Words, allowed: &BTreeSet<String>) -> bool {
    let mut holds = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        holds &= one(words, allowed);
    }
    holds
}

fn one(words: &mut Words, allowed: &BTreeSet<String>) -> bool {
    if words.next_if_eq(&"(").is_some() {
        let holds = any(words, allowed);
        return words.next_if_eq(&")").is_some() && holds;
    }
    let Some(name) = words.next() else { return false };
    let mut name = name.to_string();
    if words.next_if_eq(&"WITH").is_some() {
        name = format!("{name} WITH {}", words.next().unwrap_or_default());
    }
    allowed.contains(&name)
}

/// More versions of a crate than one, beside those that are skipped; and what is skipped in vain.
fn versions(packages: &[Package], skipped: &BTreeSet<String>) -> Vec<String> {
    let mut all: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in packages {
        all.entry(&package.name).or_default().push(&package.version);
    }
    let mut faults = Vec::new();
    for (name, versions) in &all {
        let counted = versions.iter().filter(|version| !skipped.contains(&format!("{name}@{version}")));
        if counted.count() > 1 {
            faults.push(format!("{name}: versions {}, expected one", versions.join(" and ")));
        }
    }
    let is_double = |entry: &&String| {
        entry.split_once('@').is_some_and(|(name, version)| {
            all.get(name).is_some_and(|versions| versions.len() > 1 && versions.contains(&version))
        })
    };
    let vain = skipped.iter().filter(|entry| !is_double(entry));
    faults.extend(vain.map(|entry| format!("{entry} is skipped and not there twice")));
    faults
}

fn sources(packages: &[Package]) -> Vec<String> {
    let first = packages.iter().map(|package| &package.source).find(|source| source.starts_with(REGISTRY));
    let other = packages.iter().filter(|package| Some(&package.source) != first);
    other.map(|p| format!("{} {}: from {}, expected cargo's registry", p.name, p.version, p.source)).collect()
}

/// The number of advisories about our dependencies, and those that hold and are not known.
fn advised(
    packages: &[Package],
    folder: &Path,
    known: &BTreeSet<String>,
) -> Result<(usize, Vec<String>), String> {
    let (mut read, mut faults, mut open) = (0, Vec::new(), known.clone());
    let names: BTreeSet<&str> = packages.iter().map(|package| package.name.as_str()).collect();
    if !folder.join("crates").is_dir() {
        return Err(format!("{}: expected a checkout of the advisory database", folder.display()));
    }
    for name in names {
        let about = folder.join("crates").join(name);
        let Ok(entries) = std::fs::read_dir(&about) else { continue };
        let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        files.sort();
        for file in files {
            let fault = |what: String| format!("{}: {what}", file.display());
            let text = std::fs::read_to_string(&file).map_err(|e| fault(e.to_string()))?;
            let advisory = Advisory::parse(&text).map_err(fault)?;
            read += 1;
            let own = packages.iter().filter(|package| package.name == name);
            for package in own.filter(|package| advisory.holds_for(&package.version)) {
                open.remove(&advisory.id);
                if !known.contains(&advisory.id) {
                    faults.push(format!("{name} {}: {}", package.version, advisory.id));
                }
            }
        }
    }
    faults.extend(open.iter().map(|id| format!("{id} is ignored and does not hold")));
    Ok((read, faults))
}

/// What the database says of a crate.
struct Advisory {
    id: String,
    /// Versions that it is not about.
    safe: Vec<VersionReq>,
}

impl Advisory {
    /// Reads the block of TOML at the beginning of an advisory.
    fn parse(text: &str) -> Result<Advisory, String> {
        let block = text.split("```").nth(1).and_then(|block| block.strip_prefix("toml"));
        let table: Table = block.ok_or("no block of TOML")?.parse().map_err(|e| format!("{e}"))?;
        let advisory = table.get("advisory").ok_or("no [advisory]")?;
        let id = advisory.get("id").and_then(toml::Value::as_str).ok_or("no id")?.to_string();
        if advisory.get("withdrawn").is_some() {
            return Ok(Advisory { id, safe: vec![VersionReq::STAR] });
        }
        let list = |key: &str| strings(&table, "versions", key);
        let safe = list("patched").into_iter().chain(list("unaffected"));
        let safe = safe.map(|text| VersionReq::parse(&text).map_err(|e| format!("'{text}': {e}")));
        Ok(Advisory { id, safe: safe.collect::<Result<_, _>>()? })
    }

    fn holds_for(&self, version: &str) -> bool {
        Version::parse(version).is_ok_and(|version| !self.safe.iter().any(|safe| safe.matches(&version)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(words: &[&str]) -> BTreeSet<String> {
        words.iter().map(|word| word.to_string()).collect()
    }

    fn package(name: &str, version: &str, source: &str) -> Package {
        let [name, version, source] = [name, version, source].map(String::from);
        Package { name, version, licence: "MIT".to_string(), source }
    }

    #[test]
    fn licences_are_expressions() {
        let allowed = set(&["MIT", "Apache-2.0 WITH LLVM-exception", "Unicode-3.0"]);
        for good in
            ["MIT", "GPL-3.0 OR MIT", "MIT/GPL-3.0", "(GPL-3.0 OR MIT) AND Unicode-3.0", "MIT AND MIT"]
        {
            assert!(is_allowed(good, &allowed), "{good}");
        }
        assert!(is_allowed("Apache-2.0 WITH LLVM-exception OR GPL-2.0", &allowed));
        for bad in ["", "GPL-3.0", "MIT AND GPL-3.0", "Apache-2.0", "(MIT", "MIT)", "MIT MIT", "GPL-3.0 OR"] {
            assert!(!is_allowed(bad, &allowed), "{bad}");
        }
        let mut foreign = package("x", "1.0.0", "registry+a");
        foreign.licence = "GPL-3.0".to_string();
        assert_eq!(licences(&[foreign], &allowed), ["x 1.0.0: licence 'GPL-3.0' is not allowed"]);
    }

    #[test]
    fn a_second_version_and_a_foreign_source_are_named() {
        let two = [package("a", "1.0.0", "registry+r"), package("a", "2.0.0", "git+g")];
        assert_eq!(versions(&two, &set(&[])), ["a: versions 1.0.0 and 2.0.0, expected one"]);
        assert!(versions(&two, &set(&["a@1.0.0"])).is_empty());
        let vain = versions(&two[..1], &set(&["a@1.0.0"]));
        assert_eq!(vain, ["a@1.0.0 is skipped and not there twice"]);
        assert_eq!(sources(&two), ["a 2.0.0: from git+g, expected cargo's registry"]);
    }

    #[test]
    fn advisories_hold_for_some_versions() {
        let text = "```toml\n[advisory]\nid = \"R-1\"\n[versions]\npatched = [\">= 1.2.0\", \"^0.9.4\"]\n\
                    unaffected = [\"< 0.5\"]\n```\n# Title";
        let advisory = Advisory::parse(text).expect("an advisory");
        let holds = ["0.4.0", "0.9.3", "0.9.4", "1.1.9", "1.2.0"].map(|version| advisory.holds_for(version));
        assert_eq!((advisory.id.as_str(), holds), ("R-1", [false, true, false, true, false]));
        let withdrawn = text.replace("[versions]", "withdrawn = \"2020-01-01\"\n[versions]");
        assert!(!Advisory::parse(&withdrawn).expect("an advisory").holds_for("1.0.0"));
        assert!(Advisory::parse("# Title").is_err());
    }

    #[test]
    fn an_advisory_of_ours_is_a_fault_unless_it_is_known() {
        let folder = std::env::temp_dir().join(format!("qurl-xtask-advisories-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("crates/a")).expect("made");
        let text = "```toml\n[advisory]\nid = \"R-1\"\n[versions]\npatched = [\">= 2.0.0\"]\n```\n";
        std::fs::write(folder.join("crates/a/R-1.md"), text).expect("written");
        let own = [package("a", "1.0.0", "registry+r"), package("b", "1.0.0", "registry+r")];
        assert_eq!(advised(&own, &folder, &set(&[])), Ok((1, vec!["a 1.0.0: R-1".to_string()])));
        assert_eq!(advised(&own, &folder, &set(&["R-1"])), Ok((1, vec![])));
        let vain = Ok((0, vec!["R-1 is ignored and does not hold".to_string()]));
        assert_eq!(advised(&own[1..], &folder, &set(&["R-1"])), vain);
        std::fs::remove_dir_all(&folder).expect("removed");
        assert!(advised(&own, &folder, &set(&[])).is_err());
    }

    #[test]
    fn the_dependencies_are_as_the_file_has_them() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
        assert_eq!(run(root, None), Ok(()));
    }
}
