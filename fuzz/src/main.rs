//! `qurl-fuzz`: runs hostile inputs, see the library. `cargo xtask fuzz` builds and calls it.

#![forbid(unsafe_code)]

use qurl_fuzz::supervise::{self, Plan};
use qurl_fuzz::targets::{self, TARGETS, Target};
use qurl_fuzz::worker::{self, Job};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const HELP: &str = "\
Usage: qurl-fuzz [TARGET...] [--inputs N] [--from N] [--seed N] [--keep FOLDER]

Runs N inputs (10000 where nothing is said) of each target, of all where none is named. What fails is written
to FOLDER (target/fuzz), a folder of files for every input. Input I of a target is the same in every run with
the same seed: --from I --inputs 1 runs it alone.

Exit status: 0 when nothing failed, 1 when something did, 2 on bad usage.";

struct Options {
    targets: Vec<&'static Target>,
    plan: Plan,
}

fn parse(arguments: &[String]) -> Result<Options, String> {
    let mut plan = Plan { seed: 1, from: 0, inputs: 10_000, keep: PathBuf::from("target/fuzz") };
    let mut targets = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut value = || rest.next().ok_or(format!("{argument} needs a value"));
        let number =
            |text: &String| text.parse().map_err(|_| format!("{argument} {text}: expected a number"));
        match argument.as_str() {
            "--inputs" => plan.inputs = number(value()?)?,
            "--from" => plan.from = number(value()?)?,
            "--seed" => plan.seed = number(value()?)?,
            "--keep" => plan.keep = value()?.into(),
            name => targets.push(targets::find(name)?),
        }
    }
    if targets.is_empty() {
        targets.extend(&TARGETS);
    }
    Ok(Options { targets, plan })
}

fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    let mut failed = false;
    for target in &options.targets {
        let scratch = Scratch::new(target.name)?;
        let outcome = supervise::run(target, &options.plan, &scratch.0)?;
        println!("{}", outcome.summary(target.name));
        failed |= !outcome.failures.is_empty();
    }
    Ok(failed)
}

/// A folder in memory where there is one, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> std::io::Result<Scratch> {
        let memory = Path::new("/dev/shm");
        let place = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        let folder = place.join(format!("qurl-fuzz-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        Ok(Scratch(folder))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.0);
    }
}

/// `worker TARGET SEED FROM TO SCRATCH PROGRESS`, as [`supervise`] calls it.
fn work(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let [name, seed, from, to, scratch, progress] = arguments else {
        return Err("not a worker's arguments".into());
    };
    worker::run(&Job {
        target: targets::find(name)?,
        seed: seed.parse()?,
        from: from.parse()?,
        to: to.parse()?,
        scratch: Path::new(scratch),
        progress: Path::new(progress),
    })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, rest @ ..] = arguments.as_slice()
        && first == "worker"
    {
        return match work(rest) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        let names: Vec<String> =
            TARGETS.iter().map(|target| format!("  {:<11}{}", target.name, target.about)).collect();
        println!("{HELP}\n\nTargets:\n{}", names.join("\n"));
        return ExitCode::SUCCESS;
    }
    match parse(&arguments).map(|options| run(&options)) {
        Ok(Ok(false)) => ExitCode::SUCCESS,
        Ok(Ok(true)) => ExitCode::FAILURE,
        Ok(Err(error)) => {
            eprintln!("qurl-fuzz: {error}");
            ExitCode::FAILURE
        }
        Err(message) => {
            eprintln!("qurl-fuzz: {message}\n\n{HELP}");
            ExitCode::from(2)
        }
    }
}
