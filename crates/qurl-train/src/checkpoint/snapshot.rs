//! The state of a run on the host: what a checkpoint is written from, and what a run is set to when it goes
//! on.

use super::tensors::{self, Pieces};
use super::{CheckpointError, ModelFiles};
use crate::ranks::Ranks;
use crate::rl::Tested;
use qurl_model::hf::{self, SaveOptions};
use qurl_model::{Dtype, ModelConfig, Params, params};
use qurl_rl::KlCoefficient;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Version of the files; another one is refused.
const FORMAT: u32 = 1;

const STATE: &str = "state.json";
const RECIPE: &str = "recipe.toml";
const OPTIMIZER: &str = "optimizer.safetensors";
const CRITIC: &str = "critic";
const CRITIC_OPTIMIZER: &str = "critic_optimizer.safetensors";
const REFERENCE: &str = "reference.safetensors";
const MEASURED: &str = "measured.safetensors";

/// A model that is being trained.
#[derive(Clone, Debug, PartialEq)]
pub struct LearnerSnapshot {
    /// Master weights.
    pub weights: Params<Vec<f32>>,
    /// First moments: those of the rank's pieces.
    pub first: Params<Vec<f32>>,
    /// Second moments, likewise.
    pub second: Params<Vec<f32>>,
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
            accuracy_before: None,
            avg_at_k_before: None,
            test_accuracy: None,
            validation_loss_before: None,
            validation_loss: None,
            recipe_hash: format!("{:016x}", qurl_model::rng::text_key(&recipe)),
            problems: Some(problems),
        };
        Snapshot { state, recipe, actor, critic, reference, measured }
    }

    /// Bytes of its tensors, with the pieces of all ranks.
    pub fn bytes(&self) -> u64 {
        let learners = [Some(&self.actor), self.critic.as_ref()];
        let learners = learners.into_iter().flatten().flat_map(|l| [&l.weights; 3]);
        let trees = learners.chain(self.reference.as_ref()).chain(self.measured.as_ref());
        trees.flat_map(|tree| tree.iter()).map(|leaf| 4 * leaf.len() as u64).sum()
    }

    /// Writes this rank's files but the manifest into a directory: everyone the pieces of the moments that
    /// are its own, rank 0 the rest. Every file is on disk when this returns.
    pub(super) fn write(
        &self,
        dir: &Path,
        model: &ModelFiles,
        pieces: Pieces,
    ) -> Result<(), CheckpointError> {
        let layout = params::shapes(&model.config, false);
        let moments = [("first", &self.actor.first), ("second", &self.actor.second)];
        tensors::write(&dir.join(pieces.file(OPTIMIZER)), &layout, pieces, &moments)?;
        if let Some(critic) = &self.critic {
            let layout = params::shapes(&model.config, true);
            let moments = [("first", &critic.first), ("second", &critic.second)];
            tensors::write(&dir.join(pieces.file(CRITIC_OPTIMIZER)), &layout, pieces, &moments)?;
        }
        if pieces.rank == 0 { self.write_whole(dir, model, pieces.ranks) } else { Ok(()) }
    }

    /// What one rank writes for all.
    fn write_whole(&self, dir: &Path, model: &ModelFiles, ranks: usize) -> Result<(), CheckpointError> {
        let layout = params::shapes(&model.config, false);
        let options = SaveOptions {
            tokenizer_files: &model.tokenizer_files,
            ..SaveOptions::new(Dtype::F32, &model.generation)
        };
        hf::save(dir, &model.config, &self.actor.weights, &options)?;
        if let Some(critic) = &self.critic {
            hf::save(&dir.join(CRITIC), &model.config, &critic.weights, &options)?;
        }
        for (name, tree) in [(REFERENCE, &self.reference), (MEASURED, &self.measured)] {
            if let Some(tree) = tree {
                tensors::write(&dir.join(name), &layout, Pieces::ALL, &[("weights", tree)])?;
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
        let pieces = Pieces { rank: ranks.rank(), ranks: ranks.size() };
        let recipe = read_recipe(dir)?;
        let learner = |model: &Path, moments: &str, value_head: bool, updates: u64| {
            let layout = params::shapes(config, value_head);
            let weights = hf::load(model)?.params;
            tensors::check(&layout, &weights)?;
            let [first, second] = ["first", "second"]
                .map(|tree| tensors::read(dir, moments, state.ranks, &layout, pieces, tree));
            Ok::<_, CheckpointError>(LearnerSnapshot { weights, first: first?, second: second?, updates })
        };
        let actor = learner(dir, OPTIMIZER, false, state.actor_updates)?;
        let critic = match state.critic_updates {
            Some(updates) => Some(learner(&dir.join(CRITIC), CRITIC_OPTIMIZER, true, updates)?),
            None => None,
        };
        let layout = params::shapes(config, false);
        let tree = |there: bool, name: &str| match there {
            true => tensors::read(dir, name, 1, &layout, Pieces::ALL, "weights").map(Some),
            false => Ok(None),
        };
        let reference = tree(state.has_reference, REFERENCE)?;
        let measured = tree(state.has_measured, MEASURED)?;
        Ok(Snapshot { state, recipe, actor, critic, reference, measured })
    }
}

impl State {
    /// Reads the numbers of a checkpoint alone.
    pub fn read(dir: &Path) -> Result<State, CheckpointError> {
        let path = dir.join(STATE);
        let text = std::fs::read_to_string(&path).map_err(CheckpointError::io(&path, "be read"))?;
        let state: State = serde_json::from_str(&text)
            .map_err(|e| CheckpointError::damaged(&path, e, format!("a state of format {FORMAT}")))?;
        if state.format != FORMAT {
            let (found, expected) = (format!("format {}", state.format), format!("format {FORMAT}"));
            return Err(CheckpointError::damaged(&path, found, expected));
        }
        Ok(state)
    }
}

/// The recipe that a checkpoint was made with.
pub(super) fn read_recipe(dir: &Path) -> Result<String, CheckpointError> {
    let path = dir.join(RECIPE);
    std::fs::read_to_string(&path).map_err(CheckpointError::io(&path, "be read"))
}

/// Writes a small file and waits for the disk.
pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let mut file = File::create(path).map_err(CheckpointError::io(path, "be created"))?;
    file.write_all(bytes).map_err(CheckpointError::io(path, "be written"))?;
    file.sync_all().map_err(CheckpointError::io(path, "be synced"))
}
