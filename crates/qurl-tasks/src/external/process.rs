//! The process of a reward command: its pipes, and its end together with everything that it started.
//!
//! Requests and replies have a thread each, so that a command that stops reading or writing cannot block the
//! trainer. What comes back is bounded twice, in the length of a line and in the number of lines that wait; a
//! command that writes more has to wait itself.

use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant};

/// Longest line that a command may write, in bytes without the line break.
pub const MAX_LINE: usize = 1 << 20;
/// Lines that wait to be read by [`super::ExternalReward::score`].
const MAX_WAITING: usize = 64;
/// Longest part of a line that an error shows, in characters.
const SHOWN: usize = 200;
/// How long a command may take to end once it was told to; the guard needs less.
const KILL_AFTER: Duration = Duration::from_secs(5);
/// How often an end is looked for.
const TICK: Duration = Duration::from_millis(5);

/// What a command wrote. Anything but text is the last thing that is read.
pub(super) enum Line {
    Text(String),
    TooLong(String),
    Unfinished(String),
    NotText(String),
}

/// A command that was started.
pub(super) struct Process {
    child: Child,
    /// Texts of whole batches; closing it closes the command's input.
    pub requests: Option<Sender<String>>,
    /// What the command wrote, line by line; closed where its output ended.
    pub replies: Receiver<Line>,
}

impl Process {
    /// Starts `command` as arguments of `guard`, or by itself where that is empty. Neither is empty at the
    /// same time.
    pub fn start(guard: &[String], command: &[String], directory: Option<&Path>) -> std::io::Result<Process> {
        let [program, arguments @ ..] = command else { return Err(ErrorKind::InvalidInput.into()) };
        if let Some(missing) = directory.filter(|directory| !directory.is_dir()) {
            let what = format!("its directory {} is not there", missing.display());
            return Err(Error::new(ErrorKind::NotFound, what));
        }
        let directory = directory.unwrap_or(Path::new("."));
        let mut ready = match guard {
            [] => Command::new(program),
            [guard, first @ ..] => {
                // The guard starts the command later: what can be said now is said now.
                find_program(program, directory)?;
                let mut ready = Command::new(guard);
                ready.args(first).arg(program);
                ready
            }
        };
        ready.args(arguments).current_dir(directory).stdin(Stdio::piped()).stdout(Stdio::piped());
        // A Ctrl-C at the terminal is for the run, which ends its step first and needs the scores for it.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut ready, 0);
        let mut child = ready.spawn()?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Error::other("its pipes could not be opened"));
        };
        let (requests, batches) = channel();
        let (lines, replies) = sync_channel(MAX_WAITING);
        std::thread::spawn(move || write_batches(stdin, batches));
        std::thread::spawn(move || read_lines(stdout, lines));
        Ok(Process { child, requests: Some(requests), replies })
    }

    /// Closes the command's input and gives it `patience` to end; then ends it, and in any case what is left
    /// of its process group. Says how it ended.
    pub fn stop(&mut self, patience: Duration) -> String {
        self.requests = None;
        let by_itself = self.ends_within(patience);
        if !by_itself {
            self.signal(End::Ask);
            self.ends_within(KILL_AFTER);
        }
        // Before its status is collected: until then nobody else can have its number.
        self.signal(End::Kill);
        match self.child.wait() {
            Ok(status) if by_itself => status.to_string(),
            _ => "stopped".into(),
        }
    }

    fn ends_within(&mut self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while !self.has_ended() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(TICK);
        }
        true
    }

    /// Whether the process has ended; its status stays to be collected.
    #[cfg(unix)]
    fn has_ended(&mut self) -> bool {
        use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        !matches!(waitid(WaitId::Pid(Pid::from_child(&self.child)), options), Ok(None))
    }

    #[cfg(not(unix))]
    fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Signals the whole process group. That fails only where nothing is left of it.
    #[cfg(unix)]
    fn signal(&mut self, end: End) {
        use rustix::process::{Pid, Signal, kill_process_group};
        let signal = match end {
            End::Ask => Signal::TERM,
            End::Kill => Signal::KILL,
        };
        let _ = kill_process_group(Pid::from_child(&self.child), signal);
    }

    #[cfg(not(unix))]
    fn signal(&mut self, _end: End) {
        let _ = self.child.kill();
    }
}

/// How a process is told to end.
#[derive(Clone, Copy)]
enum End {
    Ask,
    Kill,
}

fn write_batches(mut stdin: ChildStdin, batches: Receiver<String>) {
    for batch in batches {
        // A command that no longer reads shows as ended or late on the other side.
        if stdin.write_all(batch.as_bytes()).and_then(|()| stdin.flush()).is_err() {
            return;
        }
    }
}

fn read_lines(stdout: ChildStdout, lines: SyncSender<Line>) {
    let mut stdout = BufReader::new(stdout);
    loop {
        let mut bytes = Vec::new();
        let read = stdout.by_ref().take(MAX_LINE as u64 + 1).read_until(b'\n', &mut bytes);
        if matches!(read, Ok(0) | Err(_)) {
            return;
        }
        let line = line_of(bytes);
        let last = !matches!(line, Line::Text(_));
        if lines.send(line).is_err() || last {
            return;
        }
    }
}

/// A line of at most [`MAX_LINE`] + 1 bytes, the break among them.
fn line_of(mut bytes: Vec<u8>) -> Line {
    if bytes.pop_if(|byte| *byte == b'\n').is_none() {
        let text = String::from_utf8_lossy(&bytes);
        return if bytes.len() > MAX_LINE {
            Line::TooLong(shown(&text))
        } else {
            Line::Unfinished(shown(&text))
        };
    }
    match String::from_utf8(bytes) {
        Ok(text) => Line::Text(text),
        Err(error) => Line::NotText(shown(&String::from_utf8_lossy(error.as_bytes()))),
    }
}

/// The beginning of a line, for an error.
pub(super) fn shown(line: &str) -> String {
    line.chars().take(SHOWN).collect()
}

/// Whether there is a program of this name, as starting it would look for it.
fn find_program(program: &str, directory: &Path) -> std::io::Result<()> {
    let is_program = |path: &Path| {
        let found = path.metadata()?;
        #[cfg(unix)]
        let executable = std::os::unix::fs::PermissionsExt::mode(&found.permissions()) & 0o111 != 0;
        #[cfg(not(unix))]
        let executable = true;
        if found.is_file() && executable { Ok(()) } else { Err(Error::from(ErrorKind::PermissionDenied)) }
    };
    if program.contains('/') {
        return is_program(&directory.join(program));
    }
    let mut outcome = Err(ErrorKind::NotFound.into());
    for directory in std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()) {
        match is_program(&directory.join(program)) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => outcome = Err(error),
            Err(_) => {}
        }
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_bounded_and_whole() {
        let line = |length: usize, end: &str| line_of(format!("{}{end}", "x".repeat(length)).into_bytes());
        assert!(matches!(line(MAX_LINE, "\n"), Line::Text(text) if text.len() == MAX_LINE));
        assert!(matches!(line(MAX_LINE + 1, ""), Line::TooLong(text) if text.len() == SHOWN));
        assert!(matches!(line(3, ""), Line::Unfinished(text) if text == "xxx"));
        assert!(matches!(line_of(vec![b'1', 0xff, b'\n']), Line::NotText(text) if text == "1\u{fffd}"));
        assert!(matches!(line_of(b"0.5\r\n".to_vec()), Line::Text(text) if text == "0.5\r"));
    }
}
