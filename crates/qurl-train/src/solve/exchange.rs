//! Responses of all ranks to all ranks, and failures of one rank to the others.
//!
//! A rank that fails to sample or to judge still takes part in the exchange, so that no other waits for it in
//! vain: all ranks end with an error, the one with its own and the others with one that names it.

use super::{Response, SolveError};
use crate::ranks::Ranks;
use crate::wire::{Wire, wire};
use qurl_kernels::DeviceError;
use qurl_kernels::collective::CollectiveError;
use qurl_rollout::{FinishReason, RolloutError, Sample, WeightVersion};
use qurl_tasks::task::Verdict;

/// Why another rank failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Its weights or logits are not finite.
    NotFinite,
    /// It was told to end.
    Cancelled,
    /// Anything else.
    Other,
}

impl Trouble {
    /// What an error of this rank means to the others.
    fn of(error: &SolveError) -> Trouble {
        match error {
            SolveError::Rollout(engine) if is_not_finite(engine) => Trouble::NotFinite,
            SolveError::Reward(error) if error.is_cancelled() => Trouble::Cancelled,
            _ => Trouble::Other,
        }
    }
}

/// Whether the engine could not sample because the model is not finite.
pub(crate) fn is_not_finite(engine: &RolloutError) -> bool {
    matches!(engine, RolloutError::BadLogits { .. } | RolloutError::Device(DeviceError::Pack { .. }))
}

/// What a rank sends: its responses, or why there are none.
type Sent = (Vec<Vec<Response>>, Option<(Trouble, String)>);

/// Gathers the responses of all ranks, in their order.
pub(super) fn gather(
    ranks: &Ranks,
    own: Result<Vec<Vec<Response>>, SolveError>,
) -> Result<Vec<Vec<Response>>, SolveError> {
    if ranks.size() == 1 {
        return own;
    }
    let (sent, failed): (Sent, _) = match own {
        Ok(responses) => ((responses, None), None),
        Err(error) => ((Vec::new(), Some((Trouble::of(&error), error.to_string()))), Some(error)),
    };
    let all = ranks.join(vec![sent]).map_err(exchange)?;
    if let Some(error) = failed {
        return Err(error);
    }
    let mut responses = Vec::new();
    for (rank, (of_rank, trouble)) in all.into_iter().enumerate() {
        if let Some((trouble, reason)) = trouble {
            return Err(SolveError::OtherRank { rank, trouble, reason });
        }
        responses.extend(of_rank);
    }
    Ok(responses)
}

fn exchange(error: CollectiveError) -> SolveError {
    RolloutError::Device(error.into()).into()
}

impl Wire for Trouble {
    fn put(&self, to: &mut Vec<u8>) {
        (*self as u8).put(to);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        [Trouble::NotFinite, Trouble::Cancelled, Trouble::Other].get(usize::from(u8::take(from)?)).copied()
    }
}

impl Wire for FinishReason {
    fn put(&self, to: &mut Vec<u8>) {
        let (kind, number): (u8, u64) = match *self {
            FinishReason::StopId(id) => (0, id.into()),
            FinishReason::StopString(place) => (1, place as u64),
            FinishReason::Length => (2, 0),
            FinishReason::Context => (3, 0),
        };
        (kind, number).put(to);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        let (kind, number) = <(u8, u64)>::take(from)?;
        match kind {
            0 => Some(FinishReason::StopId(number.try_into().ok()?)),
            1 => Some(FinishReason::StopString(number.try_into().ok()?)),
            2 => Some(FinishReason::Length),
            3 => Some(FinishReason::Context),
            _ => None,
        }
    }
}

wire!(WeightVersion { version, checksum });
wire!(Sample { tokens, logprobs, entropies, finish, weights });
wire!(Verdict { correct, reward, parts, extracted });
wire!(Response { sample, text, verdict });

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_travel_whole() {
        let finishes = [
            FinishReason::StopId(7),
            FinishReason::StopString(2),
            FinishReason::Length,
            FinishReason::Context,
        ];
        for finish in finishes {
            let response = Response {
                sample: Sample {
                    tokens: vec![3, 7],
                    logprobs: vec![-0.25, -0.0],
                    entropies: vec![1.5, f32::MIN_POSITIVE],
                    finish,
                    weights: WeightVersion { version: 9, checksum: u64::MAX },
                },
                text: "four".to_string(),
                verdict: Verdict {
                    correct: true,
                    reward: 0.1,
                    parts: vec![("format".to_string(), 1.0)],
                    extracted: Some("4".to_string()),
                },
            };
            assert_eq!(Response::take(&mut response.bytes().as_slice()), Some(response));
        }
        for trouble in [Trouble::NotFinite, Trouble::Cancelled, Trouble::Other] {
            assert_eq!(Trouble::take(&mut trouble.bytes().as_slice()), Some(trouble));
        }
    }
}
