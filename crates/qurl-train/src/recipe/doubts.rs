//! Values that a recipe may have but that can hardly be meant: said before a run starts, which then starts
//! all the same.

use super::Recipe;
use qurl_rl::Objective;

/// Learning rates above this are mistakes of a few zeros.
const MAX_LR: f64 = 0.1;
/// Temperatures above this sample nearly at random.
const MAX_TEMPERATURE: f32 = 2.0;

impl Recipe {
    /// That a batch of supervised training has more sequences than there are examples, if it has.
    pub fn doubt_of_examples(&self, examples: usize) -> Option<String> {
        let size = self.sft.as_ref()?.batch_size;
        let place = self.place(self.source.file(), "sft.batch_size");
        let why =
            format!("more than the {examples} examples of sft.files, so that a batch has some of them twice");
        (size > examples).then(|| format!("{place}: key `sft.batch_size` is {size}: {why}"))
    }

    /// What looks like a mistake, a sentence each with the place of the key; `problems` are those to train
    /// on, where they can be counted.
    pub fn doubts(&self, problems: Option<u64>) -> Vec<String> {
        let mut doubts = Vec::new();
        let mut say = |key: &str, found: String, why: &str| {
            let place = self.place(self.source.file(), key);
            doubts.push(format!("{place}: key `{key}` is {found}: {why}"));
        };
        let lrs = [
            ("sft.lr", self.sft.as_ref().map(|sft| sft.lr)),
            ("actor.lr", self.actor.as_ref().map(|actor| actor.lr)),
            ("critic.lr", self.critic.as_ref().map(|critic| critic.lr)),
        ];
        for (key, lr) in
            lrs.into_iter().filter_map(|(key, lr)| Some((key, lr?))).filter(|(_, lr)| *lr > MAX_LR)
        {
            say(key, lr.to_string(), "learning rates above 0.1 are hardly ever meant");
        }
        if let (Some(data), Some(problems)) = (&self.data, problems)
            && data.train_batch_size as u64 > problems
        {
            let why = format!(
                "more than the {problems} problems to train on, so that a step has some of them twice"
            );
            say("data.train_batch_size", data.train_batch_size.to_string(), &why);
        }
        if let Some(rollout) = self.rollout.as_ref().filter(|rollout| rollout.temperature > MAX_TEMPERATURE) {
            say(
                "rollout.temperature",
                rollout.temperature.to_string(),
                "above 2 tokens are sampled nearly at random",
            );
        }
        if let (Some(rollout), Some(algorithm)) = (&self.rollout, &self.algorithm)
            && rollout.lag > 0
            && matches!(algorithm.objective, Objective::Naive(_))
        {
            let why = "`algorithm.objective` is naive, which takes old tokens for those of the newest \
                       weights; acr, tis and decoupled correct for it";
            say("rollout.lag", rollout.lag.to_string(), why);
        }
        if let (Some(actor), Some(run)) = (&self.actor, &self.run)
            && actor.lr_warmup_steps > run.total_steps
        {
            let why =
                format!("the run ends after run.total_steps = {}, before the warm-up does", run.total_steps);
            say("actor.lr_warmup_steps", actor.lr_warmup_steps.to_string(), &why);
        }
        let total = self.run.as_ref().map_or(0, |run| run.total_steps);
        let stages = self.run.iter().flat_map(|run| &run.stages).enumerate();
        for (i, stage) in stages.filter(|(_, stage)| stage.from_step > total) {
            let why = format!("the run ends after run.total_steps = {total}, before the stage begins");
            say(&format!("run.stages[{i}].from_step"), stage.from_step.to_string(), &why);
        }
        doubts
    }
}
