//! Changes to an input: of bytes, of text, and of the structure where there is one (JSON, lines of it, what
//! gzip has packed, and the JSON in front of a safetensors file, whose length is then put right).

use crate::input::Input;
use crate::random::Random;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde_json::{Map, Value, json};
use std::io::{Read, Write};

/// Parts do not grow beyond this, unless a seed is longer.
const LONGEST: usize = 1 << 16;
/// Numbers at the edges of what types hold and memory has.
const NUMBERS: [&str; 22] = [
    "0",
    "-0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "255",
    "256",
    "65535",
    "2147483647",
    "2147483648",
    "-2147483648",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
    "1e308",
    "1e-320",
    "99999999999999999999999999",
    "0.5",
];

/// Input `index` of a target: first the seeds themselves, then one of them changed once to sixteen times.
pub fn nth(name: &str, seed: u64, index: u64, seeds: &[Input], words: &[&str]) -> Input {
    if let Some(input) = seeds.get(index as usize) {
        return input.clone();
    }
    let random = &mut Random::of(name, seed, index);
    let mut input = random.pick(seeds).cloned().unwrap_or_default();
    let changes = if random.once_in(8) { 5 + random.below(12) } else { 1 + random.below(4) };
    for _ in 0..changes {
        change(&mut input, seeds, words, random);
    }
    input
}

fn change(input: &mut Input, seeds: &[Input], words: &[&str], random: &mut Random) {
    let index = random.below(input.parts.len());
    let Some((name, bytes)) = input.parts.get_mut(index) else { return };
    // The same part of another seed, to splice with.
    let other = random.pick(seeds).map(|seed| seed.bytes(name)).unwrap_or_default();
    change_part(name, bytes, other, words, random);
}

fn change_part(name: &str, bytes: &mut Vec<u8>, other: &[u8], words: &[&str], random: &mut Random) {
    if name.ends_with(".safetensors") && !random.once_in(4) {
        return change_header(bytes, words, random);
    }
    if let Some(inner) = name.strip_suffix(".gz")
        && !random.once_in(4)
        && let Some(mut unpacked) = unpack(bytes)
    {
        let other = unpack(other).unwrap_or_default();
        change_part(inner, &mut unpacked, &other, words, random);
        *bytes = pack(&unpacked);
        return;
    }
    if name.ends_with(".jsonl") && !random.once_in(3) {
        return change_line(bytes, words, random);
    }
    if !random.once_in(3)
        && let Ok(mut value) = serde_json::from_slice::<Value>(bytes)
    {
        change_value(&mut value, words, random);
        *bytes = value.to_string().into_bytes();
        return;
    }
    if random.once_in(2) && std::str::from_utf8(bytes).is_ok() {
        change_text(bytes, words, random);
    } else {
        change_bytes(bytes, other, words, random);
    }
    if bytes.len() > LONGEST.max(2 * other.len()) {
        bytes.truncate(LONGEST);
    }
}

/// What gzip has packed, if all of it is there and not too long to be changed.
fn unpack(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut unpacked = Vec::new();
    GzDecoder::new(bytes).take(LONGEST as u64).read_to_end(&mut unpacked).ok()?;
    Some(unpacked)
}

fn pack(bytes: &[u8]) -> Vec<u8> {
    let mut packer = GzEncoder::new(Vec::new(), Compression::fast());
    packer.write_all(bytes).and_then(|()| packer.finish()).unwrap_or_default()
}

/// A value in one of the lines, each of them JSON.
fn change_line(bytes: &mut Vec<u8>, words: &[&str], random: &mut Random) {
    let lines = runs(bytes, |byte| byte != b'\n');
    let Some(line) = random.pick(&lines).cloned() else { return };
    match serde_json::from_slice::<Value>(&bytes[line.clone()]) {
        Ok(mut value) => {
            change_value(&mut value, words, random);
            bytes.splice(line, value.to_string().into_bytes());
        }
        Err(_) => change_text(bytes, words, random),
    }
    bytes.truncate(LONGEST);
}

/// The JSON before the tensors, with its new length.
fn change_header(bytes: &mut Vec<u8>, words: &[&str], random: &mut Random) {
    let Some(length) = bytes.first_chunk::<8>().map(|length| u64::from_le_bytes(*length) as usize) else {
        return change_bytes(bytes, &[], words, random);
    };
    let header = length.checked_add(8).and_then(|end| bytes.get(8..end)).map(<[u8]>::to_vec);
    let Some(Ok(mut value)) = header.map(|header| serde_json::from_slice::<Value>(&header)) else {
        return change_bytes(bytes, &[], words, random);
    };
    change_value(&mut value, words, random);
    let header = value.to_string().into_bytes();
    let tensors = bytes.split_off(8 + length);
    *bytes = [&(header.len() as u64).to_le_bytes()[..], &header, &tensors].concat();
}

/// Some value inside another one becomes something else, twice what it was, or nothing.
fn change_value(value: &mut Value, words: &[&str], random: &mut Random) {
    let mut at = random.below(nodes(value));
    let copy = nth_node(value, &mut random.below(nodes(value))).cloned().unwrap_or_default();
    let Some(node) = nth_node(value, &mut at) else { return };
    match (random.below(8), &mut *node) {
        (0, Value::Array(items)) if !items.is_empty() => {
            let (from, to) = (random.below(items.len()), random.below(items.len()));
            items.insert(to, items[from].clone());
        }
        (1, Value::Array(items)) if !items.is_empty() => drop(items.remove(random.below(items.len()))),
        (0, Value::Object(fields)) => {
            let word = random.pick(words).copied().unwrap_or_default();
            fields.insert(word.to_string(), copy);
        }
        (1, Value::Object(fields)) if !fields.is_empty() => {
            let name = fields.keys().nth(random.below(fields.len())).cloned().unwrap_or_default();
            fields.shift_remove(&name);
        }
        (2, _) => *node = copy,
        (3, _) => {
            let levels = if random.once_in(4) { 120 } else { 3 };
            *node = (0..levels)
                .fold(copy, |inner, _| if random.once_in(2) { json!([inner]) } else { json!({"a": inner}) });
        }
        (4, Value::String(text)) => {
            let mut bytes = std::mem::take(text).into_bytes();
            change_text(&mut bytes, words, random);
            *text = String::from_utf8_lossy(&bytes).into_owned();
        }
        _ => *node = anything(words, random),
    }
}

fn anything(words: &[&str], random: &mut Random) -> Value {
    match random.below(9) {
        0 => Value::Null,
        1 => Value::Bool(random.once_in(2)),
        2 => json!([]),
        3 => Value::Object(Map::new()),
        4 => json!("x".repeat(1 << random.below(14))),
        5 => json!(random.pick(words).copied().unwrap_or_default()),
        6 => json!(random.bits() as i64 >> random.below(64)),
        _ => {
            let number = random.pick(&NUMBERS).copied().unwrap_or("0");
            serde_json::from_str(number).unwrap_or(Value::Null)
        }
    }
}

fn nodes(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(nodes).sum(),
        Value::Object(fields) => fields.values().map(nodes).sum(),
        _ => 0,
    }
}

/// The value at place `at` of all values, from the outside in.
fn nth_node<'a>(value: &'a mut Value, at: &mut usize) -> Option<&'a mut Value> {
    if *at == 0 {
        return Some(value);
    }
    *at -= 1;
    match value {
        Value::Array(items) => items.iter_mut().find_map(|item| nth_node(item, at)),
        Value::Object(fields) => fields.values_mut().find_map(|field| nth_node(field, at)),
        _ => None,
    }
}

/// Numbers, words, lines and brackets.
fn change_text(bytes: &mut Vec<u8>, words: &[&str], random: &mut Random) {
    let number = random.pick(&NUMBERS).copied().unwrap_or("0");
    match random.below(7) {
        0 | 1 => {
            let digits = runs(bytes, |byte| byte.is_ascii_digit());
            match random.pick(&digits) {
                Some(run) => drop(bytes.splice(run.clone(), number.bytes())),
                None => insert(bytes, number.as_bytes(), random),
            }
        }
        2 | 3 => {
            let word = random.pick(words).copied().unwrap_or_default();
            insert(bytes, word.as_bytes(), random);
        }
        4 => {
            let names = runs(bytes, |byte| byte.is_ascii_alphabetic() || byte == b'_');
            let word = random.pick(words).copied().unwrap_or_default();
            if let Some(run) = random.pick(&names) {
                bytes.splice(run.clone(), word.bytes());
            }
        }
        5 => {
            let lines = runs(bytes, |byte| byte != b'\n');
            if let Some(run) = random.pick(&lines) {
                let line = [&bytes[run.clone()], b"\n"].concat();
                if random.once_in(2) {
                    bytes.drain(run.clone());
                } else {
                    insert(bytes, &line, random);
                }
            }
        }
        _ => {
            let bracket = random.pick(&["(", "[", "{", "-", "\\frac{", "{{", "[[", "^", "\""]).copied();
            let many = if random.once_in(4) { 1 << random.below(12) } else { 1 };
            insert(bytes, bracket.unwrap_or("(").repeat(many).as_bytes(), random);
        }
    }
}

/// The longest stretches of such bytes.
fn runs(bytes: &[u8], wanted: impl Fn(u8) -> bool) -> Vec<std::ops::Range<usize>> {
    let mut runs = Vec::new();
    let mut begin = None;
    for (i, byte) in bytes.iter().chain([&0]).enumerate() {
        match (begin, i < bytes.len() && wanted(*byte)) {
            (None, true) => begin = Some(i),
            (Some(first), false) => {
                runs.push(first..i);
                begin = None;
            }
            _ => {}
        }
    }
    runs
}

fn insert(bytes: &mut Vec<u8>, more: &[u8], random: &mut Random) {
    let at = random.below(bytes.len() + 1);
    bytes.splice(at..at, more.iter().copied());
}

/// Bits, bytes and stretches.
fn change_bytes(bytes: &mut Vec<u8>, other: &[u8], words: &[&str], random: &mut Random) {
    let len = bytes.len();
    let widest = 1 << random.below(8);
    let (at, count) = (random.below(len), 1 + random.below(widest));
    let end = (at + count).min(len);
    match random.below(9) {
        0 if len > 0 => bytes[at] ^= 1 << random.below(8),
        1 if len > 0 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff, b'\n', b'"', b'{'][random.below(8)],
        2 => drop(bytes.drain(at.min(end)..end)),
        3 => {
            let copy = bytes[at.min(end)..end].to_vec();
            insert(bytes, &copy, random);
        }
        4 => {
            let random_bytes: Vec<u8> = (0..count.min(16)).map(|_| random.bits() as u8).collect();
            insert(bytes, &random_bytes, random);
        }
        5 => bytes.truncate(at),
        6 => {
            let from = random.below(other.len());
            let to = (from + count).min(other.len());
            let at = at.min(bytes.len());
            let end = (at + to - from.min(to)).min(bytes.len());
            bytes.splice(at..end, other[from.min(to)..to].iter().copied());
        }
        7 if len >= 8 => {
            // A length or an offset, as files of bytes have them.
            let edge = [0, 1, u64::MAX, u64::MAX >> 1, 1 << 32, 1 << 40, len as u64][random.below(7)];
            let at = at.min(len - 8);
            let width = [1, 2, 4, 8][random.below(4)];
            bytes[at..at + width].copy_from_slice(&edge.to_le_bytes()[..width]);
        }
        _ => {
            let word = random.pick(words).copied().unwrap_or_default();
            insert(bytes, word.as_bytes(), random);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seed() -> Input {
        let header = br#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        let file = [&(header.len() as u64).to_le_bytes()[..], header, &[7; 8]].concat();
        Input::new([("a.json", br#"{"x": [1, 2, {"y": "z"}]}"#.to_vec()), ("m.safetensors", file)])
    }

    #[test]
    fn an_input_is_a_function_of_its_number() {
        let inputs = |seed_number| -> Vec<Input> {
            (0..200).map(|i| nth("t", seed_number, i, &[seed()], &["word"])).collect()
        };
        assert_eq!(inputs(1), inputs(1));
        assert_ne!(inputs(1), inputs(2));
        let changed = inputs(1).iter().filter(|input| **input != seed()).count();
        assert!(changed > 150, "{changed} of 200 differ from the seed");
    }

    #[test]
    fn structure_survives_often_enough() {
        let (mut json, mut header, mut broken) = (0, 0, 0);
        for i in 0..1000 {
            let input = nth("t", 1, i, &[seed()], &["word"]);
            let is_json = serde_json::from_slice::<Value>(input.bytes("a.json")).is_ok();
            let file = input.bytes("m.safetensors");
            let length = file.first_chunk::<8>().map_or(0, |length| u64::from_le_bytes(*length) as usize);
            let inner = length.checked_add(8).and_then(|end| file.get(8..end)).unwrap_or_default();
            json += usize::from(is_json);
            header += usize::from(serde_json::from_slice::<Value>(inner).is_ok());
            broken += usize::from(!is_json);
        }
        assert!(json > 300 && header > 300 && broken > 100, "{json} {header} {broken}");
    }

    #[test]
    fn lines_are_changed_inside_of_gzip_too() {
        let lines = b"{\"x\": 1}\n{\"y\": [2, 3]}\n".to_vec();
        let seed = Input::new([("a.jsonl", lines.clone()), ("b.jsonl.gz", pack(&lines))]);
        let (mut plain, mut packed) = (0, 0);
        for i in 1..500 {
            let input = nth("t", 1, i, std::slice::from_ref(&seed), &["word"]);
            let good = |text: &[u8]| {
                let mut each = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
                text != seed.bytes("a.jsonl")
                    && each.all(|line| serde_json::from_slice::<Value>(line).is_ok())
            };
            plain += usize::from(good(input.bytes("a.jsonl")));
            packed += usize::from(unpack(input.bytes("b.jsonl.gz")).is_some_and(|text| good(&text)));
        }
        assert!(plain > 100 && packed > 100, "{plain} {packed}");
    }

    #[test]
    fn every_value_is_reached() {
        let mut value = json!({"a": [1, {"b": 2}], "c": 3});
        assert_eq!(nodes(&value), 6);
        let seen: Vec<String> = (0..6)
            .map(|i| nth_node(&mut value, &mut { i }).map(|v| v.to_string()).unwrap_or_default())
            .collect();
        assert_eq!(seen, [r#"{"a":[1,{"b":2}],"c":3}"#, r#"[1,{"b":2}]"#, "1", r#"{"b":2}"#, "2", "3"]);
        assert!(nth_node(&mut value, &mut 6).is_none());
    }
}
