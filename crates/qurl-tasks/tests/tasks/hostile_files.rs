//! Files that nobody vouches for: whatever is in them, reading ends with rows or an error that names the
//! file.

use std::io::Write;
use std::sync::Arc;

use parquet::basic::{Compression, GzipLevel, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, Int32Type, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use qurl_tasks::data::{DataError, Taken, each_record, each_row, read};

use super::datasets::Scratch;

/// A parquet file with a problem and an answer, a day and a moment in every row.
fn parquet(compression: Compression, problem: &str, days: &[i32], moments: &[i64]) -> Vec<u8> {
    let schema = "message rows { REQUIRED BYTE_ARRAY problem (UTF8); REQUIRED BYTE_ARRAY answer (UTF8);
        REQUIRED INT32 day (DATE); REQUIRED INT64 moment (TIMESTAMP_MILLIS); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, schema, properties).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for text in [problem, "4"] {
        let mut column = group.next_column().unwrap().unwrap();
        let texts = vec![ByteArray::from(text); days.len()];
        column.typed::<ByteArrayType>().write_batch(&texts, None, None).unwrap();
        column.close().unwrap();
    }
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int32Type>().write_batch(days, None, None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(moments, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    bytes
}

fn gzip(text: &[u8], times: usize) -> Vec<u8> {
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    (0..times).for_each(|_| gz.write_all(text).unwrap());
    gz.finish().unwrap()
}

#[test]
fn parquet_in_every_packing_with_any_date() {
    for (name, compression) in [
        ("plain", Compression::UNCOMPRESSED),
        ("snappy", Compression::SNAPPY),
        ("gzip", Compression::GZIP(GzipLevel::default())),
        ("zstd", Compression::ZSTD(ZstdLevel::default())),
        ("lz4", Compression::LZ4),
        ("lz4_raw", Compression::LZ4_RAW),
    ] {
        let days = [14_611, i32::MAX, i32::MIN];
        let moments = [1_262_391_174_000, i64::MAX, i64::MIN];
        let bytes = parquet(compression, "2+2?", &days, &moments);
        let file = Scratch::new(&format!("dates-{name}.parquet"), &bytes);
        let rows = read(file.path()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(rows.len(), 3);
        assert_eq!((rows[0].answer.as_str(), &rows[0].extra["day"]), ("4", &"2010-01-02".into()));
        assert!(rows[0].extra["moment"].as_str().unwrap().starts_with("2010-01-02 00:12:54"));
        assert_eq!(
            (&rows[1].extra["day"], &rows[2].extra["day"]),
            (&"2147483647".into(), &"-2147483648".into())
        );
        assert_eq!(rows[2].extra["moment"], i64::MIN.to_string());
    }
}

#[test]
fn damaged_parquet_files_are_errors() {
    let whole = parquet(Compression::ZSTD(ZstdLevel::default()), "2+2?", &[1, 2, 3], &[1, 2, 3]);
    let (mut read_anyway, mut refused) = (0, 0);
    let mut tried = |bytes: &[u8]| {
        let file = Scratch::new("damaged.parquet", bytes);
        match read(file.path()) {
            Ok(_) => read_anyway += 1,
            Err(error) => {
                refused += 1;
                assert!(error.to_string().contains("damaged.parquet"), "{error}");
            }
        }
    };
    let mut random = 1_u64;
    for at in 0..whole.len() {
        // A bit, a whole byte, and a few bytes at once; and the file up to here.
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        for value in [whole[at] ^ 1 << (random >> 61), 0xff, 0x00] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            tried(&bytes);
        }
        let mut bytes = whole.clone();
        let end = (at + 5).min(bytes.len());
        bytes[at..end].fill((random >> 32) as u8);
        tried(&bytes);
        tried(&whole[..at]);
    }
    println!("{read_anyway} read, {refused} refused");
    assert!(read_anyway > 10 && refused > 1000);
}

/// A parquet file without rows whose schema is `levels` columns in one another, the innermost with
/// `children`.
fn nested(levels: usize, children: u8) -> Vec<u8> {
    let mut footer = vec![0x15, 2, 0x19, 0xfc];
    let mut count = levels + 2;
    while count > 127 {
        footer.push(count as u8 | 0x80);
        count >>= 7;
    }
    footer.push(count as u8);
    footer.extend([0x48, 1, b'm', 0x15, 2, 0]);
    (0..levels).for_each(|_| footer.extend([0x35, 2, 0x18, 1, b'a', 0x15, 2, 0]));
    footer.extend([0x15, 2, 0x25, 2, 0x18, 1, b'a', 0x15, 2 * children, 0, 0x16, 0, 0x19, 0x0c, 0]);
    let length = (footer.len() as u32).to_le_bytes();
    [&b"PAR1"[..], &footer, &length, b"PAR1"].concat()
}

#[test]
fn columns_in_columns_have_an_end() {
    let error = |levels, children| {
        let file = Scratch::new("nested.parquet", &nested(levels, children));
        read(file.path()).unwrap_err().to_string()
    };
    assert!(error(100, 0).ends_with("nested.parquet: no rows"), "{}", error(100, 0));
    for (levels, children, expected) in
        [(128, 0, "128 levels"), (200_000, 0, "128 levels"), (1, 9, "more children")]
    {
        let error = error(levels, children);
        assert!(error.contains("nested.parquet") && error.contains(expected), "{error}");
    }
}

/// Found by fuzzing: the header of a page that has a list of lists of 2^31 numbers after the end of the file.
#[test]
fn what_is_after_the_end_is_not_skipped_forever() {
    let file =
        Scratch::new("lists.parquet", include_bytes!("../../../../fuzz/regressions/data/slow/rows.parquet"));
    let error = read(file.path()).unwrap_err().to_string();
    assert!(error.contains("lists.parquet"), "{error}");
}

#[test]
fn what_unpacks_without_end_is_refused() {
    let count = |file: &Scratch| {
        let mut rows = 0;
        let each = each_record(file.path(), |_, _| {
            rows += 1;
            Ok::<_, DataError>(())
        });
        (rows, each.map_err(|e| e.to_string()))
    };
    // A line without an end, and lines without number, in gzip.
    let (rows, error) = count(&Scratch::new("line.jsonl.gz", &gzip(&[b'a'; 1 << 20], 70)));
    let error = error.unwrap_err();
    assert!(rows == 0 && error.contains("line.jsonl.gz, line 1") && error.contains("bytes"), "{error}");
    let line = format!("{{\"problem\": \"{}\", \"answer\": \"1\"}}\n", "a".repeat(1 << 20));
    let (rows, error) = count(&Scratch::new("lines.jsonl.gz", &gzip(line.as_bytes(), 100)));
    let error = error.unwrap_err();
    assert!(rows < 90 && error.contains("lines.jsonl.gz") && error.contains("unpack"), "{rows}: {error}");
    // One long text in a thousand rows takes a few bytes of parquet.
    let (days, moments) = (vec![1; 1000], vec![1; 1000]);
    let bytes = parquet(Compression::ZSTD(ZstdLevel::default()), &"a".repeat(500_000), &days, &moments);
    let (rows, error) = count(&Scratch::new("rows.parquet", &bytes));
    let error = error.unwrap_err();
    assert!(rows > 100 && rows < 1000 && error.contains("rows.parquet"), "{rows}: {error}");
    assert!(error.contains("unpack to more than"), "{error}");
}

/// A line of 56 MB with objects of seven bytes took 10.7 GB.
#[test]
fn values_of_a_row_are_counted_before_they_are_made() {
    let objects = |count| format!("[{}0]", "{\"\":0},".repeat(count));
    let row = |count| format!("{{\"problem\": \"2+2?\", \"answer\": \"4\", \"x\": {}}}\n", objects(count));
    assert_eq!(read(Scratch::new("some.jsonl", row(20_000).as_bytes()).path()).unwrap().len(), 1);
    for count in [40_000, 8_000_000] {
        let file = Scratch::new("values.jsonl", format!("{}{}", row(1), row(count)).as_bytes());
        let error = read(file.path()).unwrap_err().to_string();
        let expected = format!("values.jsonl, line 2: {} values, expected at most 65536", 2 * count + 5);
        assert!(error.ends_with(&expected), "{error}");
    }
}

#[test]
fn no_more_is_read_than_is_wanted() {
    let good = "{\"problem\": \"2+2?\", \"answer\": \"4\"}\n".repeat(3);
    let file = Scratch::new("wanted.jsonl", format!("{good}no JSON\n").as_bytes());
    let mut rows = 0;
    let taken = each_row(file.path(), |_| {
        rows += 1;
        if rows == 3 { Taken::Last } else { Taken::Kept }
    });
    assert!(taken.is_ok() && rows == 3, "the fourth line was not looked at");
    assert!(read(file.path()).unwrap_err().to_string().contains("line 4"));
}

#[cfg(unix)]
#[test]
fn a_data_set_is_a_regular_file() {
    let error = read(std::path::Path::new("/dev/zero")).unwrap_err().to_string();
    assert_eq!(error, "/dev/zero: a device, expected a regular file");
}
