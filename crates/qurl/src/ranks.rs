//! The ranks of a run, as a command sees them: started by a launcher whose variables say which one this is,
//! or by this program itself with `--ranks` ([`local`]).
//!
//! A rank joins before it does anything that others wait for, and leaves by [`leave`], whatever its outcome:
//! else the others would take it for dead.

mod local;

pub use local::{Ended, start as start_local, status};

use crate::device::{self, Opened};
use crate::input::{OrBad, bad};
use crate::stop::Stopped;
use crate::version;
use anyhow::Context;
use qurl_kernels::collective::{Join, Launch, Limits};
use qurl_kernels::{Collective, Cuda, DeviceKind, cuda};
use std::sync::Arc;

/// The option of commands that ranks can share.
#[derive(clap::Args, Clone, Copy)]
pub struct RanksArg {
    /// Start so many ranks on this machine: with a GPU each, or on the CPU by mpirun. Other launchers
    /// (mpirun, srun, torchrun) start them without it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: Option<u16>,
}

impl RanksArg {
    /// How many ranks this process is to start; an error where a launcher has made it one already.
    pub fn to_start(self) -> anyhow::Result<Option<usize>> {
        let Some(ranks) = self.ranks.filter(|&ranks| ranks > 1) else { return Ok(None) };
        match Launch::from_env().or_bad()? {
            None => Ok(Some(usize::from(ranks))),
            Some(launch) => Err(bad(format!(
                "--ranks {ranks}: {} has started this process as rank {} of {}; leave out one of both",
                launch.launcher, launch.rank, launch.size
            ))),
        }
    }
}

/// A device, and the ranks that compute with theirs.
pub struct Joined {
    /// This rank's device.
    pub device: Opened,
    /// All ranks.
    pub ranks: Arc<Collective>,
}

/// Opens the device of this rank and joins the others; without a launcher it is alone.
pub fn join(device: DeviceKind) -> anyhow::Result<Joined> {
    let Some(launch) = Launch::from_env().or_bad()? else {
        return Ok(Joined { device: device::open(device)?, ranks: Arc::new(Collective::alone()) });
    };
    let identity = format!("qurl {}", version::SHORT);
    let join = Join { launch: &launch, identity: &identity, limits: Limits::from_env().or_bad()? };
    let joining = || format!("joining as rank {} of {}", launch.rank, launch.size);
    if has_gpus(device) {
        let gpus = cuda::found().map_or(0, |found| found.gpus.len());
        let cuda = device::open_gpu(launch.gpu(gpus).or_bad()?).or_bad()?;
        let ranks = Collective::nccl(join, &cuda).with_context(joining)?;
        return Ok(Joined { device: Opened::Cuda(cuda), ranks: Arc::new(ranks) });
    }
    let ranks = Collective::mpi(join).with_context(joining)?;
    let cpu = device::open_cpu(launch.local_size).or_bad()?;
    Ok(Joined { device: Opened::Cpu(cpu), ranks: Arc::new(ranks) })
}

/// Whether ranks compute on GPUs: all of them or none.
fn has_gpus(device: DeviceKind) -> bool {
    match device {
        DeviceKind::Cpu => false,
        DeviceKind::Cuda => true,
        DeviceKind::Auto => Cuda::has_driver() && cuda::found().is_ok_and(|found| !found.gpus.is_empty()),
    }
}

/// Leaves the other ranks: together after a command that ended well or was stopped, else with the reason.
pub fn leave(ranks: &Collective, outcome: anyhow::Result<()>) -> anyhow::Result<()> {
    let orderly = outcome.as_ref().err().is_none_or(|error| error.is::<Stopped>());
    match (orderly, outcome) {
        (true, outcome) => {
            let outcome = outcome.map_err(|error| match error.downcast_ref::<Stopped>() {
                Some(stopped) if ranks.rank() != 0 => stopped.silent().into(), // the first one says it
                _ => error,
            });
            ranks.close().context("leaving the other ranks").and(outcome)
        }
        (false, outcome) => {
            let reason = outcome.as_ref().err().map(crate::input::message).unwrap_or_default();
            ranks.fail(&reason);
            outcome
        }
    }
}

/// Runs an expression with this rank's device, as an `Arc`, and all ranks.
macro_rules! on_ranks {
    ($device:expr, ($opened:ident, $ranks:ident) => $body:expr) => {{
        let $crate::ranks::Joined { device, ranks: $ranks } = $crate::ranks::join($device)?;
        let joined = $ranks.clone();
        let outcome = match device {
            $crate::device::Opened::Cpu(device) => {
                let $opened = std::sync::Arc::new(device);
                $body
            }
            $crate::device::Opened::Cuda(device) => {
                let $opened = std::sync::Arc::new(device);
                $body
            }
        };
        $crate::ranks::leave(&joined, outcome)
    }};
}
pub(crate) use on_ranks;
