//! Ranks that are processes of an MPI job.

use super::{every, faults, job};
use qurl_kernels::ops::AllGather;
use qurl_kernels::{Collective, Device, Queue};

const CASES: &[job::Case] = &[
    ("every exchange", every_exchange),
    ("large messages", large_messages),
    ("other version", faults::never_reached),
    ("other recipe", faults::other_recipe),
    ("killed", faults::killed),
    ("stopped", faults::stopped),
    ("hanging", faults::hanging),
    ("failing", faults::failing),
    ("stuck", faults::stuck),
    ("a gpu that waits", faults::waiting),
];

#[test]
#[ignore = "a rank of the other tests, which start it under mpirun"]
fn as_a_rank() {
    job::play(CASES);
}

fn every_exchange(ranks: Collective) {
    every::check(&job::cpu(), &ranks);
    let described = ranks.description();
    assert!(described.starts_with(&format!("rank {} of {} over MPI (", ranks.rank(), ranks.size())));
    ranks.close().expect("closed");
    println!("as it should be: {described}");
}

/// More than one message's bytes in a piece: 80 and 72 MB.
fn large_messages(ranks: Collective) {
    let (device, rank) = (job::cpu(), ranks.rank());
    let mut queue = device.queue().expect("a queue");
    let cuts = [0, 20_000_003, 38_000_007];
    let numbers: Vec<f32> = (0..cuts[2]).map(|at| ((at % 8_000_009) * (rank + 1)) as f32).collect();
    let mut tensor = queue.upload(&numbers).expect("a tensor");
    queue.all_gather(AllGather { ranks: &ranks, cuts: &cuts, tensor: &mut tensor }).expect("all gather");
    let got = queue.read(&tensor, cuts[2]).expect("read");
    let owner = |at: usize| if at < cuts[1] { 0 } else { 1 };
    let wrong = (0..cuts[2]).find(|&at| got[at] != ((at % 8_000_009) * (owner(at) + 1)) as f32);
    assert_eq!(wrong, None);
    ranks.close().expect("closed");
    println!("as it should be");
}

#[test]
fn exchanges_over_mpi_deliver_their_content() {
    for ranks in [2, 4] {
        let Some(outcome) = job::run("every exchange", ranks, &[]) else { return };
        assert!(outcome.success, "{}", outcome.text);
        assert_eq!(outcome.text.matches("as it should be").count(), ranks, "{}", outcome.text);
    }
}

#[test]
fn messages_larger_than_one_is_are_cut() {
    let Some(outcome) = job::run("large messages", 2, &[]) else { return };
    assert!(outcome.success, "{}", outcome.text);
    assert_eq!(outcome.text.matches("as it should be").count(), 2, "{}", outcome.text);
}

/// A rank 0 of two, by the variables of Open MPI.
const RANK_0_OF_2: [(&str, &str); 3] =
    [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_RANK", "0")];

#[test]
fn a_library_that_is_missing_or_another_is_named() {
    for (file, expected) in [
        ("/nowhere/libmpi.so", "MPI cannot be used: QURL_MPI=/nowhere/libmpi.so: "),
        ("libc.so.6", "MPI cannot be used: QURL_MPI=libc.so.6: libc.so.6: it has no MPI_Init_thread"),
    ] {
        let variables = [&RANK_0_OF_2[..], &[("QURL_MPI", file)]].concat();
        let outcome = job::run_alone("every exchange", &variables);
        assert!(!outcome.success && outcome.text.contains(expected), "{}", outcome.text);
    }
}

/// A rank 0 of two, by the variables of torchrun.
pub const TORCHRUN_0_OF_2: [(&str, &str); 4] =
    [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")];

#[test]
fn ranks_on_cpus_need_mpi() {
    let outcome = job::run_alone("every exchange", &TORCHRUN_0_OF_2);
    let expected = "MPI cannot be used: torchrun started rank 0 of 2, and ranks that compute on a CPU";
    assert!(!outcome.success && outcome.text.contains(expected), "{}", outcome.text);
}
