//! Parquet files through the record interface: a row becomes a JSON object, and the rules for rows are those
//! of JSONL.
//!
//! The crate trusts what a file says of itself in places: it panics on some, and unpacks pages as far as they
//! go. So it runs on a thread that is watched from outside, and hands rows on one by one. What no watching
//! helps against is looked at before ([`footer`]).

use std::fs::File;
use std::path::Path;

use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row as Record};
use qurl_files::{GaveUp, MIB, Patience, watched_each};
use serde_json::{Map, Value};

use super::source::Source;
use super::{DataError, MAX_ROW, MAX_VALUES, footer};

/// How many times its length a file may unpack to, beyond what every file may: a column with one text in all
/// of its rows takes next to nothing.
const MAX_RATIO: u64 = 1000;
const ALWAYS: u64 = 256 * MIB;
/// The page and the dictionary of every column of some rows are in memory at once.
const PATIENCE: Patience =
    Patience { time: std::time::Duration::from_secs(300), memory: 2 << 30, stack: 16 << 20 };

/// What the reader's thread makes.
type Made = Result<Map<String, Value>, Failed>;

enum Failed {
    Parquet(ParquetError),
    TooLarge,
    Values(usize),
    Bomb(u64),
}

/// What a row has, about.
#[derive(Default)]
struct Size {
    bytes: u64,
    values: usize,
}

impl Size {
    fn is_too_much(&self) -> bool {
        self.bytes > MAX_ROW || self.values > MAX_VALUES
    }
}

/// Hands on the fields of every row of a parquet file, with its number from 1.
pub(super) fn each_record<E: From<DataError>>(
    path: &Path,
    mut take: impl FnMut(usize, Map<String, Value>) -> Result<(), E>,
) -> Result<(), E> {
    let io = |source| DataError::Io { path: path.into(), source };
    let file = qurl_files::open(path).map_err(io)?;
    let packed = file.metadata().map_err(io)?.len();
    let mut row = 0;
    let each = |made: Made| {
        row += 1;
        let failed = |failed| match failed {
            Failed::Parquet(source) => DataError::Parquet { path: path.into(), source },
            Failed::TooLarge => DataError::TooLarge { path: path.into(), row },
            Failed::Values(found) => DataError::Values { path: path.into(), row, found },
            Failed::Bomb(unpacked) => DataError::Bomb { path: path.into(), packed, unpacked },
        };
        take(row, made.map_err(failed)?).map_err(End::Taker)
    };
    /// What ends the reading.
    enum End<E> {
        Data(DataError),
        GaveUp(GaveUp),
        Taker(E),
    }
    impl<E> From<GaveUp> for End<E> {
        fn from(gave_up: GaveUp) -> End<E> {
            End::GaveUp(gave_up)
        }
    }
    impl<E> From<DataError> for End<E> {
        fn from(error: DataError) -> End<E> {
            End::Data(error)
        }
    }
    watched_each(PATIENCE, move |give| read(file, packed, give), each).map_err(|end| match end {
        End::Data(error) => error.into(),
        End::GaveUp(source) => DataError::GaveUp { path: path.into(), source }.into(),
        End::Taker(error) => error,
    })
}

/// Gives all rows, or those before an error, and the error.
fn read(file: File, packed: u64, give: &mut dyn FnMut(Made) -> bool) {
    let mut unpacked = 0;
    let rows = || {
        footer::check(&file)?;
        let reader = SerializedFileReader::new(Source { file, length: packed })?;
        for record in reader.get_row_iter(None)? {
            let mut size = Size::default();
            let fields = fields_of(&record?, &mut size);
            unpacked += size.bytes;
            let row = match () {
                () if size.bytes > MAX_ROW => Err(Failed::TooLarge),
                () if size.values > MAX_VALUES => Err(Failed::Values(size.values)),
                () if unpacked > ALWAYS + MAX_RATIO * packed => Err(Failed::Bomb(unpacked)),
                () => Ok(fields),
            };
            if row.is_err() | !give(row) {
                break;
            }
        }
        Ok(())
    };
    if let Err(error) = rows() {
        give(Err(Failed::Parquet(error)));
    }
}

/// The fields of a row, as far as it is not too large.
fn fields_of(record: &Record, size: &mut Size) -> Map<String, Value> {
    record.get_column_iter().map(|(name, field)| (name.clone(), value_of(field, size))).collect()
}

fn value_of(field: &Field, size: &mut Size) -> Value {
    size.values += 1;
    size.bytes += match field {
        Field::Str(text) => text.len(),
        Field::Bytes(bytes) => bytes.len(),
        _ => size_of::<Value>(),
    } as u64;
    if size.is_too_much() {
        return Value::Null; // the row is refused
    }
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
        Field::Group(record) => Value::Object(fields_of(record, size)),
        Field::ListInternal(list) => list.elements().iter().map(|item| value_of(item, size)).collect(),
        Field::MapInternal(map) => {
            let mut entry = |(key, value): &(Field, Field)| (shown(key), value_of(value, size));
            Value::Object(map.entries().iter().map(&mut entry).collect())
        }
        other => shown(other).into(),
    }
}

/// A field as text. Days and moments that no calendar has are numbers, as they are stored: the crate panics
/// on them.
fn shown(field: &Field) -> String {
    const MAX_SECONDS: i64 = 8_000_000_000_000; // some 250,000 years
    let (stored, seconds) = match field {
        Field::Date(days) => (i64::from(*days), i64::from(*days) * 86_400),
        Field::TimestampMillis(at) => (*at, at / 1000),
        Field::TimestampMicros(at) => (*at, at / 1_000_000),
        Field::TimeMillis(at) if *at < 0 => (i64::from(*at), i64::MAX),
        Field::TimeMicros(at) if *at < 0 => (*at, i64::MAX),
        other => return other.to_string(),
    };
    if seconds.abs() > MAX_SECONDS { stored.to_string() } else { field.to_string() }
}
