//! What a training run shows while it runs, on standard error.
//!
//! On a terminal a small block of lines is drawn over itself: stage and progress, reward or loss with a
//! sparkline, mismatch, speed, where the time goes. Elsewhere (a pipe, a file, `--json`) a plain line is
//! written every few seconds, and `--quiet` leaves only warnings. What the lines say is made by [`frame`] and
//! [`supervised`], which know nothing of terminals.

mod frame;
mod supervised;

use crate::output::err;
use frame::{Painter, block, plain};
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use qurl_train::ranks::Ranks;
use qurl_train::rl::StepRecord;
use qurl_train::sft::SftRecord;
use std::fmt::Write;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// How often plain lines are written.
const PLAIN_EVERY: Duration = Duration::from_secs(5);
/// How often the clock of the live view moves.
const TICK: Duration = Duration::from_millis(500);

/// How much is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A block that is drawn over itself.
    Live,
    /// Plain lines, not too many.
    Lines,
    /// Warnings only.
    Quiet,
    /// Nothing: rank 0 shows it for all.
    Silent,
}

impl Mode {
    /// The mode that fits the flags and where standard error goes.
    pub fn choose(quiet: bool, json: bool) -> Mode {
        match (quiet, json || !std::io::stderr().is_terminal()) {
            (true, _) => Mode::Quiet,
            (false, true) => Mode::Lines,
            (false, false) => Mode::Live,
        }
    }
}

impl Mode {
    /// The same where several ranks run: the first of them shows it for all.
    pub fn of_rank(ranks: &Ranks, quiet: bool, json: bool) -> Mode {
        if ranks.is_first() { Mode::choose(quiet, json) } else { Mode::Silent }
    }
}

/// The view of one run, from its warm start to its end.
pub struct TrainView {
    mode: Mode,
    stage: Option<Stage>,
    rewards: Vec<f64>,
    losses: Vec<f64>,
    validation_loss: Option<f64>,
    accuracy_before: Option<f64>,
    accuracy: Option<f64>,
}

/// A stretch of steps of one kind.
struct Stage {
    bar: Option<ProgressBar>,
    total: u64,
    first: u64,
    began: Instant,
    last_line: Option<Instant>,
}

impl TrainView {
    /// Shows nothing yet.
    pub fn new(mode: Mode) -> TrainView {
        TrainView {
            mode,
            stage: None,
            rewards: Vec::new(),
            losses: Vec::new(),
            validation_loss: None,
            accuracy_before: None,
            accuracy: None,
        }
    }

    /// A remark, above what is drawn; not with `--quiet`.
    pub fn note(&self, text: &str) {
        if self.mode != Mode::Quiet {
            self.warn(text);
        }
    }

    /// A warning, above what is drawn, in every mode but that of other ranks.
    pub fn warn(&self, text: &str) {
        if self.mode == Mode::Silent {
            return;
        }
        match self.stage.as_ref().and_then(|s| s.bar.as_ref()) {
            Some(bar) => bar.suspend(|| err!("{text}")),
            None => err!("{text}"),
        }
    }

    /// A stage begins: `done` of its `total` steps are done already.
    pub fn begin(&mut self, name: &'static str, done: u64, total: u64) {
        self.finish();
        let bar = (self.mode == Mode::Live).then(|| {
            let bar = ProgressBar::new(total).with_style(style(done)).with_position(done).with_prefix(name);
            bar.enable_steady_tick(TICK);
            bar
        });
        self.stage = Some(Stage { bar, total, first: done, began: Instant::now(), last_line: None });
    }

    /// A step of supervised training is done, of a run or of a warm start.
    pub fn supervised(&mut self, record: &SftRecord) {
        self.losses.push(record.loss);
        self.validation_loss = record.validation_loss.or(self.validation_loss);
        let losses = std::mem::take(&mut self.losses);
        let validation = self.validation_loss;
        let live = |painter| supervised::block(record, &losses, validation, painter);
        self.show(record.step, live, || supervised::plain(record));
        self.losses = losses;
    }

    /// Held-out accuracy was measured: before the first step, or after one.
    pub fn evaluated(&mut self, accuracy: f64) {
        if self.accuracy_before.is_none() {
            self.accuracy_before = Some(accuracy);
        }
        self.accuracy = Some(accuracy);
    }

    /// A step of reinforcement learning is done.
    pub fn step(&mut self, record: &StepRecord) {
        self.rewards.push(record.reward);
        if let Some(accuracy) = record.test_accuracy {
            self.evaluated(accuracy);
        }
        let rewards = std::mem::take(&mut self.rewards);
        let accuracy = self.accuracy_before.zip(self.accuracy);
        self.show(record.step, |painter| block(record, &rewards, accuracy, painter), || plain(record));
        self.rewards = rewards;
    }

    fn show(&mut self, step: u64, live: impl FnOnce(Painter) -> String, line: impl FnOnce() -> String) {
        let Some(stage) = &mut self.stage else { return };
        if let Some(bar) = &stage.bar {
            bar.set_message(live(Painter::for_terminal()));
            bar.set_position(step);
            return;
        }
        let due = stage.last_line.is_none_or(|at| at.elapsed() >= PLAIN_EVERY) || step == stage.total;
        if self.mode == Mode::Lines && due {
            stage.last_line = Some(Instant::now());
            let left = time_left(
                stage.began.elapsed(),
                step - stage.first.min(step),
                stage.total - step.min(stage.total),
            );
            let left = left.map_or(String::new(), |left| format!("  {} left", clock(left)));
            err!("{step}/{}  {}{left}", stage.total, line());
        }
    }

    /// The stage is over; what it showed last stays.
    pub fn finish(&mut self) {
        if let Some(bar) = self.stage.take().and_then(|stage| stage.bar) {
            bar.abandon();
        }
    }
}

impl Drop for TrainView {
    fn drop(&mut self) {
        self.finish();
    }
}

/// One line of progress, then whatever the message holds.
fn style(first: u64) -> ProgressStyle {
    let template = "{prefix:10} {bar:32.cyan/dim} {pos}/{len}  {elapsed} elapsed{left}{msg}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let left = move |state: &ProgressState, out: &mut dyn Write| {
        let (done, total) = (state.pos(), state.len().unwrap_or(0));
        if let Some(left) = time_left(state.elapsed(), done.saturating_sub(first), total.saturating_sub(done))
        {
            // A view that cannot be written to has nowhere to complain.
            _ = write!(out, ", {} left", clock(left));
        }
    };
    style.with_key("left", left).progress_chars("━╸─")
}

/// How long `left` more steps take, judged by those done in `elapsed`.
fn time_left(elapsed: Duration, done: u64, left: u64) -> Option<Duration> {
    (done > 0 && left > 0).then(|| elapsed.mul_f64(left as f64 / done as f64))
}

/// A time in the unit that fits.
fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quiet_beats_everything_and_json_wants_plain_lines() {
        assert_eq!(Mode::choose(true, false), Mode::Quiet);
        assert_eq!(Mode::choose(true, true), Mode::Quiet);
        assert_eq!(Mode::choose(false, true), Mode::Lines);
    }

    #[test]
    fn the_time_left_follows_the_steps_of_this_process() {
        let ten = Duration::from_secs(10);
        assert_eq!(time_left(ten, 5, 15), Some(Duration::from_secs(30)));
        assert_eq!(time_left(ten, 0, 15), None, "nothing to judge by");
        assert_eq!(time_left(ten, 5, 0), None, "nothing left");
        assert_eq!(clock(Duration::from_secs(59)), "59s");
        assert_eq!(clock(Duration::from_secs(61)), "1m01s");
        assert_eq!(clock(Duration::from_secs(3 * 3600 + 7 * 60)), "3h07m");
    }
}
