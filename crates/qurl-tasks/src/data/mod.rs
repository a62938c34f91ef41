//! Reading data sets: JSONL, gzip JSONL, and verl's parquet layout, all into the same rows.
//!
//! A row needs a problem and an answer. Names differ between projects, so a few aliases are understood;
//! whatever else a row has is kept in `extra`.
//!
//! Nobody vouches for a file: it is a regular one, rows are read one after the other and only as far as they
//! are wanted, their size and their values are bounded, what unpacks to a hundred times its length is
//! refused, and so are more rows than half of the memory holds.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use qurl_files::{GaveUp, MIB};
use serde_json::{Map, Value};

use crate::grader::extract;
use crate::task::{Message, Prompt};
use held::Held;

mod footer;
mod gzip;
mod held;
mod parquet;
mod source;

/// Bytes of a line, or of the texts of a row of a parquet file.
const MAX_ROW: u64 = 64 * MIB;
/// Values of a row: two bytes of JSON can be a value of a hundred, or an object of five hundred.
const MAX_VALUES: usize = 1 << 16;

/// How a gzip file begins.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// What some editors write before the first character of a text; no part of it.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// Names of the field with the problem.
const PROBLEM: [&str; 3] = ["problem", "question", "prompt"];
/// Names of the field with the answer.
const ANSWER: [&str; 4] = ["reward_model.ground_truth", "answer", "ground_truth", "final_answer"];

/// One problem of a data set.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The row's own id, or `file:row`.
    pub id: String,
    /// The problem as stored: text, or chat messages.
    pub problem: Prompt,
    /// The right answer.
    pub answer: String,
    /// Which data set it came from, where the row says so.
    pub source: Option<String>,
    /// All other fields.
    pub extra: Value,
}

/// Why a data set could not be read.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file could not be opened or read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: std::io::Error,
    },
    /// The name ends in `.gz`, the contents are something else.
    #[error("{path}: not a gzip file, expected one because of its name")]
    NotGzip {
        /// The file.
        path: PathBuf,
    },
    /// A line could not be read.
    #[error("{path}, line {row}: {source}")]
    Line {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        row: usize,
        /// What went wrong.
        source: std::io::Error,
    },
    /// A line is not text.
    #[error("{path}, line {row}: not UTF-8 text: {source}")]
    Text {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        row: usize,
        /// What went wrong.
        source: std::str::Utf8Error,
    },
    /// A line is not JSON.
    #[error("{path}, line {row}: not a JSON object: {reason}")]
    Json {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        row: usize,
        /// What went wrong, and at which column.
        reason: String,
    },
    /// A field is there and of no use.
    #[error("{path}, {} {row}: `{key}` is {found}, expected {expected}", unit(path))]
    Value {
        /// The file.
        path: PathBuf,
        /// Row number, from 1.
        row: usize,
        /// The field.
        key: String,
        /// What is in it.
        found: String,
        /// What should be.
        expected: &'static str,
    },
    /// A row lacks a field.
    #[error("{path}, {} {row}: expected {expected}, found the keys {keys:?}", unit(path))]
    Field {
        /// The file.
        path: PathBuf,
        /// Row number, from 1.
        row: usize,
        /// What is missing.
        expected: &'static str,
        /// The keys that are there.
        keys: Vec<String>,
    },
    /// A row is too large.
    #[error("{path}, row {row}: more than {MAX_ROW} bytes, expected at most that")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Row number, from 1.
        row: usize,
    },
    /// A row has too many values.
    #[error("{path}, {} {row}: {found} values, expected at most {MAX_VALUES}", unit(path))]
    Values {
        /// The file.
        path: PathBuf,
        /// Row number, from 1.
        row: usize,
        /// How many there are.
        found: usize,
    },
    /// The rows take too much memory together.
    #[error(
        "{path}, row {row}: it and the rows before it take {} MiB, expected at most {}, half of the free \
         memory",
        found >> 20, most >> 20
    )]
    Memory {
        /// The file.
        path: PathBuf,
        /// How many rows there are so far.
        row: usize,
        /// Bytes that they take.
        found: u64,
        /// Bytes that they may take.
        most: u64,
    },
    /// The file is packed so tightly that it is no data set.
    #[error("{path}: {packed} bytes unpack to more than {unpacked}, expected a data set")]
    Bomb {
        /// The file.
        path: PathBuf,
        /// Its length.
        packed: u64,
        /// What has come out of it so far.
        unpacked: u64,
    },
    /// Its reader took too much, or failed.
    #[error("{path}: not a parquet file that can be read: reading it {source}")]
    GaveUp {
        /// The file.
        path: PathBuf,
        /// Why.
        source: GaveUp,
    },
    /// The parquet file could not be read.
    #[error("{path}: {source}")]
    Parquet {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: ::parquet::errors::ParquetError,
    },
    /// The file has no rows.
    #[error("{path}: no rows")]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// What became of a row that was handed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It is held.
    Kept,
    /// It is not.
    Left,
    /// It is held, and no more are wanted.
    Last,
}

/// Reads all problems of a `.jsonl`, `.jsonl.gz` or `.parquet` file.
pub fn read(path: &Path) -> Result<Vec<Row>, DataError> {
    let mut rows = Vec::new();
    each_row(path, |row| {
        rows.push(row);
        Taken::Kept
    })?;
    Ok(rows)
}

/// Hands on the problems of a file until no more are wanted; the rest is not read.
pub fn each_row(path: &Path, take: impl FnMut(Row) -> Taken) -> Result<(), DataError> {
    each_row_within(path, Held::new(None), take)
}

fn each_row_within(path: &Path, mut held: Held, mut take: impl FnMut(Row) -> Taken) -> Result<(), DataError> {
    /// What ends the reading.
    enum End {
        Enough,
        Data(DataError),
    }
    impl From<DataError> for End {
        fn from(error: DataError) -> End {
            End::Data(error)
        }
    }
    let mut count = 0;
    let read = each_record(path, |number, fields| {
        let row = row_of(path, number, fields)?;
        count += 1;
        // Before it is handed on: what holds it may take as much again.
        let fits = held.hold(&row);
        match (take(row), fits) {
            (Taken::Left, _) => held.forget(),
            (_, Err((found, most))) => {
                return Err(DataError::Memory { path: path.into(), row: count, found, most }.into());
            }
            (Taken::Kept, Ok(())) => {}
            (Taken::Last, Ok(())) => return Err(End::Enough),
        }
        Ok(())
    });
    match read {
        Ok(()) | Err(End::Enough) => Ok(()),
        Err(End::Data(error)) => Err(error),
    }
}

/// Hands on the fields of every row of a `.jsonl`, `.jsonl.gz` or `.parquet` file, with the row's number from
/// 1. In a file of lines that is the number of the line. A file without rows is an error.
pub fn each_record<E: From<DataError>>(
    path: &Path,
    mut take: impl FnMut(usize, Map<String, Value>) -> Result<(), E>,
) -> Result<(), E> {
    let mut empty = true;
    let counted = |row: usize, fields: Map<String, Value>| {
        empty = false;
        take(row, fields)
    };
    if is_parquet(path) {
        parquet::each_record(path, counted)?
    } else {
        each_line(path, counted)?
    }
    if empty { Err(DataError::Empty { path: path.into() }.into()) } else { Ok(()) }
}

/// What the rows of a file are called where they are counted: lines, unless it is a parquet file.
pub fn unit(path: &Path) -> &'static str {
    if is_parquet(path) { "row" } else { "line" }
}

fn is_parquet(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "parquet")
}

fn each_line<E: From<DataError>>(
    path: &Path,
    mut take: impl FnMut(usize, Map<String, Value>) -> Result<(), E>,
) -> Result<(), E> {
    let gzip = path.extension().is_some_and(|extension| extension == "gz");
    let io = |source| DataError::Io { path: path.into(), source };
    let mut file = BufReader::new(qurl_files::open(path).map_err(io)?);
    if gzip && !file.fill_buf().map_err(io)?.starts_with(&GZIP) {
        return Err(DataError::NotGzip { path: path.into() }.into());
    }
    let reader: Box<dyn Read> = if gzip { Box::new(gzip::Unpacked::new(file)) } else { Box::new(file) };
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    for row in 1.. {
        let got = qurl_files::read_line(&mut reader, &mut line, MAX_ROW);
        if got.map_err(|source| DataError::Line { path: path.into(), row, source })? == 0 {
            break;
        }
        let text = std::str::from_utf8(&line);
        let text = text.map_err(|source| DataError::Text { path: path.into(), row, source })?;
        let text = if row == 1 { text.trim_start_matches(BYTE_ORDER_MARK) } else { text };
        if text.trim().is_empty() {
            continue;
        }
        let found = qurl_files::json_size(text.as_bytes()).values;
        if found > MAX_VALUES {
            return Err(DataError::Values { path: path.into(), row, found }.into());
        }
        let fields = serde_json::from_str(text);
        let wrong = |error| DataError::Json { path: path.into(), row, reason: in_one_line(&error) };
        take(row, fields.map_err(wrong)?)?;
    }
    Ok(())
}

/// What is wrong with one line of JSON. The reader counts lines, too, and is always at its first.
pub fn in_one_line(error: &serde_json::Error) -> String {
    error.to_string().replace(" at line 1 column ", " at column ")
}

/// Makes a row of a record's fields.
fn row_of(path: &Path, row: usize, mut fields: Map<String, Value>) -> Result<Row, DataError> {
    // A field that is there is what the row means by it; only where there is none, it lacks one.
    let wrong = |keys: &[&str], form, expected, fields: &Map<String, Value>| {
        let there = keys.iter().find_map(|key| Some((key.to_string(), nested(fields, key)?)));
        let path = path.to_path_buf();
        match there {
            Some((key, value)) => DataError::Value { path, row, key, found: shown(value), expected: form },
            None => DataError::Field { path, row, expected, keys: fields.keys().cloned().collect() },
        }
    };
    let Some(problem) = PROBLEM.iter().find_map(|key| prompt_of(fields.get(*key)?)) else {
        let expected = "a text or chat messages under `problem`, `question` or `prompt`";
        return Err(wrong(&PROBLEM, "a text or chat messages (`role`, `content`)", expected, &fields));
    };
    let ground_truth = nested(&fields, ANSWER[0]).and_then(answer_of);
    let named = || ANSWER[1..].iter().find_map(|key| answer_of(fields.get(*key)?));
    let boxed = || Some(extract::boxed(fields.get("solution")?.as_str()?)?.1);
    let Some(answer) = ground_truth.or_else(named).or_else(boxed).filter(|a| !a.trim().is_empty()) else {
        let expected =
            "an answer under `answer`, `ground_truth`, `reward_model.ground_truth` or boxed in `solution`";
        let form = "a text, a number or a list of them";
        return Err(wrong(&ANSWER, form, expected, &fields));
    };
    let text_of = |key: &str| match fields.get(key) {
        Some(Value::String(s)) => Some(s.clone()),
        Some(Value::Number(n)) => Some(n.to_string()),
        _ => None,
    };
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("data");
    let id =
        ["id", "unique_id"].iter().find_map(|key| text_of(key)).unwrap_or_else(|| format!("{name}:{row}"));
    let source = text_of("data_source").or_else(|| text_of("source"));
    for key in ["problem", "question", "prompt", "answer", "id"] {
        fields.remove(key);
    }
    Ok(Row { id, problem, answer, source, extra: Value::Object(fields) })
}

/// A field by its name, or one inside of another as `outer.inner`.
fn nested<'a>(fields: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    match key.split_once('.') {
        Some((outer, inner)) => fields.get(outer)?.get(inner),
        None => fields.get(key),
    }
}

/// A value that is of no use, in words.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::String(text) if text.trim().is_empty() => "empty".into(),
        Value::Array(items) if items.is_empty() => "an empty list".into(),
        Value::Array(_) => "a list of something else".into(),
        Value::Object(_) => "an object".into(),
        other => other.to_string(),
    }
}

/// Text, or a list of `{role, content}`.
fn prompt_of(value: &Value) -> Option<Prompt> {
    match value {
        Value::String(text) if !text.trim().is_empty() => Some(Prompt::Text(text.clone())),
        Value::Array(items) if !items.is_empty() => {
            let message = |item: &Value| {
                Some(Message {
                    role: item.get("role")?.as_str()?.into(),
                    content: item.get("content")?.as_str()?.into(),
                })
            };
            items.iter().map(message).collect::<Option<Vec<_>>>().map(Prompt::Chat)
        }
        _ => None,
    }
}

/// A text, a number, or a list of alternatives or parts.
fn answer_of(value: &Value) -> Option<String> {
    match value {
        Value::String(s) => Some(s.clone()),
        Value::Number(n) => Some(n.to_string()),
        Value::Array(items) => {
            let parts: Option<Vec<String>> = items.iter().map(answer_of).collect();
            parts.map(|p| p.join(", "))
        }
        // A Countdown ground truth is an object with its target.
        Value::Object(fields) => answer_of(fields.get("target")?),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is refused is the sum of what is kept.
    #[test]
    fn rows_that_are_held_are_counted_together() {
        let path = std::env::temp_dir().join(format!("qurl-held-{}.jsonl", std::process::id()));
        let row = serde_json::json!({"problem": "2+2?", "answer": "4", "x": "y".repeat(1 << 20)});
        std::fs::write(&path, format!("{row}\n").repeat(5)).expect("written");
        let read = |mebibytes: u64, taken: Taken| {
            each_row_within(&path, Held::new(Some(mebibytes << 20)), |_| taken).map_err(|e| e.to_string())
        };
        assert_eq!(read(6, Taken::Kept), Ok(()));
        assert_eq!(read(2, Taken::Left), Ok(()), "one after the other");
        assert_eq!(read(2, Taken::Last), Ok(()), "the first");
        let error = read(3, Taken::Kept).expect_err("too much");
        assert!(error.contains(&format!("{}, row 3: it and the rows before it take 3 MiB", path.display())));
        assert!(error.ends_with("expected at most 3, half of the free memory"), "{error}");
        std::fs::remove_file(path).expect("removed");
    }
}
