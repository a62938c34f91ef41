//! The 8-bit key/value stores: what is written, what attention reads, and that rounding before writing is the
//! same.

use crate::naive_attention;
use crate::ops::cpus;
use crate::paged::Paged;
use crate::support::{Random, wide};
use qurl_kernels::cpu::kv::{self, KvPages};
use qurl_kernels::cpu::level::Level;
use qurl_kernels::cpu::quant::codec;
use qurl_kernels::cpu::{Context, attention};
use qurl_kernels::types::{Format, Heads, KvFormat, KvShape, Span};

const CODED: [KvFormat; 2] = [KvFormat::Int8, KvFormat::Fp8];
const TOKENS: usize = 45;
const PAGE: usize = 16;

fn heads(head_dim: usize) -> Heads {
    Heads { heads: 6, kv_heads: 2, head_dim, scale: 1.0 / (head_dim as f32).sqrt(), window: None }
}

/// Rows of queries, keys and values whose sizes differ a lot from token to token.
fn rows(heads: Heads, seed: u64) -> Vec<f32> {
    let width = heads.qkv_width();
    (0..TOKENS * width)
        .map(|i| {
            let unit = codec::random_bits(seed, i as u64) as f32 / 2_147_483_648.0 - 1.0;
            unit * ((i / width) as f32 * 0.7 - 12.0).exp2()
        })
        .collect()
}

fn pages(heads: Heads, format: KvFormat, pages: usize) -> KvPages {
    let Heads { kv_heads, head_dim, .. } = heads;
    KvPages::new(KvShape { format, pages, page_size: PAGE, kv_heads, head_dim })
}

/// Attention over a store, `steps` tokens at a time.
fn attend(ctx: &Context, heads: Heads, format: KvFormat, qkv: &[f32], steps: usize) -> Vec<f32> {
    let width = heads.qkv_width();
    let numbers: Vec<u32> = vec![2, 0, 3];
    let mut kv = pages(heads, format, 5);
    let mut all = Vec::new();
    for first in (0..TOKENS).step_by(steps) {
        let count = steps.min(TOKENS - first);
        let slots: Vec<u32> =
            (first..first + count).map(|t| numbers[t / PAGE] * PAGE as u32 + (t % PAGE) as u32).collect();
        let part = &qkv[first * width..(first + count) * width];
        kv.write(ctx, part, width, heads.q_width(), &slots);
        let mut out = vec![0.0; count * heads.q_width()];
        let span = Span { row: 0, rows: count, position: first, pages: 0 };
        attention::forward(ctx, heads, part, &kv, &[span], &numbers, &mut out, None);
        all.extend_from_slice(&out);
    }
    all
}

#[test]
fn rounding_once_is_enough_and_within_the_budget() {
    for level in Level::available() {
        let ctx = &Context::new(level, 2);
        for head_dim in [6, 16, 64, 80, 128, 256] {
            let heads = heads(head_dim);
            for format in CODED {
                for seed in 0..8 {
                    let qkv = rows(heads, seed);
                    let mut once = qkv.clone();
                    kv::round(ctx, &mut once, TOKENS, heads, format);
                    let mut twice = once.clone();
                    kv::round(ctx, &mut twice, TOKENS, heads, format);
                    assert_eq!(once, twice, "{format:?} {level} {head_dim}");
                    check_budget(heads, format, &qkv, &once);
                }
            }
        }
    }
}

/// Queries are untouched; keys and values are off by half a step of their token and head at most.
fn check_budget(heads: Heads, format: KvFormat, qkv: &[f32], rounded: &[f32]) {
    let query = heads.q_width();
    for (old, new) in qkv.chunks(heads.qkv_width()).zip(rounded.chunks(heads.qkv_width())) {
        assert_eq!(old[..query], new[..query]);
        for (old, new) in old[query..].chunks(heads.head_dim).zip(new[query..].chunks(heads.head_dim)) {
            let absmax = old.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            for (x, y) in old.iter().zip(new) {
                let budget = match format {
                    KvFormat::Int8 => absmax / 127.0 / 2.0,
                    _ => (x.abs() / 16.0).max(absmax / 448.0 / 1024.0),
                };
                assert!((x - y).abs() <= budget * 1.001, "{format:?}: {x} became {y}, budget {budget}");
            }
        }
    }
}

#[test]
fn attention_sees_the_rounded_numbers() {
    for level in Level::available() {
        let ctx = &Context::new(level, 2);
        for head_dim in [6, 64, 80] {
            let heads = heads(head_dim);
            let qkv = rows(heads, 77);
            for format in CODED {
                let mut rounded = qkv.clone();
                kv::round(ctx, &mut rounded, TOKENS, heads, format);
                // int8 are multiplied as integers, not as the f32 that they stand for.
                let stored = if format == KvFormat::Int8 { format } else { KvFormat::F32 };
                let want = attend(ctx, heads, stored, &rounded, TOKENS);
                for steps in [TOKENS, 7, 1] {
                    let what = format!("{format:?} {level} {head_dim}, {steps} at a time");
                    assert_eq!(attend(ctx, heads, format, &qkv, steps), want, "{what}");
                    assert_eq!(attend(ctx, heads, format, &rounded, steps), want, "{what}, rounded before");
                }
            }
        }
    }
}

/// Attention over int8 rounds queries and weights to 16 bits: that much it may differ from the naive twin on
/// what the codes stand for.
#[test]
fn integers_are_near_the_naive_twin() {
    const ROWS: usize = 150;
    let shapes = [(1, 1, 6), (2, 7, 64), (1, 9, 80), (1, 13, 16), (2, 3, 256), (1, 4, 20)];
    for (seed, (kv_heads, group, head_dim)) in (0..).zip(shapes) {
        for window in [None, Some(1), Some(33), Some(100)] {
            let scale = 1.0 / (head_dim as f32).sqrt();
            let heads = Heads { heads: kv_heads * group, kv_heads, head_dim, scale, window };
            let mut random = Random::new(seed);
            let paged = Paged::scattered(&mut random, &[ROWS], 32);
            let qkv = random.normals(ROWS * heads.qkv_width());
            for cpu in cpus(2) {
                let ctx = cpu.context();
                let mut rounded = qkv.clone();
                kv::round(ctx, &mut rounded, ROWS, heads, KvFormat::Int8);
                let slots = paged.slots(0, 0..ROWS);
                let mut twin = naive_attention::Store::new(paged.store_pages, paged.page_size, heads);
                twin.write(&wide(&rounded), heads, &slots);
                let (spans, pages) = ([paged.span(0, 0, ROWS, 0)], &paged.pages);
                let want = naive_attention::attention(heads, &wide(&rounded), &twin, &spans, pages, ROWS);
                let mut kv = paged.stale_store(&cpu, heads, KvFormat::Int8);
                kv.write(ctx, &qkv, heads.qkv_width(), heads.q_width(), &slots);
                let mut out = vec![f32::NAN; ROWS * heads.q_width()];
                let mut lse = vec![f32::NAN; ROWS * heads.heads];
                attention::forward(ctx, heads, &qkv, &kv, &spans, pages, &mut out, Some(&mut lse));
                for (got, want, what) in [(&out, &want.0, "out"), (&lse, &want.1, "lse")] {
                    for (i, (got, want)) in wide(got).iter().zip(want).enumerate() {
                        let off = (got - want).abs();
                        assert!(off <= 5e-4, "{heads:?} {}: {what}[{i}] {got}, not {want}", cpu.name());
                    }
                }
            }
        }
    }
}

#[test]
fn a_copied_page_has_its_scales() {
    let ctx = &Context::new(Level::best(), 1);
    let heads = heads(64);
    let qkv = &rows(heads, 5)[..PAGE * heads.qkv_width()];
    for format in KvFormat::ALL {
        let mut kv = pages(heads, format, 3);
        let slots: Vec<u32> = (0..PAGE as u32).map(|t| PAGE as u32 + t).collect();
        kv.write(ctx, qkv, heads.qkv_width(), heads.q_width(), &slots);
        kv.copy_page(1, 2);
        let read = |page: u32| {
            let mut out = vec![0.0; PAGE * heads.q_width()];
            let span = Span { row: 0, rows: PAGE, position: 0, pages: 0 };
            attention::forward(ctx, heads, qkv, &kv, &[span], &[page], &mut out, None);
            out
        };
        assert_eq!(read(1), read(2), "{format:?}");
        assert_ne!(read(0), read(1), "{format:?}");
    }
}

#[test]
fn numbers_that_are_not_finite_show() {
    let ctx = &Context::new(Level::best(), 1);
    let heads = heads(16);
    for format in CODED {
        let mut qkv = rows(heads, 1);
        qkv[heads.q_width() + 3] = f32::INFINITY;
        let mut rounded = qkv.clone();
        kv::round(ctx, &mut rounded, TOKENS, heads, format);
        assert!(rounded[heads.q_width()].is_nan(), "{format:?}: the key's head");
        let out = attend(ctx, heads, format, &qkv, TOKENS);
        assert!(out[0].is_nan(), "{format:?}: attention over it");
    }
}

#[test]
fn bytes_and_names() {
    let shape = |format| KvShape { format, pages: 1, page_size: 32, kv_heads: 2, head_dim: 64 };
    let page = |format| KvPages::page_bytes(shape(format));
    assert_eq!(
        KvFormat::ALL.map(page),
        [32 * 2 * 2 * 256, 32 * 2 * 2 * 128, 32 * 2 * 2 * 68, 32 * 2 * 2 * 68]
    );
    for format in KvFormat::ALL {
        assert_eq!(format.name().parse(), Ok(format));
        assert!(Format::ALL.iter().any(|f| f.name() == format.name()), "names are those of weights");
    }
    let error = "int2".parse::<KvFormat>().expect_err("unknown").to_string();
    assert!(error.contains("int2") && error.contains("fp8"), "{error}");
}
