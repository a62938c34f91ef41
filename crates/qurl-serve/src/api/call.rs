//! One call of a client: its prompts in the engine's hands.

use super::App;
use super::error::ApiError;
use super::outcome::Outcome;
use super::sampling::Wanted;
use super::telling::Share;
use crate::service::{Failure, News, Ticket};
use qurl_rollout::Request;
use serde::Serialize;
use std::future::poll_fn;
use std::iter::once;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// What is asked of the engine.
pub struct Call {
    /// What the client may abort it by.
    pub id: String,
    /// The same for each of its prompts, where they have ids of their own.
    pub ids: Vec<String>,
    /// Tokens of each prompt.
    pub prompts: Vec<Vec<u32>>,
    /// How they are sampled.
    pub wanted: Wanted,
    /// The same for each of its prompts, where they differ in it; all have as many samples.
    pub each: Vec<Wanted>,
    /// Its pages are shared with calls of the same salt alone.
    pub salt: Vec<u32>,
    /// Most probable tokens at each new one.
    pub top: usize,
    /// Log-probs of the prompt, with as many of the most probable tokens at each place.
    pub prompt_top: Option<usize>,
    /// How often the answer tells them.
    pub told: Told,
}

/// How often an answer tells what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Log-probs of a new token.
    pub new: usize,
    /// Log-probs of a token of the prompt.
    pub prompt: usize,
    /// A token of the prompt without any.
    pub plain: usize,
}

/// Tokens without log-probs that take as much text as one with.
const PLAIN: usize = 8;

impl Call {
    /// What the client may abort a prompt by.
    pub fn id_of(&self, prompt: usize) -> &str {
        self.ids.get(prompt).unwrap_or(&self.id)
    }

    /// How a prompt is sampled.
    pub fn wanted_of(&self, prompt: usize) -> &Wanted {
        self.each.get(prompt).unwrap_or(&self.wanted)
    }

    /// Log-probs of its answer, where `new` tokens come of each prompt.
    pub fn log_probs(&self, new: impl Fn(usize) -> usize) -> usize {
        let Call { told, top, prompt_top, .. } = self;
        let of = |(number, prompt): (usize, &Vec<u32>)| {
            let of_new = new(number).saturating_mul(top + 1).saturating_mul(told.new);
            let of_prompt = prompt.len() * (prompt_top.unwrap_or(0) + 1);
            let of_prompt = of_prompt.saturating_mul(told.prompt);
            let plain = prompt.len().saturating_mul(told.plain) / PLAIN;
            of_new.saturating_add(of_prompt).saturating_add(plain)
        };
        self.prompts.iter().enumerate().map(of).fold(0, usize::saturating_add)
    }
}

/// The prompts of a call in the engine.
pub struct Answers {
    tickets: Vec<Option<Ticket>>,
    first: usize,
    share: Share,
}

impl Answers {
    /// The next news of any prompt, with its number; nothing when all have ended.
    pub async fn next(&mut self) -> Option<(usize, News)> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// The next news if there is one already.
    pub fn ready(&mut self) -> Option<Option<(usize, News)>> {
        match self.poll_next(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(next) => Some(next),
            Poll::Pending => None,
        }
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<(usize, News)>> {
        let count = self.tickets.len();
        let mut open = false;
        for i in (0..count).map(|i| (self.first + i) % count) {
            let Some(ticket) = &mut self.tickets[i] else { continue };
            match ticket.poll_next(cx) {
                Poll::Ready(Some(news)) => {
                    self.first = i + 1; // so that no prompt waits for another
                    return Poll::Ready(Some((i, news)));
                }
                Poll::Ready(None) => self.tickets[i] = None,
                Poll::Pending => open = true,
            }
        }
        if open { Poll::Pending } else { Poll::Ready(None) }
    }
}

impl App {
    /// Hands a call to the engine: all of its prompts, which are computed with the same weights, or none.
    pub fn submit(&self, call: &Call, streamed: bool) -> Result<Answers, ApiError> {
        let context = self.model.max_model_len;
        let stops = once(&call.wanted).chain(&call.each).any(|wanted| !wanted.stop.is_empty());
        if stops && !self.texts.has_tokenizer() {
            return Err(ApiError::invalid("stop", "stop: this model has no tokenizer; use stop_token_ids"));
        }
        for prompt in &call.prompts {
            if prompt.is_empty() {
                return Err(ApiError::invalid("prompt", "the prompt is empty: expected at least one token"));
            }
            if prompt.len() >= context {
                let len = prompt.len();
                let message = format!(
                    "This model's maximum context length is {context} tokens, of which at least one is a new \
                     one; the prompt has {len} tokens."
                );
                return Err(ApiError::invalid("prompt", message));
            }
        }
        let most = |prompt: usize| {
            let left = context.saturating_sub(call.prompts[prompt].len());
            call.wanted_of(prompt).max_new.unwrap_or(left).min(left).saturating_mul(call.wanted.n)
        };
        let share = self.telling.promise(call.log_probs(most))?;
        let request = |(index, prompt): (usize, &Vec<u32>)| {
            let wanted = call.wanted_of(index);
            let number = match wanted.seed {
                Some(_) => index as u64,
                None => self.next_unseeded(),
            };
            let mut request = Request {
                top_logprobs: call.top,
                prompt_logprobs: call.prompt_top.is_some(),
                prompt_top_logprobs: call.prompt_top.unwrap_or(0),
                salt: call.salt.clone(),
                ..wanted.request(&self.texts, prompt.clone(), number, self.seed, context)
            };
            if request.sampling.top_k as usize >= self.model.config.vocab_size {
                request.sampling.top_k = 0; // all of them
            }
            request
        };
        let (count, n) = (call.prompts.len(), call.wanted.n);
        let requests = call.prompts.iter().enumerate().map(request);
        let names = (0..count).map(|prompt| call.id_of(prompt).to_string());
        let tickets = self.service.submit(names, (count, n), requests, streamed)?;
        let tickets = tickets.into_iter().map(Some).collect();
        Ok(Answers { tickets, first: 0, share })
    }

    /// When a call that begins now has to be done.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.time.unwrap_or(Duration::from_secs(365 * 86_400))
    }

    pub(super) fn too_slow(&self) -> ApiError {
        ApiError::too_slow(format!("the answer took longer than {:?}", self.time.unwrap_or_default()))
    }

    /// What comes of a call, and the share that it has until that is told.
    pub async fn collect(&self, call: &Call) -> Result<(Vec<Outcome>, Share), ApiError> {
        let mut answers = self.submit(call, false)?;
        let mut outcomes = Outcome::all(call, &self.texts);
        let all = async {
            while let Some((prompt, news)) = answers.next().await {
                outcomes[prompt].take(news)?;
            }
            Ok::<_, ApiError>(())
        };
        timeout_at(self.deadline(), all).await.map_err(|_| self.too_slow())??;
        Ok((outcomes, answers.share))
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> ApiError {
        match failure {
            Failure::Refused(message) => ApiError::bad(message),
            Failure::Broken(message) => ApiError::broken(message),
        }
    }
}

/// What a call has taken, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    /// Known at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_details: Option<OfPrompt>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct OfPrompt {
    cached_tokens: usize,
}

impl Usage {
    /// Of so many tokens of prompts and new ones.
    pub fn of(prompt: usize, new: usize) -> Usage {
        Usage {
            prompt_tokens: prompt,
            completion_tokens: new,
            total_tokens: prompt + new,
            prompt_tokens_details: None,
        }
    }

    /// The same at the end, when it is known how much of the prompts other requests had computed.
    pub fn ended(self, outcomes: &[Outcome]) -> Usage {
        let cached_tokens = outcomes.iter().map(|outcome| outcome.prompt.cached).sum();
        Usage { prompt_tokens_details: Some(OfPrompt { cached_tokens }), ..self }
    }
}
