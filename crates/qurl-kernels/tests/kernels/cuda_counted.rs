//! What can be known of a GPU without one: operations run on devices that only count, where a launch that the
//! device would refuse is refused, too.

use crate::op_table::table;
use crate::ops::Ops;
use crate::paged::{Attention, Paged, heads};
use crate::support::Random;
use qurl_kernels::cuda::counting::GpuProfile;
use qurl_kernels::types::KvFormat;
use qurl_kernels::{Cuda, Queue};

/// Most shared memory that a kernel declares, beside what its launch asks for:
/// `cuda::every_kernel_compiles_without_spills_and_serialized_gemms` holds kernels to it.
pub(crate) const DECLARED: usize = 16 << 10;

/// Kinds of GPUs: compute capability, KiB of shared memory that a block may have.
const KINDS: [(u32, usize); 5] = [(80, 163), (86, 99), (89, 99), (90, 227), (120, 99)];

fn gpus() -> impl Iterator<Item = (String, Ops<Cuda>)> {
    KINDS.into_iter().map(|(architecture, kib)| {
        // Hopper's own kernels declare more and are sized for it.
        let declared = if architecture == 90 { 0 } else { DECLARED };
        let (name, shared) = (format!("sm_{architecture}"), (kib << 10) - declared);
        let gpu = GpuProfile { name: name.clone(), architecture, shared, ..GpuProfile::h200() };
        (name, Ops::new(Cuda::counting_as(&gpu)))
    })
}

#[test]
fn no_launch_asks_for_more_shared_memory_than_a_block_may_have() {
    // Some compare results with each other, which are NaN here.
    let compares =
        |name: &str| ["embedding", "adamw", "sum_squares"].iter().any(|what| name.starts_with(what));
    let cases = table::<Cuda>().into_iter().filter(|case| !compares(&case.name)).collect::<Vec<_>>();
    for (name, ops) in gpus() {
        for case in &cases {
            (case.run)(&ops);
            ops.queue().synchronize().unwrap_or_else(|error| panic!("{} on {name}: {error}", case.name));
        }
    }
}

/// Prefill, decode over short and long contexts, and the backward pass, with every size of heads and format
/// of keys and values that has kernels on tensor cores.
#[test]
fn attention_can_be_launched_on_every_gpu() {
    let lengths = [600, 1, 131];
    let paged = Paged::scattered(&mut Random::new(3), &lengths, 16);
    let whole = paged.batch(lengths.iter().enumerate().map(|(i, &len)| (i, 0..len)));
    let last = paged.batch(lengths.iter().enumerate().map(|(i, &len)| (i, len - 1..len)));
    for (name, ops) in gpus() {
        for (head_dim, format) in [64, 128].into_iter().flat_map(|hd| KvFormat::ALL.map(|f| (hd, f))) {
            let heads = heads(2, 7, head_dim);
            let attention = Attention::new(&ops, heads, 600);
            let mut kv = paged.stale_store(&ops, heads, format);
            for rows in [&whole, &last] {
                let mut qkv = ops.stale(rows.rows() * heads.qkv_width());
                let kept = attention.kept(&ops, rows, &mut qkv, &mut kv);
                if rows.rows() == whole.rows() {
                    let dout = ops.stale(rows.rows() * heads.q_width());
                    attention.backward(&ops, rows, format, &qkv, &kept, &dout);
                }
            }
            let done = ops.queue().synchronize();
            done.unwrap_or_else(|error| panic!("heads of {head_dim} over {format:?} on {name}: {error}"));
        }
    }
}
