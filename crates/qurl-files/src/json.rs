//! What a JSON text will be in memory, before it is read: two bytes of text can become a value of a hundred,
//! or an object of five hundred. A bound on bytes is therefore none on memory; one on values is.

/// The values of a JSON text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JsonSize {
    /// All of them, or a few more.
    pub values: usize,
    /// Those that are objects.
    pub objects: usize,
}

/// Counts the values of a JSON text; whatever it counts, where it is none.
pub fn json_size(text: &[u8]) -> JsonSize {
    let mut size = JsonSize { values: 1, objects: 0 };
    let (mut inside, mut escaped) = (false, false);
    for &byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = inside,
            b'"' => inside = !inside,
            b',' | b'[' | b'{' if !inside => {
                size.values += 1;
                size.objects += usize::from(byte == b'{');
            }
            _ => {}
        }
    }
    size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_outside_of_texts() {
        for (text, values, objects) in [
            ("", 1, 0),
            ("1", 1, 0),
            ("[1,2,3]", 4, 0),
            (r#"{"a": [1, {"b": "x, [y"}], "c\"],[": 2}"#, 6, 2),
            (r#"["\\", "]"]"#, 3, 0),
            (r#""[[[[,,,,"#, 1, 0),
        ] {
            assert_eq!(json_size(text.as_bytes()), JsonSize { values, objects }, "{text}");
        }
    }
}
