//! The `qurl` command line: a table of commands.
//!
//! Every command takes `--json` for one machine-readable document on standard output; progress goes to
//! standard error. Exit status: 0 success, 2 bad usage or input, 1 failure, 130 stopped by Ctrl-C (128 and
//! the number of any other signal that asked it to stop).
#![forbid(unsafe_code)]
#![deny(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "they panic where the reader has gone: see output.rs"
)]

mod adapter;
mod commands;
mod dash;
mod device;
mod input;
mod lines;
mod mlflow;
mod model;
mod output;
mod packing;
mod progress;
mod ranks;
mod report;
mod sampler;
#[cfg(test)]
mod scratch;
mod stop;
mod system;
mod target;
mod version;
mod view;
mod workers;

use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(
    name = "qurl",
    version = version::SHORT,
    about = "Trains language models by reinforcement learning with quantized rollouts"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Reinforcement learning with a quantized rollout
    Train(commands::train::Args),
    /// The paper's methods side by side on one recipe
    Compare(commands::compare::Args),
    /// Recipes times methods times seeds, with verdicts on claims
    Study(commands::study::Args),
    /// Supervised training on JSON lines or on a task's worked solutions
    Sft(commands::sft::Args),
    /// Every key of a recipe with its meaning; a first recipe; a look at one without running it
    Recipe(commands::recipe::Args),
    /// What a recipe needs of several GPUs: memory, bytes between them, time of a step
    Plan(commands::plan::Args),
    /// Samples text
    Generate(commands::generate::Args),
    /// Samples for a trainer elsewhere that listens for workers (`rollout.workers`)
    Worker(commands::worker::Args),
    /// Talks on a terminal
    Chat(commands::chat::Args),
    /// A model over HTTP: OpenAI's, vLLM's and SGLang's dialects, weight updates, metrics
    Serve(commands::serve::Args),
    /// Avg@1, Avg@k, pass@k and maj@k on data sets or generated problems
    Eval(commands::eval::Args),
    /// Log-probs of given token ids, one JSON line in, one out
    Score(commands::score::Args),
    /// Grades answers, one JSON line in, one out
    Grade(commands::grade::Args),
    /// What a loss does to given tokens, one JSON line in, one out
    Objective(commands::objective::Args),
    /// Writes a quantized model directory, or one that is only scaled for update-aware quantization
    Quantize(commands::quantize::Args),
    /// A model and LoRA adapters as one whole model
    Merge(commands::merge::Args),
    /// What quantization does to weights, and what changed between two checkpoints
    Inspect(commands::inspect::Args),
    /// Speed beside the measured limits of the machine
    Bench(commands::bench::Args),
    /// One HTML file with the plots, settings and sampled responses of runs
    Report(commands::report::Args),
    /// The same page live in a browser, while a run lasts
    Dash(commands::dash::Args),
    /// Runs for other programs that track experiments
    Export(commands::export::Args),
    /// A script that completes this command line in a shell
    Completions(commands::completions::Args),
    /// Manual pages of all commands
    Man(commands::man::Args),
    /// Runs a reward command and ends with it all that it started
    #[command(hide = true)]
    RewardGuard(commands::reward_guard::Args),
    /// Renders the chat template of a server
    #[command(hide = true)]
    ChatRenderer(commands::chat_renderer::Args),
}

/// Events of the libraries on standard error where `RUST_LOG` asks for them, as in
/// `RUST_LOG=qurl_train=debug`.
fn trace() {
    if std::env::var_os("RUST_LOG").is_some() {
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .log_internal_errors(false)
            .init();
    }
}

/// Whether clap's answer is to `qurl --version`, in place of `-V`.
fn is_long_version(answer: &clap::Error) -> bool {
    answer.kind() == clap::error::ErrorKind::DisplayVersion
        && std::env::args_os().nth(1).is_some_and(|first| first == "--version")
}

fn main() -> ExitCode {
    trace();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(answer) if is_long_version(&answer) => {
            return finish(output::text(&version::long()).map_err(anyhow::Error::from));
        }
        Err(answer) if answer.use_stderr() => answer.exit(),
        Err(help) => return finish(help.print().map_err(|e| output::OutputError::from(e).into())),
    };
    let result = match cli.command {
        Command::Train(args) => commands::train::run(args),
        Command::Compare(args) => commands::compare::run(args),
        Command::Study(args) => commands::study::run(args),
        Command::Sft(args) => commands::sft::run(args),
        Command::Recipe(args) => commands::recipe::run(args),
        Command::Plan(args) => commands::plan::run(args),
        Command::Generate(args) => commands::generate::run(args),
        Command::Worker(args) => commands::worker::run(args),
        Command::Chat(args) => commands::chat::run(args),
        Command::Serve(args) => commands::serve::run(args),
        Command::Eval(args) => commands::eval::run(args),
        Command::Score(args) => commands::score::run(args),
        Command::Grade(args) => commands::grade::run(args),
        Command::Objective(args) => commands::objective::run(args),
        Command::Quantize(args) => commands::quantize::run(args),
        Command::Merge(args) => commands::merge::run(args),
        Command::Inspect(args) => commands::inspect::run(args),
        Command::Bench(args) => commands::bench::run(args),
        Command::Report(args) => commands::report::run(args),
        Command::Dash(args) => commands::dash::run(args),
        Command::Export(args) => commands::export::run(args),
        Command::Completions(args) => commands::completions::run(args, Cli::command()),
        Command::Man(args) => commands::man::run(args, Cli::command()),
        Command::RewardGuard(args) => match commands::reward_guard::run(args) {
            Ok(status) => return status,
            Err(error) => Err(error),
        },
        Command::ChatRenderer(args) => commands::chat_renderer::run(args),
    };
    finish(result)
}

/// Tells of an error, if there is one, and gives the exit status.
fn finish(result: anyhow::Result<()>) -> ExitCode {
    match result.and_then(|()| Ok(output::text("")?)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if output::is_closed(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let message = input::message(&error);
            if !message.is_empty() {
                output::err!("qurl: {message}");
            }
            match error.downcast_ref::<stop::Stopped>() {
                Some(stopped) => ExitCode::from(stopped.status),
                None if error.is::<ranks::Ended>() => ExitCode::from(ranks::status(&error)),
                None => ExitCode::from(if error.is::<input::BadInput>() { 2 } else { 1 }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every command, with the words that lead to it.
    fn walk(command: &clap::Command, path: &str, found: &mut Vec<(String, clap::Command)>) {
        for sub in command.get_subcommands().filter(|c| c.get_name() != "help") {
            let path = format!("{path} {}", sub.get_name());
            found.push((path.clone(), sub.clone()));
            walk(sub, &path, found);
        }
    }

    #[test]
    fn every_command_says_what_it_does_and_shows_an_example() {
        let mut cli = Cli::command();
        cli.build();
        let mut commands = Vec::new();
        walk(&cli, "qurl", &mut commands);
        assert!(commands.len() >= 12, "{}", commands.len());
        for (path, mut command) in commands {
            let help = command.render_long_help().to_string();
            let example = help.lines().find(|line| line.contains("Example: "));
            assert!(example.is_some_and(|line| line.contains(&path)), "{path}: {help}");
            assert!(
                command.get_about().is_some_and(|about| !about.to_string().contains("Example")),
                "{path}"
            );
        }
    }
}
