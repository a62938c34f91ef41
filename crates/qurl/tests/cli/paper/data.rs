//! Problems in the formats that the paper's data sets are published in.

use crate::common::shared_data;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use qurl_tasks::presets::DAPO;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

/// A problem and its answer.
pub type Pair = (String, String);

/// Sums, each with its answer.
pub fn sums(first: usize, count: usize) -> Vec<Pair> {
    let problem = |a: usize| format!("Ann has {a} apples and buys {} more. How many does she have?", a + 2);
    (first..first + count).map(|a| (problem(a), (2 * a + 2).to_string())).collect()
}

/// The first problems of a shared set of JSON lines.
pub fn shared(what: &str, count: usize) -> Option<Vec<Pair>> {
    let rows = qurl_tasks::data::read(&shared_data(what)?).expect("a data set");
    assert!(rows.len() >= count, "{what} has {} rows", rows.len());
    Some(rows.into_iter().take(count).map(|row| (row.problem.plain(), row.answer)).collect())
}

/// GSM8K's lines: `question`, and an `answer` that ends in `#### 72`.
pub fn write_gsm8k(file: &Path, pairs: &[Pair]) {
    let row = |(question, answer): &Pair| {
        json!({"question": question, "answer": format!("So it is.\n#### \
                                                                                          {answer}")})
    };
    write_lines(file, pairs.iter().map(row));
}

/// DeepScaleR's lines.
pub fn write_deepscaler(file: &Path, pairs: &[Pair]) {
    let row = |(problem, answer): &Pair| json!({"problem": problem, "answer": answer, "solution": ""});
    write_lines(file, pairs.iter().map(row));
}

fn write_lines(file: &Path, rows: impl Iterator<Item = Value>) {
    std::fs::write(file, rows.map(|row| format!("{row}\n")).collect::<String>()).expect("written");
}

/// DAPO-Math-17k as verl reads it: one user message with the template around the problem, and the ground
/// truth.
pub fn write_dapo(file: &Path, pairs: &[Pair]) {
    let schema = "message schema {
        OPTIONAL BYTE_ARRAY data_source (UTF8);
        OPTIONAL GROUP prompt (LIST) { REPEATED GROUP list { OPTIONAL GROUP element {
            OPTIONAL BYTE_ARRAY content (UTF8);
            OPTIONAL BYTE_ARRAY role (UTF8);
        } } }
        OPTIONAL BYTE_ARRAY ability (UTF8);
        OPTIONAL GROUP reward_model {
            OPTIONAL BYTE_ARRAY ground_truth (UTF8);
            OPTIONAL BYTE_ARRAY style (UTF8);
        }
        OPTIONAL GROUP extra_info { OPTIONAL INT64 index; }
    }";
    let schema = Arc::new(parse_message_type(schema).expect("a schema"));
    let sink = std::fs::File::create(file).expect("created");
    let mut writer =
        SerializedFileWriter::new(sink, schema, Arc::new(WriterProperties::default())).expect("a writer");
    let mut group = writer.next_row_group().expect("a group");
    let all = |text: &str| vec![text.to_string(); pairs.len()];
    let prompts = pairs.iter().map(|(problem, _)| DAPO.apply(problem).plain()).collect();
    write_texts(&mut group, all("math_dapo"), 1, false);
    write_texts(&mut group, prompts, 4, true);
    write_texts(&mut group, all("user"), 4, true);
    write_texts(&mut group, all("MATH"), 1, false);
    write_texts(&mut group, pairs.iter().map(|(_, answer)| answer.clone()).collect(), 2, false);
    write_texts(&mut group, all("rule-lighteval/MATH_v2"), 2, false);
    let mut column = group.next_column().expect("a group").expect("a column");
    let numbers: Vec<i64> = (0..pairs.len() as i64).collect();
    column.typed::<Int64Type>().write_batch(&numbers, Some(&vec![2; pairs.len()]), None).expect("written");
    column.close().expect("closed");
    group.close().expect("closed");
    writer.close().expect("closed");
}

/// The next column: one text a row, all there; `repeated` for those inside a list of one message.
fn write_texts(
    group: &mut SerializedRowGroupWriter<std::fs::File>,
    texts: Vec<String>,
    definition: i16,
    repeated: bool,
) {
    let values: Vec<ByteArray> = texts.iter().map(|text| ByteArray::from(text.as_str())).collect();
    let (definition, repetition) = (vec![definition; values.len()], vec![0; values.len()]);
    let repetition = repeated.then_some(&repetition[..]);
    let mut column = group.next_column().expect("a group").expect("a column");
    column.typed::<ByteArrayType>().write_batch(&values, Some(&definition), repetition).expect("written");
    column.close().expect("closed");
}
