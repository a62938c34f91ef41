//! Ctrl-C: the first asks a run to finish its step and save, the second ends the process at once.
//!
//! The handlers only set flags. A run looks at [`Stop::requested`] between steps. SIGUSR1 asks as Ctrl-C
//! does: `mpirun` hands it on to its ranks, and schedulers can send it before a time limit. Requests to end
//! that do not come from the keyboard (SIGTERM, as schedulers send it; SIGHUP, when a terminal or a
//! connection is gone) are in more of a hurry: they also set [`Stop::at_once`], which the wait for a reward
//! command's scores looks at.

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Whether a stop was requested.
pub struct Stop {
    requested: Arc<AtomicBool>,
    at_once: Arc<AtomicBool>,
    signal: Arc<AtomicUsize>,
}

impl Stop {
    /// Watches from now on.
    pub fn watch() -> anyhow::Result<Stop> {
        let stop = Stop { requested: Arc::default(), at_once: Arc::default(), signal: Arc::default() };
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGUSR1] {
            if signal == SIGHUP && is_ignored(signal) {
                continue; // started with nohup: the run is to outlive its terminal
            }
            // In this order: the first signal finds the flag unset and sets it, the second finds it set and
            // ends us.
            flag::register_conditional_shutdown(signal, 128 + signal, stop.requested.clone())
                .and_then(|_| flag::register_usize(signal, stop.signal.clone(), signal as usize))
                .and_then(|_| flag::register(signal, stop.requested.clone()))
                .context("watching for Ctrl-C")?;
            if signal == SIGTERM || signal == SIGHUP {
                flag::register(signal, stop.at_once.clone()).context("watching for SIGTERM and SIGHUP")?;
            }
        }
        Ok(stop)
    }

    /// Whether to stop at the next chance.
    pub fn requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }

    /// Set by the first request.
    pub fn flag(&self) -> Arc<AtomicBool> {
        self.requested.clone()
    }

    /// Set by the signals that do not wait for the end of a step.
    pub fn at_once(&self) -> Arc<AtomicBool> {
        self.at_once.clone()
    }

    /// The error that ends the command, with the status that a shell expects.
    pub fn error(&self, message: String) -> anyhow::Error {
        // Nothing was asked of this rank where another one was.
        let signal = match u8::try_from(self.signal.load(Ordering::SeqCst)) {
            Ok(0) | Err(_) => SIGINT as u8,
            Ok(signal) => signal,
        };
        anyhow::Error::new(Stopped { status: 128 + signal, message })
    }
}

/// Whether this process was started with the signal ignored. Linux says so; elsewhere nothing is known.
pub fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

/// The command ended because the user asked for it.
#[derive(Debug)]
pub struct Stopped {
    /// 128 and the signal's number.
    pub status: u8,
    message: String,
}

impl Stopped {
    /// The same without a word, for a rank whose words are another one's, too.
    pub fn silent(&self) -> Stopped {
        Stopped { status: self.status, message: String::new() }
    }
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Stopped {}
