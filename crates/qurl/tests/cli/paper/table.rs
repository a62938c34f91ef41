//! docs/paper.md against the recipes: every `key = value` in a column "ours" is what the recipe of its
//! section says, every key that a recipe sets has its place there, and every `--set` is one that the recipe
//! takes.

use qurl_train::recipe::Recipe;
use std::collections::BTreeSet;
use std::path::Path;
use toml::Value;

/// What one section of the document says about a recipe.
struct Section {
    recipe: String,
    /// Code spans of the column "ours".
    spans: Vec<String>,
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// The texts between backticks.
fn code_spans(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

fn sections() -> Vec<Section> {
    let text = std::fs::read_to_string(root().join("docs/paper.md")).expect("docs/paper.md");
    let mut sections: Vec<Section> = Vec::new();
    let mut ours = None;
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            let recipe = code_spans(heading).find_map(|s| s.strip_prefix("recipes/")?.strip_suffix(".toml"));
            sections.push(Section { recipe: recipe.unwrap_or_default().to_string(), spans: Vec::new() });
        }
        if !line.starts_with('|') {
            ours = None;
            continue;
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let Some(column) = ours else {
            ours = cells.iter().position(|cell| *cell == "ours");
            assert!(ours.is_some(), "a table without a column \"ours\": {line}");
            continue;
        };
        if let (Some(cell), Some(section)) = (cells.get(column), sections.last_mut()) {
            section.spans.extend(code_spans(cell).map(str::to_string));
        }
    }
    sections.retain(|s| !s.recipe.is_empty());
    sections
}

/// All values of a table by their paths, as in `run.stages[0].n`.
fn leaves(path: &str, value: &Value, into: &mut Vec<(String, Value)>) {
    match value {
        Value::Table(table) => {
            for (key, value) in table {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                leaves(&path, value, into);
            }
        }
        Value::Array(items) if items.iter().all(Value::is_table) => {
            for (i, item) in items.iter().enumerate() {
                leaves(&format!("{path}[{i}]"), item, into);
            }
        }
        value => into.push((path.to_string(), value.clone())),
    }
}

fn number(value: &Value) -> Option<f64> {
    value.as_float().or(value.as_integer().map(|i| i as f64))
}

fn same(a: &Value, b: &Value) -> bool {
    match (number(a), number(b)) {
        (Some(a), Some(b)) => (a - b).abs() <= 1e-6 * a.abs(), // some keys are f32
        _ => a == b,
    }
}

#[test]
fn the_document_says_what_the_recipes_say() {
    let sections = sections();
    let mut stated: BTreeSet<(String, String)> = BTreeSet::new();
    for Section { recipe, spans } in &sections {
        let path = root().join(format!("recipes/{recipe}.toml"));
        let resolved = Recipe::read(&path, &[]).expect("a recipe").to_toml();
        let mut found = Vec::new();
        leaves("", &Value::Table(toml::from_str(&resolved).expect("TOML")), &mut found);
        // Paths are absolute there: the document has them as the recipe does, relative to it.
        let mut written = Vec::new();
        let text = std::fs::read_to_string(&path).expect("a recipe");
        leaves("", &Value::Table(toml::from_str(&text).expect("TOML")), &mut written);
        let is_path = |key: &str| ["model.path", "task.files", "task.test_files"].contains(&key);
        found.retain(|(key, _)| !is_path(key));
        found.extend(written.into_iter().filter(|(key, _)| is_path(key)));
        for span in spans {
            if let Some(overrides) = span.strip_prefix("--set ") {
                let overrides = overrides.trim_matches('\'').to_string();
                Recipe::read(&path, &[overrides]).unwrap_or_else(|e| panic!("{recipe}: `{span}`: {e}"));
            } else if let Some((key, value)) = span.split_once(" = ") {
                let table: toml::Table = toml::from_str(&format!("value = {value}"))
                    .unwrap_or_else(|e| panic!("{recipe}: `{span}`: {e}"));
                let actual = found.iter().find(|(path, _)| path == key).map(|(_, value)| value);
                assert!(
                    actual.is_some_and(|a| same(a, &table["value"])),
                    "{recipe}: `{span}`, but it is {actual:?}"
                );
                stated.insert((recipe.clone(), key.to_string()));
            }
        }
    }
    // Nothing that a recipe of the paper sets is left out.
    for recipe in ["gsm8k-ppo", "aime-dapo", "deepscaler-grpo"] {
        let text = std::fs::read_to_string(root().join(format!("recipes/{recipe}.toml"))).expect("a recipe");
        let mut set = Vec::new();
        leaves("", &Value::Table(toml::from_str(&text).expect("TOML")), &mut set);
        let missing: Vec<&String> = set
            .iter()
            .map(|(key, _)| key)
            .filter(|key| !stated.contains(&(recipe.into(), key.to_string())))
            .collect();
        assert!(missing.is_empty(), "docs/paper.md says nothing of {missing:?} in {recipe}");
    }
}
