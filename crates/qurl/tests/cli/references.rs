//! Reference runs: a few steps of the default and the tiny recipes give the losses, rewards and weights that
//! are committed in `references/`, bit for bit, at the level of instructions of the machine (at night all
//! levels, and the default). The files are written by `benches/references.sh`; those of a GPU are compared by
//! hand, by the same script.

use crate::common::{directory, qurl_with};
use qurl_kernels::cpu::level::Level;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/cli/references/{name}.json"))
}

/// What a recipe's run at a level gives.
fn traced(dir: &Path, recipe: &str, level: &str) -> Value {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../recipes/{recipe}.toml"));
    let file = file.display().to_string();
    let run = format!("{recipe}-{level}");
    let mut args = vec!["train", file.as_str(), "--device", "cpu", "--quiet", "--run", run.as_str()];
    args.extend(["--steps", "3", "--set", "sft.steps=120", "--set", "sft.batch_size=16"]);
    args.extend(["--set", "task.level=1", "--set", "run.test_problems=8"]);
    let done = qurl_with(dir, &args, &[("QURL_CPU", level)], "");
    assert_eq!(done.status, 0, "{}", done.stderr);
    let text = std::fs::read_to_string(dir.join(&run).join("metrics.jsonl")).expect("metrics");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("a record")).collect();
    let column = |key: &str| lines.iter().map(|line| line[key].clone()).collect::<Vec<Value>>();
    let mut crc = flate2::Crc::new();
    crc.update(&std::fs::read(dir.join(&run).join("model/model.safetensors")).expect("a model"));
    json!({"loss": column("loss"), "reward": column("reward"), "model_crc32": format!("{:08x}", crc.sum())})
}

#[test]
fn recipes_have_the_bits_that_are_committed() {
    let dir = directory("references");
    let named = |level| match level {
        Level::Scalar => "scalar",
        Level::Avx2 => "avx2",
        Level::Avx512 => "avx512-without-bf16",
        Level::Avx512Bf16 => "avx512",
    };
    let at_night = std::env::var_os("QURL_NIGHTLY").is_some();
    let levels = Level::available().into_iter().filter(|&level| level == Level::best() || at_night);
    for name in levels.map(named) {
        let text = std::fs::read_to_string(file(name)).expect("reference runs of every level");
        let expected: Value = serde_json::from_str(&text).expect("JSON");
        let recipes = expected.as_object().expect("recipes").iter();
        for (recipe, expected) in recipes.filter(|(recipe, _)| at_night || *recipe != "default") {
            let found = traced(&dir, recipe, name);
            assert!(
                found == *expected,
                "{recipe} at level {name} has other bits than {}:\n{found}\ninstead of\n{expected}\nA change of \
                 bits is named in CHANGELOG.md, and the files are made anew by benches/references.sh.",
                file(name).display()
            );
        }
    }
}
