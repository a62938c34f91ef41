//! GEMMs with packed weights on Hopper's tensor cores: which kernel of `cu/gemm_*.cu` takes which shape.
//!
//! Weights lie in swizzled tiles of 64 rows by 128 bytes. For up to 256 tokens the weight stream is cut into ranges, one
//! per SM, that depend on the matrix alone; for more, whole tiles are computed, in floating point with the same cuts. So a
//! row's bits do not depend on how many others there are. Other devices take the same tiles (`gemm_mma.rs`).

use super::context::{Context, HOPPER};
use super::ffi::DevicePtr;
use super::gemm_mma;
use super::launch::{Launch, args};
use super::linear::Operand;
use super::queue::CudaQueue;
use super::weight::{number_bytes, unsupported};
use crate::types::Format;

pub(super) const TILE_ROWS: usize = 64;
pub(super) const TILE_BYTES: usize = 128;
/// Rows of a tile that ranges are counted in, and the blocks of a range: each takes half of the rows.
const CUT_ROWS: usize = 256;
const SIDES: usize = 2;
/// Most ranges that a tile is made of: its split-K reduction has as many parts.
const MAX_PARTS: usize = 4;
/// Most tokens of a stream.
const MAX_STREAMED: usize = 256;
/// Tokens whose sums one of the blocks that share a tile adds up at a time.
const STRETCH: usize = 32;
/// Shared memory for the stages of the weight stream, and of a gated GEMM, whose warps have no buffers beside them.
const STAGE_BYTES: usize = 196 << 10;
const GATED_STAGE_BYTES: usize = 212 << 10;

/// What the blocks of a GEMM have of it: see the top of `gemm_hopper.cuh`, and `gemm_gated.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Schedule {
    Stream,
    /// TILES or VIRTUAL.
    Tiles,
    Split,
    Gated,
}

/// A compiled form of the GEMM.
#[derive(Clone, Copy, Debug)]
struct Variant {
    file: &'static str,
    kernel: &'static str,
    /// Tokens of a tile, rows of weights of a block, blocks of a cluster.
    tokens: usize,
    rows: usize,
    cluster: usize,
    schedule: Schedule,
}

macro_rules! variant {
    ($format:literal, $tokens:literal, $groups:literal, $cluster:literal, $schedule:literal) => {
        Variant {
            file: concat!("gemm_", $format),
            kernel: concat!("gemm_", $format, "_", $tokens, "_", $groups, "_", $cluster, "_", $schedule),
            tokens: $tokens,
            rows: $groups * TILE_ROWS,
            cluster: $cluster,
            schedule: match $schedule.as_bytes() {
                b"STREAM" => Schedule::Stream,
                b"SPLIT" => Schedule::Split,
                _ => Schedule::Tiles,
            },
        }
    };
    (gated $columns:literal) => {
        Variant {
            file: "gemm_int8",
            kernel: concat!("gemm_int8_256_", $columns, "_GATED"),
            tokens: MAX_STREAMED,
            rows: 2 * $columns,
            cluster: 1,
            schedule: Schedule::Gated,
        }
    };
}

impl Variant {
    /// Warpgroups that multiply.
    fn groups(&self) -> usize {
        if self.schedule == Schedule::Gated { self.tokens / TILE_ROWS } else { self.rows / TILE_ROWS }
    }

    /// Threads of a block: two producers, a warp each; with two warpgroups they are a third, so that registers can change hands.
    fn threads(&self) -> u32 {
        self.groups() as u32 * 128 + if self.groups() == 2 { 128 } else { 64 }
    }

    /// Bytes of shared memory of a block: stages, whose place the sums of a cluster take in the end. A block that has few k-blocks
    /// needs no more stages than that, and leaves memory for the kernels before and after it. Two are the least: with one
    /// the driver would not be asked ([`super::launch::PLAIN_SHARED`]) for what a block needs together with its buffers.
    fn shared(&self, k_blocks: usize) -> u32 {
        let stage = (self.rows + self.tokens) * TILE_BYTES;
        let bytes = if self.schedule == Schedule::Gated { GATED_STAGE_BYTES } else { STAGE_BYTES };
        let stages = (bytes / stage).min(16).min(k_blocks.max(2));
        let sums = match self.schedule {
            Schedule::Split => {
                self.parts() * (self.tokens / STRETCH).div_ceil(self.parts()) * self.rows * STRETCH * 4
            }
            _ => 0,
        };
        ((stages * stage).max(sums) + 1024) as u32
    }

    /// Blocks that sum up a tile.
    fn parts(&self) -> usize {
        if self.schedule == Schedule::Split { self.cluster } else { 1 }
    }

    /// Blocks of a cluster that have different rows and the same tokens.
    fn alike(&self) -> usize {
        self.cluster / self.parts()
    }
}

/// Streams, few tokens first, then whole tiles.
const BF16: &[Variant] = &[
    variant!("bf16", 16, 2, 1, "STREAM"),
    variant!("bf16", 64, 2, 1, "STREAM"),
    variant!("bf16", 128, 2, 1, "STREAM"),
    variant!("bf16", 256, 2, 2, "STREAM"),
    variant!("bf16", 64, 1, 1, "VIRTUAL"),
    variant!("bf16", 128, 1, 1, "VIRTUAL"),
    variant!("bf16", 128, 2, 1, "VIRTUAL"),
    variant!("bf16", 128, 2, 2, "VIRTUAL"),
    variant!("bf16", 192, 2, 2, "VIRTUAL"),
    variant!("bf16", 128, 1, 2, "SPLIT"),
    variant!("bf16", 128, 1, 4, "SPLIT"),
    variant!("bf16", 256, 2, 3, "SPLIT"),
    variant!("bf16", 256, 2, 4, "SPLIT"),
];
const INT8: &[Variant] = &[
    variant!("int8", 16, 2, 1, "STREAM"),
    variant!("int8", 64, 2, 1, "STREAM"),
    variant!("int8", 128, 2, 1, "STREAM"),
    variant!("int8", 256, 2, 2, "STREAM"),
    variant!("int8", 64, 1, 1, "TILES"),
    variant!("int8", 128, 1, 1, "TILES"),
    variant!("int8", 128, 2, 1, "TILES"),
    variant!("int8", 256, 2, 2, "TILES"),
    variant!("int8", 128, 1, 2, "SPLIT"),
    variant!("int8", 128, 1, 4, "SPLIT"),
    variant!("int8", 256, 2, 3, "SPLIT"),
    variant!("int8", 256, 2, 4, "SPLIT"),
    variant!(gated 40),
    variant!(gated 48),
    variant!(gated 64),
];
const FP8: &[Variant] = &[
    variant!("fp8", 16, 2, 1, "STREAM"),
    variant!("fp8", 64, 2, 1, "STREAM"),
    variant!("fp8", 128, 2, 1, "STREAM"),
    variant!("fp8", 64, 1, 1, "VIRTUAL"),
    variant!("fp8", 128, 1, 1, "VIRTUAL"),
    variant!("fp8", 128, 2, 1, "VIRTUAL"),
    variant!("fp8", 128, 2, 2, "VIRTUAL"),
    variant!("fp8", 128, 1, 2, "SPLIT"),
    variant!("fp8", 128, 1, 4, "SPLIT"),
];

/// Bytes of packed weights `[n, k]`; `None` where the kernels do not take them.
pub(super) fn packed_bytes(format: Format, n: usize, k: usize) -> Option<usize> {
    let known = match format {
        Format::Bf16 | Format::Int8 | Format::Fp8 => true,
        Format::F32 => false,
        Format::Fp8Block | Format::Int4 | Format::Nvfp4 => unsupported(format),
    };
    let row = k * number_bytes(format);
    // Kernels count k-blocks of tiles, times ranges, in 32 bits.
    let counted = n.div_ceil(CUT_ROWS) * row.div_ceil(TILE_BYTES) <= 1 << 22;
    (known && counted && row.is_multiple_of(16))
        .then(|| n.div_ceil(TILE_ROWS) * TILE_ROWS * row.div_ceil(TILE_BYTES) * TILE_BYTES)
}

/// Packs rows of numbers.
pub(super) fn pack(
    queue: &mut CudaQueue,
    format: Format,
    rows: DevicePtr,
    n: usize,
    k: usize,
    tiles: DevicePtr,
) {
    let row = k * number_bytes(format);
    let blocks = row.div_ceil(TILE_BYTES);
    let given = args![rows, tiles, n as u32, row as u32, blocks as u32];
    queue.launch("gemm_pack", "gemm_pack", [n.div_ceil(TILE_ROWS) * blocks * 2, 1, 1], 256, 0, given);
}

/// Into how many ranges the weights are cut, by the matrix and the device alone: a few for every tile, as long as there
/// are SMs, and never an empty one (the others would wait for it).
fn ranges(sms: usize, n: usize, blocks: usize) -> usize {
    let (tiles, most) = (n.div_ceil(CUT_ROWS), sms / SIDES);
    match tiles > most {
        true => most,
        false if blocks < 16 => tiles,
        false => tiles * (most / tiles).min(MAX_PARTS),
    }
}

/// Bytes for partial sums: of two tiles a range, two blocks of eight warps, for all tokens of a tile.
pub(super) fn partial_bytes(context: &Context) -> usize {
    if context.generation == HOPPER { 2 * context.sms * 8 * MAX_STREAMED * 64 } else { 0 }
}

/// The form for some tokens: the one with the least estimated time. All give a row the same bits. A gated GEMM needs two
/// warpgroups, one for the gate projections and one for the up projections. The blocks of a stream wait for each other, so all of them must
/// run `at_once`. In floating point a tile is split where the ranges of its matrix are.
fn choose(
    format: Format,
    tokens: usize,
    n: usize,
    blocks: usize,
    sms: usize,
    gating: Gating,
    at_once: impl Fn(&Variant) -> usize,
) -> &'static Variant {
    let gated = gating != Gating::None;
    let all = match format {
        Format::Bf16 => BF16,
        Format::Int8 => INT8,
        Format::Fp8 => FP8,
        Format::F32 | Format::Fp8Block | Format::Int4 | Format::Nvfp4 => unsupported(format),
    };
    match tokens {
        0..=16 => return &all[0],
        17..=64 => return &all[1],
        _ => {}
    }
    let (tiles, ranges) = (n.div_ceil(CUT_ROWS), ranges(sms, n, blocks));
    let share = (tiles * blocks).div_ceil(ranges) as f64;
    // Ranges that are whole tiles have no split-K reduction.
    let reduction = |split: f64, whole: f64| if ranges == tiles { whole } else { split };
    let waves = |rows: usize, columns: usize, at_once: usize| (rows * columns).div_ceil(at_once) as f64;
    let depth = blocks as f64;
    // Microseconds, fitted to measurements on an H200.
    let estimate = |v: &Variant| {
        let columns = tokens.div_ceil(v.tokens);
        match (v.schedule, v.tokens, v.rows, v.cluster) {
            (Schedule::Gated, held, rows, _) if gating == Gating::Swiglu && tokens <= held => {
                ((0.39 + 0.002 * rows as f64) * depth + 3.5) * waves(n.div_ceil(rows), 1, sms)
            }
            (Schedule::Gated, ..) => f64::INFINITY,
            (_, _, 64, _) if gated => f64::INFINITY,
            (Schedule::Stream, held, ..) if held < tokens => f64::INFINITY,
            (Schedule::Stream, .., 2) if at_once(v) < ranges * SIDES => f64::INFINITY,
            (Schedule::Stream, 128, ..) => 0.5 * share + reduction(7.0, 2.5),
            (Schedule::Stream, 256, ..) => 0.75 * share + reduction(11.0, if gated { 5.0 } else { 8.0 }),
            (Schedule::Stream, ..) => f64::INFINITY,
            (Schedule::Split, _, rows, parts)
                if gated || blocks < 4 * parts || (rows > 64 && columns > 1) =>
            {
                f64::INFINITY
            }
            (Schedule::Split, .., parts) if format != Format::Int8 && ranges != tiles * parts => {
                f64::INFINITY
            }
            (Schedule::Split, 128, rows, parts) => {
                (0.25 * depth / parts as f64 + 3.2)
                    * waves(n.div_ceil(rows) * parts, columns, at_once(v).max(1))
            }
            (Schedule::Split, _, rows, parts) => {
                (0.72 * depth / parts as f64 + 8.0)
                    * waves(n.div_ceil(rows) * parts, columns, at_once(v).max(1))
            }
            (_, 64, rows, _) => (0.21 * depth + 1.5) * waves(n.div_ceil(rows), columns, sms),
            (_, 128, 64, _) => (0.25 * depth + 2.5) * waves(n.div_ceil(64), columns, sms),
            // Thousands of tokens keep the tensor cores at the power limit. (fp8 was not measured there.)
            (_, 128, rows, 1) => {
                let unit = if tokens > 256 && format != Format::Fp8 { 0.46 } else { 0.42 };
                (unit * depth + 2.0) * waves(n.div_ceil(rows), columns, sms)
            }
            _ if tokens <= 256 => f64::INFINITY,
            (_, 192, ..) => (0.62 * depth + 3.2) * waves(n.div_ceil(256), columns, sms / 2),
            (_, 256, ..) => 0.75 * depth * waves(n.div_ceil(256), columns, sms / 2) + 3.0,
            _ => (0.45 * depth + 2.0) * waves(n.div_ceil(256), columns, sms / 2),
        }
    };
    let best = all.iter().min_by(|a, b| estimate(a).total_cmp(&estimate(b)));
    best.unwrap_or(&all[0])
}

/// What the outputs of a GEMM are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gating {
    /// Nothing of the kind.
    None,
    /// Gate projections, then as many up projections, with the bits that they have on their way to [`Gating::Swiglu`].
    Paired,
    /// The same, brought together: the result is `silu(gate) * up`, half as wide, and in bf16 if the GEMM is.
    Swiglu,
}

/// Packed weights as a GEMM takes them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packed {
    pub format: Format,
    /// Outputs and inputs.
    pub n: usize,
    pub k: usize,
    pub tiles: DevicePtr,
    /// One per output, for quantized values.
    pub scales: DevicePtr,
    pub gating: Gating,
    /// Where the absmax of the rows of [`Gating::Swiglu`] goes, or 0; not for bf16.
    pub absmax: DevicePtr,
}

impl Packed {
    /// Bytes of a token.
    pub fn row_bytes(&self) -> usize {
        self.k * number_bytes(self.format)
    }

    /// Blocks along k.
    pub fn blocks(&self) -> usize {
        self.row_bytes().div_ceil(TILE_BYTES)
    }

    /// Whether gate and up projections can be brought together.
    pub fn takes_gating(&self, context: &Context) -> bool {
        context.generation == HOPPER && self.n.is_multiple_of(2 * TILE_ROWS)
    }
}

/// `out[tokens, n] (+)= x W^T (+ bias)`, or what [`Packed::gating`] says.
pub(super) fn linear(
    queue: &mut CudaQueue,
    x: Operand,
    tokens: usize,
    w: Packed,
    bias: DevicePtr,
    add: bool,
    out: DevicePtr,
) {
    let context = queue.context.clone();
    if context.generation != HOPPER {
        return gemm_mma::linear(queue, x, tokens, w, bias, add, out);
    }
    let row = w.row_bytes();
    let (n, blocks, sms) = (w.n, w.blocks(), context.sms);
    let ranges = ranges(sms, n, blocks);
    let at_once = |v: &Variant| {
        context.blocks_at_once(v.file, v.kernel, v.threads(), v.shared(usize::MAX), v.cluster as u32)
    };
    let v = choose(w.format, tokens, n, blocks, sms, w.gating, at_once);
    let tiles = n.div_ceil(v.rows * v.alike()) * tokens.div_ceil(v.tokens);
    // Blocks, and k-blocks that each has at most.
    let (grid, each) = match v.schedule {
        Schedule::Stream => (ranges * SIDES, (n.div_ceil(CUT_ROWS) * blocks).div_ceil(ranges)),
        // Each of its clusters takes one tile.
        Schedule::Split => (tiles * v.cluster, blocks.div_ceil(v.cluster)),
        Schedule::Tiles | Schedule::Gated => {
            let clusters = (sms / v.cluster).min(tiles);
            (clusters * v.cluster, tiles.div_ceil(clusters) * blocks)
        }
    };
    // Whole tiles where they can be read: the TMA is slow at the edge of a matrix.
    let height = tokens.next_multiple_of(v.tokens).min(x.readable);
    let map = queue.tensor_map(x.data, height, row, (v.tokens / v.alike()) as u32, TILE_BYTES as u32);
    let given = args![
        &map,
        w.tiles,
        w.scales,
        x.scales,
        bias,
        out,
        queue.partial_words(),
        tokens as u32,
        n as u32,
        blocks as u32,
        ranges as u32,
        u32::from(add),
        w.gating as u32,
        w.absmax,
    ];
    let launch = Launch { grid: [grid, 1, 1], block: v.threads(), shared: v.shared(each), overlap: true };
    queue.launch_as(v.file, v.kernel, launch, given);
}

#[cfg(test)]
mod tests {
    use super::super::launch::PLAIN_SHARED;
    use super::*;

    #[test]
    fn ranges_are_never_more_than_sms_or_work() {
        for (n, blocks) in [(1, 1), (64, 7), (896, 14), (4608, 56), (37_888, 28), (152_064, 56), (3584, 296)]
        {
            let cut = ranges(132, n, blocks);
            assert!(
                (1..=132 / SIDES).contains(&cut) && cut <= n.div_ceil(CUT_ROWS) * blocks,
                "{n} {blocks}: {cut}"
            );
        }
    }

    /// The columns of a tile that go evenly into the SMs.
    #[test]
    fn gated_int8_has_tiles_for_all_sms() {
        let shapes = [(896, 4864, 40), (512, 6144, 48), (512, 8192, 64), (1024, 8960, 40), (1536, 8960, 40)];
        for (d, f, columns) in shapes {
            let chosen = |format: Format, tokens: usize| {
                choose(
                    format,
                    tokens,
                    2 * f,
                    d * number_bytes(format) / TILE_BYTES,
                    132,
                    Gating::Swiglu,
                    |_| 132,
                )
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

    /// What `meet` of `gemm_meet.cuh` relies on: the ranges of a tile end with it, or there are two and the later one
    /// goes on in the next tile.
    #[test]
    fn ranges_of_a_tile_end_together_or_are_two() {
        for n in [64, 896, 1152, 3584, 4608, 5120, 7168, 9728, 16_640, 17_920, 37_888, 55_296, 152_064] {
            for blocks in [1, 7, 14, 16, 28, 40, 56, 76, 148, 216, 296] {
                let (cut, units) = (ranges(132, n, blocks), n.div_ceil(CUT_ROWS) * blocks);
                let begin = |range: usize| units * range / cut;
                for end in (blocks..=units).step_by(blocks) {
                    let holder = |unit: usize| ((unit + 1) * cut - 1) / units;
                    let (first, last) = (holder(end - blocks), holder(end - 1));
                    let (parts, ends) = (last - first + 1, begin(last + 1) == end);
                    assert!(
                        parts <= MAX_PARTS && (ends || parts <= 2),
                        "{n} {blocks}: {parts} in the tile up to {end}"
                    );
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
            let v = choose(Format::Bf16, tokens, n, k * 2 / TILE_BYTES, 132, Gating::None, |_| 132);
            assert_eq!(v.tokens, 192, "{tokens} {n} {k}: {v:?}");
        }
    }

    #[test]
    fn shared_memory_is_always_asked_for() {
        for v in [BF16, INT8, FP8].concat() {
            for k_blocks in [1, 2, 7, 1000] {
                assert!(
                    v.shared(k_blocks) > PLAIN_SHARED && v.shared(k_blocks) <= v.shared(usize::MAX),
                    "{v:?}"
                );
            }
        }
    }

    #[test]
    fn every_number_of_tokens_has_a_form_that_holds_them() {
        for format in [Format::Bf16, Format::Int8, Format::Fp8] {
            for tokens in [1, 16, 17, 64, 100, 128, 129, 256, 257, 5000] {
                for (n, blocks) in
                    [(896, 7), (896, 76), (4608, 56), (37_888, 28), (3584, 148), (3584, 296), (152_064, 56)]
                {
                    let v = choose(format, tokens, n, blocks, 132, Gating::None, |_| 132);
                    let streams = |v: &Variant| v.schedule == Schedule::Stream;
                    assert!(!streams(v) || v.tokens >= tokens, "{format} {tokens}: {v:?}");
                    assert!(v.kernel.starts_with(v.file), "{v:?}");
                    // Sums of floating-point numbers are cut where a stream would cut them.
                    let cut = ranges(132, n, blocks) == n.div_ceil(CUT_ROWS) * v.cluster;
                    assert!(
                        v.schedule != Schedule::Split || format == Format::Int8 || cut,
                        "{format} {tokens} {n} {blocks}: {v:?}"
                    );
                    let gated = choose(format, tokens, n, blocks, 132, Gating::Paired, |_| 130);
                    assert!(
                        gated.groups() >= 2 && (!streams(gated) || gated.tokens >= tokens),
                        "{format} {tokens}: {gated:?}"
                    );
                    let fits = ranges(132, n, blocks) * SIDES <= 130;
                    assert!(
                        !streams(gated) || gated.cluster == 1 || fits,
                        "{format} {tokens}: {gated:?} would wait for ever"
                    );
                }
            }
        }
    }
}
