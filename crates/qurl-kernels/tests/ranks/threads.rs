//! Ranks as threads, a rank without others, and ranks that are only thought of.

use super::every;
use qurl_kernels::collective::Moved;
use qurl_kernels::cuda::counting::GpuProfile;
use qurl_kernels::ops::{AllGather, AllToAll, Broadcast};
use qurl_kernels::{Collective, CollectiveError, Cpu, Cuda, Device, Queue};
use std::sync::Arc;

/// Runs a rank in each of `size` threads.
fn on_threads<T: Send + 'static>(size: usize, run: fn(Collective) -> T) -> Vec<T> {
    let ranks = Collective::threads(size);
    let threads = ranks.into_iter().map(|ranks| std::thread::spawn(move || run(ranks)));
    threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().expect("a rank that ends")).collect()
}

fn cpu() -> Arc<Cpu> {
    Arc::new(Cpu::new(qurl_kernels::cpu::level::Level::Scalar, 1))
}

#[test]
fn exchanges_between_threads_deliver_their_content() {
    for size in [1, 2, 3, 4, 5, 8] {
        on_threads(size, |ranks| every::check(&cpu(), &ranks));
    }
    every::check(&cpu(), &Collective::alone());
}

#[test]
fn a_rank_that_has_ended_is_named() {
    let outcomes = on_threads(3, |ranks| match ranks.rank() {
        1 => Ok(()),
        _ => ranks.barrier(),
    });
    let reason = "its thread has ended".to_string();
    let lost = CollectiveError::Lost { rank: 1, size: 3, reason };
    assert_eq!(outcomes[0], Err(lost.clone()));
    assert!(outcomes[1].is_ok() && outcomes[2].is_err());
    assert_eq!(lost.to_string(), "rank 1 of 3 is lost: its thread has ended");
}

#[test]
fn what_a_rank_of_many_would_send_is_counted_without_them() {
    let gpu = Arc::new(Cuda::counting_as(&GpuProfile::h200()));
    let mut queue = gpu.queue().expect("a queue");
    let (mut tensor, mut into) = (gpu.zeros(100).expect("a tensor"), gpu.zeros(80).expect("a tensor"));
    let (cuts, ranks) = ([0, 30, 60, 80, 100], &Collective::counted(2, 4));
    queue.all_to_all(AllToAll { ranks, from: &tensor, cuts: &cuts, into: &mut into }).expect("counted");
    queue.all_gather(AllGather { ranks, cuts: &cuts, tensor: &mut tensor }).expect("counted");
    queue.broadcast(Broadcast { ranks, root: 0, tensor: &mut tensor }).expect("counted");
    queue.broadcast(Broadcast { ranks, root: 2, tensor: &mut tensor }).expect("counted");
    assert_eq!(ranks.all_gather_bytes(b"abc").expect("counted"), vec![b"abc".to_vec(); 4]);
    assert_eq!(ranks.gather_bytes(b"abc").expect("counted"), None);
    assert_eq!(ranks.broadcast_bytes(0, b"abc".to_vec()).expect("counted"), b"abc");
    ranks.barrier().expect("counted");
    let moved = Moved { all_to_all: 4 * 80, all_gather: 4 * 3 * 20, broadcast: 4 * 3 * 100, host: 9 + 3 };
    assert_eq!(ranks.moved(), moved);
}

#[test]
#[should_panic(expected = "cuts: one more than ranks")]
fn cuts_for_another_number_of_ranks_are_a_bug() {
    let device = cpu();
    let mut queue = device.queue().expect("a queue");
    let mut tensor = device.zeros(10).expect("a tensor");
    let ranks = &Collective::alone();
    let _ = queue.all_gather(AllGather { ranks, cuts: &[0, 5, 10], tensor: &mut tensor });
}
