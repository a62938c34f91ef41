//! Examples in every layout and file format: what says the same trains the same model, bit for bit.

use crate::common::{directory, qurl_in, tiny_model};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const RECIPE: &str = r#"
[model]
path = "model"

[sft]
steps = 4
batch_size = 3
max_length = 120
lr = 3e-3

[trainer]
compute = "f32"
micro_tokens = 128
save_freq = 0
"#;

/// A directory with a model and a recipe that names no files.
fn place(name: &str, template: bool) -> PathBuf {
    let dir = directory(name);
    tiny_model(&dir.join("model"), "0123456789+=<>/ .,:#\n'abcdefghijklmnopqrstuvwxyzBIRW");
    if template {
        let path = dir.join("model/tokenizer_config.json");
        let mut config: Value =
            serde_json::from_str(&std::fs::read_to_string(&path).expect("read")).expect("JSON");
        config["chat_template"] = json!(
            "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}\
             {% if add_generation_prompt %}<assistant>{% endif %}"
        );
        std::fs::write(&path, config.to_string()).expect("written");
    }
    std::fs::write(dir.join("sft.toml"), RECIPE).expect("written");
    dir
}

fn write_lines(path: &Path, rows: &[Value]) {
    let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
    if path.extension().is_some_and(|extension| extension == "gz") {
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(text.as_bytes()).expect("packed");
        std::fs::write(path, gz.finish().expect("packed")).expect("written");
    } else {
        std::fs::write(path, text).expect("written");
    }
}

/// Columns of texts as a parquet file; an empty text is null.
fn write_parquet(path: &Path, columns: &[(&str, Vec<&str>)]) {
    let fields: String =
        columns.iter().map(|(name, _)| format!("OPTIONAL BYTE_ARRAY {name} (UTF8); ")).collect();
    let schema = Arc::new(parse_message_type(&format!("message schema {{ {fields} }}")).expect("a schema"));
    let file = std::fs::File::create(path).expect("created");
    let properties = Arc::new(WriterProperties::builder().build());
    let mut writer = SerializedFileWriter::new(file, schema, properties).expect("a writer");
    let mut group = writer.next_row_group().expect("a group");
    for (_, values) in columns {
        let mut column = group.next_column().expect("a column").expect("one more");
        let there: Vec<i16> = values.iter().map(|text| i16::from(!text.is_empty())).collect();
        let texts: Vec<ByteArray> =
            values.iter().filter(|text| !text.is_empty()).map(|text| ByteArray::from(*text)).collect();
        column.typed::<ByteArrayType>().write_batch(&texts, Some(&there), None).expect("written");
        column.close().expect("closed");
    }
    group.close().expect("closed");
    writer.close().expect("closed");
}

/// The weights after training on a file.
fn weights(dir: &Path, file: &str) -> Vec<u8> {
    let run = format!("run-{}", file.replace('.', "-"));
    let set = format!("sft.files=[\"{file}\"]");
    let done = qurl_in(dir, &["sft", "sft.toml", "--set", &set, "--run", &run, "--quiet"], "");
    assert_eq!(done.status, 0, "{file}: {}", done.stderr);
    std::fs::read(dir.join(run).join("model/model.safetensors")).expect("weights")
}

const PAIRS: [(&str, &str); 3] = [("1+1=", "2"), ("10+2=", "12"), ("7+8=", "15")];

#[test]
fn texts_from_any_file_are_the_same() {
    let dir = place("sft-texts", false);
    let rows =
        |response: &str| PAIRS.map(|(prompt, text)| json!({"prompt": prompt, response: text, "id": 1}));
    write_lines(&dir.join("response.jsonl"), &rows("response"));
    write_lines(&dir.join("completion.jsonl"), &rows("completion"));
    write_lines(&dir.join("packed.jsonl.gz"), &rows("response"));
    let column =
        |of: fn(&(&'static str, &'static str)) -> &'static str| PAIRS.iter().map(of).collect::<Vec<_>>();
    write_parquet(
        &dir.join("rows.parquet"),
        &[
            ("prompt", column(|pair| pair.0)),
            ("completion", column(|pair| pair.1)),
            ("response", vec![""; 3]),
        ],
    );
    let first = weights(&dir, "response.jsonl");
    for file in ["completion.jsonl", "packed.jsonl.gz", "rows.parquet"] {
        assert!(weights(&dir, file) == first, "{file}");
    }
    // Alpaca's fields without a chat template are its authors' text.
    let spelled = "Below is an instruction that describes a task. Write a response that appropriately \
                   completes the request.\n\n### Instruction:\nadd\n\n### Response:";
    write_lines(&dir.join("alpaca.jsonl"), &[json!({"instruction": "add", "input": "", "output": "2"})]);
    write_lines(&dir.join("spelled.jsonl"), &[json!({"prompt": spelled, "response": "2"})]);
    let long = RECIPE.replace("path = \"model\"", "path = \"model\"\nmax_position_embeddings = 256");
    std::fs::write(dir.join("sft.toml"), long.replace("max_length = 120", "max_length = 256"))
        .expect("written");
    assert!(weights(&dir, "alpaca.jsonl") == weights(&dir, "spelled.jsonl"));

    write_parquet(&dir.join("bad.parquet"), &[("prompt", vec!["1+1=", "2+2="]), ("response", vec!["2", ""])]);
    qurl_in(&dir, &["sft", "sft.toml", "--set", "sft.files=[\"bad.parquet\"]"], "")
        .assert_bad(&["bad.parquet, row 2: expected `response` or `completion` beside `prompt`"]);
}

#[test]
fn conversations_from_any_layout_are_the_same() {
    let dir = place("sft-chats", true);
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let chat =
        |(said, answer): (&str, &str)| json!({"messages": [turn("user", said), turn("assistant", answer)]});
    let trl = |(said, answer): (&str, &str)| {
        let (prompt, completion) = (turn("user", said), turn("assistant", answer));
        json!({"prompt": [prompt], "completion": [completion]})
    };
    let alpaca = |(said, answer): (&str, &str)| json!({"instruction": said, "input": "", "output": answer});
    write_lines(&dir.join("messages.jsonl"), &PAIRS.map(chat));
    write_lines(&dir.join("trl.jsonl.gz"), &PAIRS.map(trl));
    write_lines(&dir.join("alpaca.jsonl"), &PAIRS.map(alpaca));
    let column =
        |of: fn(&(&'static str, &'static str)) -> &'static str| PAIRS.iter().map(of).collect::<Vec<_>>();
    write_parquet(
        &dir.join("alpaca.parquet"),
        &[("instruction", column(|pair| pair.0)), ("input", vec![""; 3]), ("output", column(|pair| pair.1))],
    );
    let first = weights(&dir, "messages.jsonl");
    for file in ["trl.jsonl.gz", "alpaca.jsonl", "alpaca.parquet"] {
        assert!(weights(&dir, file) == first, "{file}");
    }
    // Text is text, template or not.
    write_lines(
        &dir.join("text.jsonl"),
        &PAIRS.map(|(prompt, text)| json!({"prompt": prompt, "response": text})),
    );
    assert!(weights(&dir, "text.jsonl") != first);

    let plain = place("sft-chats-without", false);
    write_lines(&plain.join("messages.jsonl"), &PAIRS.map(chat));
    qurl_in(&plain, &["sft", "sft.toml", "--set", "sft.files=[\"messages.jsonl\"]"], "")
        .assert_bad(&["messages.jsonl, line 1: the prompt is a chat and the tokenizer has no chat template"]);
}
