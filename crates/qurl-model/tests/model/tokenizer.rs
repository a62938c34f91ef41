//! Tokenizers: characters, byte-level BPE against published ids, streaming, agreement with transformers.

use std::fs;

use crate::common::{TempDir, python, shared_data, small};
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

/// Tokenizers with every kind of part, to be mutated.
fn every_part() -> Vec<Value> {
    let added = |id: u64, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": true, "rstrip": true,
               "normalized": true, "special": true})
    };
    let whole = |model: Value, normalizer: Value, pre: Value, post: Value, decoder: Value| {
        json!({"version": "1.0", "added_tokens": [added(0, "<s>"), added(4, "</s>")],
               "truncation": {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0},
               "padding": {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": null,
                           "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"},
               "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": post, "decoder": decoder,
               "model": model})
    };
    let vocab = json!({"<s>": 0, "a": 1, "b": 2, "ab": 3, "</s>": 4});
    let sequence = |kind: &str, parts: Value| json!({"type": "Sequence", kind: parts});
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "a"});
    let special = json!({"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}});
    let template = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special});
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    vec![
        whole(
            json!({"type": "BPE", "dropout": null, "unk_token": "<s>", "continuing_subword_prefix": "",
                   "end_of_word_suffix": "", "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                   "vocab": vocab, "merges": [["a", "b"]]}),
            sequence("normalizers", json!([{"type": "NFC"}, {"type": "Prepend", "prepend": "a"}, replace])),
            sequence(
                "pretokenizers",
                json!([bytes, {"type": "Digits", "individual_digits": true},
                {"type": "Split", "pattern": {"Regex": "a|b"}, "behavior": "Isolated", "invert": false}]),
            ),
            template,
            sequence(
                "decoders",
                json!([replace, {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": "a", "start": 1, "stop": 0}]),
            ),
        ),
        whole(
            json!({"type": "Unigram", "unk_id": 0, "byte_fallback": false,
                   "vocab": [["<s>", 0.0], ["a", -1.0], ["b", -2.0], ["ab", -3.0], ["</s>", 0.0]]}),
            sequence(
                "normalizers",
                json!([{"type": "Precompiled", "precompiled_charsmap": "ALQCAACEAAA="},
                {"type": "Strip", "strip_left": true, "strip_right": true}]),
            ),
            metaspace.clone(),
            json!({"type": "RobertaProcessing", "sep": ["</s>", 4], "cls": ["<s>", 0], "trim_offsets": true,
                   "add_prefix_space": true}),
            metaspace,
        ),
        whole(
            json!({"type": "WordPiece", "unk_token": "<s>", "continuing_subword_prefix": "#",
                   "max_input_chars_per_word": 9, "vocab": vocab}),
            json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                   "strip_accents": null, "lowercase": true}),
            sequence(
                "pretokenizers",
                json!([{"type": "BertPreTokenizer"}, {"type": "FixedLength", "length": 2},
                {"type": "Punctuation", "behavior": "Isolated"}, {"type": "CharDelimiterSplit", "delimiter": "-"}]),
            ),
            json!({"type": "BertProcessing", "sep": ["</s>", 4], "cls": ["<s>", 0]}),
            json!({"type": "WordPiece", "prefix": "#", "cleanup": true}),
        ),
        whole(
            json!({"type": "WordLevel", "unk_token": "<s>", "vocab": vocab}),
            Value::Null,
            json!({"type": "Whitespace"}),
            bytes.clone(),
            json!({"type": "CTC", "pad_token": "<s>", "word_delimiter_token": "|", "cleanup": true}),
        ),
    ]
}

/// All values of a JSON tree, one after the other, replaced or removed.
fn each_mutation(whole: &Value, mut take: impl FnMut(Value)) {
    fn places(value: &Value, path: &str, found: &mut Vec<String>) {
        found.push(path.to_string());
        match value {
            Value::Array(items) => {
                items.iter().enumerate().for_each(|(i, item)| places(item, &format!("{path}/{i}"), found));
            }
            Value::Object(map) => {
                map.iter().for_each(|(key, item)| {
                    places(item, &format!("{path}/{}", key.replace('/', "~1")), found)
                });
            }
            _ => {}
        }
    }
    let mut found = Vec::new();
    places(whole, "", &mut found);
    let others = [
        json!(null),
        json!(""),
        json!("é▁#"),
        json!(0),
        json!(7),
        json!(-1),
        json!(4_294_967_295_u64),
        json!(1e300),
        json!(true),
        json!([]),
        json!(["a"]),
        json!({}),
        json!({"type": "Sequence"}),
        json!("(?<=(a|b)*)(a*)*$"),
    ];
    for path in &found {
        for other in &others {
            let mut mutated = whole.clone();
            *mutated.pointer_mut(path).unwrap() = other.clone();
            take(mutated);
        }
        if let Some((parent, key)) = path.rsplit_once('/') {
            let mut mutated = whole.clone();
            match mutated.pointer_mut(parent).unwrap() {
                Value::Object(map) => drop(map.shift_remove(&key.replace("~1", "/"))),
                Value::Array(items) => drop(items.remove(key.parse().unwrap())),
                _ => {}
            }
            take(mutated);
        }
    }
}

/// The crate that reads tokenizers panics on some of these files, while reading or on a text: here that is an
/// error with the file's name.
#[test]
fn a_hostile_tokenizer_is_an_error() {
    let (mut tried, mut usable, mut caught) = (0, 0, std::collections::BTreeSet::new());
    for whole in every_part() {
        each_mutation(&whole, |json| {
            tried += 1;
            let files = vec![("tokenizer.json".to_string(), json.to_string().into_bytes())];
            let mut note = |text: String| {
                assert!(text.contains("tokenizer.json") || text.contains("cannot"), "{text}");
                if let Some((_, panic)) = text.split_once("fail") {
                    caught.insert(panic.to_string());
                }
            };
            match Tokenizer::from_files(files, "dir") {
                Err(error) => note(error.to_string()),
                Ok(tokenizer) => {
                    usable += 1;
                    for text in ["ab <s> a-b 12 é", ""] {
                        match tokenizer.encode(text, true) {
                            Err(error) => note(error.to_string()),
                            Ok(ids) => drop(tokenizer.decode(&ids, false).map_err(|e| note(e.to_string()))),
                        }
                    }
                    drop(tokenizer.decode(&[0, 1, 2, 3, 4, 77], true).map_err(|e| note(e.to_string())));
                }
            }
        });
    }
    println!("{tried} files, {usable} usable, {} ways to panic: {caught:#?}", caught.len());
    assert!(tried > 2000 && usable > 100 && caught.len() >= 5);
}
