//! A task of your own in Rust: problems drawn by number and a verdict on each response. Everything else
//! (quantized rollouts, GRPO, evaluation) is the trainer's. Here a new model learns to name the letter that
//! follows.
//!
//! `cargo run --release -p qurl-examples --bin own_task`

#![forbid(unsafe_code)]

use qurl_kernels::Cpu;
use qurl_tasks::task::{Problem, Prompt, Split, Task, Verdict};
use qurl_train::recipe::Recipe;
use qurl_train::rl::RlTrainer;
use qurl_train::start::Start;
use std::error::Error;
use std::sync::Arc;

/// A recipe without `[task]`: the program brings its own.
const RECIPE: &str = r#"
data = { train_batch_size = 16, max_prompt_length = 4, max_response_length = 1 }
rollout = { n = 16, format = "int8", kv_cache_mb = 4 }
algorithm = { adv_estimator = { type = "grpo" } }
actor = { lr = 5e-3, ppo_mini_batch_size = 16 }
run = { total_steps = 80, test_problems = 8 }
trainer = { compute = "f32" }

[model.new]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 16
"#;

const LETTERS: &str = "abcdefgh";

/// Which letter comes after this one? After the last one the first.
struct NextLetter;

impl Task for NextLetter {
    fn name(&self) -> &str {
        "next-letter"
    }

    // The same key gives the same problem, always: runs are reproducible and can be resumed. (So few problems
    // are all learned and all tested; a real task keeps its splits apart.)
    fn draw(&self, _split: Split, seed: u64, index: u64) -> Option<Problem> {
        let letters: Vec<char> = LETTERS.chars().collect();
        let at = (seed + index) as usize % letters.len();
        let (letter, next) = (letters[at], letters[(at + 1) % letters.len()]);
        let (id, prompt) = (letter.to_string(), Prompt::Text(format!("{letter}>")));
        Some(Problem { id, prompt, answer: next.to_string(), extra: serde_json::Value::Null })
    }

    // Whether it is right, and what it earns: a letter at all is worth a little.
    fn verify(&self, problem: &Problem, response: &str) -> Verdict {
        let is_letter = response.chars().all(|c| LETTERS.contains(c)) && !response.is_empty();
        Verdict::new(response == problem.answer, is_letter, 0.1, Some(response.to_string()))
    }

    fn len(&self, _split: Split) -> Option<u64> {
        None // generated: there are always more
    }

    // A new model gets a tokenizer of these characters.
    fn alphabet(&self) -> Option<&'static str> {
        Some("abcdefgh>")
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let recipe = Recipe::parse(RECIPE, "own_task.rs", &[])?;
    let start = Start::from_recipe(&recipe, &NextLetter)?;
    let device = Arc::new(Cpu::from_env()?);
    let mut trainer = RlTrainer::new(&device, &recipe, "own_task.rs", start, Box::new(NextLetter))?;
    let before = trainer.evaluate()?.accuracy;
    for _ in 0..trainer.plan().run.total_steps {
        let record = trainer.step()?;
        eprintln!("step {:2}  reward {:.3}", record.step, record.reward);
    }
    println!("accuracy {before:.2} -> {:.2}", trainer.evaluate()?.accuracy);
    Ok(())
}
