//! Operations that CUDA does in fewer kernels than the trait's parts: the parts are their twins.

use crate::cuda::{device, distance};
use crate::fused::check_backward;
use crate::support::{Paged, Random, assert_bits, down, heads, up};
use qurl_kernels::Format;
use qurl_kernels::backend::{Backend, KvFormat, Output, Placed, Rope};

/// Rows of an MLP have the bits they have alone and with weights that are trained, and what its parts give within rounding:
/// the sums of bf16 and fp8 are cut elsewhere. Those of int8 are exact, so there the parts give the same bits.
#[test]
fn an_mlp_equals_its_parts_and_does_not_depend_on_the_batch() {
    let Some(cuda) = device() else { return };
    // From the second on, gates and ups of int8 have tiles of 40, 48, 64 and, two rounds of them, 40 columns (`cuda/gemm.rs`).
    for (d, f) in [(256, 8512), (896, 4864), (512, 6144), (512, 8192), (1024, 8960)] {
        check_mlp(&cuda, 300, d, f);
    }
    // So many that gates and ups of bf16 have tiles of 192 tokens, with sums cut inside tiles.
    check_mlp(&cuda, 1700, 1024, 8960);
}

fn check_mlp(cuda: &impl Backend, rows: usize, d: usize, f: usize) {
    let eps = 1e-6;
    let mut random = Random::new(4);
    let (x, gain) = (random.normals(rows * d), random.normals(d));
    let small = |values: Vec<f32>| values.into_iter().map(|v| 0.05 * v).collect::<Vec<f32>>();
    let (gate_up, down_weights) = (small(random.normals(2 * f * d)), small(random.normals(d * f)));
    for format in [Format::F32, Format::Bf16, Format::Int8, Format::Fp8] {
        let pack = |weights: &[f32], n, k, trained| {
            cuda.pack(&up(cuda, weights), n, k, format, trained).expect("weights pack")
        };
        let packed = |trained| [pack(&gate_up, 2 * f, d, trained), pack(&down_weights, d, f, trained)];
        let gain = up(cuda, &gain);
        let run_with = |[first, second]: &[_; 2], from: usize, count: usize, apart: bool| {
            let mut y = up(cuda, &x[from * d..][..count * d]);
            let room = |width: usize| up(cuda, &vec![f32::NAN; count * width]);
            let (mut normed, mut projected, mut activated) = (room(d), room(2 * f), room(f));
            match apart {
                true => {
                    cuda.norm_linear(&y, &gain, count, eps, first, None, &mut normed, &mut projected);
                    cuda.swiglu_linear(&projected, count, f, second, Output::Add, &mut activated, &mut y);
                }
                false => {
                    let (normed, projected, activated) = (&mut normed, &mut projected, &mut activated);
                    cuda.mlp(&mut y, &gain, count, f, eps, first, second, normed, projected, activated);
                }
            }
            down(cuda, &y)
        };
        let weights = packed(false);
        let run = |from, count, apart| run_with(&weights, from, count, apart);
        let all = run(0, rows, false);
        let off = distance(&all, &run(0, rows, true));
        println!("mlp of {d} and {f}, {format}: {off:.1e} from its parts");
        assert!(off < if format == Format::Int8 { f64::MIN_POSITIVE } else { 2e-3 }, "{format}: {off:.1e}");
        if !format.is_quantized() {
            let trained = packed(true);
            for (from, count) in [(0, rows), (7, 5), (3, 64), (20, 128), (50, 250)] {
                let what = format!("trained mlp {format}: {count} rows from {from}");
                assert_bits(&what, &run_with(&trained, from, count, false), &all[from * d..][..count * d]);
            }
        }
        for (from, count) in
            [(0, 1), (299, 1), (7, 5), (30, 16), (100, 33), (3, 64), (20, 128), (2, 200), (50, 250)]
        {
            assert_bits(
                &format!("mlp {format}: {count} rows from {from}"),
                &run(from, count, false),
                &all[from * d..][..count * d],
            );
        }
    }
}

/// The backward pass rounds its operands in other kernels than its parts do, and nothing may come of it. Shapes go up and
/// down, so that scratch areas are used again; rows of 36 and 37 are too odd for cuBLASLt, those of 37 for words of four.
#[test]
fn a_backward_pass_equals_its_parts() {
    let Some(cuda) = device() else { return };
    for (d, f) in [(256, 512), (64, 36), (48, 37), (896, 1032), (128, 2056)] {
        for rows in [1, 7, 300, 64] {
            check_backward(&cuda, rows, d, f);
        }
    }
    check_backward(&cuda, 300, 1536, 8960);
}

/// A decode step that rotates, stores, attends and converts in one kernel leaves the bits of its parts, in the result
/// and in the pages.
#[test]
fn a_decode_step_equals_its_parts() {
    let Some(cuda) = device() else { return };
    let lengths = [70, 1, 64, 131, 512, 17];
    for ((kv_heads, group, head_dim), page, kv_format) in
        [(2, 7, 64), (4, 7, 128), (8, 5, 128), (1, 12, 64), (2, 3, 80)]
            .into_iter()
            .flat_map(|shape| [16, 64].map(|page| (shape, page)))
            .flat_map(|(shape, page)| KvFormat::ALL.map(|format| (shape, page, format)))
    {
        let heads = heads(kv_heads, group, head_dim);
        let (width, inner, d) = (heads.qkv_width(), heads.heads * heads.head_dim, 192);
        let mut random = Random::new(5);
        let paged = Paged::scattered(&mut random, &lengths, page);
        let (cos, sin) = (random.normals(513 * head_dim / 2), random.normals(513 * head_dim / 2));
        let (cos, sin) = (up(&cuda, &cos), up(&cuda, &sin));
        let earlier = random.normals(lengths.iter().map(|len| len - 1).sum::<usize>() * width);
        let (newest, x) = (random.normals(lengths.len() * width), random.normals(lengths.len() * d));
        let weights = random.normals(d * inner);
        for format in [Format::Bf16, Format::Int8, Format::Fp8] {
            let w = cuda.pack(&up(&cuda, &weights), d, inner, format, false).expect("weights pack");
            let run = |apart: bool| {
                let mut kv = paged.stale_store(&cuda, heads, kv_format);
                let places = |new: bool| {
                    let ranges = lengths
                        .iter()
                        .enumerate()
                        .map(|(s, &len)| (s, if new { len - 1..len } else { 0..len - 1 }));
                    let (mut positions, mut slots) = (Vec::new(), Vec::new());
                    for (sequence, range) in ranges {
                        positions.extend(range.clone().map(|p| p as u32));
                        slots.extend(paged.slots(sequence, range));
                    }
                    (positions, slots)
                };
                let (positions, slots) = places(false);
                let mut qkv = up(&cuda, &earlier);
                let rope = || Rope { cos: &cos, sin: &sin };
                cuda.rope_store(&mut qkv, heads, &positions, rope(), &slots, &mut kv, kv_format);
                let (positions, slots) = places(true);
                let spans: Vec<_> = (0..lengths.len()).map(|s| paged.span(s, s, 1, lengths[s] - 1)).collect();
                let (mut qkv, mut y) = (up(&cuda, &newest), up(&cuda, &x));
                let mut out = up(&cuda, &vec![f32::NAN; lengths.len() * inner]);
                match apart {
                    true => {
                        cuda.rope_store(&mut qkv, heads, &positions, rope(), &slots, &mut kv, kv_format);
                        cuda.attention(heads, &qkv, &kv, &spans, &paged.pages, &mut out, None);
                        cuda.linear(&out, lengths.len(), &w, None, Output::Add, &mut y);
                    }
                    false => {
                        let placed = Placed {
                            positions: &positions,
                            slots: &slots,
                            spans: &spans,
                            pages: &paged.pages,
                        };
                        let (qkv, kv, out, y) = (&mut qkv, &mut kv, &mut out, &mut y);
                        cuda.attend(heads, qkv, rope(), placed, kv, kv_format, out, None, &w, y);
                    }
                }
                // Attention alone over the new rows once more: what the pages hold now.
                let mut again = up(&cuda, &vec![f32::NAN; lengths.len() * inner]);
                cuda.attention(heads, &up(&cuda, &newest), &kv, &spans, &paged.pages, &mut again, None);
                [down(&cuda, &y), down(&cuda, &again)]
            };
            let (together, apart) = (run(false), run(true));
            let what = format!("{kv_format:?} {kv_heads}x{group}x{head_dim} pages of {page}, {format}");
            assert_bits(&format!("result, {what}"), &together[0], &apart[0]);
            assert_bits(&format!("pages, {what}"), &together[1], &apart[1]);
        }
    }
}
