//! The threads of the CPU backend.
//!
//! A decode step of a small model is a few hundred parallel regions of some microseconds each, so handing out work
//! must cost about a microsecond: workers spin for a moment before they sleep, and tasks are taken from one atomic
//! counter. Which thread runs which task never matters for the result, because every task owns its outputs.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;

/// How often a worker looks for work before it goes to sleep (some tens of microseconds).
const SPINS: usize = 4_000;

/// A job shared with the workers: a function over task numbers, its lifetime erased.
#[derive(Clone, Copy)]
struct Job {
    run: *const (dyn Fn(usize) + Sync),
    tasks: usize,
}

// SAFETY: the pointee is Sync, and `for_each` does not return before every worker has let go of it.
unsafe impl Send for Job {}

struct Shared {
    /// Number of the newest job; a worker that sees a number it does not know takes part in it.
    epoch: AtomicUsize,
    next_task: AtomicUsize,
    /// Workers that have joined the current job and not left it yet; a worker joins while it holds `job`.
    busy: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    job: Mutex<Option<Job>>,
    wake: Condvar,
}

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
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            next_task: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            job: Mutex::new(None),
            wake: Condvar::new(),
        });
        let workers = (1..threads.max(1))
            .filter_map(|i| {
                let shared = shared.clone();
                // Without a further thread the work is done by fewer.
                std::thread::Builder::new().name(format!("qurl-cpu-{i}")).spawn(move || worker(&shared)).ok()
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
        let alone = tasks <= 1 || self.workers.is_empty();
        let guard = match (alone, self.caller.try_lock()) {
            (false, Ok(guard)) => guard,
            (false, Err(TryLockError::Poisoned(guard))) => guard.into_inner(),
            _ => {
                (0..tasks).for_each(run);
                return;
            }
        };
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes; this function waits for all workers before it returns.
        let run: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(run) };
        let job = Job { run, tasks };
        shared.next_task.store(0, Ordering::Relaxed);
        {
            // The number changes under the lock, so that no worker goes to sleep between its look and the wake-up.
            let mut slot = lock(&shared.job);
            *slot = Some(job);
            shared.epoch.fetch_add(1, Ordering::Release);
        }
        shared.wake.notify_all();
        let finish = Finish(shared);
        take_tasks(shared, job);
        drop(finish);
        drop(guard);
        if shared.panicked.swap(false, Ordering::Relaxed) {
            panic!("a task of the CPU thread pool panicked");
        }
    }

    /// Splits `0..len` into one contiguous range a task, each at least `least` long, and runs `run(range)`.
    pub fn for_ranges(&self, len: usize, least: usize, run: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
        let tasks = (len / least.max(1)).clamp(1, self.threads() * 4);
        self.for_each(tasks, &|i| {
            let range = len * i / tasks..len * (i + 1) / tasks;
            if !range.is_empty() {
                run(range);
            }
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // The lock makes sure that no worker is between its check of `stop` and its sleep.
        drop(lock(&self.shared.job));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker that panicked has reported that already.
            let _ = worker.join();
        }
    }
}

/// Closes the job and waits for the workers that joined it, even when the caller's own task panics: they borrow
/// from its stack. Workers that are still asleep are not waited for.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        *lock(&self.0.job) = None;
        let mut spins = 0;
        while self.0.busy.load(Ordering::Acquire) != 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
}

fn take_tasks(shared: &Shared, job: Job) {
    // SAFETY: `for_each` keeps the function alive until all threads have finished.
    let run = unsafe { &*job.run };
    loop {
        let task = shared.next_task.fetch_add(1, Ordering::Relaxed);
        if task >= job.tasks {
            break;
        }
        run(task);
    }
}

fn worker(shared: &Shared) {
    let mut seen = 0;
    loop {
        let mut spins = 0;
        while shared.epoch.load(Ordering::Acquire) == seen {
            if shared.stop.load(Ordering::Acquire) {
                return;
            }
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
                continue;
            }
            let mut job = lock(&shared.job);
            while shared.epoch.load(Ordering::Acquire) == seen && !shared.stop.load(Ordering::Acquire) {
                job = shared.wake.wait(job).unwrap_or_else(PoisonError::into_inner);
            }
        }
        seen = shared.epoch.load(Ordering::Acquire);
        let job = {
            let job = lock(&shared.job);
            if job.is_some() {
                shared.busy.fetch_add(1, Ordering::Relaxed);
            }
            *job
        };
        if let Some(job) = job {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| take_tasks(shared, job)));
            if outcome.is_err() {
                shared.panicked.store(true, Ordering::Relaxed);
            }
            shared.busy.fetch_sub(1, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(tasks, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{threads} {tasks}");
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
                    for _ in 0..200 {
                        pool.for_each(10, &|i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.load(Ordering::Relaxed), 4 * 200 * 45);
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
        for (len, least) in [(0, 1), (1, 10), (100, 7), (1000, 1)] {
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
