//! Supervised training held against a computation by hand: which tokens are learned, their loss, and the
//! validation loss.

use qurl_kernels::cpu::level::Level;
use qurl_kernels::{Cpu, Device, Format, Queue};
use qurl_model::chat::ChatTemplate;
use qurl_model::compute::{Network, NetworkOptions, score};
use qurl_model::tokenizer::{CharacterSpecials, Tokenizer};
use qurl_model::{Dims, Family, GenerationConfig, ModelConfig, params};
use qurl_tasks::Prompt;
use qurl_train::ranks::Ranks;
use qurl_train::recipe::Recipe;
use qurl_train::sft::{EpochOrder, Example, Examples, SftTrainer};
use qurl_train::start::Start;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const ALPHABET: &str = "0123456789+=<>/abcdefghijklmnopqrstuvwxyz \n";
/// Turns as `<role>content</>`; a later assistant's turn hides what earlier ones thought between slashes.
const TEMPLATE: &str = "{% for m in messages %}<{{ m['role'] }}>\
    {% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('/')[-1] }}{% else %}\
    {{ m['content'] }}{% endif %}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

fn start() -> Start {
    let tokenizer = Tokenizer::characters(ALPHABET, &CharacterSpecials::default()).expect("a tokenizer");
    let dims = Dims {
        vocab_size: tokenizer.vocab_size(),
        hidden_size: 32,
        intermediate_size: 64,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
    };
    let mut config = ModelConfig::from_dims(Family::Qwen2, dims).expect("a configuration");
    config.max_position_embeddings = 128;
    config.initializer_range = 0.2;
    config.eos_token_ids = tokenizer.eos().into_iter().collect();
    let weights = params::init(&config, 7, false);
    let template = ChatTemplate::new(TEMPLATE, "test").expect("a template");
    let generation = GenerationConfig::default();
    Start { config, adapters: None, weights, tokenizer, template: Some(template), generation, warning: None }
}

fn cpu() -> Arc<Cpu> {
    Arc::new(Cpu::new(Level::best(), 2))
}

/// A file of rows, and a recipe that learns them.
struct Rows {
    dir: PathBuf,
    recipe: Recipe,
}

impl Rows {
    fn new(name: &str, rows: &[&str], more: &[&str]) -> Rows {
        let dir = std::env::temp_dir().join(format!("qurl-sft-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("created");
        std::fs::write(dir.join("rows.jsonl"), rows.join("\n")).expect("written");
        let text = format!(
            "[model]\npath = \"unused\"\n[sft]\nfiles = [{:?}]\nsteps = 4\nbatch_size = 3\nlr = 1e-3\n\
             max_length = 100\n[trainer]\ncompute = \"f32\"\nmicro_tokens = 64\n",
            dir.join("rows.jsonl").display().to_string()
        );
        let overrides: Vec<String> = more.iter().map(|set| set.to_string()).collect();
        Rows { recipe: Recipe::parse(&text, "r.toml", &overrides).expect("a recipe"), dir }
    }

    fn open<'a>(&self, start: &'a Start) -> Examples<'a> {
        let sft = self.recipe.sft.as_ref().expect("a section");
        Examples::open(sft, self.recipe.trainer.seed, start, None).expect("examples")
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// All text of an example, and the learned parts of it, apart.
fn shown(start: &Start, example: &Example) -> (String, Vec<String>) {
    let text = |ids: &[u32]| start.tokenizer.decode(ids, false).expect("text");
    let mut parts: Vec<Vec<u32>> = Vec::new();
    let mut inside = false;
    for (&id, &learned) in example.ids.iter().zip(&example.loss) {
        if learned && !inside {
            parts.push(Vec::new());
        }
        if let Some(part) = parts.last_mut().filter(|_| learned) {
            part.push(id);
        }
        inside = learned;
    }
    (text(&example.ids), parts.iter().map(|part| text(part)).collect())
}

fn one(start: &Start, row: &str) -> (String, Vec<String>) {
    let rows = Rows::new("one", &[row], &[]);
    let examples = rows.open(start);
    shown(start, &examples.get(&mut EpochOrder::default(), 0).expect("an example"))
}

#[test]
fn only_what_the_model_is_to_say_is_learned() {
    let start = start();
    let end = start.tokenizer.decode(&start.stop_ids()[..1], false).expect("text");
    let begin = start.tokenizer.decode(&start.tokenizer.encode("", true).expect("ids"), false).expect("text");
    let (all, learned) = one(&start, r#"{"prompt": "1+1=", "response": "2"}"#);
    assert_eq!((all, learned), (format!("{begin}1+1=2{end}"), vec![format!("2{end}")]));

    let chat = r#"{"messages": [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4"}]}"#;
    let (all, learned) = one(&start, &chat.replace('\n', " "));
    assert_eq!(all, "<system>add</><user>1+1</><assistant>2</><user>2+2</><assistant>4</>");
    assert_eq!(learned, ["2</>", "4</>"], "every turn of the assistant, with its end, and nothing else");

    // TRL's conversational prompts: turns of the assistant in the prompt are read.
    let pair = r#"{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}], "completion": [{"role": "assistant", "content": "d"}]}"#;
    let (all, learned) = one(&start, &pair.replace('\n', " "));
    assert_eq!(all, "<user>a</><assistant>b</><user>c</><assistant>d</>");
    assert_eq!(learned, ["d</>"]);

    // What the template shows differently once more follows cannot be learned where it stands.
    let thought = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hm/b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "hm/d"}]}"#;
    let (all, learned) = one(&start, &thought.replace('\n', " "));
    assert_eq!(all, "<user>a</><assistant>b</><user>c</><assistant>hm/d</>");
    assert_eq!(learned, ["hm/d</>"]);

    let (all, learned) = one(&start, r#"{"instruction": "add", "input": "1 1", "output": "2"}"#);
    assert_eq!(all, "<user>add\n\n1 1</><assistant>2</>");
    assert_eq!(learned, ["2</>"]);
}

const ROWS: [&str; 5] = [
    r#"{"prompt": "1+1=", "response": "2"}"#,
    r#"{"prompt": "12+30=", "completion": "42"}"#,
    r#"{"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "one two"}]}"#,
    r#"{"instruction": "say nine", "output": "nine nine nine"}"#,
    r#"{"prompt": "7+7=", "response": "14 or so"}"#,
];

/// Sum of the negative log-probs of learned tokens, sequence by sequence and without the trainer, and how
/// many there are.
fn by_hand(start: &Start, cpu: &Arc<Cpu>, examples: &[Example]) -> (f64, usize) {
    let queue = &mut cpu.queue().expect("a queue");
    let weights = start.weights.as_ref().try_map(|w| queue.upload(w)).expect("memory");
    let options = NetworkOptions::inference(&start.config, Format::F32);
    let net = Network::<Cpu>::new(queue, &start.config, &weights, options).expect("a network");
    let (mut sum, mut count) = (0.0, 0);
    for example in examples {
        let out = score(queue, &net, std::slice::from_ref(&example.ids), 1.0, 1000).expect("scores");
        // The log-prob of token i + 1 is at place i.
        for (logp, _) in out[0].logp.iter().zip(&example.loss[1..]).filter(|(_, learned)| **learned) {
            sum -= f64::from(*logp);
            count += 1;
        }
    }
    (sum, count)
}

#[test]
fn the_loss_is_the_mean_over_the_learned_tokens_of_the_whole_batch() {
    let start = start();
    let cpu = cpu();
    let rows = Rows::new("loss", &ROWS, &["sft.batch_size=5"]);
    let examples = rows.open(&start);
    let sft = rows.recipe.sft.as_ref().expect("a section");
    let mut order = EpochOrder::default();
    let batch: Vec<Example> = (0..5).map(|i| examples.get(&mut order, i).expect("an example")).collect();
    let (sum, count) = by_hand(&start, &cpu, &batch);
    let mut trainer =
        SftTrainer::new(&cpu, &rows.recipe, sft, &start, &examples, &Ranks::alone()).expect("a trainer");
    let record = trainer.step().expect("a step");
    assert_eq!((record.learned_tokens, record.tokens), (count, batch.iter().map(|e| e.ids.len()).sum()));
    let wanted = sum / count as f64;
    assert!((record.loss - wanted).abs() < 1e-5 * wanted, "{} instead of {wanted}", record.loss);
    assert!((record.epoch.expect("of files") - 1.0).abs() < 1e-12);
    assert!(trainer.validation_loss().expect("a loss").is_none(), "there is nothing to validate on");
}

#[test]
fn the_validation_loss_is_that_of_examples_that_are_not_learned() {
    let start = start();
    let cpu = cpu();
    let rows = Rows::new("validation", &ROWS, &[]);
    let path = |name: &str| rows.dir.join(name);
    // One of the examples to learn is there, too, and one is too long.
    let long = format!(r#"{{"prompt": "1", "response": "{}"}}"#, "2".repeat(200));
    let extra = r#"{"prompt": "8+8=", "response": "16"}"#;
    std::fs::write(path("validation.jsonl"), [extra, ROWS[1], &long].join("\n")).expect("written");
    let mut sft = rows.recipe.sft.clone().expect("a section");
    sft.validation_files = vec![path("validation.jsonl")];
    let examples = Examples::open(&sft, 1, &start, None).expect("examples");
    assert_eq!((examples.count(), examples.validation().len()), (Some(4), 2));
    let left_out = examples.left_out();
    assert_eq!((left_out.overlaps, left_out.too_long, left_out.too_long_to_validate), (1, 0, 1));
    let learned: Vec<Example> =
        (0..4).map(|i| examples.get(&mut EpochOrder::default(), i).expect("an example")).collect();
    assert!(examples.validation().iter().all(|example| !learned.contains(example)));

    let (sum, count) = by_hand(&start, &cpu, examples.validation());
    let mut trainer =
        SftTrainer::new(&cpu, &rows.recipe, &sft, &start, &examples, &Ranks::alone()).expect("a trainer");
    let loss = trainer.validation_loss().expect("a loss").expect("examples to validate on");
    let wanted = sum / count as f64;
    assert!((loss - wanted).abs() < 1e-5 * wanted, "{loss} instead of {wanted}");
    let mut record = trainer.step().expect("a step");
    trainer.validate_after(&mut record).expect("a loss");
    assert_eq!(record.validation_loss, None, "not after every step");
    sft.validation_freq = 2;
    let mut trainer = SftTrainer::new(&trainer_cpu(), &rows.recipe, &sft, &start, &examples, &Ranks::alone())
        .expect("a trainer");
    let mut losses = Vec::new();
    while trainer.steps_done() < sft.steps {
        let mut record = trainer.step().expect("a step");
        trainer.validate_after(&mut record).expect("a loss");
        losses.push(record.validation_loss.is_some());
    }
    assert_eq!(losses, [false, true, false, true]);
}

fn trainer_cpu() -> Arc<Cpu> {
    Arc::new(Cpu::new(Level::best(), 2))
}

#[test]
fn a_share_that_is_held_out_is_never_learned_and_equal_rows_stay_together() {
    let start = start();
    let rows: Vec<String> = (0..40)
        .map(|i| format!(r#"{{"prompt": "{0}+{0}=", "response": "{1}"}}"#, i % 20, 2 * (i % 20)))
        .collect();
    let rows: Vec<&str> = rows.iter().map(String::as_str).collect();
    let rows = Rows::new("held-out", &rows, &["sft.held_out=0.3"]);
    let examples = rows.open(&start);
    let count = examples.count().expect("of files");
    assert_eq!(count + examples.validation().len(), 40);
    assert!(count > 0 && count.is_multiple_of(2) && !examples.validation().is_empty());
    let mut order = EpochOrder::default();
    for index in 0..2 * count as u64 {
        let learned = examples.get(&mut order, index).expect("an example");
        assert!(!examples.validation().contains(&learned));
    }
}

/// An epoch has every example once, in an order of its own.
#[test]
fn every_epoch_has_all_examples_in_another_order() {
    let start = start();
    let rows = Rows::new("epochs", &ROWS, &[]);
    let examples = rows.open(&start);
    let mut order = EpochOrder::default();
    let mut epoch = |n: u64| -> Vec<Vec<u32>> {
        (5 * n..5 * n + 5).map(|i| examples.get(&mut order, i).expect("an example").ids).collect()
    };
    let epochs: Vec<Vec<Vec<u32>>> = (0..4).map(&mut epoch).collect();
    assert!(epochs.windows(2).any(|pair| pair[0] != pair[1]), "always the same order");
    for mut epoch in epochs {
        epoch.sort();
        epoch.dedup();
        assert_eq!(epoch.len(), 5);
    }
}

/// What is wrong with a row, a file or a share is said with its place and what was expected.
#[test]
fn bad_rows_are_named() {
    let start = start();
    let refused = |rows: &[&str], more: &[&str]| -> String {
        let rows = Rows::new("bad", rows, more);
        let sft = rows.recipe.sft.as_ref().expect("a section");
        let error = Examples::open(sft, 1, &start, None).err().expect("bad rows").to_string();
        error.replace(&format!("{}/", rows.dir.display()), "")
    };
    let good = ROWS[0];
    assert_eq!(
        refused(&[good, "", r#"{"prompt": "1+1="}"#], &[]),
        "key `sft.files`: rows.jsonl, line 3: expected `response` or `completion` beside `prompt`, found the \
         keys [\"prompt\"]"
    );
    let text = refused(&[good, "nonsense"], &[]);
    assert!(text.starts_with("key `sft.files`: rows.jsonl, line 2: not a JSON object: "), "{text}");
    assert_eq!(
        refused(&[r#"{"messages": [{"role": "user", "content": "a"}]}"#], &[]),
        "key `sft.files`: rows.jsonl, line 1: there is nothing to learn: no response and no turn of the \
         assistant"
    );
    assert_eq!(
        refused(&[good], &["sft.max_length=3"]),
        "key `sft.files` leaves no example to learn: 1 have more than sft.max_length = 3 tokens"
    );
    assert_eq!(
        refused(&[good], &["sft.held_out=1e-9"]),
        "key `sft.held_out` leaves no example to validate on: 0.000000001 of 1 is none"
    );
    assert_eq!(
        refused(&[good], &["sft.max_length=3", "sft.held_out=0.3"]),
        "key `sft.files` leaves no example to learn: 1 have more than sft.max_length = 3 tokens"
    );
    let sft = Rows::new("none", &[good], &["sft.files=[]"]);
    let error = Examples::open(sft.recipe.sft.as_ref().expect("a section"), 1, &start, None);
    assert_eq!(
        error.err().expect("nothing").to_string(),
        "there is nothing to learn from: give `sft.files`, or a [task] with worked solutions"
    );
    let mut missing = sft.recipe.sft.clone().expect("a section");
    missing.files = vec![Path::new("/no/such/file.jsonl").to_path_buf()];
    let error = Examples::open(&missing, 1, &start, None).err().expect("no file").to_string();
    assert!(
        error.starts_with("key `sft.files` names /no/such/file.jsonl, which does not exist; "),
        "{error}"
    );
}

/// Looking for the tokens of a text takes hundreds of times its memory: one that is too long anyway is
/// counted by its length.
#[test]
fn a_text_that_is_too_long_is_left_out_unread() {
    let start = start();
    let long = "7".repeat(20_000_000);
    let error = start.encode(&Prompt::Text(long.clone())).expect_err("too long").to_string();
    assert_eq!(error, "a text of 20000000 bytes has more tokens than the 128 of the model's context");
    let row = format!("{{\"prompt\": \"{long}\", \"response\": \"1\"}}");
    let short = "{\"prompt\": \"1+1=\", \"response\": \"2\"}";
    let rows = Rows::new("long-text", &[short, &row, short], &[]);
    let examples = rows.open(&start);
    assert_eq!((examples.count(), examples.left_out().too_long), (Some(2), 1));
}
