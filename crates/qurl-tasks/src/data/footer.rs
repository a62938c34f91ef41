//! The schema in the footer of a parquet file, looked at before the crate builds it.
//!
//! The crate builds it by recursion, a call for every level, and reserves a list as long as an element says
//! it has children. Neither has a bound there: a file of less than a megabyte overflows a stack, one of a
//! hundred bytes asks for gigabytes, and both end the process. So depth and numbers of children are checked
//! here.
//!
//! The footer is a struct in Thrift's compact encoding. Its first field is a version, its second the list of
//! the schema's elements in depth-first order. The crate takes a field for what its number says, whatever
//! type its header has; a walk that skips it by its type would lose the way there and miss what comes. Fields
//! that the crate knows therefore must have the type that the format gives them, and a footer in another
//! order is refused.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use parquet::errors::ParquetError;

/// Levels of columns in columns; lines of JSON may have as many.
const MAX_DEPTH: usize = 128;
/// How a footer ends that is not encrypted.
const MAGIC: &[u8; 4] = b"PAR1";

/// Types of fields, as they are encoded.
const STOP: u8 = 0;
const BOOL: u8 = 1;
const FALSE: u8 = 2;
const BYTE: u8 = 3;
const I16: u8 = 4;
const I32: u8 = 5;
const I64: u8 = 6;
const DOUBLE: u8 = 7;
const BINARY: u8 = 8;
const LIST: u8 = 9;
const STRUCT: u8 = 12;
const UUID: u8 = 13;

/// An error where the schema is nested too deeply or its numbers do not fit. What is not a footer at all is
/// left to the crate.
pub(super) fn check(mut file: &File) -> Result<(), ParquetError> {
    let mut tail = [0; 8];
    let length = file.seek(SeekFrom::End(0))?;
    if length < tail.len() as u64 {
        return Ok(());
    }
    file.seek(SeekFrom::End(-8))?;
    file.read_exact(&mut tail)?;
    let (footer, magic) = tail.split_at(4);
    let footer = u64::from(u32::from_le_bytes([footer[0], footer[1], footer[2], footer[3]]));
    if magic != MAGIC || footer + tail.len() as u64 > length {
        return Ok(());
    }
    file.seek(SeekFrom::Start(length - tail.len() as u64 - footer))?;
    let mut bytes = Vec::new();
    file.take(footer).read_to_end(&mut bytes)?;
    let refused = |what| ParquetError::General(format!("the schema in the footer: {what}"));
    Footer(&bytes).schema().map_err(refused)
}

/// Structs inside of an element whose fields are known.
#[derive(Clone, Copy)]
enum Known {
    Element,
    LogicalType,
    Decimal,
    Time,
    Unit,
    Integer,
    Variant,
    Geometry,
    Geography,
    Other,
}

impl Known {
    /// Type of a field, and of which struct it is where it is one.
    fn field(self, id: i16) -> Option<(u8, Known)> {
        let plain = |kind| Some((kind, Known::Other));
        match (self, id) {
            (Known::Element, 4) | (Known::Geometry | Known::Geography, 1) => plain(BINARY),
            (Known::Element, 10) => Some((STRUCT, Known::LogicalType)),
            (Known::Element, 1..=9) | (Known::Decimal, 1 | 2) | (Known::Geography, 2) => plain(I32),
            (Known::LogicalType, id) => {
                let known = match id {
                    5 => Known::Decimal,
                    7 | 8 => Known::Time,
                    10 => Known::Integer,
                    16 => Known::Variant,
                    17 => Known::Geometry,
                    18 => Known::Geography,
                    _ => Known::Other,
                };
                Some((STRUCT, known))
            }
            (Known::Time, 1) | (Known::Integer, 2) => plain(BOOL),
            (Known::Time, 2) => Some((STRUCT, Known::Unit)),
            (Known::Unit, _) => plain(STRUCT),
            (Known::Integer | Known::Variant, 1) => plain(BYTE),
            _ => None,
        }
    }
}

/// What is left of a footer.
struct Footer<'a>(&'a [u8]);

/// Something, or what is wrong.
type Found<T> = Result<T, &'static str>;

impl Footer<'_> {
    /// Walks through the elements.
    fn schema(&mut self) -> Found<()> {
        let mut id = 0;
        if self.field(&mut id)? != I32 || id != 1 {
            return Err("it does not begin with a version");
        }
        self.varint()?;
        if self.field(&mut id)? != LIST || id != 2 {
            return Err("no schema after the version");
        }
        let header = self.byte()?;
        let count = match header >> 4 {
            15 => self.varint()?,
            short => u64::from(short),
        };
        if count > 0 && header & 15 != STRUCT {
            return Err("not a list of elements");
        }
        // How many children are still to come, on every level.
        let mut open: Vec<u64> = Vec::new();
        for left in (0..count).rev() {
            while open.last() == Some(&0) {
                open.pop();
            }
            if let Some(siblings) = open.last_mut() {
                *siblings -= 1;
            }
            let children = self.fields(Known::Element, 0)?;
            if children > left {
                return Err("more children than elements");
            }
            if children > 0 {
                open.push(children);
            }
            if open.len() > MAX_DEPTH {
                return Err("more than 128 levels");
            }
        }
        Ok(())
    }

    /// Reads a struct to its end; the number of children if it is an element that has some.
    fn fields(&mut self, known: Known, depth: usize) -> Found<u64> {
        if depth > MAX_DEPTH {
            return Err("structs in structs without end");
        }
        let (mut id, mut children) = (0, 0);
        loop {
            let kind = self.field(&mut id)?;
            if kind == STOP {
                return Ok(children);
            }
            let (expected, inner) = known.field(id).unwrap_or((kind, Known::Other));
            if kind != expected {
                return Err("a field of another type than the format gives it");
            }
            match kind {
                BOOL => {}
                BYTE => _ = self.byte()?,
                I32 if matches!((known, id), (Known::Element, 5)) => {
                    let number =
                        i32::try_from(self.zigzag()?).map_err(|_| "a number of children without end")?;
                    children = u64::try_from(number).map_err(|_| "a negative number of children")?;
                }
                I16 | I32 | I64 => _ = self.varint()?,
                DOUBLE => self.skip(8)?,
                UUID => self.skip(16)?,
                BINARY => {
                    let length = self.varint()?;
                    self.skip(length)?;
                }
                STRUCT => _ = self.fields(inner, depth + 1)?,
                _ => return Err("a list or a map inside of an element"),
            }
        }
    }

    /// The type of the next field; `id` becomes its number.
    fn field(&mut self, id: &mut i16) -> Found<u8> {
        let header = self.byte()?;
        let kind = header & 15;
        if kind == STOP {
            return Ok(STOP);
        }
        *id = match header >> 4 {
            0 => i16::try_from(self.zigzag()?).map_err(|_| "the number of a field")?,
            step => id.checked_add(i16::from(step)).ok_or("the number of a field")?,
        };
        Ok(if kind == FALSE { BOOL } else { kind })
    }

    fn byte(&mut self) -> Found<u8> {
        let (&byte, rest) = self.0.split_first().ok_or("it ends early")?;
        self.0 = rest;
        Ok(byte)
    }

    fn varint(&mut self) -> Found<u64> {
        let mut value = 0;
        for shift in (0..63).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err("a number of more than 63 bits")
    }

    fn zigzag(&mut self) -> Found<i64> {
        let value = self.varint()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    fn skip(&mut self, bytes: u64) -> Found<()> {
        let bytes = usize::try_from(bytes).map_err(|_| "it ends early")?;
        self.0 = self.0.get(bytes..).ok_or("it ends early")?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A footer up to its schema of `count` elements.
    fn footer(count: u8, elements: &[u8]) -> Vec<u8> {
        [&[0x15, 2, 0x19, count << 4 | STRUCT], elements].concat()
    }

    #[test]
    fn only_what_the_format_has() {
        let read = |bytes: &[u8]| Footer(bytes).schema();
        let root = [0x48, 1, b'm', 0x15, 2, 0];
        let leaf = [0x15, 2, 0x25, 2, 0x18, 1, b'a', 0];
        let whole = footer(2, &[&root[..], &leaf].concat());
        assert_eq!(read(&whole), Ok(()));
        for end in 0..whole.len() {
            assert!(read(&whole[..end]).is_err(), "{end}");
        }
        // A decimal, a timestamp in milliseconds, a type that has yet to come.
        for logical in
            [&[0x5c, 0x15, 2, 0x15, 4, 0, 0][..], &[0x8c, 0x11, 0x1c, 0x1c, 0, 0, 0, 0], &[0x0c, 60, 0, 0]]
        {
            let leaf = [&leaf[..7], &[0x6c], logical, &[0]].concat();
            assert_eq!(read(&footer(2, &[&root[..], &leaf].concat())), Ok(()), "{logical:x?}");
        }
        for (elements, expected) in [
            (&[0x48, 1, b'm', 0x15, 6, 0][..], "more children than elements"),
            (&[0x48, 1, b'm', 0x15, 1, 0], "a negative number of children"),
            (&[0x45, 1, 0], "a field of another type"),
            (&[0x48, 1, b'm', 0x6c, 0x5c, 0x18, 0, 0, 0, 0], "a field of another type"),
            (&[0x09, 40, 0, 0], "a list or a map"),
            (
                &[0x48, 1, b'm', 0x15, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0],
                "a number of more than 63 bits",
            ),
        ] {
            let error = read(&footer(1, elements)).expect_err(expected);
            assert!(error.starts_with(expected), "{error}");
        }
        assert!(read(&[0x25, 2, 0x19, 0]).is_err(), "another field in place of the version");
        assert!(read(&[0x15, 2, 0x1c, 0]).is_err(), "another field in place of the schema");
    }
}
