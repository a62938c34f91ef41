//! The threads of the CPU backend.
//!
//! A decode step of a small model is a few hundred parallel regions of some microseconds each, so handing out
//! work must cost a fraction of one: every worker has a seat, a cache line of its own, on which the caller
//! lays an offer and the worker its answer, and it looks at that seat for a while before it sleeps. Whoever
//! still sleeps when the work is done is not waited for: the offer is taken back.
//!
//! Work is shared out in one of two ways. [`Pool::for_each`] takes tasks from one counter. [`Pool::for_runs`]
//! gives every thread a contiguous part of a sequence, as weights are best streamed, and lets those that are
//! done take from the far end of what others have left. Which thread runs which task never matters for the
//! result, because every task owns its outputs.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;

/// How often a worker looks for work before it goes to sleep (some tens of microseconds). Under Miri, where a
/// look takes as long as a thousand, workers sleep soon: that is where the schedules differ.
const SPINS: usize = if cfg!(miri) { 3 } else { 4_000 };

/// Work for the threads: a function over their numbers, its lifetime erased.
type Job = *const (dyn Fn(usize) + Sync);

/// No work is offered.
const IDLE: u8 = 0;
/// Work is offered, and the worker has not begun.
const OFFERED: u8 = 1;
/// The worker works.
const RUNNING: u8 = 2;

/// What the caller and one thread publish to each other; two cache lines, since they are fetched in pairs.
#[repr(align(128))]
struct Seat {
    state: AtomicU8,
    /// The part of [`Pool::for_runs`] that is left to this thread: first and end in 32 bits each.
    left: AtomicU64,
}

impl Seat {
    fn new() -> Seat {
        Seat { state: AtomicU8::new(IDLE), left: AtomicU64::new(0) }
    }

    fn give(&self, part: Range<usize>) {
        self.left.store((part.start as u64) << 32 | part.end as u64, Ordering::Relaxed);
    }

    /// Takes up to `most` of what is left: from the front, or from the back for another thread.
    fn take(&self, most: usize, from_back: bool) -> Option<Range<usize>> {
        let mut seen = self.left.load(Ordering::Relaxed);
        loop {
            let (first, end) = (seen >> 32, seen & u64::from(u32::MAX));
            let count = (end - first).min(most as u64);
            if count == 0 {
                return None;
            }
            let (rest, taken) = match from_back {
                false => ((first + count) << 32 | end, first..first + count),
                true => (first << 32 | (end - count), end - count..end),
            };
            match self.left.compare_exchange_weak(seen, rest, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(taken.start as usize..taken.end as usize),
                Err(now) => seen = now,
            }
        }
    }
}

struct Shared {
    /// One for every thread; the first is the caller's.
    seats: Box<[Seat]>,
    /// Written by the caller while no worker has an offer, read by workers that have accepted one.
    job: UnsafeCell<Option<Job>>,
    next_task: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    /// Workers that sleep or are about to.
    sleeping: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
}

// SAFETY: the pointee of the job is Sync, `team` does not return before every worker has let go of it, and
// the states of the seats keep writing and reading it apart.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// A fixed set of worker threads; the calling thread works too.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held while a job runs: a second caller does its work alone instead of waiting.
    caller: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// A pool of `threads` threads (at least one: the caller's).
    pub fn new(threads: usize) -> Pool {
        let threads = threads.max(1);
        let shared = Arc::new(Shared {
            seats: (0..threads).map(|_| Seat::new()).collect(),
            job: UnsafeCell::new(None),
            next_task: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleeping: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
        });
        let workers = (1..threads)
            .filter_map(|i| {
                let shared = shared.clone();
                // Without a further thread the work is done by fewer: its offers are taken back.
                std::thread::Builder::new()
                    .name(format!("qurl-cpu-{i}"))
                    .spawn(move || worker(&shared, i))
                    .ok()
            })
            .collect();
        Pool { shared, workers, caller: Mutex::new(()) }
    }

    /// Threads that take part, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `run(i)` for every `i < tasks`, on all threads, and returns when all are done.
    pub fn for_each(&self, tasks: usize, run: &(dyn Fn(usize) + Sync)) {
        let Some(caller) = self.begin(tasks) else {
            return (0..tasks).for_each(run);
        };
        let next = &self.shared.next_task;
        next.store(0, Ordering::Relaxed);
        self.team(caller, &|_| {
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    break;
                }
                run(task);
            }
        });
    }

    /// Runs `run` over parts of `0..len` that together are the whole, on all threads. Every thread walks
    /// through a contiguous part of its own, up to `most` at a time, then through what others have left. What
    /// is smaller than `least` is not shared at all.
    pub fn for_runs(&self, len: usize, most: usize, least: usize, run: &(dyn Fn(Range<usize>) + Sync)) {
        let small = len < least.max(2) || u32::try_from(len).is_err();
        let Some(caller) = self.begin(if small { 1 } else { len }) else {
            if len > 0 {
                run(0..len);
            }
            return;
        };
        let seats = &self.shared.seats;
        for (i, seat) in seats.iter().enumerate() {
            seat.give(len * i / seats.len()..len * (i + 1) / seats.len());
        }
        self.team(caller, &|me| {
            while let Some(part) = seats[me].take(most, false) {
                run(part);
            }
            for other in 1..seats.len() {
                while let Some(part) = seats[(me + other) % seats.len()].take(most, true) {
                    run(part);
                }
            }
        });
    }

    /// Splits `0..len` into one contiguous range a task, each at least `least` long, and runs `run(range)`.
    pub fn for_ranges(&self, len: usize, least: usize, run: &(dyn Fn(Range<usize>) + Sync)) {
        let tasks = (len / least.max(1)).clamp(1, self.threads() * 4);
        self.for_each(tasks, &|i| {
            let range = len * i / tasks..len * (i + 1) / tasks;
            if !range.is_empty() {
                run(range);
            }
        });
    }

    /// The right to give the workers something to do, if there is enough of it and nobody else has it.
    fn begin(&self, tasks: usize) -> Option<MutexGuard<'_, ()>> {
        if tasks <= 1 || self.workers.is_empty() {
            return None;
        }
        match self.caller.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Runs `run(thread)` on the calling thread and on every worker that comes in time.
    fn team(&self, caller: MutexGuard<'_, ()>, run: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes; `Finish` waits for all workers before this function returns.
        let job: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(run) };
        // SAFETY: no worker has an offer, so none reads it.
        unsafe { *shared.job.get() = Some(job) };
        for seat in &shared.seats[1..] {
            seat.state.store(OFFERED, Ordering::SeqCst);
        }
        // A worker counts itself before its last look at the seat: one of the two sees the other.
        if shared.sleeping.load(Ordering::SeqCst) > 0 {
            drop(lock(&shared.sleep));
            shared.wake.notify_all();
        }
        let finish = Finish(shared);
        run(0);
        drop(finish);
        drop(caller);
        if shared.panicked.load(Ordering::Relaxed) && shared.panicked.swap(false, Ordering::Relaxed) {
            panic!("a task of the CPU thread pool panicked");
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // The lock makes sure that no worker is between its check of `stop` and its sleep.
        drop(lock(&self.shared.sleep));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker that panicked has reported that already.
            let _ = worker.join();
        }
    }
}

/// Takes back the offers that nobody has accepted and waits for the other workers, even when the caller's own
/// task panics: they borrow from its stack.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        for seat in &self.0.seats[1..] {
            let taken_back = seat.state.compare_exchange(OFFERED, IDLE, Ordering::Acquire, Ordering::Acquire);
            let mut spins = 0;
            while taken_back.is_err() && seat.state.load(Ordering::Acquire) != IDLE {
                spins += 1;
                if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
            }
        }
    }
}

/// The life of worker `me`.
fn worker(shared: &Shared, me: usize) {
    let seat = &shared.seats[me];
    let offered = || seat.state.load(Ordering::SeqCst) == OFFERED;
    let stopped = || shared.stop.load(Ordering::Acquire);
    while !stopped() {
        let mut spins = 0;
        while !offered() && !stopped() {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
                continue;
            }
            let mut sleep = lock(&shared.sleep);
            shared.sleeping.fetch_add(1, Ordering::SeqCst);
            while !offered() && !stopped() {
                sleep = shared.wake.wait(sleep).unwrap_or_else(PoisonError::into_inner);
            }
            shared.sleeping.fetch_sub(1, Ordering::SeqCst);
        }
        if seat.state.compare_exchange(OFFERED, RUNNING, Ordering::Acquire, Ordering::Relaxed).is_err() {
            continue;
        }
        // SAFETY: the offer was accepted, so the caller keeps the job and what it borrows until the seat is
        // idle.
        if let Some(job) = unsafe { *shared.job.get() } {
            // SAFETY: as above.
            let run = std::panic::AssertUnwindSafe(|| unsafe { (*job)(me) });
            if std::panic::catch_unwind(run).is_err() {
                shared.panicked.store(true, Ordering::Relaxed);
            }
        }
        seat.state.store(IDLE, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Miri takes milliseconds for a region, and tries many schedules of each.
    const MANY: usize = if cfg!(miri) { 9 } else { 1000 };
    const ROUNDS: usize = if cfg!(miri) { 4 } else { 200 };

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 7, MANY] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(tasks, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{threads} {tasks}");
            }
        }
    }

    #[test]
    fn every_part_of_a_sequence_runs_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            for (len, most, least) in
                [(0, 1, 0), (1, 1, 0), (7, 3, 0), (MANY, 1, 0), (MANY, 64, 5), (10, 3, 11)]
            {
                let counts: Vec<AtomicUsize> = (0..len).map(|_| AtomicUsize::new(0)).collect();
                pool.for_runs(len, most, least, &|part| {
                    for i in part {
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{threads} {len} {most}");
            }
        }
    }

    #[test]
    fn two_callers_at_once() {
        let pool = Pool::new(3);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..ROUNDS {
                        pool.for_each(10, &|i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.load(Ordering::Relaxed), 4 * ROUNDS * 45);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.for_each(100, &|i| assert!(i != 50, "task 50"));
        }));
        assert!(result.is_err());
        let sum = AtomicUsize::new(0);
        pool.for_each(10, &|i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.load(Ordering::Relaxed), 45);
    }

    #[test]
    fn ranges_cover_everything() {
        let pool = Pool::new(2);
        for (len, least) in [(0, 1), (1, 10), (100, 7), (MANY, 1)] {
            let seen: Vec<AtomicUsize> = (0..len).map(|_| AtomicUsize::new(0)).collect();
            pool.for_ranges(len, least, &|range| {
                for i in range {
                    seen[i].fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(seen.iter().all(|c| c.load(Ordering::Relaxed) == 1));
        }
    }
}
