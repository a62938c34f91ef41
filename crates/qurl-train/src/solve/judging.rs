//! Judging beside sampling: responses to earlier prompts are judged while later ones are still sampled, so
//! that a grader that takes its time does not leave the device without work.
//!
//! What is judged together does not depend on which responses ended first: it is the next prompts in their
//! order, [`TOGETHER`] at a time, once all of their samples are there. So a reward that looks at what it is
//! asked with gives the same in every run.

use super::{Response, SolveError};
use qurl_rollout::Group;
use std::ops::Range;
use std::sync::mpsc;
use std::time::Instant;

/// Prompts whose responses are judged together. Fewer than twice as many are judged at once, at the end: a
/// reward command without numbered replies waits for silence after each batch.
const TOGETHER: usize = 32;

/// Lets `sample` make a group for each of so many prompts, and `judge` judge them beside it; the second
/// result is how many seconds judging took after the last sample. `sample` hands over groups by their
/// numbers, in any order, and ends early where it is told that no more are wanted.
pub(super) fn beside_sampling(
    prompts: usize,
    sample: impl FnOnce(&mut dyn FnMut(usize, Group) -> bool) -> Result<(), SolveError>,
    judge: impl Fn(Range<usize>, Vec<Group>) -> Result<Vec<Vec<Response>>, SolveError> + Sync,
) -> Result<(Vec<Vec<Response>>, f64), SolveError> {
    let parts = parts(prompts);
    let (send, receive) = mpsc::channel::<Vec<Group>>();
    std::thread::scope(|scope| {
        let judging = scope.spawn(|| {
            let mut judged = Vec::with_capacity(prompts);
            for (part, groups) in parts.iter().zip(receive) {
                judged.extend(judge(part.clone(), groups)?);
            }
            Ok(judged)
        });
        let mut slots: Vec<Option<Group>> = (0..prompts).map(|_| None).collect();
        let mut waiting = parts.iter().cloned().peekable();
        let sampled = sample(&mut |number, group| {
            slots[number] = Some(group);
            while let Some(part) = waiting.next_if(|part| slots[part.clone()].iter().all(Option::is_some)) {
                // Nobody receives once a batch could not be judged.
                if send.send(slots[part].iter_mut().filter_map(Option::take).collect()).is_err() {
                    return false;
                }
            }
            true
        });
        drop(send);
        let ended = Instant::now();
        let judged = judging.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        sampled?;
        judged.map(|judged| (judged, ended.elapsed().as_secs_f64()))
    })
}

/// Numbers of prompts whose responses are judged together; the last part has what is left over, too.
fn parts(prompts: usize) -> Vec<Range<usize>> {
    let count = (prompts / TOGETHER).max(1);
    let begin = |part: usize| if part == count { prompts } else { part * TOGETHER };
    (0..count).map(|part| begin(part)..begin(part + 1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use qurl_rollout::{FinishReason, RequestId, Sample, SampleKey, WeightVersion};
    use qurl_tasks::task::Verdict;
    use std::sync::Mutex;
    use std::time::Duration;

    fn group(number: usize) -> Group {
        let sample = Sample {
            tokens: vec![number as u32],
            logprobs: vec![-1.0],
            entropies: vec![0.5],
            finish: FinishReason::Length,
            weights: WeightVersion::default(),
        };
        Group {
            request: RequestId(number as u64),
            key: SampleKey { seed: 1, step: 1, prompt: number as u64 },
            prompt: vec![1],
            prompt_logprobs: Vec::new(),
            prompt_top: Vec::new(),
            cached_tokens: 0,
            samples: vec![sample],
        }
    }

    fn right(groups: Vec<Group>) -> Vec<Vec<Response>> {
        let response = |sample: Sample| {
            let (text, verdict) = (sample.tokens[0].to_string(), Verdict::new(true, true, 0.0, None));
            vec![Response { sample, text, verdict }]
        };
        groups.into_iter().flat_map(|g| g.samples).map(response).collect()
    }

    fn texts(judged: &[Vec<Response>]) -> Vec<usize> {
        judged.iter().map(|responses| responses[0].text.parse().expect("a number")).collect()
    }

    #[test]
    fn earlier_prompts_are_judged_while_later_ones_are_sampled() {
        let (tell, hear) = mpsc::channel();
        let sample = |give: &mut dyn FnMut(usize, Group) -> bool| {
            for number in (0..TOGETHER).rev() {
                assert!(give(number, group(number)));
            }
            // The first part is judged, and the rest is not there yet.
            assert_eq!(hear.recv_timeout(Duration::from_secs(60)), Ok(0..TOGETHER));
            (TOGETHER..70).for_each(|number| assert!(give(number, group(number))));
            Ok(())
        };
        let judge = |part: Range<usize>, groups: Vec<Group>| {
            assert_eq!(groups.len(), part.len());
            _ = tell.send(part);
            Ok(right(groups))
        };
        let (judged, seconds) = beside_sampling(70, sample, judge).expect("judged");
        assert_eq!(texts(&judged), (0..70).collect::<Vec<_>>());
        assert!(seconds >= 0.0);
    }

    #[test]
    fn what_is_judged_together_does_not_depend_on_what_ends_first() {
        let order = |key: usize| {
            let mut numbers: Vec<usize> = (0..150).collect();
            numbers.sort_by_key(|&number| (number * key) % 151);
            numbers
        };
        for key in [1, 7, 64, 150] {
            let asked = Mutex::new(Vec::new());
            let sample = |give: &mut dyn FnMut(usize, Group) -> bool| {
                order(key).into_iter().for_each(|number| _ = give(number, group(number)));
                Ok(())
            };
            let judge = |part: Range<usize>, groups| {
                asked.lock().expect("no panic").push(part);
                Ok(right(groups))
            };
            let (judged, _) = beside_sampling(150, sample, judge).expect("judged");
            assert_eq!(texts(&judged), (0..150).collect::<Vec<_>>(), "{key}");
            assert_eq!(*asked.lock().expect("no panic"), [0..32, 32..64, 64..96, 96..150], "{key}");
        }
        let ends = |prompts| parts(prompts).iter().map(|part| part.end).collect::<Vec<_>>();
        assert_eq!([ends(0), ends(63), ends(64)], [vec![0], vec![63], vec![32, 64]]);
    }

    #[test]
    fn sampling_ends_where_a_batch_cannot_be_judged() {
        let mut given = 0;
        let sample = |give: &mut dyn FnMut(usize, Group) -> bool| {
            for number in 0..3200 {
                given += 1;
                // The judge needs a moment to fail.
                std::thread::sleep(Duration::from_micros(if number < 32 { 0 } else { 200 }));
                if !give(number, group(number)) {
                    return Ok(());
                }
            }
            Ok(())
        };
        let failed = |_: Range<usize>, _: Vec<Group>| {
            Err(SolveError::NoProblems { task: "reward".to_string(), split: qurl_tasks::task::Split::Train })
        };
        let result = beside_sampling(3200, sample, failed);
        assert!(matches!(result, Err(SolveError::NoProblems { .. })));
        assert!(given < 3200, "{given}");
    }

    #[test]
    fn an_error_of_sampling_is_the_one_that_is_told() {
        let sample = |_: &mut dyn FnMut(usize, Group) -> bool| {
            Err(SolveError::NoProblems { task: "sampling".to_string(), split: qurl_tasks::task::Split::Test })
        };
        let result = beside_sampling(100, sample, |_, groups| Ok(right(groups)));
        assert!(matches!(result, Err(SolveError::NoProblems { task, .. }) if task == "sampling"));
    }
}
