//! What is said of a wrong recipe, word by word.

use super::{GOOD, RL, error};
use crate::recipe::Recipe;

/// The lines of the two recipes together.
fn line_of(text: &str, part: &str) -> usize {
    text.lines().position(|line| line.starts_with(part)).expect("a line of the recipe") + 1
}

/// The messages about the recipe of reinforcement learning with one line replaced.
fn with_line(line: &str, other: &str) -> String {
    let text = format!("{GOOD}{RL}");
    assert!(text.contains(line), "{line}");
    error(&text.replacen(line, other, 1), &[])
}

#[test]
fn an_unknown_key_names_the_nearest_or_where_it_belongs() {
    for (line, other, expected) in [
        ("n = 4", "N = 4", "r.toml, line 29: unknown key `rollout.N`; did you mean `rollout.n`?"),
        (
            "lr = 1e-3\nppo",
            "rl = 1e-3\nlr = 1e-3\nppo",
            "r.toml, line 32: unknown key `actor.rl`; did you mean `actor.lr`?",
        ),
        (
            "n = 4",
            "train_batch_size = 4",
            "r.toml, line 29: unknown key `rollout.train_batch_size`; it belongs in [data], as \
             `data.train_batch_size`",
        ),
        (
            "n = 4",
            "colour = 4",
            "r.toml, line 29: unknown key `rollout.colour`; `qurl recipe rollout` lists the keys of \
             [rollout]",
        ),
        (
            "level = 2",
            "level = 2\nfiles = []",
            "r.toml, line 14: unknown key `task.files`; it belongs to `task.type` = \"dataset\"",
        ),
        ("[rollout]", "[rolout]", "r.toml, line 28: unknown section [rolout]; did you mean [rollout]?"),
        (
            "[rollout]",
            "[run.alarms]",
            "r.toml, line 28: unknown section [run.alarms]; did you mean [run.alarm]?",
        ),
        (
            "adv_estimator = { type = \"grpo\" }",
            "adv_estimator = { type = \"grpo\", gamma = 1.0 }",
            "r.toml, line 26: unknown key `algorithm.adv_estimator.gamma`; it belongs to \
             `algorithm.adv_estimator.type` = \"gae\"",
        ),
    ] {
        assert_eq!(with_line(line, other), expected);
    }
    assert_eq!(
        error(GOOD, &["model.new.depth=3"]),
        "--set model.new.depth=3: unknown key `model.new.depth`; `qurl recipe model.new` lists the keys of \
         [model.new]"
    );
}

#[test]
fn a_wrong_value_is_named_with_its_key_its_line_and_what_was_expected() {
    for (line, other, expected) in [
        (
            "n = 4",
            "n = \"four\"",
            "r.toml, line 29: key `rollout.n` is \"four\", expected a whole number from 1 to 65536",
        ),
        (
            "n = 4",
            "n = 4.5",
            "r.toml, line 29: key `rollout.n` is 4.5, expected a whole number from 1 to 65536",
        ),
        (
            "n = 4",
            "n = -4",
            "r.toml, line 29: key `rollout.n` is -4, expected a whole number from 1 to 65536",
        ),
        ("n = 4", "n = 0", "r.toml, line 29: key `rollout.n` is 0, expected a whole number from 1 to 65536"),
        (
            "n = 4",
            "n = 1",
            "r.toml, line 29: key `rollout.n` is 1, expected at least 2 for advantages within a group",
        ),
        (
            "n = 4",
            "n = 4\nformat = \"int3\"",
            "r.toml, line 30: key `rollout.format` is \"int3\", expected one of f32, bf16, int8, fp8, \
             fp8-block, int4, nvfp4; did you mean \"int4\"?",
        ),
        (
            "n = 4",
            "n = 4\nquantize_head = 1",
            "r.toml, line 30: key `rollout.quantize_head` is 1, expected true or false",
        ),
        (
            "kind = \"addition\"",
            "kind = \"adition\"",
            "r.toml, line 12: key `task.kind` is \"adition\", expected one of addition, multiplication, \
             mod_chain, sorting, word_problems, countdown; did you mean \"addition\"?",
        ),
        (
            "type = \"synthetic\"",
            "type = \"data\"",
            "r.toml, line 11: key `task.type` is \"data\", expected one of synthetic, dataset, command",
        ),
        (
            "[rollout]\nn = 4",
            "",
            "r.toml: key `rollout.n` is 1, expected at least 2 for advantages within a group",
        ),
        ("[rollout]", "[[rollout]]", "r.toml, line 28: key `rollout` is [{ n = 4 }], expected a section"),
        (
            "adv_estimator = { type = \"grpo\" }",
            "adv_estimator = { type = \"grpo\" }\nobjective = { type = \"acr\", c = -1.0 }",
            "r.toml, line 27: key `algorithm.objective.c` is -1, expected a positive number",
        ),
        (
            "ppo_mini_batch_size = 4",
            "ppo_mini_batch_size = 3",
            "r.toml, line 33: key `actor.ppo_mini_batch_size` is 3, expected a divisor of \
             data.train_batch_size = 8",
        ),
        (
            "lr = 1e-3\n",
            "",
            "r.toml, line 15: section [sft] lacks the key `lr`: the learning rate at its peak",
        ),
        (
            "type = \"synthetic\"\n",
            "",
            "r.toml, line 10: section [task] lacks the key `type`, one of synthetic, dataset, command",
        ),
        (
            "[run]\ntotal_steps = 2\n",
            "",
            "r.toml: section `[run]` is missing; reinforcement learning needs [task], [data], [algorithm], \
             [actor] and [run]",
        ),
        (
            "hidden_size = 64",
            "hidden_size = = 64",
            "r.toml, line 3, column 15: not TOML: extra `=`, expected nothing",
        ),
    ] {
        assert_eq!(with_line(line, other), expected);
    }
    let model = "r.toml: section [model] is missing: where the model comes from";
    assert_eq!(error("[trainer]\nseed = 1\n", &[]), model);
    // A program may bring a task of its own; who wants the recipe's is told.
    let without =
        format!("{GOOD}{RL}").replace("[task]\ntype = \"synthetic\"\nkind = \"addition\"\nlevel = 2\n", "");
    let recipe = Recipe::parse(&without, "r.toml", &[]).expect("a recipe without [task]");
    assert!(recipe.rl("r.toml").is_ok());
    assert_eq!(
        recipe.task().expect_err("no task").to_string(),
        "r.toml: section `[task]` is missing; reinforcement learning needs [task], [data], [algorithm], \
         [actor] and [run]"
    );
}

#[test]
fn everything_that_is_wrong_is_said_at_once_in_the_order_of_the_file() {
    let text = format!("{GOOD}{RL}").replace("level = 2", "levle = 2").replace("n = 4", "n = \"x\"");
    let (level, n) = (line_of(&text, "levle"), line_of(&text, "n = "));
    let task = line_of(&text, "[task]");
    assert_eq!(
        error(&text, &["trainer.sede=1"]),
        format!(
            "r.toml, line {task}: section [task] lacks the key `level`: difficulty from 1\n\
             r.toml, line {level}: unknown key `task.levle`; did you mean `task.level`?\n\
             r.toml, line {n}: key `rollout.n` is \"x\", expected a whole number from 1 to 65536\n\
             --set trainer.sede=1: unknown key `trainer.sede`; did you mean `trainer.seed`?"
        )
    );
}

/// An override is named as such, and does not move the lines of the file.
#[test]
fn overrides_are_named_and_lines_stay_those_of_the_file() {
    let text = format!("{GOOD}{RL}");
    for (change, expected) in [
        (
            "trainer.seed=\"x\"",
            "--set trainer.seed=\"x\": key `trainer.seed` is \"x\", expected a whole number of at least 0",
        ),
        (
            "rollout.n=1",
            "--set rollout.n=1: key `rollout.n` is 1, expected at least 2 for advantages within a group",
        ),
        (
            "rollout={ n = 4, top_q = 1 }",
            "--set rollout={ n = 4, top_q = 1 }: unknown key `rollout.top_q`; did you mean `rollout.top_k`?",
        ),
        ("nonsense", "--set nonsense: expected key=value, such as trainer.seed=7"),
        ("rollot.n=4", "--set rollot.n=4: unknown section [rollot]; did you mean [rollout]?"),
        ("task.level.x=1", "--set task.level.x=1: `level` is a value, not a section"),
        (
            "task.rewards[0].weight=2",
            "--set task.rewards[0].weight=2: there is no list `rewards`; set all of it",
        ),
        (
            "sft.warmup_steps=20",
            "--set sft.warmup_steps=20: key `sft.warmup_steps` is 20, expected at most sft.steps = 10",
        ),
        // The file's value is what does not fit the override.
        (
            "data.train_batch_size=6",
            "r.toml, line 33: key `actor.ppo_mini_batch_size` is 4, expected a divisor of \
             data.train_batch_size = 6",
        ),
    ] {
        assert_eq!(error(&text, &[change]), expected);
    }
    let wrong = text.replace("n = 4", "n = 1");
    assert_eq!(
        error(&wrong, &["trainer.seed=7"]),
        "r.toml, line 29: key `rollout.n` is 1, expected at least 2 for advantages within a group"
    );
}

/// Words of the program's types are never said: every key with a value of every wrong type, and every key
/// misspelt.
#[test]
fn no_words_of_the_program_are_said() {
    let text = format!("{GOOD}{RL}");
    let recipe = Recipe::parse(&text, "r.toml", &[]).expect("good");
    let table = toml::Table::try_from(&recipe).expect("a table");
    let mut paths = Vec::new();
    fn walk(path: &str, table: &toml::Table, paths: &mut Vec<String>) {
        for (key, value) in table {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            if let toml::Value::Table(inner) = value {
                walk(&path, inner, paths);
            }
            paths.push(path);
        }
    }
    walk("", &table, &mut paths);
    assert!(paths.len() > 60, "{}", paths.len());
    let rust = [
        "struct", "usize", "u64", "f64", "enum", "variant", "field", "tagged", "invalid", "serde", "Option",
        "map,",
    ];
    for path in paths {
        let misspelt = format!("{path}x=1");
        for entry in [
            format!("{path}=[[]]"),
            format!("{path}=\"~\""),
            format!("{path}=-1.5"),
            format!("{path}=true"),
            misspelt,
        ] {
            let overrides = [entry.clone()];
            let Err(e) = Recipe::parse(&text, "r.toml", &overrides) else { continue };
            let e = e.to_string();
            assert!(e.starts_with(&format!("--set {entry}: ")) || e.starts_with("r.toml"), "{entry}: {e}");
            for word in rust {
                let said = e.split(|c: char| !c.is_alphanumeric()).any(|said| said == word);
                assert!(!said, "{entry}: says {word:?}: {e}");
            }
        }
    }
}

#[test]
fn a_model_given_on_the_command_line_replaces_a_new_one() {
    let recipe = Recipe::parse(GOOD, "r.toml", &["model.path=/some/model".to_string()]).expect("good");
    assert_eq!(recipe.model.path.as_deref(), Some(std::path::Path::new("/some/model")));
    assert_eq!(recipe.model.new, None);
    let both = GOOD.replace("[model.new]", "[model]\npath = \"x\"\n[model.new]");
    assert_eq!(
        error(&both, &[]),
        "r.toml, line 2: key `model` is both a path and [model.new], expected either `path` (a Hugging Face \
         directory) or a section [model.new]"
    );
}

#[test]
fn what_can_hardly_be_meant_is_doubted() {
    let text = format!("{GOOD}{RL}");
    let doubts = |overrides: &[&str], problems| {
        let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
        Recipe::parse(&text, "r.toml", &overrides).expect("good").doubts(problems)
    };
    assert_eq!(doubts(&[], None), Vec::<String>::new());
    assert_eq!(doubts(&["actor.lr=0.1"], Some(8)), Vec::<String>::new());
    assert_eq!(
        doubts(&["actor.lr=1000"], None),
        ["--set actor.lr=1000: key `actor.lr` is 1000: learning rates above 0.1 are hardly ever meant"]
    );
    assert_eq!(
        doubts(&[], Some(7)),
        [format!(
            "r.toml, line {}: key `data.train_batch_size` is 8: more than the 7 problems to train on, so \
             that a step has some of them twice",
            line_of(&text, "train_batch_size")
        )]
    );
    let stage = "run.stages=[{ from_step = 2, max_response_length = 8 }, \
                 { from_step = 3, max_response_length = 8 }]";
    assert_eq!(
        doubts(&[stage], None),
        [format!(
            "--set {stage}: key `run.stages[1].from_step` is 3: the run ends after run.total_steps = 2, \
             before the stage begins"
        )]
    );
    assert_eq!(
        doubts(&["rollout.temperature=3.0", "actor.lr_warmup_steps=5"], None),
        [
            "--set rollout.temperature=3.0: key `rollout.temperature` is 3: above 2 tokens are sampled \
             nearly at random",
            "--set actor.lr_warmup_steps=5: key `actor.lr_warmup_steps` is 5: the run ends after \
             run.total_steps = 2, before the warm-up does",
        ]
    );
}
