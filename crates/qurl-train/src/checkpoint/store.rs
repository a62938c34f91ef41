//! The directory of a run's checkpoints: writing one whole or not at all, finding the newest whole one, and
//! keeping few.
//!
//! Names that begin with a dot are work in progress (`.part` being written, `.gone` being removed). Whatever
//! is left of it by a process that was killed is removed when the directory is opened again, under the lock
//! of the run. A checkpoint that is being replaced is kept aside (`.old`) until the new one is in place, and
//! comes back if that did not happen.

use super::manifest::{MANIFEST, Manifest};
use super::snapshot::{check_whole, read_recipe, write_synced};
use super::tensors::Pieces;
use super::{CheckpointError, Snapshot, State};
use crate::runlog::Lines;
use crate::start::Start;
use qurl_files::disk;
use qurl_model::hf::{self, HfError, SaveOptions, peft};
use qurl_model::{Dtype, GenerationConfig, Lora, ModelConfig, ParamInfo, Params, params};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Space for headers, configuration and state beside the tensors.
const SMALL_FILES: u64 = 256 << 10;

/// What makes a directory of weights a model.
#[derive(Clone, Debug)]
pub struct ModelFiles {
    /// Sizes and tokens.
    pub config: ModelConfig,
    /// Sampling defaults.
    pub generation: GenerationConfig,
    /// Names and contents.
    pub tokenizer_files: Vec<(String, Vec<u8>)>,
    /// The adapters that are saved in place of a model, and the directory of their base.
    pub adapters: Option<(Lora, PathBuf)>,
}

impl ModelFiles {
    /// Bytes of a directory of the model in its own dtype: what the end of a run writes.
    pub fn bytes(&self) -> u64 {
        let files: u64 = self.tokenizer_files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        let dtype = if self.adapters.is_some() { Dtype::F32 } else { self.config.dtype };
        self.trained() * dtype.bytes() as u64 + files + SMALL_FILES
    }

    /// Numbers that are trained.
    pub fn trained(&self) -> u64 {
        let whole = || self.config.param_count();
        self.adapters.as_ref().map_or_else(whole, |(lora, _)| lora.param_count(&self.config))
    }

    /// Names and shapes of what is trained.
    pub fn shapes(&self) -> Params<ParamInfo> {
        let whole = || params::shapes(&self.config, false);
        self.adapters.as_ref().map_or_else(whole, |(lora, _)| lora.shapes(&self.config))
    }

    /// Writes a model with these weights, or an adapter, which is always in f32.
    pub fn save(
        &self,
        dir: &Path,
        config: &ModelConfig,
        weights: &Params<Vec<f32>>,
        dtype: Dtype,
    ) -> Result<(), HfError> {
        if let Some((lora, base)) = &self.adapters {
            let base = base.display().to_string();
            return peft::save(dir, config, lora, weights, Some(&base), &self.tokenizer_files);
        }
        let options = SaveOptions {
            tokenizer_files: &self.tokenizer_files,
            ..SaveOptions::new(dtype, &self.generation)
        };
        hf::save(dir, config, weights, &options)
    }

    /// Those of a run's model.
    pub fn of(start: &Start) -> ModelFiles {
        ModelFiles {
            config: start.config.clone(),
            generation: start.generation.clone(),
            tokenizer_files: start.tokenizer.files().to_vec(),
            adapters: start.adapters.as_ref().map(|adapters| (adapters.lora, adapters.dir.clone())),
        }
    }
}

/// How many checkpoints are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// The newest.
    pub last: usize,
    /// Beside them, those with the highest [`State::score`].
    pub best: usize,
}

/// A checkpoint that cannot be used.
#[derive(Debug)]
pub struct Torn {
    /// Its step.
    pub step: u64,
    /// What is wrong with it.
    pub error: CheckpointError,
}

/// What a run can resume from.
#[derive(Debug, Default)]
pub struct Newest {
    /// Step and directory of the newest whole checkpoint.
    pub whole: Option<(u64, PathBuf)>,
    /// Those that are not whole, newer and older ones.
    pub torn: Vec<Torn>,
}

/// The checkpoints of a run.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    keep: Keep,
}

impl Store {
    /// Opens or makes the directory and clears away what a killed process left half done.
    pub fn open(dir: &Path, keep: Keep) -> Result<Store, CheckpointError> {
        disk::create_dir_all(dir).map_err(CheckpointError::io(dir, "be created"))?;
        for entry in std::fs::read_dir(dir).map_err(CheckpointError::io(dir, "be listed"))? {
            let entry = entry.map_err(CheckpointError::io(dir, "be listed"))?;
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            let replaced =
                name.strip_prefix('.').and_then(|name| name.strip_suffix(".old")).map(|name| dir.join(name));
            match replaced {
                Some(place) if !place.exists() => {
                    disk::rename(&path, &place).map_err(CheckpointError::io(&path, "be put back"))?;
                }
                _ if name.starts_with(".step-") => remove(&path)?,
                _ => {}
            }
        }
        Ok(Store { dir: dir.to_path_buf(), keep })
    }

    /// The directory that rank 0 has opened, as the others see it.
    pub fn of_first(dir: &Path, keep: Keep) -> Store {
        Store { dir: dir.to_path_buf(), keep }
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Steps that have a checkpoint, whole or not, in order.
    pub fn steps(&self) -> Result<BTreeSet<u64>, CheckpointError> {
        let entries = std::fs::read_dir(&self.dir).map_err(CheckpointError::io(&self.dir, "be listed"))?;
        let step = |name: &str| name.strip_prefix("step-")?.parse().ok();
        Ok(entries.flatten().filter_map(|entry| step(&entry.file_name().to_string_lossy())).collect())
    }

    /// The newest whole checkpoint, and all that are torn: older ones, too, since one of them may be kept for
    /// its score. An error where there are some and none is whole: continuing would begin anew and throw the
    /// run's logs away.
    pub fn newest(&self) -> Result<Newest, CheckpointError> {
        let mut newest = Newest::default();
        for step in self.steps()?.into_iter().rev() {
            let dir = self.path(step);
            match check_whole(&dir) {
                Ok(()) => newest.whole = newest.whole.or(Some((step, dir))),
                Err(error) => newest.torn.push(Torn { step, error }),
            }
        }
        match newest.torn.first().filter(|_| newest.whole.is_none()) {
            Some(torn) => {
                Err(CheckpointError::NoneWhole { dir: self.dir.clone(), newest: torn.error.to_string() })
            }
            None => Ok(newest),
        }
    }

    /// Takes a torn checkpoint out of the way, so that nothing counts it and its step can be saved again.
    /// Nothing of it is lost; returns where it is.
    pub fn set_aside(&self, step: u64) -> Result<PathBuf, CheckpointError> {
        let (path, mut place) = (self.path(step), self.dir.join(format!("damaged-step-{step}")));
        let mut number = 2;
        while place.exists() {
            place = self.dir.join(format!("damaged-step-{step}-{number}"));
            number += 1;
        }
        disk::rename(&path, &place).map_err(CheckpointError::io(&path, "be renamed"))?;
        sync_dir(&self.dir)?;
        Ok(place)
    }

    /// The recipe of a checkpoint.
    pub fn recipe(&self, step: u64) -> Result<String, CheckpointError> {
        read_recipe(&self.path(step))
    }

    /// Writes a rank's files of a checkpoint under its temporary name. Where it fails, what is there is
    /// removed when the store is next opened, or now by the only rank.
    pub fn write_part(
        &self,
        snapshot: &Snapshot,
        model: &ModelFiles,
        pieces: Pieces,
        metrics: Option<&Lines>,
    ) -> Result<(), CheckpointError> {
        if pieces.rank == 0 {
            self.check_space(snapshot.bytes() + metrics.map_or(0, Lines::bytes), model)?;
        }
        let temporary = self.temporary(snapshot.state.step);
        let written = disk::create_dir_all(&temporary)
            .map_err(CheckpointError::io(&temporary, "be created"))
            .and_then(|()| snapshot.write(&temporary, model, pieces, metrics));
        if written.is_err() && pieces == Pieces::ALL {
            // The error that matters is the one at hand; what cannot be removed now is when the store is next
            // opened.
            let _ = remove(&temporary);
        }
        written
    }

    /// Puts a checkpoint, of which all ranks have written their files, into its place: the manifest, then
    /// synced, then renamed. Returns its directory.
    pub fn commit(&self, step: u64) -> Result<PathBuf, CheckpointError> {
        let temporary = self.temporary(step);
        let listed = write_manifest(&temporary);
        if listed.is_err() {
            let _ = remove(&temporary); // as above
        }
        listed?;
        let path = self.path(step);
        let old = self.dir.join(format!(".step-{step}.old"));
        if path.exists() {
            disk::rename(&path, &old).map_err(CheckpointError::io(&path, "be renamed"))?;
        }
        disk::rename(&temporary, &path).map_err(CheckpointError::io(&path, "be renamed into place"))?;
        sync_dir(&self.dir)?;
        if old.exists() {
            remove(&old)?;
        }
        Ok(path)
    }

    /// Where a checkpoint is written before it is whole.
    fn temporary(&self, step: u64) -> PathBuf {
        self.dir.join(format!(".step-{step}.part"))
    }

    /// An error where tensors of so many bytes, what goes with them, and after them the final model of the
    /// run do not fit on the disk.
    pub fn check_space(&self, tensor_bytes: u64, model: &ModelFiles) -> Result<(), CheckpointError> {
        let files: u64 = model.tokenizer_files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        let need = tensor_bytes + 2 * files + SMALL_FILES + model.bytes();
        match free_space(&self.dir) {
            Some(free) if free < need => Err(CheckpointError::Full { dir: self.dir.clone(), need, free }),
            _ => Ok(()),
        }
    }

    /// Removes what need not be kept after the checkpoint of `step`. Newer ones, left by a run that went
    /// further and was torn, are not counted and not touched.
    pub fn prune(&self, step: u64) -> Result<(), CheckpointError> {
        let steps: Vec<u64> = self.steps()?.into_iter().filter(|&s| s <= step).collect();
        let mut kept: BTreeSet<u64> = steps.iter().rev().take(self.keep.last.max(1)).copied().collect();
        let score = |s: u64| Some((State::read(&self.path(s)).ok()?.score()?, s));
        let mut best: Vec<(f64, u64)> = steps.iter().filter_map(|&s| score(s)).collect();
        best.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
        kept.extend(best.iter().take(self.keep.best).map(|&(_, s)| s));
        for step in steps.into_iter().filter(|s| !kept.contains(s)) {
            // Renamed first: a checkpoint that is being removed must never look like one that is torn.
            let (path, gone) = (self.path(step), self.dir.join(format!(".step-{step}.gone")));
            disk::rename(&path, &gone).map_err(CheckpointError::io(&path, "be renamed"))?;
            remove(&gone)?;
        }
        Ok(())
    }

    /// Whether a checkpoint of `step` with this score would be kept for it: of equal scores the newest
    /// counts. Checkpoints of later steps, or of this one, are not of the run as it is now.
    pub fn would_keep(&self, step: u64, score: f64) -> Result<bool, CheckpointError> {
        let found = |s: u64| State::read(&self.path(s)).ok()?.score();
        let earlier = self.steps()?.into_iter().filter(|&s| s < step);
        let better = earlier.filter_map(found).filter(|&there| there > score).count();
        Ok(better < self.keep.best)
    }

    /// Where the checkpoint of a step is.
    pub fn path(&self, step: u64) -> PathBuf {
        self.dir.join(format!("step-{step}"))
    }
}

fn write_manifest(dir: &Path) -> Result<(), CheckpointError> {
    let manifest = dir.join(MANIFEST);
    let text = Manifest::of(dir)?
        .to_json()
        .map_err(|e| CheckpointError::damaged(&manifest, e, "a manifest that can be written"))?;
    write_synced(&manifest, text.as_bytes())?;
    sync_dir(dir)
}

fn remove(path: &Path) -> Result<(), CheckpointError> {
    disk::remove(path).map_err(CheckpointError::io(path, "be removed"))
}

fn sync_dir(dir: &Path) -> Result<(), CheckpointError> {
    disk::sync_dir(dir).map_err(CheckpointError::io(dir, "be synced"))
}

/// Bytes that we may still write; none where the system does not say.
#[cfg(unix)]
fn free_space(dir: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(dir).ok()?;
    disk.f_bavail.checked_mul(disk.f_frsize)
}

#[cfg(not(unix))]
fn free_space(_dir: &Path) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A store in a directory of its own, with checkpoints of these scores, of which only states are there.
    fn store(name: &str, best: usize, scores: &[(u64, f64)]) -> Store {
        let dir = std::env::temp_dir().join(format!("qurl-store-{name}-{}", std::process::id()));
        let store = Store::open(&dir, Keep { last: 1, best }).expect("a store");
        for &(step, score) in scores {
            let state = serde_json::json!({
                "format": 1, "step": step, "drawn": 0, "actor_updates": step, "has_reference": false,
                "has_measured": false, "test_accuracy": score, "recipe_hash": "",
            });
            std::fs::create_dir_all(store.path(step)).expect("created");
            std::fs::write(store.path(step).join("state.json"), state.to_string()).expect("written");
            assert_eq!(State::read(&store.path(step)).expect("a state").score(), Some(score));
        }
        store
    }

    #[test]
    fn of_equal_scores_the_newest_is_kept() {
        let store = store("equal", 1, &[(0, 0.25), (4, 0.5)]);
        let keeps = |score: f64| store.would_keep(8, score).expect("scores");
        assert!(keeps(0.75) && keeps(0.5) && !keeps(0.25));
        // As it is when what was saved so is cleared up.
        store.prune(4).expect("pruned");
        assert_eq!(store.steps().expect("steps"), [4].into());
        std::fs::remove_dir_all(store.dir()).expect("removed");
    }

    #[test]
    fn what_is_not_of_the_run_before_a_step_does_not_count() {
        let store = store("later", 1, &[(4, 0.5), (8, 0.75), (12, 1.0)]);
        // Left by a run that went further, and made again.
        assert!(store.would_keep(8, 0.75).expect("scores"), "that of step 4 is worse");
        assert!(!store.would_keep(8, 0.25).expect("scores"));
        let aside = store.set_aside(8).expect("renamed");
        assert!(aside.join("state.json").exists() && aside.ends_with("damaged-step-8"));
        assert_eq!(store.steps().expect("steps"), [4, 12].into());
        std::fs::create_dir(store.path(8)).expect("created");
        assert!(store.set_aside(8).expect("renamed again").ends_with("damaged-step-8-2"));
        // Opening clears away what is unfinished, and nothing of this.
        let store = Store::open(store.dir(), store.keep).expect("opened");
        assert!(store.dir().join("damaged-step-8").exists() && store.dir().join("damaged-step-8-2").exists());
        std::fs::remove_dir_all(store.dir()).expect("removed");
    }
}
