//! Whole runs on a GPU that is emulated (`benches/gpu/emulate`), at night: what may change no bit on a GPU,
//! and what its driver refuses.

use super::support::{Outcome, wait_for};
use crate::common::directory;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Heads of 64, which the tensor cores take; every step has a gradient, whatever is rewarded.
const RECIPE: &str = r#"
[model.new]
hidden_size = 128
intermediate_size = 256
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
max_position_embeddings = 64

[task]
type = "synthetic"
kind = "addition"
level = 1

[sft]
steps = 2
batch_size = 4
lr = 4e-3
max_length = 48

[data]
train_batch_size = 2
max_prompt_length = 8
max_response_length = 12

[rollout]
n = 2
format = "int8"
max_num_seqs = 4
kv_cache_mb = 4

[algorithm]
adv_estimator = { type = "grpo" }
entropy_coeff = 0.01

[actor]
lr = 1e-3
ppo_mini_batch_size = 1

[run]
total_steps = 2
test_freq = 0
test_problems = 2

[trainer]
compute = "bf16"
micro_tokens = 256
save_freq = 1
"#;

/// Begins a run on a device of this compute capability, whose work is done as late as `late` says.
fn begin(dir: &Path, run: &str, architecture: &str, late: &str, more: &[&str]) -> Child {
    let emulator = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/gpu/emulate/run.sh");
    Command::new(emulator)
        .args([env!("CARGO_BIN_EXE_qurl"), "train", "tiny.toml", "--device", "cuda", "--run", run])
        .args(more)
        .env("EMULATE_ARCH", architecture)
        .env("EMULATE_LATE", late)
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("bash and g++")
}

/// What comes of a run, which the driver has refused nothing.
fn ended(dir: &Path, run: &str, child: Child) -> Outcome {
    let output = child.wait_with_output().expect("ended");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !said.contains("emulator:"), "{run}: {said}");
    Outcome::of(&dir.join(run))
}

fn place(architecture: &str) -> PathBuf {
    let dir = directory(&format!("runs-emulated-{architecture}"));
    std::fs::write(dir.join("tiny.toml"), RECIPE).expect("written");
    dir
}

/// The same bits with weights packed once, moments on the host, streams, copies and MMAs that are late, and
/// after a kill.
fn check(architecture: &str) {
    let compiler = || Command::new("g++").arg("--version").output().is_ok_and(|out| out.status.success());
    if std::env::var_os("QURL_NIGHTLY").is_none() || !cfg!(target_arch = "x86_64") || !compiler() {
        eprintln!("skipped: QURL_NIGHTLY runs it, with g++ on x86-64");
        return;
    }
    let dir = place(architecture);
    let run = |name: &str, late: &str, more: &[&str]| {
        ended(&dir, name, begin(&dir, name, architecture, late, more))
    };
    let plain = run("plain", "0", &[]);
    assert!(plain.learned(), "no step has a gradient");
    let elsewhere = ["--set", "trainer.pack_once=true", "--set", "actor.optim.offload=true"];
    run("elsewhere", "15", &elsewhere).assert_same_training(&plain, "packed once, offloaded, late");
    let mut killed = begin(&dir, "killed", architecture, "4", &[]);
    assert!(wait_for(&mut killed, || dir.join("killed/checkpoints/step-1").exists()), "it ended first");
    killed.kill().expect("killed");
    killed.wait().expect("ended");
    run("killed", "4", &["--resume"]).assert_same(&plain, "killed and resumed, late");
}

#[test]
fn runs_on_every_tensor_core() {
    check("80");
}

#[test]
fn runs_on_hopper() {
    check("90");
}
