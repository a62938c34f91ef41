//! Data sets: lines of JSON, the same in gzip, and parquet.

use super::{Run, Target};
use crate::input::Input;
use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::basic::Compression as Codec;
use parquet::data_type::{ByteArray, ByteArrayType, Int32Type, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::error::Error;
use std::io::Write;
use std::sync::Arc;

const LINES: &str = r##"{"question": "1+1?", "answer": "So it is.\n#### 2"}
{"problem": "2+2?", "answer": "4", "solution": "", "id": 7}
{"prompt": [{"role": "user", "content": "3+3?"}], "reward_model": {"ground_truth": "6"}, "data_source": "x"}
"##;
/// The names by which readers know what a file is.
const NAMES: [&str; 3] = ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"];

pub const DATA: Target = Target {
    name: "data",
    about: "data sets: JSONL, gzip, parquet",
    words: &[
        "\"prompt\":",
        "\"question\":",
        "\"answer\":",
        "\"reward_model\":",
        "\"ground_truth\":",
        "PAR1",
        "\u{feff}",
        "\n\n",
        "\u{1f}\u{8b}",
        "{\"a\":",
        "null",
        "\\ud800",
        "\"role\":",
        "\"content\":",
        "[",
        "1e999",
        "####",
    ],
    made: |_| {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(LINES.as_bytes())?;
        let mut inputs = vec![
            Input::new([(NAMES[0], LINES.as_bytes().to_vec())]),
            Input::new([(NAMES[1], gzip.finish()?)]),
        ];
        for codec in [Codec::UNCOMPRESSED, Codec::SNAPPY] {
            inputs.push(Input::new([(NAMES[2], table(codec)?)]));
        }
        Ok(inputs)
    },
    open: |scratch| {
        let scratch = scratch.to_path_buf();
        let run: Run = Box::new(move |input| {
            let Some((name, _)) = input.parts.first() else { return false };
            input.write(&scratch).is_ok() && qurl_tasks::data::read(&scratch.join(name)).is_ok()
        });
        Ok(run)
    },
};

/// A small table with texts, a list, dates and times.
fn table(codec: Codec) -> Result<Vec<u8>, Box<dyn Error>> {
    let schema = "message schema {
        OPTIONAL BYTE_ARRAY answer (UTF8);
        OPTIONAL GROUP prompt (LIST) { REPEATED GROUP list { OPTIONAL GROUP element {
            OPTIONAL BYTE_ARRAY content (UTF8);
        } } }
        REQUIRED INT32 day (DATE);
        REQUIRED INT64 time (TIMESTAMP_MILLIS);
    }";
    let properties = WriterProperties::builder().set_compression(codec).build();
    let schema = Arc::new(parse_message_type(schema)?);
    let mut writer = SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties))?;
    let mut group = writer.next_row_group()?;
    let texts = |texts: [&str; 3]| texts.map(ByteArray::from);
    let mut column = group.next_column()?.ok_or("no column")?;
    column.typed::<ByteArrayType>().write_batch(&texts(["2", "4", "6"]), Some(&[1; 3]), None)?;
    column.close()?;
    let mut column = group.next_column()?.ok_or("no column")?;
    let questions = texts(["1+1?", "2+2?", "3+3?"]);
    column.typed::<ByteArrayType>().write_batch(&questions, Some(&[4; 3]), Some(&[0; 3]))?;
    column.close()?;
    let mut column = group.next_column()?.ok_or("no column")?;
    column.typed::<Int32Type>().write_batch(&[0, 20_000, -5], None, None)?;
    column.close()?;
    let mut column = group.next_column()?.ok_or("no column")?;
    column.typed::<Int64Type>().write_batch(&[0, 1_700_000_000_000, -1], None, None)?;
    column.close()?;
    group.close()?;
    Ok(writer.into_inner()?)
}
