//! Runs killed at any moment, and what comes of them.

use super::support::{Outcome, lines, place, spawn, trained, wait_for};
use qurl_model::rng::CounterRng;
use std::path::Path;
use std::time::Instant;

#[test]
fn same_recipe_and_seed_same_bits() {
    let dir = place("runs-same");
    trained(&dir, "a", &[]);
    trained(&dir, "b", &[]);
    let (a, b) = (Outcome::of(&dir.join("a")), Outcome::of(&dir.join("b")));
    a.assert_same(&b, "the same run twice");
    trained(&dir, "c", &["--set", "trainer.seed=2"]);
    assert_ne!(a.weights(), Outcome::of(&dir.join("c")).weights(), "another seed is another run");
}

/// Names of checkpoints that are being written.
fn in_the_writing(run: &Path) -> Option<String> {
    let entries = std::fs::read_dir(run.join("checkpoints")).ok()?;
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.into_iter().find(|name| name.starts_with(".step-") && name.ends_with(".part"))
}

/// The first moment is the very beginning; of the others (84 at night, then with 100 kills) two thirds are
/// anywhere in the run, one third in the middle of writing a checkpoint. Some of the runs are killed a second
/// time.
#[test]
fn kills_at_any_moment_change_nothing() {
    let dir = place("runs-killed");
    let began = Instant::now();
    trained(&dir, "whole", &[]);
    let length = began.elapsed();
    let whole = Outcome::of(&dir.join("whole"));
    let random = CounterRng::new(&[2026, 30]);
    let (mut before_first_step, mut while_writing, mut kills) = (0, 0, 0);
    let moments = if std::env::var_os("QURL_NIGHTLY").is_some() { 84 } else { 10 };
    for moment in 0..moments {
        let name = format!("killed-{moment}");
        let run = dir.join(&name);
        let times = if moment % 5 == 4 { 2 } else { 1 };
        for time in 0..times {
            let mut share = if moment == 0 { 0.0 } else { random.uniform_f64_at(2 * moment + time) };
            // A run that is faster than the first may be over before the moment comes: then it is tried
            // earlier.
            loop {
                let mut child = spawn(&dir, &name, &["--resume"]);
                if moment % 3 == 2 {
                    let step = (share * 20.0) as usize;
                    wait_for(&mut child, || lines(&run) >= step && in_the_writing(&run).is_some());
                } else {
                    std::thread::sleep(length.mul_f64(share));
                }
                child.kill().expect("killed");
                if child.wait().expect("ended").code().is_none() {
                    break;
                }
                share *= 0.5;
                if time == 0 {
                    std::fs::remove_dir_all(&run).expect("removed");
                } else {
                    break;
                }
            }
            kills += 1;
            before_first_step += usize::from(lines(&run) == 0);
            while_writing += usize::from(in_the_writing(&run).is_some());
        }
        trained(&dir, &name, &["--resume"]);
        Outcome::of(&run).assert_same(&whole, &format!("killed at moment {moment}"));
        std::fs::remove_dir_all(&run).expect("removed");
    }
    println!(
        "{kills} kills in runs of {length:?}: {before_first_step} before the first step, {while_writing} \
         while a checkpoint was being written"
    );
    assert!(kills >= moments && before_first_step > 0 && while_writing > 0);
}
