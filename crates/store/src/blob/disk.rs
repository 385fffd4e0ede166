//! A simulated disk for tests: it replays recorded changes ([`super::watch`]) and builds every
//! state that a crash may leave.
//!
//! Each folder and file has two states. *Now* is what a running system sees. *Sure* is what
//! survives a loss of power: a folder's names, or a file's bytes, at its last `fsync`. A crash may
//! leave any mixture, so states are built from these choices:
//!
//! - all folders now or all folders sure, and in each case one folder the other way;
//! - all files with the bytes of now, or all with the sure bytes;
//! - the last write torn at a sector.

use super::watch::Event;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path};

const SECTOR: usize = 512;

#[derive(Debug, Clone)]
enum Node {
    Folder { now: BTreeMap<String, usize>, sure: BTreeMap<String, usize> },
    File { now: Vec<u8>, sure: Vec<u8> },
}

/// The disk of one store.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    /// Number 0 is the root.
    nodes: Vec<Node>,
    /// File, start and length of the last write, until it is synced.
    last_write: Option<(usize, usize, usize)>,
}

/// One of the states that a crash may leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Crash {
    /// Whether folders, except `other`, have the names of now.
    pub(crate) names_now: bool,
    /// The folder in the opposite state.
    other: Option<usize>,
    /// Whether files have the bytes of now.
    pub(crate) bytes_now: bool,
    /// Whether the second half of the last write is lost.
    pub(crate) torn: bool,
}

impl Crash {
    /// Whether everything that was written is there, as after the end of a process.
    pub(crate) fn loses_nothing(&self) -> bool {
        self.names_now && self.bytes_now && !self.torn && self.other.is_none()
    }

    /// Whether all folders are alike.
    pub(crate) fn has_no_exception(&self) -> bool {
        self.other.is_none()
    }
}

impl Disk {
    /// Reads the files below `root`, all of them sure.
    pub(crate) fn read(root: &Path) -> Self {
        let mut disk = Self { nodes: vec![folder(BTreeMap::new())], last_write: None };
        disk.read_into(0, root);
        disk
    }

    fn read_into(&mut self, at: usize, path: &Path) {
        let mut names = BTreeMap::new();
        for entry in fs::read_dir(path).unwrap().map(Result::unwrap) {
            let is_folder = entry.file_type().unwrap().is_dir();
            let node = if is_folder {
                folder(BTreeMap::new())
            } else {
                let bytes = fs::read(entry.path()).unwrap();
                Node::File { now: bytes.clone(), sure: bytes }
            };
            let number = self.add(node);
            names.insert(entry.file_name().into_string().unwrap(), number);
            if is_folder {
                self.read_into(number, &entry.path());
            }
        }
        self.nodes[at] = folder(names);
    }

    fn add(&mut self, node: Node) -> usize {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    fn names(&mut self, folder: usize) -> &mut BTreeMap<String, usize> {
        match &mut self.nodes[folder] {
            Node::Folder { now, .. } => now,
            Node::File { .. } => panic!("node {folder} is a file"),
        }
    }

    /// The number of a path's folder, and the path's last component.
    fn place(&mut self, root: &Path, path: &Path) -> (usize, String) {
        let mut parts: Vec<String> = path
            .strip_prefix(root)
            .unwrap()
            .components()
            .map(|c| match c {
                Component::Normal(name) => name.to_str().unwrap().to_owned(),
                other => panic!("{other:?}"),
            })
            .collect();
        let last = parts.pop().unwrap();
        let folder = parts.iter().fold(0, |at, name| self.names(at)[name]);
        (folder, last)
    }

    fn node(&mut self, root: &Path, path: &Path) -> usize {
        if path == root {
            return 0;
        }
        let (folder, name) = self.place(root, path);
        self.names(folder)[&name]
    }

    /// Applies a change that was recorded below `root`.
    pub(crate) fn apply(&mut self, root: &Path, event: &Event) {
        match event {
            Event::Folder(path) | Event::File(path) => {
                let node = match event {
                    Event::Folder(_) => folder(BTreeMap::new()),
                    _ => Node::File { now: Vec::new(), sure: Vec::new() },
                };
                let number = self.add(node);
                let (folder, name) = self.place(root, path);
                assert!(
                    self.names(folder).insert(name, number).is_none(),
                    "{} is there",
                    path.display()
                );
            }
            Event::Write { path, at, bytes } => {
                let number = self.node(root, path);
                let Node::File { now, .. } = &mut self.nodes[number] else {
                    panic!("{}", path.display())
                };
                now.resize(now.len().max(at + bytes.len()), 0);
                now[*at..at + bytes.len()].copy_from_slice(bytes);
                self.last_write = Some((number, *at, bytes.len()));
            }
            Event::SyncFile { path, bytes } => {
                let number = self.node(root, path);
                self.nodes[number] = Node::File { now: bytes.clone(), sure: bytes.clone() };
                self.last_write = self.last_write.filter(|(file, ..)| *file != number);
            }
            Event::SyncFolder(path) => {
                let number = self.node(root, path);
                let now = self.names(number).clone();
                self.nodes[number] = folder(now);
            }
            Event::Rename { from, to, exchange } => {
                let (from, old) = self.place(root, from);
                let (to, new) = self.place(root, to);
                let moved = self.names(from).remove(&old).unwrap();
                let taken = self.names(to).insert(new, moved);
                assert_eq!(taken.is_some(), *exchange);
                if let Some(taken) = taken {
                    self.names(from).insert(old, taken);
                }
            }
            Event::Link { from, to } => {
                let linked = self.node(root, from);
                let (to, new) = self.place(root, to);
                self.names(to).insert(new, linked);
            }
            Event::Remove(path) => {
                let (folder, name) = self.place(root, path);
                self.names(folder).remove(&name).unwrap();
            }
            Event::Acknowledged(_) => {}
        }
    }

    /// Every state that a crash may leave at this point.
    pub(crate) fn crashes(&self) -> Vec<Crash> {
        let unsure = |number: &usize| match &self.nodes[*number] {
            Node::Folder { now, sure } => now != sure,
            Node::File { .. } => false,
        };
        let others: Vec<Option<usize>> =
            std::iter::once(None).chain((0..self.nodes.len()).filter(unsure).map(Some)).collect();
        let mut crashes = Vec::new();
        for names_now in [true, false] {
            for bytes_now in [true, false] {
                let with = |other: &Option<usize>| Crash {
                    names_now,
                    other: *other,
                    bytes_now,
                    torn: false,
                };
                crashes.extend(others.iter().map(with));
            }
        }
        if self.last_write.is_some_and(|(.., length)| length > SECTOR) {
            crashes.push(Crash { names_now: true, other: None, bytes_now: true, torn: true });
        }
        crashes
    }

    /// Every file (`Some`) and folder (`None`) of a state, by path.
    pub(crate) fn state(&self, crash: Crash) -> BTreeMap<String, Option<Vec<u8>>> {
        let mut all = BTreeMap::new();
        self.collect(0, "", crash, &mut all);
        all
    }

    fn collect(
        &self,
        at: usize,
        path: &str,
        crash: Crash,
        all: &mut BTreeMap<String, Option<Vec<u8>>>,
    ) {
        match &self.nodes[at] {
            Node::File { now, sure } => {
                let mut bytes = if crash.bytes_now { now.clone() } else { sure.clone() };
                if let Some((_, start, length)) =
                    self.last_write.filter(|(file, ..)| crash.torn && *file == at)
                {
                    let kept = (length / 2).next_multiple_of(SECTOR).min(length);
                    bytes[start + kept..start + length].fill(0);
                }
                all.insert(path.to_owned(), Some(bytes));
            }
            Node::Folder { now, sure } => {
                all.insert(path.to_owned(), None);
                let is_now = crash.names_now != (crash.other == Some(at));
                for (name, number) in if is_now { now } else { sure } {
                    self.collect(*number, &format!("{path}/{name}"), crash, all);
                }
            }
        }
    }
}

fn folder(names: BTreeMap<String, usize>) -> Node {
    Node::Folder { now: names.clone(), sure: names }
}

/// Writes a state below `root`.
pub(crate) fn build(state: &BTreeMap<String, Option<Vec<u8>>>, root: &Path) {
    for (path, content) in state {
        let path = root.join(path.trim_start_matches('/'));
        match content {
            None => fs::create_dir_all(path).unwrap(),
            Some(bytes) => fs::write(path, bytes).unwrap(),
        }
    }
}
