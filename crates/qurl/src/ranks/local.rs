//! `--ranks N`: the ranks of one machine, started by this process.
//!
//! Ranks with GPUs are started here and find each other at a free port of this machine. Ranks on the CPU
//! exchange by MPI, whose processes only its own launcher can start: `mpirun`, with what it needs to run
//! several of them on few cores. Either way this process hands signals on and ends with them.

use super::has_gpus;
use crate::input::bad;
use crate::output::err;
use anyhow::Context;
use qurl_kernels::DeviceKind;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use std::ffi::OsString;
use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long ranks may take to end once one has ended badly.
const GRACE: Duration = Duration::from_secs(10);
/// How often it is looked at the ranks.
const POLL: Duration = Duration::from_millis(30);

/// What `mpirun` has to be told where its ranks share cores: Open MPI 4 and 5 by these variables (as root,
/// too, as in a container); others do not look at them.
const MPI_VARIABLES: [(&str, &str); 6] = [
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ("OMPI_MCA_hwloc_base_binding_policy", "none"),
    ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
    ("PRTE_MCA_hwloc_default_binding_policy", "none"),
];

/// The ranks have ended badly, and said why themselves.
#[derive(Debug)]
pub struct Ended {
    status: u8,
    who: String,
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ended with status {}", self.who, self.status)
    }
}

impl std::error::Error for Ended {}

/// The exit status of ranks that have ended badly.
pub fn status(error: &anyhow::Error) -> u8 {
    error.downcast_ref::<Ended>().map_or(1, |ended| ended.status)
}

/// Starts so many ranks of this very command and waits for them.
pub fn start(ranks: usize, device: DeviceKind) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("finding this program")?;
    let arguments = without_ranks(std::env::args_os().skip(1));
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGINT, SIGTERM, SIGHUP, SIGUSR1] {
        signal_hook::flag::register_usize(number, signal.clone(), number as usize)
            .context("watching for signals")?;
    }
    let children = match has_gpus(device) {
        true => gpu_ranks(&program, &arguments, ranks)?,
        false => vec![cpu_ranks(&program, &arguments, ranks)?],
    };
    wait(children, &signal)
}

/// A process that was started: a rank, or the launcher of all.
struct Started {
    child: Child,
    who: String,
    /// What it is sent in place of the first signal to end; the second one is passed as it is.
    asks_by: Option<Signal>,
    ended: Option<ExitStatus>,
}

fn gpu_ranks(
    program: &std::path::Path,
    arguments: &[OsString],
    ranks: usize,
) -> anyhow::Result<Vec<Started>> {
    let port = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .context("finding a free port for the ranks")?
        .port();
    let mut started: Vec<Started> = Vec::new();
    for rank in 0..ranks {
        let mut command = Command::new(program);
        command.args(arguments).process_group(0);
        for (name, value) in
            [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks)]
        {
            command.env(name, value.to_string());
        }
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.env_remove("TORCHELASTIC_USE_AGENT_STORE").env_remove("QURL_PORT");
        if rank > 0 {
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        }
        let child = command.spawn().with_context(|| format!("starting rank {rank}"));
        let mut child = match child {
            Ok(child) => child,
            Err(error) => {
                started.iter_mut().for_each(|started| end(&started.child, Signal::KILL));
                return Err(error);
            }
        };
        if let Some(stderr) = child.stderr.take() {
            std::thread::spawn(move || prefix(rank, stderr));
        }
        started.push(Started { child, who: format!("rank {rank} of {ranks}"), asks_by: None, ended: None });
    }
    Ok(started)
}

fn cpu_ranks(program: &std::path::Path, arguments: &[OsString], ranks: usize) -> anyhow::Result<Started> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let Some(mpirun) = std::env::split_paths(&path).map(|folder| folder.join("mpirun")).find(|p| p.is_file())
    else {
        return Err(bad(format!(
            "--ranks {ranks}: ranks that compute on the CPU are started by mpirun, and there is none on the \
             path: install Open MPI or MPICH (Debian: openmpi-bin), or compute on GPUs"
        )));
    };
    let mut command = Command::new(&mpirun);
    command.args(["-n", &ranks.to_string()]).arg(program).args(arguments).process_group(0);
    for (name, value) in MPI_VARIABLES {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
    let child = command.spawn().with_context(|| format!("starting {}", mpirun.display()))?;
    // At SIGINT mpirun kills its ranks; this one it hands on.
    let asks_by = Some(Signal::USR1);
    Ok(Started { child, who: format!("mpirun with {ranks} ranks"), asks_by, ended: None })
}

/// Waits for all, hands signals on, and ends the others where one has ended badly.
fn wait(mut started: Vec<Started>, signal: &AtomicUsize) -> anyhow::Result<()> {
    let mut asked: Option<Signal> = None;
    let mut first_failure: Option<(Instant, Ended)> = None;
    loop {
        if let Some(signal) = Signal::from_named_raw(signal.swap(0, Ordering::SeqCst) as i32) {
            for one in started.iter().filter(|one| one.ended.is_none()) {
                end(&one.child, if asked.is_some() { signal } else { one.asks_by.unwrap_or(signal) });
            }
            asked.get_or_insert(signal);
        }
        for one in started.iter_mut().filter(|one| one.ended.is_none()) {
            let Some(status) = one.child.try_wait().context("waiting for ranks")? else { continue };
            one.ended = Some(status);
            if !status.success() && first_failure.is_none() {
                first_failure = Some((Instant::now(), Ended { status: code(status), who: one.who.clone() }));
            }
        }
        if started.iter().all(|one| one.ended.is_some()) {
            return match first_failure {
                Some((_, ended)) => Err(as_asked(ended, asked).into()),
                None => Ok(()),
            };
        }
        if first_failure.as_ref().is_some_and(|(when, _)| when.elapsed() > GRACE) {
            for one in started.iter().filter(|one| one.ended.is_none()) {
                err!("qurl: {} is still there after {} s and is killed", one.who, GRACE.as_secs());
                end(&one.child, Signal::KILL);
            }
        }
        std::thread::sleep(POLL);
    }
}

/// Ranks that were asked to stop and did: what they were asked by stands for what this process was.
fn as_asked(ended: Ended, asked: Option<Signal>) -> Ended {
    let by_request = [SIGUSR1, SIGINT].map(|signal| 128 + signal as u8).contains(&ended.status);
    match asked {
        Some(signal) if by_request => Ended { status: 128 + signal.as_raw() as u8, ..ended },
        _ => ended,
    }
}

fn end(child: &Child, signal: Signal) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal); // it may have ended by itself
    }
}

/// The exit status as a shell would give it.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

/// Hands on what a rank says, with its number.
fn prefix(rank: usize, stream: impl Read) {
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        err!("[rank {rank}] {line}");
    }
}

/// The arguments of a rank: this command's without `--ranks`.
fn without_ranks(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let (mut kept, mut skip) = (Vec::new(), false);
    for argument in arguments {
        if std::mem::take(&mut skip) {
            continue;
        }
        match argument.to_str() {
            Some("--ranks") => skip = true,
            Some(text) if text.starts_with("--ranks=") => {}
            _ => kept.push(argument),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_has_the_same_arguments_but_one() {
        let cut = |words: &[&str]| -> Vec<String> {
            let kept = without_ranks(words.iter().map(OsString::from));
            kept.into_iter().map(|word| word.to_string_lossy().into_owned()).collect()
        };
        let expected = ["train", "r.toml", "--steps", "3"];
        assert_eq!(cut(&["train", "--ranks", "4", "r.toml", "--steps", "3"]), expected);
        assert_eq!(cut(&["train", "r.toml", "--ranks=4", "--steps", "3"]), expected);
        assert_eq!(cut(&expected), expected);
    }

    /// Programs in place of ranks.
    fn ranks(commands: &[&str]) -> Vec<Started> {
        let start = |(rank, command): (usize, &&str)| {
            let child = Command::new("sh").args(["-c", command]).process_group(0).spawn().expect("a shell");
            Started { child, who: format!("rank {rank}"), asks_by: None, ended: None }
        };
        commands.iter().enumerate().map(start).collect()
    }

    #[test]
    fn the_status_is_that_of_the_first_rank_that_fails() {
        wait(ranks(&["exit 0", "sleep 0.1"]), &AtomicUsize::new(0)).expect("all end well");
        let error = wait(ranks(&["sleep 0.5", "exit 2", "sleep 0.5; exit 3"]), &AtomicUsize::new(0));
        let error = error.expect_err("one fails");
        assert_eq!((status(&error), error.to_string().as_str()), (2, "rank 1 ended with status 2"));
    }

    /// `mpirun` is asked by another signal, and its ranks end with that one's status.
    #[test]
    fn the_status_is_that_of_the_signal_that_came() {
        for (signal, script, expected) in [
            (SIGTERM, "trap 'exit 138' USR1; sleep 60 & wait", 143),
            (SIGHUP, "trap 'exit 130' USR1; sleep 60 & wait", 129),
            (SIGINT, "trap 'exit 1' USR1; sleep 60 & wait", 1),
        ] {
            let mut ranks = ranks(&[script]);
            ranks[0].asks_by = Some(Signal::USR1);
            std::thread::sleep(Duration::from_millis(300)); // until the trap is set
            let ended = wait(ranks, &AtomicUsize::new(signal as usize)).expect_err("asked to stop");
            assert_eq!(i32::from(status(&ended)), expected, "{script}");
        }
        assert_eq!(status(&wait(ranks(&["exit 138"]), &AtomicUsize::new(0)).expect_err("by itself")), 138);
    }

    #[test]
    fn signals_are_handed_on() {
        let error = wait(ranks(&["sleep 60", "sleep 60"]), &AtomicUsize::new(SIGTERM as usize));
        assert_eq!(status(&error.expect_err("ended")), 128 + SIGTERM as u8);
    }
}
