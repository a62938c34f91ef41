//! A run in a few words and a few figures.

use super::RunData;
use super::supervised::{Kind, Supervised};
use qurl_train::best::BestSeen;
use serde::Serialize;
use serde_json::Value;

/// Steps at each end of a run that make its first and its last reward.
const END: usize = 5;

/// Held-out problems of a run that does not say how many it has.
const FEW_PROBLEMS: u64 = 100;

/// The figures of the summary; what was not measured is missing.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Steps that were made.
    pub steps: usize,
    /// Held-out accuracy before the first step.
    pub accuracy_before: Option<f64>,
    /// Held-out accuracy, measured last.
    pub accuracy_after: Option<f64>,
    /// Avg@k before the first step, where `run.test_k` asks for it.
    pub avg_at_k_before: Option<f64>,
    /// Avg@k, measured last.
    pub avg_at_k_after: Option<f64>,
    /// The best score: of Avg@k where it is measured, else of held-out accuracy, the start included.
    pub accuracy_best: Option<f64>,
    /// The step after which it was seen, 0 for the start.
    pub best_step: Option<u64>,
    /// Mean reward of the first steps.
    pub reward_first: Option<f64>,
    /// Mean reward of the last steps.
    pub reward_last: Option<f64>,
    /// Mean KL(behav||prox).
    pub mismatch_kl: Option<f64>,
    /// Largest rho.
    pub rho_max: Option<f64>,
    /// Mean share of tokens that were clipped at either bound.
    pub clipped: Option<f64>,
    /// Response tokens per second of rollout.
    pub rollout_tokens_per_s: Option<f64>,
    /// The rollout's speed in its format over that in bf16, where it was measured.
    pub rollout_speedup: Option<f64>,
    /// Response tokens per second of the updates.
    pub training_tokens_per_s: Option<f64>,
    /// Seconds of all steps.
    pub seconds: Option<f64>,
    /// Updates that were applied.
    pub updates: f64,
    /// Updates that were skipped.
    pub skipped_updates: f64,
    /// Those of supervised training, where the run is that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub supervised: Option<Supervised>,
    /// Those of the warm start, where there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warm_start: Option<Supervised>,
}

/// The figures of a run.
pub fn figures(run: &RunData) -> Figures {
    let steps = &run.steps;
    let sum = |key: &str| steps.values(key).sum::<f64>();
    let mean = |key: &str| mean_of(steps.values(key));
    let per_second =
        |phase: &str| Some(sum("response_tokens") / sum(phase)).filter(|speed| speed.is_finite());
    let largest = |key: &str| steps.values(key).reduce(f64::max);
    let noted = |key: &str| run.summary.get(key).and_then(Value::as_f64);
    let best = best(run);
    Figures {
        steps: steps.len(),
        accuracy_before: noted("accuracy_before"),
        accuracy_after: steps.values("test_accuracy").next_back(),
        avg_at_k_before: noted("avg_at_k_before"),
        avg_at_k_after: steps.values("test_avg_at_k").next_back(),
        accuracy_best: best.map(|best| best.score),
        best_step: best.map(|best| best.step),
        reward_first: mean_of(steps.values("reward").take(END)),
        reward_last: mean_of(steps.values("reward").rev().take(END)),
        mismatch_kl: mean("mismatch.kl"),
        rho_max: largest("mismatch.rho_max"),
        clipped: mean("clip_fraction_upper")
            .zip(mean("clip_fraction_lower"))
            .map(|(upper, lower)| upper + lower),
        rollout_tokens_per_s: per_second("timing.rollout"),
        rollout_speedup: run.summary.get("rollout_speed").and_then(|speed| {
            Some(speed.get("tokens_per_s")?.as_f64()? / speed.get("bf16_tokens_per_s")?.as_f64()?)
        }),
        training_tokens_per_s: per_second("timing.update"),
        seconds: steps.values("timing.total").next().map(|_| sum("timing.total")),
        updates: sum("updates"),
        skipped_updates: sum("skipped_updates"),
        supervised: Supervised::of_run(run),
        warm_start: Supervised::of_warm_start(run),
    }
}

/// The column that scores are in: Avg@k where it is measured, else the accuracy of greedy responses.
fn score_column(run: &RunData) -> (&'static str, &'static str) {
    match run.steps.values("test_avg_at_k").next() {
        Some(_) => ("test_avg_at_k", "avg_at_k_before"),
        None => ("test_accuracy", "accuracy_before"),
    }
}

fn best(run: &RunData) -> Option<BestSeen> {
    let (column, before) = score_column(run);
    let start = run.summary.get(before).and_then(Value::as_f64).map(|score| (0, score));
    BestSeen::of(start.into_iter().chain(run.steps.numbered(column)))
}

/// What a reader should see before anything else: training that broke, accuracy that has collapsed from its
/// best.
pub fn alarms(run: &RunData) -> Vec<String> {
    let noted = |path: &str| run.summary.get(path).and_then(Value::as_str).map(str::to_string);
    let mut alarms: Vec<String> = noted("broken").into_iter().collect();
    let (column, _) = score_column(run);
    let last = run.steps.numbered(column).last();
    let problems = run.setting("run.test_problems").and_then(|n| n.parse().ok()).unwrap_or(FEW_PROBLEMS);
    let collapsed = best(run).zip(last).filter(|(best, (_, last))| best.collapsed_to(*last, problems));
    if let Some((best, (step, last))) = collapsed {
        let what = if column == "test_avg_at_k" { "Avg@k" } else { "Held-out accuracy" };
        let (score, at) = (100.0 * best.score, best.step);
        let when = if at == 0 { "before the first step".to_string() } else { format!("after step {at}") };
        let kept = run.summary.get("best").and_then(|best| best.get("model")).and_then(Value::as_str);
        let kept = kept.map_or(String::new(), |model| format!(" The best model is in {model}."));
        let last = 100.0 * last;
        alarms.push(format!(
            "{what} has collapsed: from its best, {score:.1}% {when}, to {last:.1}% after step {step}.{kept}"
        ));
    }
    alarms
}

fn mean_of(values: impl Iterator<Item = f64> + Clone) -> Option<f64> {
    let count = values.clone().count();
    (count > 0).then(|| values.sum::<f64>() / count as f64)
}

/// What ran: model, task, format, algorithm, device.
pub fn facts(run: &RunData) -> Vec<String> {
    let get = |key: &str| run.setting(key);
    let mut facts = Vec::new();
    let model = get("model.path").or(get("model.new.family"));
    let size = run.summary.get("parameters").and_then(Value::as_f64).map(|n| match n {
        n if n >= 1e9 => format!("{:.1}B parameters", n / 1e9),
        n if n >= 1e6 => format!("{:.0}M parameters", n / 1e6),
        n => format!("{:.0}k parameters", n / 1e3),
    });
    facts.extend(join([model.map(str::to_string), size], ", "));
    facts.extend((run.kind() == Kind::Sft).then(|| "supervised".to_string()));
    let level = get("task.level").map(|level| format!("level {level}"));
    facts.extend(join([get("task.kind").or(get("task.type")).map(str::to_string), level], " "));
    facts.extend(get("rollout.format").map(|format| format!("{format} rollout")));
    let method = [get("algorithm.adv_estimator.type"), get("algorithm.objective.type")];
    facts.extend(join(method.map(|name| name.map(str::to_uppercase)), " with "));
    facts.extend(get("rollout.uaq").filter(|s| s.parse() != Ok(1.0)).map(|s| format!("UAQ {s}")));
    facts.extend(get("trainer.seed").map(|seed| format!("seed {seed}")));
    facts.extend(run.summary.get("device").and_then(Value::as_str).map(str::to_string));
    facts
}

fn join(parts: [Option<String>; 2], between: &str) -> Option<String> {
    let there: Vec<String> = parts.into_iter().flatten().collect();
    (!there.is_empty()).then(|| there.join(between))
}
