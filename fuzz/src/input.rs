//! An input: named parts, each a file or an argument of what is tried.

use std::io;
use std::path::Path;

/// What a target is given.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Input {
    /// In order; names may have folders in them.
    pub parts: Vec<(String, Vec<u8>)>,
}

impl Input {
    /// Of parts that are given.
    pub fn new<N: Into<String>, B: Into<Vec<u8>>>(parts: impl IntoIterator<Item = (N, B)>) -> Input {
        Input { parts: parts.into_iter().map(|(name, bytes)| (name.into(), bytes.into())).collect() }
    }

    /// A part's bytes; none where it is missing.
    pub fn bytes(&self, name: &str) -> &[u8] {
        self.parts
            .iter()
            .find(|(part, _)| part == name)
            .map(|(_, bytes)| bytes.as_slice())
            .unwrap_or_default()
    }

    /// A part as text; what is not UTF-8 is replaced.
    pub fn text(&self, name: &str) -> String {
        String::from_utf8_lossy(self.bytes(name)).into_owned()
    }

    /// Writes the parts as files.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        for (name, bytes) in &self.parts {
            let path = folder.join(name);
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent)?;
            }
            std::fs::write(path, bytes)?;
        }
        Ok(())
    }

    /// Reads all files of a folder, in the order of their names.
    pub fn read(folder: &Path) -> io::Result<Input> {
        let mut input = Input::default();
        input.collect(folder, "")?;
        input.parts.sort();
        Ok(input)
    }

    fn collect(&mut self, folder: &Path, prefix: &str) -> io::Result<()> {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            if entry.file_type()?.is_dir() {
                self.collect(&entry.path(), &format!("{name}/"))?;
            } else {
                self.parts.push((name, std::fs::read(entry.path())?));
            }
        }
        Ok(())
    }
}

/// The inputs of a folder: each of its folders is one.
pub fn folders(folder: &Path) -> io::Result<Vec<Input>> {
    let mut paths: Vec<_> = std::fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
    paths.sort_by_key(|entry| entry.file_name());
    paths.iter().map(|entry| Input::read(&entry.path())).collect()
}
