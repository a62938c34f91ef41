//! Sampled tokens: their log-probabilities are the head's own, rows are independent, and what was fetched
//! stays.

use crate::ops::{Ops, cpus};
use crate::paged::sampling;
use crate::support::Random;
use qurl_kernels::cpu::level::Level;
use qurl_kernels::ops::{Head, Sample, Top};
use qurl_kernels::types::{Batch, SampleRow};
use qurl_kernels::{Cpu, Device, Format, Queue};

/// Rows with every kind of truncation, and greedy ones.
pub(crate) fn mixed_rows(rows: usize, offset: f64) -> Vec<SampleRow> {
    let row = |i: usize| SampleRow {
        temperature: [0.0, 0.6, 1.0, 1.7][i % 4],
        top_p: if i.is_multiple_of(5) { 0.7 } else { 1.0 },
        top_k: if i.is_multiple_of(7) { 40 } else { 0 },
        min_p: if i.is_multiple_of(11) { 0.02 } else { 0.0 },
        uniform: (i as f64 + offset) / rows as f64,
    };
    (0..rows).map(row).collect()
}

/// The most probable tokens against a sort of all log-probs by the head; equals stand in the order of the
/// vocabulary, and a row that is not finite has none.
pub(crate) fn check_top_tokens<D: Device>(ops: &Ops<D>, format: Format, what: &str) {
    for (rows, k, vocabulary, count) in [(1, 16, 7, 7), (5, 48, 1300, 20), (3, 32, 513, 1)] {
        let values =
            |len: usize, seed: f32| (0..len).map(|i| ((i as f32 + seed) * 12.9898).sin() * 1.5).collect();
        let (hidden, mut weights): (Vec<f32>, Vec<f32>) =
            (values(rows * k, 0.5), values(vocabulary * k, 7.0));
        let twin = weights[k..2 * k].to_vec();
        weights[5 * k..6 * k].copy_from_slice(&twin); // tokens 1 and 5 are equal
        let temperatures: Vec<f32> = (0..rows).map(|row| [1.0, 0.6, 1.7][row % 3]).collect();
        let factors: Vec<f32> = temperatures.iter().map(|temperature| 1.0 / temperature).collect();
        let head = &ops.frozen(&weights, vocabulary, k, format);
        let top = Top { hidden: &ops.up(&hidden), head, factors: &factors, count };
        let found = ops.queue().top(top).expect("memory for logits");
        for (row, found) in found.iter().enumerate() {
            let targets: Vec<u32> = (0..vocabulary as u32).collect();
            let hidden = &ops.up(&hidden[row * k..(row + 1) * k].repeat(vocabulary));
            let all = Head { hidden, head, targets: &targets, temperature: temperatures[row] };
            let logp = ops.queue().head(all).expect("memory for the head").logp;
            let mut expected: Vec<(u32, f32)> = targets.into_iter().zip(logp).collect();
            expected.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            let bits =
                |tokens: &[(u32, f32)]| tokens.iter().map(|t| (t.0, t.1.to_bits())).collect::<Vec<_>>();
            assert_eq!(bits(found), bits(&expected[..count]), "{what} {format}: row {row}");
        }
        let broken = vec![f32::NAN; k];
        let top = Top { hidden: &ops.up(&broken), head, factors: &factors[..1], count };
        assert_eq!(ops.queue().top(top), Ok(vec![Vec::new()]), "{what} {format}: a row that is not finite");
    }
}

#[test]
fn the_most_probable_tokens_have_the_heads_own_log_probs() {
    for level in Level::available() {
        for format in [Format::F32, Format::Bf16] {
            check_top_tokens(&Ops::new(Cpu::new(level, 2)), format, &level.to_string());
        }
    }
}

/// Log-probs are the head's own; neither the other rows nor the threads matter; rows that are not finite say
/// so.
#[test]
fn rows_are_independent_and_score_as_the_head_does() {
    let (rows, k, vocabulary) = (37, 48, 1300);
    let values =
        |len: usize, seed: f32| (0..len).map(|i| ((i as f32 + seed) * 12.9898).sin() * 1.5).collect();
    let (hidden, weights): (Vec<f32>, Vec<f32>) = (values(rows * k, 0.5), values(vocabulary * k, 7.0));
    let batch = sampling(mixed_rows(rows, 0.5));
    for (level, format) in
        Level::available().into_iter().flat_map(|level| [(level, Format::F32), (level, Format::Bf16)])
    {
        let run = |threads: usize| {
            let cpu = Ops::new(Cpu::new(level, threads));
            let packed = cpu.frozen(&weights, vocabulary, k, format);
            let sampled = cpu.sample(&cpu.up(&hidden), &packed, &batch);
            (cpu, packed, sampled)
        };
        let (cpu, head, all) = run(1);
        assert_eq!(run(3).2, all, "{level} {format}: threads");
        for (i, (how, sampled)) in batch.samples.iter().zip(&all).enumerate() {
            let what = format!("{level} {format}: row {i}");
            let hidden = &cpu.up(&hidden[i * k..(i + 1) * k]);
            assert_eq!(cpu.sample(hidden, &head, &sampling(vec![*how])), [*sampled], "{what} alone");
            let temperature = if how.is_greedy() { 1.0 } else { how.temperature };
            let scored = Head { hidden, head: &head, targets: &[sampled.token], temperature };
            let scored = cpu.queue().head(scored).expect("memory for the head");
            if how.is_greedy() {
                assert_eq!(sampled.token, scored.argmax[0], "{what}");
            }
            if how.truncates() {
                assert!(sampled.logp >= scored.logp[0], "{what} is not renormalised");
            } else {
                assert_eq!(sampled.logp.to_bits(), scored.logp[0].to_bits(), "{what}");
                assert_eq!(sampled.entropy.to_bits(), scored.entropy[0].to_bits(), "{what}");
            }
        }
        for ill in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut hidden = hidden.clone();
            hidden[4 * k + 3] = ill;
            let sampled = cpu.sample(&cpu.up(&hidden), &head, &batch);
            assert!(sampled[4].logp.is_nan(), "{level} {format}: {ill} gives {:?}", sampled[4]);
            for (i, (sampled, well)) in sampled.iter().zip(&all).enumerate().filter(|(i, _)| *i != 4) {
                assert_eq!(sampled, well, "{level} {format}: row {i} beside {ill}");
            }
        }
    }
}

#[test]
fn fetched_tokens_outlive_the_next_sample() {
    for cpu in cpus(2) {
        check_fetched_tokens(&cpu);
    }
}

/// Fetched tokens are those of the sample before, whatever is sampled before they are read, in whatever order
/// they are waited for, and if nobody waits for them.
pub(crate) fn check_fetched_tokens<D: Device>(ops: &Ops<D>) {
    let (k, vocabulary, most) = (64, 1003, 2000);
    let mut random = Random::new(6);
    let hidden = ops.up(&random.normals(most * k));
    let head = ops.frozen(&random.normals(vocabulary * k), vocabulary, k, Format::F32);
    let mut tokens = ops.device().tokens(most).expect("memory for a test");
    let mut batch = ops.device().batch();
    let mut pending = Vec::new();
    for (step, rows) in [3, 5, 700, most, 1, 300, most].into_iter().enumerate() {
        let uniform = |i: usize| (i as f64 + 0.1) / rows as f64;
        let row = |i| SampleRow { temperature: 1.0, uniform: uniform(i), ..SampleRow::greedy() };
        let rows: Batch = sampling((0..rows).map(row).collect());
        let want = ops.sample(&hidden, &head, &rows);
        let mut queue = ops.queue();
        queue.load(&mut batch, &rows);
        queue.sample(Sample { hidden: &hidden, head: &head, batch: &batch, out: &mut tokens });
        // Twice: the second is dropped unread, and its memory is used again.
        pending.push((queue.fetch(&tokens, want.len()).expect("sampled tokens"), want));
        drop(queue.fetch(&tokens, rows.samples.len()).expect("sampled tokens"));
        // Some wait for one sample, some for two.
        if step % 3 != 1 {
            while let Some((fetched, want)) = pending.pop() {
                assert_eq!(queue.wait(fetched).expect("sampled tokens"), want, "step {step}");
            }
        }
    }
    assert!(pending.is_empty(), "the last step waits for all");
    // A part of the rows, and none.
    let mut queue = ops.queue();
    let all = queue.fetch(&tokens, most).expect("sampled tokens");
    let all = queue.wait(all).expect("sampled tokens");
    for rows in [0, 1, 17] {
        let some = queue.fetch(&tokens, rows).expect("sampled tokens");
        assert_eq!(queue.wait(some).expect("sampled tokens"), all[..rows], "{rows} rows");
    }
}
