mod messages;
mod own;
mod reference;

use super::*;
use qurl_kernels::Format;
use qurl_model::compute::Recompute;

const GOOD: &str = r#"
[model.new]
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 128

[task]
type = "synthetic"
kind = "addition"
level = 2

[sft]
steps = 10
batch_size = 4
lr = 1e-3
"#;

fn error(text: &str, overrides: &[&str]) -> String {
    let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
    Recipe::parse(text, "r.toml", &overrides).expect_err("a bad recipe").to_string()
}

#[test]
fn defaults_and_overrides() {
    let recipe = Recipe::parse(GOOD, "r.toml", &[]).expect("good");
    assert_eq!(recipe.trainer, Trainer::default());
    let overrides =
        ["trainer.seed=7".to_string(), "trainer.compute=f32".to_string(), "sft.decay=\"cosine\"".to_string()];
    let changed = Recipe::parse(GOOD, "r.toml", &overrides).expect("good");
    assert_eq!((changed.trainer.seed, changed.trainer.compute), (7, Format::F32));
    let again = Recipe::parse(&changed.to_toml(), "again", &[]).expect("what is written can be read");
    assert_eq!(again, changed);
}

/// The good recipe with another `[task]`.
fn with_task(task: &str) -> String {
    let (model, rest) = GOOD.split_once("[task]").expect("a task");
    let (_, sft) = rest.split_once("[sft]").expect("a section [sft]");
    format!("{model}[task]\n{task}\n[sft]{sft}")
}

const DATASET: &str = r#"
type = "dataset"
files = ["train.parquet"]
test_files = ["test.jsonl"]
preset = "dapo"
data_sources = ["math_dapo"]
"#;

const COMMAND: &str = r#"
type = "command"
command = ["python3", "reward.py"]

[task.source]
type = "synthetic"
kind = "addition"
level = 2
"#;

#[test]
fn data_sets_and_commands() {
    for task in [DATASET, COMMAND] {
        let recipe = Recipe::parse(&with_task(task), "r.toml", &[]).expect("good");
        let again = Recipe::parse(&recipe.to_toml(), "again", &[]).expect("what is written can be read");
        assert_eq!(again, recipe);
    }
    let dataset = with_task(DATASET);
    let recipe = Recipe::parse(&dataset, "r.toml", &["task.policy=strict_box".to_string()]).expect("good");
    let Some(TaskSource::Dataset(source)) = &recipe.task else { panic!("{:?}", recipe.task) };
    assert_eq!(source.template().expect("a template").name, "dapo");
    assert_eq!(source.policy().expect("a policy").name(), "strict_box");
    let missing = recipe.task().expect("[task]").task().err().expect("no such file").to_string();
    assert!(missing.contains("train.parquet"), "{missing}");

    for (overrides, key, expected) in [
        ("task.files=[]", "`task.files`", "at least one"),
        ("task.fils=[]", "`task.fils`", "did you mean `task.files`?"),
        ("model.new.depth.x=1", "[model.new.depth]", "unknown section"),
        ("model.new.hidden_size=big", "`model.new.hidden_size`", "a whole number of at least 1"),
        ("sft.steps=1.5", "`sft.steps`", "a whole number"),
        ("task.preset=dapoo", "`task.preset`", "deepscaler"),
        ("task.template=x", "`task.template`", "qwen_math"),
        ("task.policy=x", "`task.policy`", "answer_line"),
        ("task.held_out=0.1", "`task.held_out`", "test_files"),
        ("task.held_out=1.0", "`task.held_out`", "below 1"),
        ("task.format_weight=2.0", "`task.format_weight`", "0 to 1"),
        ("task.reward={ right = inf }", "`task.reward.right` is inf", "from -1000000 to 1000000"),
        ("task.reward={ wrong = nan }", "`task.reward.wrong` is NaN", "to 1000000"),
        (
            "task.reward={ right = -1.0, wrong = 1.0 }",
            "`task.reward.wrong` is 1",
            "less than reward.right = -1",
        ),
        ("task.reward.wrong=1.0", "`task.reward.wrong` is 1", "less than reward.right = 1"),
        ("task.reward={ rigth = 1.0 }", "`task.reward.rigth`", "did you mean `task.reward.right`?"),
        ("task.reward=1.0", "`task.reward`", "a section"),
        ("task.files=3", "`task.files`", "a list of texts"),
        ("task.preset=3", "`task.preset`", "deepscaler"),
        ("task.type=data", "`task.type`", "dataset"),
    ] {
        let e = error(&dataset, &[overrides]);
        assert!(e.contains(key) && e.contains(expected), "{overrides}: {e}");
    }
    let command = with_task(COMMAND);
    for (overrides, key, expected) in [
        ("task.command=[]", "`task.command`", "a program"),
        ("task.time_limit_s=0.0", "`task.time_limit_s`", "above 0, at most 1000000"),
        ("task.source.level=hard", "`task.source.level`", "a whole number"),
        ("task.reward={ right = 0.0 }", "`task.reward.wrong`", "less than"),
        ("task.source.reward={ wrong = -1.0 }", "`task.source.reward`", "`task.reward`"),
        ("task.source.level=99", "`task.source.level`", "1 to 12"),
        (
            "task.source={ type=\"command\", command=[\"x\"], \
             source={ type=\"synthetic\", kind=\"sorting\", level=1 } }",
            "`task.source.type`",
            "synthetic or dataset",
        ),
    ] {
        let e = error(&command, &[overrides]);
        assert!(e.contains(key) && e.contains(expected), "{overrides}: {e}");
    }
}

#[test]
fn a_missing_command_is_named() {
    let text = with_task(COMMAND);
    let recipe = Recipe::parse(&text, "r.toml", &["task.command=[\"no-such-program-here\"]".to_string()])
        .expect("good");
    let e = recipe.task().expect("[task]").task().err().expect("cannot start").to_string();
    assert!(e.contains("no-such-program-here"), "{e}");
}

const RL: &str = r#"
[data]
train_batch_size = 8
max_prompt_length = 8
max_response_length = 8

[algorithm]
adv_estimator = { type = "grpo" }

[rollout]
n = 4

[actor]
lr = 1e-3
ppo_mini_batch_size = 4

[run]
total_steps = 2
"#;

#[test]
fn impossible_and_conflicting_settings_of_rl() {
    let text = format!("{GOOD}{RL}");
    let recipe = Recipe::parse(&text, "r.toml", &[]).expect("good");
    assert_eq!(Recipe::parse(&recipe.to_toml(), "again", &[]).expect("what is written can be read"), recipe);
    for (change, key) in [
        ("rollout.n=1", "rollout.n"),
        ("rollout.top_p=0.9", "rollout.top_p"),
        ("rollout.temperature=0.0", "rollout.temperature"),
        ("rollout.format=int3", "int3"),
        ("actor.ppo_mini_batch_size=3", "actor.ppo_mini_batch_size"),
        ("actor.cliprange_value=0.5", "actor.cliprange_value"),
        ("algorithm.adv_estimator={ type = \"gae\" }", "critic"),
        ("critic={ lr = 1e-3, ppo_mini_batch_size = 4 }", "critic"),
        ("algorithm.overlong_buffer={ len = 100 }", "overlong_buffer"),
        ("algorithm.objective={ type = \"acr\", c = -1.0 }", "algorithm.objective"),
        ("algorithm.loss_agg_mode=mean", "loss_agg_mode"),
        ("run.total_steps=0", "run.total_steps"),
        (
            "run.stages=[{ from_step = 5, max_response_length = 9 }, { from_step = 2, max_response_length = \
             9 }]",
            "run.stages",
        ),
        (
            "run.stages=[{ from_step = 0, max_response_length = 9 }]",
            "`run.stages[0].from_step` is 0, expected a whole number of at least 1",
        ),
        (
            "run.stages=[{ from_step = 2, max_response_length = 9, new_reference = true }]",
            "`run.stages[0].new_reference` is true, expected false where there is no reference model",
        ),
        (
            "run.stages=[{ from_step = 2, max_response_length = 8, n = 1 }]",
            "`run.stages[0].n` is 1, expected at least 2 for advantages within a group",
        ),
        ("model.max_position_embeddings=256", "model.new.max_position_embeddings"),
        ("data.train_batch_size=0", "data.train_batch_size"),
        ("rollout.uaq=0.0", "rollout.uaq"),
    ] {
        let e = error(&text, &[change]);
        assert!(e.contains(key), "{change}: {e}");
    }
    let missing = text.replace("[run]\ntotal_steps = 2\n", "");
    assert!(error(&missing, &[]).contains("[run]"));
}

/// Settings that each are in their range and together can do nothing, or something else than they say.
#[test]
fn settings_that_do_not_go_together() {
    let text = format!("{GOOD}{RL}");
    let plus_plus = "algorithm.adv_estimator={ type = \"reinforce-plus-plus\" }";
    let baseline = "algorithm.adv_estimator={ type = \"reinforce-plus-plus-baseline\" }";
    let filter = "algorithm.filter_groups={ max_num_gen_batches = 2 }";
    let one = "run.stages=[{ from_step = 2, max_response_length = 8, n = 1 }]";
    let kl = |horizon: &str| {
        format!("algorithm.kl_in_reward={{ kl_ctrl = {{ type = \"adaptive\", horizon = {horizon} }} }}")
    };
    let (short, long) = (kl("6.4"), kl("6.5")); // of 8 prompts with 4 responses each
    let more = "run.stages=[{ from_step = 2, max_response_length = 8, n = 8 }]";
    let gspo = "algorithm.objective={ type = \"gspo\" }";
    let (norm, factor) =
        ("algorithm.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.loss_scale_factor=8.0");
    let critic = |more: &str| format!("critic={{ lr = 1.0, ppo_mini_batch_size = 4, {more} }}");
    let gae = "algorithm.adv_estimator={ type = \"gae\" }";
    let (constant, cosine) = (critic("min_lr_ratio = 0.1"), critic("min_lr_ratio = 0.1, decay = \"cosine\""));
    let noise = "rollout.norm_noise={}";
    let refused: &[(&[&str], &str)] = &[
        (&[baseline, "rollout.n=1"], "`rollout.n` is 1, expected at least 2 for advantages within a group"),
        (
            &[plus_plus, filter, "rollout.n=1"],
            "`rollout.n` is 1, expected at least 2 with algorithm.filter_gr",
        ),
        (
            &[plus_plus, filter, one],
            "`run.stages[0].n` is 1, expected at least 2 with algorithm.filter_groups",
        ),
        (&[&short], "`algorithm.kl_in_reward.kl_ctrl.horizon` is 6.4, expected more than a fifth"),
        (&[&long, more], "`algorithm.kl_in_reward.kl_ctrl.horizon` is 6.5, expected more than a fifth"),
        (&[factor], "`algorithm.loss_scale_factor` is 8, expected nothing: it belongs to"),
        (&[factor, norm, gspo], "`algorithm.loss_scale_factor` is 8, expected nothing: it belongs to"),
        (
            &["actor.min_lr_ratio=0.1"],
            "`actor.min_lr_ratio` is 0.1, expected 0 with actor.decay = \"constant\"",
        ),
        (&["sft.min_lr_ratio=0.1"], "`sft.min_lr_ratio` is 0.1, expected 0 with sft.decay = \"constant\""),
        (&[gae, &constant], "`critic.min_lr_ratio` is 0.1, expected 0 with critic.decay = \"constant\""),
        (&[noise, "trainer.forward=rollout"], "`rollout.norm_noise` is there, expected no section"),
        (
            &["actor.optim.eps=1e-40"],
            "`actor.optim.eps` is 1e-40, expected a number of at least 1.1754944e-38",
        ),
    ];
    for (change, expected) in refused {
        let e = error(&text, change);
        assert!(e.contains(expected), "{change:?}: {e}");
    }
    let accepted: [&[&str]; 9] = [
        &[plus_plus, "rollout.n=1"],
        &[plus_plus, filter],
        &[&long],
        &[factor, norm],
        &["actor.min_lr_ratio=0.1", "actor.decay=cosine"],
        &["sft.min_lr_ratio=0.1", "sft.decay=cosine"],
        &[gae, &cosine],
        &[noise],
        &["actor.optim.eps=1.2e-38"],
    ];
    for change in accepted {
        plan(change);
    }
}

/// The plan of the good recipe of RL with these overrides.
fn plan(overrides: &[&str]) -> RlPlan {
    let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
    let recipe = Recipe::parse(&format!("{GOOD}{RL}"), "r.toml", &overrides).expect("good");
    assert_eq!(Recipe::parse(&recipe.to_toml(), "again", &[]).expect("what is written can be read"), recipe);
    recipe.rl("r.toml").expect("a plan")
}

#[test]
fn a_stage_without_n_has_that_of_the_rollout() {
    let stages = "run.stages=[{ from_step = 3, max_response_length = 16, n = 8 }, \
                  { from_step = 5, max_response_length = 24 }]";
    let plan = plan(&[stages, "run.total_steps=6"]);
    let sizes: Vec<(usize, usize)> = (1..=6).map(|step| plan.sizes_at(step)).collect();
    assert_eq!(sizes, [(8, 4), (8, 4), (16, 8), (16, 8), (24, 4), (24, 4)]);
}

#[test]
fn a_new_optimizer_has_a_schedule_of_its_own() {
    let stages = "run.stages=[{ from_step = 4, max_response_length = 8, new_optimizer = true }, \
                  { from_step = 6, max_response_length = 8 }, \
                  { from_step = 9, max_response_length = 8, new_optimizer = true }]";
    let lr = ["actor.lr=1.0", "actor.lr_warmup_steps=2", "run.total_steps=10"];
    let rates = |plan: RlPlan| (1..=10).map(|step| plan.lr_at(&plan.actor, step)).collect::<Vec<f64>>();
    let (with, without) = (rates(plan(&[&lr[..], &[stages]].concat())), rates(plan(&lr)));
    assert_eq!(with, [0.5, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0]);
    assert_eq!(without, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
    // Each stretch decays over its own steps: 3, 5 and 2 of them.
    let cosine = rates(plan(&[&lr[..], &[stages, "actor.decay=cosine"]].concat()));
    let alone =
        |steps: u64| rates(plan(&[lr[0], lr[1], "actor.decay=cosine", &format!("run.total_steps={steps}")]));
    assert_eq!(cosine[..3], alone(3)[..3]);
    assert_eq!(cosine[3..8], alone(5)[..5]);
    assert_eq!(cosine[8..], alone(2)[..2]);
}

#[test]
fn every_recipe_of_the_project_parses() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let mut seen = 0;
    for entry in std::fs::read_dir(dir).expect("recipes") {
        let path = entry.expect("entry").path();
        if path.extension().is_some_and(|e| e == "toml") {
            Recipe::read(&path, &[]).unwrap_or_else(|e| panic!("{e}"));
            seen += 1;
        }
    }
    assert!(seen >= 2);
}

#[test]
fn a_run_continues_with_its_own_recipe_only() {
    let text = format!("{GOOD}{RL}");
    let old = Recipe::parse(&text, "r.toml", &[]).expect("good");
    let against = |old: &Recipe, changes: &[&str]| {
        let overrides: Vec<String> = changes.iter().map(|s| s.to_string()).collect();
        Changes::between(old, &Recipe::parse(&text, "r.toml", &overrides).expect("good"))
    };
    assert_eq!(against(&old, &[]), Changes::default());
    let changes = against(
        &old,
        &[
            "trainer.seed=7",
            "sft.lr=2e-3",
            "critic={ lr = 1.0, ppo_mini_batch_size = 4 }",
            "algorithm.adv_estimator={ type = \"gae\" }",
        ],
    );
    let refused: Vec<String> = changes.refused.iter().map(Change::to_string).collect();
    assert!(refused.contains(&"trainer.seed: 1 -> 7".to_string()), "{refused:?}");
    assert!(refused.contains(&"sft.lr: 0.001 -> 0.002".to_string()), "{refused:?}");
    assert!(refused.contains(&"critic.lr: not set -> 1.0".to_string()), "{refused:?}");
    assert!(changes.allowed.is_empty());
    let changes = against(&old, &["run.total_steps=9", "trainer.save_freq=3", "run.alarm.action=stop"]);
    let allowed: Vec<&str> = changes.allowed.iter().map(|c| c.key.as_str()).collect();
    assert_eq!(
        (allowed, changes.refused.len()),
        (vec!["run.alarm.action", "run.total_steps", "trainer.save_freq"], 0)
    );
    // A decaying learning rate of the past would have been another one.
    let decaying = Recipe::parse(&text, "r.toml", &["actor.decay=cosine".to_string()]).expect("good");
    let changes = against(&decaying, &["actor.decay=cosine", "run.total_steps=9"]);
    assert_eq!(changes.refused.iter().map(|c| c.key.as_str()).collect::<Vec<_>>(), ["run.total_steps"]);
    // So would noise that is annealed over the run.
    let noise = "rollout.norm_noise={}";
    let noisy = Recipe::parse(&text, "r.toml", &[noise.to_string()]).expect("good");
    let changes = against(&noisy, &[noise, "run.total_steps=9"]);
    assert_eq!(changes.refused.iter().map(|c| c.key.as_str()).collect::<Vec<_>>(), ["run.total_steps"]);
}

/// Recipes had true and false, and runs of theirs resume; they are written by name.
#[test]
fn recomputation_is_named_and_its_old_spelling_is_read() {
    for (written, expected) in [
        ("true", Recompute::Block),
        ("false", Recompute::None),
        ("\"block\"", Recompute::Block),
        ("mlp", Recompute::Mlp),
        ("none", Recompute::None),
    ] {
        let set = [format!("trainer.recompute={written}")];
        let recipe = Recipe::parse(GOOD, "good.toml", &set).expect("a recipe");
        assert_eq!(recipe.trainer.recompute, expected, "{written}");
        let named = format!("recompute = \"{expected}\"");
        assert!(recipe.to_toml().contains(&named), "{}", recipe.to_toml());
    }
    let error = Recipe::parse(GOOD, "good.toml", &["trainer.recompute=attention".to_string()]);
    let error = error.expect_err("refused").to_string();
    let expected = ["trainer.recompute", "attention", "one of none, mlp, block"];
    assert!(expected.iter().all(|part| error.contains(part)), "{error}");
}
