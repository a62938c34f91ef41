//! A disk in memory that loses what was not synced.
//!
//! Files are numbered; directories map names to files and directories. Of both there is what programs see and
//! what is on the disk for certain. When the power goes, each write since the last sync of its file is there,
//! not there, or there in part, independently of the others, and each change of names since the last sync of
//! its directory is there or not. That is more than real file systems do, which keep some of the order.

use qurl_files::disk::{Change, Watch};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Mutex;

/// A change as it was made, with the paths inside of the watched folder.
#[derive(Clone, Debug)]
pub enum Made {
    Create(String),
    Open(String),
    Write(String, u64, Vec<u8>),
    SetLen(String, u64),
    SyncFile(String),
    CreateDir(String),
    SyncDir(String),
    Rename(String, String),
    Remove(String),
}

impl Made {
    /// The new name, of a renaming.
    pub fn renamed_to(&self) -> Option<&str> {
        if let Made::Rename(_, to) = self { Some(to) } else { None }
    }

    /// Whether it is the sync of this directory.
    pub fn is_sync_of(&self, dir: &str) -> bool {
        matches!(self, Made::SyncDir(path) if path == dir)
    }
}

/// Writes down all changes.
#[derive(Default)]
pub struct Recorded(Mutex<Vec<Made>>);

impl Watch for Recorded {
    fn before(&self, _: Change) -> io::Result<()> {
        Ok(())
    }

    fn after(&self, change: Change) {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let made = match change {
            Change::Create(path) => Made::Create(text(path)),
            Change::Open(path) => Made::Open(text(path)),
            Change::Write(path, at, bytes) => Made::Write(text(path), at, bytes.to_vec()),
            Change::SetLen(path, length) => Made::SetLen(text(path), length),
            Change::SyncFile(path) => Made::SyncFile(text(path)),
            Change::CreateDir(path) => Made::CreateDir(text(path)),
            Change::SyncDir(path) => Made::SyncDir(text(path)),
            Change::Rename(from, to) => Made::Rename(text(from), text(to)),
            Change::Remove(path) => Made::Remove(text(path)),
        };
        self.0.lock().expect("a list").push(made);
    }
}

impl Recorded {
    /// All changes, with paths inside of the folder.
    pub fn changes(&self, folder: &Path) -> Vec<Made> {
        let inside = |path: String| {
            let inside = Path::new(&path).strip_prefix(folder).expect("below the folder");
            inside.to_string_lossy().into_owned()
        };
        let changes = std::mem::take(&mut *self.0.lock().expect("a list"));
        let changes = changes.into_iter().map(|made| match made {
            Made::Create(path) => Made::Create(inside(path)),
            Made::Open(path) => Made::Open(inside(path)),
            Made::Write(path, at, bytes) => Made::Write(inside(path), at, bytes),
            Made::SetLen(path, length) => Made::SetLen(inside(path), length),
            Made::SyncFile(path) => Made::SyncFile(inside(path)),
            Made::CreateDir(path) => Made::CreateDir(inside(path)),
            Made::SyncDir(path) => Made::SyncDir(inside(path)),
            Made::Rename(from, to) => Made::Rename(inside(from), inside(to)),
            Made::Remove(path) => Made::Remove(inside(path)),
        });
        changes.collect()
    }
}

/// Random numbers of a seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    File(usize),
    Dir(usize),
}

/// What became of a file since its last sync.
#[derive(Clone, Debug)]
enum Edit {
    Write(u64, Vec<u8>),
    SetLen(u64),
}

#[derive(Default)]
struct File {
    synced: Vec<u8>,
    edits: Vec<Edit>,
}

#[derive(Default)]
struct Dir {
    seen: BTreeMap<String, Node>,
    synced: BTreeMap<String, Node>,
    /// Changes of names since then; those of a renaming belong together.
    renamed: Vec<Vec<(String, Option<Node>)>>,
}

/// The disk.
pub struct Disk {
    files: Vec<File>,
    dirs: Vec<Dir>,
}

impl Default for Disk {
    fn default() -> Disk {
        Disk { files: Vec::new(), dirs: vec![Dir::default()] }
    }
}

impl Disk {
    pub fn make(&mut self, made: &Made) {
        match made {
            Made::Create(path) | Made::Open(path) => match (self.find(path), made) {
                (Some(Node::File(file)), Made::Create(_)) => self.files[file].edits.push(Edit::SetLen(0)),
                (Some(_), _) => {}
                (None, _) => {
                    self.files.push(File::default());
                    self.name(path, Node::File(self.files.len() - 1));
                }
            },
            Made::Write(path, at, bytes) => self.edit(path, Edit::Write(*at, bytes.clone())),
            Made::SetLen(path, length) => self.edit(path, Edit::SetLen(*length)),
            Made::SyncFile(path) => {
                // Nothing of a file that was removed meanwhile matters.
                let Some(Node::File(file)) = self.find(path) else { return };
                let file = &mut self.files[file];
                let edits = std::mem::take(&mut file.edits);
                edits.iter().for_each(|edit| apply(&mut file.synced, edit, None));
            }
            Made::CreateDir(path) => {
                self.dirs.push(Dir::default());
                self.name(path, Node::Dir(self.dirs.len() - 1));
            }
            Made::SyncDir(path) => {
                let Some(Node::Dir(dir)) = self.find(path) else { return };
                let dir = &mut self.dirs[dir];
                (dir.synced, dir.renamed) = (dir.seen.clone(), Vec::new());
            }
            Made::Rename(from, to) => {
                let node = self.find(from).expect("something to rename");
                let ((dir, from), (other, to)) = (self.place(from), self.place(to));
                assert_eq!(dir, other, "renamed within a directory");
                let dir = &mut self.dirs[dir];
                dir.seen.remove(&from);
                dir.seen.insert(to.clone(), node);
                dir.renamed.push(vec![(from, None), (to, Some(node))]);
            }
            Made::Remove(path) => {
                let (dir, name) = self.place(path);
                let dir = &mut self.dirs[dir];
                dir.seen.remove(&name);
                dir.renamed.push(vec![(name, None)]);
            }
        }
    }

    /// What is left of it when the power goes now, as files in a folder.
    pub fn after_a_crash(&self, random: &mut Random, folder: &Path) {
        self.left_of(0, random, folder);
    }

    fn left_of(&self, dir: usize, random: &mut Random, folder: &Path) {
        let mut names = self.dirs[dir].synced.clone();
        for renamed in &self.dirs[dir].renamed {
            if random.below(2) == 0 {
                continue;
            }
            for (name, node) in renamed {
                match node {
                    Some(node) => _ = names.insert(name.clone(), *node),
                    None => _ = names.remove(name),
                }
            }
        }
        for (name, node) in names {
            let path = folder.join(name);
            match node {
                Node::Dir(dir) => {
                    std::fs::create_dir(&path).expect("a folder");
                    self.left_of(dir, random, &path);
                }
                Node::File(file) => {
                    let mut bytes = self.files[file].synced.clone();
                    for edit in &self.files[file].edits {
                        match random.below(3) {
                            0 => {}
                            1 => apply(&mut bytes, edit, None),
                            _ => apply(&mut bytes, edit, Some(random)),
                        }
                    }
                    std::fs::write(&path, bytes).expect("a file");
                }
            }
        }
    }

    fn edit(&mut self, path: &str, edit: Edit) {
        if let Some(Node::File(file)) = self.find(path) {
            self.files[file].edits.push(edit);
        }
    }

    fn find(&self, path: &str) -> Option<Node> {
        let mut parts = path.split('/').filter(|part| !part.is_empty());
        parts.try_fold(Node::Dir(0), |node, part| match node {
            Node::Dir(dir) => self.dirs[dir].seen.get(part).copied(),
            _ => None,
        })
    }

    /// The directory that something is in, and its name there.
    fn place(&self, path: &str) -> (usize, String) {
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        match self.find(above) {
            Some(Node::Dir(dir)) => (dir, name.to_string()),
            other => panic!("{path} is in {other:?}"),
        }
    }

    fn name(&mut self, path: &str, node: Node) {
        let (dir, name) = self.place(path);
        self.dirs[dir].seen.insert(name.clone(), node);
        self.dirs[dir].renamed.push(vec![(name, Some(node))]);
    }
}

/// Makes an edit, or a part of it.
fn apply(bytes: &mut Vec<u8>, edit: &Edit, torn: Option<&mut Random>) {
    match edit {
        Edit::SetLen(length) => bytes.resize(*length as usize, 0),
        Edit::Write(at, new) => {
            let kept = torn.map_or(new.len(), |random| random.below(new.len() as u64 + 1) as usize);
            let end = *at as usize + kept;
            if bytes.len() < end {
                bytes.resize(end, 0);
            }
            bytes[*at as usize..end].copy_from_slice(&new[..kept]);
        }
    }
}
