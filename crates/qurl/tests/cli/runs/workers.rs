//! Rollout workers as processes: they come, die and come back, the trainer dies and is resumed, and the run
//! has the bits of one without workers.

use super::support::{Outcome, lines, place, spawn_with, wait_for};
use crate::common::qurl_with;
use qurl_model::rng::CounterRng;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SECRET: (&str, &str) = ("QURL_WORKER_SECRET", "0123456789abcdef");

/// A port that nobody listens on. All runs of a test take the same one, since it is in their recipes.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").port()
}

/// Overrides of a run with workers, who are forgotten after so many seconds of silence.
fn overrides(port: u16, lease_s: u32, without: &str) -> Vec<String> {
    let workers = format!(
        "rollout.workers={{ listen = \"127.0.0.1:{port}\", lease_s = {lease_s}, spot_check = 0.2, without = \
         \"{without}\" }}"
    );
    let set = [workers.as_str(), "rollout.lag=1", "run.total_steps=6", "trainer.save_freq=2"];
    set.iter().flat_map(|set| ["--set".to_string(), set.to_string()]).collect()
}

fn trainer(dir: &Path, run: &str, set: &[String], more: &[&str]) -> Child {
    let args: Vec<&str> = set.iter().map(String::as_str).chain(more.iter().copied()).collect();
    spawn_with(dir, run, &args, &[SECRET])
}

/// Waits for its end, which must be a good one; what it said.
fn ended(child: Child) -> String {
    let output = child.wait_with_output().expect("ended");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

/// A worker's process, which ends with the test at the latest.
struct Process(Option<Child>);

impl Process {
    fn killed(mut self) {
        self.end();
    }

    fn end(&mut self) {
        if let Some(mut child) = self.0.take() {
            _ = child.kill();
            _ = child.wait();
        }
    }

    /// Whether it has ended with an error.
    fn has_failed(&mut self) -> bool {
        let status = self.0.as_mut().and_then(|child| child.try_wait().expect("a child"));
        status.is_some_and(|status| !status.success())
    }

    /// Waits for its end.
    fn ended(mut self) -> Output {
        self.0.take().expect("a process").wait_with_output().expect("ended")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

fn worker(port: u16) -> Process {
    worker_to("127.0.0.1", port)
}

fn worker_to(host: &str, port: u16) -> Process {
    let child = Command::new(env!("CARGO_BIN_EXE_qurl"))
        .args(["worker", "--join", &format!("http://{host}:{port}"), "--kv-cache-mb", "8", "--json"])
        .args(["--patience", "600"])
        .envs([SECRET, ("QURL_THREADS", "1")])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    Process(Some(child.expect("the command starts")))
}

/// What stands between workers and their trainer, and can cut them off.
struct Wire {
    is_cut: Arc<AtomicBool>,
}

impl Wire {
    /// Where it listens: on the trainer's port, since a trainer answers to no other.
    const HOST: &str = "127.0.0.2";

    /// To a trainer on a port; cut from the moment at which `cuts` is true on, for who comes then.
    fn to(trainer: u16, cuts: impl Fn() -> bool + Send + 'static) -> Wire {
        let listener = TcpListener::bind((Wire::HOST, trainer)).expect("a second loopback address");
        let is_cut = Arc::new(AtomicBool::new(false));
        let cut = is_cut.clone();
        std::thread::spawn(move || {
            let mut may_cut = true;
            for worker in listener.incoming() {
                let Ok(worker) = worker else { return };
                if may_cut && cuts() {
                    (may_cut, _) = (false, cut.store(true, Ordering::SeqCst));
                }
                let trainer = TcpStream::connect(("127.0.0.1", trainer)).ok();
                let Some(trainer) = trainer.filter(|_| !cut.load(Ordering::SeqCst)) else { continue };
                let copy = |from: &TcpStream, to: &TcpStream| {
                    let ends = (from.try_clone().expect("a socket"), to.try_clone().expect("a socket"));
                    std::thread::spawn(move || {
                        let (mut from, mut to) = ends;
                        _ = std::io::copy(&mut from, &mut to);
                        _ = to.shutdown(Shutdown::Write);
                    });
                };
                copy(&worker, &trainer);
                copy(&trainer, &worker);
            }
        });
        Wire { is_cut }
    }
}

/// Three workers, of which one is killed and another one comes every now and then; the trainer, too, once.
/// One worker lives through all of it.
///
/// The trainer is killed in the middle of its run however fast all are: nobody reaches it any more once half
/// of the steps are done, and the rest of them need workers.
fn with_kills(dir: &Path, run: &str, port: u16) -> String {
    let set = overrides(port, 1, "wait");
    let steps = {
        let metrics = dir.join(run);
        move || lines(&metrics)
    };
    let half = steps.clone();
    let wire = Wire::to(port, move || half() >= 3);
    let mut trainer_now = trainer(dir, run, &set, &[]);
    let come = || worker_to(Wire::HOST, port);
    let (mut faithful, mut mortal) = (come(), [come(), come()]);
    let (random, mut kills, mut resumed) = (CounterRng::new(&[2026, 11]), 0, false);
    while trainer_now.try_wait().expect("a child").is_none() {
        assert!(!faithful.has_failed(), "{}", String::from_utf8_lossy(&faithful.ended().stderr));
        std::thread::sleep(Duration::from_millis(20 + random.below_at(2 * kills, 100)));
        if kills < 8 {
            let one = random.below_at(2 * kills + 1, 2) as usize;
            mortal[one] = come(); // the old one is killed
            kills += 1;
        }
        if !resumed && wire.is_cut.load(Ordering::SeqCst) {
            trainer_now.kill().expect("killed");
            trainer_now.wait().expect("ended");
            assert!((3..6).contains(&steps()), "{} steps without workers", steps());
            trainer_now = trainer(dir, run, &set, &["--resume"]);
            wire.is_cut.store(false, Ordering::SeqCst);
            resumed = true;
        }
    }
    let said = ended(trainer_now);
    assert!(resumed, "it ended while workers were cut off: {said}");
    mortal.into_iter().for_each(Process::killed);
    let output = faithful.ended();
    let faithful = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && faithful.contains("the run is over"), "{faithful}");
    let noticed = ["cannot be reached", "has forgotten this worker"];
    assert!(noticed.iter().any(|said| faithful.contains(said)), "its trainer was away: {faithful}");
    format!("{kills} kills: {said}")
}

#[test]
fn workers_die_at_any_moment_and_so_does_the_trainer() {
    let (dir, port) = (place("runs-workers"), free_port());
    ended(trainer(&dir, "alone", &overrides(port, 1, "trainer"), &[]));
    let whole = Outcome::of(&dir.join("alone"));

    // One worker, to the end: it does all of it, and is told when the run is over.
    let run = trainer(&dir, "one", &overrides(port, 60, "wait"), &[]);
    let only = worker(port);
    ended(run);
    let output = only.ended();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("the run is over"), "{said}");
    let done: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(done["prompts"].as_u64() >= Some(6 * 4) && done["whole_versions"] == 1, "{done}");
    assert!(done["changed_versions"].as_u64() > Some(0), "{done}");
    Outcome::of(&dir.join("one")).assert_same_training(&whole, "one worker");

    let what = with_kills(&dir, "three", port);
    Outcome::of(&dir.join("three")).assert_same_training(&whole, &what);
}

/// An HTTP request by hand; the status line, or nothing where the connection was closed.
fn posted(port: u16, head: &str, body: &[u8]) -> String {
    let address: SocketAddr = ([127, 0, 0, 1], port).into();
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    _ = stream.write_all(format!("{head}\r\nContent-Length: {}\r\n\r\n", body.len()).as_bytes());
    _ = stream.write_all(body);
    let mut answer = Vec::new();
    _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_string()
}

#[test]
fn who_does_not_belong_is_refused_and_said_so() {
    let (dir, port) = (place("runs-workers-refused"), free_port());
    let set = overrides(port, 1, "trainer");
    let url = format!("http://127.0.0.1:{port}");
    let join = |url: &str, environment: &[(&str, &str)]| {
        qurl_with(&dir, &["worker", "--join", url, "--patience", "0"], environment, "")
    };
    join(&url, &[("QURL_WORKER_SECRET", "")]).assert_bad(&["QURL_WORKER_SECRET is not set", "16 characters"]);
    join(&url, &[("QURL_WORKER_SECRET", "short")]).assert_bad(&["has 5 bytes"]);
    join("https://127.0.0.1:1", &[SECRET]).assert_bad(&["TLS is left to a proxy"]);
    join("127.0.0.1:1", &[SECRET]).assert_bad(&["expected http://HOST:PORT"]);
    let nobody = join(&url, &[SECRET]);
    let said = ["cannot be reached", "does a trainer listen there"];
    assert!(nobody.status == 1 && said.iter().all(|said| nobody.stderr.contains(said)), "{}", nobody.stderr);
    let arguments: Vec<&str> = set.iter().map(String::as_str).collect();
    let without = [&["train", "tiny.toml", "--run", "x"], &arguments[..]].concat();
    qurl_with(&dir, &without, &[("QURL_WORKER_SECRET", "")], "")
        .assert_bad(&["QURL_WORKER_SECRET is not set"]);
    let wrong = ["--set", "rollout.workers.listen=\"everywhere\""];
    let wrong = [&without[..], &wrong].concat();
    qurl_with(&dir, &wrong, &[SECRET], "").assert_bad(&["rollout.workers.listen", "everywhere"]);

    // A trainer that waits for a worker, and gets anything but one.
    let mut run = trainer(&dir, "waits", &overrides(port, 60, "wait"), &[]);
    wait_for(&mut run, || TcpStream::connect(("127.0.0.1", port)).is_ok());
    let stranger = join(&url, &[("QURL_WORKER_SECRET", "fedcba9876543210")]);
    assert!(stranger.status == 1 && stranger.stderr.contains("secret"), "{}", stranger.stderr);
    let scalar = join(&url, &[SECRET, ("QURL_CPU", "scalar")]);
    assert!(scalar.status == 1 && scalar.stderr.contains("any_device"), "{}", scalar.stderr);
    let key = format!("Authorization: Bearer {}", SECRET.1);
    let post = |route: &str| format!("POST /workers/v1/{route} HTTP/1.1\r\nHost: 127.0.0.1:{port}");
    assert!(posted(port, &post("join"), b"").contains(" 401 "));
    assert!(posted(port, &format!("{}\r\n{key}", post("join")), &[0xff; 99]).contains(" 400 "));
    assert!(posted(port, &format!("{}\r\n{key}", post("report")), &[0; 8]).contains(" 400 "));
    assert!(posted(port, &format!("{}\r\n{key}", post("nothing")), b"").contains(" 404 "));
    let elsewhere = post("join").replace("Host: 127.0.0.1", "Host: evil.example");
    assert!(posted(port, &format!("{elsewhere}\r\n{key}"), b"").contains(" 403 "));
    assert!(run.try_wait().expect("a child").is_none(), "it waits on");
    let one = worker(port);
    let said = ended(run);
    assert!(one.ended().status.success(), "{said}");
}
