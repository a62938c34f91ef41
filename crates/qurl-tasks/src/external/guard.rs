//! A small process between a run and its reward command that ends everything the command started, however the
//! run ends.
//!
//! A run that is killed cannot clean up after itself, and a command may have started helpers that left its
//! process group. So a program (here `qurl reward-guard`) starts the command with its own input and output,
//! and watches: its input is a pipe whose other end only the run holds, so that it closes when the run ends,
//! be it by SIGKILL. On Linux the guard is the subreaper of its descendants: orphans become its children, and
//! nothing that the command started gets out of its sight. Elsewhere it ends its process group.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, wait};
use std::io;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a command may take to end after the end of its input, and then after being asked to (SIGTERM).
const GRACE: Duration = Duration::from_secs(1);
/// How long processes that were killed are waited for.
const KILLED: Duration = Duration::from_secs(3);
/// How often an end is looked for.
const TICK: Duration = Duration::from_millis(10);

/// Starts the command and waits until it ends, the guard's input is closed or `end` is set; then ends all
/// descendants. Returns the command's exit status as shells give it (128 and the signal's number where a
/// signal ended it).
pub fn run(command: &[String], end: &AtomicBool) -> io::Result<u8> {
    let [program, arguments @ ..] = command else { return Err(io::ErrorKind::InvalidInput.into()) };
    #[cfg(target_os = "linux")]
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let child = Command::new(program).args(arguments).spawn()?;
    let mut family = Family { command: Pid::from_child(&child), status: None };
    let told = || end.load(Ordering::SeqCst);
    while !family.has_ended() && !told() && !input_closes_within(TICK) {}
    // The command sees the end of its input, too.
    let deadline = Instant::now() + GRACE;
    while !family.has_ended() && !told() && Instant::now() < deadline {
        std::thread::sleep(TICK);
    }
    family.end();
    Ok(family.status.map_or(1, |status| {
        let code = status.exit_status().or(status.terminating_signal().map(|signal| 128 + signal));
        code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
    }))
}

/// Whether the other end of standard input is closed, looked for until `limit` has passed. Nothing is read:
/// what is there is for the command, and a command that does not read it must not hide the end.
fn input_closes_within(limit: Duration) -> bool {
    let stdin = io::stdin();
    let mut watched = [PollFd::new(&stdin, PollFlags::empty())];
    let limit = Timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
    // An interrupted wait is looked at again by the caller.
    poll(&mut watched, Some(&limit)).is_ok() && !watched[0].revents().is_empty()
}

/// The command and everything it started.
struct Family {
    command: Pid,
    /// How the command ended.
    status: Option<WaitStatus>,
}

impl Family {
    /// Whether the command has ended. Collects the statuses of all children that did, adopted ones too.
    fn has_ended(&mut self) -> bool {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            if pid == self.command {
                self.status = Some(status);
            }
        }
        self.status.is_some()
    }

    /// Asks all descendants to end, and kills those that do not.
    #[cfg(target_os = "linux")]
    fn end(&mut self) {
        self.signal_until_gone(Signal::TERM, GRACE, false);
        self.signal_until_gone(Signal::KILL, KILLED, true);
    }

    /// Signals all descendants once, or again and again, since they may be starting others.
    #[cfg(target_os = "linux")]
    fn signal_until_gone(&mut self, signal: Signal, limit: Duration, again: bool) {
        let deadline = Instant::now() + limit;
        for round in 0.. {
            self.has_ended();
            let left = descendants();
            if left.is_empty() || Instant::now() >= deadline {
                return;
            }
            if again || round == 0 {
                for pid in left {
                    let _ = kill_process(pid, signal); // one that ended in between needs none
                }
            }
            std::thread::sleep(TICK);
        }
    }

    /// Ends the process group. Where the run still lives, it does that itself when this process has ended.
    #[cfg(not(target_os = "linux"))]
    fn end(&mut self) {
        if !self.has_ended() {
            let _ = kill_process(self.command, Signal::TERM);
            let deadline = Instant::now() + KILLED;
            while !self.has_ended() && Instant::now() < deadline {
                std::thread::sleep(TICK);
            }
            let _ = rustix::process::kill_current_process_group(Signal::KILL);
        }
    }
}

/// All living descendants of this process, by the parents that `/proc` tells.
#[cfg(target_os = "linux")]
fn descendants() -> Vec<Pid> {
    let mut parents: Vec<(i32, i32)> = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // One that ended in between has no line any more.
        let Ok(line) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        parents.extend(living_parent(&line).map(|parent| (pid, parent)));
    }
    let mut family = vec![rustix::process::getpid().as_raw_nonzero().get()];
    let mut next = 0;
    while let Some(&parent) = family.get(next) {
        family.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid));
        next += 1;
    }
    family.into_iter().skip(1).filter_map(Pid::from_raw).collect()
}

/// The parent's number in a line of `/proc/PID/stat` (`PID (name) state parent ...`), unless the process has
/// ended.
#[cfg(target_os = "linux")]
fn living_parent(line: &str) -> Option<i32> {
    let (_, after_name) = line.rsplit_once(')')?; // the name may hold anything
    let mut fields = after_name.split_whitespace();
    let state = fields.next()?;
    fields.next()?.parse().ok().filter(|_| !matches!(state, "Z" | "X"))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn parents_are_read_whatever_the_name() {
        assert_eq!(living_parent("12 (sh) S 7 12 12 0 -1"), Some(7));
        assert_eq!(living_parent("12 (a) Z 9) R 7 12 12"), Some(7));
        assert_eq!(living_parent("12 (sh) Z 7 12 12"), None);
        assert_eq!(living_parent("12 (sh"), None);
    }
}
