//! Which key an error of the parser is about.
//!
//! Inside tagged sections (`type = ...`) the parser no longer knows where a value came from: it says "expected a
//! sequence" and points at the section. The key is found by trying. Values are read in order and the first bad one ends
//! the reading, so an absurd value changes the error up to the key to blame, and not after it: it is the last one that
//! changes it.

use toml::{Table, Value};

/// The path of the key to blame for the error that `error_of` finds in a table. None where a key is missing: the error
/// names it, and there is no value to blame.
pub(super) fn key_to_blame(table: &Table, error_of: impl Fn(&Table) -> Option<String>) -> Option<String> {
    let error = error_of(table)?;
    if error.starts_with("missing field") {
        return None;
    }
    let mut paths = Vec::new();
    leaves(table, &mut Vec::new(), &mut paths);
    let changes = |path: &Vec<String>, value: Option<Value>| {
        let mut other = table.clone();
        put(&mut other, path, value);
        error_of(&other).as_ref() != Some(&error)
    };
    let unknown = error.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
    let blamed = match unknown {
        Some(name) => paths.into_iter().find_map(|mut path| {
            path.truncate(path.iter().position(|key| key == name)? + 1);
            changes(&path, None).then_some(path)
        }),
        None => paths.into_iter().rev().find(|path| changes(path, Some(absurd()))),
    };
    blamed.map(|path| path.join("."))
}

/// A value that no key can have.
fn absurd() -> Value {
    Value::Array(vec![Value::Array(Vec::new())])
}

/// Paths of all values that are not sections, in the order of reading: a section's tag comes first.
fn leaves(table: &Table, section: &mut Vec<String>, paths: &mut Vec<Vec<String>>) {
    let (tags, others): (Vec<_>, Vec<_>) = table.iter().partition(|(key, _)| *key == "type");
    for (key, value) in tags.into_iter().chain(others) {
        section.push(key.clone());
        match value {
            Value::Table(inner) if !inner.is_empty() => leaves(inner, section, paths),
            _ => paths.push(section.clone()),
        }
        section.pop();
    }
}

/// Replaces or removes the value at a path.
fn put(table: &mut Table, path: &[String], value: Option<Value>) {
    match (path, value) {
        ([], _) => {}
        ([key], Some(value)) => _ = table.insert(key.clone(), value),
        ([key], None) => _ = table.remove(key),
        ([key, rest @ ..], value) => {
            if let Some(Value::Table(inner)) = table.get_mut(key) {
                put(inner, rest, value);
            }
        }
    }
}
