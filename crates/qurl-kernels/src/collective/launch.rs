//! Which rank this process is, by the variables of whatever started it.
//!
//! Launchers are looked for from the innermost to the outermost one: torchrun may run under `mpirun` or
//! `srun`, `mpirun` under `srun`, all of them in a pod. A process that none of them started is alone.

use super::rendezvous::Address;
use std::fmt;

/// The rendezvous if nothing else is said, as in PyTorch.
const DEFAULT_PORT: u16 = 29_500;
/// The first port for jobs of SLURM, which have one each by their number.
const SLURM_PORTS: u16 = 20_000;

/// What started the ranks of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `torchrun`, or anything else that sets `RANK` and `WORLD_SIZE`.
    Torchrun,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpirun` of MPICH, Intel MPI or MVAPICH, or another with PMI.
    Mpich,
    /// `srun`.
    Slurm,
    /// An indexed job of Kubernetes.
    Kubernetes,
}

/// One rank of a run, as its launcher started it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Its number.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// Its number among those of its machine: its GPU.
    pub local_rank: usize,
    /// How many there are on its machine, where that is known.
    pub local_size: Option<usize>,
    /// The rendezvous, unless MPI gives one.
    pub address: Option<Address>,
    /// What started it.
    pub launcher: Launcher,
}

/// Variables that contradict each other, or of which one is missing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// One is missing.
    #[error("{missing} is not set, but {because} is: {expected}")]
    Missing {
        /// The variable.
        missing: &'static str,
        /// One that is set.
        because: String,
        /// What should be there.
        expected: &'static str,
    },
    /// One is not what it should be.
    #[error("{name}={value:?}: expected {expected}")]
    Value {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What should be there.
        expected: String,
    },
    /// A machine has more ranks than GPUs.
    #[error(
        "rank {local_rank} of this machine (numbered from 0) has no GPU: there are {gpus}; start as many \
         ranks, or give each process an NCCL_HOSTID of its own to let them share"
    )]
    TooFewGpus {
        /// The rank's number on its machine.
        local_rank: usize,
        /// GPUs that it sees.
        gpus: usize,
    },
    /// Two do not agree.
    #[error("the launchers do not agree: {one} and {other}")]
    Contradiction {
        /// What one says.
        one: String,
        /// What the other says.
        other: String,
    },
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "mpirun of Open MPI",
            Launcher::Mpich => "mpirun of MPICH",
            Launcher::Slurm => "srun",
            Launcher::Kubernetes => "Kubernetes",
        })
    }
}

impl Launch {
    /// How this process was started; `None` where it is alone.
    pub fn from_env() -> Result<Option<Launch>, LaunchError> {
        Launch::from_variables(&|name| std::env::var(name).ok())
    }

    /// The same with given variables.
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Launch>, LaunchError> {
        let variables = Variables(variable);
        let torchrun = variables.torchrun()?;
        let mpi = match variables.open_mpi()? {
            Some(launch) => Some(launch),
            None => variables.pmi()?,
        };
        if let (Some(one), Some(other)) = (&torchrun, &mpi)
            && one.size == other.size
            && one.rank != other.rank
        {
            let say =
                |launch: &Launch| format!("rank {} of {} by {}", launch.rank, launch.size, launch.launcher);
            return Err(LaunchError::Contradiction { one: say(one), other: say(other) });
        }
        let found = match torchrun.or(mpi) {
            Some(launch) => Some(launch),
            None => match variables.slurm()? {
                Some(launch) => Some(launch),
                None => variables.kubernetes()?,
            },
        };
        if found.is_none() {
            variables.leftovers()?;
        }
        Ok(found.filter(|launch| launch.size > 1))
    }
}

impl Launch {
    /// The GPU of this rank among those that the process sees: that of its local rank. Ranks share GPUs only
    /// where each has an `NCCL_HOSTID` of its own, without which NCCL refuses it; a process that sees one
    /// GPU, chosen for it by `CUDA_VISIBLE_DEVICES`, takes that.
    pub fn gpu(&self, gpus: usize) -> Result<usize, LaunchError> {
        self.gpu_by(gpus, &|name| std::env::var(name).ok())
    }

    fn gpu_by(&self, gpus: usize, variable: &dyn Fn(&str) -> Option<String>) -> Result<usize, LaunchError> {
        let is_set = |name| Variables(variable).get(name).is_some();
        if self.local_rank < gpus {
            Ok(self.local_rank)
        } else if gpus > 0 && is_set("NCCL_HOSTID") {
            Ok(self.local_rank % gpus)
        } else if gpus == 1 && is_set("CUDA_VISIBLE_DEVICES") {
            Ok(0)
        } else {
            Err(LaunchError::TooFewGpus { local_rank: self.local_rank, gpus })
        }
    }
}

/// Variables of the environment.
struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.trim().is_empty())
    }

    fn number(&self, name: &'static str) -> Result<Option<usize>, LaunchError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.trim().parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(LaunchError::Value { name, value, expected: "a number".to_string() }),
        }
    }

    fn required(
        &self,
        missing: &'static str,
        because: &str,
        expected: &'static str,
    ) -> Result<usize, LaunchError> {
        let because = || format!("{because}={}", self.get(because).unwrap_or_default());
        self.number(missing)?.ok_or_else(|| LaunchError::Missing { missing, because: because(), expected })
    }

    /// A rank that is one of so many.
    fn below(&self, name: &'static str, rank: usize, size: usize, of: &str) -> Result<(), LaunchError> {
        match rank < size {
            true => Ok(()),
            false => Err(LaunchError::Value {
                name,
                value: rank.to_string(),
                expected: format!("a number below {of}={size}"),
            }),
        }
    }

    fn torchrun(&self) -> Result<Option<Launch>, LaunchError> {
        let Some(rank) = self.number("RANK")? else { return Ok(None) };
        let size = self.required("WORLD_SIZE", "RANK", "the number of ranks")?;
        self.below("RANK", rank, size, "WORLD_SIZE")?;
        let local_size = self.number("LOCAL_WORLD_SIZE")?;
        // A PyTorchJob of Kubernetes has one rank in a pod and says nothing of it.
        let local_rank = match (self.number("LOCAL_RANK")?, self.get("KUBERNETES_SERVICE_HOST")) {
            (Some(local_rank), _) => local_rank,
            (None, Some(_)) => 0,
            (None, None) if size == 1 => 0,
            (None, None) => self.required("LOCAL_RANK", "RANK", "the rank's number on its machine")?,
        };
        if let Some(local_size) = local_size {
            self.below("LOCAL_RANK", local_rank, local_size, "LOCAL_WORLD_SIZE")?;
        }
        let host = self.host_of(size, "RANK")?;
        // torchrun listens at that port itself where workers use its store.
        let taken = self.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        let port = self.port("MASTER_PORT")?.unwrap_or(DEFAULT_PORT);
        let port = if taken { port.checked_add(1).unwrap_or(port - 1) } else { port };
        let address = Some(self.address(host, port)?);
        Ok(Some(Launch { rank, size, local_rank, local_size, address, launcher: Launcher::Torchrun }))
    }

    fn open_mpi(&self) -> Result<Option<Launch>, LaunchError> {
        const RANK: &str = "OMPI_COMM_WORLD_RANK";
        let Some(rank) = self.number(RANK)? else { return Ok(None) };
        let size = self.required("OMPI_COMM_WORLD_SIZE", RANK, "the number of ranks")?;
        self.below(RANK, rank, size, "OMPI_COMM_WORLD_SIZE")?;
        let expected = "the rank's number on its machine";
        let local_rank = self.required("OMPI_COMM_WORLD_LOCAL_RANK", RANK, expected)?;
        let local_size = self.number("OMPI_COMM_WORLD_LOCAL_SIZE")?;
        let address = self.given_address()?;
        Ok(Some(Launch { rank, size, local_rank, local_size, address, launcher: Launcher::OpenMpi }))
    }

    fn pmi(&self) -> Result<Option<Launch>, LaunchError> {
        let Some(rank) = self.number("PMI_RANK")? else { return Ok(None) };
        let size = self.required("PMI_SIZE", "PMI_RANK", "the number of ranks")?;
        self.below("PMI_RANK", rank, size, "PMI_SIZE")?;
        let locals = [self.number("MPI_LOCALRANKID")?, self.number("SLURM_LOCALID")?];
        let local_rank = match locals.into_iter().flatten().next() {
            Some(local_rank) => local_rank,
            None => self.required("MPI_LOCALRANKID", "PMI_RANK", "the rank's number on its machine")?,
        };
        let local_size = self.number("MPI_LOCALNRANKS")?;
        let address = self.given_address()?;
        Ok(Some(Launch { rank, size, local_rank, local_size, address, launcher: Launcher::Mpich }))
    }

    fn slurm(&self) -> Result<Option<Launch>, LaunchError> {
        // Set in the steps that srun starts, not in the script around them.
        let Some(size) = self.number("SLURM_STEP_NUM_TASKS")? else { return Ok(None) };
        let because = "SLURM_STEP_NUM_TASKS";
        let rank = self.required("SLURM_PROCID", because, "the number of the task")?;
        self.below("SLURM_PROCID", rank, size, because)?;
        let local_rank = self.required("SLURM_LOCALID", because, "the task's number on its machine")?;
        let list = self.get("SLURM_STEP_NODELIST").or_else(|| self.get("SLURM_JOB_NODELIST"));
        let host = match (self.get("MASTER_ADDR"), list) {
            (Some(host), _) => host,
            (None, Some(list)) => first_host(&list).ok_or_else(|| LaunchError::Value {
                name: "SLURM_STEP_NODELIST",
                value: list,
                expected: "names of machines, as in gpu[01-04],big7; MASTER_ADDR may name the first one"
                    .to_string(),
            })?,
            (None, None) if size == 1 => "localhost".to_string(),
            (None, None) => {
                let expected = "the machine of rank 0; SLURM_STEP_NODELIST is not set either";
                let because = format!("{because}={size}");
                return Err(LaunchError::Missing { missing: "MASTER_ADDR", because, expected });
            }
        };
        let job = self.number("SLURM_JOB_ID")?.unwrap_or(0) % usize::from(SLURM_PORTS);
        let port = self.port("MASTER_PORT")?.unwrap_or(SLURM_PORTS + job as u16);
        let address = Some(self.address(host, port)?);
        Ok(Some(Launch { rank, size, local_rank, local_size: None, address, launcher: Launcher::Slurm }))
    }

    fn kubernetes(&self) -> Result<Option<Launch>, LaunchError> {
        const INDEX: &str = "JOB_COMPLETION_INDEX";
        let (Some(rank), Some(size)) = (self.number(INDEX)?, self.number("WORLD_SIZE")?) else {
            return Ok(None); // pods of a job that have nothing to do with each other
        };
        self.below(INDEX, rank, size, "WORLD_SIZE")?;
        let host = self.host_of(size, INDEX)?;
        let address = Some(self.address(host, self.port("MASTER_PORT")?.unwrap_or(DEFAULT_PORT))?);
        let local_rank = self.number("LOCAL_RANK")?.unwrap_or(0);
        Ok(Some(Launch { rank, size, local_rank, local_size: None, address, launcher: Launcher::Kubernetes }))
    }

    /// That nobody asked for ranks and then did not say which one this is.
    fn leftovers(&self) -> Result<(), LaunchError> {
        match self.number("WORLD_SIZE")? {
            Some(size) if size > 1 => Err(LaunchError::Missing {
                missing: "RANK",
                because: format!("WORLD_SIZE={size}"),
                expected: "the number of this rank (or JOB_COMPLETION_INDEX in a job of Kubernetes)",
            }),
            _ => Ok(()),
        }
    }

    fn host_of(&self, size: usize, because: &str) -> Result<String, LaunchError> {
        match self.get("MASTER_ADDR") {
            Some(host) => Ok(host),
            None if size == 1 => Ok("localhost".to_string()),
            None => Err(LaunchError::Missing {
                missing: "MASTER_ADDR",
                because: format!("{because}={}", self.get(because).unwrap_or_default()),
                expected: "the machine of rank 0, which the others can reach",
            }),
        }
    }

    /// The rendezvous if somebody says so; else MPI gives one.
    fn given_address(&self) -> Result<Option<Address>, LaunchError> {
        match (self.get("MASTER_ADDR"), self.port("MASTER_PORT")?) {
            (Some(host), Some(port)) => self.address(host, port).map(Some),
            _ => Ok(None),
        }
    }

    fn address(&self, host: String, port: u16) -> Result<Address, LaunchError> {
        Ok(Address { host, port: self.port("QURL_PORT")?.unwrap_or(port) })
    }

    fn port(&self, name: &'static str) -> Result<Option<u16>, LaunchError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.trim().parse() {
            Ok(port) if port > 0 => Ok(Some(port)),
            _ => Err(LaunchError::Value {
                name,
                value,
                expected: "a number of a port, 1 to 65535".to_string(),
            }),
        }
    }
}

/// The first machine of a list of SLURM's: `gpu[03-05,9],big` begins with `gpu03`.
fn first_host(list: &str) -> Option<String> {
    let list = list.trim();
    let end = list.find([',', '[']).unwrap_or(list.len());
    let name = &list[..end];
    let host = match list[end..].strip_prefix('[') {
        None => name.to_string(),
        Some(numbers) => {
            let (first, rest) = numbers.split_at(numbers.find([',', '-', ']'])?);
            let suffix = &rest[rest.find(']')? + 1..];
            let suffix = &suffix[..suffix.find(',').unwrap_or(suffix.len())];
            if first.is_empty() || suffix.contains('[') {
                return None;
            }
            format!("{name}{first}{suffix}")
        }
    };
    (!host.is_empty()).then_some(host)
}

#[cfg(test)]
mod tests;
