//! Where the values of a recipe come from: a line of its file, or an override of the command line.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// The text that a recipe was read from. It is no part of what the recipe says: two recipes with the same
/// settings are equal wherever they stand.
#[derive(Clone, Debug, Default)]
pub struct Source {
    file: String,
    /// Lines of the keys and sections of the file, from 1.
    lines: BTreeMap<String, usize>,
    /// Keys that the command line sets, with what was given.
    overrides: Vec<(String, String)>,
    /// What relative paths of the file are relative to.
    directory: PathBuf,
}

impl PartialEq for Source {
    fn eq(&self, _: &Source) -> bool {
        true
    }
}

impl Source {
    /// Finds the lines of all keys.
    pub(super) fn new(file: &str, text: &str, directory: &Path) -> Source {
        let mut lines = BTreeMap::new();
        if let Ok(table) = DeTable::parse(text) {
            walk("", table.get_ref(), &Lines::of(text), &mut lines);
        }
        Source { file: file.to_string(), lines, overrides: Vec::new(), directory: directory.to_path_buf() }
    }

    /// Notes that an entry `key=value` of the command line sets a key.
    pub(super) fn set(&mut self, key: &str, entry: &str) {
        self.overrides.push((key.to_string(), entry.to_string()));
    }

    /// What sets a key on the command line, if anything does.
    pub(super) fn override_of(&self, key: &str) -> Option<&str> {
        let sets = |path: &str| {
            key.strip_prefix(path)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.') || rest.starts_with('['))
        };
        self.overrides.iter().rfind(|(path, _)| sets(path)).map(|(_, entry)| entry.as_str())
    }

    /// What relative paths of the file are relative to.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where a key is set; `file` alone where it has its default.
    pub(super) fn place(&self, file: &str, key: &str) -> String {
        match (self.override_of(key).or_else(|| self.override_of_entry(key)), self.lines.get(key)) {
            (Some(entry), _) => format!("--set {entry}"),
            (None, Some(line)) => format!("{file}, line {line}"),
            // A section that is there only because something in it was set.
            (None, None) => {
                self.override_inside(key).map_or(file.to_string(), |entry| format!("--set {entry}"))
            }
        }
    }

    /// What sets something in an entry of a list on the command line, if anything does.
    fn override_of_entry(&self, list: &str) -> Option<&str> {
        let inside = |path: &str| path.strip_prefix(list).is_some_and(|rest| rest.starts_with('['));
        self.overrides.iter().rfind(|(path, _)| inside(path)).map(|(_, entry)| entry.as_str())
    }

    /// What sets a key of a section on the command line, if anything does.
    fn override_inside(&self, section: &str) -> Option<&str> {
        let inside = |path: &str| path.strip_prefix(section).is_some_and(|rest| rest.starts_with('.'));
        self.overrides.iter().find(|(path, _)| inside(path)).map(|(_, entry)| entry.as_str())
    }

    /// Where a section begins, or the section around it.
    pub(super) fn place_of_section(&self, section: &str) -> String {
        let mut section = section;
        loop {
            if self.override_of(section).is_some() || self.lines.contains_key(section) {
                return self.place(&self.file, section);
            }
            match section.rsplit_once('.') {
                Some((parent, _)) => section = parent,
                None => return self.file.clone(),
            }
        }
    }

    /// The name of the file.
    pub(super) fn file(&self) -> &str {
        &self.file
    }

    /// The line of a key, for sorting messages; those of the command line come last.
    pub(super) fn line(&self, key: &str) -> usize {
        match self.override_of(key) {
            Some(_) => usize::MAX,
            None => self.lines.get(key).copied().unwrap_or(0),
        }
    }
}

/// Starts of the lines of a text.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Lines {
        Lines(std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect())
    }

    fn number(&self, at: usize) -> usize {
        self.0.partition_point(|&start| start <= at)
    }
}

fn walk(path: &str, table: &DeTable, lines: &Lines, found: &mut BTreeMap<String, usize>) {
    for (key, value) in table {
        let path =
            if path.is_empty() { key.get_ref().to_string() } else { format!("{path}.{}", key.get_ref()) };
        found.insert(path.clone(), lines.number(key.span().start));
        match value.get_ref() {
            DeValue::Table(inner) => walk(&path, inner, lines, found),
            DeValue::Array(items) => {
                for (i, item) in items.iter().enumerate() {
                    let path = format!("{path}[{i}]");
                    found.insert(path.clone(), lines.number(item.span().start));
                    if let DeValue::Table(inner) = item.get_ref() {
                        walk(&path, inner, lines, found);
                    }
                }
            }
            _ => {}
        }
    }
}
