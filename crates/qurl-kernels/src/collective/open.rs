//! How a rank joins its run: over MPI with a CPU. The ranks meet at rank 0 and watch each other from then on.

use super::mpi::Mpi;
use super::rendezvous::{self, Address, Guest, Met};
use super::transport::Transport;
use super::watch::{Limits, Watch};
use super::{Collective, CollectiveError, Launch, Launcher};

/// How a rank joins.
#[derive(Clone, Copy)]
pub struct Join<'a> {
    /// Which rank it is.
    pub launch: &'a Launch,
    /// What all ranks must have in common before anything else: the program and its version.
    pub identity: &'a str,
    /// How long ranks wait for each other.
    pub limits: Limits,
}

impl Collective {
    /// Joins a run of CPU ranks: bytes travel by MPI.
    pub fn mpi(join: Join) -> Result<Collective, CollectiveError> {
        let Launch { rank, size, launcher, .. } = *join.launch;
        if matches!(launcher, Launcher::Torchrun | Launcher::Kubernetes) {
            let reason = format!(
                "{launcher} started rank {rank} of {size}, and ranks that compute on a CPU exchange by MPI, \
                 which it does not provide: start them with mpirun or srun, or with --ranks {size} on one \
                 machine"
            );
            return Err(CollectiveError::Library { library: "MPI".to_string(), reason });
        }
        let ranks = Collective::over(rank, size, Transport::Mpi(Mpi::join(rank, size)?));
        let met = ranks.meet_by_mpi(&join)?;
        ranks.watched(met, join.limits)
    }

    /// Meets the others where rank 0 says by an exchange.
    fn meet_by_mpi(&self, join: &Join) -> Result<Met, CollectiveError> {
        let guest = Guest { rank: self.rank, size: self.size, identity: join.identity };
        let here = host_name();
        if self.rank == 0 {
            let listener = rendezvous::listen(&Address { host: here.clone(), port: 0 })?;
            let at = listener.local_addr().map_err(|e| failed(e.to_string()))?;
            self.broadcast_bytes(0, format!("{} {here}", at.port()).into_bytes())?;
            return rendezvous::receive_all(&listener, guest, &[], join.limits.meeting);
        }
        let told = self.broadcast_bytes(0, Vec::new())?;
        let told = String::from_utf8_lossy(&told);
        let address = told.split_once(' ').and_then(|(port, host)| Some((port.parse().ok()?, host)));
        let Some((port, host)) = address else { return Err(failed(format!("rank 0 says {told:?}"))) };
        // Names of machines may have no address on the machine itself.
        let host = if host == here { "127.0.0.1".to_string() } else { host.to_string() };
        rendezvous::come(&Address { host, port }, guest, join.limits.meeting)
    }

    fn watched(mut self, met: Met, limits: Limits) -> Result<Collective, CollectiveError> {
        let watch = Watch::begin(self.rank, self.size, met, limits);
        self.watch = Some(watch.map_err(|e| failed(e.to_string()))?);
        // Nobody is past this before everyone watches.
        self.barrier()?;
        Ok(self)
    }

    /// What moves the bytes, for people.
    pub fn description(&self) -> String {
        let by = match &self.transport {
            Transport::Alone => return "one rank".to_string(),
            Transport::Counted => "nothing: it only counts".to_string(),
            Transport::Threads(_) => "threads".to_string(),
            Transport::Mpi(mpi) => mpi.description(),
        };
        format!("rank {} of {} over {by}", self.rank, self.size)
    }

    /// Ends a run well, on all ranks. A rank that ends without it is taken for dead by the others.
    pub fn close(&self) -> Result<(), CollectiveError> {
        self.barrier()?;
        if let Some(watch) = &self.watch {
            watch.leave();
        }
        match &self.transport {
            Transport::Alone | Transport::Counted | Transport::Threads(_) => Ok(()),
            Transport::Mpi(mpi) => mpi.finalize(),
        }
    }

    /// Tells the other ranks that this one fails and why: they end with an error that says so.
    pub fn fail(&self, reason: &str) {
        if let Some(watch) = &self.watch {
            watch.fail(reason);
        }
    }
}

/// The machine's name.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "127.0.0.1".to_string(),
        name => name.to_string(),
    }
}

fn failed(reason: String) -> CollectiveError {
    CollectiveError::Failed { what: "meeting the other ranks".to_string(), reason }
}
