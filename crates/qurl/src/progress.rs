//! Progress of a run on standard error: a bar on a terminal, plain lines otherwise.

use crate::output::{err, printable};
use indicatif::{ProgressBar, ProgressStyle};
use std::cell::Cell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// How often plain lines are written.
const PLAIN_EVERY: Duration = Duration::from_secs(5);

/// Shows the steps of a run.
pub struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    began: Instant,
    last_line: Cell<Option<Instant>>,
}

impl Progress {
    /// For a run of `total` steps; `quiet` shows nothing but plain lines.
    pub fn new(total: u64, quiet: bool) -> Progress {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(total);
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {elapsed} < {eta}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Progress { bar, total, began: Instant::now(), last_line: Cell::new(None) }
    }

    /// Step `step` (from 1) is done.
    pub fn step(&self, step: u64, message: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(printable(message));
            bar.set_position(step);
            return;
        }
        let due = self.last_line.get().is_none_or(|at| at.elapsed() >= PLAIN_EVERY);
        if due || step == self.total {
            self.last_line.set(Some(Instant::now()));
            let left = self.began.elapsed().as_secs_f64() / step as f64 * (self.total - step) as f64;
            err!("{step}/{}  {message}  {left:.0} s left", self.total);
        }
    }

    /// The run is over.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
    }
}
