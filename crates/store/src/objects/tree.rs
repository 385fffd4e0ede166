//! The hash trees beside disk files ([`dayfly_units::tree`]): made in the pass that computes a
//! file's digest, and opened in its place.
//!
//! A disk file with a sound tree is not read when it is opened. Its length and the tree's root are
//! checked, and each reader checks every leaf that it reads. A file without one is hashed whole
//! before its first use; the same pass makes its tree, for the next daemon. Files of stores from
//! before hash trees get theirs that way.

use crate::blob::{self, Dir, IfTaken, Stage};
use crate::errors::{Damage, IoError, IoResult};
use crate::inner::Inner;
use crate::integrity::verify::{VerifyError, same_length};
use crate::objects::types::FileRef;
use dayfly_units::Digest;
use dayfly_units::error::chain;
use dayfly_units::sync::lock;
use dayfly_units::tree::{self, LeafError, TreeBuilder, TreeReader};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;

/// The name of the tree in the folder of its disk file.
pub(crate) const TREE: &str = "tree";

/// The hash tree of a disk file.
#[derive(Debug)]
pub struct FileTree {
    /// The tree, open for reading.
    pub file: File,
    /// The root, to which every node leads.
    pub root: Digest,
}

impl FileTree {
    /// Duplicates the descriptor.
    ///
    /// # Errors
    /// The process has too many descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { file: self.file.try_clone()?, root: self.root })
    }
}

/// A disk file and its hash tree.
#[derive(Debug)]
pub struct DiskFile {
    /// The file, open for reading.
    pub file: File,
    /// The tree to check each leaf against; `None`: the file was verified whole.
    pub tree: Option<FileTree>,
}

/// Begins the tree of a disk file of `bytes` bytes, in the folder of that file.
pub(crate) fn begin(dir: &Dir, bytes: u64) -> IoResult<TreeBuilder> {
    let file = dir.create(TREE)?;
    let path = dir.path().join(TREE);
    let begun = blob::fault::step("writing", &path).and_then(|()| TreeBuilder::new(file, bytes));
    begun.map_err(IoError::new("writing", &path))
}

/// Ends a tree that [`begin`] began in `dir`: writes it, and makes it durable.
pub(crate) fn end(dir: &Dir, tree: TreeBuilder, digest: Digest) -> IoResult<FileTree> {
    let written = tree.finish(digest).map_err(IoError::new("writing", &dir.path().join(TREE)));
    let (file, root) = written?;
    dir.finish(TREE, &file)?;
    Ok(FileTree { file: dir.open(TREE)?, root })
}

/// A tree that is made for a file without one. A failure only costs the tree.
#[derive(Default)]
enum Making {
    #[default]
    NotBegun,
    Begun(Stage, Box<TreeBuilder>),
    Failed(IoError),
}

impl Making {
    fn begun(inner: &Inner, bytes: u64) -> Self {
        let begun = inner.writable().and_then(|()| inner.stage()).and_then(|stage| {
            let tree = begin(&stage, bytes)?;
            Ok((stage, Box::new(tree)))
        });
        begun.map_or_else(Self::Failed, |(stage, tree)| Self::Begun(stage, tree))
    }

    fn piece(&mut self, inner: &Inner, bytes: u64, at: u64, piece: &[u8]) {
        if matches!(self, Self::NotBegun) {
            *self = Self::begun(inner, bytes);
        }
        if let Self::Begun(stage, tree) = self
            && let Err(error) = tree.update(at, piece)
        {
            *self = Self::Failed(IoError::new("writing", &stage.path().join(TREE))(error));
        }
    }
}

impl Inner {
    /// The tree of the disk file `of` in `dir`, whose root must be `root` if that is known. `None`
    /// if there is no sound tree, so that the file must be verified whole.
    pub(crate) fn tree(&self, dir: &Dir, of: &FileRef, root: Option<Digest>) -> Option<FileTree> {
        match self.open_tree(dir, of, root) {
            Ok(tree) => tree,
            Err(VerifyError::Damage(damage)) => {
                tracing::warn!(%damage, "its disk file is verified whole");
                None
            }
            Err(VerifyError::Io(error)) => {
                tracing::warn!("{}; its disk file is verified whole", chain(&error));
                None
            }
        }
    }

    /// As [`Self::tree`], with the reason why a tree is not sound.
    pub(crate) fn open_tree(
        &self,
        dir: &Dir,
        of: &FileRef,
        root: Option<Digest>,
    ) -> Result<Option<FileTree>, VerifyError> {
        let path = dir.path().join(TREE);
        let file = match dir.open(TREE) {
            Err(e) if e.is_not_found() && root.is_none() => return Ok(None),
            Err(e) if e.is_not_found() => {
                let (what, by) = ("hash tree".to_owned(), "its disk file".to_owned());
                return Err(Damage::Missing { file: path, what, by }.into());
            }
            file => file?,
        };
        let found = self.verifier.tree(&path, &file, of)?;
        match root.filter(|root| *root != found) {
            None => Ok(Some(FileTree { file, root: found })),
            Some(root) => {
                let (expected, got) = (root.to_string(), found.to_string());
                let place = "root, as the snapshot's manifest has it".to_owned();
                Err(Damage::Content { file: path, place, expected, got }.into())
            }
        }
    }

    /// Verifies a disk file, open at `dir`/`name`: its length and its tree, or the whole file if it
    /// has no sound tree.
    pub(crate) fn verify_disk(
        &self,
        dir: &Dir,
        name: &str,
        file: &File,
        of: &FileRef,
        root: Option<Digest>,
    ) -> Result<Option<FileTree>, VerifyError> {
        let path = dir.path().join(name);
        if let Some(tree) = self.tree(dir, of, root) {
            let length = file.metadata().map_err(IoError::new("looking at", &path))?.len();
            same_length(&path, of, length)?;
            return Ok(Some(tree));
        }
        let mut making = Making::default();
        let hashed = self.verifier.check_pieces(&path, file, of, &mut |at, piece| {
            making.piece(self, of.bytes, at, piece);
            Ok(())
        })?;
        if !hashed {
            return Ok(None);
        }
        if matches!(making, Making::NotBegun) {
            making = Making::begun(self, of.bytes);
        }
        let made = match making {
            Making::Begun(stage, tree) => self.add_tree(dir, &stage, *tree, of.digest),
            Making::Failed(error) => Err(error),
            Making::NotBegun => Ok(None),
        };
        Ok(made.unwrap_or_else(|error| {
            tracing::warn!("a disk file gets no hash tree: {}", chain(&error));
            None
        }))
    }

    /// Puts a tree beside a published disk file, in place of a damaged one if there is one.
    fn add_tree(
        &self,
        dir: &Dir,
        stage: &Stage,
        tree: TreeBuilder,
        digest: Digest,
    ) -> IoResult<Option<FileTree>> {
        let tree = end(stage, tree, digest)?;
        stage.sync()?;
        // A folder that is removed meanwhile must not get another file.
        let _publishing = self.publishing();
        if !dir.is_in_place()? {
            return Ok(None);
        }
        let if_taken = if dir.has(TREE)? { IfTaken::Exchange } else { IfTaken::Refuse };
        stage.rename(TREE, dir, TREE, if_taken)?;
        dir.sync()?;
        Ok(Some(tree))
    }
}

/// A disk file that is read by ranges, each of them checked.
#[derive(Debug)]
pub(crate) struct CheckedFile {
    file: File,
    tree: Option<(File, Mutex<TreeReader>)>,
}

impl CheckedFile {
    /// # Errors
    /// The host reports no length of the file.
    pub(crate) fn new(DiskFile { file, tree }: DiskFile) -> io::Result<Self> {
        let bytes = file.metadata()?.len();
        let reader = |tree: FileTree| (tree.file, Mutex::new(TreeReader::new(bytes, tree.root)));
        Ok(Self { file, tree: tree.map(reader) })
    }

    /// Fills `out` with the bytes from `at` on. After an error the content of `out` is not to be
    /// used.
    pub(crate) fn read(&self, at: u64, out: &mut [u8]) -> Result<(), LeafError> {
        let from = |file: &File, out: &mut [u8], at: u64| file.read_exact_at(out, at);
        let Some((nodes, reader)) = &self.tree else {
            let read = from(&self.file, out, at);
            return read.map_err(|source| LeafError::Read { what: "the file", at, source });
        };
        let disk = |out: &mut [u8], at: u64| from(&self.file, out, at);
        // The lock is not held while the disk file is read or hashed.
        let leaf = |leaf| lock(reader).leaf(&|out, at| from(nodes, out, at), leaf);
        tree::read(&disk, &leaf, at, out)
    }
}

/// The damage of the disk file `folder`/`name` or of its tree; an error of the host is passed on.
pub(crate) fn trouble(folder: &Path, name: &str, error: LeafError) -> VerifyError {
    use LeafError::{Leaf, Node, Range, Read};
    let content = |place: String, expected: String, got: String| {
        Damage::Content { file: folder.join(name), place, expected, got }.into()
    };
    match error {
        Read { what: _, at: _, source } => {
            VerifyError::Io(IoError::new("reading", &folder.join(name))(source))
        }
        Node { at, expected, got } => {
            let place = format!("hash of the node at byte {at} of its hash tree");
            content(place, expected.to_string(), got.to_string())
        }
        Leaf { at, end, expected, got } => {
            let place = format!("hash of bytes {at} to {end}");
            content(place, expected.to_string(), got.to_string())
        }
        Range { at, end, bytes } => {
            let (place, got) = ("range".to_owned(), format!("{at} to {end}"));
            content(place, format!("within {bytes} bytes"), got)
        }
    }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
