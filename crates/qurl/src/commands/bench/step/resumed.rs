//! What a run does beside its steps: an evaluation, a checkpoint, and a trainer that resumes from it, which
//! must come to the same weights.

use super::shared::{Shared, checksum_of};
use crate::output::{OutputError, out};
use anyhow::{Context, bail};
use qurl_kernels::Device;
use qurl_train::checkpoint::{Keep, Keeper, ModelFiles, Snapshot, Store};
use qurl_train::recipe::Recipe;
use qurl_train::rl::RlTrainer;
use qurl_train::runlog::Logged;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A state that was evaluated and saved.
pub struct Saved {
    path: PathBuf,
    evaluation_s: f64,
    save_s: f64,
    bytes: u64,
}

/// How it went.
#[derive(Serialize)]
pub struct Resumed {
    evaluation_s: f64,
    save_s: f64,
    checkpoint_bytes: u64,
    resume_s: f64,
    /// Of the weights after the same steps.
    checksum: String,
    /// The largest memory of this rank up to here; 0 where the device has none of its own.
    peak_bytes: usize,
}

/// Evaluates, and saves in a directory.
pub fn save<D: Device>(trainer: &mut RlTrainer<D>, recipe: &Recipe, dir: &Path) -> anyhow::Result<Saved> {
    let began = Instant::now();
    trainer.evaluate()?;
    let evaluation_s = began.elapsed().as_secs_f64();
    let began = Instant::now();
    let (ranks, keep) = (trainer.ranks().clone(), Keep { last: 1, best: 0 });
    let store = match ranks.is_first() {
        true => Store::open(dir, keep)?,
        false => Store::of_first(dir, keep),
    };
    ranks.barrier()?;
    let snapshot = trainer.snapshot(&recipe.to_toml())?;
    let (step, bytes) = (snapshot.state.step, snapshot.bytes());
    let mut keeper = Keeper::new(store.clone(), ModelFiles::of(trainer.start()), &ranks, None, 1);
    keeper.start(snapshot, Logged::default())?;
    keeper.finish()?;
    Ok(Saved { path: store.path(step), evaluation_s, save_s: began.elapsed().as_secs_f64(), bytes })
}

impl Saved {
    /// Lets a new trainer take over the state and make so many steps.
    pub fn resume<D: Device>(
        self,
        mut trainer: RlTrainer<D>,
        steps: usize,
        expected: &Shared,
    ) -> anyhow::Result<Resumed> {
        let Saved { path, evaluation_s, save_s, bytes } = self;
        let began = Instant::now();
        let snapshot = Snapshot::read(&path, &trainer.start().config, trainer.ranks())
            .with_context(|| format!("resuming from {}", path.display()))?;
        trainer.restore(snapshot)?;
        let resume_s = began.elapsed().as_secs_f64();
        for _ in 0..steps {
            trainer.step()?;
        }
        let checksum = checksum_of(&mut trainer)?;
        if checksum != expected.checksum {
            let (own, other) = (&checksum, &expected.checksum);
            bail!("a run that resumes after its first step ends with the weights {own}, a whole one {other}");
        }
        let peak_bytes = trainer.device().memory().map_or(0, |memory| memory.peak);
        Ok(Resumed { evaluation_s, save_s, checkpoint_bytes: bytes, resume_s, checksum, peak_bytes })
    }
}

impl Resumed {
    /// A line for each part.
    pub fn print(&self) -> Result<(), OutputError> {
        let Resumed { evaluation_s, save_s, checkpoint_bytes, resume_s, checksum, peak_bytes } = self;
        out!("evaluate  {evaluation_s:9.3} s")?;
        out!("save      {save_s:9.3} s for {} MiB", checkpoint_bytes >> 20)?;
        out!("resume    {resume_s:9.3} s; the same weights {checksum}, {} MiB at most", peak_bytes >> 20)
    }
}
