//! Which values the numbers of a recipe may have: one table, which the check enforces and the reference
//! prints.
//!
//! What depends on other keys (a divisor of the batch, at least 2 within a group) is checked beside the
//! section that it belongs to; here is what holds of a number by itself.

use super::{Check, RecipeError};
use std::fmt;
use toml::Value;

/// An end of a range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum End {
    /// The value itself is allowed.
    At(f64),
    /// The value itself is not.
    Beyond(f64),
}

/// The values of a number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// The smallest; none where there is none.
    pub low: Option<End>,
    /// The largest.
    pub high: Option<End>,
    /// Of what it is a multiple, if of anything.
    pub multiple_of: Option<u32>,
    /// Whether it is a whole number.
    pub whole: bool,
}

const fn whole(low: u64, high: u64) -> Range {
    let (low, high) = (Some(End::At(low as f64)), Some(End::At(high as f64)));
    Range { low, high, multiple_of: None, whole: true }
}

const fn at_least(low: u64) -> Range {
    Range { low: Some(End::At(low as f64)), high: None, multiple_of: None, whole: true }
}

const fn number(low: End, high: End) -> Range {
    Range { low: Some(low), high: Some(high), multiple_of: None, whole: false }
}

/// Any number that is one.
const ANY: Range = Range { low: None, high: None, multiple_of: None, whole: false };
const INFINITY: End = End::Beyond(f64::INFINITY);
const POSITIVE: Range = number(End::Beyond(0.0), INFINITY);
const NOT_NEGATIVE: Range = number(End::At(0.0), INFINITY);
/// Numbers that are used in f32 and must not vanish there.
const POSITIVE_F32: Range = number(End::At(f32::MIN_POSITIVE as f64), INFINITY);
const SHARE: Range = number(End::At(0.0), End::At(1.0));
const BELOW_ONE: Range = number(End::At(0.0), End::Beyond(1.0));
const COEFFICIENT: Range = number(End::At(0.0), End::At(1000.0));
const REWARD: Range = number(End::At(-1e6), End::At(1e6));
const TOKENS: Range = whole(1, 1 << 24);

/// Keys and the range they share. Keys of a list have no index, and those of `[task.source]` are those of
/// `[task]`.
const RANGES: &[(&[&str], Range)] = &[
    (&["model.max_position_embeddings"], TOKENS),
    (&["model.new.hidden_size", "model.new.intermediate_size", "model.new.num_hidden_layers"], at_least(1)),
    (&["model.new.num_attention_heads", "model.new.num_key_value_heads"], at_least(1)),
    (&["model.new.max_position_embeddings"], at_least(1)),
    (
        &["rollout.norm_noise.sigma_start", "rollout.norm_noise.sigma_end"],
        number(End::Beyond(0.0), End::At(1.0)),
    ),
    (&["rollout.norm_noise.num_stages"], whole(1, 1 << 12)),
    (&["lora.rank"], whole(1, 1 << 12)),
    (&["lora.alpha"], POSITIVE),
    (&["lora.dropout"], BELOW_ONE),
    (&["task.level"], at_least(1)),
    (&["task.format_weight", "task.teacher_slips"], SHARE),
    (&["task.reward.right", "task.reward.wrong"], REWARD),
    (&["task.held_out", "sft.held_out"], BELOW_ONE),
    (&["task.time_limit_s", "task.rewards.time_limit_s"], number(End::Beyond(0.0), End::At(1e6))),
    (&["task.rewards.weight"], REWARD),
    (&["task.rewards.full_at", "task.rewards.zero_at"], whole(0, 1 << 24)),
    (&["trainer.seed", "trainer.save_freq", "trainer.keep_best"], at_least(0)),
    (&["trainer.micro_tokens"], whole(16, 1 << 24)),
    (&["trainer.shards"], whole(1, 1 << 12)),
    (&["trainer.zero_stage"], whole(1, 3)),
    (&["trainer.keep_last", "trainer.memory_budget_mb"], at_least(1)),
    (&["sft.steps", "run.total_steps", "run.stages.from_step"], at_least(1)),
    (&["sft.batch_size", "data.train_batch_size"], whole(1, 1 << 20)),
    (&["sft.max_length"], whole(2, 1 << 24)),
    (&["sft.lr", "actor.lr", "critic.lr"], POSITIVE),
    (
        &["sft.warmup_steps", "actor.lr_warmup_steps", "critic.lr_warmup_steps", "sft.test_problems"],
        at_least(0),
    ),
    (&["sft.validation_freq"], at_least(0)),
    (&["sft.min_lr_ratio", "actor.min_lr_ratio", "critic.min_lr_ratio"], SHARE),
    (&["sft.optim.beta1", "actor.optim.beta1", "critic.optim.beta1"], BELOW_ONE),
    (&["sft.optim.beta2", "actor.optim.beta2", "critic.optim.beta2"], BELOW_ONE),
    (&["sft.optim.eps", "actor.optim.eps", "critic.optim.eps"], POSITIVE_F32),
    (&["sft.optim.weight_decay", "actor.optim.weight_decay", "critic.optim.weight_decay"], NOT_NEGATIVE),
    (
        &["sft.optim.clip_grad", "actor.optim.clip_grad", "critic.optim.clip_grad"],
        Range { low: Some(End::Beyond(0.0)), high: None, multiple_of: None, whole: false },
    ),
    (
        &[
            "sft.optim.lr_factor_matrices",
            "sft.optim.lr_factor_norms",
            "actor.optim.lr_factor_matrices",
            "actor.optim.lr_factor_norms",
            "critic.optim.lr_factor_matrices",
            "critic.optim.lr_factor_norms",
        ],
        number(End::Beyond(0.0), End::At(1e3)),
    ),
    (&["data.max_prompt_length", "data.max_response_length", "run.stages.max_response_length"], TOKENS),
    (&["rollout.n", "run.stages.n"], whole(1, 1 << 16)),
    (&["rollout.temperature"], number(End::At(1e-3), End::At(1e3))),
    (&["run.test_temperature"], number(End::At(0.0), End::At(1e3))),
    (&["rollout.top_p", "run.test_top_p"], number(End::Beyond(0.0), End::At(1.0))),
    (&["rollout.top_k"], at_least(0)),
    (&["rollout.lag"], at_least(0)),
    (&["rollout.workers.lease_s"], whole(1, 86_400)),
    (&["rollout.workers.spot_check"], SHARE),
    (&["rollout.uaq"], number(End::At(1.0 / 64.0), End::At(64.0))),
    (&["rollout.kv_cache_mb", "rollout.max_num_batched_tokens"], TOKENS),
    (&["rollout.page_size"], Range { multiple_of: Some(16), ..whole(16, 1 << 16) }),
    (&["rollout.max_num_seqs"], whole(1, 1 << 20)),
    (&["algorithm.adv_estimator.gamma", "algorithm.adv_estimator.lam"], SHARE),
    (&["algorithm.objective.clip_ratio_low", "algorithm.objective.clip_ratio_high"], NOT_NEGATIVE),
    (&["algorithm.objective.clip_ratio_c"], number(End::Beyond(1.0), INFINITY)),
    (&["algorithm.objective.c", "algorithm.objective.correction.c"], POSITIVE),
    (&["algorithm.objective.low", "algorithm.objective.high"], NOT_NEGATIVE),
    (&["algorithm.objective.correction.low", "algorithm.objective.correction.high"], NOT_NEGATIVE),
    (&["algorithm.objective.phi", "algorithm.objective.correction.phi"], NOT_NEGATIVE),
    (&["algorithm.objective.delta_low", "algorithm.objective.delta_high"], NOT_NEGATIVE),
    (&["algorithm.objective.tau", "algorithm.objective.off_policy_mask"], NOT_NEGATIVE),
    (&["algorithm.objective.ratio_max"], number(End::At(1.0), INFINITY)),
    (&["algorithm.loss_scale_factor"], POSITIVE),
    (&["algorithm.entropy_coeff", "algorithm.kl_loss_coef"], COEFFICIENT),
    (&["algorithm.kl_in_reward.kl_ctrl.kl_coef", "algorithm.overlong_buffer.penalty_factor"], NOT_NEGATIVE),
    (&["algorithm.kl_in_reward.kl_ctrl.target_kl", "algorithm.kl_in_reward.kl_ctrl.horizon"], POSITIVE),
    (&["algorithm.filter_groups.max_num_gen_batches"], whole(1, 1000)),
    (&["algorithm.overlong_buffer.len"], at_least(1)),
    (&["actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size"], at_least(1)),
    (&["actor.ppo_epochs", "critic.ppo_epochs"], at_least(1)),
    (
        &["actor.cliprange_value", "critic.cliprange_value"],
        Range { low: Some(End::Beyond(0.0)), high: None, multiple_of: None, whole: false },
    ),
    (&["run.test_freq", "run.update_metrics_freq", "run.rollout_log_freq"], at_least(0)),
    (&["run.rollout_log_samples", "run.full_kl_positions", "run.alarm.patience"], at_least(0)),
    (&["run.test_problems"], whole(1, 1 << 20)),
    (&["run.test_k"], whole(0, 1 << 16)),
    (&["run.alarm.mismatch_kl", "run.alarm.entropy_low", "run.alarm.entropy_high"], ANY),
];

/// The range of a key, given by its path with or without indices.
pub fn of(key: &str) -> Option<Range> {
    let name = canonical(key);
    RANGES.iter().find(|(keys, _)| keys.contains(&name.as_str())).map(|(_, range)| *range)
}

/// A path as tables have it: `run.stages[1].n` as `run.stages.n`, `task.source.files` as `task.files`.
pub(super) fn canonical(key: &str) -> String {
    let mut name = String::with_capacity(key.len());
    let mut inside = false;
    for c in key.chars() {
        match c {
            '[' => inside = true,
            ']' => inside = false,
            c if !inside => name.push(c),
            _ => {}
        }
    }
    match name.strip_prefix("task.source.") {
        Some(rest) => format!("task.{rest}"),
        None => name,
    }
}

impl Range {
    /// Whether a number is in it.
    pub fn holds(&self, value: f64) -> bool {
        let low = match self.low {
            Some(End::At(low)) => value >= low,
            Some(End::Beyond(low)) => value > low,
            None => !value.is_nan(),
        };
        let high = match self.high {
            Some(End::At(high)) => value <= high,
            Some(End::Beyond(high)) => value < high,
            None => !value.is_nan(),
        };
        low && high && self.multiple_of.is_none_or(|of| value % f64::from(of) == 0.0)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.whole { "a whole number" } else { "a number" };
        if let Some(of) = self.multiple_of {
            write!(f, "a multiple of {of}, ")?;
        }
        let high = self.high.filter(|high| *high != INFINITY);
        match (self.low, high) {
            (None, None) => f.write_str("a number"),
            (Some(End::Beyond(0.0)), None) => f.write_str("a positive number"),
            (Some(End::At(0.0)), None) if !self.whole => f.write_str("0 or a positive number"),
            (Some(End::At(low)), None) => write!(f, "{what} of at least {}", shown(low)),
            (Some(End::Beyond(low)), None) => write!(f, "{what} above {low}"),
            (Some(End::At(low)), Some(End::At(high))) => write!(f, "{what} from {low} to {high}"),
            (Some(End::At(low)), Some(End::Beyond(high))) => write!(f, "{what} from {low} to below {high}"),
            (Some(End::Beyond(low)), Some(End::At(high))) => write!(f, "{what} above {low}, at most {high}"),
            (Some(End::Beyond(low)), Some(End::Beyond(high))) => {
                write!(f, "{what} above {low}, below {high}")
            }
            (None, Some(End::At(high) | End::Beyond(high))) => write!(f, "{what} of at most {high}"),
        }
    }
}

/// Refuses the first number of a recipe, written out as a table, that is out of its range.
pub(super) fn check(table: &toml::Table, check: Check) -> Result<(), RecipeError> {
    for (key, value) in numbers(table) {
        if let Some(range) = of(&key) {
            check.that(&key, shown(value), range.holds(value), &range.to_string())?;
        }
    }
    Ok(())
}

/// A number as short as it was given; some keys are f32.
fn shown(value: f64) -> String {
    let narrow = value as f32;
    let text = if f64::from(narrow) == value { format!("{narrow:?}") } else { format!("{value:?}") };
    text.strip_suffix(".0").unwrap_or(&text).to_string()
}

/// All numbers of a table with the paths of their keys.
pub(super) fn numbers(table: &toml::Table) -> Vec<(String, f64)> {
    fn walk(path: &str, value: &Value, found: &mut Vec<(String, f64)>) {
        match value {
            Value::Integer(number) => found.push((path.to_string(), *number as f64)),
            Value::Float(number) => found.push((path.to_string(), *number)),
            Value::Table(table) => {
                for (key, value) in table {
                    walk(&if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, value, found);
                }
            }
            Value::Array(items) => {
                for (i, item) in items.iter().enumerate() {
                    walk(&format!("{path}[{i}]"), item, found);
                }
            }
            _ => {}
        }
    }
    let mut found = Vec::new();
    walk("", &Value::Table(table.clone()), &mut found);
    found
}

/// All keys of the table.
#[cfg(test)]
pub(super) fn keys() -> impl Iterator<Item = (&'static str, Range)> {
    RANGES.iter().flat_map(|(keys, range)| keys.iter().map(|key| (*key, *range)))
}
