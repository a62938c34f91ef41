//! `qurl chat-renderer`: the process that renders a server's chat template ([`qurl_model::chat::Renderer`]).
//!
//! Not for people, and not in the help. It limits its own memory before it reads anything: a template that
//! outgrows it ends this process and nothing else.

use super::reward_guard::this_program;
use anyhow::Context;
use qurl_model::chat::{RENDERER_MEMORY, answer};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{stdin, stdout};

/// Arguments of `qurl chat-renderer`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl chat-renderer < conversations.jsonl")]
pub struct Args {}

/// Renders what comes in until the input ends.
pub fn run(_: Args) -> anyhow::Result<()> {
    // An end for want of memory is expected, and no file should tell of it.
    for (resource, most) in [(Resource::As, RENDERER_MEMORY), (Resource::Core, 0)] {
        let maximum = getrlimit(resource).maximum.map_or(most, |maximum| maximum.min(most));
        let limit = Rlimit { current: Some(maximum), maximum: Some(maximum) };
        setrlimit(resource, limit).context("limiting the memory of the chat renderer")?;
    }
    answer(stdin().lock(), stdout().lock()).context("rendering chats")
}

/// The command that starts it.
pub fn command() -> anyhow::Result<Vec<String>> {
    Ok(vec![this_program()?, "chat-renderer".into()])
}
