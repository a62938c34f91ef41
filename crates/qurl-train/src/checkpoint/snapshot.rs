//! The state of a run on the host: what a checkpoint is written from, and what a run is set to when it goes
//! on.

use super::manifest::Manifest;
use super::tensors::{self, Pieces, Tree};
use super::{CheckpointError, ModelFiles, moments};
use crate::ranks::Ranks;
use crate::rl::{OldWeights, Tested};
use crate::runlog::Lines;
use qurl_files::disk::DiskFile;
use qurl_kernels::types::Moments;
use qurl_model::hf::{self, peft};
use qurl_model::{Dtype, ModelConfig, Params, params};
use qurl_rl::KlCoefficient;
use serde::{Deserialize, Serialize};
use std::io::{BufWriter, Write};
use std::path::Path;

/// Version of the files; another one is refused.
const FORMAT: u32 = 1;
/// Steps, updates and versions of weights that a run can have, and ranks: what a state is computed with stays
/// far from the ends of its types.
const MAX_COUNT: u64 = 1 << 53;
const MAX_RANKS: usize = 1 << 16;

const STATE: &str = "state.json";
const RECIPE: &str = "recipe.toml";
const OPTIMIZER: &str = "optimizer.safetensors";
const CRITIC: &str = "critic";
const CRITIC_OPTIMIZER: &str = "critic_optimizer.safetensors";
const REFERENCE: &str = "reference.safetensors";
const MEASURED: &str = "measured.safetensors";
const OLD: &str = "old.safetensors";
/// The lines of the run's `metrics.jsonl` up to the step, without times, so that equal runs have equal
/// checkpoints.
pub(super) const METRICS: &str = "metrics.jsonl";

/// A model that is being trained.
#[derive(Clone, Debug, PartialEq)]
pub struct LearnerSnapshot {
    /// Master weights.
    pub weights: Params<Vec<f32>>,
    /// Moments of the rank's pieces.
    pub moments: Params<Moments>,
    /// Updates made.
    pub updates: u64,
}

/// The numbers of a run's state: `state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    format: u32,
    /// Steps done.
    pub step: u64,
    /// Problems drawn so far: the position in the data.
    pub drawn: u64,
    actor_updates: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    critic_updates: Option<u64>,
    /// Coefficient of the KL in the rewards, as it has adapted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl: Option<KlCoefficient>,
    has_reference: bool,
    has_measured: bool,
    /// Ranks that have written their pieces of the moments.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    ranks: usize,
    /// Versions of older weights that the next steps sample with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    old_versions: Vec<u64>,
    /// Accuracy before the first step, once measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy_before: Option<f64>,
    /// Avg@k before the first step, where measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub avg_at_k_before: Option<f64>,
    /// Avg@k (or else greedy accuracy) after this step, where measured: what `keep_best` goes by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_accuracy: Option<f64>,
    /// Validation loss before the first step of supervised training, where measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_loss_before: Option<f64>,
    /// Validation loss after this step, where measured: what `keep_best` goes by in supervised training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// Tells the recipe from others.
    pub recipe_hash: String,
    /// Tells the task's problems from others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problems: Option<u64>,
    /// Checksums of the leaves of the frozen base that adapters are trained beside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Vec<u64>>,
}

fn one() -> usize {
    1
}

fn is_one(ranks: &usize) -> bool {
    *ranks == 1
}

impl State {
    /// The evaluation before the first step, once made.
    pub fn before(&self) -> Option<Tested> {
        self.accuracy_before.map(|accuracy| Tested { accuracy, reward: None, avg_at_k: self.avg_at_k_before })
    }

    /// What checkpoints are compared by, higher being better; none where nothing was measured.
    pub fn score(&self) -> Option<f64> {
        self.test_accuracy.or(self.validation_loss.map(|loss| -loss))
    }

    /// Takes note of the evaluation before the first step.
    pub fn set_before(&mut self, before: Tested) {
        self.accuracy_before = Some(before.accuracy);
        self.avg_at_k_before = before.avg_at_k;
    }
}

/// The whole state.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// Its numbers.
    pub state: State,
    /// The recipe with all defaults filled in.
    pub recipe: String,
    /// The actor.
    pub actor: LearnerSnapshot,
    /// The critic, where there is one.
    pub critic: Option<LearnerSnapshot>,
    /// The reference model, where there is one.
    pub reference: Option<Params<Vec<f32>>>,
    /// The weights that the next weight update is measured from.
    pub measured: Option<Params<Vec<f32>>>,
    /// Older weights that the next steps sample with: those of the rank's pieces.
    pub old: Vec<OldWeights>,
}

impl Snapshot {
    /// The state of a run after `step` steps.
    pub fn new(
        step: u64,
        drawn: u64,
        recipe: String,
        problems: u64,
        kl: Option<KlCoefficient>,
        actor: LearnerSnapshot,
        critic: Option<LearnerSnapshot>,
        reference: Option<Params<Vec<f32>>>,
        measured: Option<Params<Vec<f32>>>,
        old: Vec<OldWeights>,
    ) -> Snapshot {
        let state = State {
            format: FORMAT,
            step,
            drawn,
            actor_updates: actor.updates,
            critic_updates: critic.as_ref().map(|c| c.updates),
            kl,
            has_reference: reference.is_some(),
            has_measured: measured.is_some(),
            ranks: 1,
            old_versions: old.iter().map(|old| old.version).collect(),
            accuracy_before: None,
            avg_at_k_before: None,
            test_accuracy: None,
            validation_loss_before: None,
            validation_loss: None,
            recipe_hash: format!("{:016x}", qurl_model::rng::text_key(&recipe)),
            problems: Some(problems),
            base: None,
        };
        Snapshot { state, recipe, actor, critic, reference, measured, old }
    }

    /// Bytes of its tensors, with the pieces of all ranks.
    pub fn bytes(&self) -> u64 {
        let learners = || [Some(&self.actor), self.critic.as_ref()].into_iter().flatten();
        let old = self.old.iter().map(|_| &self.actor.weights);
        let whole = learners().map(|l| &l.weights).chain(&self.reference).chain(&self.measured).chain(old);
        let whole: u64 = whole.flat_map(|tree| tree.iter()).map(|leaf| 4 * leaf.len() as u64).sum();
        let moments = learners().flat_map(|l| l.moments.iter().zip(l.weights.iter()));
        let moments = moments.map(|(moments, leaf)| moments.first.format().bytes(leaf.len()));
        whole + 2 * moments.sum::<usize>() as u64
    }

    /// Writes this rank's files but the manifest into a directory: everyone the pieces of the moments that
    /// are its own, rank 0 the rest. Every file is on disk when this returns.
    pub(super) fn write(
        &self,
        dir: &Path,
        model: &ModelFiles,
        pieces: Pieces,
        metrics: Option<&Lines>,
    ) -> Result<(), CheckpointError> {
        let layout = model.shapes();
        moments::write(&dir.join(pieces.file(OPTIMIZER)), &layout, pieces, &self.actor.moments)?;
        if let Some(critic) = &self.critic {
            let layout = params::shapes(&model.config, true);
            moments::write(&dir.join(pieces.file(CRITIC_OPTIMIZER)), &layout, pieces, &critic.moments)?;
        }
        if !self.old.is_empty() {
            let names: Vec<String> = self.old.iter().map(|old| old_name(old.version)).collect();
            let leaves = self.old.iter().map(|old| tensors::floats(&old.pieces));
            let trees: Vec<_> = names.iter().map(|name| Tree::whole(name)).zip(leaves).collect();
            tensors::write(&dir.join(pieces.file(OLD)), &layout, pieces, &trees)?;
        }
        if pieces.rank != 0 {
            return Ok(());
        }
        write_lines(&dir.join(METRICS), metrics)?;
        self.write_whole(dir, model, pieces.ranks)
    }

    /// What one rank writes for all.
    fn write_whole(&self, dir: &Path, model: &ModelFiles, ranks: usize) -> Result<(), CheckpointError> {
        let layout = params::shapes(&model.config, false);
        model.save(dir, &model.config, &self.actor.weights, Dtype::F32)?;
        if let Some(critic) = &self.critic {
            model.save(&dir.join(CRITIC), &model.config, &critic.weights, Dtype::F32)?;
        }
        for (name, tree) in [(REFERENCE, &self.reference), (MEASURED, &self.measured)] {
            if let Some(tree) = tree {
                let tree = (Tree::whole("weights"), tensors::floats(tree));
                tensors::write(&dir.join(name), &layout, Pieces::ALL, &[tree])?;
            }
        }
        write_synced(&dir.join(RECIPE), self.recipe.as_bytes())?;
        let path = dir.join(STATE);
        let state = serde_json::to_string_pretty(&State { ranks, ..self.state.clone() })
            .map_err(|e| CheckpointError::damaged(&path, e, "a state that can be written"))?;
        write_synced(&path, state.as_bytes())
    }

    /// Reads a checkpoint whose manifest was checked, with the pieces that belong to this one of the ranks,
    /// however many have written it.
    pub fn read(dir: &Path, config: &ModelConfig, ranks: &Ranks) -> Result<Snapshot, CheckpointError> {
        let state = State::read(dir)?;
        let recipe = read_recipe(dir)?;
        let learner = |model: &Path, file: &str, value_head: bool, updates: u64| {
            let (layout, weights) = match peft::is_adapter(model) {
                true => {
                    let adapter = peft::load(model, config)?;
                    (adapter.lora.shapes(config), adapter.params)
                }
                false => (params::shapes(config, value_head), hf::load(model)?.params),
            };
            tensors::check(&layout, &weights)?;
            let moments = moments::read(dir, file, state.ranks, &layout, ranks)?;
            Ok::<_, CheckpointError>(LearnerSnapshot { weights, moments, updates })
        };
        let actor = learner(dir, OPTIMIZER, false, state.actor_updates)?;
        let critic = match state.critic_updates {
            Some(updates) => Some(learner(&dir.join(CRITIC), CRITIC_OPTIMIZER, true, updates)?),
            None => None,
        };
        let layout = params::shapes(config, false);
        let tree = |there: bool, name: &str| match there {
            true => tensors::read(dir, name, 1, &layout, Pieces::ALL, Tree::whole("weights")).map(Some),
            false => Ok(None),
        };
        let reference = tree(state.has_reference, REFERENCE)?;
        let measured = tree(state.has_measured, MEASURED)?;
        let old = |&version: &u64| {
            let name = old_name(version);
            let pieces = Pieces { rank: ranks.rank(), ranks: ranks.size() };
            let pieces = tensors::read(dir, OLD, state.ranks, &layout, pieces, Tree::whole(&name))?;
            Ok::<_, CheckpointError>(OldWeights { version, pieces })
        };
        let old = state.old_versions.iter().map(old).collect::<Result<_, _>>()?;
        Ok(Snapshot { state, recipe, actor, critic, reference, measured, old })
    }
}

/// What the tensors of older weights are called.
fn old_name(version: u64) -> String {
    format!("version-{version}")
}

impl State {
    /// Reads the numbers of a checkpoint alone.
    pub fn read(dir: &Path) -> Result<State, CheckpointError> {
        let path = dir.join(STATE);
        let text = qurl_files::read_text(&path, 16 * qurl_files::MIB)
            .map_err(CheckpointError::io(&path, "be read"))?;
        let state: State = serde_json::from_str(&text)
            .map_err(|e| CheckpointError::damaged(&path, e, format!("a state of format {FORMAT}")))?;
        if state.format != FORMAT {
            let (found, expected) = (format!("format {}", state.format), format!("format {FORMAT}"));
            return Err(CheckpointError::damaged(&path, found, expected));
        }
        let counts = [state.step, state.drawn, state.actor_updates, state.critic_updates.unwrap_or(0)];
        if let Some(count) = counts.iter().chain(&state.old_versions).find(|count| **count > MAX_COUNT) {
            let expected = format!("numbers of steps and updates of at most {MAX_COUNT}");
            return Err(CheckpointError::damaged(&path, count, expected));
        }
        if !(1..=MAX_RANKS).contains(&state.ranks) {
            let (found, expected) = (format!("{} ranks", state.ranks), format!("1 to {MAX_RANKS}"));
            return Err(CheckpointError::damaged(&path, found, expected));
        }
        Ok(state)
    }
}

/// An error unless a checkpoint has every file that its state asks for, each as its manifest says.
pub(super) fn check_whole(dir: &Path) -> Result<(), CheckpointError> {
    let manifest = Manifest::check(dir)?;
    manifest.expect(dir, STATE)?;
    manifest.expect(dir, RECIPE)?;
    let state = State::read(dir)?;
    let parts =
        |name: &'static str| (0..state.ranks).map(move |rank| Pieces { rank, ranks: state.ranks }.file(name));
    let mut files: Vec<String> = parts(OPTIMIZER).collect();
    let mut models = vec![String::new()];
    if state.critic_updates.is_some() {
        files.extend(parts(CRITIC_OPTIMIZER));
        models.push(format!("{CRITIC}/"));
    }
    if !state.old_versions.is_empty() {
        files.extend(parts(OLD));
    }
    files.extend(state.has_reference.then(|| REFERENCE.to_string()));
    files.extend(state.has_measured.then(|| MEASURED.to_string()));
    for model in models {
        // Adapters have no model beside them.
        if manifest.has(&format!("{model}{}", peft::CONFIG)) {
            files.extend([peft::CONFIG, peft::WEIGHTS].map(|file| format!("{model}{file}")));
            continue;
        }
        files.push(format!("{model}config.json"));
        match manifest.has(&format!("{model}{}", hf::WEIGHTS_INDEX)) {
            true => {
                let shards = hf::shards(&dir.join(&model))?;
                files.extend(shards.into_iter().map(|shard| format!("{model}{shard}")));
            }
            false => files.push(format!("{model}{}", hf::WEIGHTS)),
        }
    }
    files.iter().try_for_each(|file| manifest.expect(dir, file))
}

/// The recipe that a checkpoint was made with.
pub(super) fn read_recipe(dir: &Path) -> Result<String, CheckpointError> {
    let path = dir.join(RECIPE);
    qurl_files::read_text(&path, 16 * qurl_files::MIB).map_err(CheckpointError::io(&path, "be read"))
}

/// Writes a run's lines without times, one after the other: a long run has many.
fn write_lines(path: &Path, lines: Option<&Lines>) -> Result<(), CheckpointError> {
    let file = DiskFile::create(path).map_err(CheckpointError::io(path, "be created"))?;
    let mut file = BufWriter::with_capacity(1 << 16, file);
    let written = lines.map_or(Ok(()), |lines| lines.write_untimed(&mut file));
    let file = written.and_then(|()| file.into_inner().map_err(|error| error.into_error()));
    file.and_then(|file| file.sync_contents()).map_err(CheckpointError::io(path, "be written"))
}

/// Writes a small file and waits for the disk.
pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let mut file = DiskFile::create(path).map_err(CheckpointError::io(path, "be created"))?;
    file.write_all(bytes).map_err(CheckpointError::io(path, "be written"))?;
    file.sync_contents().map_err(CheckpointError::io(path, "be synced"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_that_no_run_reaches_are_refused() {
        let dir = std::env::temp_dir().join(format!("qurl-state-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let read = |key: &str, value: serde_json::Value| {
            let mut state = json!({"format": FORMAT, "step": 3, "drawn": 0, "actor_updates": 3,
                "has_reference": false, "has_measured": false, "recipe_hash": ""});
            state[key] = value;
            std::fs::write(dir.join(STATE), state.to_string()).expect("written");
            State::read(&dir).map_err(|error| error.to_string())
        };
        assert!(read("step", json!(4)).is_ok() && read("ranks", json!(8)).is_ok());
        for (key, value) in [
            ("step", json!(u64::MAX)),
            ("drawn", json!(u64::MAX)),
            ("actor_updates", json!(1_u64 << 60)),
            ("critic_updates", json!(u64::MAX)),
            ("old_versions", json!([1, u64::MAX])),
            ("ranks", json!(0)),
            ("ranks", json!(u64::MAX)),
        ] {
            let error = read(key, value.clone()).expect_err(key);
            assert!(error.contains(STATE), "{key} {value}: {error}");
        }
        std::fs::remove_dir_all(&dir).expect("removed");
    }
}
