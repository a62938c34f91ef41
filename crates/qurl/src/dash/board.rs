//! The runs as they were last seen, and counters by which an event stream knows what it has not sent yet.

use crate::input::message as explain;
use crate::output::err;
use crate::report::{Follower, Place, RunData, name_runs};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The runs that are followed.
pub struct Board {
    /// What was asked for: directories of runs or of comparisons.
    places: Vec<PathBuf>,
    watched: Vec<Watched>,
    /// Grows when what was sent is no longer true and everything must be sent again.
    edition: u64,
    /// The server is about to end.
    pub closing: bool,
    trouble: Option<String>,
}

struct Watched {
    follower: Follower,
    layers: u64,
    rollouts: u64,
}

/// What a stream has sent already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Of the board.
    pub edition: u64,
    runs: Vec<SentRun>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SentRun {
    layers: u64,
    rollouts: u64,
    steps: usize,
}

impl Board {
    /// Takes a first look. An error is bad input: a place where no run is and none can begin.
    pub fn open(places: Vec<PathBuf>) -> anyhow::Result<Board> {
        for place in &places {
            if let other @ Place::Other(_) = Place::of(place)? {
                other.runs(place)?;
            }
        }
        let mut board = Board { places, watched: Vec::new(), edition: 0, closing: false, trouble: None };
        board.read()?;
        Ok(board)
    }

    /// Looks at the files; whether there is news.
    pub fn look(&mut self) -> bool {
        match self.read() {
            Ok(news) => {
                self.trouble = None;
                news
            }
            Err(error) => {
                let trouble = explain(&error);
                if self.trouble.as_ref() != Some(&trouble) {
                    err!("qurl: {trouble}");
                }
                self.trouble = Some(trouble);
                false
            }
        }
    }

    fn read(&mut self) -> anyhow::Result<bool> {
        let mut anew = self.find()?;
        let mut news = anew;
        for watched in &mut self.watched {
            let (rows, steps) = {
                let steps = &watched.follower.run().steps;
                (steps.layer_rows(), steps.len())
            };
            let change = watched.follower.poll()?;
            watched.layers += u64::from(rows != watched.follower.run().steps.layer_rows());
            watched.rollouts += u64::from(change.rollouts);
            anew |= change.about || change.steps_from.is_some_and(|from| from < steps);
            news |= anew || change.rollouts || change.steps_from.is_some();
        }
        if anew {
            self.edition += 1;
            self.name();
        }
        Ok(news)
    }

    /// Follows the runs that are there by now; a place where none has begun is followed, too. Whether that
    /// changed.
    fn find(&mut self) -> anyhow::Result<bool> {
        let mut dirs: Vec<PathBuf> = Vec::new();
        for place in &self.places {
            match Place::of(place)? {
                Place::Comparison(runs) if !runs.is_empty() => dirs.extend(runs),
                _ => dirs.push(place.clone()),
            }
        }
        if self
            .watched
            .iter()
            .map(|watched| watched.follower.run().dir.as_path())
            .eq(dirs.iter().map(PathBuf::as_path))
        {
            return Ok(false);
        }
        let mut old = std::mem::take(&mut self.watched);
        let mut take = |dir: &Path| match old.iter().position(|watched| watched.follower.run().dir == dir) {
            Some(at) => old.swap_remove(at),
            None => Watched { follower: Follower::new(dir), layers: 0, rollouts: 0 },
        };
        self.watched = dirs.iter().map(|dir| take(dir)).collect();
        Ok(true)
    }

    fn name(&mut self) {
        let mut runs: Vec<RunData> =
            self.watched.iter_mut().map(|watched| std::mem::take(watched.follower.run_mut())).collect();
        name_runs(&mut runs);
        for (watched, run) in self.watched.iter_mut().zip(runs) {
            *watched.follower.run_mut() = run;
        }
    }

    /// The runs, in the order of the page.
    pub fn runs(&self) -> Vec<&RunData> {
        self.watched.iter().map(|watched| watched.follower.run()).collect()
    }

    /// What a stream that sends everything now has sent.
    pub fn sent(&self) -> Sent {
        let of = |watched: &Watched| {
            let Watched { follower, layers, rollouts } = watched;
            SentRun { layers: *layers, rollouts: *rollouts, steps: follower.run().steps.len() }
        };
        Sent { edition: self.edition, runs: self.watched.iter().map(of).collect() }
    }

    /// What is new in each run since `before`, of the same edition.
    pub fn since(&self, before: &Sent) -> Vec<Value> {
        let (now, mut news) = (self.sent(), Vec::new());
        for (index, (before, now)) in before.runs.iter().zip(&now.runs).enumerate() {
            if before != now {
                let (layers, rollouts) = (before.layers != now.layers, before.rollouts != now.rollouts);
                let mut more = self.watched[index].follower.run().since(before.steps, layers, rollouts);
                more["run"] = json!(index);
                news.push(more);
            }
        }
        news
    }
}
