//! Whether an answer can be what was asked for: everything that can be said of it without computing it again.

use qurl_rollout::{FinishReason, Request, Sample, WeightVersion};

/// How far above zero rounding may bring a log-prob, or an entropy below zero or above the uniform one.
const ROUNDING: f32 = 1e-3;

/// Checks the samples of a prompt made with these weights; what is wrong, if anything.
pub fn check(
    request: &Request,
    samples: &[Sample],
    weights: WeightVersion,
    (vocabulary, context): (usize, usize),
) -> Result<(), String> {
    if samples.len() != request.n {
        return Err(format!("{} samples, expected {}", samples.len(), request.n));
    }
    for (i, sample) in samples.iter().enumerate() {
        one(request, i as u32, sample, weights, vocabulary, context)
            .map_err(|e| format!("sample {i}: {e}"))?;
    }
    Ok(())
}

fn one(
    request: &Request,
    number: u32,
    sample: &Sample,
    weights: WeightVersion,
    vocabulary: usize,
    context: usize,
) -> Result<(), String> {
    let Sample { tokens, logprobs, entropies, finish, weights: made_with } = sample;
    if *made_with != weights {
        return Err(format!("made with {made_with}, expected {weights}"));
    }
    let (count, limit) = (tokens.len(), request.limit_of(number));
    if !(1..=limit).contains(&count) || request.prompt.len() + count > context {
        return Err(format!("{count} tokens, expected 1 to {limit} in a context of {context}"));
    }
    if (logprobs.len(), entropies.len()) != (count, count) {
        let (l, e) = (logprobs.len(), entropies.len());
        return Err(format!("{l} log-probs and {e} entropies of {count} tokens"));
    }
    if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
        return Err(format!("token {token} is outside of the vocabulary of {vocabulary}"));
    }
    if let Some(logp) = logprobs.iter().find(|x| !(x.is_finite() && **x <= ROUNDING)) {
        return Err(format!("a log-prob of {logp}"));
    }
    let uniform = (vocabulary as f64).ln() as f32;
    let possible = -ROUNDING..=uniform + ROUNDING;
    if let Some(entropy) = entropies.iter().find(|x| !possible.contains(x)) {
        return Err(format!("an entropy of {entropy}, of at most {uniform}"));
    }
    let stops = |token: &u32| request.stop_ids.contains(token);
    if let Some(at) = tokens[..count - 1].iter().position(stops) {
        return Err(format!("stop token {} at {at} of {count}", tokens[at]));
    }
    let last = tokens[count - 1];
    let as_said = match *finish {
        FinishReason::StopId(id) => id == last && stops(&last),
        FinishReason::StopString(place) => place < request.stop_strings.len() && !stops(&last),
        FinishReason::Length => count == limit && !stops(&last),
        FinishReason::Context => request.prompt.len() + count == context && !stops(&last),
    };
    if as_said { Ok(()) } else { Err(format!("{finish:?} is not how {count} tokens to {last} end")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_an_answer_is_named() {
        let weights = WeightVersion { version: 3, checksum: 9 };
        let request = Request { stop_ids: vec![7], ..Request::new(vec![1, 2], 3) };
        let good = Sample {
            tokens: vec![4, 5, 7],
            logprobs: vec![-1.0, -0.5, 0.0],
            entropies: vec![1.0, 0.0, 2.303], // ln 10 is less, by a rounding
            finish: FinishReason::StopId(7),
            weights,
        };
        let found = |sample: Sample| check(&request, &[sample], weights, (10, 64));
        assert_eq!(found(good.clone()), Ok(()));
        let long = Sample { tokens: vec![4, 5, 6], finish: FinishReason::Length, ..good.clone() };
        assert_eq!(found(long.clone()), Ok(()));
        let two = check(&request, &[good.clone(), good.clone()], weights, (10, 64));
        assert_eq!(two, Err("2 samples, expected 1".to_string()));
        let cases: [(&str, Sample); 12] = [
            ("made with", Sample { weights: WeightVersion { version: 2, ..weights }, ..good.clone() }),
            ("made with", Sample { weights: WeightVersion { checksum: 8, ..weights }, ..good.clone() }),
            ("expected 1 to 3", Sample { tokens: vec![4; 4], ..good.clone() }),
            ("2 log-probs", Sample { logprobs: vec![-1.0; 2], ..good.clone() }),
            ("outside of the vocabulary", Sample { tokens: vec![4, 10, 7], ..good.clone() }),
            ("log-prob of NaN", Sample { logprobs: vec![-1.0, f32::NAN, 0.0], ..good.clone() }),
            ("log-prob of 1", Sample { logprobs: vec![-1.0, 1.0, 0.0], ..good.clone() }),
            ("an entropy", Sample { entropies: vec![1.0, -1.0, 0.0], ..good.clone() }),
            ("an entropy", Sample { entropies: vec![1.0, 2.31, 0.0], ..good.clone() }),
            ("an entropy", Sample { entropies: vec![1.0, f32::NAN, 0.0], ..good.clone() }),
            ("stop token 7 at 0", Sample { tokens: vec![7, 5, 7], ..good.clone() }),
            ("is not how", Sample { finish: FinishReason::Length, ..good }),
        ];
        for (part, sample) in cases {
            let error = found(sample.clone()).expect_err(part);
            assert!(error.contains(part), "{sample:?}: {error}");
        }
        for finish in [FinishReason::StopId(6), FinishReason::StopString(0), FinishReason::Context] {
            assert!(found(Sample { finish, ..long.clone() }).is_err(), "{finish:?}");
        }
    }
}
