//! A stage with a new reference and new optimizers, and checkpoints around its start: the same bits however
//! the run is cut.

use super::support::{Outcome, place, trained};

const STAGES: &str = "run.stages=[{ from_step = 6, max_response_length = 20, n = 2, new_reference = true, \
                      new_optimizer = true }, { from_step = 9, max_response_length = 24 }]";

#[test]
fn a_run_cut_around_a_stage_has_the_same_bits() {
    let dir = place("runs-stages");
    let settings = ["--set", STAGES, "--set", "trainer.save_freq=1", "--set", "run.test_freq=0"];
    let run = |name: &str, more: &[&str]| trained(&dir, name, &[&settings[..], more].concat());
    run("whole", &["--steps", "10"]);
    let whole = Outcome::of(&dir.join("whole"));
    // The last checkpoint before the stage, its first step, and one later.
    for steps in ["5", "6", "7"] {
        let name = format!("cut-{steps}");
        run(&name, &["--steps", steps]);
        run(&name, &["--resume", "--steps", "10"]);
        assert_eq!(Outcome::of(&dir.join(&name)).weights(), whole.weights(), "cut after step {steps}");
        let reference = |run: &str| {
            let path = dir.join(run).join("checkpoints/step-10/reference.safetensors");
            std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
        };
        assert!(reference(&name) == reference("whole"), "cut after step {steps}: the reference");
    }
    // Without the new reference and optimizers it is another run.
    let plain = "run.stages=[{ from_step = 6, max_response_length = 20, n = 2 }, \
                 { from_step = 9, max_response_length = 24 }]";
    run("plain", &["--set", plain, "--steps", "10"]);
    assert_ne!(Outcome::of(&dir.join("plain")).weights(), whole.weights());
}
