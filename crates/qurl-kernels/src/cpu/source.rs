//! Rows on their way into a GEMM: as they are, or normalised or activated just before.
//!
//! A row is made, scaled, rounded and packed by one thread while it is in that thread's cache. Rows are
//! shared out evenly whatever the strips: a thread that begins inside a strip packs its columns of it.

use super::Context;
use super::buf::Parts;
use super::{elementwise, norm};
use std::ops::Range;

/// Where the rows of a left operand come from. What has to be made first goes to workspace `[rows, k]`.
pub(crate) enum Source<'a> {
    /// They are there.
    Ready(&'a [f32]),
    /// `rmsnorm(x) * gain`.
    Normed { x: &'a [f32], gain: &'a [f32], eps: f32, into: Parts<f32> },
    /// `silu(gate) * up`.
    Activated { gate_up: &'a [f32], into: Parts<f32> },
}

/// Some rows of one strip.
pub(crate) struct Piece<'a> {
    /// The rows.
    pub values: &'a [f32],
    /// Number of the first one.
    pub first: usize,
    /// First row of the strip.
    pub strip: usize,
    /// Rows of the strip.
    pub height: usize,
}

/// Values of a matrix below which its rows are packed by one thread.
const SHARED_FROM: usize = 1 << 12;
/// Rows that a thread takes at a time.
const MAX_ROWS: usize = 48;

impl Source<'_> {
    /// Calls `pack` for pieces of strips that together are `rows` rows of `k`, on all threads.
    pub fn pack(&self, ctx: &Context, rows: usize, k: usize, pack: &(dyn Fn(Piece) + Sync)) {
        let most = rows.div_ceil(ctx.threads()).clamp(1, MAX_ROWS);
        ctx.pool.for_runs(rows, most, SHARED_FROM / k.max(1) + 1, &|part| {
            // SAFETY: no other task has these rows.
            unsafe { self.pack_part(ctx, 0..rows, part, k, pack) }
        });
    }

    /// Where all rows are, once they are made.
    pub fn made(&self) -> *const f32 {
        match self {
            Source::Ready(x) => x.as_ptr(),
            Source::Normed { into, .. } | Source::Activated { into, .. } => into.first(),
        }
    }

    /// Calls `pack` for pieces of strips that together are the rows `part`, on this thread. Strips begin with
    /// the first row of `operand`.
    ///
    /// # Safety
    /// Nobody else uses the same rows of the workspace.
    pub unsafe fn pack_part(
        &self,
        ctx: &Context,
        operand: Range<usize>,
        mut part: Range<usize>,
        k: usize,
        pack: &dyn Fn(Piece),
    ) {
        let height = ctx.strip();
        while !part.is_empty() {
            let strip = part.start - (part.start - operand.start) % height;
            let piece = part.start..part.end.min(strip + height);
            part.start = piece.end;
            // SAFETY: the caller's promise.
            let values = unsafe { self.rows(ctx, piece.clone(), k) };
            pack(Piece { values, first: piece.start, strip, height: height.min(operand.end - strip) });
        }
    }

    /// The rows `range`, made now where they are not there.
    ///
    /// # Safety
    /// Nobody else uses the same rows of the workspace.
    unsafe fn rows(&self, ctx: &Context, range: Range<usize>, k: usize) -> &[f32] {
        let place = range.start * k..range.end * k;
        let into = match self {
            Source::Ready(x) => return &x[place],
            Source::Normed { into, .. } | Source::Activated { into, .. } => into,
        };
        // SAFETY: rows lie inside their arrays, which the callers have checked; the level was detected.
        unsafe {
            for row in range {
                let to = into.at(row * k);
                match self {
                    Source::Ready(_) => {}
                    Source::Normed { x, gain, eps, .. } => {
                        norm::forward_row(ctx.level, x[row * k..(row + 1) * k].as_ptr(), gain, *eps, to);
                    }
                    Source::Activated { gate_up, .. } => {
                        elementwise::swiglu_row(
                            ctx.level,
                            gate_up[2 * row * k..2 * (row + 1) * k].as_ptr(),
                            k,
                            to,
                        );
                    }
                }
            }
            into.slice(place.start, place.len())
        }
    }
}
