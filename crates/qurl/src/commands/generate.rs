//! `qurl generate`: samples of one prompt, or of every prompt of a file.
//!
//! With one sample the text appears while it is made. `--json` gives ids and log-probs as well, printed as
//! the shortest decimals that read back as the same f32, so that `qurl score` can be held against them.
//! Prompts of a file are answered in order, one JSON line for each, some of them together; that changes no
//! bit.

use crate::device::on_device;
use crate::input::{OrBad, bad};
use crate::lines::{answer_stdin_together, answer_together};
use crate::output::{self, err, out, printable};
use crate::sampler::{Sampler, SamplerArgs, Size, Texts};
use qurl_kernels::Device;
use qurl_model::chat::Message;
use qurl_model::tokenizer::Tokenizer;
use qurl_rollout::{Group, Request};
use qurl_tasks::data::in_one_line;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Options of `qurl generate`.
#[derive(clap::Args)]
#[command(
    after_help = r#"Example: qurl generate --model DIR --format int8 --n 4 --max-new 256 "What is 17 + 25?"
         echo '{"prompt":"What is 17 + 25?"}' | qurl generate --model DIR --prompts -"#
)]
pub struct Args {
    #[command(flatten)]
    sampler: SamplerArgs,
    /// Number of samples
    #[arg(long, default_value_t = 1)]
    n: usize,
    /// Put the prompt into the model's chat template, as a user's message
    #[arg(long)]
    chat: bool,
    /// Print one JSON document; with --prompts every answer is a line of JSON anyway
    #[arg(long)]
    json: bool,
    /// Tokens of the prompt in place of its text; needs no tokenizer
    #[arg(long, value_delimiter = ',', value_name = "IDS")]
    #[arg(conflicts_with_all = ["prompt", "chat", "prompts"])]
    prompt_ids: Option<Vec<u32>>,
    /// File of prompts, - for standard input: one JSON object a line with `prompt`, `messages` or
    /// `prompt_ids`
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompts: Option<PathBuf>,
    /// Prompts of the file that are answered together
    #[arg(long, default_value_t = 64, requires = "prompts")]
    batch: usize,
    /// Text of the prompt
    #[arg(required_unless_present_any = ["prompt_ids", "prompts"])]
    prompt: Option<String>,
}

/// A line of the file of prompts.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    prompt: Option<String>,
    messages: Option<Vec<Said>>,
    prompt_ids: Option<Vec<u32>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Said {
    role: String,
    content: String,
}

#[derive(Serialize)]
struct Document {
    samples: Vec<Sampled>,
}

#[derive(Serialize)]
struct Sampled {
    prompt_ids: Vec<u32>,
    ids: Vec<u32>,
    logprobs: Vec<f32>,
    /// `null` where the directory has no tokenizer.
    text: Option<String>,
    finish: &'static str,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    on_device!(args.sampler.device.get(), device => match &args.prompts {
        Some(file) => of_file(device, &args, file),
        None => of_one(device, &args),
    })
}

fn of_one<D: Device>(device: Arc<D>, args: &Args) -> anyhow::Result<()> {
    let mut prompt = Vec::new();
    let mut sampler = Sampler::load(device, &args.sampler, args.prompt_ids.is_none(), |texts| {
        prompt = encode(args, texts)?;
        Ok(Size { sequences: args.n, positions: prompt.len().saturating_add(args.sampler.max_new.max(1)) })
    })?;
    let request = sampler.request(prompt, args.n, 0);
    sampler.engine.check(&request).or_bad()?;

    let began = Instant::now();
    let group = match (args.n, args.json, &sampler.texts.tokenizer) {
        (1, false, Some(_)) => {
            let group = sampler.stream(request, |piece| Ok(output::text(&printable(piece))?))?;
            out!("")?;
            group
        }
        _ => sampler.engine.generate(&mut sampler.queue, &[request])?.pop(),
    };
    let Some(group) = group else { anyhow::bail!("the engine returned no samples") };
    let (tokens, seconds) =
        (group.samples.iter().map(|s| s.tokens.len()).sum::<usize>(), began.elapsed().as_secs_f64());
    let tokenizer = sampler.texts.tokenizer.as_deref();
    if args.json {
        out!("{}", serde_json::to_string(&document(group, tokenizer)?)?)?;
    } else {
        if args.n > 1 || tokenizer.is_none() {
            print_all(&group, tokenizer)?;
        }
        err!("{tokens} tokens in {seconds:.2} s, {:.1} tokens/s", tokens as f64 / seconds);
    }
    Ok(())
}

/// Answers every line of a file, or of standard input, in order.
fn of_file<D: Device>(device: Arc<D>, args: &Args, file: &Path) -> anyhow::Result<()> {
    if args.batch == 0 || args.n == 0 {
        return Err(bad("--batch and --n must be at least 1"));
    }
    let from_stdin = file == Path::new("-");
    // Opened before the model is loaded: a wrong name is told at once.
    let input = (!from_stdin).then(|| qurl_files::open(file)).transpose();
    let input = input.map_err(|e| bad(format!("--prompts {}: cannot be read: {e}", file.display())))?;
    let size = Size { sequences: args.batch.saturating_mul(args.n), positions: usize::MAX };
    let sampler = std::cell::RefCell::new(Sampler::load(device, &args.sampler, false, |_| Ok(size))?);
    let mut number = 0;
    let read = |line: usize, text: &str| -> Result<Request, String> {
        let sampler = sampler.borrow();
        let prompt = tokens_of(text, args, &sampler.texts).map_err(|e| format!("line {line}: {e}"))?;
        let request = sampler.request(prompt, args.n, number);
        sampler.engine.check(&request).map_err(|e| format!("line {line}: {e}"))?;
        number += 1;
        Ok(request)
    };
    let answer = |requests: Vec<Request>| {
        let sampler = &mut *sampler.borrow_mut();
        let groups = sampler.engine.generate(&mut sampler.queue, &requests)?;
        groups.into_iter().map(|group| document(group, sampler.texts.tokenizer.as_deref())).collect()
    };
    match input {
        Some(input) => answer_together(input, &file.display().to_string(), args.batch, read, answer),
        None => answer_stdin_together(args.batch, read, answer),
    }
}

/// Tokens of a line's prompt.
fn tokens_of(text: &str, args: &Args, texts: &Texts) -> Result<Vec<u32>, String> {
    let expected =
        r#"expected {"prompt":".."}, {"messages":[{"role":"..","content":".."}]} or {"prompt_ids":[..]}"#;
    let line: Line = serde_json::from_str(text).map_err(|e| format!("{}; {expected}", in_one_line(&e)))?;
    let tokens = match (line.prompt, line.messages, line.prompt_ids) {
        (None, None, Some(ids)) => return Ok(ids),
        (Some(text), None, None) if args.chat => texts.of_chat(&[Message::new("user", &text)], "--chat"),
        (Some(text), None, None) => texts.of_text(&text),
        (None, Some(said), None) => {
            let messages: Vec<Message> = said.iter().map(|m| Message::new(&m.role, &m.content)).collect();
            texts.of_chat(&messages, "key `messages`")
        }
        _ => return Err(expected.to_string()),
    };
    tokens.map_err(|e| e.to_string())
}

/// Tokens of the prompt of the command line.
fn encode(args: &Args, texts: &Texts) -> anyhow::Result<Vec<u32>> {
    match (&args.prompt_ids, args.prompt.as_deref().unwrap_or_default()) {
        (Some(ids), _) => Ok(ids.clone()),
        (None, text) if args.chat && !text.is_empty() => {
            texts.of_chat(&[Message::new("user", text)], "--chat")
        }
        (None, text) => texts.of_text(text),
    }
}

fn document(group: Group, tokenizer: Option<&Tokenizer>) -> anyhow::Result<Document> {
    let prompt = group.prompt;
    let sampled = |sample: qurl_rollout::Sample| {
        Ok(Sampled {
            prompt_ids: prompt.clone(),
            text: tokenizer.map(|t| t.decode(&sample.tokens, true)).transpose()?,
            ids: sample.tokens,
            logprobs: sample.logprobs,
            finish: sample.finish.name(),
        })
    };
    Ok(Document { samples: group.samples.into_iter().map(sampled).collect::<anyhow::Result<_>>()? })
}

fn print_all(group: &Group, tokenizer: Option<&Tokenizer>) -> anyhow::Result<()> {
    for (i, sample) in group.samples.iter().enumerate() {
        let text = match tokenizer {
            Some(tokenizer) => printable(&tokenizer.decode(&sample.tokens, true)?),
            None => sample.tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        };
        if group.samples.len() > 1 {
            out!("== sample {} ({} tokens, {})", i + 1, sample.tokens.len(), sample.finish.name())?;
        }
        out!("{text}")?;
    }
    Ok(())
}
