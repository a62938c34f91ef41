//! The lines of the terminal view, as text.
//!
//! Rows have a dim name in a fixed column and figures after it, short enough for 80 columns. Colours are few
//! and say nothing that the figures do not say; `NO_COLOR` turns them off.

use qurl_train::rl::StepRecord;
use std::collections::BTreeMap;

const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Width of the sparkline.
pub(super) const SPARK: usize = 24;

/// Writes colours, or leaves them out.
#[derive(Clone, Copy)]
pub struct Painter {
    coloured: bool,
}

impl Painter {
    /// Coloured unless `NO_COLOR` is set.
    pub fn for_terminal() -> Painter {
        Painter { coloured: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) }
    }

    /// Without colours.
    #[cfg(test)]
    pub fn plain() -> Painter {
        Painter { coloured: false }
    }

    pub(super) fn paint(self, code: &str, text: &str) -> String {
        if self.coloured { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() }
    }

    pub(super) fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    pub(super) fn strong(self, text: &str) -> String {
        self.paint("1", text)
    }

    /// A row with its name in front.
    pub fn row(self, name: &str, figures: &str) -> String {
        format!("{} {figures}", self.dim(&format!("{name:10}")))
    }
}

/// The rows below the progress bar after a step; `accuracy` is held-out accuracy before the run and now.
pub fn block(record: &StepRecord, rewards: &[f64], accuracy: Option<(f64, f64)>, painter: Painter) -> String {
    let mut rows = vec![String::new()];
    let spark = painter.paint("36", &sparkline(rewards, SPARK));
    let held_out = accuracy.map_or(String::new(), |(before, now)| {
        let now = painter.strong(&format!("{:.1}%", 100.0 * now));
        format!("  {} {:.1}% {} {now}", painter.dim("held-out accuracy"), 100.0 * before, painter.dim("->"))
    });
    rows.push(
        painter.row(
            "reward",
            &format!("{}  {spark}{held_out}", painter.strong(&format!("{:.3}", record.reward))),
        ),
    );
    if let Some(mismatch) = &record.mismatch {
        let figures = format!(
            "KL {:.1e}  {} {:.2}  {} {:.2}% + {:.2}%",
            mismatch.kl,
            painter.dim("max rho"),
            mismatch.rho_max,
            painter.dim("clipped"),
            100.0 * record.clip_fraction_upper,
            100.0 * record.clip_fraction_lower,
        );
        rows.push(painter.row("mismatch", &figures));
    }
    let (rollout, training) = (record.rollout_tokens_per_s(), record.training_tokens_per_s());
    let speed = format!(
        "{} {} tokens/s  {} {} tokens/s",
        painter.dim("rollout"),
        thousands(rollout),
        painter.dim("training"),
        thousands(training)
    );
    rows.push(painter.row("speed", &speed));
    rows.push(painter.row("time", &phase_shares(&record.timing, painter)));
    rows.join("\n")
}

/// A step on one plain line.
pub fn plain(record: &StepRecord) -> String {
    let mismatch =
        record.mismatch.map_or(String::new(), |m| format!("  KL {:.1e}  max rho {:.2}", m.kl, m.rho_max));
    let test =
        record.test_accuracy.map_or(String::new(), |a| format!("  held-out accuracy {:.1}%", 100.0 * a));
    format!(
        "reward {:.3}  accuracy {:.1}%{mismatch}  rollout {} training {} tokens/s{test}",
        record.reward,
        100.0 * record.accuracy,
        thousands(record.rollout_tokens_per_s()),
        thousands(record.training_tokens_per_s())
    )
}

/// The phases with at least one percent of the step, largest first.
pub(super) fn phase_shares(timing: &BTreeMap<String, f64>, painter: Painter) -> String {
    let total = timing.get("total").copied().unwrap_or(0.0);
    let mut phases: Vec<(&str, f64)> = timing
        .iter()
        .filter(|(name, _)| *name != "total")
        .map(|(name, seconds)| (name.as_str(), seconds / total))
        .filter(|(_, share)| *share >= 0.01)
        .collect();
    phases.sort_by(|a, b| b.1.total_cmp(&a.1));
    phases.truncate(5);
    let shares: Vec<String> =
        phases.iter().map(|(name, share)| format!("{} {:.0}%", painter.dim(name), 100.0 * share)).collect();
    shares.join("  ")
}

/// All values in at most `width` characters, each the mean of its stretch, from the smallest to the largest.
pub(super) fn sparkline(values: &[f64], width: usize) -> String {
    let finite: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
    let cells = finite.len().min(width);
    let means: Vec<f64> = (0..cells)
        .map(|i| {
            let stretch = &finite[i * finite.len() / cells..(i + 1) * finite.len() / cells];
            stretch.iter().sum::<f64>() / stretch.len() as f64
        })
        .collect();
    let low = means.iter().copied().fold(f64::INFINITY, f64::min);
    let high = means.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let level = |v: f64| if high > low { ((v - low) / (high - low) * 7.0).round() as usize } else { 0 };
    means.iter().map(|&v| BARS[level(v).min(7)]).collect()
}

/// A count in three digits or so.
pub(super) fn thousands(count: f64) -> String {
    match count {
        n if !n.is_finite() => "-".to_string(),
        n if n >= 99_950.0 => format!("{:.0}k", n / 1e3),
        n if n >= 1_000.0 => format!("{:.1}k", n / 1e3),
        n => format!("{n:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qurl_train::rl::{RolloutBatch, Sampled};

    const PLAIN: Painter = Painter { coloured: false };

    fn record() -> StepRecord {
        let mut record = StepRecord::new(3, &[], &RolloutBatch::default(), Sampled::default(), 0.5);
        (record.reward, record.accuracy) = (0.412, 0.375);
        record.response_tokens = 12_000;
        let timing =
            [("rollout", 0.1), ("update", 0.5), ("score", 0.399), ("measure", 0.001), ("total", 1.0)];
        record.timing = timing.map(|(name, s)| (name.to_string(), s)).into();
        record
    }

    #[test]
    fn a_frame_holds_reward_speed_and_shares() {
        let text = block(&record(), &[0.0, 0.5, 1.0], Some((0.175, 0.63)), PLAIN);
        let rows: Vec<&str> = text.lines().collect();
        assert_eq!(rows[1], "reward     0.412  ▁▅█  held-out accuracy 17.5% -> 63.0%");
        assert_eq!(rows[2], "speed      rollout 120k tokens/s  training 24.0k tokens/s");
        assert_eq!(rows[3], "time       update 50%  score 40%  rollout 10%");
        assert!(rows.iter().all(|row| row.chars().count() <= 80));
    }

    #[test]
    fn colours_surround_the_same_text() {
        let coloured = block(&record(), &[0.1], None, Painter { coloured: true });
        let mut stripped = String::new();
        for part in coloured.split('\x1b') {
            stripped.push_str(
                part.split_once('m').filter(|(code, _)| code.starts_with('[')).map_or(part, |p| p.1),
            );
        }
        assert_eq!(stripped, block(&record(), &[0.1], None, PLAIN));
    }

    #[test]
    fn a_plain_line_says_the_same() {
        assert_eq!(plain(&record()), "reward 0.412  accuracy 37.5%  rollout 120k training 24.0k tokens/s");
    }

    #[test]
    fn sparklines_stretch_over_the_run() {
        assert_eq!(sparkline(&[], 4), "");
        assert_eq!(sparkline(&[1.0, 1.0], 4), "▁▁");
        assert_eq!(sparkline(&[0.0, f64::NAN, 7.0], 4), "▁█");
        assert_eq!(sparkline(&[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 7.0, 7.0], 4), "▁▂▃█");
        assert_eq!(
            sparkline(&(0..100).map(f64::from).collect::<Vec<_>>(), 8),
            BARS.iter().collect::<String>()
        );
    }

    #[test]
    fn counts_are_short() {
        let texts = [999.4, 1_000.0, 99_940.0, 110_324.0, f64::NAN].map(thousands);
        assert_eq!(texts, ["999", "1.0k", "99.9k", "110k", "-"]);
    }
}
