//! The process that runs inputs. A panic is caught and told; what ends the process (a stack that overflows,
//! an allocation beyond the limit, an input that takes too long) is told by the number in the progress file,
//! which is written before every input.

use crate::mutate;
use crate::targets::{self, Target};
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Address space of a worker.
const MEMORY: u64 = 2 << 30;
/// Processor time of one input.
const TIME: Duration = Duration::from_secs(10);
/// Looks of the watchdog at the same input, processor or not, until it counts as stuck.
const MAX_LOOKS: u64 = 1200;
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Exit status of a worker whose input took too long.
pub const TOO_SLOW: i32 = 3;

/// Inputs `from..to` of a target.
pub struct Job<'a> {
    /// What is tried.
    pub target: &'static Target,
    /// Of all inputs.
    pub seed: u64,
    /// The first one.
    pub from: u64,
    /// After the last one.
    pub to: u64,
    /// An empty folder.
    pub scratch: &'a Path,
    /// A file for the number of the input at hand.
    pub progress: &'a Path,
}

/// Runs the inputs: a line `panic NUMBER PLACE: MESSAGE` for each that panics, then `done ACCEPTED`.
pub fn run(job: &Job) -> Result<(), Box<dyn Error>> {
    let limit = Rlimit { current: Some(MEMORY), maximum: Some(MEMORY) };
    setrlimit(Resource::As, limit)?;
    let seeds = targets::seeds(job.target, job.scratch)?;
    let mut run = (job.target.open)(job.scratch)?;
    let progress = File::create(job.progress)?;
    let place = note_panics();
    let watched = watch();
    let mut accepted = 0_u64;
    for index in job.from..job.to {
        progress.write_all_at(&index.to_le_bytes(), 0)?;
        let input = mutate::nth(job.target.name, job.seed, index, &seeds, job.target.words);
        watched.begin();
        match panic::catch_unwind(AssertUnwindSafe(|| run(&input))) {
            Ok(ok) => accepted += u64::from(ok),
            Err(_) => {
                let place = place.lock().unwrap_or_else(PoisonError::into_inner).clone();
                writeln!(std::io::stdout(), "panic {index} {place}")?;
            }
        }
    }
    println!("done {accepted}");
    Ok(())
}

/// Keeps where the last panic was and what it said, on one line, instead of printing it.
fn note_panics() -> Arc<Mutex<String>> {
    let place = Arc::new(Mutex::new(String::new()));
    let noted = place.clone();
    panic::set_hook(Box::new(move |info| {
        let at = info.location().map(ToString::to_string).unwrap_or_default();
        let said = info.payload_as_str().unwrap_or_default().replace('\n', " ");
        let said: String = said.chars().take(160).collect();
        *noted.lock().unwrap_or_else(PoisonError::into_inner) = format!("{at}: {said}");
    }));
    place
}

/// What the watchdog looks at: how many inputs have begun, and the processor time when the last one did.
struct Watched {
    begun: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Watched {
    fn begin(&self) {
        self.nanoseconds.store(processor_nanoseconds(), Ordering::Relaxed);
        self.begun.fetch_add(1, Ordering::Release);
    }
}

fn watch() -> Arc<Watched> {
    let watched = Arc::new(Watched { begun: AtomicU64::new(0), nanoseconds: AtomicU64::new(u64::MAX) });
    let seen = watched.clone();
    std::thread::spawn(move || {
        let (mut last, mut looks) = (0, 0);
        loop {
            std::thread::sleep(LOOK_EVERY);
            let begun = seen.begun.load(Ordering::Acquire);
            let took = processor_nanoseconds().saturating_sub(seen.nanoseconds.load(Ordering::Relaxed));
            looks = if begun == last { looks + 1 } else { 0 };
            last = begun;
            // Only where the input is the same as at the last look: then the time is its own.
            if looks > 0 && (took > TIME.as_nanos() as u64 || looks > MAX_LOOKS) {
                std::process::exit(TOO_SLOW);
            }
        }
    });
    watched
}

fn processor_nanoseconds() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
