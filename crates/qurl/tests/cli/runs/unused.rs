//! Weights that a configuration does not use: told of where they are beside the model, refused where they are
//! part of it.

use super::support::{RECIPE, place};
use crate::common::{Run, qurl_in};
use serde_json::{Value, json};
use std::path::Path;

/// Adds tensors of two numbers to a model's weights.
fn add_tensors(dir: &Path, names: &[&str]) {
    let file = dir.join("model.safetensors");
    let bytes = std::fs::read(&file).expect("weights");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("a header");
    let mut data = bytes[8 + length..].to_vec();
    for name in names {
        header[name] = json!({"dtype": "F32", "shape": [2], "data_offsets": [data.len(), data.len() + 8]});
        data.extend([0; 8]);
    }
    let header = serde_json::to_vec(&header).expect("a header");
    std::fs::write(file, [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat())
        .expect("written");
}

/// Every command that loads a model, on the model in `m`.
fn commands(dir: &Path) -> Vec<Run> {
    let few = ["--set", "sft.steps=2", "--set", "run.total_steps=1", "--quiet"];
    let runs = [
        vec!["generate", "--model", "m", "--max-new", "2", "1+1"],
        vec!["score", "--model", "m"],
        vec!["quantize", "--model", "m", "--format", "int8", "--force", "q"],
        vec!["inspect", "m"],
        vec!["eval", "--model", "m", "--task", "addition:1", "--limit", "2", "--k", "1", "--max-new", "4"],
        vec!["sft", "from-m.toml", "--set", "sft.steps=2"],
        [&["train", "from-m.toml"], &few[..]].concat(),
        [&["compare", "from-m.toml", "--methods", "full"], &few[..]].concat(),
    ];
    runs.iter().map(|args| qurl_in(dir, args, "")).collect()
}

#[test]
fn every_command_tells_of_unused_weights_and_refuses_unused_blocks() {
    let dir = place("unused");
    assert_eq!(qurl_in(&dir, &["sft", "tiny.toml", "--steps", "2", "--run", "made"], "").status, 0);
    std::fs::rename(dir.join("made/model"), dir.join("m")).expect("moved");
    let (new, rest) = (RECIPE.find("[model.new]").expect("a model"), RECIPE.find("[task]").expect("a task"));
    let recipe = format!("{}[model]\npath = \"m\"\n\n{}", &RECIPE[..new], &RECIPE[rest..]);
    std::fs::write(dir.join("from-m.toml"), recipe).expect("written");
    for run in commands(&dir) {
        assert!(run.status == 0 && !run.stderr.contains("warning"), "{}", run.stderr);
    }

    add_tensors(&dir.join("m"), &["visual.a", "visual.b", "visual.c", "visual.d", "visual.e"]);
    for run in commands(&dir) {
        // A recipe's model is named by its whole path.
        let warning = "m: the model does not use 5 tensors: visual.a, visual.b, visual.c and 2 more";
        let said = |line: &str| line.starts_with("warning: ") && line.ends_with(warning);
        assert!(run.status == 0 && run.stderr.lines().any(said), "{}", run.stderr);
        assert_eq!(run.stderr.matches("does not use").count(), 1, "{}", run.stderr);
    }

    let config = dir.join("m/config.json");
    let text = std::fs::read_to_string(&config).expect("a configuration");
    let shorter = text.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1");
    assert_ne!(shorter, text);
    std::fs::write(config, shorter).expect("written");
    for run in commands(&dir) {
        run.assert_bad(&["m: config.json has `num_hidden_layers` = 1", "model.layers.1."]);
    }
}
