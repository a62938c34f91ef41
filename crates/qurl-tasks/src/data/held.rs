//! What the rows of a data set take while they are held. Bounds on bytes of files and rows say little of it:
//! a hundred bytes of gzip are ten thousand of text, and a dictionary of parquet is one text in every row.

use qurl_files::available_memory;
use serde_json::Value;

use super::Row;
use crate::task::Prompt;

/// How much memory there is for a byte of a problem: itself, and the words and letters by which problems are
/// compared where some are held out.
const OF_PROBLEMS: usize = 6;
/// What an allocation takes beside its bytes.
const ALLOCATION: usize = 16;

/// Counts the bytes of rows that are held.
pub(super) struct Held {
    bytes: u64,
    /// Those of the last row.
    last: u64,
    most: u64,
}

impl Held {
    /// Rows that may take this much; half of the memory that can be had where nothing is said.
    pub fn new(most: Option<u64>) -> Held {
        let most = most.or_else(|| Some(available_memory()? / 2)).unwrap_or(u64::MAX);
        Held { bytes: 0, last: 0, most }
    }

    /// One more row; what all take and may take, where that is too much.
    pub fn hold(&mut self, row: &Row) -> Result<(), (u64, u64)> {
        self.last = memory_of_row(row) as u64;
        self.bytes += self.last;
        if self.bytes > self.most { Err((self.bytes, self.most)) } else { Ok(()) }
    }

    /// The last row is held no longer.
    pub fn forget(&mut self) {
        self.bytes -= std::mem::take(&mut self.last);
    }
}

fn memory_of_row(row: &Row) -> usize {
    let problem = match &row.problem {
        Prompt::Text(text) => text.len(),
        Prompt::Chat(messages) => {
            messages.iter().map(|m| m.role.len() + m.content.len() + 4 * ALLOCATION).sum()
        }
    };
    let texts = row.id.len() + row.answer.len() + row.source.as_ref().map_or(0, String::len);
    size_of::<Row>() + 4 * ALLOCATION + OF_PROBLEMS * problem + texts + memory_of(&row.extra)
}

/// What a value takes beside its own size.
fn memory_of(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len() + ALLOCATION,
        Value::Array(items) => {
            items.iter().map(|item| size_of::<Value>() + memory_of(item)).sum::<usize>() + ALLOCATION
        }
        Value::Object(map) => {
            // An entry has a hash beside it and a place in a table, both with some to spare.
            let entry = size_of::<(String, Value)>() + 3 * ALLOCATION;
            let entries = map.iter().map(|(key, item)| entry + key.len() + memory_of(item));
            4 * entry + entries.sum::<usize>()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}
