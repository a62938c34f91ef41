//! Which linear layers `target_modules` and `exclude_modules` mean, matched as PEFT matches them: against the
//! path of each module of the model.

use crate::config::ModelConfig;
use crate::lora::{Module, Modules};
use regex::Regex;
use serde_json::Value;
use std::collections::BTreeSet;

/// Modules that PEFT can put an adapter on and that have none here.
const WITHOUT: [&str; 2] = ["lm_head", "model.embed_tokens"];

/// Why it was refused.
pub(super) struct Refused {
    /// The key to blame.
    pub key: &'static str,
    /// What was expected.
    pub why: String,
}

/// What a key says about modules.
enum Pattern {
    /// Every linear layer but the head.
    AllLinear,
    /// Paths that match as a whole.
    Full(Regex),
    /// Paths, or how they end.
    Names(BTreeSet<String>),
}

impl Pattern {
    /// A string is a regular expression, whatever it looks like; `None` where it is neither that nor a list
    /// of names.
    fn of(value: &Value) -> Option<Pattern> {
        match value {
            Value::String(text) => Regex::new(&format!("^(?:{text})$")).ok().map(Pattern::Full),
            Value::Array(names) => {
                let names = names.iter().map(|name| name.as_str().map(str::to_string));
                names.collect::<Option<_>>().map(Pattern::Names)
            }
            _ => None,
        }
    }

    fn has(&self, path: &str) -> bool {
        match self {
            Pattern::AllLinear => !WITHOUT.contains(&path),
            Pattern::Full(regex) => regex.is_match(path),
            Pattern::Names(names) => ends(path).any(|end| names.contains(end)),
        }
    }
}

/// A path and what remains of it after each of its dots.
fn ends(path: &str) -> impl Iterator<Item = &str> {
    std::iter::once(path).chain(path.match_indices('.').map(move |(at, _)| &path[at + 1..]))
}

/// The modules that have an adapter, which have to be the same ones in every block.
pub(super) fn matched(
    target_modules: &Value,
    exclude_modules: &Value,
    model: &ModelConfig,
) -> Result<Modules, Refused> {
    let refused = |key, why: String| Err(Refused { key, why });
    let forms = format!(
        "\"all-linear\", a list of some of {}, or a regular expression without lookaround that matches paths \
         such as {}",
        Modules::ALL,
        path(0, Module::QProj)
    );
    let all = |text: &str| text.eq_ignore_ascii_case("all-linear");
    let targets = match target_modules.as_str().is_some_and(all) {
        true => Some(Pattern::AllLinear),
        false => Pattern::of(target_modules),
    };
    let Some(targets) = targets else { return refused("target_modules", forms) };
    let excluded = match exclude_modules {
        Value::Null => Some(Pattern::Names(BTreeSet::new())),
        // PEFT takes an empty pattern for none.
        Value::String(text) if text.is_empty() => Some(Pattern::Names(BTreeSet::new())),
        value => Pattern::of(value),
    };
    let Some(excluded) = excluded else {
        return refused(
            "exclude_modules",
            "a list of names, or a regular expression without lookaround".into(),
        );
    };
    let has = |path: &str| targets.has(path) && !excluded.has(path);
    if let Some(without) = WITHOUT.into_iter().find(|path| has(path)) {
        return refused("target_modules", format!("{forms}, and not {without}, which has no adapter here"));
    }
    // A name that fits nothing is a module of another family, whose adapter would be left out.
    if let Pattern::Names(names) = &targets {
        let paths: Vec<String> = Module::ALL.into_iter().flat_map(|module| paths(model, module)).collect();
        let known: BTreeSet<&str> = paths.iter().flat_map(|path| ends(path)).collect();
        if let Some(unknown) = names.iter().find(|name| !known.contains(name.as_str())) {
            return refused("target_modules", format!("{forms}; this model has no {unknown}"));
        }
    }
    let mut modules = Vec::new();
    for module in Module::ALL {
        let blocks = paths(model, module).filter(|path| has(path)).count();
        if blocks == model.num_layers {
            modules.push(module);
        } else if blocks > 0 {
            let (name, layers) = (module.name(), model.num_layers);
            let why = format!("the same modules in every block; {name} is meant in {blocks} of {layers}");
            return refused("target_modules", why);
        }
    }
    match modules.is_empty() {
        true => refused("target_modules", forms),
        false => Ok(Modules::of(modules)),
    }
}

/// A module's path in the model of transformers, as PEFT sees it.
fn path(block: usize, module: Module) -> String {
    format!("model.layers.{block}.{}.{}", module.parent(), module.name())
}

fn paths(model: &ModelConfig, module: Module) -> impl Iterator<Item = String> {
    (0..model.num_layers).map(move |block| path(block, module))
}
