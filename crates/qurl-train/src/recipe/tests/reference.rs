//! The reference says of every key what the parser and the checks do.

use super::{GOOD, RL};
use crate::recipe::ranges::{self, End};
use crate::recipe::reference::{Key, keys};
use crate::recipe::{Recipe, json_schema};

#[test]
fn every_key_has_a_meaning_and_every_number_a_range() {
    let keys = keys();
    assert!(keys.len() > 120, "{}", keys.len());
    for key in &keys {
        assert!(key.meaning.len() > 8 && key.meaning.ends_with('.'), "{}: {:?}", key.key, key.meaning);
        assert!(!key.meaning.contains("[`") && !key.meaning.contains("::"), "{}: {}", key.key, key.meaning);
        for choice in key.choices.iter().filter(|choice| !choice.meaning.is_empty()) {
            assert!(choice.meaning.ends_with('.'), "{}: {choice:?}", key.key);
        }
        let number = key.kind.contains("number");
        assert_eq!(key.range.is_some(), number, "{}: {key:?}; recipe/ranges.rs has the ranges", key.key);
    }
    // A section stands there once; a value once for each type of its section that has another default.
    for section in keys.iter().filter(|key| key.is_section()) {
        assert_eq!(keys.iter().filter(|key| key.key == section.key).count(), 1, "{}", section.key);
    }
    for (i, key) in keys.iter().enumerate() {
        assert!(!keys[..i].contains(key), "{} is listed twice", key.key);
    }
    // And the table has no keys that are not there any more.
    for (name, range) in ranges::keys() {
        let key = keys.iter().find(|key| key.key == name).unwrap_or_else(|| panic!("there is no key {name}"));
        assert_eq!(range.whole, key.kind == "whole number", "{name}: {key:?}");
    }
}

/// Recipes that have every key with a range, by overrides of the good one.
fn with_key(key: &str) -> Vec<String> {
    let task = |kind: &str| format!("task={kind}");
    let objective = |kind: &str| format!("algorithm.objective={{ type = \"{kind}\" }}");
    let gae = ["algorithm.adv_estimator={ type = \"gae\" }", "critic={ lr = 1.0, ppo_mini_batch_size = 4 }"];
    let dataset = task("{ type = \"dataset\", files = [\"x.jsonl\"] }");
    let owned = |list: &[&str]| list.iter().map(|s| s.to_string()).collect();
    match key {
        "model.max_position_embeddings" => owned(&["model.path=x"]),
        "task.held_out" => vec![dataset],
        "task.time_limit_s" => vec![task(
            "{ type = \"command\", command = [\"x\"], source = { type = \"synthetic\", kind = \"sorting\", \
             level = 1 } }",
        )],
        _ if key.starts_with("critic.") || key.contains("adv_estimator") => owned(&gae),
        "algorithm.objective.low" | "algorithm.objective.high" => vec![objective("icepop")],
        "algorithm.objective.correction.c" => {
            owned(&["algorithm.objective={ type = \"gspo\", correction = { type = \"token-tis\" } }"])
        }
        "algorithm.objective.correction.low" | "algorithm.objective.correction.high" => {
            owned(&["algorithm.objective={ type = \"gspo\", correction = { type = \"icepop\" } }"])
        }
        "algorithm.objective.correction.phi" => {
            owned(&["algorithm.objective={ type = \"cispo\", correction = { type = \"kpop\" } }"])
        }
        "algorithm.objective.phi" => vec![objective("kpop")],
        "algorithm.objective.delta_low" | "algorithm.objective.delta_high" => vec![objective("dppo")],
        "algorithm.objective.ratio_max" => vec![objective("dppo")],
        "algorithm.objective.tau" => vec![objective("m2po")],
        _ if key.starts_with("algorithm.objective.") => vec![objective("acr")],
        _ if key.starts_with("algorithm.kl_in_reward") => {
            owned(&["algorithm.kl_in_reward={ kl_ctrl = { type = \"adaptive\" } }"])
        }
        _ if key.starts_with("algorithm.overlong") => owned(&["algorithm.overlong_buffer={ len = 1 }"]),
        "rollout.top_p" => owned(&["rollout.allow_truncated_sampling=true"]),
        _ => Vec::new(),
    }
}

/// Whether a key of a recipe may have a value, as far as its range is concerned.
fn allowed(key: &str, value: &str) -> bool {
    let mut overrides = with_key(key);
    if let Some(name) = key.strip_prefix("task.rewards.") {
        let (kind, others) = match name {
            "time_limit_s" => ("command", ", command = [\"x\"]"),
            "full_at" => ("length", ", zero_at = 7"),
            "zero_at" => ("length", ", full_at = 7"),
            _ => ("correct", ""),
        };
        let value = value.to_lowercase(); // nan, as TOML writes it
        overrides.push(format!("task.rewards=[{{ type = \"{kind}\", {name} = {value}{others} }}]"));
    }
    match key.strip_prefix("run.stages.") {
        _ if key.starts_with("task.rewards.") => {}
        Some(name) => {
            let mut stage = vec![("from_step", "1"), ("max_response_length", "8")];
            stage.retain(|(other, _)| *other != name);
            stage.push((name, value));
            let stage: Vec<String> = stage.iter().map(|(k, v)| format!("{k} = {v}")).collect();
            overrides.push(format!("run.stages=[{{ {} }}]", stage.join(", ")));
        }
        None => overrides.push(format!("{key}={value}")),
    }
    let expected = ranges::of(key).expect("a range").to_string();
    match Recipe::parse(&format!("{GOOD}{RL}"), "r.toml", &overrides) {
        Ok(_) => true,
        // Other checks may refuse a value that the range has: it must not be the range that does.
        Err(error) => {
            let error = error.to_string();
            let name = key.rsplit('.').next().expect("a name");
            assert!(!error.contains("unknown key") && !error.contains("lacks"), "{key}: {error}");
            !(error.ends_with(&format!("expected {expected}")) && error.contains(&format!(".{name}` is ")))
        }
    }
}

/// What the table says of a key is what the check enforces, at both ends.
#[test]
fn ranges_are_enforced_just_inside_and_just_outside() {
    let mut probed = 0;
    for (key, range) in ranges::keys() {
        let step = range.multiple_of.map_or(1.0, f64::from);
        let text = |value: f64| if range.whole { format!("{value:.0}") } else { format!("{value:?}") };
        let mut expect = |value: f64, inside: bool| {
            assert_eq!(allowed(key, &text(value)), inside, "{key} = {}, {range}", text(value));
            probed += 1;
        };
        match range.low {
            Some(End::At(low)) => {
                expect(low, true);
                expect(
                    if range.whole { low - step } else { (low - 1e-3 * low.abs()).min(low - 1e-6) },
                    false,
                );
            }
            Some(End::Beyond(low)) => {
                expect(low + 1e-3, true);
                expect(low, false);
            }
            None => {}
        }
        match range.high {
            Some(End::At(high)) => {
                expect(high, true);
                expect(if range.whole { high + step } else { high + 1e-3 * high.abs() }, false);
            }
            Some(End::Beyond(high)) if high.is_finite() => {
                expect(high - 1e-3, true);
                expect(high, false);
            }
            Some(_) => {
                expect(1e30, true);
                expect(f64::INFINITY, false);
            }
            None => {}
        }
        if let Some(of) = range.multiple_of {
            expect(f64::from(of) + 1.0, false);
        }
        if !range.whole {
            expect(f64::NAN, false);
        }
    }
    assert!(probed > 300, "{probed}");
}

/// Defaults are those of a recipe that does not have the keys.
#[test]
fn defaults_are_those_that_are_filled_in() {
    let recipe = Recipe::parse(&format!("{GOOD}{RL}"), "r.toml", &[]).expect("good");
    let table = toml::Table::try_from(&recipe).expect("a table");
    let given: toml::Table = toml::from_str(&format!("{GOOD}{RL}")).expect("TOML");
    let at = |table: &toml::Table, path: &str| {
        let mut parts = path.split('.');
        let first = table.get(parts.next()?)?;
        parts.try_fold(first.clone(), |value, part| value.as_table()?.get(part).cloned())
    };
    let mut compared = 0;
    for Key { key, default, only_with, .. } in keys() {
        let Some(default) = default.filter(|_| at(&given, &key).is_none() && only_with.len() != 1) else {
            continue;
        };
        let Some(value) = at(&table, &key) else { continue };
        let parsed: toml::Table =
            toml::from_str(&format!("value = {default}")).unwrap_or_else(|e| panic!("{key}: {e}"));
        assert_eq!(parsed["value"].to_string(), value.to_string(), "{key}");
        compared += 1;
    }
    assert!(compared > 40, "{compared}");
}

/// Everything that a recipe of the project says is in the schema, with a value that the schema has.
#[test]
fn the_schema_knows_every_recipe_of_the_project() {
    fn fits(schema: &serde_json::Value, value: &toml::Value, path: &str) {
        if let Some(list) = schema["anyOf"].as_array() {
            let kind = if value.is_str() { "string" } else { "array" };
            let one = list.iter().find(|one| one["type"] == kind);
            return fits(one.unwrap_or_else(|| panic!("{path}: {value}")), value, path);
        }
        if let Some(list) = schema["oneOf"].as_array() {
            let fitting = |one: &&serde_json::Value| match value {
                toml::Value::Table(table) => {
                    let tag = &one["properties"]["type"];
                    let given = table["type"].as_str().expect("a type");
                    tag["const"] == given
                        || tag["enum"].as_array().is_some_and(|e| e.iter().any(|name| name == given))
                }
                value => one["const"].as_str() == value.as_str() || one["enum"].as_array().is_some(),
            };
            let one = list.iter().find(fitting).unwrap_or_else(|| panic!("{path}: {value}"));
            if value.is_table() {
                fits(one, value, path);
            }
            return;
        }
        match value {
            toml::Value::Table(table) => {
                for (key, value) in table {
                    let inner =
                        schema["properties"].get(key).unwrap_or_else(|| panic!("{path}.{key}: {schema}"));
                    fits(inner, value, &format!("{path}.{key}"));
                }
            }
            toml::Value::Array(items) => items.iter().for_each(|item| fits(&schema["items"], item, path)),
            toml::Value::String(text) => {
                let names = schema["enum"].as_array();
                let known = names.is_none_or(|names| names.iter().any(|name| name == text));
                assert!(
                    known && (schema["type"] == "string" || schema["const"] == *text),
                    "{path}: {schema}"
                );
            }
            toml::Value::Integer(_) => {
                assert!(["integer", "number"].contains(&schema["type"].as_str().expect("a type")))
            }
            toml::Value::Float(_) => assert_eq!(schema["type"], "number", "{path}"),
            toml::Value::Boolean(_) => assert_eq!(schema["type"], "boolean", "{path}"),
            toml::Value::Datetime(_) => panic!("{path}"),
        }
    }
    let schema = json_schema();
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let mut seen = 0;
    for entry in std::fs::read_dir(dir).expect("recipes") {
        let path = entry.expect("entry").path();
        if path.extension().is_some_and(|e| e == "toml") {
            let text = std::fs::read_to_string(&path).expect("text");
            fits(&schema, &toml::from_str(&text).expect("TOML"), &path.display().to_string());
            seen += 1;
        }
    }
    assert!(seen >= 8);
    assert!(!schema.to_string().contains("$ref"), "references are written out");
}

/// Every name of a choice that the schema accepts, other names included, is one that the parser takes.
#[test]
fn every_choice_parses() {
    let text = format!("{GOOD}{RL}");
    let mut tried = 0;
    for (key, part) in
        [("algorithm.kl_loss_type", "kl_loss_type"), ("algorithm.loss_agg_mode", "loss_agg_mode")]
    {
        let schema = &json_schema()["properties"]["algorithm"]["properties"][part];
        for choice in schema["oneOf"].as_array().expect("choices") {
            let names = choice["enum"].as_array().cloned().unwrap_or_else(|| vec![choice["const"].clone()]);
            for name in names {
                let entry = format!("{key}={name}");
                Recipe::parse(&text, "r.toml", std::slice::from_ref(&entry))
                    .unwrap_or_else(|e| panic!("{entry}: {e}"));
                tried += 1;
            }
        }
    }
    let estimators = &json_schema()["properties"]["algorithm"]["properties"]["adv_estimator"];
    for variant in estimators["oneOf"].as_array().expect("estimators") {
        let tag = &variant["properties"]["type"];
        for name in tag["enum"].as_array().cloned().unwrap_or_else(|| vec![tag["const"].clone()]) {
            let mut entries = vec![format!("algorithm.adv_estimator={{ type = {name} }}")];
            if name == "gae" {
                entries.push("critic={ lr = 1.0, ppo_mini_batch_size = 4 }".to_string());
            }
            Recipe::parse(&text, "r.toml", &entries).unwrap_or_else(|e| panic!("{name}: {e}"));
            tried += 1;
        }
    }
    assert!(tried >= 25, "{tried}");
}
