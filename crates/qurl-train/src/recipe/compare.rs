//! What differs between the recipe of a run and the one it is to continue with, and whether it may.
//!
//! A run that continues must be the run that was begun: every key that the past steps depended on has to be
//! the same. Keys that only say how long the run is or what is kept of it may change.

use super::Recipe;
use crate::schedule::Decay;
use std::collections::BTreeMap;
use std::fmt;

/// A key with two values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Path of the key.
    pub key: String,
    /// Its value so far; none where it was not set.
    pub old: Option<String>,
    /// Its value now.
    pub new: Option<String>,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |v: &Option<String>| v.clone().unwrap_or_else(|| "not set".to_string());
        write!(f, "{}: {} -> {}", self.key, value(&self.old), value(&self.new))
    }
}

/// All differences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Those that would make it another run.
    pub refused: Vec<Change>,
    /// Those that may be.
    pub allowed: Vec<Change>,
}

/// Keys that no step depends on, and sections of such keys (with a dot at the end).
const BOOKKEEPING: [&str; 14] = [
    "trainer.zero_stage",
    "trainer.pack_once",
    "trainer.recompute",
    "actor.optim.offload",
    "critic.optim.offload",
    "sft.optim.offload",
    "trainer.save_freq",
    "trainer.keep_last",
    "trainer.keep_best",
    "run.rollout_log_freq",
    "run.rollout_log_samples",
    "run.export_uaq",
    "run.alarm.",
    "rollout.workers.",
];

impl Changes {
    /// Compares the recipe of a run with the one it is to continue with.
    pub fn between(old: &Recipe, new: &Recipe) -> Changes {
        let (before, after) = (old.values(), new.values());
        let mut keys: Vec<&String> = before.keys().chain(after.keys()).collect();
        keys.sort();
        keys.dedup();
        let mut changes = Changes::default();
        for key in keys.into_iter().filter(|&key| before.get(key) != after.get(key)) {
            let change =
                Change { key: key.clone(), old: before.get(key).cloned(), new: after.get(key).cloned() };
            let longer = key == old.steps_key() && old.is_independent_of_its_length();
            let kept = BOOKKEEPING.iter().any(|b| key == b || (b.ends_with('.') && key.starts_with(b)));
            if longer || kept { changes.allowed.push(change) } else { changes.refused.push(change) }
        }
        changes
    }
}

impl Recipe {
    /// The key that says how many steps the run has: that of reinforcement learning, or of supervised
    /// training alone.
    fn steps_key(&self) -> &'static str {
        if self.run.is_some() { "run.total_steps" } else { "sft.steps" }
    }

    /// Whether the first steps are the same however many follow: only a decaying learning rate and the noise
    /// on norms look ahead.
    fn is_independent_of_its_length(&self) -> bool {
        let constant = |u: &Option<super::Updates>| u.as_ref().is_none_or(|u| u.decay == Decay::Constant);
        let noisy = self.rollout.as_ref().is_some_and(|rollout| rollout.norm_noise.is_some());
        match &self.run {
            Some(_) => constant(&self.actor) && constant(&self.critic) && !noisy,
            None => self.sft.as_ref().is_none_or(|sft| sft.decay == Decay::Constant),
        }
    }

    /// All values by the paths of their keys.
    pub fn values(&self) -> BTreeMap<String, String> {
        fn walk(prefix: &str, table: &toml::Table, values: &mut BTreeMap<String, String>) {
            for (key, value) in table {
                let path = format!("{prefix}{key}");
                match value {
                    toml::Value::Table(inner) => walk(&format!("{path}."), inner, values),
                    value => _ = values.insert(path, value.to_string()),
                }
            }
        }
        let mut values = BTreeMap::new();
        if let Ok(table) = toml::Table::try_from(self) {
            walk("", &table, &mut values);
        }
        values
    }
}
