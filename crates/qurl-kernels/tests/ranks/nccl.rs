//! Ranks that are GPUs. `benches/gpu/ranks.sh` starts this test as ranks, several on one GPU, by `mpirun` and
//! by `torchrun`.

use super::{every, job, mpi};
use qurl_kernels::collective::{Join, Launch, Limits};
use qurl_kernels::ops::{AllGather, AllToAll, Broadcast, Exchange};
use qurl_kernels::{Collective, Cuda, Device, Queue};
use std::sync::Arc;

/// Joins the ranks that the script has started; nothing where it has not.
fn join() -> Option<(Arc<Cuda>, Collective)> {
    let Some(launch) = Launch::from_env().expect("variables of a launcher") else {
        eprintln!("skipped: benches/gpu/ranks.sh starts this as ranks");
        return None;
    };
    let gpus = qurl_kernels::cuda::found().expect("a driver").gpus.len();
    let device = Arc::new(Cuda::open(launch.gpu(gpus).expect("a GPU")).expect("a GPU"));
    let join = Join { launch: &launch, identity: "test", limits: Limits::default() };
    let ranks = Collective::nccl(join, &device).expect("joined");
    Some((device, ranks))
}

#[test]
#[ignore = "a rank with a GPU: benches/gpu/ranks.sh starts it"]
fn as_a_gpu() {
    let Some((device, ranks)) = join() else { return };
    every::check(&device, &ranks);
    overlapped(&device, &ranks);
    large_bytes(&ranks);
    let described = ranks.description();
    ranks.close().expect("closed");
    println!("as it should be: {described}");
}

#[test]
#[ignore = "a rank with a GPU: benches/gpu/ranks.sh starts it and sees one of them die"]
fn as_a_gpu_that_waits() {
    let Some((device, ranks)) = join() else { return };
    if ranks.rank() == 1 {
        std::thread::sleep(std::time::Duration::from_secs(2));
        std::process::abort();
    }
    let mut queue = device.queue().expect("a queue");
    let mut tensor = device.zeros(1000).expect("a tensor");
    queue.broadcast(Broadcast { ranks: &ranks, root: 1, tensor: &mut tensor }).expect("begun");
    queue.synchronize().expect("never reached");
    println!("never reached");
}

/// Exchanges beside other work of the queue, several before one join, many times.
fn overlapped(device: &Arc<Cuda>, ranks: &Collective) {
    let mut queue = device.queue().expect("a queue");
    let (rank, size, piece) = (ranks.rank(), ranks.size(), 250_007);
    let cuts: Vec<usize> = (0..=size).map(|rank| rank * piece).collect();
    let mut work = device.zeros(1 << 20).expect("a tensor");
    for round in 0..10 {
        let value = |rank: usize| (round * size + rank) as f32;
        let from = queue.upload(&vec![value(rank); size * piece]).expect("a tensor");
        let mut into = device.zeros(size * piece).expect("a tensor");
        let mut weights = queue.upload(&vec![value(rank); size * piece]).expect("a tensor");
        let exchange = AllToAll { ranks, from: &from, cuts: &cuts, into: &mut into };
        queue.begin_exchange(Exchange::AllToAll(vec![exchange])).expect("begun");
        queue.fill_random(&mut work, round as u64, 1.0);
        let exchange = AllGather { ranks, cuts: &cuts, tensor: &mut weights };
        queue.begin_exchange(Exchange::AllGather(vec![exchange])).expect("begun");
        queue.fill_random(&mut work, round as u64 + 1, 1.0);
        queue.join_exchanges().expect("joined");
        for tensor in [&into, &weights] {
            let got = queue.read(tensor, size * piece).expect("read");
            for (sender, part) in got.chunks(piece).enumerate() {
                assert!(part.iter().all(|&x| x == value(sender)), "round {round}, from rank {sender}");
            }
        }
    }
}

/// Bytes of the host in several rounds through the staging buffer, of other lengths at each rank.
fn large_bytes(ranks: &Collective) {
    let of =
        |rank: usize| -> Vec<u8> { (0..(rank + 1) * 9_000_001).map(|at| (at * (rank + 3)) as u8).collect() };
    let all = ranks.all_gather_bytes(&of(ranks.rank())).expect("all gather");
    for (rank, bytes) in all.iter().enumerate() {
        assert!(*bytes == of(rank), "bytes of rank {rank}");
    }
}

#[test]
fn a_missing_nccl_is_named() {
    let variables = [&mpi::TORCHRUN_0_OF_2[..], &[("QURL_NCCL", "/nowhere/libnccl.so.2")]].concat();
    let outcome = job::run_alone("a gpu", &variables);
    let expected = "NCCL cannot be used: ranks on GPUs exchange by NCCL 2.18 or newer; looked for /nowhere/";
    assert!(!outcome.success && outcome.text.contains(expected), "{}", outcome.text);
    let variables = [&mpi::TORCHRUN_0_OF_2[..], &[("QURL_NCCL", "libc.so.6")]].concat();
    let outcome = job::run_alone("a gpu", &variables);
    assert!(!outcome.success && outcome.text.contains("libc.so.6: "), "{}", outcome.text);
    assert!(outcome.text.contains("ncclGetVersion"), "{}", outcome.text);
}
