//! The licences of everything that is linked into the binary, for the tarball: cargo names the packages,
//! their folders hold the texts. A text that many packages share is written once.

use crate::stages::cargo;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// How names of files with licences begin, in capitals.
const NAMES: &[&str] = &["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];

/// A package of somebody else's.
struct Package {
    title: String,
    expression: String,
    texts: Vec<String>,
}

/// The text of the file: each package with its licence, then each text with the packages that it is of.
pub fn of_dependencies(root: &Path, platform: &str) -> Result<String, String> {
    let output = cargo(root)
        .args(["metadata", "--format-version", "1", "--locked", "--filter-platform", platform])
        .output()
        .map_err(|e| format!("cargo does not start: {e}"))?;
    if !output.status.success() {
        return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let metadata: Value =
        serde_json::from_slice(&output.stdout).map_err(|e| format!("cargo metadata: {e}"))?;
    let packages =
        linked(&metadata).iter().map(|&package| read(package)).collect::<Result<Vec<Package>, String>>()?;
    Ok(page(&packages))
}

/// The packages that the program `qurl` depends on and that are not of this workspace, by name.
fn linked(metadata: &Value) -> Vec<&Value> {
    let list = |value: &'_ Value| value.as_array().cloned().unwrap_or_default();
    let edges: BTreeMap<String, Vec<String>> = list(&metadata["resolve"]["nodes"])
        .iter()
        .map(|node| {
            let normal =
                |dependency: &&Value| list(&dependency["dep_kinds"]).iter().any(|k| k["kind"].is_null());
            let dependencies = list(&node["deps"]);
            let ids = dependencies.iter().filter(normal).map(|dependency| string(&dependency["pkg"]));
            (string(&node["id"]), ids.collect())
        })
        .collect();
    let Some(packages) = metadata["packages"].as_array() else { return Vec::new() };
    let start = packages.iter().filter(|p| p["name"] == "qurl").map(|p| string(&p["id"]));
    let mut open: Vec<String> = start.collect();
    let mut reached = BTreeSet::new();
    while let Some(id) = open.pop() {
        if reached.insert(id.clone()) {
            open.extend(edges.get(&id).into_iter().flatten().cloned());
        }
    }
    let ours = |package: &Value| package["source"].is_null();
    packages.iter().filter(|p| !ours(p) && reached.contains(&string(&p["id"]))).collect()
}

fn string(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_string()
}

fn read(package: &Value) -> Result<Package, String> {
    let manifest = string(&package["manifest_path"]);
    let folder = Path::new(&manifest).parent().unwrap_or(Path::new("."));
    let listed = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut files: Vec<_> = listed
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_file() && is_licence(&path.file_name().unwrap_or_default().to_string_lossy()))
        .collect();
    files.sort();
    let text = |path: &std::path::PathBuf| {
        std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
    };
    Ok(Package {
        title: format!("{} {}", string(&package["name"]), string(&package["version"])),
        expression: package["license"].as_str().unwrap_or("see its text").to_string(),
        texts: files.iter().map(text).collect::<Result<_, _>>()?,
    })
}

fn is_licence(file: &str) -> bool {
    let name = file.to_uppercase();
    NAMES.iter().any(|start| name.starts_with(start)) && !name.ends_with(".RS")
}

fn page(packages: &[Package]) -> String {
    let mut page = String::from(
        "qurl is linked with these packages and with Rust's standard library (MIT OR Apache-2.0).\n\n",
    );
    let mut texts: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in packages {
        page.push_str(&format!("{}: {}\n", package.title, package.expression));
        for text in &package.texts {
            texts.entry(text.trim()).or_default().push(&package.title);
        }
    }
    let mut texts: Vec<(&str, Vec<&str>)> = texts.into_iter().collect();
    texts.sort_by(|a, b| a.1.cmp(&b.1));
    for (text, of) in texts {
        page.push_str(&format!("\n{}\n{}\n\n{text}\n", "=".repeat(80), of.join(", ")));
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_linked_is_named_with_its_text_and_nothing_else() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
        let page = of_dependencies(root, "x86_64-unknown-linux-gnu").expect("licences");
        let (list, texts) = page.split_once("=====").expect("texts");
        for name in ["anyhow ", "clap ", "rayon ", "tokenizers "] {
            assert!(list.lines().any(|line| line.starts_with(name) && line.contains(": ")), "{name}: {list}");
        }
        assert!(!list.contains("qurl-model") && !list.contains("windows-sys"), "{list}");
        assert!(texts.contains("Permission is hereby granted") && texts.contains("Apache License"));
    }

    #[test]
    fn a_shared_text_is_written_once() {
        let package = |title: &str| Package {
            title: title.to_string(),
            expression: "MIT".to_string(),
            texts: vec!["Do as you like.\n".to_string()],
        };
        let page = page(&[package("a 1"), package("b 2")]);
        assert_eq!(page.matches("Do as you like.").count(), 1);
        assert!(page.contains("\na 1, b 2\n") && page.contains("a 1: MIT\nb 2: MIT\n"), "{page}");
        assert!(is_licence("LICENSE-MIT") && is_licence("license.txt") && !is_licence("license.rs"));
    }
}
