//! What a comparison says: a line for each method over all seeds, as JSON and as a table in Markdown.

use qurl_train::compare::{Method, RunFigures, Spread};
use serde::Serialize;

/// `compare.json`.
#[derive(Serialize)]
pub struct Document {
    pub recipe: String,
    pub format: String,
    pub device: String,
    pub seeds: Vec<u64>,
    pub steps: u64,
    pub test_k: usize,
    pub accuracy_before: Spread,
    pub rows: Vec<Row>,
    pub report: String,
    pub run: String,
}

/// A line of the table: a method over all seeds.
#[derive(Serialize)]
pub struct Row {
    method: String,
    title: String,
    accuracy_final: Spread,
    /// By Avg@k where `run.test_k` asks for it, the start included.
    accuracy_best: Spread,
    /// Mean accuracy of `run.test_k` samples at the end, where measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    avg_at_k_final: Option<Spread>,
    mismatch_kl: Spread,
    mismatch_kl_max: f64,
    rho_max: f64,
    clip_fraction: Spread,
    rollout_tokens_per_s: Spread,
    /// Against the full-precision rollout of the same comparison, where there is one.
    speed_up: Option<f64>,
    runs: Vec<RunFigures>,
}

/// The lines of the table, from the figures of each method's runs.
pub fn rows(methods: &[Method], figures: Vec<Vec<RunFigures>>) -> Vec<Row> {
    let speed = |runs: &[RunFigures]| Spread::of(runs.iter().map(RunFigures::tokens_per_s));
    let full = methods.iter().position(|m| *m == Method::Full).map(|i| speed(&figures[i]).mean);
    let row = |(method, runs): (&Method, Vec<RunFigures>)| {
        let spread = |f: fn(&RunFigures) -> f64| Spread::of(runs.iter().map(f));
        let largest = |f: fn(&RunFigures) -> f64| runs.iter().map(f).fold(f64::NEG_INFINITY, f64::max);
        Row {
            method: method.name(),
            title: method.title(),
            accuracy_final: spread(|r| r.accuracy_final),
            accuracy_best: spread(|r| r.accuracy_best),
            avg_at_k_final: runs
                .iter()
                .all(|r| r.avg_at_k_final.is_some())
                .then(|| Spread::of(runs.iter().filter_map(|r| r.avg_at_k_final))),
            mismatch_kl: spread(|r| r.mismatch_kl),
            mismatch_kl_max: largest(|r| r.mismatch_kl_max),
            rho_max: largest(|r| r.rho_max),
            clip_fraction: spread(|r| r.clip_fraction),
            rollout_tokens_per_s: speed(&runs),
            speed_up: full.map(|full| speed(&runs).mean / full),
            runs,
        }
    };
    methods.iter().zip(figures).map(row).collect()
}

/// The table, in Markdown.
pub fn table(document: &Document) -> String {
    // One seed says nothing about the spread of seeds.
    let percent = |s: Spread| match document.seeds.len() {
        1 => format!("{:.1}", 100.0 * s.mean),
        _ => format!("{:.1} ± {:.1}", 100.0 * s.mean, 100.0 * s.deviation),
    };
    let mut text = format!(
        "{} rollouts, {} steps, {} seeds; held-out accuracy before: {}%\n\n",
        document.format,
        document.steps,
        document.seeds.len(),
        percent(document.accuracy_before)
    );
    let k = document.test_k;
    let (title, rule) = if k > 0 { (format!(" Avg@{k} % |"), "---|") } else { (String::new(), "") };
    let best = if k > 0 { format!("best Avg@{k} %") } else { "best %".to_string() };
    text += &format!(
        "| method | final % | {best} |{title} mismatch KL | its maximum | max rho | clipped % | \
         rollout tokens/s | speed-up |\n\
         |---|---|---|{rule}---|---|---|---|---|---|\n"
    );
    for row in &document.rows {
        let speed_up = row.speed_up.map_or("-".to_string(), |x| format!("{x:.2}x"));
        let avg_at_k = row.avg_at_k_final.map_or(String::new(), |spread| format!(" {} |", percent(spread)));
        let broken: Vec<String> = row.runs.iter().filter_map(|r| Some(r.broken_at?.to_string())).collect();
        let broken = match broken.len() {
            0 => String::new(),
            _ => format!(" (broke at step {})", broken.join(", ")),
        };
        text += &format!(
            "| {}{broken} | {} | {} |{avg_at_k} {:.1e} | {:.1e} | {:.3} | {:.2} | {:.0} | {speed_up} |\n",
            row.title,
            percent(row.accuracy_final),
            percent(row.accuracy_best),
            row.mismatch_kl.mean,
            row.mismatch_kl_max,
            row.rho_max,
            100.0 * row.clip_fraction.mean,
            row.rollout_tokens_per_s.mean,
        );
    }
    text + &format!("\ncurves: {}\n", document.report)
}
