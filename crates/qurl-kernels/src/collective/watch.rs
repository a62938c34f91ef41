//! Signs of life: a rank that dies or hangs ends all others, with an error that names it.
//!
//! Libraries wait for a lost rank for ever. So each rank keeps its connection to rank 0 and beats over it
//! once a second, with the number of exchanges it has begun and of those that have ended. Rank 0 sees four
//! things and tells all others:
//! - a connection that closes without a farewell: the process is dead (at once);
//! - no beat for [`Limits::silence`]: the process is stopped, or its machine is gone;
//! - beats, but for [`Limits::stall`] no exchange begins or ends although some wait in one: for the rank that
//!   has begun fewest, which hangs;
//! - the same where all have begun as many: a GPU or a link does not answer.
//!
//! Exchanges of GPUs run in the background, and the threads that issue them wait in calls that may never
//! return. Whether they have ended, and what the library says of its links, is asked by a thread that waits
//! for nobody ([`Watch::ask`]).
//!
//! Whoever learns of it ends its process ([`end`](super::end)), whatever its threads wait in. Rank 0 itself
//! is watched by all others in the same way.

use super::end;
use super::rendezvous::{Frame, Kind, Met, name_ranks};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long ranks wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// For all to come, at the start.
    pub rendezvous: Duration,
    /// For a sign of life of a process.
    pub silence: Duration,
    /// For a rank that is alive, while others wait for it in an exchange; and for an exchange to end that all
    /// have begun.
    pub stall: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        let seconds = Duration::from_secs;
        Limits { rendezvous: seconds(300), silence: seconds(30), stall: seconds(1800) }
    }
}

/// The variable for [`Limits::stall`].
const STALL: &str = "QURL_RANK_TIMEOUT";

/// `QURL_RANK_TIMEOUT` is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("QURL_RANK_TIMEOUT={0:?} is not a number of seconds; expected 1 or more")]
pub struct LimitsError(String);

impl Limits {
    /// As they are by default, but for what the environment says: `QURL_RANK_TIMEOUT`, seconds, is the time
    /// that ranks wait for one that is alive.
    pub fn from_env() -> Result<Limits, LimitsError> {
        let mut limits = Limits::default();
        if let Some(text) = std::env::var(STALL).ok().filter(|text| !text.is_empty()) {
            match text.parse() {
                Ok(seconds) if seconds >= 1 => limits.stall = Duration::from_secs(seconds),
                _ => return Err(LimitsError(text)),
            }
        }
        Ok(limits)
    }
}

/// The most time between two beats.
const BEAT: Duration = Duration::from_secs(1);

/// How long a rank that fails by itself has to say so, once another has.
const MOMENT: Duration = Duration::from_millis(500);

/// How long a rank that fails waits at most until rank 0 has said so.
const ANSWER: Duration = Duration::from_secs(2);

/// How far a rank is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Progress {
    /// Exchanges that it has begun.
    begun: u64,
    /// The last of them that has ended.
    ended: u64,
}

impl Progress {
    fn to_bytes(self) -> [u8; 16] {
        (u128::from(self.begun) | u128::from(self.ended) << 64).to_le_bytes()
    }

    fn from_bytes(bytes: &[u8]) -> Progress {
        let both = bytes.first_chunk().map_or(0, |bytes| u128::from_le_bytes(*bytes));
        Progress { begun: both as u64, ended: (both >> 64) as u64 }
    }
}

/// Why nothing changes any more.
#[derive(Debug, PartialEq, Eq)]
enum Stall {
    /// A rank is missing in an exchange in which another one waits.
    Missing { rank: usize, waits: usize },
    /// All have begun the exchange in which these wait.
    Stuck(Vec<usize>),
}

impl Stall {
    /// What ranks that do not get on are in; nothing where none of them waits.
    fn of(ranks: &[(usize, Progress)]) -> Option<Stall> {
        let waiting = || ranks.iter().filter(|(_, progress)| progress.begun > progress.ended);
        let furthest = waiting().max_by_key(|(_, progress)| progress.begun)?;
        let slowest = ranks.iter().min_by_key(|(_, progress)| progress.begun)?;
        Some(match slowest.1.begun < furthest.1.begun {
            true => Stall::Missing { rank: slowest.0, waits: furthest.0 },
            false => Stall::Stuck(waiting().map(|&(rank, _)| rank).collect()),
        })
    }
}

/// What is known of another rank.
struct Other {
    rank: usize,
    stream: TcpStream,
    last_sign: Instant,
    progress: Progress,
    has_left: bool,
}

struct Shared {
    rank: usize,
    size: usize,
    limits: Limits,
    /// This rank's [`Progress`].
    begun: AtomicU64,
    ended: AtomicU64,
    /// Whether this rank has finished: what others do is of no interest any more.
    left: AtomicBool,
    /// Whether another rank has ended since, or says that the run ends.
    answered: AtomicBool,
    others: Mutex<Vec<Other>>,
}

/// A rank's watch over the others; it ends when dropped.
pub(super) struct Watch {
    shared: Arc<Shared>,
}

impl Watch {
    /// Watches the ranks that have met.
    pub fn begin(rank: usize, size: usize, met: Met, limits: Limits) -> std::io::Result<Watch> {
        let mut others = Vec::new();
        let mut readers = Vec::new();
        for (rank, stream) in met.others {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(Some(limits.silence))?;
            readers.push((rank, stream.try_clone()?));
            let (last_sign, progress) = (Instant::now(), Progress::default());
            others.push(Other { rank, stream, last_sign, progress, has_left: false });
        }
        let shared = Arc::new(Shared {
            rank,
            size,
            limits,
            begun: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            left: AtomicBool::new(false),
            answered: AtomicBool::new(false),
            others: Mutex::new(others),
        });
        for (other, stream) in readers {
            let shared = shared.clone();
            let name = format!("rank {other}");
            std::thread::Builder::new().name(name).spawn(move || shared.listen(other, stream))?;
        }
        let beating = shared.clone();
        std::thread::Builder::new().name("beat".to_string()).spawn(move || beating.beat())?;
        Ok(Watch { shared })
    }

    /// Counts an exchange that begins: its number.
    pub fn begin_exchange(&self) -> u64 {
        self.shared.begun.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The exchange of this number has ended, and so have those before it.
    pub fn end_exchange(&self, number: u64) {
        self.shared.ended.fetch_max(number, Ordering::Relaxed);
    }

    /// Asks in the background, as often as this rank beats, for the last exchange that has ended, or for what
    /// is wrong, with which this rank ends.
    pub fn ask(&self, pulse: impl Fn() -> Result<u64, String> + Send + 'static) -> std::io::Result<()> {
        let shared = self.shared.clone();
        let asking = move || {
            while !shared.left.load(Ordering::Relaxed) {
                match pulse() {
                    Ok(number) => shared.ended.fetch_max(number, Ordering::Relaxed),
                    Err(reason) if shared.fail(&reason) => end::process(&shared.failure(&reason)),
                    Err(_) => return,
                };
                std::thread::sleep(shared.pause());
            }
        };
        std::thread::Builder::new().name("pulse".to_string()).spawn(asking).map(|_| ())
    }

    /// Tells the others that this rank has failed and why: they end with it. Returns once rank 0 has said so:
    /// some launchers kill all ranks as soon as one has ended, and then nobody would.
    pub fn fail(&self, reason: &str) {
        self.shared.fail(reason);
    }

    /// This rank has finished; others may still be about to.
    pub fn leave(&self) {
        if !self.shared.left.swap(true, Ordering::Relaxed) {
            self.shared.tell(&Frame::new(Kind::Leave, &[]));
        }
    }
}

impl Drop for Watch {
    /// The connections close: without a farewell before, the others take this rank for dead.
    fn drop(&mut self) {
        self.shared.left.store(true, Ordering::Relaxed);
        for other in self.shared.others().iter() {
            let _ = other.stream.shutdown(Shutdown::Both); // it may be closed already
        }
    }
}

impl Shared {
    fn others(&self) -> std::sync::MutexGuard<'_, Vec<Other>> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time between two beats.
    fn pause(&self) -> Duration {
        BEAT.min(self.limits.silence / 4)
    }

    fn failure(&self, reason: &str) -> String {
        format!("rank {} of {} failed: {reason}", self.rank, self.size)
    }

    /// [`Watch::fail`]; whether this rank had not failed or left before.
    fn fail(&self, reason: &str) -> bool {
        let first = !self.left.swap(true, Ordering::Relaxed);
        if first {
            // What rank 0 says is taken as it is; it says for the others who they are.
            let reason = if self.rank == 0 { self.failure(reason) } else { reason.to_string() };
            self.tell(&Frame::new(Kind::Fault, reason.as_bytes()));
            let began = Instant::now();
            while self.rank != 0 && !self.answered.load(Ordering::Relaxed) && began.elapsed() < ANSWER {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        first
    }

    fn tell(&self, frame: &Frame) {
        for other in self.others().iter_mut() {
            let _ = frame.write(&mut other.stream); // who is gone is found by reading
        }
    }

    /// Hears what another rank says, until it leaves.
    fn listen(&self, rank: usize, mut stream: TcpStream) {
        loop {
            let frame = Frame::read(&mut stream);
            if self.left.load(Ordering::Relaxed) {
                if frame.as_ref().is_ok_and(|frame| frame.kind != Kind::Fault) {
                    continue;
                }
                return self.answered.store(true, Ordering::Relaxed);
            }
            let mut others = self.others();
            let Some(other) = others.iter_mut().find(|other| other.rank == rank) else { return };
            match frame {
                Err(_) if other.has_left => return,
                Err(_) => {
                    drop(others);
                    return self.lost(rank, "its process has ended");
                }
                Ok(frame) => match frame.kind {
                    Kind::Beat => {
                        other.last_sign = Instant::now();
                        other.progress = Progress::from_bytes(&frame.content);
                    }
                    Kind::Leave => other.has_left = true,
                    Kind::Fault => {
                        drop(others);
                        return self.told(rank, &frame.text());
                    }
                    Kind::Hello | Kind::Welcome => {
                        drop(others);
                        return self.lost(rank, "it says what makes no sense now");
                    }
                },
            }
        }
    }

    /// Beats, and looks at the others' signs of life.
    fn beat(&self) {
        let mut last_counts = Vec::new();
        let mut last_progress = Instant::now();
        while !self.left.load(Ordering::Relaxed) {
            let [ended, begun] = [&self.ended, &self.begun].map(|count| count.load(Ordering::Relaxed));
            let progress = Progress { begun, ended };
            self.tell(&Frame::new(Kind::Beat, &progress.to_bytes()));
            let mut counts = vec![(self.rank, progress)];
            let mut silent = None;
            for other in self.others().iter().filter(|other| !other.has_left) {
                counts.push((other.rank, other.progress));
                if other.last_sign.elapsed() > self.limits.silence {
                    silent = Some(other.rank);
                }
            }
            if let Some(rank) = silent {
                let seconds = self.limits.silence.as_secs_f64();
                return self.lost(rank, &format!("no sign of life for {seconds} s"));
            }
            if counts != last_counts {
                (last_counts, last_progress) = (counts, Instant::now());
            } else if self.rank == 0 && last_progress.elapsed() > self.limits.stall {
                let seconds = self.limits.stall.as_secs_f64();
                match Stall::of(&last_counts) {
                    Some(Stall::Missing { rank, waits }) => {
                        let what = format!("it hangs: rank {waits} has waited for it for {seconds} s");
                        return self.lost(rank, &what);
                    }
                    Some(Stall::Stuck(ranks)) if !self.left.load(Ordering::Relaxed) => self.end(&format!(
                        "an exchange that all ranks have begun has not ended at {} for {seconds} s: a GPU or \
                         a link does not answer",
                        name_ranks(&ranks, self.size)
                    )),
                    Some(Stall::Stuck(_)) | None => {}
                }
            }
            std::thread::sleep(self.pause());
        }
    }

    /// Ends with a rank that says why it fails; rank 0 says what it knows of any. An error that all ranks
    /// have is in flight from this one, too, and gets a moment to arrive.
    fn told(&self, rank: usize, reason: &str) {
        std::thread::sleep(MOMENT);
        if self.left.load(Ordering::Relaxed) {
            return;
        }
        match self.rank {
            0 => self.end(&format!("rank {rank} of {} failed: {reason}", self.size)),
            // Rank 0 has said it for all.
            _ => end::silently(),
        }
    }

    /// Tells of a lost rank and ends the process.
    fn lost(&self, rank: usize, reason: &str) {
        if !self.left.load(Ordering::Relaxed) {
            self.end(&format!("rank {rank} of {} is lost: {reason}", self.size));
        }
    }

    fn end(&self, message: &str) -> ! {
        end::say(message);
        if self.rank == 0 {
            self.tell(&Frame::new(Kind::Fault, message.as_bytes()));
        }
        end::silently()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_do_not_get_on_are_told_from_those_that_compute() {
        let of = |counts: &[(u64, u64)]| {
            let ranks = counts.iter().map(|&(begun, ended)| Progress { begun, ended }).enumerate();
            Stall::of(&ranks.collect::<Vec<_>>())
        };
        // All compute, also where some have begun more.
        assert_eq!([of(&[(3, 3), (3, 3)]), of(&[(3, 3), (4, 4)])], [None, None]);
        assert_eq!(of(&[(4, 3), (3, 3), (5, 4)]), Some(Stall::Missing { rank: 1, waits: 2 }));
        assert_eq!(of(&[(4, 3), (3, 2)]), Some(Stall::Missing { rank: 1, waits: 0 }));
        assert_eq!(of(&[(4, 3), (4, 4), (4, 1)]), Some(Stall::Stuck(vec![0, 2])));
        assert_eq!(of(&[(4, 3), (5, 5)]), Some(Stall::Stuck(vec![0])));
    }

    #[test]
    fn progress_travels() {
        let progress = Progress { begun: 1 << 40 | 7, ended: (1 << 40) - 2 };
        assert_eq!(Progress::from_bytes(&progress.to_bytes()), progress);
        assert_eq!(Progress::from_bytes(&[1, 2]), Progress::default());
    }
}
