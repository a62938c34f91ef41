//! The key/value store that attention reads, in pages.
//!
//! Keys are stored in blocks of sixteen tokens as `[head_dim][16]`, so that scores of sixteen keys are one vector
//! whether a single query (decode) or many (prefill, training) ask for them; values are stored as rows. A page holds,
//! for every key/value head, its key blocks and then its value rows. Attention walks the positions of a sequence in
//! order, so the size of a page does not change a single bit of the result.

use super::Context;
use super::buf::{Aligned, Parts};
use super::scalar::{bf16_bits, bf16_value};

/// Tokens of a key block.
pub const KEY_BLOCK: usize = 16;

/// Number format of stored keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvFormat {
    /// 32-bit floats.
    F32,
    /// bf16.
    Bf16,
}

#[derive(Clone, Debug)]
enum Store {
    F32(Aligned<f32>),
    Bf16(Aligned<u16>),
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
    /// Room for `pages` pages of `page_size` tokens (a multiple of [`KEY_BLOCK`]).
    pub fn new(format: KvFormat, pages: usize, page_size: usize, kv_heads: usize, head_dim: usize) -> Self {
        assert!(page_size > 0 && page_size.is_multiple_of(KEY_BLOCK), "page size {page_size} is not a multiple of 16");
        let len = pages * page_size * kv_heads * head_dim * 2;
        let store = match format {
            KvFormat::F32 => Store::F32(Aligned::zeros(len)),
            KvFormat::Bf16 => Store::Bf16(Aligned::zeros(len)),
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
        }
    }

    /// Bytes that a page of this format takes in one layer.
    pub fn page_bytes(format: KvFormat, page_size: usize, kv_heads: usize, head_dim: usize) -> usize {
        let bytes = match format {
            KvFormat::F32 => 4,
            KvFormat::Bf16 => 2,
        };
        page_size * kv_heads * head_dim * 2 * bytes
    }

    /// Writes keys and values of `slots.len()` tokens. Row `i` of `qkv[.., stride]` has its keys from column
    /// `key_column` and its values right behind all keys; `slots[i] = page * page_size + place in the page`.
    pub fn write(&mut self, ctx: &Context, qkv: &[f32], stride: usize, key_column: usize, slots: &[u32]) {
        let kv = self.kv_heads * self.head_dim;
        assert!(qkv.len() >= slots.len() * stride && key_column + 2 * kv <= stride, "kv write: shapes");
        assert!(slots.iter().all(|&s| (s as usize) < self.pages * self.page_size), "kv write: slot out of range");
        let (head_dim, page_size, shape) = (self.head_dim, self.page_size, self.shape());
        let put = |row: usize, put_key: &mut dyn FnMut(usize, f32), put_values: &mut dyn FnMut(usize, &[f32])| {
            let (page, slot) = (slots[row] as usize / page_size, slots[row] as usize % page_size);
            let keys = &qkv[row * stride + key_column..][..kv];
            let values = &qkv[row * stride + key_column + kv..][..kv];
            for head in 0..shape.kv_heads {
                let block = shape.key_block(page, head, slot) + slot % KEY_BLOCK;
                for (i, &key) in keys[head * head_dim..][..head_dim].iter().enumerate() {
                    put_key(block + i * KEY_BLOCK, key);
                }
                put_values(shape.value_row(page, head, slot), &values[head * head_dim..][..head_dim]);
            }
        };
        match &mut self.store {
            Store::F32(data) => {
                let data = Parts::new(data);
                ctx.pool.for_ranges(slots.len(), 4096 / kv.max(1) + 1, &|range| {
                    for row in range {
                        // SAFETY: slots are distinct tokens, each task writes its own.
                        put(row, &mut |at, x| unsafe { *data.at(at) = x }, &mut |at, xs| unsafe {
                            data.slice(at, xs.len()).copy_from_slice(xs)
                        });
                    }
                });
            }
            Store::Bf16(data) => {
                let data = Parts::new(data);
                ctx.pool.for_ranges(slots.len(), 4096 / kv.max(1) + 1, &|range| {
                    for row in range {
                        // SAFETY: slots are distinct tokens, each task writes its own.
                        put(row, &mut |at, x| unsafe { *data.at(at) = bf16_bits(x) }, &mut |at, xs| unsafe {
                            for (to, &x) in data.slice(at, xs.len()).iter_mut().zip(xs) {
                                *to = bf16_bits(x);
                            }
                        });
                    }
                });
            }
        }
    }

    /// Copies the content of one page to another (copy on write of shared prompts).
    pub fn copy_page(&mut self, from: usize, to: usize) {
        assert!(from < self.pages && to < self.pages, "kv copy: page out of range");
        let len = self.shape().page_len();
        match &mut self.store {
            Store::F32(data) => data.copy_within(from * len..(from + 1) * len, to * len),
            Store::Bf16(data) => data.copy_within(from * len..(from + 1) * len, to * len),
        }
    }

    fn shape(&self) -> Shape {
        Shape { page_size: self.page_size, kv_heads: self.kv_heads, head_dim: self.head_dim }
    }

    /// Addresses of the key block and value rows of sixteen tokens, in f32: in the store itself, or converted into
    /// `room` (of `2 * 16 * head_dim` values).
    ///
    /// # Safety
    /// `room` is valid for writing and outlives the use of the result.
    #[inline(always)]
    pub(crate) unsafe fn block(
        &self,
        page: usize,
        head: usize,
        slot: usize,
        room: *mut f32,
    ) -> (*const f32, *const f32) {
        let shape = self.shape();
        let (key, value) = (shape.key_block(page, head, slot), shape.value_row(page, head, slot));
        let len = KEY_BLOCK * self.head_dim;
        match &self.store {
            Store::F32(data) => (data[key..key + len].as_ptr(), data[value..value + len].as_ptr()),
            Store::Bf16(data) => {
                // SAFETY: the caller gives room for both halves.
                let (keys, values) = unsafe {
                    (std::slice::from_raw_parts_mut(room, len), std::slice::from_raw_parts_mut(room.add(len), len))
                };
                for (to, &x) in keys.iter_mut().zip(&data[key..key + len]) {
                    *to = bf16_value(x);
                }
                for (to, &x) in values.iter_mut().zip(&data[value..value + len]) {
                    *to = bf16_value(x);
                }
                (keys.as_ptr(), values.as_ptr())
            }
        }
    }
}

/// The sizes that offsets are made of, apart from the store so that it can be borrowed mutably beside them.
#[derive(Clone, Copy)]
struct Shape {
    page_size: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Shape {
    /// Values of one head in one page, keys and values together.
    fn head_len(self) -> usize {
        self.page_size * self.head_dim * 2
    }

    /// Values of one page.
    fn page_len(self) -> usize {
        self.kv_heads * self.head_len()
    }

    /// Offset of the key block that holds `slot` of a page.
    fn key_block(self, page: usize, head: usize, slot: usize) -> usize {
        (page * self.kv_heads + head) * self.head_len() + slot / KEY_BLOCK * KEY_BLOCK * self.head_dim
    }

    /// Offset of the value row of `slot` of a page.
    fn value_row(self, page: usize, head: usize, slot: usize) -> usize {
        (page * self.kv_heads + head) * self.head_len() + (self.page_size + slot) * self.head_dim
    }
}
