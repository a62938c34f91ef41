//! One call of a client: its prompts in the engine's hands, and what comes of them.

use super::App;
use super::error::ApiError;
use super::sampling::Wanted;
use super::texts::{Growing, Texts};
use crate::service::{Failure, News, PromptScores, Ticket, Token};
use axum::body::Bytes;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use qurl_rollout::{FinishReason, WeightVersion};
use serde_json::{Value, json};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::time::{Instant, sleep_until, timeout_at};

/// Pieces of a stream that wait for a slow reader; beyond that his tokens wait in the engine's channel.
const HELD_PIECES: usize = 16;

/// What is asked of the engine.
pub struct Call {
    /// What the client may abort it by.
    pub id: String,
    /// Tokens of each prompt.
    pub prompts: Vec<Vec<u32>>,
    /// How they are sampled.
    pub wanted: Wanted,
    /// Most probable tokens at each new one.
    pub top: usize,
    /// Log-probs of the prompt, with as many of the most probable tokens at each place.
    pub prompt_top: Option<usize>,
}

/// A sample as it grows.
pub struct Growth {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Their log-probs.
    pub logprobs: Vec<f32>,
    /// The most probable tokens at their places.
    pub top: Vec<Vec<(u32, f32)>>,
    /// Its text.
    pub text: String,
    /// Why it ended; nothing before, and where it was aborted.
    pub finish: Option<FinishReason>,
    /// Whether somebody ended it.
    pub aborted: bool,
    growing: Growing,
}

/// What has come of a prompt.
pub struct Outcome {
    /// What it was computed with.
    pub weights: WeightVersion,
    /// Its samples.
    pub samples: Vec<Growth>,
    /// What the model says of the prompt itself.
    pub prompt: PromptScores,
}

/// The prompts of a call in the engine.
pub struct Answers {
    tickets: Vec<Option<Ticket>>,
    first: usize,
}

impl Answers {
    /// The next news of any prompt, with its number; nothing when all have ended.
    pub async fn next(&mut self) -> Option<(usize, News)> {
        poll_fn(|cx| {
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
        })
        .await
    }
}

impl App {
    /// Hands a call to the engine.
    pub fn submit(&self, call: &Call, streamed: bool) -> Result<Answers, ApiError> {
        let context = self.model.max_model_len;
        let mut tickets = Vec::with_capacity(call.prompts.len());
        for (index, prompt) in call.prompts.iter().enumerate() {
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
            let number = match call.wanted.seed {
                Some(_) => index as u64,
                None => self.next_unseeded(),
            };
            let mut request = call.wanted.request(&self.texts, prompt.clone(), number, self.seed, context);
            request.top_logprobs = call.top;
            request.prompt_logprobs = call.prompt_top.is_some();
            request.prompt_top_logprobs = call.prompt_top.unwrap_or(0);
            tickets.push(Some(self.service.submit(call.id.clone(), request, streamed)?));
        }
        Ok(Answers { tickets, first: 0 })
    }

    /// When a call that begins now has to be done.
    fn deadline(&self) -> Instant {
        Instant::now() + self.time.unwrap_or(Duration::from_secs(365 * 86_400))
    }

    fn too_slow(&self) -> ApiError {
        ApiError::too_slow(format!("the answer took longer than {:?}", self.time.unwrap_or_default()))
    }

    /// The whole answer.
    pub async fn collect(&self, call: &Call) -> Result<Vec<Outcome>, ApiError> {
        let mut answers = self.submit(call, false)?;
        let mut outcomes: Vec<Outcome> =
            call.prompts.iter().map(|_| Outcome::new(call, &self.texts)).collect();
        let all = async {
            while let Some((prompt, news)) = answers.next().await {
                outcomes[prompt].take(news)?;
            }
            Ok::<_, ApiError>(())
        };
        timeout_at(self.deadline(), all).await.map_err(|_| self.too_slow())??;
        Ok(outcomes)
    }

    /// The answer as server-sent events: `chunks` says what is sent of each news, and `last` at the end. What
    /// is wrong with a call is said before the stream begins.
    pub async fn stream(
        self: Arc<Self>,
        call: &Call,
        mut chunks: impl FnMut(usize, News) -> Vec<Value> + Send + 'static,
        last: impl FnOnce(&mut Vec<Value>) + Send + 'static,
        done: &'static str,
    ) -> Result<Response, ApiError> {
        let mut answers = self.submit(call, true)?;
        let deadline = self.deadline();
        let first = match timeout_at(deadline, answers.next()).await {
            Err(_) => return Err(self.too_slow()),
            Ok(Some((_, News::Failed(failure)))) => return Err(failure.into()),
            Ok(first) => first,
        };
        let (sender, body) = crate::http::pieces(HELD_PIECES);
        tokio::spawn(async move {
            // Dropping the answers, whenever that is, cancels what is left of them.
            let mut next = first;
            let mut last = Some(last);
            loop {
                let mut ended = false;
                let events = match next {
                    Some((_, News::Failed(failure))) => {
                        ended = true;
                        vec![ApiError::from(failure).to_json()]
                    }
                    Some((prompt, news)) => chunks(prompt, news),
                    None => {
                        ended = true;
                        let mut events = Vec::new();
                        if let Some(last) = last.take() {
                            last(&mut events);
                        }
                        events
                    }
                };
                let mut piece = String::new();
                for event in events {
                    piece.push_str(&format!("data: {event}\n\n"));
                }
                if ended {
                    piece.push_str(done);
                }
                if (!piece.is_empty() && sender.send(Bytes::from(piece)).await.is_err()) || ended {
                    return;
                }
                next = tokio::select! {
                    () = sender.closed() => return,
                    () = sleep_until(deadline) => {
                        let event = format!("data: {}\n\n", self.too_slow().to_json());
                        _ = sender.send(Bytes::from(event)).await;
                        return;
                    }
                    news = answers.next() => news,
                };
            }
        });
        Ok(([(CONTENT_TYPE, "text/event-stream"), (axum::http::header::CACHE_CONTROL, "no-cache")], body)
            .into_response())
    }
}

impl Outcome {
    /// Nothing yet.
    pub fn new(call: &Call, texts: &Texts) -> Outcome {
        let Wanted { stop, skip_special, keep_stop, n, .. } = &call.wanted;
        let growth = || Growth {
            ids: Vec::new(),
            logprobs: Vec::new(),
            top: Vec::new(),
            text: String::new(),
            finish: None,
            aborted: false,
            growing: texts.grow(stop, *skip_special, *keep_stop),
        };
        Outcome {
            weights: WeightVersion::default(),
            samples: (0..*n).map(|_| growth()).collect(),
            prompt: PromptScores::default(),
        }
    }

    /// Takes note of what is new.
    pub fn take(&mut self, news: News) -> Result<(), ApiError> {
        match news {
            News::Began(weights) => self.weights = weights,
            News::Tokens(tokens) => {
                for token in tokens {
                    self.grow(token);
                }
            }
            News::Done(prompt) => self.prompt = prompt,
            News::Aborted => self.abort(),
            News::Failed(failure) => return Err(failure.into()),
        }
        Ok(())
    }

    /// Adds a token to its sample; gives the text that is now certain.
    pub fn grow(&mut self, token: Token) -> String {
        let sample = &mut self.samples[token.sample as usize];
        let text = sample.growing.push(token.id, token.finish);
        sample.ids.push(token.id);
        sample.logprobs.push(token.logp);
        sample.top.push(token.top);
        sample.text.push_str(&text);
        sample.finish = token.finish;
        text
    }

    /// Ends the samples that have not ended.
    pub fn abort(&mut self) {
        for sample in self.samples.iter_mut().filter(|sample| sample.finish.is_none()) {
            let rest = sample.growing.end(false);
            sample.text.push_str(&rest);
            sample.aborted = true;
        }
    }

    /// New tokens of all samples.
    pub fn new_tokens(&self) -> usize {
        self.samples.iter().map(|sample| sample.ids.len()).sum()
    }
}

impl Growth {
    /// The word for why it ended.
    pub fn finish_reason(&self) -> &'static str {
        self.finish.map_or("abort", FinishReason::name)
    }

    /// What ended it, in vLLM's words: a stop string, or a stop token that the request itself named.
    pub fn stop_reason(&self, wanted: &Wanted) -> Value {
        match self.finish {
            Some(FinishReason::StopString(i)) => json!(wanted.stop.get(i)),
            Some(FinishReason::StopId(id)) if wanted.stop_ids.contains(&id) => json!(id),
            _ => Value::Null,
        }
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

/// An f32 as JSON: the shortest decimal that reads back as the same f32.
pub fn number(value: f32) -> Value {
    json!(value.to_string().parse::<f64>().unwrap_or(f64::from(value)))
}

/// `{"prompt_tokens", "completion_tokens", "total_tokens"}`.
pub fn usage(prompt: usize, new: usize) -> Value {
    json!({"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new})
}
