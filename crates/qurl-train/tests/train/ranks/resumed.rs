//! Runs in a directory that stop and are resumed by another number of ranks.

use super::{DAPO, PPO, UNEVEN, line, on_ranks, recipe, same_steps};
use crate::common::tiny::{self, Scratch, bits, cpu, warmed};
use qurl_kernels::collective::Collective;
use qurl_model::Dtype;
use qurl_train::checkpoint::{Keep, ModelFiles, Store};
use qurl_train::ranks::Ranks;
use qurl_train::recipe::Recipe;
use qurl_train::rl::RlTrainer;
use qurl_train::run::{Outcome, Run, RunError, RunParts};
use qurl_train::runlog::RunLog;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The lines of metrics.jsonl without times.
fn metrics(run: &Scratch) -> Vec<String> {
    let text = std::fs::read_to_string(run.path("metrics.jsonl")).expect("metrics");
    text.lines().map(|line_| line(&serde_json::from_str::<Value>(line_).expect("JSON"))).collect()
}

/// The files of a checkpoint.
fn files(run: &Scratch, step: u64) -> Vec<String> {
    let entries = std::fs::read_dir(run.path(&format!("checkpoints/step-{step}"))).expect("a checkpoint");
    let mut names: Vec<String> =
        entries.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// One rank of a run in a directory, begun or resumed, which ends after `last` steps.
fn run(recipe: &Recipe, dir: &Path, collective: Collective, last: u64) -> Vec<u32> {
    let ranks = Ranks::new(Arc::new(collective), recipe).expect("ranks");
    let (place, keep) = (dir.join("checkpoints"), Keep { last: 2, best: 1 });
    let store = match ranks.is_first() {
        true => Store::open(&place, keep).expect("a store"),
        false => Store::of_first(&place, keep),
    };
    ranks.barrier().expect("all ranks");
    let from = store.newest().expect("checkpoints").whole;
    let log = match ranks.is_first() {
        true => RunLog::open(dir, from.as_ref()).expect("logs"),
        false => RunLog::silent(),
    };
    let (start, task) = tiny::start(recipe);
    let trainer = RlTrainer::on_ranks(&cpu(1), recipe, "tiny", start, task, ranks).expect("trainer");
    let parts = RunParts { path: dir.to_path_buf(), store, from, log };
    let mut run = Run::begin(trainer, recipe, parts).expect("begun");
    let done = AtomicU64::new(run.trainer().steps_done());
    // One rank alone is told to stop.
    let first = run.trainer().ranks().is_first();
    let stop = || first && done.load(Ordering::Relaxed) >= last;
    let report = |event: qurl_train::run::Event| {
        if let qurl_train::run::Event::Step(record) = event {
            done.store(record.step, Ordering::Relaxed);
        }
    };
    match run.steps(stop, report) {
        Ok(outcome) => assert_eq!(outcome, Outcome::Done),
        Err(RunError::Stopped { step }) => assert_eq!(step, last),
        Err(error) => panic!("{error}"),
    }
    run.save_model().expect("saved");
    let weights = run.into_trainer().weights().expect("weights");
    bits(&weights)
}

#[test]
fn a_run_that_is_resumed_with_another_number_of_ranks_has_the_same_bits() {
    // Moments in all three formats, too.
    let fewer_bits: &[&str] = &["actor.optim.moments='8bit'", "critic.optim.moments='bf16'"];
    for (overrides, moments) in [(PPO, fewer_bits), (DAPO, &[])] {
        let sets = [overrides, moments, &["run.total_steps=5"]].concat();
        let mut recipe = recipe(&sets);
        recipe.sft = None;
        let divided = {
            let mut divided = recipe.clone();
            divided.trainer.zero_stage = 3;
            divided
        };
        let whole = Scratch::new();
        let weights = run(&recipe, &whole.0, Collective::alone(), 9);
        assert_eq!(metrics(&whole).len(), 5);
        for counts in [[1, 4, 2], [4, 2, 1], [2, 1, 4]] {
            let torn = Scratch::new();
            // Stopped after steps 1 and 3: a checkpoint there, and one of step 2 or 4 by the recipe.
            for (count, last) in counts.into_iter().zip([1, 3, 9]) {
                // Two ranks divide their weights, whatever the others do.
                let recipe = if count == 2 { &divided } else { &recipe };
                let found = on_ranks(count, |collective| run(recipe, &torn.0, collective, last));
                assert!(found.iter().all(|bits| *bits == found[0]));
                assert!(last < 9 || found[0] == weights, "{counts:?}: other weights");
                if last == 3 && count > 1 {
                    let part = format!("optimizer-{count:05}-of-{count:05}.safetensors");
                    assert!(files(&torn, 3).contains(&part), "{:?}", files(&torn, 3));
                }
            }
            assert_eq!(metrics(&torn), metrics(&whole), "{counts:?}");
            let model =
                |run: &Scratch| std::fs::read(run.0.join("model/model.safetensors")).expect("a model");
            assert!(model(&torn) == model(&whole), "{counts:?}: the saved models differ");
        }
    }
}

#[test]
fn adapters_have_the_same_bits_on_any_number_of_ranks_and_where_another_number_resumes() {
    let whole = recipe(&[]);
    let (weights, base) = (warmed(&cpu(1), &whole), Scratch::new());
    let (start, _) = tiny::start(&whole);
    ModelFiles::of(&start).save(&base.0, &start.config, &weights, Dtype::F32).expect("saved");
    let path = format!("model.path={}", base.0.display());
    let set = [
        path.as_str(),
        "lora={ rank = 4, alpha = 8 }",
        "trainer.compute=bf16",
        "algorithm.kl_loss_coef=0.01",
        "actor.optim.moments='8bit'",
    ];
    let recipe = tiny::parsed(tiny::RL, &[UNEVEN, &set].concat()).expect("a recipe");
    let alone = same_steps(&recipe, &weights, &[(2, 1), (4, 1)]);
    assert!(alone.0[2].contains("\"updates\":4"), "{:?}", alone.0[2]);
    let torn = Scratch::new();
    for (count, last) in [(4, 1), (2, 9)] {
        let found = on_ranks(count, |collective| run(&recipe, &torn.0, collective, last));
        assert!(last < 9 || found.iter().all(|bits| *bits == alone.1), "resumed by {count} ranks");
    }
}
