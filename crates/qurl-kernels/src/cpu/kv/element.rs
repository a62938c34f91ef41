//! What attention reads keys and values as: f32 (of the store, or converted first), or bf16 straight from the
//! store.
//!
//! Both come in blocks `[summed][columns]`: for scores the head dimension is summed and sixteen keys are the
//! columns, for values sixteen tokens are summed and the head dimension are the columns. bf16 lie in words of
//! two neighbours along the summed dimension, so that one load and two cheap operations give two rows of f32.
//! (Loops instead of `array::map`: a closure that is compiled apart has not the instructions of the level.)

use super::{KEY_BLOCK, KvPages, Store};
use crate::cpu::simd::Simd;

/// An element of a block.
pub(crate) trait Element: Copy {
    /// `acc[r][v] += sum over i < k of a[r * A_ROW + i * a_step] * row i of b[v]`, each sum one chain over i.
    /// Blocks have `width` columns; `b[v]` begins at the columns of vector v. What is loaded is prefetched at
    /// the same place of `ahead`, line by line: all lines of a tile at once would hold up the
    /// multiplications.
    ///
    /// # Safety
    /// The operands have the stated shape; the machine has the instructions of S.
    unsafe fn multiply<S: Simd, const R: usize, const V: usize, const A_ROW: usize>(
        k: usize,
        a: *const f32,
        a_step: usize,
        b: [*const Self; V],
        ahead: [*const Self; V],
        width: usize,
        acc: &mut [[S::V; V]; R],
    );
    /// Addresses of the key block and value rows of sixteen tokens; `workspace` as for [`KvPages::block`].
    ///
    /// # Safety
    /// As for [`KvPages::block`].
    unsafe fn block<S: Simd>(
        kv: &KvPages,
        page: usize,
        head: usize,
        slot: usize,
        workspace: *mut f32,
    ) -> (*const Self, *const Self);
    /// The same addresses where no workspace is needed.
    fn in_store(kv: &KvPages, page: usize, head: usize, slot: usize) -> Option<(*const Self, *const Self)>;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn multiply<S: Simd, const R: usize, const V: usize, const A_ROW: usize>(
        k: usize,
        a: *const f32,
        a_step: usize,
        b: [*const f32; V],
        ahead: [*const f32; V],
        width: usize,
        acc: &mut [[S::V; V]; R],
    ) {
        // SAFETY: the caller gives operands of the stated shape.
        unsafe {
            for i in 0..k {
                let mut row = [S::splat(0.0); V];
                for v in 0..V {
                    S::prefetch_close(ahead[v].wrapping_add(i * width).cast());
                    row[v] = S::load(b[v].add(i * width));
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let x = S::splat(*a.add(r * A_ROW + i * a_step));
                    for v in 0..V {
                        acc[v] = S::fma(x, row[v], acc[v]);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn block<S: Simd>(
        kv: &KvPages,
        page: usize,
        head: usize,
        slot: usize,
        workspace: *mut f32,
    ) -> (*const f32, *const f32) {
        // SAFETY: the caller's promise.
        unsafe { kv.block::<S>(page, head, slot, workspace) }
    }

    #[inline(always)]
    fn in_store(kv: &KvPages, page: usize, head: usize, slot: usize) -> Option<(*const f32, *const f32)> {
        let Store::F32(data) = &kv.store else { return None };
        let (shape, slot, len) = (kv.shape(), slot / KEY_BLOCK * KEY_BLOCK, KEY_BLOCK * kv.head_dim);
        let (key, value) = (shape.key_block(page, head, slot), shape.value_block(page, head, slot));
        Some((data[key..key + len].as_ptr(), data[value..value + len].as_ptr()))
    }
}

/// Two bf16, neighbours along the summed dimension, the first in the low half.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Pair(u32);

impl Element for Pair {
    #[inline(always)]
    unsafe fn multiply<S: Simd, const R: usize, const V: usize, const A_ROW: usize>(
        k: usize,
        a: *const f32,
        a_step: usize,
        b: [*const Pair; V],
        ahead: [*const Pair; V],
        width: usize,
        acc: &mut [[S::V; V]; R],
    ) {
        // SAFETY: the caller gives operands of the stated shape; of the last pair of an odd k only one half
        // is used.
        unsafe {
            for i in 0..k / 2 {
                let mut rows = [[S::splat(0.0); V]; 2];
                for v in 0..V {
                    S::prefetch_close(ahead[v].wrapping_add(i * width).cast());
                    [rows[0][v], rows[1][v]] = S::load_pairs(b[v].add(i * width).cast());
                }
                for (half, row) in rows.iter().enumerate() {
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let x = S::splat(*a.add(r * A_ROW + (2 * i + half) * a_step));
                        for v in 0..V {
                            acc[v] = S::fma(x, row[v], acc[v]);
                        }
                    }
                }
            }
            if k % 2 == 1 {
                for v in 0..V {
                    let row = S::load_pairs(b[v].add(k / 2 * width).cast())[0];
                    for (r, acc) in acc.iter_mut().enumerate() {
                        acc[v] = S::fma(S::splat(*a.add(r * A_ROW + (k - 1) * a_step)), row, acc[v]);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn block<S: Simd>(
        kv: &KvPages,
        page: usize,
        head: usize,
        slot: usize,
        _workspace: *mut f32,
    ) -> (*const Pair, *const Pair) {
        let Some(stored) = Self::in_store(kv, page, head, slot) else {
            unreachable!("the caller has looked at the format")
        };
        stored
    }

    #[inline(always)]
    fn in_store(kv: &KvPages, page: usize, head: usize, slot: usize) -> Option<(*const Pair, *const Pair)> {
        let Store::Bf16(data) = &kv.store else { return None };
        let (shape, slot, len) = (kv.shape(), slot / KEY_BLOCK * KEY_BLOCK, KEY_BLOCK * kv.head_dim);
        let (key, value) = (shape.key_block(page, head, slot), shape.value_block(page, head, slot));
        Some((data[key..key + len].as_ptr().cast(), data[value..value + len].as_ptr().cast()))
    }
}
