//! Every key of a recipe with its type, default, range and meaning, as a list made from the types.

pub use super::explain::nearest;
use super::{ranges, schema};
use serde::Serialize;
use serde_json::Value;

/// One of the values that a key can have.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// As written in a recipe.
    pub name: String,
    /// What it means; empty where the name says it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub meaning: String,
}

/// A key or a section.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Key {
    /// Path from the root, as after `--set`.
    pub key: String,
    /// What kind of value it has.
    #[serde(rename = "type")]
    pub kind: String,
    /// Whether the section it stands in must have it.
    pub required: bool,
    /// Its value where it is not given, as TOML; none where there is none.
    pub default: Option<String>,
    /// Which values it may have, where they are bounded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<String>,
    /// The values it may have, where they can be listed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<Choice>,
    /// The types of the section around it that have it; empty where all do.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub only_with: Vec<String>,
    /// What it means.
    pub meaning: String,
}

impl Key {
    /// Whether it holds other keys.
    pub fn is_section(&self) -> bool {
        self.kind.starts_with("section")
    }

    /// The name without the section.
    pub fn name(&self) -> &str {
        self.key.rsplit('.').next().unwrap_or(&self.key)
    }

    /// The section it stands in; empty for those of the root.
    pub fn section(&self) -> &str {
        self.key.rsplit_once('.').map_or("", |(section, _)| section)
    }

    /// What it is when it is not given.
    pub fn otherwise(&self) -> String {
        match &self.default {
            _ if self.required => "required".to_string(),
            Some(default) => default.clone(),
            None => "not set".to_string(),
        }
    }
}

/// All keys: a section, then the values in it, then the sections in it.
pub fn keys() -> Vec<Key> {
    let mut found = Vec::new();
    collect(&schema::json_schema(), "", None, &[], &mut found);
    let (sections, values): (Vec<Key>, Vec<Key>) = found.into_iter().partition(Key::is_section);
    let mut keys = Vec::with_capacity(sections.len() + values.len());
    for section in sections {
        let own = values.iter().filter(|key| key.section() == section.key).cloned();
        keys.push(section.clone());
        keys.extend(own);
    }
    keys
}

/// A default as a recipe would write it.
fn toml_text(value: &Value) -> String {
    match value {
        Value::String(text) => format!("{text:?}"),
        value => value.to_string(),
    }
}

/// The keys of a section, which is a plain one or one of several types.
fn collect(section: &Value, path: &str, defaults: Option<&Value>, only_with: &[String], keys: &mut Vec<Key>) {
    let variants = variants(section);
    if !variants.is_empty() {
        let tag = if path.is_empty() { "type".to_string() } else { format!("{path}.type") };
        let choices =
            variants.iter().map(|(name, variant)| Choice { name: name.clone(), meaning: meaning(variant) });
        let default = defaults.and_then(|d| d.get("type")).map(toml_text);
        keys.push(Key {
            key: tag,
            kind: "text".to_string(),
            required: default.is_none(),
            default,
            range: None,
            choices: choices.collect(),
            only_with: only_with.to_vec(),
            meaning: "The kind of this section; its other keys depend on it.".to_string(),
        });
        let count = variants.len();
        for (name, variant) in variants {
            let mut own = Vec::new();
            let defaults = defaults.filter(|defaults| defaults["type"] == name.as_str());
            collect(variant, path, defaults, &[name], &mut own);
            for key in own {
                let alike = |k: &Key| k.meaning == key.meaning && k.default == key.default;
                let same =
                    |k: &&mut Key| k.key == key.key && (alike(k) || (k.is_section() && key.is_section()));
                match keys.iter_mut().find(same) {
                    Some(known) => {
                        let new = key.only_with.into_iter().filter(|name| !known.only_with.contains(name));
                        known.only_with.extend(new.collect::<Vec<_>>());
                    }
                    None => keys.push(key),
                }
            }
        }
        for key in keys.iter_mut().filter(|key| key.section() == path && key.only_with.len() == count) {
            key.only_with.clear();
        }
        return;
    }
    let Some(properties) = section["properties"].as_object() else { return };
    let required = section["required"].as_array().map_or(&[][..], Vec::as_slice);
    for (name, value) in properties.iter().filter(|(_, value)| !is_tag(value)) {
        let key = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let default = defaults.and_then(|d| d.get(name)).or(value.get("default"));
        let (kind, inner) = kind(value);
        let leaf = inner.is_none();
        keys.push(Key {
            kind,
            required: required.iter().any(|r| r == name),
            default: default.filter(|_| leaf).map(toml_text),
            range: ranges::of(&key).filter(|_| leaf).map(|range| range.to_string()),
            choices: choices(value),
            only_with: only_with.to_vec(),
            meaning: meaning(value),
            key: key.clone(),
        });
        if let Some(inner) = inner {
            collect(inner, &key, default, &[], keys);
        }
    }
}

/// Whether this is the key that tells the types of a section apart.
fn is_tag(value: &Value) -> bool {
    value.get("description").is_none() && (value.get("const").is_some() || value.get("enum").is_some())
}

/// The types of a section with their names; empty for a plain one.
pub(super) fn variants(section: &Value) -> Vec<(String, &Value)> {
    let choices = section["oneOf"].as_array().map_or(&[][..], Vec::as_slice);
    let name = |tag: &Value| tag["const"].as_str().or(tag["enum"][0].as_str()).map(str::to_string);
    choices.iter().filter_map(|choice| Some((name(&choice["properties"]["type"])?, choice))).collect()
}

fn meaning(value: &Value) -> String {
    value["description"].as_str().unwrap_or_default().to_string()
}

/// The texts that a value may be.
pub(super) fn choices(value: &Value) -> Vec<Choice> {
    if let Some(names) = value["enum"].as_array() {
        let name = |name: &Value| Some(Choice { name: name.as_str()?.to_string(), meaning: String::new() });
        return names.iter().filter_map(name).collect();
    }
    let one = |choice: &Value| {
        let name = choice["const"].as_str().or(choice["enum"][0].as_str())?;
        Some(Choice { name: name.to_string(), meaning: meaning(choice) })
    };
    value["oneOf"].as_array().map_or(Vec::new(), |list| list.iter().filter_map(one).collect())
}

/// What kind of value it is, in words, and what is inside a section.
pub(super) fn kind(value: &Value) -> (String, Option<&Value>) {
    let sections = !variants(value).is_empty() || value.get("properties").is_some();
    match value["type"].as_str() {
        _ if sections => ("section".to_string(), Some(value)),
        Some("object") => ("section".to_string(), None),
        Some("array") => match kind(&value["items"]) {
            (_, Some(inner)) => ("section, repeated".to_string(), Some(inner)),
            (item, None) => (format!("list of {item}s"), None),
        },
        Some("integer") => ("whole number".to_string(), None),
        Some("number") => ("number".to_string(), None),
        Some("boolean") => ("true or false".to_string(), None),
        _ => ("text".to_string(), None),
    }
}
