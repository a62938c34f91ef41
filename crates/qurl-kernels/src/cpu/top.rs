//! The most probable tokens of rows, with their log-probabilities.
//!
//! For readers of a distribution, not for the sampler: logits of a few rows are written out, scaled and
//! summed by the head's own code, so a token has the bits of log-probability here that scoring and sampling
//! (without truncation) give it.

use super::Context;
use super::buf::Parts;
use super::gemm::Right;
use super::head::{self, CHUNK, Distribution, Partial, reduce};

/// Logits that are held at the same time (64 MiB): more rows are read in chunks.
const HELD_LOGITS: usize = 1 << 24;

/// The `count` most probable tokens of every row of `hidden`, the best first, equals in the order of the
/// vocabulary; logits are multiplied with the row's factor. A row whose logits are not finite has none.
pub fn top<'a>(
    ctx: &Context,
    hidden: &[f32],
    head: impl Into<Right<'a>>,
    factors: &[f32],
    count: usize,
) -> Vec<Vec<(u32, f32)>> {
    let head = head.into();
    let (vocabulary, k) = (head.n(), head.k());
    assert!(hidden.len() >= factors.len() * k, "top: hidden rows");
    let mut out = vec![Vec::new(); factors.len()];
    let together = (HELD_LOGITS / vocabulary).max(1);
    for (first, (factors, out)) in
        (0..).step_by(together).zip(factors.chunks(together).zip(out.chunks_mut(together)))
    {
        let rows = factors.len();
        let mut logits = vec![0.0f32; rows * vocabulary];
        head::logits(ctx, &hidden[first * k..], rows, head, &mut logits);
        let (logits, out) = (Parts::new(&mut logits), Parts::new(out));
        ctx.pool.for_runs(rows, 1, 1, &|part| {
            for row in part {
                // SAFETY: one task a row; the row lies inside.
                let logits =
                    unsafe { std::slice::from_raw_parts_mut(logits.at(row * vocabulary), vocabulary) };
                // SAFETY: as above.
                unsafe { *out.at(row) = best_of(ctx, logits, factors[row], count) };
            }
        });
    }
    out
}

/// The best tokens of one row, whose logits are scaled in place.
fn best_of(ctx: &Context, logits: &mut [f32], factor: f32, count: usize) -> Vec<(u32, f32)> {
    let mut partials = Vec::with_capacity(logits.len().div_ceil(CHUNK));
    for (first, chunk) in (0u32..).step_by(CHUNK).zip(logits.chunks_mut(CHUNK)) {
        // SAFETY: the level was detected.
        let partial = unsafe { reduce(ctx.level, chunk, factor) };
        partials.push(Partial { argmax: first + partial.argmax, ..partial });
    }
    if partials.iter().any(|p| !(p.largest.is_finite() && p.total.is_finite() && p.weighted.is_finite())) {
        return Vec::new();
    }
    let all = Distribution::join(&partials);
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    for (id, &logit) in (0u32..).zip(logits.iter()) {
        if best.len() < count || best.last().is_some_and(|last| logit > last.1) {
            let at = best.partition_point(|other| other.1 >= logit);
            best.insert(at, (id, logit));
            best.truncate(count);
        }
    }
    best.into_iter().map(|(id, logit)| (id, all.logp(logit))).collect()
}
