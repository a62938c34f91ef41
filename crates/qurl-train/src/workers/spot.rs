//! Computing parts of an answer again: what tells a worker that lies, or whose machine fails, from one that
//! does what it says.
//!
//! Of a sample that is checked, all log-probs are scored again, by a prefill of all of its tokens but the
//! last, and two tokens are sampled again with the random numbers of their positions: the last, and one
//! anywhere. On devices of one kind both must be the same to the bit, since prefill, decode and whoever
//! computes do not change a bit. Between kinds log-probs are compared within a tolerance and no token is
//! sampled again.

use qurl_kernels::Device;
use qurl_rollout::{Engine, Request, RolloutError, Sample};

/// How far log-probs of one token, and their mean distance, may lie apart between kinds of devices.
const FAR: f32 = 1.0;
const FAR_MEAN: f32 = 0.05;

/// A sample to check.
#[derive(Clone, Debug, PartialEq)]
pub struct Spot {
    /// What was asked for.
    pub request: Request,
    /// The sample's number.
    pub number: u32,
    /// What came.
    pub sample: Sample,
    /// The token that is sampled again, beside the last.
    pub again: usize,
}

impl Spot {
    /// What computes it again: up to the last token, and up to the one anywhere.
    fn requests(&self) -> [Request; 2] {
        let up_to = |at: usize| Request {
            n: 1,
            first_sample: self.request.first_sample + self.number,
            sampling: self.request.sampling,
            key: self.request.key,
            prompt_logprobs: true,
            ..Request::new([&self.request.prompt[..], &self.sample.tokens[..at]].concat(), 1)
        };
        [up_to(self.sample.tokens.len() - 1), up_to(self.again.min(self.sample.tokens.len() - 1))]
    }
}

/// Checks samples; for each, what is wrong with it, if anything. `same_kind` is whether bits must be equal.
pub fn verify<D: Device>(
    queue: &mut D::Queue,
    engine: &mut Engine<D>,
    spots: &[Spot],
    same_kind: bool,
) -> Result<Vec<Option<String>>, RolloutError> {
    let requests: Vec<Request> = spots.iter().flat_map(Spot::requests).collect();
    let groups = engine.generate(queue, &requests)?;
    let verdict = |(spot, groups): (&Spot, &[qurl_rollout::Group])| {
        let first = spot.request.prompt.len();
        let sample = &spot.sample;
        // With truncated or biased sampling the log-probs of sampled tokens are not those of scoring.
        if spot.request.is_full() {
            let scored = &groups[0].prompt_logprobs[first - 1..];
            if let Some(wrong) = apart(&sample.logprobs, scored, same_kind) {
                return Some(wrong);
            }
        }
        let again =
            groups.iter().filter(|_| same_kind).map(|group| (group.prompt.len() - first, &group.samples[0]));
        again.into_iter().find_map(|(at, own)| {
            let bits =
                |s: &Sample, at: usize| (s.tokens[at], s.logprobs[at].to_bits(), s.entropies[at].to_bits());
            (bits(sample, at) != bits(own, 0)).then(|| {
                format!(
                    "token {at} is {} with log-prob {}, sampled again it is {} with {}",
                    sample.tokens[at], sample.logprobs[at], own.tokens[0], own.logprobs[0]
                )
            })
        })
    };
    Ok(spots.iter().zip(groups.chunks(2)).map(verdict).collect())
}

/// What is wrong with log-probs, if anything.
fn apart(given: &[f32], scored: &[f32], same_kind: bool) -> Option<String> {
    let pairs = || given.iter().zip(scored).enumerate();
    if same_kind {
        let wrong = pairs().find(|(_, (a, b))| a.to_bits() != b.to_bits());
        return wrong
            .map(|(at, (a, b))| format!("the log-prob of token {at} is {a}, scored again it is {b}"));
    }
    let sum: f32 = pairs().map(|(_, (a, b))| (a - b).abs()).sum();
    let far = pairs().find(|(_, (a, b))| (*a - *b).abs() > FAR);
    let mean = sum / scored.len().max(1) as f32;
    match far {
        Some((at, (a, b))) => Some(format!("the log-prob of token {at} is {a}, scored again it is {b}")),
        None => {
            (mean > FAR_MEAN).then(|| format!("log-probs are {mean} from those scored again in the mean"))
        }
    }
}
