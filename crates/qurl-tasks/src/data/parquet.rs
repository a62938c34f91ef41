//! Parquet files through the record interface: a row becomes a JSON object, and the rules for rows are those
//! of JSONL.

use std::fs::File;
use std::path::Path;

use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row as Record};
use serde_json::{Map, Value};

use super::DataError;

/// Hands on the fields of every row of a parquet file, with its number from 1.
pub(super) fn each_record<E: From<DataError>>(
    path: &Path,
    mut take: impl FnMut(usize, Map<String, Value>) -> Result<(), E>,
) -> Result<(), E> {
    let file = File::open(path).map_err(|source| DataError::Io { path: path.into(), source })?;
    let failed = |source: ParquetError| DataError::Parquet { path: path.into(), source };
    let reader = SerializedFileReader::new(file).map_err(failed)?;
    for (index, record) in reader.get_row_iter(None).map_err(failed)?.enumerate() {
        take(index + 1, fields_of(&record.map_err(failed)?))?;
    }
    Ok(())
}

fn fields_of(record: &Record) -> Map<String, Value> {
    record.get_column_iter().map(|(name, field)| (name.clone(), value_of(field))).collect()
}

fn value_of(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(b) => (*b).into(),
        Field::Byte(n) => (*n).into(),
        Field::Short(n) => (*n).into(),
        Field::Int(n) => (*n).into(),
        Field::Long(n) => (*n).into(),
        Field::UByte(n) => (*n).into(),
        Field::UShort(n) => (*n).into(),
        Field::UInt(n) => (*n).into(),
        Field::ULong(n) => (*n).into(),
        Field::Float(x) => f64::from(*x).into(),
        Field::Double(x) => (*x).into(),
        Field::Str(s) => s.clone().into(),
        Field::Bytes(bytes) => String::from_utf8_lossy(bytes.data()).into_owned().into(),
        Field::Group(record) => Value::Object(fields_of(record)),
        Field::ListInternal(list) => list.elements().iter().map(value_of).collect(),
        Field::MapInternal(map) => {
            let entry = |(key, value): &(Field, Field)| (key.to_string(), value_of(value));
            Value::Object(map.entries().iter().map(entry).collect())
        }
        other => other.to_string().into(),
    }
}
