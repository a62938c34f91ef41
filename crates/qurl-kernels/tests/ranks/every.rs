//! What every exchange has to deliver, on any device: pieces of uneven sizes, empty ones among them. A number
//! tells whose it is and where it was.

use qurl_kernels::collective::Moved;
use qurl_kernels::ops::{AllGather, AllToAll, Broadcast, Exchange};
use qurl_kernels::{Collective, Device, Queue};
use std::sync::Arc;

/// Holds every exchange of this rank to its content, and what was counted to what was sent.
pub fn check<D: Device>(device: &Arc<D>, ranks: &Collective) {
    let mut queue = device.queue().expect("a queue");
    let before = ranks.moved();
    bytes(ranks);
    let (rank, size) = (ranks.rank(), ranks.size());
    let host = ranks.moved().since(&before).host as usize;
    let broadcasts = (size - 1) * (11 + rank);
    assert_eq!(host, (size - 1) * 1000 * rank + if rank == 0 { 0 } else { 7 * rank } + broadcasts);
    for piece in [0, 1, 5, 4099] {
        let before = ranks.moved();
        let cuts = cuts(size, piece);
        tensors(&mut queue, ranks, &cuts);
        let own = cuts[rank + 1] - cuts[rank];
        // Each alone, and two together.
        let expected = Moved {
            all_to_all: 3 * 4 * (cuts[size] - own) as u64,
            all_gather: 3 * 4 * ((size - 1) * own) as u64,
            broadcast: 4 * ((size - 1) * (cuts[size] + 1)) as u64,
            host: 0,
        };
        assert_eq!(ranks.moved().since(&before), expected);
    }
    ranks.barrier().expect("a barrier");
}

/// Pieces of `piece * (rank % 3)` numbers and one more: 1, `piece` + 1, 2 `piece` + 1, 1, ...; the last one
/// is empty.
fn cuts(size: usize, piece: usize) -> Vec<usize> {
    let mut cuts = vec![0];
    for rank in 0..size {
        let len = if rank + 1 == size && size > 1 { 0 } else { piece * (rank % 3) + 1 };
        cuts.push(cuts[rank] + len);
    }
    cuts
}

fn value(rank: usize, at: usize) -> f32 {
    (rank * 100_000 + at) as f32
}

fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| value(rank, at)).collect()
}

fn tensors<Q: Queue>(queue: &mut Q, ranks: &Collective, cuts: &[usize]) {
    let (rank, size, len) = (ranks.rank(), ranks.size(), cuts[ranks.size()]);
    let own = cuts[rank]..cuts[rank + 1];
    let from = queue.upload(&values(rank, len)).expect("a tensor");
    let mut into = queue.upload(&vec![-1.0; size * own.len() + 1]).expect("a tensor");
    queue.all_to_all(AllToAll { ranks, from: &from, cuts, into: &mut into }).expect("all to all");
    let mut expected: Vec<f32> =
        (0..size).flat_map(|sender| own.clone().map(move |at| value(sender, at))).collect();
    expected.push(-1.0);
    assert_eq!(queue.read(&into, expected.len()).expect("read"), expected, "all to all at rank {rank}");

    let mut tensor = queue.upload(&values(rank, len + 2)).expect("a tensor");
    queue.all_gather(AllGather { ranks, cuts, tensor: &mut tensor }).expect("all gather");
    let owner = |at: usize| (0..size).rfind(|&r| cuts[r] <= at && at < cuts[r + 1]).unwrap_or(rank);
    let expected: Vec<f32> = (0..len + 2).map(|at| value(owner(at), at)).collect();
    assert_eq!(queue.read(&tensor, len + 2).expect("read"), expected, "all gather at rank {rank}");

    together(queue, ranks, cuts);
    for root in 0..size {
        let mut tensor = queue.upload(&values(rank, len + 1)).expect("a tensor");
        queue.broadcast(Broadcast { ranks, root, tensor: &mut tensor }).expect("broadcast");
        let got = queue.read(&tensor, len + 1).expect("read");
        assert_eq!(got, values(root, len + 1), "broadcast of rank {root} at rank {rank}");
    }
}

/// Two tensors in one exchange: each arrives in its own place.
fn together<Q: Queue>(queue: &mut Q, ranks: &Collective, cuts: &[usize]) {
    let (rank, size, len) = (ranks.rank(), ranks.size(), cuts[ranks.size()]);
    let own = cuts[rank]..cuts[rank + 1];
    let second = |values: Vec<f32>| values.into_iter().map(|x| -x - 0.5).collect::<Vec<f32>>();
    let [from, other] =
        [values(rank, len), second(values(rank, len))].map(|v| queue.upload(&v).expect("a tensor"));
    let [mut into, mut into_other] =
        [0, 1].map(|_| queue.upload(&vec![9.0; size * own.len() + 1]).expect("a tensor"));
    let tensors = vec![
        AllToAll { ranks, from: &from, cuts, into: &mut into },
        AllToAll { ranks, from: &other, cuts, into: &mut into_other },
    ];
    queue.begin_exchange(Exchange::AllToAll(tensors)).expect("begun");
    queue.join_exchanges().expect("joined");
    let received: Vec<f32> =
        (0..size).flat_map(|sender| own.clone().map(move |at| value(sender, at))).collect();
    assert_eq!(queue.read(&into, received.len()).expect("read"), received, "at rank {rank}");
    assert_eq!(queue.read(&into_other, received.len()).expect("read"), second(received), "at rank {rank}");

    let [mut all, mut other] =
        [values(rank, len), second(values(rank, len))].map(|v| queue.upload(&v).expect("a tensor"));
    let tensors =
        vec![AllGather { ranks, cuts, tensor: &mut all }, AllGather { ranks, cuts, tensor: &mut other }];
    queue.begin_exchange(Exchange::AllGather(tensors)).expect("begun");
    queue.join_exchanges().expect("joined");
    let owner = |at: usize| (0..size).rfind(|&r| cuts[r] <= at && at < cuts[r + 1]).unwrap_or(rank);
    let gathered: Vec<f32> = (0..len).map(|at| value(owner(at), at)).collect();
    assert_eq!(queue.read(&all, len).expect("read"), gathered, "at rank {rank}");
    assert_eq!(queue.read(&other, len).expect("read"), second(gathered), "at rank {rank}");
}

fn bytes(ranks: &Collective) {
    let (rank, size) = (ranks.rank(), ranks.size());
    let of = |rank: usize, len: usize| -> Vec<u8> { (0..len).map(|at| (rank * 31 + at) as u8).collect() };
    let all = ranks.all_gather_bytes(&of(rank, 1000 * rank)).expect("all gather");
    assert_eq!(all, (0..size).map(|rank| of(rank, 1000 * rank)).collect::<Vec<_>>());
    let gathered = ranks.gather_bytes(&of(rank, 7 * rank)).expect("gather");
    let expected = (rank == 0).then(|| (0..size).map(|rank| of(rank, 7 * rank)).collect::<Vec<_>>());
    assert_eq!(gathered, expected);
    for root in 0..size {
        let got = ranks.broadcast_bytes(root, of(rank, 11 + rank)).expect("broadcast");
        assert_eq!(got, of(root, 11 + root));
    }
    ranks.barrier().expect("a barrier");
}
