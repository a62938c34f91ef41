//! Weights in four bits (int4, nvfp4): quantizing, packing into the tiles of `cu/bits4.cuh`, and back.
//!
//! They are held once, in four bits. The GEMMs decode them in registers and multiply them with tokens in bf16
//! ([`operand_format`]). Where a GEMM cannot take tiles, weights lie in rows, in their canonical form
//! ([`crate::canonical`]), and are multiplied as f32 numbers by the plain kernel.

use super::constants::{BITS4_DEPTH, INT4_TILE, NVFP4_TILE, TILE_ROWS};
use super::ffi::DevicePtr;
use super::kernels::{self, PackBits4, UnpackBits4, WeightsAbsmax, WeightsInt4, WeightsNvfp4};
use super::launch::Launch;
use super::linear::{Operand, PlainGemm};
use super::queue::CudaQueue;
use super::weight::CudaWeight;
use crate::canonical;
use crate::ops::Output;
use crate::types::{Format, Rounding, WeightShape};

/// Threads of a block that quantizes a row or packs a tile.
const THREADS: usize = 256;
/// Bytes of the codes of half a tile.
const HALF_BYTES: usize = TILE_ROWS * BITS4_DEPTH / 4;

/// Whether weights are in four bits.
pub(super) fn is_bits4(format: Format) -> bool {
    matches!(format, Format::Int4 | Format::Nvfp4)
}

/// The format in which tokens enter the GEMMs of weights in a format.
pub(super) fn operand_format(format: Format) -> Format {
    if is_bits4(format) { Format::Bf16 } else { format }
}

/// Bytes of a tile.
pub(super) fn tile_bytes(format: Format) -> usize {
    if format == Format::Int4 { INT4_TILE } else { NVFP4_TILE }
}

/// Numbers of a row that share a scale.
fn group(format: Format) -> usize {
    if format == Format::Int4 { BITS4_DEPTH } else { 16 }
}

/// What the canonical form of a matrix is made of.
#[derive(Clone, Copy)]
struct Canonical {
    codes: usize,
    /// Bytes of the scales of groups.
    groups: usize,
    /// Bytes of the scale of all weights.
    whole: usize,
}

impl Canonical {
    fn new(format: Format, n: usize, k: usize) -> Canonical {
        let shape = WeightShape { n, k, format, trained: false };
        let codes = n * canonical::row_bytes(shape);
        let whole = if format == Format::Nvfp4 { 4 } else { 0 };
        Canonical { codes, groups: canonical::bytes(shape) - codes - whole, whole }
    }
}

/// Bytes of the scales that lie beside the codes: in tiles only that of all weights, else those of groups
/// before it.
pub(super) fn scale_bytes(format: Format, n: usize, k: usize, in_tiles: bool) -> usize {
    let Canonical { groups, whole, .. } = Canonical::new(format, n, k);
    whole + if in_tiles { 0 } else { groups.next_multiple_of(4) }
}

/// Where a matrix is in rows: its codes, the scales of groups, and that of all weights, or 0.
struct Rows {
    codes: DevicePtr,
    groups: DevicePtr,
    whole: DevicePtr,
}

impl CudaWeight {
    /// The scale of all weights, of nvfp4, or 0.
    fn whole_scale(&self) -> DevicePtr {
        match self.format {
            Format::Nvfp4 => {
                let bytes = scale_bytes(self.format, self.n, self.k, self.tiles().is_some());
                self.scales() + bytes as u64 - 4
            }
            _ => 0,
        }
    }

    /// Places for the matrix in rows, on the way into tiles or for good.
    fn bits4_rows(&self, queue: &mut CudaQueue) -> Rows {
        let Canonical { codes, groups, .. } = Canonical::new(self.format, self.n, self.k);
        let whole = self.whole_scale();
        match self.tiles() {
            Some(_) => Rows { codes: queue.alloc(codes), groups: queue.alloc(groups), whole },
            None => Rows { codes: self.data().at(), groups: self.scales(), whole },
        }
    }

    fn pack_bits4(&self, queue: &mut CudaQueue, rows: &Rows) {
        let Some(tiles) = self.tiles() else { return };
        let blocks = tiles.blocks();
        let kernel = match self.format {
            Format::Int4 => kernels::pack_int4,
            _ => kernels::pack_nvfp4,
        };
        let Rows { codes: rows, groups: scales, .. } = *rows;
        let (n, k, k_blocks) = (self.n as u32, self.k as u32, blocks as u32);
        let args = PackBits4 { rows, scales, tiles: tiles.tiles, n, k, k_blocks };
        queue.launch(kernel, Launch::blocks(self.n.div_ceil(TILE_ROWS) * blocks, THREADS), args);
    }

    /// Quantizes weights `[n, k]` and packs them; `bad` takes the first row with a number that is not finite.
    pub(super) fn fill_bits4(
        &self,
        queue: &mut CudaQueue,
        weights: DevicePtr,
        rounding: Rounding,
        bad: DevicePtr,
    ) {
        let rows = self.bits4_rows(queue);
        let (launch, w, k) = (Launch::blocks(self.n, THREADS), weights, self.k as u32);
        let (stochastic, seed) = match rounding {
            Rounding::Nearest => (0u32, 0),
            Rounding::Stochastic { seed } => (1, seed),
        };
        let Rows { codes: out, groups: scales, whole } = rows;
        if self.format == Format::Int4 {
            let args = WeightsInt4 { w, k, stochastic, seed, out, scales, bad };
            queue.launch(kernels::weights_int4, launch, args);
        } else {
            let absmax = queue.alloc(4);
            queue.fill_bytes(absmax, 0, 4);
            queue.launch(kernels::weights_absmax, launch, WeightsAbsmax { w, k, absmax, bad });
            let args = WeightsNvfp4 { w, k, stochastic, seed, out, scales, absmax, whole };
            queue.launch(kernels::weights_nvfp4, launch, args);
        }
        self.pack_bits4(queue, &rows);
    }

    /// The numbers that the weights stand for in rows, in bf16 or (`full`) in f32.
    pub(super) fn bits4_numbers(&self, queue: &mut CudaQueue, full: bool) -> DevicePtr {
        let (n, k) = (self.n, self.k);
        let kernel = match (self.format, full) {
            (Format::Int4, false) => kernels::unpack_int4_bf16,
            (Format::Int4, true) => kernels::unpack_int4_f32,
            (_, false) => kernels::unpack_nvfp4_bf16,
            (_, true) => kernels::unpack_nvfp4_f32,
        };
        let rows = queue.alloc(n * k * if full { 4 } else { 2 });
        let (weights, scales, whole) = (self.data().at(), self.scales(), self.whole_scale());
        let k_blocks = self.tiles().map_or(0, |tiles| tiles.blocks() as u32);
        let args = UnpackBits4 { weights, scales, whole, rows, n: n as u32, k: k as u32, k_blocks };
        queue.launch(kernel, Launch::elements(n * k.div_ceil(8)), args);
        rows
    }

    /// `out[rows, n] (+)= x W^T (+ bias)` of weights that are not in tiles.
    pub(super) fn gemm_bits4(
        &self,
        queue: &mut CudaQueue,
        x: Operand,
        rows: usize,
        bias: DevicePtr,
        output: Output,
        out: DevicePtr,
    ) {
        let mark = queue.mark();
        let weights = self.bits4_numbers(queue, true);
        let gemm = PlainGemm {
            a: (x.data, self.k, 1),
            b: (weights, self.k, 1),
            sizes: (rows, self.n, self.k),
            scales: (0, 0),
            bias,
            add: output == Output::Add,
            out,
        };
        gemm.launch(queue, kernels::gemm_plain_bits4);
        queue.rewind(mark);
    }

    /// Appends the canonical form of what lies in `numbers` and `scales`.
    pub(super) fn export_bits4(&self, numbers: &[u8], scales: &[u8], to: &mut Vec<u8>) {
        let (format, n, k) = (self.format, self.n, self.k);
        let Canonical { groups, whole, .. } = Canonical::new(format, n, k);
        match self.tiles() {
            Some(_) => from_tiles(format, numbers, n, k, to),
            None => to.extend_from_slice(&[numbers, &scales[..groups]].concat()),
        }
        to.extend_from_slice(&scales[scales.len() - whole..]);
    }

    /// Takes over the canonical form.
    pub(super) fn import_bits4(&self, queue: &mut CudaQueue, bytes: &[u8]) {
        let Canonical { codes, groups, .. } = Canonical::new(self.format, self.n, self.k);
        let rows = self.bits4_rows(queue);
        let (numbers, scales) = bytes.split_at(codes);
        let (of_groups, whole) = scales.split_at(groups);
        queue.write_values(rows.codes, numbers);
        queue.write_values(rows.groups, of_groups);
        if !whole.is_empty() {
            queue.write_values(rows.whole, whole);
        }
        self.pack_bits4(queue, &rows);
    }
}

/// The code of register `i` in half a word.
fn code(format: Format, half: u16, i: usize) -> u8 {
    let bits = |first: usize, mask: u16| (half >> first & mask) as u8;
    match (format, i) {
        (Format::Int4, _) => bits(4 * i, 15) ^ 8,
        (_, 3) => bits(14, 1) << 3 | bits(13, 1) << 2 | bits(10, 3),
        _ => bits(15 - 3 * i, 1) << 3 | bits(6 - 3 * i, 7),
    }
}

/// The E4M3 code of a scale as tiles have it.
fn scale_code(byte: u8) -> u8 {
    match byte {
        0 => 0,
        120.. => byte - 112,
        _ => (8 | byte & 7) >> (15 - (byte >> 3)),
    }
}

/// The canonical form of codes and of the scales of groups, from tiles.
fn from_tiles(format: Format, tiles: &[u8], n: usize, k: usize, to: &mut Vec<u8>) {
    let tile_of = |row: usize, column: usize| {
        &tiles[(row / TILE_ROWS * k.div_ceil(BITS4_DEPTH) + column / BITS4_DEPTH) * tile_bytes(format)..]
    };
    for row in 0..n {
        let (strip, pair, high) = (row % TILE_ROWS / 16, row % 8, row % 16 / 8);
        let one = |column: usize| {
            let (half, step, lane) = (column % BITS4_DEPTH / 64, column % 64 / 16, pair * 4 + column % 8 / 2);
            let word = half * HALF_BYTES + (strip * 32 + lane) * 16 + step * 4 + column % 2 * 2;
            let tile = tile_of(row, column);
            let bits = u16::from_le_bytes([tile[word], tile[word + 1]]);
            code(format, bits, column % 16 / 8 * 2 + high)
        };
        let second = |column: usize| if column < k { one(column) } else { 0 };
        to.extend((0..k).step_by(2).map(|column| one(column) | second(column + 1) << 4));
    }
    for row in 0..n {
        let (pair, high) = (row % TILE_ROWS / 16 * 8 + row % 8, row % 16 / 8);
        for column in (0..k).step_by(group(format)) {
            let scales = &tile_of(row, column)[2 * HALF_BYTES..];
            match format {
                Format::Int4 => to.extend_from_slice(&scales[(pair * 2 + high) * 4..][..4]),
                _ => to.push(scale_code(scales[(pair * 8 + column % BITS4_DEPTH / 16) * 2 + high])),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random bits.
    fn bits(at: usize) -> u32 {
        crate::cpu::quant::codec::random_bits(5, at as u64)
    }

    /// A canonical form as quantizing makes it: scales of E4M3 are positive (or zero, where all codes are).
    fn canonical_form(format: Format, n: usize, k: usize) -> Vec<u8> {
        let Canonical { codes, groups, .. } = Canonical::new(format, n, k);
        let mut bytes: Vec<u8> = (0..codes).map(|i| bits(i) as u8).collect();
        if k % 2 == 1 {
            bytes.chunks_mut(k.div_ceil(2)).for_each(|row| row[k / 2] &= 15);
        }
        match format {
            Format::Int4 => bytes.extend((0..groups / 4).flat_map(|i| (bits(i) as f32).to_le_bytes())),
            _ => bytes.extend((0..groups).map(|i| (1 + bits(codes + i) % 0x7e) as u8)),
        }
        bytes
    }

    fn placed(format: Format, code: u8, i: usize) -> u16 {
        let (sign, m) = (u16::from(code >> 3), u16::from(code & 7));
        match (format, i) {
            (Format::Int4, _) => u16::from(code ^ 8) << (4 * i),
            (_, 3) => sign << 14 | (m >> 2) << 13 | (m & 3) << 10,
            _ => sign << (15 - 3 * i) | m << (6 - 3 * i),
        }
    }

    fn scale_byte(e4m3: u8) -> u8 {
        let power = match e4m3 {
            8.. => return e4m3 + 112,
            0 => return 0,
            4.. => 2,
            2.. => 1,
            _ => 0,
        };
        (12 + power) << 3 | (e4m3 << (3 - power)) & 7
    }

    /// The index arithmetic of `pack_bits4.cu`, thread by thread.
    fn to_tiles(format: Format, form: &[u8], n: usize, k: usize) -> Vec<u8> {
        let (k_blocks, row_bytes, groups) = (k.div_ceil(128), k.div_ceil(2), k.div_ceil(group(format)));
        let (rows, scales) = form.split_at(n * row_bytes);
        let mut tiles = Vec::new();
        for block in 0..n.div_ceil(64) * k_blocks {
            let (first_row, first) = (block / k_blocks * 64, block % k_blocks * 128);
            for thread in 0..256 {
                let (lane, strip, half) = (thread % 32, thread / 32 % 4, thread / 128);
                for step in 0..4 {
                    let mut word = 0u32;
                    for i in 0..4 {
                        let row = first_row + strip * 16 + lane / 4 + i % 2 * 8;
                        let column = first + half * 64 + step * 16 + i / 2 * 8 + lane % 4 * 2;
                        let two = if row < n && column < k { rows[row * row_bytes + column / 2] } else { 0 };
                        word |= u32::from(placed(format, two & 15, i));
                        word |= u32::from(placed(format, two >> 4, i)) << 16;
                    }
                    tiles.extend(word.to_le_bytes());
                }
            }
            if format == Format::Int4 {
                for thread in 0..64 {
                    let row = first_row + thread / 16 * 16 + thread % 16 / 2 + thread % 2 * 8;
                    let at = (row * groups + first / 128) * 4;
                    tiles.extend_from_slice(if row < n { &scales[at..][..4] } else { &[0, 0, 128, 63] });
                }
            } else {
                for i in 0..512 {
                    let row = first_row + i / 128 * 16 + i / 16 % 8 + i % 2 * 8;
                    let group = first / 16 + i / 2 % 8;
                    let there = row < n && group < groups;
                    tiles.push(scale_byte(if there { scales[row * groups + group] } else { 0 }));
                }
            }
        }
        tiles
    }

    #[test]
    fn rows_come_back_out_of_tiles() {
        for format in [Format::Int4, Format::Nvfp4] {
            for (n, k) in [(1, 8), (64, 128), (65, 136), (130, 400), (3, 129)] {
                let mut form = canonical_form(format, n, k);
                if let (Format::Nvfp4, Some(scale)) = (format, form.last_mut()) {
                    *scale = 0;
                }
                let tiles = to_tiles(format, &form, n, k);
                assert_eq!(tiles.len(), n.div_ceil(64) * k.div_ceil(128) * tile_bytes(format));
                let mut back = Vec::new();
                from_tiles(format, &tiles, n, k, &mut back);
                assert_eq!(back, form, "{format}, {n} by {k}");
            }
        }
    }

    /// The nearest bf16 of a number that one of them is.
    fn bf16(x: f64) -> f64 {
        let bits = (x as f32).to_bits();
        assert!(bits & 0xffff == 0 && f64::from(f32::from_bits(bits)) == x, "{x:e} is no bf16");
        x
    }

    fn half_of(word: u32, half: usize) -> f64 {
        f64::from(f32::from_bits(word >> (16 * half) << 16))
    }

    /// What `decode` of `bits4.cuh` puts into the registers of a lane, for a step of k, without the constant
    /// factor.
    fn registers(format: Format, tile: &[u8], strip: usize, lane: usize, step: usize) -> [[f64; 2]; 4] {
        let read = |at: usize| u32::from_le_bytes([tile[at], tile[at + 1], tile[at + 2], tile[at + 3]]);
        let word = read(step / 4 * HALF_BYTES + (strip * 32 + lane) * 16 + step % 4 * 4);
        let pair = strip * 8 + lane / 4;
        if format == Format::Int4 {
            let scale = |i: usize| f64::from(f32::from_bits(read(2 * HALF_BYTES + pair * 8 + i % 2 * 4)));
            return [0, 1, 2, 3].map(|i| {
                let x = (word >> (4 * i) & 0x000f_000f) | 0x4300_4300;
                [0, 1].map(|half| bf16(half_of(x, half) - 136.0) * scale(i))
            });
        }
        let bytes = read(2 * HALF_BYTES + pair * 16 + step / 4 * 8 + step % 4 / 2 * 4);
        let low = ((bytes << 4) & 0x0ff0_0ff0) | 0x7000_7000;
        let high = ((bytes >> 4) & 0x0ff0_0ff0) | 0x7000_7000;
        let last = ((word >> 4) & 0x00c0_00c0) | ((word >> 5) & 0x0100_0100) | ((word << 1) & 0x8000_8000);
        let fields = [word & 0x81c0_81c0, (word << 3) & 0x81c0_81c0, (word << 6) & 0x81c0_81c0, last];
        [0, 1, 2, 3].map(|i| {
            let scale = half_of(if i % 2 == 0 { low } else { high }, step % 2);
            [0, 1].map(|half| bf16(half_of(fields[i], half) * scale) * 256.0)
        })
    }

    /// Lanes decode the numbers of their rows and columns, every code and every scale among them.
    #[test]
    fn registers_have_the_numbers_of_their_rows_and_columns() {
        let (n, k) = (64, 256);
        for format in [Format::Int4, Format::Nvfp4] {
            let form = canonical_form(format, n, k);
            let tiles = to_tiles(format, &form, n, k);
            let number = |row: usize, column: usize| {
                let code = form[row * k / 2 + column / 2] >> (column % 2 * 4) & 15;
                let at = n * k / 2;
                if format == Format::Int4 {
                    let at = at + (row * 2 + column / 128) * 4;
                    let scale = f32::from_le_bytes([form[at], form[at + 1], form[at + 2], form[at + 3]]);
                    return f64::from((code << 4).cast_signed() >> 4) * f64::from(scale);
                }
                let value = f32::from_bits(crate::cpu::quant::codec::E2M1_BF16[usize::from(code)] << 16);
                let scale = crate::cpu::quant::codec::e4m3_value(form[at + row * k / 16 + column / 16]);
                f64::from(value) * f64::from(scale)
            };
            for (block, strip, lane, step) in
                (0..2 * 4 * 32 * 8).map(|i| (i / 1024, i / 256 % 4, i / 8 % 32, i % 8))
            {
                let tile = &tiles[block * tile_bytes(format)..][..tile_bytes(format)];
                let got = registers(format, tile, strip, lane, step);
                for (i, odd) in (0..8).map(|i| (i / 2, i % 2)) {
                    let row = strip * 16 + lane / 4 + i % 2 * 8;
                    let column = block * 128 + step * 16 + lane % 4 * 2 + i / 2 * 8 + odd;
                    let want = number(row, column);
                    assert_eq!(got[i][odd], want, "{format}: register {i} of lane {lane}, step {step}");
                }
            }
        }
    }
}
