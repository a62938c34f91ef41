//! `--set key.path=value`: one key of a recipe changed before it is parsed.

use super::RecipeError;

/// The two parts of `rewards[0]`.
fn place_of_list(key: &str) -> Option<(&str, usize)> {
    let (list, place) = key.strip_suffix(']')?.split_once('[')?;
    Some((list, place.parse().ok()?))
}

/// An entry of a list that is there.
fn entry_of<'a>(table: &'a mut toml::Table, list: &str, place: usize) -> Result<&'a mut toml::Value, String> {
    let Some(toml::Value::Array(entries)) = table.get_mut(list) else {
        return Err(format!("there is no list `{list}`; set all of it"));
    };
    let count = entries.len();
    entries
        .get_mut(place)
        .ok_or_else(|| format!("`{list}` has {count} entries, the first of them `{list}[0]`"))
}

/// Applies one override and gives its key. The value is TOML; what is not is taken as a string.
pub(super) fn set(table: &mut toml::Table, entry: &str) -> Result<String, RecipeError> {
    let wrong = |reason: String| RecipeError::Override { found: entry.to_string(), reason };
    let Some((path, text)) = entry.split_once('=') else {
        return Err(wrong("expected key=value, such as trainer.seed=7".to_string()));
    };
    let keys: Vec<&str> = path.trim().split('.').collect();
    if keys.iter().any(|k| k.is_empty()) {
        return Err(wrong("the key has an empty part".to_string()));
    }
    let value = match toml::from_str::<toml::Table>(&format!("value = {text}")) {
        Ok(mut parsed) => parsed.remove("value").unwrap_or_else(|| toml::Value::String(text.to_string())),
        Err(_) => toml::Value::String(text.trim().to_string()),
    };
    let Some((last, parents)) = keys.split_last() else { return Err(wrong("no key".to_string())) };
    let mut table = table;
    for key in parents {
        let next = match place_of_list(key) {
            Some((list, place)) => entry_of(table, list, place).map_err(wrong)?,
            None => table.entry(key.to_string()).or_insert_with(|| toml::Value::Table(toml::Table::new())),
        };
        match next {
            toml::Value::Table(next) => table = next,
            toml::Value::Array(_) => {
                return Err(wrong(format!("`{key}` is a list; `{key}[0]` is its first entry")));
            }
            _ => return Err(wrong(format!("`{key}` is a value, not a section"))),
        }
    }
    match place_of_list(last) {
        Some((list, place)) => *entry_of(table, list, place).map_err(wrong)? = value,
        None => _ = table.insert(last.to_string(), value),
    }
    let key = path.trim().to_string();
    if key == "model.path" {
        table.remove("new"); // a model in place of a new one
    }
    Ok(key)
}
