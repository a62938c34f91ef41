//! The key/value store that attention reads, in pages.
//!
//! Keys are stored in blocks of sixteen tokens as `[head_dim][16]`, so that scores of sixteen keys are one
//! vector whether a single query (decode) or many (prefill, training) read them; values are stored as
//! rows. A page holds, for every key/value head, its key blocks and then its value rows. Attention walks the
//! positions of a sequence in order, so the size of a page does not change a single bit of the result.
//!
//! bf16 lie in words of two: keys with their neighbour along the head dimension, values with that of the next
//! token ([`element`]). In the 8-bit formats the keys of a token and head share a scale, and so do its values
//! ([`eight_bits`]). int8 lie in words of four: keys with their neighbours along the head dimension, values
//! with those of the next three tokens, each word in the order 0, 2, 1, 3, so that its even and its odd bytes
//! are two pairs of neighbours.

mod eight_bits;
mod element;

use super::Context;
use super::buf::{Aligned, Parts};
use super::elementwise;
use super::level::Level;
use super::simd::{MAX_LANES, Simd, simd_dispatch};
use crate::types::{Heads, KvFormat, KvShape};
use eight_bits::Code;
pub(crate) use eight_bits::Int8Block;
pub(crate) use element::{Element, Pair};

/// Tokens of a key block.
pub const KEY_BLOCK: usize = 16;

#[derive(Clone, Debug)]
enum Store {
    F32(Aligned<f32>),
    Bf16(Aligned<u16>),
    /// Codes where the others have numbers; scales `[page][head][keys, values][slot]`.
    Coded(Code, Aligned<u8>, Aligned<f32>),
}

/// Keys and values of one layer.
#[derive(Clone, Debug)]
pub struct KvPages {
    store: Store,
    pages: usize,
    page_size: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl KvPages {
    /// Zeroed pages of `page_size` tokens each (a multiple of [`KEY_BLOCK`]).
    pub fn new(shape: KvShape) -> Self {
        let KvShape { format, pages, page_size, kv_heads, head_dim } = shape;
        assert!(
            page_size > 0 && page_size.is_multiple_of(KEY_BLOCK),
            "page size {page_size} is not a multiple of 16"
        );
        let whole_pairs = format != KvFormat::Bf16 || head_dim.is_multiple_of(2);
        assert!(whole_pairs, "heads of {head_dim}: bf16 keys are stored in pairs");
        let scales = pages * page_size * kv_heads * 2;
        let len = scales / 2 * (key_dim(format, head_dim) + head_dim);
        let coded = |code| {
            let codes = Aligned::zeros(len + eight_bits::TRAIL);
            Store::Coded(code, codes, Aligned::zeros(scales))
        };
        let store = match format {
            KvFormat::F32 => Store::F32(Aligned::zeros(len)),
            KvFormat::Bf16 => Store::Bf16(Aligned::zeros(len)),
            KvFormat::Int8 => coded(Code::Int8),
            KvFormat::Fp8 => coded(Code::E4m3),
        };
        KvPages { store, pages, page_size, kv_heads, head_dim }
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Number format of the store.
    pub fn format(&self) -> KvFormat {
        match self.store {
            Store::F32(_) => KvFormat::F32,
            Store::Bf16(_) => KvFormat::Bf16,
            Store::Coded(Code::Int8, ..) => KvFormat::Int8,
            Store::Coded(Code::E4m3, ..) => KvFormat::Fp8,
        }
    }

    pub(crate) fn is_bf16(&self) -> bool {
        matches!(self.store, Store::Bf16(_))
    }

    pub(crate) fn is_int8(&self) -> bool {
        matches!(self.store, Store::Coded(Code::Int8, ..))
    }

    /// Bytes that a page of this format takes in one layer.
    pub fn page_bytes(shape: KvShape) -> usize {
        let KvShape { format, page_size, kv_heads, head_dim, .. } = shape;
        let token_and_head = match format {
            KvFormat::F32 => 4 * head_dim,
            KvFormat::Bf16 => 2 * head_dim,
            KvFormat::Int8 | KvFormat::Fp8 => head_dim + size_of::<f32>(),
        };
        let padding = key_dim(format, head_dim) - head_dim;
        page_size * kv_heads * (2 * token_and_head + padding)
    }

    /// Writes keys and values of `slots.len()` tokens. Row `i` of `qkv[.., stride]` has its keys from column
    /// `key_column` and its values right after all keys; `slots[i] = page * page_size + place in the page`.
    pub fn write(&mut self, ctx: &Context, qkv: &[f32], stride: usize, key_column: usize, slots: &[u32]) {
        let kv = self.kv_heads * self.head_dim;
        assert!(qkv.len() >= slots.len() * stride && key_column + 2 * kv <= stride, "kv write: shapes");
        let writer = self.writer(slots);
        ctx.pool.for_ranges(slots.len(), 4096 / kv.max(1) + 1, &|range| {
            for row in range {
                // SAFETY: slots are distinct tokens, each task writes its own.
                unsafe { writer.put(ctx.level, slots[row], &qkv[row * stride + key_column..][..2 * kv]) }
            }
        });
    }

    /// Rotates queries and keys of rows, rounds keys and values to what is stored, and stores them.
    pub fn rope_store(
        &mut self,
        ctx: &Context,
        qkv: &mut [f32],
        heads: Heads,
        positions: &[u32],
        cos: &[f32],
        sin: &[f32],
        slots: &[u32],
    ) {
        let (width, first) = (heads.qkv_width(), heads.heads * heads.head_dim);
        assert!(heads.kv_heads == self.kv_heads && heads.head_dim == self.head_dim, "kv store: {heads:?}");
        assert!(positions.len() == slots.len() && qkv.len() >= slots.len() * width, "kv store: shapes");
        let half = heads.head_dim / 2;
        assert!(
            positions.iter().all(|&p| (p as usize + 1) * half <= cos.len().min(sin.len())),
            "rope: table too short"
        );
        let (format, qkv) = (self.format(), Parts::new(qkv));
        let writer = self.writer(slots);
        let most = slots.len().div_ceil(ctx.threads()).max(1);
        ctx.pool.for_runs(slots.len(), most, 4096 / width.max(1) + 1, &|part| {
            for row in part {
                let angle = positions[row] as usize * half;
                // SAFETY: rows and slots are distinct between tasks, tables were checked above; the level was
                // detected.
                unsafe {
                    let (x, rotated) = (qkv.at(row * width), heads.heads + heads.kv_heads);
                    let (cos, sin) = (cos.as_ptr().add(angle), sin.as_ptr().add(angle));
                    elementwise::rotate(ctx.level, x, rotated, half, cos, sin, false);
                    let columns = qkv.slice(row * width + first, width - first);
                    round_columns(ctx.level, columns, heads.head_dim, format);
                    writer.put(ctx.level, slots[row], columns);
                }
            }
        });
    }

    /// What stores tokens from several threads, in these slots.
    fn writer(&mut self, slots: &[u32]) -> Writer {
        assert!(
            slots.iter().all(|&s| (s as usize) < self.pages * self.page_size),
            "kv write: slot out of range"
        );
        let target = match &mut self.store {
            Store::F32(data) => Target::F32(Parts::new(data)),
            Store::Bf16(data) => Target::Bf16(Parts::new(data)),
            Store::Coded(code, data, scales) => Target::Coded(*code, Parts::new(data), Parts::new(scales)),
        };
        Writer { shape: self.shape(), target }
    }

    /// Copies the content of one page to another (copy on write of shared prompts).
    pub fn copy_page(&mut self, from: usize, to: usize) {
        assert!(from < self.pages && to < self.pages, "kv copy: page out of range");
        let len = self.shape().page_len();
        match &mut self.store {
            Store::F32(data) => data.copy_within(from * len..(from + 1) * len, to * len),
            Store::Bf16(data) => data.copy_within(from * len..(from + 1) * len, to * len),
            Store::Coded(_, data, scales) => {
                data.copy_within(from * len..(from + 1) * len, to * len);
                let len = self.page_size * self.kv_heads * 2;
                scales.copy_within(from * len..(from + 1) * len, to * len);
            }
        }
    }

    fn shape(&self) -> Shape {
        let KvPages { page_size, kv_heads, head_dim, .. } = *self;
        Shape { page_size, kv_heads, key_dim: key_dim(self.format(), head_dim), head_dim }
    }

    /// The codes and scales of a store of int8.
    pub(crate) fn int8_store(&self) -> Int8Store<'_> {
        let Store::Coded(Code::Int8, codes, scales) = &self.store else {
            unreachable!("the caller has looked at the format")
        };
        Int8Store { codes, scales, shape: self.shape() }
    }

    /// Asks the caches for what [`KvPages::block`] will read.
    ///
    /// # Safety
    /// The machine has the instructions of S.
    #[inline(always)]
    pub(crate) unsafe fn prefetch<S: Simd>(&self, page: usize, head: usize, slot: usize) {
        let shape = self.shape();
        let slot = slot / KEY_BLOCK * KEY_BLOCK;
        let (key, value) = (shape.key_block(page, head, slot), shape.value_block(page, head, slot));
        let len = KEY_BLOCK * self.head_dim;
        for at in [key, value] {
            // SAFETY: the caller's promise; nothing is read.
            unsafe {
                match &self.store {
                    Store::F32(data) => prefetch_lines::<S, f32>(data.as_ptr().wrapping_add(at), len),
                    Store::Bf16(data) => prefetch_lines::<S, u16>(data.as_ptr().wrapping_add(at), len),
                    Store::Coded(_, data, _) => prefetch_lines::<S, u8>(data.as_ptr().wrapping_add(at), len),
                }
            }
        }
    }

    /// Addresses of the key block and value rows of sixteen tokens, in f32: in the store itself, or converted
    /// into `workspace` (of `2 * 16 * head_dim` values).
    ///
    /// # Safety
    /// `workspace` is valid for writing and outlives the use of the result; the machine has the instructions
    /// of S.
    #[inline(always)]
    pub(crate) unsafe fn block<S: Simd>(
        &self,
        page: usize,
        head: usize,
        slot: usize,
        workspace: *mut f32,
    ) -> (*const f32, *const f32) {
        let shape = self.shape();
        let slot = slot / KEY_BLOCK * KEY_BLOCK;
        let (key, value) = (shape.key_block(page, head, slot), shape.value_block(page, head, slot));
        let len = KEY_BLOCK * self.head_dim;
        // SAFETY: the caller gives workspace for both halves; a block is a whole number of vectors.
        unsafe {
            let (keys, values) = (workspace, workspace.add(len));
            match &self.store {
                Store::F32(data) => {
                    return (data[key..key + len].as_ptr(), data[value..value + len].as_ptr());
                }
                Store::Bf16(data) => {
                    from_pairs::<S>(data[key..key + len].as_ptr().cast(), self.head_dim, KEY_BLOCK, keys);
                    from_pairs::<S>(
                        data[value..value + len].as_ptr().cast(),
                        KEY_BLOCK,
                        self.head_dim,
                        values,
                    );
                }
                Store::Coded(Code::E4m3, data, scales) => {
                    let scales = |part| {
                        let at = shape.scale(page, head, slot, part);
                        &scales[at..at + KEY_BLOCK]
                    };
                    eight_bits::keys::<S>(&data[key..key + len], scales(0), keys);
                    eight_bits::values::<S>(&data[value..value + len], scales(1), values);
                }
                Store::Coded(Code::Int8, ..) => unreachable!("attention reads int8 as it is stored"),
            }
            (keys, values)
        }
    }
}

/// A store of int8: what is looked up for every tile without looking at the format again.
#[derive(Clone, Copy)]
pub(crate) struct Int8Store<'a> {
    codes: &'a [u8],
    scales: &'a [f32],
    shape: Shape,
}

impl Int8Store<'_> {
    /// Where the codes and scales of sixteen tokens lie.
    #[inline(always)]
    pub(crate) fn block(&self, page: usize, head: usize, slot: usize) -> Int8Block {
        let (shape, slot) = (self.shape, slot / KEY_BLOCK * KEY_BLOCK);
        let (key, value) = (shape.key_block(page, head, slot), shape.value_block(page, head, slot));
        let scales = |part| self.scales[shape.scale(page, head, slot, part)..][..KEY_BLOCK].as_ptr();
        Int8Block {
            keys: self.codes[key..][..KEY_BLOCK * shape.key_dim].as_ptr().cast(),
            values: self.codes[value..][..KEY_BLOCK * shape.head_dim].as_ptr().cast(),
            key_scales: scales(0),
            value_scales: scales(1),
        }
    }
}

/// Prefetches the cache lines of `len` values.
#[inline(always)]
unsafe fn prefetch_lines<S: Simd, T>(from: *const T, len: usize) {
    for byte in (0..len * size_of::<T>()).step_by(64) {
        // SAFETY: any address may be prefetched.
        unsafe { S::prefetch(from.cast::<u8>().wrapping_add(byte)) }
    }
}

/// A store that several threads write to.
struct Writer {
    shape: Shape,
    target: Target,
}

enum Target {
    F32(Parts<f32>),
    Bf16(Parts<u16>),
    Coded(Code, Parts<u8>, Parts<f32>),
}

impl Writer {
    /// Stores the keys of one token, then its values, all heads of each.
    ///
    /// # Safety
    /// The slot lies inside the store and belongs to the calling task; the machine has the instructions of
    /// the level.
    unsafe fn put(&self, level: Level, slot: u32, keys_and_values: &[f32]) {
        let (shape, head_dim) = (self.shape, self.shape.head_dim);
        let (page, slot) = (slot as usize / shape.page_size, slot as usize % shape.page_size);
        let (keys, values) = keys_and_values.split_at(shape.kv_heads * head_dim);
        let heads = keys.chunks_exact(head_dim).zip(values.chunks_exact(head_dim));
        for (head, (keys, values)) in heads.enumerate() {
            let place = slot % KEY_BLOCK;
            let key = shape.key_block(page, head, slot) + place;
            let value = shape.value_block(page, head, slot) + place * head_dim;
            // SAFETY: the caller's promise; arrays on the stack have workspace for one vector more than the
            // largest head.
            unsafe {
                match &self.target {
                    Target::F32(data) => {
                        spread(data, key, keys);
                        data.slice(value, head_dim).copy_from_slice(values);
                    }
                    Target::Bf16(data) => {
                        let rows = data.at(value - place % 2 * (head_dim - 1));
                        put_bf16(level, keys, values, data.at(key + place), rows);
                    }
                    Target::Coded(code, data, scales) => {
                        let mut codes = [0u8; eight_bits::MAX_CODES];
                        *scales.at(shape.scale(page, head, slot, 0)) =
                            eight_bits::quantize(level, *code, keys, &mut codes);
                        match code {
                            Code::Int8 => {
                                codes[head_dim..shape.key_dim].fill(0);
                                let at = shape.key_block(page, head, slot) + 4 * place;
                                let words = codes[..shape.key_dim].as_chunks::<4>().0;
                                for (i, &[a, b, c, d]) in words.iter().enumerate() {
                                    data.slice(at + 4 * i * KEY_BLOCK, 4).copy_from_slice(&[a, c, b, d]);
                                }
                            }
                            Code::E4m3 => spread(data, key, &codes[..head_dim]),
                        }
                        *scales.at(shape.scale(page, head, slot, 1)) =
                            eight_bits::quantize(level, *code, values, &mut codes);
                        match code {
                            Code::Int8 => {
                                let words = value - place % 4 * head_dim;
                                for (i, &code) in codes[..head_dim].iter().enumerate() {
                                    *data.at(words + 4 * i + [0, 2, 1, 3][place % 4]) = code;
                                }
                            }
                            Code::E4m3 => data.slice(value, head_dim).copy_from_slice(&codes[..head_dim]),
                        }
                    }
                }
            }
        }
    }
}

simd_dispatch!(
    plain fn put_bf16(keys: &[f32], values: &[f32], block: *mut u16, rows: *mut u16) = put_bf16_at
);

/// Stores the keys of one token and head in pairs into their block, and its values into every second place of
/// their rows.
#[inline(always)]
unsafe fn put_bf16_at<S: Simd>(keys: &[f32], values: &[f32], block: *mut u16, rows: *mut u16) {
    for at in (0..keys.len()).step_by(S::LANES) {
        let n = S::LANES.min(keys.len() - at);
        let (mut key_bits, mut value_bits) = ([0u16; MAX_LANES], [0u16; MAX_LANES]);
        // SAFETY: a head's keys and values, and the token's places of a block; heads are whole pairs.
        unsafe {
            S::store_bf16(key_bits.as_mut_ptr(), S::load_n(keys.as_ptr().add(at), n));
            S::store_bf16(value_bits.as_mut_ptr(), S::load_n(values.as_ptr().add(at), n));
            for (i, &pair) in key_bits[..n].as_chunks::<2>().0.iter().enumerate() {
                block.add((at + 2 * i) * KEY_BLOCK).cast::<[u16; 2]>().write(pair);
            }
            for (i, &bits) in value_bits[..n].iter().enumerate() {
                *rows.add(2 * (at + i)) = bits;
            }
        }
    }
}

/// Words `[rows / 2][columns]` of two bf16 become f32 `[rows][columns]`.
#[inline(always)]
unsafe fn from_pairs<S: Simd>(from: *const u32, rows: usize, columns: usize, to: *mut f32) {
    for pair in 0..rows / 2 {
        for column in (0..columns).step_by(S::LANES) {
            let n = S::LANES.min(columns - column);
            // SAFETY: the caller gives blocks of this size; partial vectors are masked.
            unsafe {
                let [low, high] = S::load_pairs_n(from.add(pair * columns + column), n);
                S::store_n(to.add(2 * pair * columns + column), low, n);
                S::store_n(to.add((2 * pair + 1) * columns + column), high, n);
            }
        }
    }
}

/// Writes the keys of one token into their block, from `at` on.
///
/// # Safety
/// The token belongs to the calling task.
#[inline(always)]
unsafe fn spread<T: Copy>(data: &Parts<T>, at: usize, keys: &[T]) {
    for (i, &key) in keys.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { *data.at(at + i * KEY_BLOCK) = key }
    }
}

/// Rounds the keys and values of one token to what a store of this format holds.
///
/// # Safety
/// The machine has the instructions of the level.
unsafe fn round_columns(level: Level, columns: &mut [f32], head_dim: usize, format: KvFormat) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut rounded = |code| {
            for part in columns.chunks_exact_mut(head_dim) {
                eight_bits::round(level, code, part);
            }
        };
        match format {
            KvFormat::Int8 => rounded(Code::Int8),
            KvFormat::Fp8 => rounded(Code::E4m3),
            KvFormat::Bf16 => elementwise::round_row(level, columns.as_mut_ptr(), columns.len()),
            KvFormat::F32 => {}
        }
    }
}

/// Rounds keys and values in `qkv[rows, qkv_width]` to what a store of this format holds. Rounding twice
/// changes nothing, so rounded rows can be written to the store.
pub fn round(ctx: &Context, qkv: &mut [f32], rows: usize, heads: Heads, format: KvFormat) {
    let (width, first) = (heads.qkv_width(), heads.heads * heads.head_dim);
    assert!(qkv.len() >= rows * width, "round_kv: shapes");
    if format == KvFormat::F32 {
        return;
    }
    let parts = Parts::new(qkv);
    ctx.pool.for_ranges(rows, 4096 / width.max(1) + 1, &|range| {
        for row in range {
            // SAFETY: one task a row; the level was detected.
            unsafe {
                round_columns(
                    ctx.level,
                    parts.slice(row * width + first, width - first),
                    heads.head_dim,
                    format,
                )
            }
        }
    });
}

/// The sizes that offsets are made of, apart from the store so that it can be borrowed mutably beside them.
#[derive(Clone, Copy)]
struct Shape {
    page_size: usize,
    kv_heads: usize,
    /// Stored numbers of a key.
    key_dim: usize,
    head_dim: usize,
}

/// Stored numbers of a key: int8 lie in whole words of four, the last one padded with zeros.
fn key_dim(format: KvFormat, head_dim: usize) -> usize {
    if format == KvFormat::Int8 { head_dim.next_multiple_of(4) } else { head_dim }
}

impl Shape {
    /// Values of one head in one page, keys and values together.
    fn head_len(self) -> usize {
        self.page_size * (self.key_dim + self.head_dim)
    }

    /// Values of one page.
    fn page_len(self) -> usize {
        self.kv_heads * self.head_len()
    }

    /// Offset of the block of keys that has `slot`.
    fn key_block(self, page: usize, head: usize, slot: usize) -> usize {
        (page * self.kv_heads + head) * self.head_len() + slot / KEY_BLOCK * KEY_BLOCK * self.key_dim
    }

    /// Offset of the block of values that has `slot`.
    fn value_block(self, page: usize, head: usize, slot: usize) -> usize {
        let first = (page * self.kv_heads + head) * self.head_len() + self.page_size * self.key_dim;
        first + slot / KEY_BLOCK * KEY_BLOCK * self.head_dim
    }

    /// Offset of the scale of the keys (`part` 0) or values (1) of `slot`.
    fn scale(self, page: usize, head: usize, slot: usize, part: usize) -> usize {
        ((page * self.kv_heads + head) * 2 + part) * self.page_size + slot
    }
}
