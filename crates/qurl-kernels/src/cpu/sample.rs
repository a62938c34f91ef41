//! Sampling tokens: from hidden rows to a token, its log-probability and the entropy of what it was sampled
//! from.
//!
//! Logits come from the tiles of the log-probability [`head`](super::head) and are summed by the same code,
//! so without truncation a token's log-probability has the bits that scoring it gives. A sample needs one
//! uniform number: it walks the cumulative probabilities in a fixed order (chunks of the vocabulary, then the
//! tokens of the chunk it falls into; or, truncated, the kept tokens from the most probable on), so it
//! depends on nothing but the row.
//!
//! Biases are added to logits of a row before all else, so what is sampled, its log-probability and its
//! entropy are of the biased distribution. Rows without any have the bits that they have alone.
//!
//! Truncation follows the order of Hugging Face's generation: temperature, then the `top_k` most probable
//! tokens, then of those the smallest set with at least `top_p` of their probability, then of those the ones
//! with at least `min_p` of the most probable one's probability. Equals are ranked by their number. What is
//! left is renormalised, and log-probability and entropy are those of the renormalised distribution: the one
//! really sampled.

use super::Context;
use super::buf::Parts;
use super::gemm::Right;
use super::head::{CHUNK, Distribution, Partial, Tiles, reduce};
use super::simd::{Simd, copy_past_caches, simd_dispatch};
use crate::types::{Bias, SampleRow, Sampled};

/// Logits that are held at the same time (64 MiB): more rows are sampled in chunks.
const HELD_LOGITS: usize = 1 << 24;
/// How far below the largest scaled logit the search for kept tokens looks, step by step; at last everywhere.
const DEPTHS: [f64; 5] = [4.0, 8.0, 16.0, 32.0, f64::INFINITY];

/// Samples a token for every row of `hidden`; `head` is packed for the forward GEMM, `biases` are in the
/// order of rows and tokens.
pub fn sample<'a>(
    ctx: &Context,
    hidden: &[f32],
    head: impl Into<Right<'a>>,
    rows: &[SampleRow],
    biases: &[Bias],
) -> Vec<Sampled> {
    let head = head.into();
    let mut out = vec![Sampled::default(); rows.len()];
    let chunk = (HELD_LOGITS / head.n()).max(1);
    for (first, (rows, out)) in (0..).step_by(chunk).zip(rows.chunks(chunk).zip(out.chunks_mut(chunk))) {
        let biases = Biases { biases, first };
        sample_chunk(ctx, &hidden[first * head.k()..], head, rows, biases, out);
    }
    out
}

/// Biases, and the row that counts as the first.
struct Biases<'a> {
    biases: &'a [Bias],
    first: usize,
}

impl Biases<'_> {
    /// Adds those of a row to its logits from a column on.
    fn add(&self, row: usize, first_column: usize, logits: &mut [f32]) {
        let (row, columns) = (self.first + row, first_column..first_column + logits.len());
        let before = |column: usize| {
            self.biases.partition_point(|bias| (bias.row as usize, bias.token as usize) < (row, column))
        };
        for bias in &self.biases[before(columns.start)..before(columns.end)] {
            let logit = &mut logits[bias.token as usize - first_column];
            *logit = bias.of(*logit);
        }
    }
}

fn sample_chunk(
    ctx: &Context,
    hidden: &[f32],
    head: Right<'_>,
    rows: &[SampleRow],
    biases: Biases,
    out: &mut [Sampled],
) {
    let vocabulary = head.n();
    assert!(hidden.len() >= rows.len() * head.k(), "sample: hidden rows");
    let tiles = Tiles::new(ctx, hidden, rows.len(), head);
    let chunks = vocabulary.div_ceil(CHUNK);
    let mut partials = vec![Partial::default(); rows.len() * chunks];
    let mut held = ctx.scratch.take(rows.len() * vocabulary);
    let (partial_parts, held_parts) = (Parts::new(&mut partials), Parts::new(&mut held));
    let blocks = rows.len().div_ceil(tiles.block_rows());
    ctx.pool.for_each(blocks * chunks, &|task| {
        let (block, chunk) = (task / chunks, task % chunks);
        tiles.logits(block, chunk, |first_row, first_column, logits, columns| {
            for (i, logits) in logits.chunks_exact_mut(CHUNK).enumerate() {
                let row = first_row + i;
                let logits = &mut logits[..columns];
                biases.add(row, first_column, logits);
                // SAFETY: the level was detected; this row and chunk belong to this task; f32 and u32 have
                // one size.
                unsafe {
                    let partial = reduce(ctx.level, logits, rows[row].inverse_temperature());
                    let argmax = first_column as u32 + partial.argmax;
                    *partial_parts.at(row * chunks + chunk) = Partial { argmax, ..partial };
                    if !rows[row].is_greedy() {
                        hold(ctx.level, logits, held_parts.at(row * vocabulary + first_column).cast());
                    }
                }
            }
            // SAFETY: the level was detected.
            unsafe { settle(ctx.level) }
        });
    });

    // SAFETY: f32 and u32 have the same size and any bits are a value.
    let held = unsafe { std::slice::from_raw_parts(held.as_ptr().cast::<f32>(), rows.len() * vocabulary) };
    let out = Parts::new(out);
    ctx.pool.for_runs(rows.len(), 8, 2, &|part| {
        for row in part {
            let partials = &partials[row * chunks..(row + 1) * chunks];
            let sampled =
                sample_row(ctx, &rows[row], partials, &held[row * vocabulary..(row + 1) * vocabulary]);
            // SAFETY: one task a row.
            unsafe { *out.at(row) = sampled }
        }
    });
}

simd_dispatch!(
    plain
    /// Keeps logits for the sampler. Most are not looked at again, so they go past the caches.
    fn hold(logits: &[f32], to: *mut f32) = copy_past_caches
);
simd_dispatch!(
    plain
    /// Orders what was held before what follows.
    fn settle() = settle_at
);

#[inline(always)]
unsafe fn settle_at<S: Simd>() {
    // SAFETY: no operands.
    unsafe { S::fence() }
}

/// Samples from one row; `logits` are scaled, and unset for a greedy row.
fn sample_row(ctx: &Context, row: &SampleRow, partials: &[Partial], logits: &[f32]) -> Sampled {
    // An infinite logit makes its chunk's sums infinite or NaN, and a NaN stays one.
    if partials.iter().any(|p| !(p.largest.is_finite() && p.total.is_finite() && p.weighted.is_finite())) {
        return Sampled { token: 0, logp: f32::NAN, entropy: f32::NAN };
    }
    let all = Distribution::join(partials);
    if row.is_greedy() {
        return Sampled { token: all.argmax, logp: all.logp(all.largest as f32), entropy: all.entropy() };
    }
    if row.truncates() {
        let mut ids = ctx.scratch.take(logits.len());
        return sample_kept(row, &all, logits, &mut ids);
    }
    let mass = |p: &Partial| (p.largest as f64 - all.largest).exp() * p.total as f64;
    let (chunk, rest) = walk(partials.iter().map(mass), row.uniform * all.total);
    let first = chunk * CHUNK;
    let tokens = &logits[first..(first + CHUNK).min(logits.len())];
    let weight = |x: &f32| (*x as f64 - all.largest).exp();
    // The chunk's mass was summed in f32: the place inside it is a share of what its tokens really weigh.
    let share = rest / mass(&partials[chunk]);
    let (place, _) = walk(tokens.iter().map(weight), share * tokens.iter().map(weight).sum::<f64>());
    let token = first + place;
    Sampled { token: token as u32, logp: all.logp(logits[token]), entropy: all.entropy() }
}

/// The first item at which the running sum passes `point`, and how far into it the point lies. Rounding may
/// leave the point after the last item: then the last one with any weight is meant.
fn walk(weights: impl Iterator<Item = f64>, point: f64) -> (usize, f64) {
    let (mut before, mut last) = (0.0, (0, 0.0));
    for (i, weight) in weights.enumerate() {
        if before + weight > point {
            return (i, point - before);
        }
        if weight > 0.0 {
            last = (i, weight);
        }
        before += weight;
    }
    last
}

/// Samples from the tokens that truncation keeps; `ids` is a buffer of a number per token.
fn sample_kept(row: &SampleRow, all: &Distribution, logits: &[f32], ids: &mut [u32]) -> Sampled {
    let weight = |id: &u32| (logits[*id as usize] as f64 - all.largest).exp();
    let kept = keep(row, all, logits, ids);
    let total: f64 = kept.iter().map(weight).sum();
    let (place, _) = walk(kept.iter().map(weight), row.uniform * total);
    let token = kept[place];
    let shifted = |id: &u32| logits[*id as usize] as f64 - all.largest;
    let weighted: f64 = kept.iter().map(|id| weight(id) * shifted(id)).sum();
    let logp = (shifted(&token) - total.ln()) as f32;
    Sampled { token, logp, entropy: (total.ln() - weighted / total) as f32 }
}

/// The tokens that truncation keeps, most probable first. Never empty.
fn keep<'a>(row: &SampleRow, all: &Distribution, logits: &[f32], ids: &'a mut [u32]) -> &'a [u32] {
    let weight = |id: u32| (logits[id as usize] as f64 - all.largest).exp();
    let (top_p, min_p) = (row.top_p as f64, row.min_p as f64);
    let top_k = if row.top_k == 0 { logits.len() } else { (row.top_k as usize).min(logits.len()) };
    // Sorting the vocabulary would cost more than the model: look only as far down as the kept tokens can be.
    let mut count = 0;
    for depth in DEPTHS {
        let least = (all.largest - depth) as f32;
        count = 0;
        for (id, _) in logits.iter().enumerate().filter(|&(_, &x)| x >= least) {
            ids[count] = id as u32;
            count += 1;
        }
        let covers_min_p = min_p > 0.0 && (-depth).exp() < min_p * 0.999;
        let enough = if top_k < logits.len() {
            count >= top_k || (row.top_p >= 1.0 && covers_min_p)
        } else {
            covers_min_p
                || (top_p < 1.0
                    && ids[..count].iter().map(|&id| weight(id)).sum::<f64>() >= top_p * all.total)
        };
        if enough {
            break;
        }
    }
    let ids = &mut ids[..count];
    ids.sort_unstable_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    let mut kept = count.min(top_k);
    if row.top_p < 1.0 {
        let base =
            if top_k < logits.len() { ids[..kept].iter().map(|&id| weight(id)).sum() } else { all.total };
        let mut before = 0.0;
        let reached = ids[..kept].iter().position(|&id| {
            before += weight(id);
            before >= top_p * base
        });
        kept = reached.map_or(kept, |last| last + 1);
    }
    if row.min_p > 0.0 {
        kept = ids[..kept].partition_point(|&id| weight(id) >= min_p);
    }
    &ids[..kept.max(1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn distribution(logits: &[f32]) -> Distribution {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total = logits.iter().map(|x| (x - largest).exp()).sum();
        let argmax = logits.iter().position(|&x| x == largest).unwrap_or(0) as u32;
        Distribution::join(&[Partial { largest, argmax, total, weighted: 0.0 }])
    }

    fn kept(row: SampleRow, logits: &[f32]) -> Vec<u32> {
        keep(&row, &distribution(logits), logits, &mut vec![0; logits.len()]).to_vec()
    }

    #[test]
    fn truncation_in_order() {
        let all = SampleRow { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, uniform: 0.0 };
        // Probabilities 0.05, 0.4, 0.1, 0.4, 0.05.
        let logits = [0.05f32, 0.4, 0.1, 0.4, 0.05].map(f32::ln);
        assert_eq!(kept(SampleRow { top_k: 3, ..all }, &logits), [1, 3, 2]);
        assert_eq!(kept(SampleRow { top_k: 4, ..all }, &logits), [1, 3, 2, 0]);
        assert_eq!(kept(SampleRow { top_p: 0.3, ..all }, &logits), [1]);
        assert_eq!(kept(SampleRow { top_p: 0.85, ..all }, &logits), [1, 3, 2]);
        assert_eq!(kept(SampleRow { min_p: 0.2, ..all }, &logits), [1, 3, 2]);
        assert_eq!(kept(SampleRow { min_p: 0.1, ..all }, &logits), [1, 3, 2, 0, 4]);
        assert_eq!(kept(SampleRow { min_p: 1.0, ..all }, &logits), [1, 3]);
        // 0.85 of the three most probable tokens' 0.9 is less than the 0.8 of the first two.
        assert_eq!(kept(SampleRow { top_k: 3, top_p: 0.85, ..all }, &logits), [1, 3]);
        assert_eq!(kept(SampleRow { top_p: 0.99, min_p: 0.2, ..all }, &logits), [1, 3, 2]);
    }

    /// However deep the search must look, the kept tokens are those of a full sort.
    #[test]
    fn the_search_finds_what_a_full_sort_finds() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 24) as f32
        };
        for case in 0..300 {
            let spread = [0.1, 3.0, 20.0, 80.0][case % 4];
            let logits: Vec<f32> = (0..1 + case * 3 % 500).map(|_| random() * spread).collect();
            let row = SampleRow {
                temperature: 1.0,
                top_p: if case % 3 == 0 { 1.0 } else { 0.05 + 0.95 * random() },
                top_k: if case % 5 == 0 { 0 } else { 1 + (random() * 60.0) as u32 },
                min_p: if case % 2 == 0 { 0.0 } else { random() },
                uniform: 0.0,
            };
            let all = distribution(&logits);
            let weight = |id: u32| (logits[id as usize] as f64 - all.largest).exp();
            let mut order: Vec<u32> = (0..logits.len() as u32).collect();
            order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
            if row.top_k > 0 {
                order.truncate(row.top_k as usize);
            }
            if row.top_p < 1.0 {
                let whole = row.top_k == 0 || row.top_k as usize >= logits.len();
                let base: f64 = if whole { all.total } else { order.iter().map(|&id| weight(id)).sum() };
                let mut sum = 0.0;
                let count = order.iter().take_while(|&&id| {
                    let wanted = sum < row.top_p as f64 * base;
                    sum += weight(id);
                    wanted
                });
                let count = count.count();
                order.truncate(count);
            }
            order.retain(|&id| weight(id) >= row.min_p as f64);
            assert_eq!(kept(row, &logits), order, "case {case}: {row:?}");
        }
    }

    #[test]
    fn walking_ends_inside() {
        assert_eq!(walk([0.5, 0.0, 0.5].into_iter(), 0.0), (0, 0.0));
        assert_eq!(walk([0.5, 0.0, 0.5].into_iter(), 0.5), (2, 0.0));
        assert_eq!(walk([0.5, 0.5, 0.0].into_iter(), 1.0).0, 1);
    }
}
