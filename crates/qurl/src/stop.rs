//! Ctrl-C: the first asks a run to finish its step and save, the second ends the process at once.
//!
//! The handlers only set flags that the run looks at between steps. A request to terminate (SIGTERM, as schedulers
//! send it) counts the same.

use anyhow::Context;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Whether the user asked to stop.
pub struct Stop {
    asked: Arc<AtomicBool>,
    signal: Arc<AtomicUsize>,
}

impl Stop {
    /// Watches from now on.
    pub fn watch() -> anyhow::Result<Stop> {
        let stop = Stop { asked: Arc::default(), signal: Arc::default() };
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal finds the flag unset and sets it, the second finds it set and ends us.
            flag::register_conditional_shutdown(signal, 128 + signal, stop.asked.clone())
                .and_then(|_| flag::register_usize(signal, stop.signal.clone(), signal as usize))
                .and_then(|_| flag::register(signal, stop.asked.clone()))
                .context("watching for Ctrl-C")?;
        }
        Ok(stop)
    }

    /// Whether to stop at the next chance.
    pub fn asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }

    /// The error that ends the command, with the status that a shell expects.
    pub fn error(&self, message: String) -> anyhow::Error {
        let signal = u8::try_from(self.signal.load(Ordering::SeqCst)).unwrap_or(SIGINT as u8);
        anyhow::Error::new(Stopped { status: 128 + signal, message })
    }
}

/// The command ended because the user asked for it.
#[derive(Debug)]
pub struct Stopped {
    /// 128 and the signal's number.
    pub status: u8,
    message: String,
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Stopped {}
