//! Tokenizers that would take all memory or time: each is refused by an error that names the file, what is
//! there and what was expected.

use std::fs::File;

use qurl_model::Tokenizer;
use serde_json::{Map, Value, json};

use crate::common::TempDir;

/// A tokenizer of digits with these parts in place of its own.
fn with(parts: Value) -> Value {
    let vocab: Map<String, Value> = ('0'..='9').zip(0..).map(|(c, id)| (c.to_string(), json!(id))).collect();
    let mut json = json!({"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
                          "post_processor": null, "decoder": null,
                          "model": {"type": "WordLevel", "unk_token": "0", "vocab": vocab}});
    for (key, part) in parts.as_object().expect("parts") {
        json[key] = part.clone();
    }
    json
}

fn refused(json: &str) -> String {
    let files = vec![("tokenizer.json".to_string(), json.as_bytes().to_vec())];
    Tokenizer::from_files(files, "dir").expect_err("refused").to_string()
}

fn sequence(list: &str, steps: Vec<Value>) -> Value {
    json!({"type": "Sequence", list: steps})
}

fn replace(pattern: Value, content: &str) -> Value {
    json!({"type": "Replace", "pattern": pattern, "content": content})
}

/// Each of these took gigabytes or minutes.
#[test]
fn what_a_tokenizer_takes_is_bounded() {
    let prepend = |bytes| json!({"type": "Prepend", "prepend": "1".repeat(bytes)});
    let split = |regex: String| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let splits = |count| sequence("pretokenizers", vec![split("[\\p{L}\\p{N}]{90}".to_string()); count]);
    let one = json!({"SpecialToken": {"id": "A", "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let template = |pieces: Vec<Value>, ids: usize| {
        let special = json!({"A": {"id": "A", "ids": vec![1; ids], "tokens": vec!["1"; ids]}});
        json!({"type": "TemplateProcessing", "single": pieces, "pair": [text, text],
               "special_tokens": special})
    };
    let word = |word: Value, vocab: Value| {
        json!({"type": "WordPiece", "unk_token": "0", "continuing_subword_prefix": "",
               "max_input_chars_per_word": word, "vocab": vocab})
    };
    let long = "x".repeat(2_000_000);
    let mut both = vec![prepend(4096); 200];
    both.push(replace(json!({"String": "1"}), &"2".repeat(1000)));
    let growing = replace(json!({"Regex": "."}), &"x".repeat(2000));
    for (parts, expected) in [
        (json!({"normalizer": sequence("normalizers", both)}), "`normalizer` adds up to 819200000 bytes"),
        // A table without a trie and with 3000 letters: every character could become them.
        (
            json!({"normalizer": {"type": "Precompiled",
                   "precompiled_charsmap": format!("AAAAAAAA{}", "YWFh".repeat(1000))}}),
            "`normalizer` makes a text up to 3000 times as long",
        ),
        (json!({"normalizer": prepend(4097)}), "adds up to 4097 bytes to a text, expected at most 4096"),
        (json!({"normalizer": sequence("normalizers", vec![growing; 2])}), "4004001 times as long, expected"),
        (
            json!({"normalizer": sequence("normalizers", vec![json!({"type": "NFKD"}); 300])}),
            "`normalizer` has 301 steps, expected at most 256",
        ),
        (
            json!({"pre_tokenizer": splits(65)}),
            "`pre_tokenizer` has 65 regular expressions, expected at most 64",
        ),
        (
            json!({"pre_tokenizer": split("a".repeat(5000))}),
            "a regular expression of 5000 bytes, expected at most 4096",
        ),
        (
            json!({"post_processor": template(vec![one.clone(); 20_000], 20_000)}),
            "`post_processor` adds 400000000 tokens to a text, expected at most 4096",
        ),
        (
            json!({"post_processor": sequence("processors", vec![template(vec![text.clone(); 3], 1)])}),
            "`post_processor` has a template with 3 texts, expected at most 2",
        ),
        (
            json!({"model": word(json!(1_000_000_000), json!({"0": 0}))}),
            "`model.max_input_chars_per_word` is 1000000000, expected a whole number of at most 1000",
        ),
        (
            json!({"model": word(json!(100), json!({"0": 0, (long.as_str()): 1}))}),
            "`model.vocab` has a token of 2000000 bytes, expected at most 65536",
        ),
        (
            json!({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["0", 0.0], [long, -1.0]]}}),
            "`model.vocab` has a token of 2000000 bytes",
        ),
        (
            json!({"added_tokens": [{"id": 10, "content": long, "special": false}]}),
            "`added_tokens` has a token of 2000000 bytes",
        ),
        (json!({"unknown": [long]}), "a text of 2000000 bytes, expected at most 1048576"),
    ] {
        let error = refused(&with(parts).to_string());
        assert!(error.starts_with("dir/tokenizer.json: ") && error.contains(expected), "{expected}: {error}");
    }
}

/// A key that nobody knows, with objects that take 470 bytes for each of their seven.
#[test]
fn values_are_counted_before_they_are_made() {
    let many =
        |value: &str, count: usize| format!("{{\"x\": [{}{value}]}}", format!("{value},").repeat(count));
    let error = refused(&many("{\"\":0}", 300_000));
    assert_eq!(error, "dir/tokenizer.json: 300002 objects, expected at most 262144");
    let error = refused(&many("0", 4_000_000));
    assert_eq!(error, "dir/tokenizer.json: 4000003 values, expected at most 3145728");
}

#[test]
fn a_tokenizer_s_files_have_a_bounded_length() {
    let dir = TempDir::new("long-tokenizer");
    let file = File::create(dir.file("tokenizer.json")).expect("created");
    file.set_len((64 << 20) + 1).expect("a file of zeros");
    let error = Tokenizer::load(dir.path()).expect_err("refused").to_string();
    assert!(error.contains("tokenizer.json") && error.contains("67108865 bytes, expected at most 67108864"));
}

/// What published tokenizers have stays.
#[test]
fn what_is_usual_is_taken() {
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true});
    let bos = json!({"SpecialToken": {"id": "1", "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let usual = with(json!({
        "normalizer": sequence("normalizers", vec![json!({"type": "Prepend", "prepend": "▁"}),
            replace(json!({"String": " "}), "▁"), replace(json!({"Regex": "\\s+"}), "▁")]),
        "pre_tokenizer": metaspace,
        "post_processor": {"type": "TemplateProcessing", "single": [bos, text], "pair": [text, text],
            "special_tokens": {"1": {"id": "1", "ids": [1], "tokens": ["1"]}}},
    }));
    let files = vec![("tokenizer.json".to_string(), usual.to_string().into_bytes())];
    let tokenizer = Tokenizer::from_files(files, "dir").expect("a tokenizer");
    assert_eq!(tokenizer.encode("12", true).expect("ids").first(), Some(&1));
    assert_eq!((tokenizer.longest_token(), tokenizer.tokens_at_least("123")), (1, 3));
}
