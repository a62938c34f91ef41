//! How ranks are started and stopped: `--ranks` beside other launchers and without `mpirun`, signals,
//! variables that are wrong.

use super::support::{Outcome, lines, place, wait_for};
use crate::common::{Run, qurl_with};
use std::path::Path;
use std::process::{Command, Stdio};

const TORCHRUN: [(&str, &str); 4] =
    [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")];

fn train(dir: &Path, variables: &[(&str, &str)], more: &[&str]) -> Run {
    let args = ["train", "tiny.toml", "--run", "run", "--device", "cpu", "--set", "trainer.shards=2"];
    qurl_with(dir, &[&args[..], more].concat(), variables, "")
}

#[test]
fn what_cannot_start_says_what_is_missing() {
    let dir = place("runs-launched-refused");
    train(&dir, &TORCHRUN, &["--ranks", "2"]).assert_bad(&["--ranks 2", "torchrun", "rank 0 of 2"]);
    train(&dir, &TORCHRUN[..2], &[]).assert_bad(&["LOCAL_RANK is not set, but RANK=0 is"]);
    train(&dir, &[("WORLD_SIZE", "4")], &[]).assert_bad(&["RANK is not set, but WORLD_SIZE=4 is"]);
    let nowhere = train(&dir, &[("PATH", "/nowhere")], &["--ranks", "2"]);
    nowhere.assert_bad(&["--ranks 2", "mpirun", "openmpi-bin"]);
    let by_torchrun = train(&dir, &TORCHRUN, &[]);
    assert_eq!(by_torchrun.status, 1, "{}", by_torchrun.stderr);
    assert!(
        by_torchrun.stderr.contains("ranks that compute on a CPU exchange by MPI"),
        "{}",
        by_torchrun.stderr
    );
    let open_mpi = [
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ("QURL_MPI", "/nowhere/libmpi.so"),
    ];
    let no_library = train(&dir, &open_mpi, &[]);
    assert_eq!(no_library.status, 1, "{}", no_library.stderr);
    assert!(
        no_library.stderr.contains("MPI cannot be used: QURL_MPI=/nowhere/libmpi.so"),
        "{}",
        no_library.stderr
    );
    train(&dir, &[&open_mpi[..], &[("QURL_RANK_TIMEOUT", "0")]].concat(), &[])
        .assert_bad(&["QURL_RANK_TIMEOUT"]);
    assert!(!dir.join("run").exists());
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

#[test]
fn ranks_that_would_not_train_the_same_are_refused_by_what_differs() {
    if !has_mpirun() {
        return;
    }
    let dir = place("runs-launched-differ");
    let rank = |more: &[&str]| -> Vec<String> {
        let train = ["-n", "1", env!("CARGO_BIN_EXE_qurl"), "train", "tiny.toml", "--run", "run"];
        let args = [&train[..], &["--device", "cpu", "--set", "trainer.shards=2"], more].concat();
        args.into_iter().map(String::from).collect()
    };
    let output = Command::new("mpirun")
        .args(rank(&[]))
        .arg(":")
        .args(rank(&["--set", "actor.lr=2e-3"]))
        .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
        .envs([("OMPI_MCA_rmaps_base_oversubscribe", "1"), ("OMPI_MCA_hwloc_base_binding_policy", "none")])
        .current_dir(&dir)
        .output()
        .expect("mpirun starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("the ranks differ in key `actor.lr`: 0.002 on rank 1, 0.001 on rank 0"), "{said}");
    assert!(!dir.join("run").exists());
}

#[test]
fn ctrl_c_at_ranks_saves_and_the_run_resumes_with_the_same_bits() {
    if !has_mpirun() {
        return;
    }
    let dir = place("runs-launched-stopped");
    let command = |run: &str, more: &[&str]| {
        let args = ["train", "tiny.toml", "--run", run, "--device", "cpu", "--set", "trainer.shards=2"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_qurl"));
        command
            .args(args)
            .args(["--set", "trainer.save_freq=0", "--steps", "60"])
            .args(more)
            .current_dir(&dir);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    };
    let run = dir.join("stopped");
    let mut child = command("stopped", &["--ranks", "2"]).spawn().expect("the command starts");
    assert!(wait_for(&mut child, || lines(&run) >= 3));
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs");
    assert!(kill.success());
    let output = child.wait_with_output().expect("ended");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    // What came, not the SIGUSR1 that mpirun hands on.
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert_eq!(said.matches("stopped after step").count(), 1, "{said}");
    let done = lines(&run);
    assert!((3..60).contains(&done), "{done} steps: {said}");
    assert!(said.contains(&format!("stopped after step {done};")), "{said}");
    assert!(run.join(format!("checkpoints/step-{done}/manifest.json")).exists());
    for (name, more) in [("stopped", &["--resume"][..]), ("whole", &[])] {
        let output = command(name, more).output().expect("the command starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(Outcome::of(&run).weights(), Outcome::of(&dir.join("whole")).weights());
}
