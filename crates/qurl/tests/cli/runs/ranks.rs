//! Runs of several ranks, as processes under `mpirun`: the same bits for any number of them, also where one
//! of them is killed and the run is resumed with another number. Without `mpirun` these tests say so and
//! pass.

use super::support::{Outcome, lines};
use crate::common::{Run, directory, qurl_in};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The recipes of the project on a smaller task.
const SMALL: [&str; 5] = [
    "task.level=1",
    "trainer.shards=4",
    "run.test_problems=20",
    "data.train_batch_size=16",
    "actor.ppo_mini_batch_size=8",
];

/// A directory with these recipes, which begin with a model that was trained on one rank: a second of that
/// gives rewards that differ, and their own warm start would be made anew by every run. (That ranks share one
/// is shown below.)
fn place(name: &str, recipes: &[&str]) -> PathBuf {
    let dir = directory(name);
    let of_project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let source = of_project.join("tiny-grpo.toml").display().to_string();
    let small = ["--set", "task.level=1", "--set", "sft.warmup_steps=3", "--set", "sft.batch_size=32"];
    let args = ["sft", &source, "--run", "warm", "--steps", "60", "--device", "cpu", "--quiet"];
    let warm = qurl_in(&dir, &[&args[..], &small].concat(), "");
    assert_eq!(warm.status, 0, "{}", warm.stderr);
    for recipe in recipes {
        let file = format!("{recipe}.toml");
        let text = std::fs::read_to_string(of_project.join(&file)).expect("a recipe");
        let kept =
            text.split("\n\n").filter(|part| !part.starts_with("[model.new]") && !part.starts_with("[sft]"));
        let text = [&["[model]\npath = \"warm/model\""], &kept.collect::<Vec<_>>()[..]].concat().join("\n\n");
        std::fs::write(dir.join(&file), text).expect("written");
    }
    dir
}

/// Whether ranks can be started here.
fn has_mpirun() -> bool {
    let found = Command::new("mpirun").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let there = found.is_ok_and(|status| status.success());
    if !there {
        eprintln!("skipped: there is no mpirun on the path; `cargo xtask test` installs it where it can");
    }
    there
}

/// The arguments of a run of such a recipe.
fn arguments(recipe: &str, run: &str, more: &[&str]) -> Vec<String> {
    let recipe_file = format!("{recipe}.toml");
    let mut args =
        ["train", &recipe_file, "--device", "cpu", "--quiet", "--run", run].map(String::from).to_vec();
    let critic: &[&str] = if recipe == "tiny-ppo" { &["critic.ppo_mini_batch_size=8"] } else { &[] };
    for key in SMALL.iter().chain(critic) {
        args.extend(["--set".to_string(), key.to_string()]);
    }
    args.extend(more.iter().map(|more| more.to_string()));
    args
}

/// Runs it to its end with so many ranks.
fn train(dir: &Path, recipe: &str, run: &str, ranks: usize, more: &[&str]) -> Run {
    let ranks = ranks.to_string();
    let args = arguments(recipe, run, &[&["--ranks", &ranks], more].concat());
    qurl_in(dir, &args.iter().map(String::as_str).collect::<Vec<_>>(), "")
}

fn trained(dir: &Path, recipe: &str, run: &str, ranks: usize, more: &[&str]) -> Outcome {
    let done = train(dir, recipe, run, ranks, more);
    assert_eq!(done.status, 0, "{recipe} on {ranks} ranks: {}", done.stderr);
    Outcome::of(&dir.join(run))
}

/// [`trained`] as others start it.
fn trained_under_mpirun(dir: &Path, recipe: &str, run: &str, ranks: usize, more: &[&str]) -> Outcome {
    let output = Command::new("mpirun")
        .args(["-n", &ranks.to_string(), env!("CARGO_BIN_EXE_qurl")])
        .args(arguments(recipe, run, &[more, &["--json"]].concat()))
        .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
        .envs([("OMPI_MCA_rmaps_base_oversubscribe", "1"), ("OMPI_MCA_hwloc_base_binding_policy", "none")])
        .current_dir(dir)
        .output()
        .expect("mpirun starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let summary: serde_json::Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert_eq!(summary["steps"], 3, "one document, by rank 0: {text}");
    Outcome::of(&dir.join(run))
}

#[test]
fn one_two_and_four_ranks_train_the_same_bits() {
    if !has_mpirun() {
        return;
    }
    let dir = place("runs-ranks", &["tiny-ppo", "tiny-grpo", "tiny-dapo"]);
    for recipe in ["tiny-ppo", "tiny-grpo", "tiny-dapo"] {
        let alone = trained(&dir, recipe, &format!("{recipe}-1"), 1, &["--steps", "3"]);
        assert!(alone.learned(), "{recipe}: nothing was learned");
        for (ranks, stage) in [(2, 1), (2, 3), (4, 1), (4, 3)] {
            let run = format!("{recipe}-{ranks}-{stage}");
            let more = ["--steps", "3", "--set", &format!("trainer.zero_stage={stage}")];
            let found = match (recipe, ranks, stage) {
                ("tiny-grpo", 2, 1) | ("tiny-ppo", 4, 3) => {
                    trained_under_mpirun(&dir, recipe, &run, ranks, &more)
                }
                _ => trained(&dir, recipe, &run, ranks, &more),
            };
            alone.assert_same_training(&found, &run);
            let part = format!("checkpoints/step-3/optimizer-{ranks:05}-of-{ranks:05}.safetensors");
            assert!(dir.join(&run).join(&part).exists(), "{run} has no {part}");
        }
    }
}

/// A process that was started for a run as this rank, found by what the system says of its environment.
fn process_of(run: &Path, rank: usize) -> Option<i32> {
    let wanted = format!("OMPI_COMM_WORLD_RANK={rank}");
    let name = run.file_name()?.to_string_lossy().into_owned();
    std::fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let read = |file: &str| std::fs::read(entry.path().join(file)).unwrap_or_default();
        let has = |bytes: Vec<u8>, text: &str| bytes.split(|&b| b == 0).any(|part| part == text.as_bytes());
        let pid = entry.file_name().to_string_lossy().parse().ok()?;
        (has(read("environ"), &wanted) && has(read("cmdline"), &name)).then_some(pid)
    })
}

fn spawn(dir: &Path, recipe: &str, run: &str, ranks: usize, more: &[&str]) -> Child {
    let ranks = ranks.to_string();
    Command::new(env!("CARGO_BIN_EXE_qurl"))
        .args(arguments(recipe, run, &[&["--ranks", &ranks], more].concat()))
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts")
}

#[test]
fn a_run_whose_rank_was_killed_is_resumed_by_another_number_of_ranks() {
    // Other implementations of MPI name their ranks otherwise; the test looks for those of Open MPI.
    if !has_mpirun() || !cfg!(target_os = "linux") {
        return;
    }
    let dir = place("runs-ranks-killed", &["tiny-ppo"]);
    let more = ["--steps", "20", "--set", "trainer.save_freq=3"];
    let whole = trained(&dir, "tiny-ppo", "whole", 1, &more);
    let run: PathBuf = dir.join("killed");
    let resume = [&more[..], &["--resume"]].concat();
    let mut kills = 0;
    for (ranks, steps, stage) in [(4, 4, 3), (2, 9, 1)] {
        let stage = format!("trainer.zero_stage={stage}");
        let more = [&resume[..], &["--set", &stage]].concat();
        let mut child = spawn(&dir, "tiny-ppo", "killed", ranks, &more);
        let began = Instant::now();
        while lines(&run) < steps && began.elapsed() < Duration::from_secs(120) {
            assert!(child.try_wait().expect("a child").is_none(), "ended before step {steps}");
            std::thread::sleep(Duration::from_millis(1));
        }
        let Some(pid) = process_of(&run, ranks - 1) else {
            child.kill().expect("killed");
            child.wait().expect("ended");
            return eprintln!("skipped: this mpirun does not say which process is which rank");
        };
        let killed = Command::new("kill").args(["-KILL", &pid.to_string()]).status().expect("kill runs");
        assert!(killed.success());
        let output = child.wait_with_output().expect("ended");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{text}");
        assert!(text.contains(&format!("rank {} ", ranks - 1)), "the lost rank is not named: {text}");
        kills += 1;
    }
    assert_eq!(kills, 2);
    assert!(lines(&run) < 20, "nothing is left to resume");
    let resumed = trained(&dir, "tiny-ppo", "killed", 1, &resume);
    whole.assert_same_training(&resumed, "killed twice, on 4, 2 and 1 ranks");
}

#[test]
fn ranks_that_cannot_share_the_work_are_refused_by_name() {
    let dir = place("runs-ranks-refused", &["tiny-grpo"]);
    // Before any rank is started.
    let refused = train(&dir, "tiny-grpo", "a", 4, &["--set", "trainer.shards=2"]);
    refused.assert_bad(&["`trainer.shards` is 2", "4 ranks", "trainer.shards = 8"]);
    let refused = train(&dir, "tiny-grpo", "a", 3, &[]);
    refused.assert_bad(&["`trainer.shards` is 4", "3 ranks", "start 1, 2, 4, 8, ... ranks"]);
    let refused = train(&dir, "tiny-grpo", "a", 1, &["--set", "trainer.shards=6"]);
    refused.assert_bad(&["`trainer.shards` is 6", "a power of two"]);
    let refused = train(&dir, "tiny-grpo", "a", 1, &["--set", "trainer.zero_stage=2"]);
    refused.assert_bad(&["`trainer.zero_stage` is 2", "1 or 3"]);
    let straight = ["--set", "trainer.zero_stage=3", "--set", "trainer.forward=rollout"];
    let refused = train(&dir, "tiny-grpo", "a", 2, &straight);
    refused.assert_bad(&["`trainer.zero_stage` is 3", "1, since blocks that come one at a time"]);
    let workers = "rollout.workers={ listen = \"127.0.0.1:0\" }";
    let refused = train(&dir, "tiny-grpo", "a", 2, &["--set", workers]);
    refused.assert_bad(&["rollout.workers", "runs of one rank", "this one has 2"]);
    assert!(!dir.join("a").exists());
}

#[test]
fn evaluations_and_supervised_training_have_the_same_results_on_ranks() {
    if !has_mpirun() {
        return;
    }
    let dir = directory("runs-ranks-eval");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let recipe = root.join("tiny-grpo.toml").display().to_string();
    let (mut models, mut summaries) = (Vec::new(), Vec::new());
    for ranks in ["1", "2", "4"] {
        let run = format!("sft-{ranks}");
        let set = ["--set", "task.level=1", "--set", "trainer.shards=4", "--set", "sft.warmup_steps=3"];
        let args =
            ["sft", &recipe, "--run", &run, "--steps", "30", "--device", "cpu", "--ranks", ranks, "-q"];
        let done = qurl_in(&dir, &[&args[..], &set].concat(), "");
        assert_eq!(done.status, 0, "{}", done.stderr);
        let outcome = Outcome::of(&dir.join(&run));
        models.push(outcome.weights().to_vec());

        let out = format!("eval-{ranks}");
        let args = ["eval", "--model", "sft-1/model", "--task", "addition:1", "--limit", "30", "--k", "3"];
        let more = ["--max-new", "24", "--device", "cpu", "--ranks", ranks, "--out", &out, "--json"];
        let mut summary = qurl_in(&dir, &[&args[..], &more].concat(), "").json();
        let timed = summary.as_object_mut().expect("an object");
        for key in ["seconds", "tokens_per_s", "responses"] {
            timed.remove(key).expect("a figure that may differ");
        }
        let responses = std::fs::read(dir.join(&out).join("responses.jsonl")).expect("responses");
        summaries.push((summary, responses));
    }
    assert!(models.iter().all(|model| *model == models[0]), "supervised training differs");
    assert!(summaries.iter().all(|summary| *summary == summaries[0]), "evaluations differ");
}
