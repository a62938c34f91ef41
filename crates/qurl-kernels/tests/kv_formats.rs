//! The 8-bit key/value stores: what is written, what attention reads, and that rounding before writing is the same.

use qurl_kernels::backend::{Backend, Heads, KvFormat, Span};
use qurl_kernels::cpu::level::Level;
use qurl_kernels::cpu::quant::codec;
use qurl_kernels::{Cpu, Format};

const CODED: [KvFormat; 2] = [KvFormat::Int8, KvFormat::Fp8];
const TOKENS: usize = 45;
const PAGE: usize = 16;

fn heads(head_dim: usize) -> Heads {
    Heads { heads: 6, kv_heads: 2, head_dim, scale: 1.0 / (head_dim as f32).sqrt() }
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

fn upload(cpu: &Cpu, values: &[f32]) -> <Cpu as Backend>::Tensor {
    cpu.upload(values).expect("memory")
}

/// Attention over a store, `steps` tokens at a time.
fn attend(cpu: &Cpu, heads: Heads, format: KvFormat, qkv: &[f32], steps: usize) -> Vec<f32> {
    let width = heads.qkv_width();
    let pages: Vec<u32> = vec![2, 0, 3];
    let mut kv = cpu.kv_pages(format, 5, PAGE, heads.kv_heads, heads.head_dim).expect("memory");
    let mut all = Vec::new();
    for first in (0..TOKENS).step_by(steps) {
        let count = steps.min(TOKENS - first);
        let slots: Vec<u32> =
            (first..first + count).map(|t| pages[t / PAGE] * PAGE as u32 + (t % PAGE) as u32).collect();
        let part = upload(cpu, &qkv[first * width..(first + count) * width]);
        cpu.kv_write(&part, heads, &slots, &mut kv);
        let mut out = cpu.zeros(count * heads.heads * heads.head_dim).expect("memory");
        let span = Span { row: 0, rows: count, position: first, pages: 0 };
        cpu.attention(heads, &part, &kv, &[span], &pages, &mut out, None);
        all.extend_from_slice(&out);
    }
    all
}

#[test]
fn rounding_once_is_enough_and_within_the_budget() {
    for level in Level::available() {
        let cpu = Cpu::new(level, 2);
        for head_dim in [6, 16, 64, 80, 128, 256] {
            let heads = heads(head_dim);
            for format in CODED {
                for seed in 0..8 {
                    let qkv = rows(heads, seed);
                    let mut once = upload(&cpu, &qkv);
                    cpu.round_kv(&mut once, TOKENS, heads, format);
                    let mut twice = once.clone();
                    cpu.round_kv(&mut twice, TOKENS, heads, format);
                    assert_eq!(*once, *twice, "{format:?} {level} {head_dim}");
                    check_budget(heads, format, &qkv, &once);
                }
            }
        }
    }
}

/// Queries are untouched; keys and values are off by half a step of their token and head at most.
fn check_budget(heads: Heads, format: KvFormat, qkv: &[f32], rounded: &[f32]) {
    let query = heads.heads * heads.head_dim;
    for (old, new) in qkv.chunks(heads.qkv_width()).zip(rounded.chunks(heads.qkv_width())) {
        assert_eq!(old[..query], new[..query]);
        for (old, new) in old[query..].chunks(heads.head_dim).zip(new[query..].chunks(heads.head_dim)) {
            let largest = old.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            for (x, y) in old.iter().zip(new) {
                let budget = match format {
                    KvFormat::Int8 => largest / 127.0 / 2.0,
                    _ => (x.abs() / 16.0).max(largest / 448.0 / 1024.0),
                };
                assert!((x - y).abs() <= budget * 1.001, "{format:?}: {x} became {y}, budget {budget}");
            }
        }
    }
}

#[test]
fn attention_sees_the_rounded_numbers() {
    for level in Level::available() {
        let cpu = Cpu::new(level, 2);
        for head_dim in [6, 64, 80] {
            let heads = heads(head_dim);
            let qkv = rows(heads, 77);
            for format in CODED {
                let mut rounded = upload(&cpu, &qkv);
                cpu.round_kv(&mut rounded, TOKENS, heads, format);
                let wide = attend(&cpu, heads, KvFormat::F32, &rounded, TOKENS);
                for steps in [TOKENS, 7, 1] {
                    let what = format!("{format:?} {level} {head_dim}, {steps} at a time");
                    assert_eq!(attend(&cpu, heads, format, &qkv, steps), wide, "{what}");
                    assert_eq!(attend(&cpu, heads, format, &rounded, steps), wide, "{what}, rounded before");
                }
            }
        }
    }
}

#[test]
fn a_copied_page_has_its_scales() {
    let cpu = Cpu::new(Level::best(), 1);
    let heads = heads(64);
    let qkv = upload(&cpu, &rows(heads, 5)[..PAGE * heads.qkv_width()]);
    for format in KvFormat::ALL {
        let mut kv = cpu.kv_pages(format, 3, PAGE, heads.kv_heads, heads.head_dim).expect("memory");
        let slots: Vec<u32> = (0..PAGE as u32).map(|t| PAGE as u32 + t).collect();
        cpu.kv_write(&qkv, heads, &slots, &mut kv);
        cpu.kv_copy_page(&mut kv, 1, 2);
        let read = |page: u32| {
            let mut out = cpu.zeros(PAGE * heads.heads * heads.head_dim).expect("memory");
            let span = Span { row: 0, rows: PAGE, position: 0, pages: 0 };
            cpu.attention(heads, &qkv, &kv, &[span], &[page], &mut out, None);
            out.to_vec()
        };
        assert_eq!(read(1), read(2), "{format:?}");
        assert_ne!(read(0), read(1), "{format:?}");
    }
}

#[test]
fn numbers_that_are_not_finite_show() {
    let cpu = Cpu::new(Level::best(), 1);
    let heads = heads(16);
    for format in CODED {
        let mut qkv = rows(heads, 1);
        qkv[heads.heads * heads.head_dim + 3] = f32::INFINITY;
        let mut tensor = upload(&cpu, &qkv);
        cpu.round_kv(&mut tensor, TOKENS, heads, format);
        assert!(tensor[heads.heads * heads.head_dim].is_nan(), "{format:?}: the key's head");
        let out = attend(&cpu, heads, format, &qkv, TOKENS);
        assert!(out[0].is_nan(), "{format:?}: attention over it");
    }
}

#[test]
fn bytes_and_names() {
    let page = |format| qurl_kernels::cpu::kv::KvPages::page_bytes(format, 32, 2, 64);
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
