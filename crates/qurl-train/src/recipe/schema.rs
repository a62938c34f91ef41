//! The JSON schema of a recipe, derived from its types: what editors complete by, and what the reference and
//! the messages about wrong recipes are made of.

use super::Recipe;
use super::model::NewModel;
use super::ranges::{self, End};
use qurl_kernels::KvFormat;
use qurl_kernels::{DeviceKind, Format};
use qurl_model::compute::Recompute;
use qurl_tasks::grader::Policy;
use qurl_tasks::presets::{EVAL_PRESETS, TEMPLATES};
use qurl_tasks::tasks::Kind;
use schemars::generate::SchemaSettings;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

pub(crate) fn names(names: impl IntoIterator<Item = &'static str>) -> Schema {
    let names: Vec<&str> = names.into_iter().collect();
    json_schema!({ "type": "string", "enum": names })
}

pub(super) fn formats(_: &mut SchemaGenerator) -> Schema {
    names(Format::ALL.map(Format::name))
}

pub(super) fn trained_formats(_: &mut SchemaGenerator) -> Schema {
    names(Format::ALL.into_iter().filter(|format| !format.is_quantized()).map(Format::name))
}

pub(super) fn kv_formats(_: &mut SchemaGenerator) -> Schema {
    names(KvFormat::ALL.map(KvFormat::name))
}

pub(super) fn devices(_: &mut SchemaGenerator) -> Schema {
    names(DeviceKind::ALL.map(DeviceKind::name))
}

pub(super) fn recomputations(_: &mut SchemaGenerator) -> Schema {
    names(Recompute::ALL.map(Recompute::name))
}

pub(super) fn families(_: &mut SchemaGenerator) -> Schema {
    names(NewModel::FAMILIES.map(|family| family.model_type()))
}

pub(super) fn kinds(_: &mut SchemaGenerator) -> Schema {
    names(Kind::ALL.map(|(name, _)| name))
}

pub(super) fn presets(_: &mut SchemaGenerator) -> Schema {
    names(EVAL_PRESETS.map(|preset| preset.name))
}

pub(super) fn templates(_: &mut SchemaGenerator) -> Schema {
    names(TEMPLATES.map(|template| template.name))
}

pub(super) fn policies(_: &mut SchemaGenerator) -> Schema {
    names(Policy::ALL.map(|(name, _)| name))
}

/// The schema, with other names of a choice as further choices, paragraphs on one line and every range. All
/// types are written out in place, but for `[task.source]`, which is like `[task]`.
pub fn json_schema() -> Value {
    let generator = SchemaSettings::draft2020_12().into_generator();
    let mut schema = generator.into_root_schema_for::<Recipe>().to_value();
    let definitions = schema.as_object_mut().and_then(|root| root.remove("$defs")).unwrap_or_default();
    write_out(&mut schema, &definitions, &mut Vec::new(), "");
    if let Some(root) = schema.as_object_mut() {
        root.insert("title".to_string(), json!("A recipe of qurl"));
    }
    schema
}

/// Replaces references by what they refer to, and adds what the types do not say.
fn write_out(schema: &mut Value, definitions: &Value, open: &mut Vec<String>, path: &str) {
    let mut entered = false;
    if let Some(object) = schema.as_object_mut()
        && let Some(Value::String(reference)) = object.remove("$ref")
    {
        let name = reference.rsplit('/').next().unwrap_or_default().to_string();
        if open.contains(&name) {
            object.insert("type".to_string(), json!("object"));
            return;
        }
        if let Some(definition) = definitions.get(&name).and_then(Value::as_object) {
            for (key, value) in definition {
                if key == "description" || !object.contains_key(key) {
                    object.entry(key.clone()).or_insert_with(|| value.clone());
                }
            }
        }
        open.push(name);
        entered = true;
    }
    unwrap_optional(schema);
    if schema.get("$ref").is_some() {
        write_out(schema, definitions, open, path);
    } else if let Some(object) = schema.as_object_mut() {
        if let Some(Value::String(text)) = object.get_mut("description") {
            *text = unbroken(text);
        }
        if let Some(Value::String(format)) = object.get("format")
            && format.contains("int")
        {
            object.remove("format"); // sizes of machine numbers
        }
        add_aliases(object);
        add_range(object, path);
        if let Some(Value::Object(properties)) = object.get_mut("properties") {
            for (key, value) in properties {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                write_out(value, definitions, open, &path);
            }
        }
        for list in ["oneOf", "anyOf"] {
            if let Some(Value::Array(choices)) = object.get_mut(list) {
                choices.iter_mut().for_each(|choice| write_out(choice, definitions, open, path));
            }
        }
        if let Some(items) = object.get_mut("items") {
            write_out(items, definitions, open, path);
        }
    }
    if entered {
        open.pop();
    }
}

/// A key that may be left out is written as its value alone: TOML has no null.
fn unwrap_optional(schema: &mut Value) {
    let Some(object) = schema.as_object_mut() else { return };
    if let Some(Value::Array(choices)) = object.get("anyOf")
        && let [choice, null] = &choices[..]
        && null["type"] == "null"
        && let Some(choice) = choice.as_object().cloned()
    {
        object.remove("anyOf");
        for (key, value) in choice {
            object.entry(key).or_insert(value);
        }
    }
    if let Some(Value::Array(types)) = object.get("type")
        && let [one, null] = &types[..]
        && null == "null"
    {
        let one = one.clone();
        object.insert("type".to_string(), one);
    }
    if object.get("default").is_some_and(Value::is_null) {
        object.remove("default");
    }
}

/// Other names of the same choice: of a text, or of a section's `type`.
fn add_aliases(object: &mut serde_json::Map<String, Value>) {
    let Some(Value::Array(aliases)) = object.remove("x-aliases") else { return };
    let choice = match object.get_mut("properties").and_then(|properties| properties.get_mut("type")) {
        Some(Value::Object(tag)) => tag,
        _ => object,
    };
    if let Some(name) = choice.remove("const") {
        choice.insert("enum".to_string(), [vec![name], aliases].concat().into());
    }
}

fn add_range(object: &mut serde_json::Map<String, Value>, path: &str) {
    let Some(range) = ranges::of(path).filter(|_| !object.contains_key("properties")) else { return };
    let end = |value: f64| if range.whole { json!(value as i64) } else { json!(value) };
    object.remove("minimum");
    object.remove("maximum");
    for (end_of_range, at, beyond) in
        [(range.low, "minimum", "exclusiveMinimum"), (range.high, "maximum", "exclusiveMaximum")]
    {
        match end_of_range {
            Some(End::At(value)) => _ = object.insert(at.to_string(), end(value)),
            Some(End::Beyond(value)) if value.is_finite() => {
                _ = object.insert(beyond.to_string(), end(value))
            }
            _ => {}
        }
    }
    if let Some(of) = range.multiple_of {
        object.insert("multipleOf".to_string(), json!(of));
    }
}

/// Paragraphs without the line breaks of the source.
fn unbroken(text: &str) -> String {
    let paragraphs: Vec<String> =
        text.split("\n\n").map(|p| p.lines().collect::<Vec<_>>().join(" ")).collect();
    paragraphs.join("\n\n")
}
