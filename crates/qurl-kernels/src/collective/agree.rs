//! That all ranks run the same thing: facts by name, compared at the start.

use super::{Collective, CollectiveError};

impl Collective {
    /// Compares facts of all ranks (a recipe's hash, that of the weights) and names the first difference, the
    /// same at every rank. A fact is its name and what it is.
    pub fn agree(&self, facts: &[(&str, String)]) -> Result<(), CollectiveError> {
        let mine = facts.iter().map(|(what, value)| format!("{what}\n{value}\n")).collect::<String>();
        let all = self.all_gather_bytes(mine.as_bytes())?;
        let of = |rank: usize| String::from_utf8_lossy(&all[rank]).into_owned();
        let ours = of(0);
        for rank in 1..self.size() {
            let theirs = of(rank);
            if theirs != ours {
                return Err(difference(rank, &theirs, &ours));
            }
        }
        Ok(())
    }
}

/// The first fact in which two lists differ.
fn difference(rank: usize, theirs: &str, ours: &str) -> CollectiveError {
    let (mut their_lines, mut our_lines) = (theirs.lines(), ours.lines());
    loop {
        let (their_name, our_name) = (their_lines.next(), our_lines.next());
        let (their_value, our_value) = (their_lines.next(), our_lines.next());
        let named = |name: Option<&str>| name.unwrap_or("nothing").to_string();
        if their_name != our_name || their_name.is_none() {
            let what = "what they compare".to_string();
            return CollectiveError::Differs { what, rank, theirs: named(their_name), ours: named(our_name) };
        }
        if their_value != our_value {
            let (theirs, ours) = (named(their_value), named(our_value));
            return CollectiveError::Differs { what: named(our_name), rank, theirs, ours };
        }
    }
}
