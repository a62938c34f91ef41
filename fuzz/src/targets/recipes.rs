//! Recipes with overrides: what is accepted can be written and is then accepted again.

use super::{Target, package};
use crate::input::Input;
use qurl_train::recipe::Recipe;

const FILE: &str = "recipe.toml";

pub const RECIPE: Target = Target {
    name: "recipe",
    about: "recipes and overrides of their keys",
    words: &[
        "[model.new]",
        "[task]",
        "[[stage]]",
        "type = \"synthetic\"",
        "hidden_size",
        "nan",
        "inf",
        "-1",
        "1e400",
        "{ }",
        "[]",
        "rollout.format=int4",
        "trainer.shards=3",
        "\"\"\"",
        "1979-05-27T07:32:00Z",
        "0xffffffffffffffff",
        "path = \"/dev/null\"",
        "model",
        "actor.lr=nan",
        "data.train_batch_size=18446744073709551615",
        "critic = {}",
        "adv_estimator",
        "objective",
        "clip_ratio_low",
        "sft",
        "run",
        "total_steps",
        "kv_cache_mb",
        "min_lr_ratio",
    ],
    made: |_| {
        let mut files: Vec<_> =
            std::fs::read_dir(package().join("../recipes"))?.collect::<Result<Vec<_>, _>>()?;
        files.sort_by_key(|entry| entry.file_name());
        let mut inputs = Vec::new();
        for file in files.iter().filter(|file| file.path().extension().is_some_and(|e| e == "toml")) {
            let parts = [(FILE, std::fs::read(file.path())?), ("overrides", b"run.total_steps=3".to_vec())];
            inputs.push(Input::new(parts));
        }
        Ok(inputs)
    },
    open: |_| {
        Ok(Box::new(|input| {
            let overrides: Vec<String> = input.text("overrides").lines().map(str::to_string).collect();
            let Ok(recipe) = Recipe::parse(&input.text(FILE), FILE, &overrides) else { return false };
            _ = (recipe.rl(FILE).is_ok(), recipe.for_sft().is_ok(), recipe.task().is_ok());
            let written = recipe.to_toml();
            let again = Recipe::parse(&written, FILE, &[]);
            assert!(again.is_ok(), "written and refused: {:?}", again.err().map(|error| error.to_string()));
            true
        }))
    },
};
