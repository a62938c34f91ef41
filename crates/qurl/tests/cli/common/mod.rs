//! The command line as its users see it: what goes in, what comes out, with which status. And a tiny model to
//! try it on.

pub mod python;

use qurl_model::hf::{SaveOptions, save};
use qurl_model::tokenizer::{CharacterSpecials, Tokenizer};
use qurl_model::{Dims, Family, GenerationConfig, ModelConfig, params};
use std::fs::File;
use std::io::{PipeWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What a command did.
pub struct Run {
    pub status: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Run {
    /// The one JSON document on standard output.
    pub fn json(&self) -> serde_json::Value {
        assert_eq!(self.status, 0, "{}", self.stderr);
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }

    /// Bad usage or input: status 2 and a message with all of these texts.
    pub fn assert_bad(&self, texts: &[&str]) {
        assert_eq!(self.status, 2, "{}{}", self.stdout, self.stderr);
        for text in texts {
            assert!(self.stderr.contains(text), "expected {text:?} in {}", self.stderr);
        }
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
    }
}

/// Runs `qurl` in a directory with this standard input.
pub fn qurl_in(dir: &Path, args: &[&str], stdin: &str) -> Run {
    qurl_with(dir, args, &[], stdin)
}

/// Runs `qurl` in a directory with these environment variables and this standard input.
pub fn qurl_with(dir: &Path, args: &[&str], environment: &[(&str, &str)], stdin: &str) -> Run {
    let mut child = Command::new(env!("CARGO_BIN_EXE_qurl"))
        .args(args)
        .envs(environment.iter().copied())
        .current_dir(dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut input = child.stdin.take().expect("a pipe");
    let text = stdin.to_string();
    // A command that ends early closes its input: writing fails then, and that is fine.
    let writer = std::thread::spawn(move || _ = input.write_all(text.as_bytes()));
    let output = child.wait_with_output().expect("the command ends");
    writer.join().expect("the writer ends");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Run {
        status: output.status.code().unwrap_or(-1),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

/// Runs `qurl` in a directory without input, and with these outputs; gives its status.
pub fn qurl_to(dir: &Path, args: &[&str], stdout: impl Into<Stdio>, stderr: impl Into<Stdio>) -> i32 {
    let mut command = Command::new(env!("CARGO_BIN_EXE_qurl"));
    command.args(args).current_dir(dir).stdin(Stdio::null()).stdout(stdout).stderr(stderr);
    command.status().expect("the command starts").code().unwrap_or(-1)
}

/// An output that nobody reads any longer.
pub fn closed() -> PipeWriter {
    let (_reader, writer) = std::io::pipe().expect("a pipe");
    writer
}

/// An output on a disk without space, where the system has one.
pub fn full() -> Option<File> {
    let full = File::options().write(true).open("/dev/full").ok();
    if full.is_none() {
        println!("skipped: there is no /dev/full");
    }
    full
}

/// Runs `qurl` where it does not matter.
pub fn qurl(args: &[&str], stdin: &str) -> Run {
    qurl_in(Path::new(env!("CARGO_TARGET_TMPDIR")), args, stdin)
}

/// An empty directory for one test.
pub fn directory(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if dir.exists() {
        std::fs::remove_dir_all(&dir).expect("removed");
    }
    std::fs::create_dir_all(&dir).expect("created");
    dir
}

/// Saves a random model with a tokenizer of these characters and a context of 128 tokens.
pub fn tiny_model(dir: &Path, alphabet: &str) {
    let tokenizer = Tokenizer::characters(alphabet, &CharacterSpecials::default()).expect("a tokenizer");
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
    let generation =
        GenerationConfig { eos_token_ids: config.eos_token_ids.clone(), ..GenerationConfig::default() };
    let options =
        SaveOptions { tokenizer_files: tokenizer.files(), ..SaveOptions::new(config.dtype, &generation) };
    save(dir, &config, &weights, &options).expect("saved");
}

/// The shared data, if it is there.
pub fn shared_data(what: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data").join(what);
    if !path.exists() {
        println!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}
