//! Work on things that nobody vouches for, watched from outside: what no limit inside of it catches (a page
//! that unpacks to gigabytes, a text that doubles forty times) shows in the memory of the process or on the
//! clock.
//!
//! The work runs on a thread of its own and hands on what it makes. Whoever takes it gives up when nothing
//! comes although memory grows or time passes. A thread cannot be stopped from outside, so it is left behind:
//! programs end on such an error, and a server looks at such files before it listens.

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use crate::caught;

/// What may pass between two things that are made.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Time.
    pub time: Duration,
    /// Bytes by which the process may grow.
    pub memory: u64,
    /// Bytes of stack that the work has; only what is used becomes memory.
    pub stack: usize,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { time: Duration::from_secs(30), memory: 1 << 30, stack: 8 << 20 }
    }
}

/// Why watched work has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GaveUp(String);

impl std::fmt::Display for GaveUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for GaveUp {}

/// How often memory and clock are looked at.
const LOOK: Duration = Duration::from_millis(20);
/// Things that are made ahead: few, since one can be a row of 64 MiB.
const AHEAD: usize = 8;

/// The result of `work`.
pub fn watched<T: Send + 'static>(
    patience: Patience,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, GaveUp> {
    let mut result = None;
    let take = |made| {
        result = Some(made);
        Ok::<_, GaveUp>(())
    };
    watched_each(patience, move |give| _ = give(work()), take)?;
    result.ok_or_else(|| GaveUp("ended early".to_string()))
}

/// Gives everything that `work` makes to `take`, in order, until that has an error. `give` returns whether
/// more is wanted.
pub fn watched_each<T: Send + 'static, E: From<GaveUp>>(
    patience: Patience,
    work: impl FnOnce(&mut dyn FnMut(T) -> bool) + Send + 'static,
    mut take: impl FnMut(T) -> Result<(), E>,
) -> Result<(), E> {
    let (sender, receiver) = sync_channel(AHEAD);
    let thread = std::thread::Builder::new().name("watched".to_string()).stack_size(patience.stack);
    let spawned = thread.spawn(move || {
        let panic = caught(|| work(&mut |made| sender.send(Ok(made)).is_ok())).err();
        if let Some(panic) = panic {
            let _ = sender.send(Err(GaveUp(format!("its reader failed: {panic}"))));
        }
    });
    spawned.map_err(|error| GaveUp(format!("no thread for it: {error}")))?;
    while let Some(made) = next(&receiver, patience)? {
        take(made?)?;
    }
    Ok(())
}

/// The next thing, or none after the last.
fn next<T>(receiver: &Receiver<T>, patience: Patience) -> Result<Option<T>, GaveUp> {
    let mut before = None;
    loop {
        match receiver.recv_timeout(LOOK) {
            Ok(made) => return Ok(Some(made)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => {}
        }
        // Most things come before the first look.
        let (began, memory) = *before.get_or_insert_with(|| (Instant::now(), resident()));
        if began.elapsed() > patience.time {
            return Err(GaveUp(format!("not done after {:?}", patience.time)));
        }
        let grown = resident().saturating_sub(memory);
        if grown > patience.memory {
            let (grown, allowed) = (grown >> 20, patience.memory >> 20);
            return Err(GaveUp(format!("took {grown} MiB of memory, expected at most {allowed}")));
        }
    }
}

/// Bytes of memory that this process has; 0 where the system does not say.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_end_is_left() {
        assert_eq!(watched(Patience::default(), || 3), Ok(3));
        let patience = Patience { time: Duration::from_millis(30), ..Patience::default() };
        let error = watched(patience, || std::thread::sleep(Duration::from_secs(1))).unwrap_err();
        assert_eq!(error.to_string(), "not done after 30ms");
        let patience = Patience { memory: 1 << 20, ..Patience::default() };
        let error = watched(patience, || {
            let mut grown = Vec::new();
            for _ in 0..50 {
                grown.push(vec![1_u8; 4 << 20]);
                std::thread::sleep(Duration::from_millis(10));
            }
            grown.len()
        });
        assert!(error.unwrap_err().to_string().ends_with("MiB of memory, expected at most 1"));
        let error = watched(Patience::default(), || panic!("no")).unwrap_err();
        assert_eq!(error.to_string(), "its reader failed: no");
    }

    #[test]
    fn things_come_in_order_until_no_more_are_wanted() {
        let mut taken = Vec::new();
        let each = |max: u32, taken: &mut Vec<u32>| {
            watched_each(
                Patience::default(),
                |give| _ = (0..1000).take_while(|&n| give(n)).count(),
                |n| {
                    taken.push(n);
                    if n == max { Err(GaveUp("enough".to_string())) } else { Ok(()) }
                },
            )
        };
        assert_eq!(each(2000, &mut taken), Ok(()));
        assert_eq!(taken, (0..1000).collect::<Vec<_>>());
        taken.clear();
        assert_eq!(each(5, &mut taken), Err(GaveUp("enough".to_string())));
        assert_eq!(taken.len(), 6);
    }
}
