//! Runs on files of problems: too long prompts, few held-out problems, files that change, a reward command
//! and Ctrl-C.

use super::support::place;
use crate::common::{qurl_in, tiny_model};
use std::fmt::Write;
use std::path::Path;

/// A recipe on files of problems.
pub const RECIPE: &str = r#"
[model]
path = "model"

[task]
type = "dataset"
files = ["train.jsonl"]
test_files = ["test.jsonl"]

[data]
train_batch_size = 2
max_prompt_length = 8
max_response_length = 8

[rollout]
n = 2
kv_cache_mb = 4

[algorithm]
adv_estimator = { type = "grpo" }

[actor]
lr = 1e-4
ppo_mini_batch_size = 2

[run]
total_steps = 2
test_problems = 50

[trainer]
compute = "f32"
save_freq = 1
"#;

/// Sums from `first` on, and one with a long problem.
pub fn write_sums(file: &Path, first: usize, count: usize, long: bool) {
    let mut text = String::new();
    for a in first..first + count {
        writeln!(text, r#"{{"problem": "{a}+1=", "answer": "{}"}}"#, a + 1).expect("text");
    }
    if long {
        writeln!(text, r#"{{"problem": "{}=", "answer": "20"}}"#, ["1"; 20].join("+")).expect("text");
    }
    std::fs::write(file, text).expect("written");
}

/// A model with a context of 128 tokens, trained on longer sequences because the recipe asks for them.
#[test]
fn positions_beyond_the_models_own_are_used_only_when_asked_for() {
    let dir = place("runs-context");
    tiny_model(&dir.join("model"), "0123456789+=");
    std::fs::write(dir.join("data.toml"), RECIPE).expect("written");
    // Every problem is longer than the model's own context.
    let long = |a: usize| format!("{{\"problem\": \"{}+{a}=\", \"answer\": \"1\"}}\n", "7".repeat(200));
    std::fs::write(dir.join("train.jsonl"), (0..12).map(long).collect::<String>()).expect("written");
    write_sums(&dir.join("test.jsonl"), 20, 2, false);
    let train = |run: &str, more: &[&str]| {
        let base = ["train", "data.toml", "--run", run, "--set", "data.max_prompt_length=240"];
        qurl_in(&dir, &[&base[..], more].concat(), "")
    };
    train("none", &[]).assert_bad(&[
        "data.max_response_length",
        "248",
        "128",
        "model.max_position_embeddings",
    ]);
    train("none", &["--set", "model.max_position_embeddings=64"]).assert_bad(&[
        "`model.max_position_embeddings` is 64",
        &format!("at least the 128 of {}", dir.join("model/config.json").display()),
    ]);
    train("none", &["--set", "model.max_position_embeddings=200"]).assert_bad(&["248", "200"]);
    assert!(!dir.join("none").exists());

    let done = train("run", &["--set", "model.max_position_embeddings=256"]);
    assert_eq!(done.status, 0, "{}", done.stderr);
    let note = "model/config.json has max_position_embeddings = 128; the recipe asks for 256";
    assert!(done.stderr.contains(note), "{}", done.stderr);
    assert!(!done.stderr.contains("left out"), "{}", done.stderr);
    // What was saved has the new context and says so itself: nothing is left to note, and it resumes from
    // there.
    let saved = ["--set", "model.path=run/model"];
    let done = train("next", &saved);
    assert_eq!(done.status, 0, "{}", done.stderr);
    assert!(!done.stderr.contains("max_position_embeddings"), "{}", done.stderr);
    // A run that is resumed reads the model's own files again.
    let more = ["--set", "model.max_position_embeddings=256", "--resume", "--steps", "3"];
    assert_eq!(train("run", &more).status, 0);
}

#[test]
fn long_prompts_are_left_out_and_held_out_problems_counted_once() {
    let dir = place("runs-data");
    tiny_model(&dir.join("model"), "0123456789+=");
    std::fs::write(dir.join("data.toml"), RECIPE).expect("written");
    write_sums(&dir.join("train.jsonl"), 0, 12, true);
    write_sums(&dir.join("test.jsonl"), 20, 5, false);
    let train = |run: &str, more: &[&str]| {
        qurl_in(&dir, &[&["train", "data.toml", "--run", run][..], more].concat(), "")
    };
    let done = train("run", &[]);
    assert_eq!(done.status, 0, "{}", done.stderr);
    assert!(
        done.stderr.contains("1 problems to train on and 0 held-out ones are left out"),
        "{}",
        done.stderr
    );
    assert!(done.stderr.contains("of 5 held-out problems"), "{}", done.stderr);

    // Other problems would make it another run.
    write_sums(&dir.join("train.jsonl"), 0, 11, true);
    train("run", &["--resume", "--steps", "3"]).assert_bad(&["problems", "changed"]);
    write_sums(&dir.join("train.jsonl"), 0, 12, true);
    assert_eq!(train("run", &["--resume", "--steps", "3"]).status, 0);

    // Test problems are left out of training, be it inside of a template.
    let wrapped = "20+1= Let's think step by step and output the final answer within \\\\boxed{}.";
    let mut text = std::fs::read_to_string(dir.join("train.jsonl")).expect("problems");
    writeln!(text, r#"{{"problem": "{wrapped}", "answer": "21"}}"#).expect("text");
    std::fs::write(dir.join("wrapped.jsonl"), text).expect("written");
    let done = train("wrapped", &["--set", "task.files=['wrapped.jsonl']"]);
    assert_eq!(done.status, 0, "{}", done.stderr);
    assert!(done.stderr.contains("1 problems to train on are left out: they are among"), "{}", done.stderr);

    // Nothing left to train on, or to measure on: what took the problems away is said.
    for (change, message) in [
        (
            "data.max_prompt_length=1",
            "data.toml, line 7: key `task.files` leaves no problem to train on: 13 have prompts of more than \
             data.max_prompt_length = 1 tokens",
        ),
        (
            "task.files=['test.jsonl']",
            "--set task.files=['test.jsonl']: key `task.files` leaves no problem to train on: 5 are among \
             those of task.test_files",
        ),
        (
            "task.test_files=[]",
            "--set task.test_files=[]: key `task.test_files` leaves no problem to measure on: give \
             task.test_files, or hold out a share of task.files with task.held_out",
        ),
        (
            "task={ type = 'dataset', files = ['train.jsonl'], held_out = 0 }",
            "--set task={ type = 'dataset', files = ['train.jsonl'], held_out = 0 }: key `task.test_files` \
             leaves no problem to measure on: give task.test_files, or hold out a share of task.files with \
             task.held_out",
        ),
    ] {
        let said = train("none", &["--set", change]);
        said.assert_bad(&[]);
        assert_eq!(said.stderr.lines().last(), Some(format!("qurl: {message}").as_str()));
    }
    assert!(!dir.join("none").exists());
}

/// A terminal sends Ctrl-C to every process of its group; the reward command must outlive it until the step
/// is done.
#[cfg(unix)]
#[test]
fn a_reward_command_survives_the_interrupt_that_ends_the_run() {
    use super::support::wait_for;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    let dir = place("runs-reward");
    tiny_model(&dir.join("model"), "0123456789+=");
    let task = "[task]\ntype = \"command\"\ncommand = [\"sh\", \"-c\", \"while read -r line; do sleep 0.02; \
                echo 0.5; done\"]\n\n[task.source]\n";
    let recipe = RECIPE.replace("[task]\n", task).replace("total_steps = 2", "total_steps = 100000");
    std::fs::write(dir.join("data.toml"), recipe.replace("test_problems = 50", "test_problems = 1"))
        .expect("written");
    write_sums(&dir.join("train.jsonl"), 0, 12, false);
    write_sums(&dir.join("test.jsonl"), 20, 5, false);
    let mut child = Command::new(env!("CARGO_BIN_EXE_qurl"))
        .args(["train", "data.toml", "--run", "run"])
        .current_dir(&dir)
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .expect("the command starts");
    assert!(wait_for(&mut child, || dir.join("run/checkpoints/step-2").exists()));
    let group = format!("-{}", child.id());
    assert!(Command::new("kill").args(["-INT", "--", &group]).status().expect("kill").success());
    let ended = child.wait_with_output().expect("ended");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(130), "{said}");
    assert!(said.contains("resume with"), "{said}");
}
