use super::*;

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

#[test]
fn errors_name_the_key() {
    let e = error(GOOD, &["trainer.sede=7"]);
    assert!(e.contains("sede") && e.contains("r.toml"), "{e}");
    let e = error(GOOD, &["trainer.seed=\"x\""]);
    assert!(e.contains("seed") && e.contains("invalid type"), "{e}");
    let e = error(GOOD, &["trainer.compute=int8"]);
    assert!(e.contains("trainer.compute") && e.contains("f32 or bf16"), "{e}");
    let e = error(GOOD, &["task.level=99"]);
    assert!(e.contains("task.level") && e.contains("99") && e.contains("1 to 12"), "{e}");
    let e = error(GOOD, &["model.path=x"]);
    assert!(e.contains("`model`"), "{e}");
    let e = error(GOOD, &["model.new.num_key_value_heads=3"]);
    assert!(e.contains("model.new"), "{e}");
    let e = error(GOOD, &["sft.lr=-1.0"]);
    assert!(e.contains("sft.lr"), "{e}");
    let e = error(GOOD, &["nonsense"]);
    assert!(e.contains("key=value"), "{e}");
    let e = error("[model", &[]);
    assert!(e.contains("r.toml") && e.contains("line 1"), "{e}");
}
