//! Clients that arrive at a rate, and what they see.

use crate::input::bad;
use qurl_model::rng::CounterRng;
use qurl_serve::client;
use qurl_serve::http::runtime;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::net::SocketAddr;
use std::path::Path;
use std::str::FromStr;
use std::time::{Duration, Instant};
use tokio::time::sleep_until;

/// What a piece of a stream holds once for every token.
const TOKEN: &[u8] = b"\"token_ids\":[";

/// Requests a second; all at once where there is no number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate(Option<f64>);

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Rate, String> {
        match text.parse::<f64>() {
            Ok(rate) if rate == f64::INFINITY => Ok(Rate(None)),
            Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(Rate(Some(rate))),
            _ => Err("expected a number above 0, or inf".to_string()),
        }
    }
}

impl Rate {
    /// Whether all arrive at once.
    pub fn is_all(self) -> bool {
        self.0.is_none()
    }

    /// How many of so many requests arrive in so many seconds, at least one.
    pub fn requests(self, most: usize, seconds: Option<u64>) -> usize {
        match (self.0, seconds) {
            (Some(rate), Some(seconds)) => ((rate * seconds as f64) as usize).clamp(1, most),
            _ => most,
        }
    }
}

/// Tokens of prompts and answers.
pub struct Sizes(Vec<(usize, usize)>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    prompt: usize,
    new: usize,
}

impl Sizes {
    /// Those of a file, or always the same.
    pub fn read(file: Option<&Path>, prompt: usize, new: usize) -> anyhow::Result<Sizes> {
        let Some(file) = file else { return Ok(Sizes(vec![(prompt, new)])) };
        let name = file.display();
        let text = qurl_files::read_text(file, 64 * qurl_files::MIB)
            .map_err(|e| bad(format!("--lengths {name}: {e}")))?;
        let mut sizes = Vec::new();
        for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
            match serde_json::from_str(line) {
                Ok(Line { prompt: prompt @ 1.., new: new @ 1.. }) => sizes.push((prompt, new)),
                Ok(_) => {
                    return Err(bad(format!("--lengths {name}, line {number}: expected at least 1 token")));
                }
                Err(e) => return Err(bad(format!("--lengths {name}, line {number}: {e}"))),
            }
        }
        match sizes.is_empty() {
            true => Err(bad(format!("--lengths {name}: is empty"))),
            false => Ok(Sizes(sizes)),
        }
    }

    /// Those of a request.
    pub fn of(&self, number: usize) -> (usize, usize) {
        self.0[number % self.0.len()]
    }

    /// Tokens of the longest sequence.
    pub fn longest(&self) -> usize {
        self.0.iter().map(|(prompt, new)| prompt + new).max().unwrap_or(0)
    }
}

/// A random prompt, unlike any other.
pub fn prompt(round: u64, number: u64, len: usize, vocabulary: u32) -> Vec<u32> {
    let random = CounterRng::new(&[17, round, number]);
    (0..len as u64).map(|i| random.below_at(i, u64::from(vocabulary)) as u32).collect()
}

/// Of some times in seconds: the mean, and what 50, 90 and 99 of 100 do not exceed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
}

impl Spread {
    pub fn of(mut times: Vec<f64>) -> Spread {
        if times.is_empty() {
            return Spread::default();
        }
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() as f64 * share).ceil() as usize).clamp(1, times.len()) - 1];
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        Spread { mean, p50: at(0.5), p90: at(0.9), p99: at(0.99) }
    }
}

/// What the clients of a measurement saw.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Requests a second that arrived; nothing where all did at once.
    pub rate: Option<f64>,
    pub requests: usize,
    /// Requests that were refused or not answered to the end.
    pub failed: usize,
    pub prompt_tokens: usize,
    pub new_tokens: usize,
    /// From the first arrival to the last end.
    pub seconds: f64,
    pub requests_per_s: f64,
    pub tokens_per_s: f64,
    pub first_token_s: Spread,
    /// All gaps between two tokens of a request.
    pub between_tokens_s: Spread,
    /// The mean gap of each request.
    pub per_token_s: Spread,
    pub request_s: Spread,
}

/// What one client saw: when each of its tokens came, from its arrival on.
struct Seen {
    times: Vec<Duration>,
    whole: Duration,
    ended: Instant,
    complete: bool,
}

impl Seen {
    fn per_token(&self) -> Option<f64> {
        let (first, last) = (self.times.first()?, self.times.last()?);
        per_token(first.as_secs_f64(), last.as_secs_f64(), self.times.len())
    }
}

/// The mean time between the tokens of a request that came at these times. Tokens that come together make
/// most gaps nothing and few long; the mean does not care.
pub fn per_token(first: f64, last: f64, tokens: usize) -> Option<f64> {
    (tokens > 1).then(|| (last - first) / (tokens - 1) as f64)
}

/// One measurement.
#[derive(Clone, Copy)]
pub struct Load {
    pub rate: Rate,
    pub requests: usize,
    /// Its prompts and moments are unlike those of any other.
    pub round: u64,
    /// Prompts have ids below this.
    pub vocabulary: u32,
}

/// Lets requests arrive and waits for all answers.
pub fn run(
    address: SocketAddr,
    key: Option<&str>,
    Load { rate, requests, round, vocabulary }: Load,
    sizes: &Sizes,
) -> anyhow::Result<Figures> {
    let random = CounterRng::new(&[23, round]);
    let mut arrival = 0.0;
    let calls: Vec<(f64, String, usize)> = (0..requests)
        .map(|number| {
            let (len, new) = sizes.of(number);
            let ids = prompt(round, number as u64, len, vocabulary);
            let body = json!({
                "prompt": ids, "max_tokens": new, "ignore_eos": true, "seed": number, "stream": true,
                "return_token_ids": true,
            });
            let at = arrival;
            if let Rate(Some(rate)) = rate {
                arrival -= (1.0 - random.uniform_f64_at(number as u64)).ln() / rate;
            }
            (at, body.to_string(), new)
        })
        .collect();
    let runtime = runtime(2)?;
    let began = Instant::now();
    let seen: Vec<Option<Seen>> = runtime.block_on(async {
        let ask = |(at, body, new): (f64, String, usize)| {
            let key = key.map(str::to_string);
            tokio::spawn(async move {
                let arrival = began + Duration::from_secs_f64(at);
                sleep_until(arrival.into()).await;
                let (mut times, mut rest) = (Vec::with_capacity(new), Vec::new());
                let piece = |piece: &[u8]| {
                    // A token may be cut in two by the pieces of the network.
                    rest.extend_from_slice(piece);
                    let found = rest.windows(TOKEN.len()).filter(|window| *window == TOKEN).count();
                    times.extend(std::iter::repeat_n(arrival.elapsed(), found));
                    let keep = rest.len().min(TOKEN.len() - 1);
                    rest.drain(..rest.len() - keep);
                };
                let status =
                    client::post(address, "/v1/completions", key.as_deref(), body, piece).await.ok()?;
                let complete = status == 200 && times.len() == new;
                Some(Seen { times, whole: arrival.elapsed(), ended: Instant::now(), complete })
            })
        };
        let asked: Vec<_> = calls.into_iter().map(ask).collect();
        let mut seen = Vec::new();
        for asked in asked {
            seen.push(asked.await.ok().flatten());
        }
        seen
    });
    runtime.shutdown_background();
    let whole: Vec<&Seen> = seen.iter().flatten().filter(|seen| seen.complete).collect();
    if whole.is_empty() {
        return Err(anyhow::anyhow!("http://{address}: none of {requests} requests was answered"));
    }
    let end = whole.iter().map(|seen| seen.ended).max().unwrap_or(began);
    let seconds = (end - began).as_secs_f64();
    let new_tokens: usize = whole.iter().map(|seen| seen.times.len()).sum();
    let first = whole.iter().filter_map(|seen| seen.times.first()).map(Duration::as_secs_f64).collect();
    let between = whole.iter().flat_map(|seen| seen.times.windows(2));
    Ok(Figures {
        rate: rate.0,
        requests,
        failed: requests - whole.len(),
        prompt_tokens: (0..requests).map(|number| sizes.of(number).0).sum(),
        new_tokens,
        seconds,
        requests_per_s: whole.len() as f64 / seconds,
        tokens_per_s: new_tokens as f64 / seconds,
        first_token_s: Spread::of(first),
        between_tokens_s: Spread::of(between.map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect()),
        per_token_s: Spread::of(whole.iter().filter_map(|seen| seen.per_token()).collect()),
        request_s: Spread::of(whole.iter().map(|seen| seen.whole.as_secs_f64()).collect()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Eight tokens that come in two pieces: most gaps are nothing, the time for each is not.
    #[test]
    fn tokens_that_come_together_take_their_time() {
        let seconds = [1.0, 1.0, 1.0, 1.0, 1.7, 1.7, 1.7, 1.7];
        let times: Vec<Duration> = seconds.into_iter().map(Duration::from_secs_f64).collect();
        let gaps = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        assert_eq!(Spread::of(gaps).p50, 0.0);
        let seen = Seen { times, whole: Duration::from_secs(2), ended: Instant::now(), complete: true };
        assert!(seen.per_token().is_some_and(|time| (time - 0.1).abs() < 1e-9));
        assert_eq!((per_token(1.0, 1.0, 1), per_token(1.0, 3.0, 2)), (None, Some(2.0)));
    }

    #[test]
    fn percentiles_are_times_that_were_seen() {
        let spread = Spread::of((1..=100).rev().map(f64::from).collect());
        assert_eq!(spread, Spread { mean: 50.5, p50: 50.0, p90: 90.0, p99: 99.0 });
        assert_eq!(Spread::of(vec![3.0]), Spread { mean: 3.0, p50: 3.0, p90: 3.0, p99: 3.0 });
        assert_eq!("inf".parse(), Ok(Rate(None)));
        assert_eq!("2.5".parse(), Ok(Rate(Some(2.5))));
        let Ok(slow) = "2.5".parse::<Rate>() else { panic!("a rate") };
        assert_eq!([None, Some(3), Some(900)].map(|seconds| slow.requests(64, seconds)), [64, 7, 64]);
        assert_eq!((Rate(None).requests(64, Some(1)), Rate(Some(0.1)).requests(64, Some(1))), (64, 1));
        for text in ["0", "-1", "NaN", "fast", ""] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
    }
}
