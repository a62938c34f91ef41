//! `qurl objective`: what a loss does to given tokens.
//!
//! Input lines are described in [`case`]; output lines are `{"loss":x,"dlogp":[..],"clip_fraction":y}`.

mod case;
mod unique;

use crate::lines::answer_stdin;
use case::run_line;

/// Options of `qurl objective`.
#[derive(clap::Args)]
#[command(after_help = "Example: echo '{\"theta\":[-1],\"prox\":[-1.1],\"behav\":[-1.2],\"adv\":[1],\
                  \"objective\":{\"type\":\"acr\"}}' | qurl objective")]
pub struct Args {
    /// Accepted for uniformity: the output is JSON lines always
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(_args: Args) -> anyhow::Result<()> {
    answer_stdin(run_line)
}

#[cfg(test)]
mod tests;
