//! A sequence's attention is the same bits however it was computed: at once (training, prefill), in chunks,
//! or token by token (decode); with pages of any size, anywhere in a store whose other slots hold NaN.

use crate::ops::{Ops, cpus};
use crate::paged::{Paged, heads};
use crate::support::{Random, assert_bits, wide};
use qurl_kernels::cpu::{attention, kv};
use qurl_kernels::types::{Heads, KvFormat};
use qurl_kernels::{Cpu, Queue};

/// Several tiles of keys and blocks of query rows.
const LENGTH: usize = 150;
const PAGE_SIZES: [usize; 4] = [16, 32, 64, 128];
/// Rows of the steps a sequence is computed in, repeated until it ends.
const STEPS: [&[usize]; 6] = [&[LENGTH], &[1], &[7], &[64], &[48, 1, 50], &[100, 1]];

/// Output and softmax denominators of a sequence, computed in steps over scattered pages.
fn in_steps(
    cpu: &Ops<Cpu>,
    heads: Heads,
    format: KvFormat,
    qkv: &[f32],
    page_size: usize,
    steps: &[usize],
) -> (Vec<f64>, Vec<f64>) {
    let (width, ctx) = (heads.qkv_width(), cpu.context());
    let paged =
        Paged::scattered(&mut Random::new(page_size as u64 + steps.len() as u64), &[LENGTH], page_size);
    let mut kv = paged.stale_store(cpu, heads, format);
    let (mut outs, mut denominators) = (Vec::new(), Vec::new());
    let (mut position, mut step) = (0, 0);
    while position < LENGTH {
        let rows = steps[step % steps.len()].min(LENGTH - position);
        let qkv = &qkv[position * width..(position + rows) * width];
        kv.write(ctx, qkv, width, heads.q_width(), &paged.slots(0, position..position + rows));
        let mut out = vec![f32::NAN; rows * heads.q_width()];
        let mut lse = vec![f32::NAN; rows * heads.heads];
        let span = paged.span(0, 0, rows, position);
        attention::forward(ctx, heads, qkv, &kv, &[span], &paged.pages, &mut out, Some(&mut lse));
        outs.extend(wide(&out));
        denominators.extend(wide(&lse));
        position += rows;
        step += 1;
    }
    (outs, denominators)
}

#[test]
fn prefill_chunks_and_decode_agree_on_any_pages() {
    let groups = [(1, 3, 16), (1, 4, 32), (2, 5, 16), (1, 6, 48), (1, 8, 16), (1, 9, 16), (1, 2, 20)];
    let shapes = [(2, 1, 16), (1, 2, 80), (1, 7, 64), (1, 1, 256)].into_iter().chain(groups);
    let everything = shapes.map(|shape| (shape, None));
    let windows = [((2, 1, 16), 5), ((1, 7, 64), 33), ((1, 2, 20), 100)].map(|(s, window)| (s, Some(window)));
    for ((kv_heads, group, head_dim), window) in everything.chain(windows) {
        let heads = Heads { window, ..heads(kv_heads, group, head_dim) };
        let qkv = Random::new(head_dim as u64).normals(LENGTH * heads.qkv_width());
        for cpu in cpus(2) {
            for format in [KvFormat::F32, KvFormat::Bf16, KvFormat::Int8] {
                let want = in_steps(&cpu, heads, format, &qkv, 16, &[LENGTH]);
                assert!(want.0.iter().all(|x| x.is_finite()), "stale slots were read");
                for page_size in PAGE_SIZES {
                    for steps in STEPS {
                        let got = in_steps(&cpu, heads, format, &qkv, page_size, steps);
                        let name = cpu.name();
                        let what = format!("{heads:?} {format:?} pages of {page_size} in {steps:?}, {name}");
                        assert_bits(&what, &got.0, &want.0);
                        assert_bits(&what, &got.1, &want.1);
                    }
                }
            }
        }
    }
}

#[test]
fn a_stored_format_equals_rounding_first() {
    // Training keeps f32 pages and rounds the rows, the rollout stores them narrow: both must see the same
    // numbers.
    let heads = heads(2, 2, 20);
    let qkv = Random::new(1).normals(LENGTH * heads.qkv_width());
    for cpu in cpus(2) {
        let mut rounded = qkv.clone();
        kv::round(cpu.context(), &mut rounded, LENGTH, heads, KvFormat::Bf16);
        let narrow = in_steps(&cpu, heads, KvFormat::Bf16, &qkv, 32, &[LENGTH]);
        let wide = in_steps(&cpu, heads, KvFormat::F32, &rounded, 32, &[LENGTH]);
        assert_bits(&format!("rounded first, {}", cpu.name()), &wide.0, &narrow.0);
    }
}

#[test]
fn a_copied_page_serves_a_second_sequence() {
    let heads = heads(2, 2, 16);
    let (len, page_size) = (40, 16);
    let qkv = Random::new(2).normals(len * heads.qkv_width());
    for cpu in cpus(2) {
        for format in [KvFormat::F32, KvFormat::Bf16] {
            let paged = Paged::scattered(&mut Random::new(3), &[len], page_size);
            let (mut kv, ctx) = (paged.stale_store(&cpu, heads, format), cpu.context());
            kv.write(ctx, &qkv, heads.qkv_width(), heads.q_width(), &paged.slots(0, 0..len));
            let (mut copied, spare) = (paged.pages.clone(), paged.spare_page());
            cpu.queue().copy_page(&mut kv, copied[2] as usize, spare as usize);
            copied[2] = spare;
            let attend = |pages: &[u32]| {
                let mut out = vec![f32::NAN; len * heads.q_width()];
                let span = paged.span(0, 0, len, 0);
                attention::forward(ctx, heads, &qkv, &kv, &[span], pages, &mut out, None);
                wide(&out)
            };
            let what = format!("copied page on {}", cpu.name());
            assert_bits(&what, &attend(&copied), &attend(&paged.pages));
        }
    }
}
