//! `qurl chat`: a conversation on a terminal.
//!
//! Every line is a user's message; the answer appears while it is made. The whole conversation goes into the
//! model's chat template each time. With `--json` every answer is a line of JSON, so that a program can talk,
//! too.

use crate::device::on_device;
use crate::input::bad;
use crate::output::{self, err, out, printable};
use crate::sampler::{Sampler, SamplerArgs, Size};
use anyhow::Context;
use qurl_kernels::Device;
use qurl_model::chat::Message;
use serde_json::json;
use std::io::{BufRead, IsTerminal};
use std::sync::Arc;

/// Options of `qurl chat`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl chat --model DIR --format int8 --max-new 1024 --temperature 0.6")]
pub struct Args {
    #[command(flatten)]
    sampler: SamplerArgs,
    /// System message at the beginning of the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Print every answer as one JSON document
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    on_device!(args.sampler.device.get(), device => run_on(device, args))
}

fn run_on<D: Device>(device: Arc<D>, args: Args) -> anyhow::Result<()> {
    let size = |_: &_| Ok(Size { sequences: 1, positions: usize::MAX });
    let mut sampler = Sampler::load(device, &args.sampler, true, size)?;
    // A model without a chat template is refused before anybody has typed anything.
    sampler.texts.of_chat(&[Message::new("user", "-")], "chat")?;
    let asks = std::io::stdin().is_terminal();
    if asks {
        err!("a line is a message; /reset forgets the conversation, Ctrl-D ends");
    }
    let beginning: Vec<Message> = args.system.iter().map(|text| Message::new("system", text)).collect();
    let (mut messages, mut turn) = (beginning.clone(), 0);
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if asks {
            output::text("> ")?;
        }
        let Some(line) = lines.next() else { return Ok(()) };
        let line = line.context("reading standard input")?;
        match line.trim() {
            "" => continue,
            "/reset" => {
                messages = beginning.clone();
                err!("the conversation is forgotten");
                continue;
            }
            said => messages.push(Message::new("user", said)),
        }
        let prompt = sampler.texts.of_chat(&messages, "chat")?;
        let request = sampler.request(prompt, 1, turn);
        if let Err(error) = sampler.engine.check(&request) {
            messages.pop();
            match asks {
                true => err!("qurl: {error}; /reset begins anew"),
                false => return Err(bad(error)),
            }
            continue;
        }
        turn += 1;
        let mut text = String::new();
        let group = sampler.stream(request, |piece| {
            text.push_str(piece);
            if args.json { Ok(()) } else { Ok(output::text(&printable(piece))?) }
        })?;
        let Some(sample) = group.and_then(|mut group| group.samples.pop()) else {
            anyhow::bail!("the engine returned no answer");
        };
        match args.json {
            true => out!(
                "{}",
                json!({"text": text, "tokens": sample.tokens.len(), "finish": sample.finish.name()})
            )?,
            false => out!("")?,
        }
        messages.push(Message::new("assistant", &text));
    }
}
