//! The forms of the GEMM on Hopper (`cu/gemm_hopper.cuh`, `cu/gemm_gated.cuh`), how long each takes, and
//! which one a shape gets. All give a row the same bits, so the choice is about time alone.
//!
//! A form's time is estimated from how many k-blocks it takes one after the other. The constants beside each
//! form were fitted to measurements on an H200, whose raw output is in the files named there, under
//! `benches/runs/`.

use super::bits4::{is_bits4, tile_bytes};
use super::constants::{
    BULK_KIB, BULK_STAGE_KIB, CUT_ROWS, GATED_STAGE_KIB, GATED_TOKENS, GATED_WIDE, MAX_PARTS, MAX_STAGES,
    SIDES, STAGE_KIB, STRETCH, TILE_DEPTH, TILE_ROWS,
};
use super::gemm::Gating;
use super::kernels::{self, GemmBulk, GemmHopper, Kernel, KernelId};
use super::weight::unsupported;
use crate::types::Format;

/// What the blocks of a GEMM have of it: see the top of `gemm_hopper.cuh`, and `gemm_gated.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Schedule {
    Stream,
    /// TILES or VIRTUAL.
    Tiles,
    Split,
    Gated,
    Bulk,
}

/// A kernel and how it stores its results.
#[derive(Clone, Copy, Debug)]
pub(super) enum Form {
    Direct(Kernel<GemmHopper>),
    /// In the background.
    Bulk(Kernel<GemmBulk>),
}

impl Form {
    pub fn id(self) -> KernelId {
        match self {
            Form::Direct(kernel) => kernel.id,
            Form::Bulk(kernel) => kernel.id,
        }
    }
}

/// Microseconds on an H200.
#[derive(Clone, Copy, Debug)]
enum Time {
    /// The fastest for every shape, as far as it holds the tokens.
    Best,
    /// Of a stream: for each k-block of a range, and for the rest: with a split-K reduction, where ranges are
    /// whole tiles, and the same with gating.
    Stream { step: f64, split: f64, whole: f64, gated: f64 },
    /// For each k-block (`many`: of more than 256 tokens, which keep the tensor cores at the power limit),
    /// for each tile that a block has, and for the launch.
    Tiles { step: f64, many: f64, tile: f64, once: f64 },
}

/// A compiled form of the GEMM.
#[derive(Clone, Copy, Debug)]
pub(super) struct Variant {
    pub kernel: Form,
    /// Tokens of a tile, rows of weights of a block, blocks of a cluster.
    pub tokens: usize,
    pub rows: usize,
    pub cluster: usize,
    pub schedule: Schedule,
    time: Time,
}

const fn stream(kernel: Kernel<GemmHopper>, tokens: usize, cluster: usize, time: Time) -> Variant {
    Variant {
        kernel: Form::Direct(kernel),
        tokens,
        rows: SIDES * TILE_ROWS,
        cluster,
        schedule: Schedule::Stream,
        time,
    }
}

const fn tiles(kernel: Kernel<GemmHopper>, [tokens, groups, cluster]: [usize; 3], time: Time) -> Variant {
    Variant {
        kernel: Form::Direct(kernel),
        tokens,
        rows: groups * TILE_ROWS,
        cluster,
        schedule: Schedule::Tiles,
        time,
    }
}

const fn bulk(kernel: Kernel<GemmBulk>, [tokens, groups, cluster]: [usize; 3], time: Time) -> Variant {
    let (kernel, schedule) = (Form::Bulk(kernel), Schedule::Bulk);
    Variant { kernel, tokens, rows: groups * TILE_ROWS, cluster, schedule, time }
}

const fn split(kernel: Kernel<GemmHopper>, [tokens, groups, cluster]: [usize; 3], time: Time) -> Variant {
    Variant {
        kernel: Form::Direct(kernel),
        tokens,
        rows: groups * TILE_ROWS,
        cluster,
        schedule: Schedule::Split,
        time,
    }
}

const fn gated(kernel: Kernel<GemmHopper>, columns: usize, time: Time) -> Variant {
    let (kernel, schedule) = (Form::Direct(kernel), Schedule::Gated);
    Variant { kernel, tokens: GATED_TOKENS, rows: 2 * columns, cluster: 1, schedule, time }
}

/// 96 to 256 tokens: `2026-11-15-h200/kernels/13-forms.txt`; 256, and gating: `29-256-tokens.txt` there.
const STREAM_128: Time = Time::Stream { step: 0.5, split: 7.0, whole: 2.5, gated: 2.5 };
const STREAM_256: Time = Time::Stream { step: 0.75, split: 11.0, whole: 8.0, gated: 5.0 };
/// `2026-11-15-h200/kernels/13-forms.txt` and `23-tiles-64-tokens.txt`; at 256 tokens again
/// `2026-11-16-h200/kernels/33-forms-256-tokens.txt`.
const TILES_64: Time = Time::Tiles { step: 0.21, many: 0.21, tile: 1.5, once: 0.0 };
const TILES_128_64_ROWS: Time = Time::Tiles { step: 0.25, many: 0.25, tile: 2.5, once: 0.0 };
/// Thousands of tokens: `2026-11-16-h200/kernels/41-many.txt`. (fp8 was not measured there.)
const TILES_128: Time = Time::Tiles { step: 0.42, many: 0.46, tile: 2.0, once: 0.0 };
const TILES_128_FP8: Time = Time::Tiles { step: 0.42, many: 0.42, tile: 2.0, once: 0.0 };
const TILES_128_PAIRS: Time = Time::Tiles { step: 0.45, many: 0.45, tile: 2.0, once: 0.0 };
/// bf16: `2026-11-17-h200/train_gemm.txt`.
const BULK_128: Time = Time::Tiles { step: 0.42, many: 0.46, tile: 2.0, once: 0.0 };
const BULK_128_PAIRS: Time = Time::Tiles { step: 0.45, many: 0.45, tile: 2.0, once: 0.0 };
const BULK_192_PAIRS: Time = Time::Tiles { step: 0.6, many: 0.6, tile: 2.5, once: 0.0 };
const TILES_256_PAIRS: Time = Time::Tiles { step: 0.75, many: 0.75, tile: 0.0, once: 3.0 };
/// `2026-11-15-h200/kernels/30-split.txt`.
const SPLIT_128: Time = Time::Tiles { step: 0.25, many: 0.25, tile: 3.2, once: 0.0 };
const SPLIT_256: Time = Time::Tiles { step: 0.72, many: 0.72, tile: 8.0, once: 0.0 };
/// 0.39 and 0.002 for each row of weights: `2026-11-16-h200/kernels/34-tokens-on-the-left.txt` and
/// `35-columns-and-64-tokens.txt`.
const GATED_40: Time = Time::Tiles { step: 0.55, many: 0.55, tile: 3.5, once: 0.0 };
const GATED_48: Time = Time::Tiles { step: 0.582, many: 0.582, tile: 3.5, once: 0.0 };
const GATED_56: Time = Time::Tiles { step: 0.614, many: 0.614, tile: 3.5, once: 0.0 };
const GATED_64: Time = Time::Tiles { step: 0.646, many: 0.646, tile: 3.5, once: 0.0 };
const GATED_72: Time = Time::Tiles { step: 0.678, many: 0.678, tile: 3.5, once: 0.0 };

/// Streams, few tokens first, then whole tiles. (Up to 64 tokens nothing was faster than a stream:
/// `2026-11-16-h200/kernels/35-columns-and-64-tokens.txt`.)
const BF16: &[Variant] = &[
    stream(kernels::gemm_bf16_16_2_1_STREAM, 16, 1, Time::Best),
    stream(kernels::gemm_bf16_64_2_1_STREAM, 64, 1, Time::Best),
    stream(kernels::gemm_bf16_128_2_1_STREAM, 128, 1, STREAM_128),
    stream(kernels::gemm_bf16_256_2_2_STREAM, 256, 2, STREAM_256),
    tiles(kernels::gemm_bf16_64_1_1_VIRTUAL, [64, 1, 1], TILES_64),
    tiles(kernels::gemm_bf16_128_1_1_VIRTUAL, [128, 1, 1], TILES_128_64_ROWS),
    bulk(kernels::gemm_bf16_128_2_1_BULK, [128, 2, 1], BULK_128),
    bulk(kernels::gemm_bf16_128_2_2_BULK, [128, 2, 2], BULK_128_PAIRS),
    bulk(kernels::gemm_bf16_192_2_2_BULK, [192, 2, 2], BULK_192_PAIRS),
    split(kernels::gemm_bf16_128_1_2_SPLIT, [128, 1, 2], SPLIT_128),
    split(kernels::gemm_bf16_128_1_4_SPLIT, [128, 1, 4], SPLIT_128),
    split(kernels::gemm_bf16_256_2_3_SPLIT, [256, 2, 3], SPLIT_256),
    split(kernels::gemm_bf16_256_2_4_SPLIT, [256, 2, 4], SPLIT_256),
];
const INT8: &[Variant] = &[
    stream(kernels::gemm_int8_16_2_1_STREAM, 16, 1, Time::Best),
    stream(kernels::gemm_int8_64_2_1_STREAM, 64, 1, Time::Best),
    stream(kernels::gemm_int8_128_2_1_STREAM, 128, 1, STREAM_128),
    stream(kernels::gemm_int8_256_2_2_STREAM, 256, 2, STREAM_256),
    tiles(kernels::gemm_int8_64_1_1_TILES, [64, 1, 1], TILES_64),
    tiles(kernels::gemm_int8_128_1_1_TILES, [128, 1, 1], TILES_128_64_ROWS),
    tiles(kernels::gemm_int8_128_2_1_TILES, [128, 2, 1], TILES_128),
    tiles(kernels::gemm_int8_256_2_2_TILES, [256, 2, 2], TILES_256_PAIRS),
    split(kernels::gemm_int8_128_1_2_SPLIT, [128, 1, 2], SPLIT_128),
    split(kernels::gemm_int8_128_1_4_SPLIT, [128, 1, 4], SPLIT_128),
    split(kernels::gemm_int8_256_2_3_SPLIT, [256, 2, 3], SPLIT_256),
    split(kernels::gemm_int8_256_2_4_SPLIT, [256, 2, 4], SPLIT_256),
    gated(kernels::gemm_int8_256_40_GATED, 40, GATED_40),
    gated(kernels::gemm_int8_256_48_GATED, 48, GATED_48),
    gated(kernels::gemm_int8_256_56_GATED, 56, GATED_56),
    gated(kernels::gemm_int8_256_64_GATED, 64, GATED_64),
    gated(kernels::gemm_int8_256_72_GATED, 72, GATED_72),
];
const FP8: &[Variant] = &[
    stream(kernels::gemm_fp8_16_2_1_STREAM, 16, 1, Time::Best),
    stream(kernels::gemm_fp8_64_2_1_STREAM, 64, 1, Time::Best),
    stream(kernels::gemm_fp8_128_2_1_STREAM, 128, 1, STREAM_128),
    stream(kernels::gemm_fp8_256_2_2_STREAM, 256, 2, STREAM_256),
    tiles(kernels::gemm_fp8_64_1_1_VIRTUAL, [64, 1, 1], TILES_64),
    tiles(kernels::gemm_fp8_128_1_1_VIRTUAL, [128, 1, 1], TILES_128_64_ROWS),
    tiles(kernels::gemm_fp8_128_2_1_VIRTUAL, [128, 2, 1], TILES_128_FP8),
    tiles(kernels::gemm_fp8_128_2_2_VIRTUAL, [128, 2, 2], TILES_128_PAIRS),
    split(kernels::gemm_fp8_128_1_2_SPLIT, [128, 1, 2], SPLIT_128),
    split(kernels::gemm_fp8_128_1_4_SPLIT, [128, 1, 4], SPLIT_128),
];

/// Estimates: not measured yet.
const BITS4_STREAM_128: Time = Time::Stream { step: 0.6, split: 7.0, whole: 2.5, gated: 2.5 };
const BITS4_TILES_64: Time = Time::Tiles { step: 0.4, many: 0.4, tile: 1.5, once: 0.0 };
const BITS4_TILES_96: Time = Time::Tiles { step: 0.58, many: 0.62, tile: 1.8, once: 0.0 };
const BITS4_TILES_128: Time = Time::Tiles { step: 0.76, many: 0.82, tile: 2.0, once: 0.0 };
/// Tokens are twice the bytes of weights at 64 of them: pairs of blocks share them.
const INT4: &[Variant] = &[
    stream(kernels::gemm_int4_16_2_1_STREAM, 16, 1, Time::Best),
    stream(kernels::gemm_int4_64_2_2_STREAM, 64, 2, Time::Best),
    stream(kernels::gemm_int4_64_2_1_STREAM, 64, 1, Time::Best),
    stream(kernels::gemm_int4_128_2_2_STREAM, 128, 2, BITS4_STREAM_128),
    tiles(kernels::gemm_int4_64_2_1_VIRTUAL, [64, 2, 1], BITS4_TILES_64),
    tiles(kernels::gemm_int4_96_2_1_VIRTUAL, [96, 2, 1], BITS4_TILES_96),
];
const NVFP4: &[Variant] = &[
    stream(kernels::gemm_nvfp4_16_2_1_STREAM, 16, 1, Time::Best),
    stream(kernels::gemm_nvfp4_64_2_2_STREAM, 64, 2, Time::Best),
    stream(kernels::gemm_nvfp4_64_2_1_STREAM, 64, 1, Time::Best),
    stream(kernels::gemm_nvfp4_128_2_2_STREAM, 128, 2, BITS4_STREAM_128),
    tiles(kernels::gemm_nvfp4_64_2_1_VIRTUAL, [64, 2, 1], BITS4_TILES_64),
    tiles(kernels::gemm_nvfp4_128_2_1_VIRTUAL, [128, 2, 1], BITS4_TILES_128),
];

impl Variant {
    /// Bytes of a stage: tiles of weights and what they are multiplied with.
    fn stage(&self, format: Format) -> usize {
        match is_bits4(format) {
            true => {
                let tiles = self.rows / TILE_ROWS * tile_bytes(format);
                tiles.next_multiple_of(1024) + 2 * self.tokens * TILE_DEPTH
            }
            false => (self.rows + self.tokens) * TILE_DEPTH,
        }
    }

    /// Warpgroups that multiply.
    fn groups(&self) -> usize {
        match self.schedule {
            Schedule::Gated if self.rows / 2 > GATED_WIDE => self.tokens / TILE_ROWS / 2,
            Schedule::Gated => self.tokens / TILE_ROWS,
            _ => self.rows / TILE_ROWS,
        }
    }

    /// Threads of a block: two producers, a warp each; with two warpgroups they are a third, so that
    /// registers can change hands.
    pub fn threads(&self) -> usize {
        self.groups() * 128 + if self.groups() == 2 { 128 } else { 64 }
    }

    /// Bytes of shared memory of a block: stages, whose place the sums of a cluster take in the end. A block
    /// that has few k-blocks needs no more stages than that, and leaves memory for the kernels before and
    /// after it. Two are the least (three of weights in four bits): with one the driver would not be asked
    /// ([`super::launch::PLAIN_SHARED`]) for what a block needs together with its buffers.
    pub fn shared(&self, format: Format, k_blocks: usize) -> usize {
        let stage = self.stage(format);
        let (kib, area) = match self.schedule {
            Schedule::Gated => (GATED_STAGE_KIB, 0),
            Schedule::Bulk => (BULK_STAGE_KIB, BULK_KIB << 10),
            Schedule::Stream | Schedule::Tiles | Schedule::Split => (STAGE_KIB, 0),
        };
        let stages =
            ((kib << 10) / stage).min(MAX_STAGES).min(k_blocks.max(if is_bits4(format) { 3 } else { 2 }));
        let sums = match self.schedule {
            Schedule::Split => {
                self.parts() * (self.tokens / STRETCH).div_ceil(self.parts()) * self.rows * STRETCH * 4
            }
            Schedule::Stream | Schedule::Tiles | Schedule::Gated | Schedule::Bulk => 0,
        };
        area + (stages * stage).max(sums) + 1024
    }

    /// Blocks that sum up a tile.
    pub fn parts(&self) -> usize {
        if self.schedule == Schedule::Split { self.cluster } else { 1 }
    }

    /// Blocks of a cluster that have different rows and the same tokens.
    pub fn alike(&self) -> usize {
        self.cluster / self.parts()
    }
}

/// Into how many ranges the weights are cut, by the matrix and the device alone: a few for every tile, as
/// long as there are SMs, and never an empty one (the others would wait for it).
pub(super) fn ranges(sms: usize, n: usize, blocks: usize) -> usize {
    let (tiles, most) = (n.div_ceil(CUT_ROWS), sms / SIDES);
    match tiles > most {
        true => most,
        false if blocks < 16 => tiles,
        false => tiles * (most / tiles).min(MAX_PARTS),
    }
}

/// What a form is chosen by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub format: Format,
    pub tokens: usize,
    /// Outputs, and blocks along k.
    pub n: usize,
    pub blocks: usize,
    pub gating: Gating,
    pub sms: usize,
}

/// The form with the least estimated time. A gated GEMM needs two warpgroups, one for the gate projections
/// and one for the up projections. The blocks of a stream wait for each other, so all of them must run
/// `at_once`. In floating point a tile is split where the ranges of its matrix are.
pub(super) fn choose(shape: Shape, at_once: impl Fn(&Variant) -> usize) -> &'static Variant {
    let all = match shape.format {
        Format::Bf16 => BF16,
        Format::Int8 => INT8,
        Format::Fp8 => FP8,
        Format::Int4 => INT4,
        Format::Nvfp4 => NVFP4,
        Format::F32 | Format::Fp8Block => unsupported(shape.format),
    };
    let estimates = all.iter().map(|v| (v, estimate(v, shape, &at_once)));
    let best = estimates.min_by(|(_, a), (_, b)| a.total_cmp(b));
    best.map_or(&all[0], |(v, _)| v)
}

/// Microseconds; infinite where the form cannot do it, or is known to be slow.
fn estimate(v: &Variant, shape: Shape, at_once: &impl Fn(&Variant) -> usize) -> f64 {
    let Shape { format, tokens, n, blocks, gating, sms } = shape;
    let (is_gated, holds) = (gating != Gating::None, tokens <= v.tokens);
    let (columns, parts) = (tokens.div_ceil(v.tokens), v.parts());
    let cut = ranges(sms, n, blocks);
    let whole_ranges = cut == n.div_ceil(CUT_ROWS);
    let possible = match v.schedule {
        // It keeps nothing for training.
        Schedule::Gated => holds && matches!(gating, Gating::Swiglu { kept: 0, .. }),
        Schedule::Stream => holds && (v.cluster == 1 || at_once(v) >= cut * SIDES),
        Schedule::Split => {
            let many_rows = v.rows > TILE_ROWS;
            let cut_alike = format == Format::Int8 || cut == n.div_ceil(CUT_ROWS) * parts;
            !is_gated && blocks >= 4 * parts && (!many_rows || columns == 1) && cut_alike
        }
        Schedule::Tiles => (!is_gated || v.rows > TILE_ROWS) && (v.cluster == 1 || tokens > 256),
        // Rows of results are multiples of 16 bytes: so wide is what the TMA stores.
        Schedule::Bulk => n.is_multiple_of(if is_gated { 16 } else { 4 }) && (v.cluster == 1 || tokens > 256),
    };
    if !possible {
        return f64::INFINITY;
    }
    match v.time {
        Time::Best => 0.0,
        Time::Stream { step, split, whole, gated } => {
            let share = (n.div_ceil(CUT_ROWS) * blocks).div_ceil(cut) as f64;
            let rest = match (whole_ranges, is_gated) {
                (false, _) => split,
                (true, false) => whole,
                (true, true) => gated,
            };
            step * share + rest
        }
        Time::Tiles { step, many, tile, once } => {
            let resident = if parts > 1 { at_once(v).max(1) } else { sms / v.cluster };
            let waves = (n.div_ceil(v.rows * v.alike()) * parts * columns).div_ceil(resident) as f64;
            let step = if tokens > 256 { many } else { step };
            (step * blocks as f64 / parts as f64 + tile) * waves + once
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::launch::PLAIN_SHARED;
    use super::super::weight::number_bytes;
    use super::*;

    const SMS: usize = 132;
    const FORMATS: [(Format, &[Variant]); 5] = [
        (Format::Bf16, BF16),
        (Format::Int8, INT8),
        (Format::Fp8, FP8),
        (Format::Int4, INT4),
        (Format::Nvfp4, NVFP4),
    ];
    const SWIGLU: Gating = Gating::Swiglu { absmax: 0, kept: 0 };

    fn shape(format: Format, tokens: usize, n: usize, blocks: usize, gating: Gating) -> Shape {
        Shape { format, tokens, n, blocks, gating, sms: SMS }
    }

    /// Blocks of 128 bytes along k.
    fn k_blocks(format: Format, k: usize) -> usize {
        k * number_bytes(format) / TILE_DEPTH
    }

    #[test]
    fn kernels_are_named_after_their_tiles() {
        for (format, all) in FORMATS {
            for v in all {
                let Variant { tokens, rows, cluster, .. } = v;
                let groups = rows / TILE_ROWS;
                let name = match v.schedule {
                    Schedule::Gated => format!("gemm_{format}_{tokens}_{}_GATED", rows / 2),
                    Schedule::Stream => format!("gemm_{format}_{tokens}_{groups}_{cluster}_STREAM"),
                    Schedule::Split => format!("gemm_{format}_{tokens}_{groups}_{cluster}_SPLIT"),
                    Schedule::Bulk => format!("gemm_{format}_{tokens}_{groups}_{cluster}_BULK"),
                    // Sums of integers are the same wherever they are cut.
                    Schedule::Tiles => {
                        let schedule = if format == Format::Int8 { "TILES" } else { "VIRTUAL" };
                        format!("gemm_{format}_{tokens}_{groups}_{cluster}_{schedule}")
                    }
                };
                assert_eq!(v.kernel.id().name(), name);
            }
        }
    }

    #[test]
    fn ranges_are_never_more_than_sms_or_work() {
        for (n, blocks) in [(1, 1), (64, 7), (896, 14), (4608, 56), (37_888, 28), (152_064, 56), (3584, 296)]
        {
            let cut = ranges(SMS, n, blocks);
            let most = n.div_ceil(CUT_ROWS) * blocks;
            assert!((1..=SMS / SIDES).contains(&cut) && cut <= most, "{n} {blocks}: {cut}");
        }
    }

    /// The columns of a tile that go evenly into the SMs.
    #[test]
    fn gated_int8_has_tiles_for_all_sms() {
        let shapes = [
            (896, 4864, 40),
            (512, 6144, 48),
            (512, 7168, 56),
            (512, 8192, 64),
            (1536, 8960, 72),
            (3584, 18_944, 72),
        ];
        for (d, f, columns) in shapes {
            let chosen = |format: Format, tokens: usize| {
                choose(shape(format, tokens, 2 * f, k_blocks(format, d), SWIGLU), |_| SMS)
            };
            for tokens in [200, 250, 256] {
                let v = chosen(Format::Int8, tokens);
                assert!(v.schedule == Schedule::Gated && v.rows == 2 * columns, "{d} {f} {tokens}: {v:?}");
            }
            for v in [chosen(Format::Bf16, 256), chosen(Format::Int8, 257)] {
                assert!(v.schedule != Schedule::Gated, "{d} {f}: {v:?}");
            }
        }
    }

    /// What the split-K reduction of a stream relies on: the ranges of a tile end with it, or there are two
    /// and the later one goes on in the next tile.
    #[test]
    fn ranges_of_a_tile_end_together_or_are_two() {
        for n in [64, 896, 1152, 3584, 4608, 5120, 7168, 9728, 16_640, 17_920, 37_888, 55_296, 152_064] {
            for blocks in [1, 7, 14, 16, 28, 40, 56, 76, 148, 216, 296] {
                let (cut, units) = (ranges(SMS, n, blocks), n.div_ceil(CUT_ROWS) * blocks);
                let begin = |range: usize| units * range / cut;
                for end in (blocks..=units).step_by(blocks) {
                    let holder = |unit: usize| ((unit + 1) * cut - 1) / units;
                    let (first, last) = (holder(end - blocks), holder(end - 1));
                    let (parts, ends) = (last - first + 1, begin(last + 1) == end);
                    let fine = parts <= MAX_PARTS && (ends || parts <= 2);
                    assert!(fine, "{n} {blocks}: {parts} in the tile up to {end}");
                }
            }
        }
    }

    /// The shapes of 1.5B in training, and one that `tests/kernels/cuda_fused.rs` holds to its bits.
    #[test]
    fn many_tokens_of_bf16_have_tiles_of_192() {
        for (tokens, n, k) in
            [(8192, 17_920, 1536), (8192, 151_936, 1536), (8192, 1536, 8960), (1700, 2 * 8960, 1024)]
        {
            let blocks = k_blocks(Format::Bf16, k);
            let v = choose(shape(Format::Bf16, tokens, n, blocks, Gating::None), |_| SMS);
            assert_eq!(v.tokens, 192, "{tokens} {n} {k}: {v:?}");
        }
    }

    #[test]
    fn shared_memory_is_always_asked_for() {
        for (format, v) in FORMATS.into_iter().flat_map(|(format, all)| all.iter().map(move |v| (format, v)))
        {
            for k_blocks in [1, 2, 7, 1000] {
                let bytes = v.shared(format, k_blocks);
                assert!(bytes > PLAIN_SHARED as usize && bytes <= v.shared(format, usize::MAX), "{v:?}");
            }
        }
    }

    #[test]
    fn every_number_of_tokens_has_a_form_that_holds_them() {
        for (format, _) in FORMATS {
            for tokens in [1, 16, 17, 64, 100, 128, 129, 256, 257, 5000] {
                for (n, blocks) in
                    [(896, 7), (896, 76), (4608, 56), (37_888, 28), (3584, 148), (3584, 296), (152_064, 56)]
                {
                    let v = choose(shape(format, tokens, n, blocks, Gating::None), |_| SMS);
                    let streams = |v: &Variant| v.schedule == Schedule::Stream;
                    assert!(!streams(v) || v.tokens >= tokens, "{format} {tokens}: {v:?}");
                    // Sums of floating-point numbers are cut where a stream would cut them.
                    let cut = ranges(SMS, n, blocks) == n.div_ceil(CUT_ROWS) * v.cluster;
                    assert!(
                        v.schedule != Schedule::Split || format == Format::Int8 || cut,
                        "{format} {tokens} {n} {blocks}: {v:?}"
                    );
                    let gated = choose(shape(format, tokens, n, blocks, SWIGLU), |_| 130);
                    assert!(
                        gated.groups() >= 2 && (!streams(gated) || gated.tokens >= tokens),
                        "{format} {tokens}: {gated:?}"
                    );
                    let fits = ranges(SMS, n, blocks) * SIDES <= 130;
                    assert!(
                        !streams(gated) || gated.cluster == 1 || fits,
                        "{format} {tokens}: {gated:?} would wait for ever"
                    );
                }
            }
        }
    }
}
