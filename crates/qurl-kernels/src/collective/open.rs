//! How a rank joins its run: over MPI with a CPU, over NCCL with a GPU. The rendezvous is rank 0; connected
//! to it, the ranks watch each other from then on.

use super::mpi::Mpi;
use super::rendezvous::{self, Address, Guest, Met};
use super::transport::Transport;
use super::watch::{Limits, Watch};
use super::{Collective, CollectiveError, Launch, Launcher};
use crate::cuda::Cuda;
use crate::cuda::nccl::{self, Clique};
use crate::types::DeviceError;

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
        let mpi = Mpi::join(rank, size, join.limits.rendezvous)?;
        let ranks = Collective::over(rank, size, Transport::Mpi(mpi));
        let met = ranks.meet_by_mpi(&join, &[])?;
        let ranks = ranks.watched(met, join.limits)?;
        // Nobody is past this before everyone watches.
        ranks.barrier()?;
        Ok(ranks)
    }

    /// Joins a run of ranks with a GPU each: bytes travel by NCCL. The rendezvous is where the launcher says,
    /// or, where it does not, MPI tells them where.
    pub fn nccl(join: Join, device: &Cuda) -> Result<Collective, DeviceError> {
        let Launch { rank, size, ref address, .. } = *join.launch;
        let limits = join.limits;
        let id = if rank == 0 { nccl::unique_id()? } else { Vec::new() };
        let (job, met) = match address {
            Some(address) => {
                let guest = Guest { rank, size, identity: join.identity };
                let met = match rank {
                    0 => {
                        rendezvous::receive_all(&rendezvous::listen(address)?, guest, &id, limits.rendezvous)?
                    }
                    _ => rendezvous::come(address, guest, limits.rendezvous)?,
                };
                (None, met)
            }
            None => {
                let mpi = Mpi::join(rank, size, limits.rendezvous)?;
                let ranks = Collective::over(rank, size, Transport::Mpi(mpi));
                let met = ranks.meet_by_mpi(&join, &id)?;
                (Some(ranks), met)
            }
        };
        let id = met.gift.clone();
        // From here on a rank that dies is noticed, also while the others wait for it to join the clique.
        let ranks = Collective::over(rank, size, Transport::Alone).watched(met, limits)?;
        let joining = ranks.begin_exchange();
        let clique =
            Clique::join(device, rank, size, &id).inspect_err(|error| ranks.fail(&error.to_string()))?;
        ranks.end_exchange(joining);
        if let Some(watch) = &ranks.watch {
            watch.ask(clique.pulse()).map_err(|e| failed(e.to_string()))?;
        }
        let ranks =
            Collective { transport: Transport::Nccl(Box::new(clique)), job: job.map(Box::new), ..ranks };
        ranks.barrier()?;
        Ok(ranks)
    }

    /// Bytes of a GPU's memory that a rank takes beside what NCCL takes itself.
    pub const fn device_bytes() -> usize {
        Clique::device_bytes()
    }

    /// Joins the rendezvous that rank 0 names by an exchange, and brings its gift.
    fn meet_by_mpi(&self, join: &Join, gift: &[u8]) -> Result<Met, CollectiveError> {
        let guest = Guest { rank: self.rank, size: self.size, identity: join.identity };
        let here = host_name();
        if self.rank == 0 {
            let listener = rendezvous::listen(&Address { host: here.clone(), port: 0 })?;
            let at = listener.local_addr().map_err(|e| failed(e.to_string()))?;
            self.broadcast_bytes(0, format!("{} {here}", at.port()).into_bytes())?;
            return rendezvous::receive_all(&listener, guest, gift, join.limits.rendezvous);
        }
        let told = self.broadcast_bytes(0, Vec::new())?;
        let told = String::from_utf8_lossy(&told);
        let address = told.split_once(' ').and_then(|(port, host)| Some((port.parse().ok()?, host)));
        let Some((port, host)) = address else { return Err(failed(format!("rank 0 says {told:?}"))) };
        // Names of machines may have no address on the machine itself.
        let host = if host == here { "127.0.0.1".to_string() } else { host.to_string() };
        rendezvous::come(&Address { host, port }, guest, join.limits.rendezvous)
    }

    fn watched(mut self, met: Met, limits: Limits) -> Result<Collective, CollectiveError> {
        let watch = Watch::begin(self.rank, self.size, met, limits);
        self.watch = Some(watch.map_err(|e| failed(e.to_string()))?);
        if let Transport::Mpi(mpi) = &mut self.transport {
            mpi.watched();
        }
        Ok(self)
    }

    /// What moves the bytes, for people.
    pub fn description(&self) -> String {
        let by = match &self.transport {
            Transport::Alone => return "one rank".to_string(),
            Transport::Counted => "nothing: it only counts".to_string(),
            Transport::Threads(_) => "threads".to_string(),
            Transport::Mpi(mpi) => mpi.description(),
            Transport::Nccl(clique) => clique.description(),
        };
        format!("rank {} of {} over {by}", self.rank, self.size)
    }

    /// Ends a run well, on all ranks. A rank that ends without it is taken for dead by the others.
    pub fn close(&self) -> Result<(), CollectiveError> {
        self.barrier()?;
        if let Some(watch) = &self.watch {
            watch.leave();
        }
        match (&self.transport, self.job.as_ref().map(|job| &job.transport)) {
            (Transport::Mpi(mpi), _) => mpi.finalize(),
            (Transport::Nccl(clique), Some(Transport::Mpi(mpi))) => clique.close().and(mpi.finalize()),
            (Transport::Nccl(clique), _) => clique.close(),
            (Transport::Alone | Transport::Counted | Transport::Threads(_), _) => Ok(()),
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
    CollectiveError::Failed { what: "joining the other ranks".to_string(), reason }
}
