//! `qurl recipe`, and what recipes say about files: where their paths lead, and what is said where they lead
//! nowhere.

use crate::common::{Run, directory, qurl, qurl_in, qurl_with, tiny_model};
use std::path::{Path, PathBuf};

/// A directory with a tiny model and problems in it.
fn place(name: &str) -> PathBuf {
    let dir = directory(name).canonicalize().expect("a directory");
    tiny_model(&dir.join("model"), "0123456789+=");
    let sums = |from: usize, count: usize| -> String {
        (from..from + count)
            .map(|a| format!("{{\"problem\": \"{a}+1=\", \"answer\": \"{}\"}}\n", a + 1))
            .collect()
    };
    std::fs::write(dir.join("train.jsonl"), sums(0, 12)).expect("written");
    std::fs::write(dir.join("test.jsonl"), sums(10, 5)).expect("written");
    dir
}

const RECIPE: &str = r#"[model]
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
test_problems = 5

[trainer]
compute = "f32"
save_freq = 1
"#;

/// Bad input with exactly this message at the end.
fn assert_says(run: &Run, message: &str) {
    run.assert_bad(&[]);
    assert_eq!(run.stderr.lines().last(), Some(format!("qurl: {message}").as_str()), "{}", run.stderr);
}

/// All files under a directory.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

#[test]
fn the_reference_in_the_documentation_is_the_programs() {
    let page = qurl(&["recipe", "--markdown"], "").stdout;
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/recipe.md");
    let committed = std::fs::read_to_string(file).expect("docs/recipe.md");
    let renew = "docs/recipe.md is not what the program prints; renew it with `cargo run -- recipe \
                 --markdown > docs/recipe.md`";
    assert!(page == committed, "{renew}");
}

#[test]
fn a_key_a_section_or_a_name_is_explained() {
    let all = qurl(&["recipe", "--json"], "").json();
    assert!(all.as_array().is_some_and(|keys| keys.len() > 120));
    let one = qurl(&["recipe", "rollout.n", "--json"], "").json();
    let n = &one[0];
    assert_eq!((n["key"].as_str(), n["default"].as_str()), (Some("rollout.n"), Some("1")));
    assert_eq!(n["range"], "a whole number from 1 to 65536");
    let text = qurl(&["recipe", "rollout.n"], "").stdout;
    assert_eq!(
        text,
        "  rollout.n: a whole number from 1 to 65536; default 1\n      \
         Responses to each prompt. Estimators that compare within a group need at least 2.\n"
    );
    for section in ["actor", "[actor]"] {
        let keys = qurl(&["recipe", section], "").stdout;
        assert!(keys.starts_with("[actor]\n") && keys.contains("  actor.optim.beta2: "), "{keys}");
        assert!(!keys.contains("critic.lr"), "{keys}");
    }
    let named = qurl(&["recipe", "lr"], "").stdout;
    for key in ["sft.lr: ", "actor.lr: ", "critic.lr: "] {
        assert!(named.contains(key), "{named}");
    }
    let none = qurl(&["recipe", "rolout.n"], "");
    assert_says(&none, "there is no key or section `rolout.n` in recipes; did you mean `rollout.n`?");
    let schema = qurl(&["recipe", "schema", "--json"], "").json();
    assert_eq!(schema["properties"]["rollout"]["properties"]["n"]["maximum"], 65536);
}

#[test]
fn a_new_recipe_runs_as_it_is() {
    let dir = place("recipe-init");
    for algorithm in ["grpo", "ppo", "dapo"] {
        let file = format!("{algorithm}.toml");
        let args = ["--model", "model", "--data", "train.jsonl", "--algorithm", algorithm, "--out", &file];
        let made = qurl_in(&dir, &[&["recipe", "init"], &args[..]].concat(), "");
        assert_eq!(made.status, 0, "{}", made.stderr);
        assert_eq!(
            qurl_in(&dir, &[&["recipe", "init"], &args[..]].concat(), "").status,
            2,
            "nothing is overwritten"
        );
        let text = std::fs::read_to_string(dir.join(&file)).expect("a recipe");
        assert!(text.contains("# Prompts of a step"), "{text}");
        let checked = qurl_in(&dir, &["recipe", "check", &file, "--json"], "").json();
        assert_eq!(checked["warnings"], serde_json::json!([]), "{checked}");
        let run = format!("run-{algorithm}");
        let short = [
            "--steps",
            "1",
            "--set",
            "data.max_response_length=8",
            "--set",
            "algorithm.overlong_buffer={len=2}",
        ];
        let done = qurl_in(&dir, &[&["train", &file, "--run", &run][..], &short].concat(), "");
        assert_eq!(done.status, 0, "{algorithm}: {}", done.stderr);
    }
    let missing = qurl_in(&dir, &["recipe", "init", "--model", "model", "--data", "no.jsonl"], "");
    assert_says(&missing, "--data no.jsonl: there is no such file");
    let reward = |more: &[&str]| {
        let base = ["recipe", "init", "--model", "model", "--data", "train.jsonl", "--reward"];
        qurl_in(&dir, &[&base[..], more].concat(), "")
    };
    assert_says(&reward(&["no.py"]), "--reward no.py: there is no such file");
    assert_says(
        &reward(&["train.jsonl", "--algorithm", "sft"]),
        "--reward: supervised training has no rewards",
    );
    let place = dir.join("train.jsonl");
    let program = reward(&["train.jsonl"]).stdout;
    assert!(
        program.contains("\n[[task.rewards]]\n") && program.contains(&format!("\ncommand = [{place:?}]\n")),
        "{program}"
    );
    let new = qurl_in(&dir, &["recipe", "init", "--json"], "").json();
    std::fs::write(dir.join("new.toml"), new["recipe"].as_str().expect("a recipe")).expect("written");
    let short = ["--steps", "1", "--set", "sft.steps=30", "--set", "run.test_problems=4", "--run", "run-new"];
    let done = qurl_in(&dir, &[&["train", "new.toml"], &short[..]].concat(), "");
    assert_eq!(done.status, 0, "{}", done.stderr);
}

#[test]
fn a_new_recipe_of_supervised_training_runs_as_it_is() {
    let dir = place("recipe-init-sft");
    let row = |a: usize| format!("{{\"prompt\": \"{a}+1=\", \"completion\": \"{}\"}}\n", a + 1);
    std::fs::write(dir.join("few.jsonl"), (0..12).map(row).collect::<String>()).expect("written");
    std::fs::write(dir.join("many.jsonl"), (0..210).map(row).collect::<String>()).expect("written");
    let init = |more: &[&str]| {
        let base = ["recipe", "init", "--algorithm", "sft", "--model", "model"];
        let made = qurl_in(&dir, &[&base, more].concat(), "");
        assert_eq!(made.status, 0, "{}", made.stderr);
        made
    };
    let made = init(&["--data", "few.jsonl", "--test", "many.jsonl", "--out", "few.toml"]);
    assert!(made.stderr.contains("start it with `qurl sft few.toml`"), "{}", made.stderr);
    let text = std::fs::read_to_string(dir.join("few.toml")).expect("a recipe");
    assert!(text.starts_with("# Supervised training.") && !text.contains("[task]"), "{text}");
    let checked = qurl_in(&dir, &["recipe", "check", "few.toml"], "");
    // All of the few are among the many to validate on.
    checked.assert_bad(&[
        "key `sft.files` leaves no example to learn: 12 are among those of sft.validation_files",
    ]);

    init(&["--data", "many.jsonl", "--out", "many.toml"]);
    let checked = qurl_in(&dir, &["recipe", "check", "many.toml", "--json"], "").json();
    assert_eq!(checked["warnings"], serde_json::json!([]), "{checked}");
    assert!(checked.get("problems").is_none(), "{checked}");
    let sft = &checked["supervised"];
    assert_eq!((sft["steps"].as_u64(), sft["batch_size"].as_u64()), (Some(20), Some(32)), "3 epochs");
    let (learned, validated) = (sft["examples"].as_u64(), sft["validation"].as_u64());
    assert!(validated > Some(0) && learned.zip(validated).map(|(a, b)| a + b) == Some(210), "{checked}");
    assert_eq!(checked["time_of_a_step"][1]["of"], "sequences", "{checked}");
    let done = qurl_in(&dir, &["sft", "many.toml", "--steps", "2", "--run", "run"], "");
    assert_eq!(done.status, 0, "{}", done.stderr);

    let new = qurl_in(&dir, &["recipe", "init", "--algorithm", "sft"], "").stdout;
    std::fs::write(dir.join("new.toml"), new).expect("written");
    let few = ["--steps", "15", "--run", "run-new", "--set", "sft.test_problems=4"];
    let done = qurl_in(&dir, &[&["sft", "new.toml"], &few[..]].concat(), "");
    assert_eq!(done.status, 0, "{}", done.stderr);
    // A new model without a task has no alphabet.
    let alone = "model.new={ hidden_size = 32, intermediate_size = 64, num_hidden_layers = 1, \
                 num_attention_heads = 2, num_key_value_heads = 1, max_position_embeddings = 64 }";
    let path = RECIPE.replace("[model]\npath = \"model\"\n", "");
    let sections = path.find("[task]").expect("a task");
    let text = format!(
        "{}[sft]\nfiles = [\"few.jsonl\"]\nsteps = 1\nbatch_size = 1\nlr = 1e-3\n",
        &path[..sections]
    );
    std::fs::write(dir.join("alone.toml"), text).expect("written");
    assert_says(
        &qurl_in(&dir, &["sft", "alone.toml", "--set", alone], ""),
        "key `model.new`: a new model takes its alphabet from the task, and there is no [task]; give one, or \
         `model.path` instead",
    );
}

#[test]
fn a_recipe_is_looked_at_without_a_run() {
    let dir = place("recipe-check");
    std::fs::write(dir.join("mine.toml"), RECIPE).expect("written");
    for (file, long) in [("train.jsonl", "1000000+1="), ("test.jsonl", "2000000+1=")] {
        let text = std::fs::read_to_string(dir.join(file)).expect("problems");
        let text = format!("{text}{{\"problem\": \"{long}\", \"answer\": \"0\"}}\n");
        std::fs::write(dir.join(file), text).expect("written");
    }
    let before = files(&dir);
    let checked = qurl_in(&dir, &["recipe", "check", "mine.toml", "--json"], "").json();
    let problems = &checked["problems"];
    assert_eq!((problems["train"].as_u64(), problems["overlaps"].as_u64()), (Some(10), Some(2)), "{checked}");
    assert_eq!(
        (problems["too_long_train"].as_u64(), problems["too_long_test"].as_u64()),
        (Some(1), Some(1)),
        "{checked}"
    );
    let rl = &checked["reinforcement"];
    assert_eq!(
        (rl["responses"].as_u64(), rl["max_tokens"].as_u64(), rl["updates"].as_u64()),
        (Some(4), Some(32), Some(1))
    );
    let parts = checked["memory"].as_array().expect("parts");
    assert!(parts.iter().any(|part| part["part"] == "rollout: keys and values, buffers"), "{checked}");
    let text = qurl_in(&dir, &["recipe", "check", "mine.toml", "--set", "actor.lr=1000"], "").stdout;
    for line in [
        "problems: 10 to train on, 5 held out",
        "left out: 2 that are among the test problems; too long are 1 to train on and 1 held out",
        "reinforcement learning: 2 steps of 2 prompts, 4 responses (at most 32 tokens) and 1 updates",
        "warning: --set actor.lr=1000: key `actor.lr` is 1000: learning rates above 0.1 are hardly ever \
         meant",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}: {text}");
    }
    assert_eq!(files(&dir), before, "nothing is written");

    // A reward command is not started: it would leave a trace.
    let command = |program: &str| {
        let source = "{ type = \"synthetic\", kind = \"addition\", level = 1 }";
        let task = format!("task={{ type = \"command\", command = {program}, source = {source} }}");
        qurl_in(&dir, &["recipe", "check", "mine.toml", "--set", &task, "--json"], "").json()["warnings"]
            .clone()
    };
    assert_eq!(command("[\"touch\", \"trace\"]"), serde_json::json!([]));
    assert_eq!(files(&dir), before, "nothing is started");
    let warning = command("[\"./reward.py\"]")[0].as_str().expect("a warning").to_string();
    assert!(
        warning.ends_with("key `task.command` names the program \"./reward.py\", which is not there"),
        "{warning}"
    );
}

/// The estimate has all phases of a step; beside it, for whoever reads along, what two steps really take.
#[test]
fn the_time_of_a_step_is_estimated() {
    let dir = directory("recipe-time").canonicalize().expect("a directory");
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/tiny-grpo.toml");
    let set = ["--device", "cpu", "--set", "sft.steps=30", "--set", "run.test_problems=2"];
    let text = qurl_in(&dir, &[&["recipe", "check", file], &set[..]].concat(), "").stdout;
    let lines: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("time of a step: ")).collect();
    assert_eq!(
        lines[0],
        "time of a step: estimated from a short measurement on this device, within a factor of two or so"
    );
    for (line, begins) in lines[1..].iter().zip([
        "  sequences of 32 tokens: ",
        "  sequences of 64 tokens: ",
        "  responses of 16 tokens: ",
        "  responses of 32 tokens: ",
    ]) {
        let phases: &[&str] = match begins.contains("sequences") {
            true => &["(learn ", ", update "],
            false => &["(quantize ", ", rollout ", ", score ", ", update "],
        };
        assert!(line.starts_with(begins) && phases.iter().all(|phase| line.contains(phase)), "{text}");
    }
    assert_eq!(
        lines[5],
        "  not counted: rewards, evaluations, checkpoints; `qurl train FILE --steps 2` measures all"
    );
    let steps = ["--set", "actor.lr_warmup_steps=0", "--steps", "2", "--run", "run"];
    let done = qurl_in(&dir, &[&["train", file], &set[..], &steps[..]].concat(), "");
    assert_eq!(done.status, 0, "{}", done.stderr);
    let metrics = std::fs::read_to_string(dir.join("run/metrics.jsonl")).expect("metrics");
    for line in metrics.lines() {
        let step: serde_json::Value = serde_json::from_str(line).expect("a line");
        println!("measured: responses of {} tokens: {}", step["response_length"], step["timing"]);
    }
    println!("{}", lines.join("\n"));
}

/// Paths in the file lead from its directory, those of overrides from the working directory, and a run goes
/// on from anywhere.
#[test]
fn paths_lead_from_the_recipe_and_runs_resume_from_anywhere() {
    let dir = place("recipe-paths");
    std::fs::write(dir.join("mine.toml"), RECIPE).expect("written");
    std::fs::create_dir_all(dir.join("elsewhere/deep")).expect("made");
    std::fs::copy(dir.join("test.jsonl"), dir.join("elsewhere/other.jsonl")).expect("copied");
    let elsewhere = dir.join("elsewhere");
    let train = |cwd: &Path, args: &[&str]| qurl_in(cwd, &[&["train"], args].concat(), "");
    let set = ["--set", "task.test_files=[\"other.jsonl\"]", "--steps", "1"];
    let begun = train(&elsewhere, &[&["../mine.toml", "--run", "run"], &set[..]].concat());
    assert_eq!(begun.status, 0, "{}", begun.stderr);
    let kept = std::fs::read_to_string(elsewhere.join("run/recipe.toml")).expect("a recipe");
    assert!(kept.contains(&format!("{:?}", elsewhere.join("other.jsonl").display().to_string())), "{kept}");
    let on = train(&elsewhere.join("deep"), &["--run", "../run", "--resume", "--steps", "2"]);
    assert_eq!(on.status, 0, "{}", on.stderr);
    // The recipe itself, named from yet another directory, is the same one.
    let set = ["--set", "task.test_files=[\"elsewhere/other.jsonl\"]", "--steps", "3"];
    let on = train(&dir, &[&["mine.toml", "--run", "elsewhere/run", "--resume"], &set[..]].concat());
    assert_eq!(on.status, 0, "{}", on.stderr);
    assert!(on.stderr.contains("resumes after step 2"), "{}", on.stderr);
    // A recipe of an older program, whose paths are those of the working directory.
    let text = kept.replace(&format!("{}/", dir.display()), "");
    assert!(text.contains("\"train.jsonl\""), "{text}");
    std::fs::create_dir_all(dir.join("old")).expect("made");
    std::fs::write(dir.join("old/recipe.toml"), text).expect("written");
    let on = train(&dir, &["--run", "old", "--resume"]);
    assert_eq!(on.status, 0, "{}", on.stderr);
}

#[test]
fn what_is_not_there_is_named_with_the_key_that_asked_for_it() {
    let dir = place("recipe-missing");
    std::fs::write(dir.join("mine.toml"), RECIPE).expect("written");
    let here = dir.display();
    let check = |set: &str| qurl_in(&dir, &["recipe", "check", "mine.toml", "--set", set], "");
    let relative =
        "paths in a recipe are relative to its directory, those given with --set to the working directory";
    for (set, key) in [
        ("task.files=[\"no.jsonl\"]", "task.files"),
        ("task.test_files=[\"no.jsonl\"]", "task.test_files"),
        ("sft={ files = [\"no.jsonl\"], steps = 1, batch_size = 1, lr = 1e-3 }", "sft.files"),
    ] {
        assert_says(
            &check(set),
            &format!("key `{key}` names {here}/no.jsonl, which does not exist; {relative}"),
        );
    }
    assert_says(
        &check("model.path=nowhere"),
        &format!("--set model.path=nowhere: key `model.path` is {here}/nowhere: there is no such directory"),
    );
    let file = RECIPE.replace("path = \"model\"", "path = \"train.jsonl\"");
    std::fs::write(dir.join("file.toml"), file).expect("written");
    assert_says(
        &qurl_in(&dir, &["train", "file.toml"], ""),
        &format!(
            "file.toml, line 2: key `model.path` is {here}/train.jsonl: a file, expected the directory that \
             holds config.json"
        ),
    );
    std::fs::write(dir.join("empty.jsonl"), "").expect("written");
    assert_says(
        &check("task.files=[\"empty.jsonl\"]"),
        &format!("key `task.files`: {here}/empty.jsonl: no rows"),
    );
}

#[test]
fn an_id_of_the_hub_is_found_in_the_cache_or_explained() {
    let dir = place("recipe-hub");
    let cache = dir.join("cache");
    let recipe = RECIPE.replace("path = \"model\"", "path = \"Tiny/Sums-0.1B\"");
    std::fs::write(dir.join("mine.toml"), recipe).expect("written");
    let environment = [("HF_HUB_CACHE", cache.to_str().expect("text"))];
    let check = || qurl_with(&dir, &["recipe", "check", "mine.toml", "--json"], &environment, "");
    assert_says(
        &check(),
        &format!(
            "mine.toml, line 2: key `model.path` is Tiny/Sums-0.1B: there is no such directory, and no such \
             model in the local Hugging Face cache ({}); `hf download Tiny/Sums-0.1B` puts it there, and \
             `hf download Tiny/Sums-0.1B --local-dir DIR` makes a directory to name instead",
            cache.display()
        ),
    );
    let model = cache.join("models--Tiny--Sums-0.1B");
    std::fs::create_dir_all(model.join("refs")).expect("made");
    std::fs::create_dir_all(model.join("snapshots")).expect("made");
    std::fs::write(model.join("refs/main"), "f00d").expect("written");
    std::fs::rename(dir.join("model"), model.join("snapshots/f00d")).expect("moved");
    assert_eq!(check().json()["model"]["from"], model.join("snapshots/f00d").display().to_string());
    // The cache is where the hub's own programs have it.
    for (place, variables) in [
        ("home/hub", [("HF_HUB_CACHE", ""), ("HF_HOME", "home"), ("HOME", "nowhere")]),
        ("user/.cache/huggingface/hub", [("HF_HUB_CACHE", ""), ("HF_HOME", ""), ("HOME", "user")]),
    ] {
        let moved = dir.join(place);
        std::fs::create_dir_all(moved.parent().expect("a parent")).expect("made");
        std::fs::rename(&cache, &moved).expect("moved");
        let absolute = |value: &str| {
            if value.is_empty() { String::new() } else { dir.join(value).display().to_string() }
        };
        let values = variables.map(|(name, value)| (name, absolute(value)));
        let mut environment: Vec<(&str, &str)> =
            values.iter().map(|(name, value)| (*name, value.as_str())).collect();
        environment.push(("XDG_CACHE_HOME", ""));
        let found = qurl_with(&dir, &["recipe", "check", "mine.toml", "--json"], &environment, "").json();
        let snapshot = moved.join("models--Tiny--Sums-0.1B/snapshots/f00d");
        assert_eq!(found["model"]["from"], snapshot.display().to_string());
        std::fs::rename(&moved, &cache).expect("moved back");
    }
    // So it is for commands that take a model.
    let generate =
        |id| qurl_with(&dir, &["generate", "--model", id, "1+1=", "--max-new", "2"], &environment, "");
    assert_eq!(generate("Tiny/Sums-0.1B").status, 0, "{}", generate("Tiny/Sums-0.1B").stderr);
    generate("Tiny/Other").assert_bad(&[
        "'Tiny/Other' for '--model <MODEL>': there is no such directory",
        "hf download Tiny/Other",
    ]);
}

#[test]
fn the_tokenizer_of_another_model_is_called_that() {
    let dir = place("recipe-tokenizer");
    std::fs::write(dir.join("mine.toml"), RECIPE).expect("written");
    let vocabulary =
        qurl_in(&dir, &["recipe", "check", "mine.toml", "--json"], "").json()["model"]["vocabulary"]
            .as_u64()
            .expect("a size");
    tiny_model(&dir.join("other"), "0123456789+=abcdefgh");
    std::fs::copy(dir.join("other/tokenizer.json"), dir.join("model/tokenizer.json")).expect("copied");
    assert_says(
        &qurl_in(&dir, &["recipe", "check", "mine.toml"], ""),
        &format!(
            "{}: wrong tokenizer: it needs a vocabulary of {}, but the model's vocab_size is {vocabulary}; \
             its files are those of another model",
            dir.join("model").display(),
            vocabulary + 8
        ),
    );
}

#[test]
fn a_run_starts_with_its_doubts() {
    let dir = place("recipe-doubts");
    std::fs::write(dir.join("mine.toml"), RECIPE).expect("written");
    let sizes =
        ["--set", "data.train_batch_size=64", "--set", "actor.ppo_mini_batch_size=64", "--steps", "1"];
    let done = qurl_in(&dir, &[&["train", "mine.toml", "--run", "run"], &sizes[..]].concat(), "");
    assert_eq!(done.status, 0, "{}", done.stderr);
    let warning = "warning: --set data.train_batch_size=64: key `data.train_batch_size` is 64: more than \
                   the 10 problems to train on, so that a step has some of them twice";
    assert!(done.stderr.contains(warning), "{}", done.stderr);
}

/// Supervised training on fewer examples than a batch has is doubted, too.
#[test]
fn a_batch_larger_than_its_file_is_doubted() {
    let dir = place("recipe-examples");
    std::fs::write(dir.join("mine.toml"), RECIPE).expect("written");
    std::fs::write(dir.join("pairs.jsonl"), "{\"prompt\": \"1+1=\", \"response\": \"2\"}\n".repeat(3))
        .expect("written");
    let set = "sft={ files = [\"pairs.jsonl\"], steps = 1, batch_size = 4, lr = 1e-3, test_problems = 0 }";
    let warning = format!(
        "--set {set}: key `sft.batch_size` is 4: more than the 3 examples of sft.files, so that a batch has \
         some of them twice"
    );
    let checked = qurl_in(&dir, &["recipe", "check", "mine.toml", "--set", set, "--json"], "").json();
    assert_eq!(checked["warnings"], serde_json::json!([warning]));
    assert_eq!(checked["supervised"]["examples"], 3);
    let done = qurl_in(&dir, &["sft", "mine.toml", "--set", set, "--run", "tuned"], "");
    assert!(done.status == 0 && done.stderr.contains(&format!("warning: {warning}\n")), "{}", done.stderr);
}

/// Where nothing is left to train on, everything that took problems away is said.
#[test]
fn excluded_problems_are_excluded_by_something() {
    let dir = place("recipe-excluded");
    std::fs::write(dir.join("mine.toml"), RECIPE).expect("written");
    let rows: String = (0..4)
        .map(|a| {
            format!("{{\"problem\": \"{a}+1=\", \"answer\": \"{}\", \"data_source\": \"sums\"}}\n", a + 1)
        })
        .collect();
    std::fs::write(dir.join("named.jsonl"), rows).expect("written");
    let check = |sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        qurl_in(&dir, &[&["recipe", "check", "mine.toml"], &sets[..]].concat(), "")
    };
    let (files, tests) = ("task.files=[\"named.jsonl\"]", "task.test_files=[\"named.jsonl\"]");
    let named = dir.join("named.jsonl");
    for (sets, message) in [
        (
            vec![files, "task.data_sources=[\"products\"]"],
            format!(
                "key `task.data_sources` is [\"products\"], but the rows of {} are of \
                     [\"sums\"]",
                named.display()
            ),
        ),
        (
            vec![files, tests, "task.data_sources=[\"sums\"]"],
            format!(
                "--set {files}: key `task.files` leaves no problem to train on: 4 are among those of \
                 task.test_files, only rows of task.data_sources = [\"sums\"] count"
            ),
        ),
        (
            vec!["task.test_files=[]", "task.held_out=0.99"],
            "mine.toml, line 6: key `task.files` leaves no problem to train on: task.held_out = 0.99 holds \
             out the others"
                .to_string(),
        ),
        (
            vec!["task.test_files=[]", "task.held_out=0.0001"],
            "--set task.held_out=0.0001: key `task.held_out` leaves no problem to measure on: 0.0001 of so \
             few is none"
                .to_string(),
        ),
    ] {
        assert_says(&check(&sets), &message);
    }
}

/// `qurl plan` with a recipe of the project.
fn plan(recipe: &str, more: &[&str]) -> crate::common::Run {
    let path = format!("{}/../../recipes/{recipe}.toml", env!("CARGO_MANIFEST_DIR"));
    qurl(&[&["plan", &path], more].concat(), "")
}

#[test]
fn a_plan_for_several_gpus_needs_none() {
    let stage = |stage: &str| {
        let more = ["--shape", "qwen2.5-1.5b", "--gpus", "8", "--json", "--set", "trainer.shards=8", "--set"];
        plan("aime-dapo", &[&more[..], &[stage]].concat()).json()
    };
    let planned = stage("trainer.zero_stage=1");
    let rows = planned["rows"].as_array().expect("rows");
    let gpus: Vec<u64> = rows.iter().map(|row| row["gpus"].as_u64().expect("a number")).collect();
    assert_eq!((gpus, &planned["shards"]), (vec![1, 2, 4, 8], &serde_json::json!(8)));
    let (alone, all) = (&rows[0], &rows[3]);
    let number = |row: &serde_json::Value, key: &str| row[key].as_f64().expect("a number");
    assert_eq!((number(alone, "all_to_all"), number(alone, "efficiency")), (0.0, 1.0));
    // 16 updates of 1.54 B gradients of 4 bytes, of which 7 of 8 go to others. As many weights come back, in
    // two bytes all but the embedding; and once more for the copy that samples, in four.
    let weights = 16.0 * (2.0 * 1.3103e9 + 4.0 * 0.2334e9) + 4.0 * 1.5437e9;
    for (key, bytes) in [("all_to_all", 16.0 * 4.0 * 1.5437e9), ("all_gather", weights)] {
        assert!((number(all, key) / (bytes * 7.0 / 8.0) - 1.0).abs() < 0.001, "{all}");
    }
    // Master weights and moments are shared: 12 of 16 bytes beside gradients, less buffers for whole leaves.
    assert!(number(all, "memory_gib") < number(alone, "memory_gib") - 10.0, "{planned}");
    // Divided, the blocks are gathered in every pass, and less of them is held.
    let divided = stage("trainer.zero_stage=3");
    let last = &divided["rows"][3];
    assert!(number(last, "all_gather") > 10.0 * number(all, "all_gather"), "{last}");
    assert!(number(last, "memory_gib") < number(all, "memory_gib"), "{last}");
    let phases = divided["phases_gib"].as_array().expect("phases");
    assert_eq!(phases.len(), 3, "{divided}");
    // The recipe as it is, with the model it is for.
    let fits = plan("aime-dapo", &["--shape", "qwen2.5-7b", "--gpus", "8", "--gpu-memory", "80"]);
    assert!(fits.status == 0 && fits.stdout.contains("GiB, fits in 74.5 GiB"), "{}", fits.stdout);
    let small = plan("aime-dapo", &["--shape", "qwen2.5-1.5b", "--gpu-memory", "16"]);
    assert!(small.status == 0 && small.stdout.contains("does not fit in 14.9 GiB"), "{}", small.stdout);
    // What the project's own recipes promise, on the GPUs that they name, with the memory those have.
    for (recipe, shape, more) in [
        ("qwen-7b-whole", "qwen2.5-7b", &[][..]),
        ("qwen-32b-lora", "qwen2.5-32b", &[]),
        ("qwen-32b-lora", "qwen2.5-32b", &["--gpu", "a100-80", "--set", "rollout.kv_cache_mb=16384"]),
        ("qwen-7b-grpo", "qwen2.5-7b", &["--gpu", "rtx4090"]),
    ] {
        let planned = plan(recipe, &[&["--shape", shape, "--gpus", "1", "--json"], more].concat()).json();
        assert_eq!(planned["fits"], true, "{planned}");
    }
    let own = plan("tiny-grpo", &["--gpu", "rtx4090", "--gpu-memory", "10", "--gpus", "1"]);
    let expected = "fits in 9.3 GiB (planned for NVIDIA GeForce RTX 4090";
    assert!(own.status == 0 && own.stdout.contains(expected), "{}{}", own.stdout, own.stderr);
    let tiny = plan("tiny-grpo", &["--gpus", "2"]);
    assert!(tiny.status == 0 && tiny.stdout.contains("a new model"), "{}{}", tiny.stdout, tiny.stderr);
}

#[test]
fn a_plan_that_makes_no_sense_is_refused_by_name() {
    plan("tiny-grpo", &["--gpus", "6"]).assert_bad(&["--gpus 6", "a power of two"]);
    plan("tiny-grpo", &["--gpu-memory", "0"]).assert_bad(&["--gpu-memory 0", "more than 0"]);
    plan("tiny-grpo", &["--gpu", "rtx4080"]).assert_bad(&["rtx4080", "h200", "rtx4090"]);
    plan("tiny-grpo", &["--network", "0"]).assert_bad(&["--network 0", "more than 0"]);
    plan("tiny-grpo", &["--length", "9999"]).assert_bad(&["--length 9999", "data.max_response_length"]);
    plan("aime-dapo", &["--shape", "qwen2.5-9b"]).assert_bad(&["qwen2.5-9b", "qwen2.5-7b"]);
    plan("aime-dapo", &[]).assert_bad(&["Qwen2.5-Math-7B", "--shape"]);
}
