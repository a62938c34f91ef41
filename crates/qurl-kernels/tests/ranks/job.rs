//! Ranks as processes: this test program again, started by `mpirun` as one rank of a case.
//!
//! Nothing waits for ever: a job has a limit, and so has each of its ranks.

use qurl_kernels::collective::{Join, Launch, Limits};
use qurl_kernels::cpu::level::Level;
use qurl_kernels::cuda::counting::GpuProfile;
use qurl_kernels::{Collective, Cpu, Cuda};
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The variable that names the case a rank plays.
const CASE: &str = "QURL_TEST_CASE";
/// How long a job may take.
const LIMIT: Duration = Duration::from_secs(60);

/// What a rank does, by name.
pub type Case = (&'static str, fn(Collective));

/// What became of a job.
pub struct Outcome {
    pub success: bool,
    /// Standard output and error of all ranks and of the launcher.
    pub text: String,
}

/// Runs a case with so many ranks; `None`, with a message, where there is no `mpirun`.
pub fn run(case: &str, ranks: usize, variables: &[(&str, &str)]) -> Option<Outcome> {
    if !has_mpirun() {
        eprintln!("skipped: there is no mpirun on the path; `cargo xtask test` installs it where it can");
        return None;
    }
    let mut command = Command::new("mpirun");
    // Ranks share the cores of a small machine, and that of a container is root's.
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.env("OMPI_MCA_rmaps_base_oversubscribe", "1").env("OMPI_MCA_hwloc_base_binding_policy", "none");
    command.env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe");
    command.env("PRTE_MCA_hwloc_default_binding_policy", "none");
    command.args(["-n", &ranks.to_string()]).arg(this_program());
    Some(finish(as_rank(&mut command, case).envs(variables.iter().copied())))
}

/// Runs a case in one process, which takes itself for a rank by these variables.
pub fn run_alone(case: &str, variables: &[(&str, &str)]) -> Outcome {
    let mut command = Command::new(this_program());
    finish(as_rank(&mut command, case).envs(variables.iter().copied()))
}

/// Plays a case of [`run`] or [`run_alone`], if this process was started for one.
pub fn play(cases: &[Case]) {
    let Ok(case) = std::env::var(CASE) else {
        return eprintln!("skipped: this is a rank of other tests, which start it");
    };
    std::thread::spawn(|| {
        std::thread::sleep(LIMIT);
        eprintln!("a rank took longer than {LIMIT:?}");
        std::process::exit(3)
    });
    let launch = Launch::from_env().expect("variables of a launcher").expect("several ranks");
    let seconds = |name: &str, default: u64| {
        let given = std::env::var(name).ok().and_then(|text| text.parse().ok());
        Duration::from_secs(given.unwrap_or(default))
    };
    let silence = seconds("QURL_TEST_SILENCE", 20);
    let limits = Limits { rendezvous: silence, silence, stall: seconds("QURL_TEST_STALL", 20) };
    let identity =
        if case == "other version" { format!("qurl {}", launch.rank / 2) } else { "qurl 0".to_string() };
    let join = Join { launch: &launch, identity: &identity, limits };
    let joined = match case.as_str() {
        gpu if gpu.starts_with("a gpu") => Collective::nccl(join, &Cuda::counting_as(&GpuProfile::h200())),
        _ => Collective::mpi(join).map_err(Into::into),
    };
    match joined {
        Err(error) => {
            println!("error: {error}");
            std::process::exit(1);
        }
        Ok(ranks) => {
            let (_, play) = cases.iter().find(|(name, _)| *name == case).expect("a case");
            play(ranks);
        }
    }
}

pub fn cpu() -> Arc<Cpu> {
    Arc::new(Cpu::new(Level::Scalar, 1))
}

fn has_mpirun() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join("mpirun").is_file())
}

fn this_program() -> std::path::PathBuf {
    std::env::current_exe().expect("this program")
}

fn as_rank<'a>(command: &'a mut Command, case: &str) -> &'a mut Command {
    command.args(["--exact", "mpi::as_a_rank", "--ignored", "--nocapture", "--test-threads", "1"]);
    command.env(CASE, case).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped())
}

fn finish(command: &mut Command) -> Outcome {
    let mut child = command.spawn().expect("a program that starts");
    let readers = [reader(child.stdout.take()), reader(child.stderr.take())];
    let success = wait(&mut child);
    let texts = readers.map(|reader| reader.join().expect("a reader that ends"));
    Outcome { success: success.expect("a job that ends in time"), text: texts.concat() }
}

fn wait(child: &mut Child) -> Option<bool> {
    let began = Instant::now();
    while began.elapsed() < LIMIT + Duration::from_secs(5) {
        if let Some(status) = child.try_wait().expect("a child") {
            return Some(status.success());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().expect("a child that ends");
    None
}

fn reader(stream: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    let mut stream = stream.expect("a pipe");
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).expect("its output");
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
