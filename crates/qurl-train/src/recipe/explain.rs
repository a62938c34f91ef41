//! Why a recipe does not parse, in the words of recipes.
//!
//! The parser stops at its first error and speaks of the program's types, and inside a section of several
//! types it no longer knows which key it was at. So where it refuses a recipe, the recipe is held against the
//! schema, which gives every wrong key with its path at once.

use super::reference::{self, Key};
use super::source::Source;
use super::{ranges, schema};
use serde_json::Value as Schema;
use std::sync::LazyLock;
use toml::{Table, Value};

/// Made once: this takes longer than all else that is done with a recipe, and sections inside of sections
/// would make it again and again.
static SCHEMA: LazyLock<Schema> = LazyLock::new(schema::json_schema);
static KEYS: LazyLock<Vec<Key>> = LazyLock::new(reference::keys);

/// Something wrong, and the key that it is about.
struct Fault {
    /// For sorting: the line of the file.
    line: usize,
    message: String,
}

/// One message for everything that is wrong with a table, a line each; none where nothing is found.
pub(super) fn explain(table: &Table, source: &Source) -> Option<String> {
    let walk = Walk { source, keys: &KEYS };
    let mut faults = Vec::new();
    walk.section(table, &SCHEMA, "", &mut faults);
    faults.sort_by_key(|fault| fault.line);
    let messages: Vec<String> = faults.into_iter().map(|fault| fault.message).collect();
    (!messages.is_empty()).then(|| messages.join("\n"))
}

struct Walk<'a> {
    source: &'a Source,
    keys: &'static [Key],
}

impl Walk<'_> {
    fn section(&self, table: &Table, schema: &Schema, path: &str, faults: &mut Vec<Fault>) {
        let join = |name: &str| if path.is_empty() { name.to_string() } else { format!("{path}.{name}") };
        let variants = reference::variants(schema);
        let schema = match (variants.is_empty(), table.get("type")) {
            (true, _) => schema,
            (false, None) => {
                let names: Vec<&str> = variants.iter().map(|(name, _)| name.as_str()).collect();
                let what = format!("section [{path}] lacks the key `type`, one of {}", names.join(", "));
                return self.report(&self.source.place_of_section(path), path, &what, faults);
            }
            (false, Some(given)) => {
                let of_type = |(_, variant): &&(String, &Schema)| {
                    let tag = reference::choices(&variant["properties"]["type"]);
                    let name = variant["properties"]["type"]["const"].as_str();
                    given
                        .as_str()
                        .is_some_and(|g| name == Some(g) || tag.iter().any(|choice| choice.name == g))
                };
                match variants.iter().find(of_type) {
                    Some((_, variant)) => *variant,
                    None => {
                        let names: Vec<&str> = variants.iter().map(|(name, _)| name.as_str()).collect();
                        return self.wrong(
                            &join("type"),
                            given,
                            &one_of(&names, given.as_str().unwrap_or_default()),
                            faults,
                        );
                    }
                }
            }
        };
        let Some(properties) = schema["properties"].as_object() else { return };
        for (name, value) in table {
            match properties.get(name) {
                Some(inner) => self.value(value, inner, &join(name), faults),
                None => self.unknown(name, path, value, properties, &variants, faults),
            }
        }
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Schema::as_str) {
            if !table.contains_key(name) {
                let meaning = properties[name]["description"].as_str().unwrap_or_default();
                let what = match path.is_empty() {
                    true => format!("section [{name}] is missing: {}", lowered(meaning)),
                    false => format!("section [{path}] lacks the key `{name}`: {}", lowered(meaning)),
                };
                self.report(&self.source.place_of_section(path), path, &what, faults);
            }
        }
    }

    fn value(&self, value: &Value, schema: &Schema, path: &str, faults: &mut Vec<Fault>) {
        let (kind, inner) = reference::kind(schema);
        match (inner, value) {
            (Some(inner), Value::Table(table)) => self.section(table, inner, path, faults),
            (Some(inner), Value::Array(items)) if schema["type"] == "array" => {
                for (i, item) in items.iter().enumerate() {
                    let path = format!("{path}[{i}]");
                    match item {
                        Value::Table(table) => self.section(table, inner, &path, faults),
                        _ => self.wrong(&path, item, "a section", faults),
                    }
                }
            }
            (Some(_), _) => {
                let expected = if schema["type"] == "array" { "a list of sections" } else { "a section" };
                self.wrong(path, value, expected, faults);
            }
            // [task.source]: the schema does not go round in circles, but it is a section like the one around
            // it.
            (None, Value::Table(table)) if schema["type"] == "object" => {
                let task = &SCHEMA["properties"]["task"];
                self.section(table, task, path, faults);
            }
            (None, _) => self.leaf(value, schema, &kind, path, faults),
        }
    }

    fn leaf(&self, value: &Value, schema: &Schema, kind: &str, path: &str, faults: &mut Vec<Fault>) {
        let of_type = match (schema["type"].as_str(), value) {
            (Some("integer"), Value::Integer(number)) => *number >= 0,
            (Some("number"), Value::Integer(_) | Value::Float(_)) => true,
            (Some("boolean"), Value::Boolean(_)) => true,
            (Some("array"), Value::Array(items)) => {
                items.iter().all(|item| item.is_str() == (schema["items"]["type"] == "string"))
            }
            (Some("string") | None, Value::String(_)) => true,
            _ => false,
        };
        let choices = reference::choices(schema);
        if !choices.is_empty() {
            let accepted = accepted(schema);
            if !value.as_str().is_some_and(|given| accepted.iter().any(|choice| choice == given)) {
                let names: Vec<&str> = choices.iter().map(|choice| choice.name.as_str()).collect();
                self.wrong(path, value, &one_of(&names, value.as_str().unwrap_or_default()), faults);
            }
        } else if !of_type {
            let expected = match ranges::of(path) {
                Some(range) => range.to_string(),
                None => with_article(kind),
            };
            self.wrong(path, value, &expected, faults);
        }
    }

    fn unknown(
        &self,
        name: &str,
        path: &str,
        value: &Value,
        known: &serde_json::Map<String, Schema>,
        variants: &[(String, &Schema)],
        faults: &mut Vec<Fault>,
    ) {
        let key = if path.is_empty() { name.to_string() } else { format!("{path}.{name}") };
        let (what, there) = match value {
            Value::Table(_) => (format!("unknown section [{key}]"), format!("[{}", prefix(path))),
            _ => (format!("unknown key `{key}`"), format!("`{}", prefix(path))),
        };
        let close = if value.is_table() { ']' } else { '`' };
        let other_type = variants.iter().find(|(_, variant)| variant["properties"].get(name).is_some());
        let elsewhere = self.keys.iter().find(|key| key.name() == name && !key.is_section());
        let advice = if let Some(near) = nearest(name, known.keys().map(String::as_str)) {
            format!("did you mean {there}{near}{close}?")
        } else if let Some((other, _)) = other_type {
            format!("it belongs to `{path}.type` = \"{other}\"")
        } else if let Some(right) = elsewhere {
            format!("it belongs in [{}], as `{}`", right.section(), right.key)
        } else {
            let section = ranges::canonical(&format!("{path}.")).trim_end_matches('.').to_string();
            match section.is_empty() {
                true => "`qurl recipe` lists all sections and keys".to_string(),
                false => format!("`qurl recipe {section}` lists the keys of [{section}]"),
            }
        };
        self.report(&self.source.place(self.source.file(), &key), &key, &format!("{what}; {advice}"), faults);
    }

    /// A value that the key cannot have.
    fn wrong(&self, key: &str, found: &Value, expected: &str, faults: &mut Vec<Fault>) {
        let place = self.source.place(self.source.file(), key);
        self.report(&place, key, &format!("key `{key}` is {found}, expected {expected}"), faults);
    }

    fn report(&self, place: &str, key: &str, what: &str, faults: &mut Vec<Fault>) {
        faults.push(Fault { line: self.source.line(key), message: format!("{place}: {what}") });
    }
}

/// The names of choices, and the nearest to what was given.
pub(super) fn one_of(names: &[&str], given: &str) -> String {
    let list = names.join(", ");
    match nearest(given, names.iter().copied()) {
        Some(near) => format!("one of {list}; did you mean {near:?}?"),
        None => format!("one of {list}"),
    }
}

/// All texts that a value may be, other names included.
fn accepted(schema: &Schema) -> Vec<String> {
    let of = |schema: &Schema| {
        let names = schema["enum"].as_array().cloned().unwrap_or_default();
        names
            .into_iter()
            .chain(schema.get("const").cloned())
            .filter_map(|name| Some(name.as_str()?.to_string()))
    };
    let inner = schema["oneOf"].as_array().map_or(&[][..], Vec::as_slice);
    of(schema).chain(inner.iter().flat_map(of)).collect()
}

fn prefix(path: &str) -> String {
    if path.is_empty() { String::new() } else { format!("{path}.") }
}

fn with_article(kind: &str) -> String {
    match kind {
        "true or false" => kind.to_string(),
        kind => format!("a {kind}"),
    }
}

/// A sentence as the rest of another one.
fn lowered(text: &str) -> String {
    let text = text.split(['.', ';']).next().unwrap_or_default();
    let mut letters = text.chars();
    match letters.next() {
        Some(first) if letters.clone().next().is_none_or(|second| !second.is_uppercase()) => {
            first.to_lowercase().chain(letters).collect()
        }
        _ => text.to_string(),
    }
}

/// The name that is most like another one, if any is like it at all.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let most = (name.chars().count() / 3).clamp(1, 3);
    known.map(|k| (distance(name, k), k)).filter(|(far, _)| *far <= most).min().map(|(_, k)| k)
}

/// Letters to insert, remove, replace or swap with their neighbour to make one word of the other.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = match (i, j) {
                (0, _) => j,
                (_, 0) => i,
                _ => {
                    let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                    let swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
                    let swapped = if swapped { rows[i - 2][j - 2] + 1 } else { usize::MAX };
                    replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1).min(swapped)
                }
            };
        }
    }
    rows[a.len()][b.len()]
}
