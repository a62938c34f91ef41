//! Tokenizers: characters, byte-level BPE against published ids, streaming, agreement with transformers.

mod common;

use std::fs;

use common::{TempDir, python, shared_data, small};
use qurl_model::tokenizer::{AddedToken, BytePattern, CharacterSpecials, StreamDecoder};
use qurl_model::{Family, Tokenizer, TokenizerError};
use serde_json::{Value, json};

const ALPHABET: &str = "\n 0123456789+-*/=()abcxyz?.é→";

fn characters() -> Tokenizer {
    Tokenizer::characters(ALPHABET, &CharacterSpecials::default()).unwrap()
}

fn write_files(dir: &TempDir, tokenizer: &Tokenizer) {
    for (name, contents) in tokenizer.files() {
        fs::write(dir.file(name), contents).unwrap();
    }
}

/// Decodes token by token; the pieces must be the whole.
fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut decoder = StreamDecoder::new(false);
    let mut text = String::new();
    for &id in ids {
        let piece = decoder.push(tokenizer, id).unwrap();
        assert!(!piece.contains('\u{FFFD}'), "{piece:?}");
        text.push_str(&piece);
    }
    text + &decoder.finish(tokenizer).unwrap()
}

#[test]
fn characters_have_one_id_each() {
    let tokenizer = characters();
    assert_eq!(tokenizer.vocab_size(), 3 + ALPHABET.chars().count());
    assert_eq!(tokenizer.encode("<bos>1+\n<eos>", true).unwrap(), [1, 6, 15, 3, 2]);
    assert_eq!(tokenizer.eos(), Some(2));
    assert_eq!(tokenizer.specials().pad.as_ref().map(|t| t.id), Some(0));
    let special: Vec<_> = tokenizer.special_tokens().into_iter().map(|t| t.content).collect();
    assert_eq!(special, ["<pad>", "<bos>", "<eos>"]);
    for text in ["12+3=15\n", "  a  b ", "é→é", ""] {
        let ids = tokenizer.encode(text, false).unwrap();
        assert_eq!(ids.len(), text.chars().count());
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        assert_eq!(streamed(&tokenizer, &ids), text);
    }
    assert_eq!(tokenizer.decode(&[1, 6, 2], true).unwrap(), "1");
    assert_eq!(tokenizer.decode(&[1, 6, 2], false).unwrap(), "<bos>1<eos>");
    let error = tokenizer.encode("1 % 2", false).unwrap_err();
    assert!(matches!(&error, TokenizerError::Encode { text, .. } if text == "1 % 2"), "{error}");
}

#[test]
fn bad_alphabets_are_named() {
    let specials = CharacterSpecials::default();
    let error = |alphabet: &str, specials: &CharacterSpecials| {
        Tokenizer::characters(alphabet, specials).unwrap_err().to_string()
    };
    assert!(error("", &specials).contains("empty alphabet"));
    assert!(error("aba", &specials).contains("character 'a' twice"));
    let short = CharacterSpecials { eos: "$".to_string(), ..specials.clone() };
    assert!(error("ab", &short).contains("special token \"$\""));
    let twice = CharacterSpecials { eos: "<pad>".to_string(), ..specials };
    assert!(error("ab", &twice).contains("special token \"<pad>\" twice"));
}

#[test]
fn a_saved_character_tokenizer_loads_again() {
    let tokenizer = characters();
    let dir = TempDir::new("characters");
    write_files(&dir, &tokenizer);
    let again = Tokenizer::load(dir.path()).unwrap();
    assert_eq!(again.files(), tokenizer.files());
    assert_eq!(again.specials(), tokenizer.specials());
    assert_eq!(again.encode("3*4=12", false).unwrap(), tokenizer.encode("3*4=12", false).unwrap());
}

#[test]
fn a_model_with_too_few_rows_is_refused() {
    let mut config = small(Family::Qwen2);
    config.vocab_size = 30;
    let error = characters().check_fits(&config).unwrap_err().to_string();
    assert_eq!(
        error,
        "wrong tokenizer: it needs a vocabulary of 32, but the model's vocab_size is 30; its files are \
         those of another model"
    );
    config.vocab_size = 32;
    characters().check_fits(&config).unwrap();
}

#[test]
fn damaged_tokenizers_are_named() {
    let dir = TempDir::new("damaged");
    let load = || Tokenizer::load(dir.path()).unwrap_err().to_string();
    assert!(load().contains("no tokenizer, expected tokenizer.json"));
    fs::write(dir.file("tokenizer.json"), "{").unwrap();
    assert!(load().contains("tokenizer.json: invalid JSON"));
    fs::write(dir.file("tokenizer.json"), r#"{"model": {"type": "Sorcery"}}"#).unwrap();
    assert!(load().contains("expected a tokenizer in the format of Hugging Face"));
    let plain = characters();
    let (_, contents) = &plain.files()[0];
    let mut json: Value = serde_json::from_slice(contents).unwrap();
    let added = json["added_tokens"].as_array_mut().unwrap();
    added.push(json!({"id": 99, "content": "<tool>", "single_word": false, "lstrip": false,
                      "rstrip": false, "normalized": false, "special": true}));
    fs::write(dir.file("tokenizer.json"), json.to_string()).unwrap();
    assert!(load().contains("token \"<tool>\" gets the id 32, expected 99"), "{}", load());
    fs::remove_file(dir.file("tokenizer.json")).unwrap();
    fs::write(dir.file("vocab.json"), r#"{"a": 0}"#).unwrap();
    fs::write(dir.file("merges.txt"), "#version: 0.2\na b c\n").unwrap();
    assert!(load().contains("merges.txt: line 2 is \"a b c\""), "{}", load());
}

#[test]
fn transformers_gives_the_same_ids_for_characters() {
    let tokenizer = characters();
    let dir = TempDir::new("characters-python");
    write_files(&dir, &tokenizer);
    let texts = ["12+34=46\n", "<bos>(a - b) * c ?<eos>", "é→  x. .", "1 , 2"].map(|t| t.replace(',', "."));
    fs::write(dir.file("texts.json"), json!(texts).to_string()).unwrap();
    let arguments = [dir.path().to_path_buf(), dir.file("texts.json")];
    let [path, cases] = arguments.each_ref().map(|p| p.to_str().unwrap());
    let Some(output) = python("tokenizer.py", &["encode", path, cases]) else {
        return;
    };
    let theirs: Value = serde_json::from_str(&output).unwrap();
    let ids: Vec<Vec<u32>> = texts.iter().map(|t| tokenizer.encode(t, true).unwrap()).collect();
    assert_eq!(theirs["ids"], json!(ids));
    assert_eq!(theirs["texts"], json!(texts));
    let plain: Vec<String> = ids.iter().map(|ids| tokenizer.decode(ids, true).unwrap()).collect();
    assert_eq!(theirs["plain"], json!(plain));
    assert_eq!(theirs["special"], json!([0, 1, 2]));
    assert_eq!(theirs["size"], json!(tokenizer.vocab_size()));
}

/// What Qwen2.5 and Qwen3 add to the vocabulary, from the first id after it.
fn qwen_added() -> Vec<AddedToken> {
    let names = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
        "<|box_end|>",
        "<|quad_start|>",
        "<|quad_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<tool_call>",
        "</tool_call>",
    ];
    let token = |(id, name): (u32, &str)| AddedToken {
        id,
        content: name.to_string(),
        special: name.starts_with("<|"),
    };
    (151_643..).zip(names).map(token).collect()
}

#[test]
fn qwen_ids_equal_the_published_ones() {
    let Some(parity) = shared_data("tokenizers/qwen2/parity.jsonl") else {
        return;
    };
    let read = |name: &str| fs::read_to_string(parity.with_file_name(name)).unwrap();
    let tokenizer = Tokenizer::byte_level_bpe(
        &read("vocab.json"),
        &read("merges.txt"),
        BytePattern::Qwen2,
        &qwen_added(),
    )
    .unwrap();
    let mut checked = 0;
    for line in fs::read_to_string(&parity).unwrap().lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let text = case["text"].as_str().unwrap();
        let ids = tokenizer.encode(text, false).unwrap();
        assert_eq!(json!(ids), case["ids"], "{text:?}");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        assert_eq!(streamed(&tokenizer, &ids), text);
        checked += 1;
    }
    assert!(checked > 0);
    let text = "日本語と絵文字 👩‍🔬🇫🇷 naïve Ω≈ç√∫ 𝔘𝔫𝔦";
    let ids = tokenizer.encode(text, false).unwrap();
    assert_eq!(streamed(&tokenizer, &ids), text);

    // The same from a directory as the files are published, with the added tokens in the settings.
    let dir = TempDir::new("qwen-files");
    fs::write(dir.file("vocab.json"), read("vocab.json")).unwrap();
    fs::write(dir.file("merges.txt"), read("merges.txt")).unwrap();
    let added: serde_json::Map<String, Value> = qwen_added()
        .into_iter()
        .map(|t| (t.id.to_string(), json!({"content": t.content, "special": t.special})))
        .collect();
    let settings = json!({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>",
                          "pad_token": {"content": "<|endoftext|>"}, "added_tokens_decoder": added});
    fs::write(dir.file("tokenizer_config.json"), settings.to_string()).unwrap();
    let loaded = Tokenizer::load(dir.path()).unwrap();
    assert_eq!(loaded.encode(text, false).unwrap(), ids);
    assert_eq!(loaded.eos(), Some(151_645));
    assert_eq!(loaded.specials().pad.as_ref().map(|t| t.id), Some(151_643));
    assert_eq!(loaded.vocab_size(), 151_659);
}

#[test]
fn gpt2_bytes_round_trip() {
    let Some(vocab) = shared_data("tokenizers/gpt2/vocab.json") else {
        return;
    };
    let merges = fs::read_to_string(vocab.with_file_name("merges.txt")).unwrap();
    let vocab = fs::read_to_string(vocab).unwrap();
    let tokenizer = Tokenizer::byte_level_bpe(&vocab, &merges, BytePattern::Gpt2, &[]).unwrap();
    // Ids of GPT-2's published encoder.
    assert_eq!(tokenizer.encode("Hello, world!", false).unwrap(), [15496, 11, 995, 0]);
    let text = "We'll pay 1234€ — 🙂";
    let ids = tokenizer.encode(text, false).unwrap();
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    assert_eq!(streamed(&tokenizer, &ids), text);
}

/// A byte-level tokenizer over raw bytes shows how pieces of characters are held back.
#[test]
fn streaming_never_shows_half_a_character() {
    // Byte-level BPE writes byte b as one of 256 printable characters; these are the ones used below.
    let vocab = json!({"h": 0, "Ã": 1, "©": 2, "ð": 3, "Ł": 4, "ĺ": 5, "Ģ": 6}).to_string();
    let tokenizer = Tokenizer::byte_level_bpe(&vocab, "", BytePattern::Gpt2, &[]).unwrap();
    let mut decoder = StreamDecoder::new(false);
    let pieces: Vec<String> = [0, 1, 2, 0].iter().map(|&id| decoder.push(&tokenizer, id).unwrap()).collect();
    assert_eq!(pieces, ["h", "", "é", "h"]);
    let mut broken = StreamDecoder::new(false);
    let mut text = String::new();
    for id in [1, 1, 1, 1, 1, 0] {
        text.push_str(&broken.push(&tokenizer, id).unwrap());
    }
    text.push_str(&broken.finish(&tokenizer).unwrap());
    assert_eq!(text.chars().filter(|&c| c == '\u{FFFD}').count(), 5);
    assert!(text.ends_with('h'), "{text:?}");
    let mut cut = StreamDecoder::new(false);
    assert_eq!(cut.push(&tokenizer, 3).unwrap(), "");
    assert_eq!(cut.finish(&tokenizer).unwrap(), "\u{FFFD}");
}
