//! A root file system as a tree in memory. This is the only module that interprets an image's
//! names.
//!
//! No name of an image is ever created on the host. File contents go to numbered files in a staging
//! folder. Names, links and devices exist only in the tree until they are written into the ext4
//! file. So no name, symbolic link or hard link of an image can lead to a file of the host. The
//! checks here keep the *image* sane and report hostile entries.
//!
//! Paths are resolved as a container runtime resolves them inside the root (`openat2` with
//! `RESOLVE_IN_ROOT`):
//!
//! - Symbolic links among the parents are followed, absolute ones from the image's root.
//! - `..` never leads above the root.
//! - Missing folders are created.

use dayfly_archive::path::{MAX_DEPTH, MAX_PATH_BYTES, components};
use dayfly_archive::{EntryPath, Refusal, refuse, show};
use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;

/// Upper limit for the names of one file (ext4: `EXT4_LINK_MAX`).
const MAX_NAMES: u32 = 65_000;
/// Upper limit for symbolic links followed in one path (Linux: `MAXSYMLINKS`).
const MAX_LINKS: usize = 40;

/// Index of a node in the tree's table.
pub type NodeId = usize;

/// A file's content: a file of the host, which is read when the disk is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    /// Path of the host's file; `None` for an empty file.
    pub path: Option<PathBuf>,
    /// Length in bytes, holes included.
    pub size_bytes: u64,
    /// Bytes outside holes, in whole pages.
    pub data_bytes: u64,
}

/// A name in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Child {
    /// The node that the name refers to.
    pub id: NodeId,
    /// The layer that created the name, or that last set the attributes of the folder with this
    /// name.
    layer: u32,
}

/// The kind of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A folder: each name with its child.
    Dir(BTreeMap<Vec<u8>, Child>),
    /// A regular file.
    File(Content),
    /// A symbolic link and its target.
    Symlink(Vec<u8>),
    /// A character device: major, minor.
    Char(u32, u32),
    /// A block device: major, minor.
    Block(u32, u32),
    /// A named pipe.
    Fifo,
}

impl Kind {
    /// An empty folder.
    pub fn empty_dir() -> Self {
        Self::Dir(BTreeMap::new())
    }

    /// The kind in words, for errors.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Dir(_) => "a folder",
            Self::File(_) => "a file",
            Self::Symlink(_) => "a symbolic link",
            Self::Char(..) => "a character device",
            Self::Block(..) => "a block device",
            Self::Fifo => "a named pipe",
        }
    }
}

/// The attributes of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meta {
    /// The lower 12 bits of the mode.
    pub mode: u32,
    /// User id of the owner.
    pub uid: u32,
    /// Group id of the owner.
    pub gid: u32,
    /// Time of the last change: seconds since 1970.
    pub mtime_s: i64,
    /// Nanoseconds of the time of the last change.
    pub mtime_ns: u32,
    /// Extended attributes; the values are as the system calls return them.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Meta {
    /// Attributes of a node that root owns, with permissions `mode`. A container runtime gives
    /// 0o755 to a folder without an entry.
    pub fn root(mode: u32) -> Self {
        Self { mode, uid: 0, gid: 0, mtime_s: 0, mtime_ns: 0, xattrs: BTreeMap::new() }
    }
}

/// An inode of the root file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Kind and content.
    pub kind: Kind,
    /// Attributes.
    pub meta: Meta,
    /// Number of names (hard links) of the node.
    pub names: u32,
}

/// A root file system.
#[derive(Debug, Clone)]
pub struct Tree {
    nodes: Vec<Option<Node>>,
    /// Number of names in the tree.
    live: usize,
    max_names: usize,
    layer: u32,
    /// Folders that this layer has purged: they hold nothing of a lower layer any more.
    purged: HashSet<NodeId>,
}

impl Tree {
    /// Node id of the root folder.
    pub const ROOT: NodeId = 0;

    /// A tree with an empty root folder, for at most `max_names` names.
    pub fn new(max_names: usize) -> Self {
        let root = Node { kind: Kind::empty_dir(), meta: Meta::root(0o755), names: 1 };
        Self { nodes: vec![Some(root)], live: 1, max_names, layer: 0, purged: HashSet::new() }
    }

    /// Starts the next layer. Its whiteouts hide what lower layers put into the tree, not the
    /// layer's own entries.
    pub fn begin_layer(&mut self) {
        self.layer += 1;
        self.purged.clear();
    }

    /// The node `id`, which must have a name.
    pub fn node(&self, id: NodeId) -> &Node {
        self.nodes[id]
            .as_ref()
            .unwrap_or_else(|| unreachable!("node {id} was removed but is still named"))
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id]
            .as_mut()
            .unwrap_or_else(|| unreachable!("node {id} was removed but is still named"))
    }

    /// Number of nodes (inodes).
    pub fn node_count(&self) -> usize {
        self.nodes.iter().flatten().count()
    }

    /// All nodes, in no useful order.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().flatten()
    }

    /// The children of a folder; `None` if the node is not a folder.
    pub fn children(&self, id: NodeId) -> Option<&BTreeMap<Vec<u8>, Child>> {
        match &self.node(id).kind {
            Kind::Dir(children) => Some(children),
            _ => None,
        }
    }

    /// The node at `path`; symbolic links are not followed.
    pub fn find(&self, path: &[u8]) -> Option<NodeId> {
        let mut at = Self::ROOT;
        for name in components(path) {
            at = self.children(at)?.get(name)?.id;
        }
        Some(at)
    }

    fn child(&self, dir: NodeId, name: &[u8]) -> Option<Child> {
        self.children(dir).and_then(|c| c.get(name)).copied()
    }

    /// The node at `path`; symbolic links are followed.
    pub fn resolve(&mut self, path: &[u8]) -> Option<NodeId> {
        let parts: Vec<&[u8]> = components(path).collect();
        self.resolve_dir(&parts, false).ok().flatten()
    }

    /// Resolves the folder `parts` as a container runtime does inside the root. A missing folder is
    /// created if `make` is set; otherwise the result is `None`, or the last node if that is no
    /// folder.
    fn resolve_dir(&mut self, parts: &[&[u8]], make: bool) -> Result<Option<NodeId>, Refusal> {
        // A stack of folders from the root, so that '..' in a link's target means the parent of the
        // link's folder.
        let mut stack = vec![Self::ROOT];
        let mut todo: Vec<Vec<u8>> = parts.iter().rev().map(|p| p.to_vec()).collect();
        let mut followed = 0;
        while let Some(name) = todo.pop() {
            let here = *stack.last().unwrap_or(&Self::ROOT);
            if name == b".." {
                // The root is its own parent.
                stack.truncate(stack.len().saturating_sub(1).max(1));
                continue;
            }
            if stack.len() > MAX_DEPTH || todo.len() > 2 * MAX_PATH_BYTES {
                return refuse(format!("at most {MAX_DEPTH} folders deep"), "a deeper one");
            }
            let Some(child) = self.child(here, &name) else {
                if !make {
                    return Ok(None);
                }
                let id = self.add_node(Kind::empty_dir(), Meta::root(0o755))?;
                self.name(here, &name, id);
                stack.push(id);
                continue;
            };
            match &self.node(child.id).kind {
                Kind::Dir(_) => stack.push(child.id),
                Kind::Symlink(target) => {
                    followed += 1;
                    if followed > MAX_LINKS {
                        let expected = format!("at most {MAX_LINKS} symbolic links in a path");
                        return refuse(expected, "more, or a loop");
                    }
                    if target.starts_with(b"/") {
                        stack.truncate(1);
                    }
                    todo.extend(components(target).rev().map(<[u8]>::to_vec));
                }
                _ if !make => return Ok(todo.is_empty().then_some(child.id)),
                other => {
                    return refuse(
                        "a folder as parent",
                        format!("{} at {:?}", other.name(), show(&name)),
                    );
                }
            }
        }
        Ok(stack.last().copied())
    }

    fn room(&self) -> Result<(), Refusal> {
        if self.live < self.max_names {
            return Ok(());
        }
        refuse(format!("at most {} names in an image", self.max_names), "more")
    }

    fn add_node(&mut self, kind: Kind, meta: Meta) -> Result<NodeId, Refusal> {
        self.room()?;
        self.nodes.push(Some(Node { kind, meta, names: 0 }));
        Ok(self.nodes.len() - 1)
    }

    fn name(&mut self, dir: NodeId, name: &[u8], id: NodeId) {
        let child = Child { id, layer: self.layer };
        if let Kind::Dir(children) = &mut self.node_mut(dir).kind {
            children.insert(name.to_vec(), child);
            self.node_mut(id).names += 1;
            self.live += 1;
        }
    }

    fn unname(&mut self, dir: NodeId, name: &[u8]) {
        if let Kind::Dir(children) = &mut self.node_mut(dir).kind
            && let Some(child) = children.remove(name)
        {
            self.forget(child.id);
        }
    }

    /// Removes one name of a node. If it was the last name, the node and all its children are
    /// removed.
    fn forget(&mut self, id: NodeId) {
        self.live -= 1;
        let node = self.node_mut(id);
        node.names -= 1;
        if node.names == 0
            && let Some(Node { kind: Kind::Dir(children), .. }) = self.nodes[id].take()
        {
            // The recursion is as deep as the tree: at most MAX_DEPTH.
            children.into_values().for_each(|child| self.forget(child.id));
        }
    }

    /// Puts a node at `path`, as unpacking an archive's entry does. Parents are created, and an
    /// existing node is replaced. A folder over a folder keeps the content and takes the new
    /// attributes.
    pub fn put(&mut self, path: &EntryPath, kind: Kind, meta: Meta) -> Result<NodeId, Refusal> {
        let parts: Vec<&[u8]> = path.parts().collect();
        let is_dir = matches!(kind, Kind::Dir(_));
        let Some((name, parents)) = parts.split_last() else {
            if !is_dir {
                return refuse("a folder as the image's root", kind.name());
            }
            self.node_mut(Self::ROOT).meta = meta;
            return Ok(Self::ROOT);
        };
        let dir = self.resolve_dir(parents, true)?.unwrap_or(Self::ROOT);
        if let Some(old) = self.child(dir, name) {
            if is_dir && matches!(self.node(old.id).kind, Kind::Dir(_)) {
                self.node_mut(old.id).meta = meta;
                let child = Child { id: old.id, layer: self.layer };
                if let Kind::Dir(children) = &mut self.node_mut(dir).kind {
                    children.insert(name.to_vec(), child);
                }
                return Ok(old.id);
            }
            self.unname(dir, name);
        }
        let id = self.add_node(kind, meta)?;
        self.name(dir, name, id);
        Ok(id)
    }

    /// Like [`Self::put`], for a path that does not come from an archive.
    pub fn put_at(&mut self, path: &[u8], kind: Kind, meta: Meta) -> Result<NodeId, Refusal> {
        self.put(&EntryPath::parse(path)?, kind, meta)
    }

    /// Gives the file at `target` the further name `path` (a hard link).
    pub fn put_link(&mut self, path: &EntryPath, target: &EntryPath) -> Result<(), Refusal> {
        let (parts, to): (Vec<_>, Vec<_>) = (path.parts().collect(), target.parts().collect());
        let Some((name, parents)) = parts.split_last() else {
            return refuse("a name for a hard link", "the image's root");
        };
        let Some((to_name, to_parents)) = to.split_last() else {
            return refuse("a hard link to a file", "one to the image's root");
        };
        let target = target.as_bytes();
        let Some(node) = self.resolve_dir(to_parents, false)?.and_then(|d| self.child(d, to_name))
        else {
            let got = format!("one to {:?}, which is not there", show(target));
            return refuse("a hard link to an existing file", got);
        };
        if matches!(self.node(node.id).kind, Kind::Dir(_)) {
            return refuse(
                "a hard link to a file",
                format!("one to the folder {:?}", show(target)),
            );
        }
        if self.node(node.id).names >= MAX_NAMES {
            return refuse(format!("at most {MAX_NAMES} names of a file"), "more");
        }
        self.room()?;
        let dir = self.resolve_dir(parents, true)?.unwrap_or(Self::ROOT);
        match self.child(dir, name) {
            Some(old) if old.id == node.id => return Ok(()),
            Some(_) => self.unname(dir, name),
            None => {}
        }
        if self.nodes[node.id].is_none() {
            // The new name replaced the folder that the only other name was in.
            let got = format!("one to {:?}, which it replaces", show(target));
            return refuse("a hard link to an existing file", got);
        }
        self.name(dir, name, node.id);
        Ok(())
    }

    /// Applies an OCI whiteout `.wh.<name>` in the folder `parents`: hides the `name` of lower
    /// layers there.
    pub fn whiteout(&mut self, parents: &[&[u8]], name: &[u8]) -> Result<(), Refusal> {
        if let Some(dir) = self.resolve_dir(parents, false)? {
            self.purge_child(dir, name);
        }
        Ok(())
    }

    /// Applies an opaque whiteout in the folder `parents`: hides everything that lower layers have
    /// in it.
    pub fn opaque(&mut self, parents: &[&[u8]]) -> Result<(), Refusal> {
        if let Some(dir) = self.resolve_dir(parents, false)? {
            self.purge(dir);
        }
        Ok(())
    }

    /// Removes what lower layers have in a folder. Returns whether anything is left.
    fn purge(&mut self, dir: NodeId) -> bool {
        if self.purged.insert(dir) {
            let names: Vec<Vec<u8>> =
                self.children(dir).into_iter().flat_map(BTreeMap::keys).cloned().collect();
            for name in names {
                self.purge_child(dir, &name);
            }
        }
        self.children(dir).is_some_and(|c| !c.is_empty())
    }

    fn purge_child(&mut self, dir: NodeId, name: &[u8]) {
        let Some(child) = self.child(dir, name) else { return };
        let is_dir = matches!(self.node(child.id).kind, Kind::Dir(_));
        let left = is_dir && self.purge(child.id);
        if child.layer == self.layer {
            return;
        }
        if left {
            // The whiteout hides the folder, but this layer has put something into it. The folder
            // is then a new one that no entry describes.
            self.node_mut(child.id).meta = Meta::root(0o755);
            let child = Child { id: child.id, layer: self.layer };
            if let Kind::Dir(children) = &mut self.node_mut(dir).kind {
                children.insert(name.to_vec(), child);
            }
        } else {
            self.unname(dir, name);
        }
    }
}
