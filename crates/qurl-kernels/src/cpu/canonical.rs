//! Packed weights as rows and back: the form of [`crate::canonical`] out of and into the panels of a GEMM.
//!
//! A panel's words along k are the bytes of a row, four at a time, in every format (E4M3 in an order of its
//! own), so one loop serves all of them. What a GEMM needs beside numbers and scales (sums of int8 columns,
//! flags of small E4M3 numbers, values of padding lanes) is computed here, as quantizing does.

use super::Context;
use super::device::{CpuWeight, Forward};
use super::gemm::{NVFP4_GROUP, PackedB};
use super::quant::codec::{self, CodeKind};
use super::quant::{BLOCK, Granularity, LEAD, QuantB};
use crate::canonical;
use crate::types::{Format, WeightShape};

/// Panels of words `[panel][word][lane]` with rows of `row_bytes` bytes.
#[derive(Clone, Copy)]
struct Panels {
    n: usize,
    width: usize,
    words: usize,
    row_bytes: usize,
    e4m3: bool,
}

impl Panels {
    /// Calls `work` with each panel's words and its rows, on all threads.
    fn for_each<W: Send, R: Send>(
        self,
        threads: usize,
        words: impl Iterator<Item = W> + Send,
        rows: impl Iterator<Item = R> + Send,
        work: impl Fn(usize, W, R) + Sync,
    ) {
        let panels = std::sync::Mutex::new(words.zip(rows).enumerate());
        let next = || panels.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next();
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some((panel, (words, rows))) = next() {
                        work(panel, words, rows);
                    }
                });
            }
        });
    }

    fn give_rows(self, threads: usize, words: &[u32], rows: &mut [u8]) {
        let (words, rows) =
            (words.chunks(self.words * self.width), rows.chunks_mut(self.width * self.row_bytes));
        self.for_each(threads, words, rows, |_, words, rows| {
            for (lane, row) in rows.chunks_mut(self.row_bytes).enumerate() {
                for (bytes, &word) in row.chunks_mut(4).zip(words.iter().skip(lane).step_by(self.width)) {
                    let word = if self.e4m3 { codec::e4m3_codes(word) } else { word.to_le_bytes() };
                    bytes.copy_from_slice(&word[..bytes.len()]);
                }
            }
        });
    }

    fn take_rows(self, threads: usize, rows: &[u8], words: &mut [u32]) {
        let (words, rows) =
            (words.chunks_mut(self.words * self.width), rows.chunks(self.width * self.row_bytes));
        self.for_each(threads, words, rows, |_, words, rows| {
            for (lane, row) in rows.chunks(self.row_bytes).enumerate() {
                for (bytes, word) in row.chunks(4).zip(words.iter_mut().skip(lane).step_by(self.width)) {
                    let mut whole = [0; 4];
                    whole[..bytes.len()].copy_from_slice(bytes);
                    *word = if self.e4m3 { codec::e4m3_word(whole) } else { u32::from_le_bytes(whole) };
                }
            }
        });
    }
}

/// Appends the canonical form.
pub(super) fn export(ctx: &Context, weight: &CpuWeight, to: &mut Vec<u8>) {
    let shape = shape(weight);
    let at = to.len();
    to.resize(at + canonical::bytes(shape), 0);
    let (rows, scales) = to[at..].split_at_mut(canonical::row_bytes(shape) * shape.n);
    let (panels, words) = panels(ctx, weight);
    panels.give_rows(ctx.threads(), words, rows);
    if let Forward::Quantized(packed) = &weight.forward {
        packed.export_scales(ctx.panel(), scales);
    }
}

/// Takes over the canonical form.
pub(super) fn import(ctx: &Context, bytes: &[u8], weight: &mut CpuWeight) {
    let shape = shape(weight);
    let (rows, scales) = bytes.split_at(canonical::row_bytes(shape) * shape.n);
    let (panels, _) = panels(ctx, weight);
    let threads = ctx.threads();
    match &mut weight.forward {
        Forward::Float(PackedB { words, .. }) => panels.take_rows(threads, rows, words),
        Forward::Quantized(packed) => {
            let end = LEAD + shape.n.div_ceil(panels.width) * panels.width * panels.words;
            panels.take_rows(threads, rows, &mut packed.words[LEAD..end]);
            packed.import_scales(ctx.panel(), scales);
            packed.complete(panels);
        }
    }
}

pub(super) fn shape(weight: &CpuWeight) -> WeightShape {
    let format = match &weight.forward {
        Forward::Float(packed) => match packed.precision.per_word() {
            1 => Format::F32,
            _ => Format::Bf16,
        },
        Forward::Quantized(packed) => packed.format,
    };
    WeightShape { n: weight.n, k: weight.k, format, trained: weight.backward.is_some() }
}

fn panels<'a>(ctx: &Context, weight: &'a CpuWeight) -> (Panels, &'a [u32]) {
    let shape = shape(weight);
    let (words, e4m3): (&[u32], bool) = match &weight.forward {
        Forward::Float(packed) => (&packed.words, false),
        Forward::Quantized(packed) => (&packed.words[LEAD..], packed.scheme.codes == CodeKind::E4m3),
    };
    let row_bytes = canonical::row_bytes(shape);
    (Panels { n: shape.n, width: ctx.panel(), words: row_bytes.div_ceil(4), row_bytes, e4m3 }, words)
}

impl QuantB {
    /// Where the scale of a channel and a block of k is.
    fn scale_at(&self, width: usize, channel: usize, block: usize, per_channel: usize) -> usize {
        (channel / width * per_channel + block) * width + channel % width
    }

    fn export_scales(&self, width: usize, to: &mut [u8]) {
        let blocks = self.scheme.blocks(self.k);
        let (channels, step) = match self.scheme.granularity {
            Granularity::Channel | Granularity::Group => (self.n, 1),
            Granularity::Square => (self.n, BLOCK),
            Granularity::Nvfp4 => (1, 1),
        };
        let groups = self.k.div_ceil(NVFP4_GROUP);
        let of_groups = if self.group_scales.is_empty() { 0 } else { self.n * groups };
        let (to_groups, to) = to.split_at_mut(of_groups);
        let places = (0..channels).step_by(step).flat_map(|channel| (0..blocks).map(move |b| (channel, b)));
        for (to, (channel, block)) in to.chunks_mut(4).zip(places) {
            to.copy_from_slice(&self.scales[self.scale_at(width, channel, block, blocks)].to_le_bytes());
        }
        for (i, to) in to_groups.iter_mut().enumerate() {
            *to = self.group_scales[self.scale_at(width, i / groups, i % groups, groups)];
        }
    }

    fn import_scales(&mut self, width: usize, from: &[u8]) {
        let blocks = self.scheme.blocks(self.k);
        let groups = self.k.div_ceil(NVFP4_GROUP);
        let of_groups = if self.group_scales.is_empty() { 0 } else { self.n * groups };
        let (from_groups, from) = from.split_at(of_groups);
        let (scales, _) = from.as_chunks::<4>();
        for channel in 0..self.n.next_multiple_of(width) {
            for block in 0..blocks {
                let scale = match self.scheme.granularity {
                    Granularity::Channel | Granularity::Group => scales.get(channel * blocks + block),
                    Granularity::Square => scales.get(channel / BLOCK * blocks + block),
                    Granularity::Nvfp4 => scales.first(),
                };
                let at = self.scale_at(width, channel, block, blocks);
                self.scales[at] = scale.map_or(1.0, |bytes| f32::from_le_bytes(*bytes));
            }
        }
        for (i, &code) in from_groups.iter().enumerate() {
            let at = self.scale_at(width, i / groups, i % groups, groups);
            self.group_scales[at] = code;
        }
    }

    /// What is computed from the codes.
    fn complete(&mut self, panels: Panels) {
        let Panels { n, width, words, .. } = panels;
        for panel in 0..n.div_ceil(width) {
            let of_panel = &self.words[LEAD + panel * words * width..][..words * width];
            if !self.starts.is_empty() {
                for (lane, start) in self.starts[panel * width..][..width].iter_mut().enumerate() {
                    let codes = of_panel.iter().skip(lane).step_by(width).flat_map(|word| word.to_le_bytes());
                    *start = -128 * codes.map(|code| i32::from(code.cast_signed())).sum::<i32>();
                }
            }
            if !self.small.is_empty() {
                let small = &mut self.small[panel * words * 2..][..words * 2];
                for (small, half) in small.iter_mut().zip(of_panel.chunks(width / 2)) {
                    let mut codes = half.iter().flat_map(|word| word.to_le_bytes());
                    *small = codes.any(codec::e4m3_is_small).into();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::level::Level;
    use crate::ops::Pack;
    use crate::{Cpu, Device, Queue, Rounding};
    use std::sync::Arc;

    type Inside = (Vec<u32>, Vec<u32>, Vec<i32>, Vec<u8>, Vec<u8>);

    /// Everything that a GEMM reads.
    fn inside(weight: &CpuWeight) -> Inside {
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect();
        match &weight.forward {
            Forward::Float(b) => (b.words.to_vec(), Vec::new(), Vec::new(), Vec::new(), Vec::new()),
            Forward::Quantized(b) => (
                b.words.to_vec(),
                bits(&b.scales),
                b.starts.to_vec(),
                b.small.to_vec(),
                b.group_scales.to_vec(),
            ),
        }
    }

    #[test]
    fn packing_from_bytes_is_packing_from_weights() {
        for (n, k) in [(1, 1), (70, 129), (33, 256), (260, 66)] {
            let source: Vec<f32> = (0..n * k).map(|i| ((i * 7919) % 1013) as f32 / 97.0 - 5.0).collect();
            for format in Format::ALL {
                for rounding in [Rounding::Nearest, Rounding::Stochastic { seed: 3 }] {
                    let mut bytes = Vec::new();
                    for level in Level::available() {
                        let mut queue = Arc::new(Cpu::new(level, 2)).queue().expect("a queue");
                        let from = queue.upload(&source).expect("a tensor");
                        let shape = WeightShape { n, k, format, trained: false };
                        let mut packed = queue.device().weight(shape).expect("weights");
                        queue
                            .pack(Pack { from: &from, rounding, copy: None, to: &mut packed })
                            .expect("packed");
                        let mut own = Vec::new();
                        queue.export(&packed, &mut own).expect("exported");
                        let what = format!("{n} by {k} in {format}, {rounding:?}, {level}");
                        if bytes.is_empty() {
                            bytes.clone_from(&own);
                        }
                        assert_eq!(own, bytes, "{what}: the same bytes at every level");

                        // Into memory that other weights were in.
                        let mut other = queue.device().weight(shape).expect("weights");
                        let mirrored: Vec<f32> = source.iter().rev().map(|x| x * 1.5).collect();
                        let mirrored = queue.upload(&mirrored).expect("a tensor");
                        let to = &mut other;
                        queue.pack(Pack { from: &mirrored, rounding, copy: None, to }).expect("packed");
                        queue.import(&bytes, &mut other).expect("imported");
                        assert_eq!(inside(&other), inside(&packed), "{what}");
                        let refused =
                            queue.import(&bytes[1..], &mut other).expect_err("too short").to_string();
                        assert!(refused.contains(&format!("expected {}", bytes.len())), "{refused}");
                    }
                }
            }
        }
    }

    #[test]
    fn rows_and_scales_are_where_they_are_said_to_be() {
        let mut queue = Arc::new(Cpu::new(Level::best(), 1)).queue().expect("a queue");
        let from = queue.upload(&[127.0, -64.0, 3.0, 0.0, 254.0, -2.0]).expect("a tensor");
        let mut bytes = |format| {
            let mut packed =
                queue.device().weight(WeightShape { n: 2, k: 3, format, trained: false }).expect("weights");
            let to = &mut packed;
            queue.pack(Pack { from: &from, rounding: Rounding::Nearest, copy: None, to }).expect("packed");
            let mut bytes = Vec::new();
            queue.export(&packed, &mut bytes).expect("exported");
            bytes
        };
        let scales = [1.0f32.to_le_bytes(), 2.0f32.to_le_bytes()].concat();
        assert_eq!(bytes(Format::Int8), [&[127, 192, 3, 0, 127, 255][..], &scales].concat());
        let bf16 = [0x42fe_u16, 0xc280, 0x4040, 0, 0x437e, 0xc000];
        assert_eq!(bytes(Format::Bf16), bf16.map(u16::to_le_bytes).concat());
        // Rows of four bits: 7, -4, 0 and 0, 7, 0; scales of 127/7 and 254/7.
        let int4 = bytes(Format::Int4);
        assert_eq!(int4[..4], [0xc7, 0x00, 0x70, 0x00]);
        assert_eq!(int4[4..8], (127.0f32 / 7.0).to_le_bytes());
    }
}
