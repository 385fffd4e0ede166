//! A root file system as a tree in memory; the only place where names of an image are given meaning.
//!
//! Nothing that an image says is ever made on the host: file contents go to numbered files in a staging folder, names,
//! links and devices exist only here until they are written into the ext4 file. So no name, symbolic link or hard link
//! of an image can lead to a file of the host; the checks here keep the *image* sane and report what is hostile.
//!
//! A path is resolved as a container runtime does it inside the root (`openat2` with `RESOLVE_IN_ROOT`): symbolic links
//! among the parents of a lower layer are followed, absolute ones from the image's root. What climbs above the root is
//! refused, and so is a parent that the *same* layer made a symbolic link with an absolute target: no archiver writes
//! that, it is how archives attack.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;

/// Most components of a path.
pub const MAX_DEPTH: usize = 512;
/// Most bytes of a path or of a symbolic link's target (Linux: `PATH_MAX` with its NUL).
pub const MAX_PATH_BYTES: usize = 4095;
/// Most bytes of one name (ext4: `EXT4_NAME_LEN`).
pub const MAX_NAME_BYTES: usize = 255;
/// Most names of one file (ext4: `EXT4_LINK_MAX`).
const MAX_NAMES: u32 = 65_000;
/// Symbolic links followed in one path (Linux: `MAXSYMLINKS`).
const MAX_LINKS: usize = 40;

/// A node's place in the tree's table.
pub type NodeId = usize;

/// A file's bytes: a file of the host, read when the disk is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    /// Where; `None` for an empty file.
    pub path: Option<PathBuf>,
    /// Length in bytes, holes included.
    pub size_bytes: u64,
    /// Bytes that are not in holes, in whole pages.
    pub data_bytes: u64,
}

/// A name in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Child {
    /// What it names.
    pub id: NodeId,
    /// The layer whose entry gave the name, or last set the attributes of the folder it names.
    layer: u32,
}

/// What a node is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A folder: names and what they are.
    Dir(BTreeMap<Vec<u8>, Child>),
    /// A file.
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

    /// The kind in words.
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

/// Everything of a node but its kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meta {
    /// The lower 12 bits of the mode.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Seconds since 1970.
    pub mtime_s: i64,
    /// And nanoseconds.
    pub mtime_ns: u32,
    /// Extended attributes, values as the system calls give them.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Meta {
    /// Of root, with these permissions and nothing else; 0o755 is what a runtime gives a folder without an entry.
    pub fn root(mode: u32) -> Self {
        Self { mode, uid: 0, gid: 0, mtime_s: 0, mtime_ns: 0, xattrs: BTreeMap::new() }
    }
}

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// What it is.
    pub kind: Kind,
    /// Its attributes.
    pub meta: Meta,
    /// How many names it has.
    pub names: u32,
}

/// Why a tree does not take an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// What is accepted.
    pub expected: String,
    /// What was found.
    pub got: String,
}

pub(super) fn refuse<T>(expected: impl Into<String>, got: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal { expected: expected.into(), got: got.into() })
}

/// Bytes as text for an error, shortened.
pub fn show(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned()
}

/// The components of a path; empty ones and `.` left out.
pub fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|b| *b == b'/').filter(|p| !p.is_empty() && *p != b".")
}

/// A root file system.
#[derive(Debug, Clone)]
pub struct Tree {
    nodes: Vec<Option<Node>>,
    /// Names there are.
    live: usize,
    max_names: usize,
    layer: u32,
    /// Folders that this layer has purged already: nothing of a lower layer can be in them any more.
    purged: HashSet<NodeId>,
}

impl Tree {
    /// The root folder.
    pub const ROOT: NodeId = 0;

    /// An empty root folder; at most `max_names` names.
    pub fn new(max_names: usize) -> Self {
        let root = Node { kind: Kind::empty_dir(), meta: Meta::root(0o755), names: 1 };
        Self { nodes: vec![Some(root)], live: 1, max_names, layer: 0, purged: HashSet::new() }
    }

    /// From here on entries belong to the next layer: its whiteouts hide what is there now, not what comes.
    pub fn begin_layer(&mut self) {
        self.layer += 1;
        self.purged.clear();
    }

    /// The node `id`.
    pub fn node(&self, id: NodeId) -> &Node {
        self.nodes[id].as_ref().unwrap_or_else(|| unreachable!("node {id} was removed but is still named"))
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id].as_mut().unwrap_or_else(|| unreachable!("node {id} was removed but is still named"))
    }

    /// How many nodes (inodes) there are.
    pub fn node_count(&self) -> usize {
        self.nodes.iter().flatten().count()
    }

    /// Every node.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().flatten()
    }

    /// What a folder holds.
    pub fn children(&self, id: NodeId) -> Option<&BTreeMap<Vec<u8>, Child>> {
        match &self.node(id).kind {
            Kind::Dir(children) => Some(children),
            _ => None,
        }
    }

    /// The node at `path`, no link followed.
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

    /// Checks an entry's name and gives its components: relative, no `..`, none too long.
    pub fn check_name(path: &[u8]) -> Result<Vec<&[u8]>, Refusal> {
        if path.is_empty() || path.contains(&0) {
            return refuse("a path", "an empty name or one with a NUL byte");
        }
        if path.len() > MAX_PATH_BYTES {
            return refuse(
                format!("a path of at most {MAX_PATH_BYTES} bytes"),
                format!("{} bytes", path.len()),
            );
        }
        if path.starts_with(b"/") {
            return refuse("a path relative to the image's root", "an absolute path");
        }
        let parts: Vec<&[u8]> = components(path).collect();
        if parts.contains(&b"..".as_slice()) {
            return refuse("a path without '..'", "a path that may leave the image's root");
        }
        if let Some(long) = parts.iter().find(|p| p.len() > MAX_NAME_BYTES) {
            let expected = format!("names of at most {MAX_NAME_BYTES} bytes");
            return refuse(expected, format!("one of {} bytes", long.len()));
        }
        if parts.len() > MAX_DEPTH {
            return refuse(format!("at most {MAX_DEPTH} folders deep"), format!("{} deep", parts.len()));
        }
        Ok(parts)
    }

    /// The folder `parts`, as a runtime resolves it inside the root. Where it is missing it is made if `make` is set,
    /// and otherwise there is none.
    fn resolve_dir(&mut self, parts: &[&[u8]], make: bool) -> Result<Option<NodeId>, Refusal> {
        // A stack of folders from the root, so that '..' in a link's target means the folder the link is in.
        let mut stack = vec![Self::ROOT];
        let mut todo: Vec<Vec<u8>> = parts.iter().rev().map(|p| p.to_vec()).collect();
        let mut followed = 0;
        while let Some(name) = todo.pop() {
            let here = *stack.last().unwrap_or(&Self::ROOT);
            if name == b".." {
                if stack.len() == 1 {
                    let got = "a symbolic link that climbs above the image's root";
                    return refuse("a parent folder inside the image", got);
                }
                stack.pop();
                continue;
            }
            let Some(child) = self.child(here, &name) else {
                if !make {
                    return Ok(None);
                }
                if followed > 0 {
                    let got = format!("a symbolic link that leads to the missing folder {:?}", show(&name));
                    return refuse("a parent folder that exists in the image", got);
                }
                let id = self.add_node(Kind::empty_dir(), Meta::root(0o755))?;
                self.name(here, &name, id);
                stack.push(id);
                continue;
            };
            match &self.node(child.id).kind {
                Kind::Dir(_) if stack.len() > MAX_DEPTH => {
                    return refuse(format!("at most {MAX_DEPTH} folders deep"), "a deeper one");
                }
                Kind::Dir(_) => stack.push(child.id),
                Kind::Symlink(target) => {
                    followed += 1;
                    if followed > MAX_LINKS {
                        return refuse(
                            format!("at most {MAX_LINKS} symbolic links in a path"),
                            "more, or a loop",
                        );
                    }
                    if target.starts_with(b"/") {
                        if child.layer == self.layer {
                            let (link, target) = (show(&name), show(target));
                            let got =
                                format!("the symbolic link {link:?} to {target:?}, made by the same layer");
                            return refuse("a folder as parent", got);
                        }
                        stack.truncate(1);
                    }
                    let rest: Vec<Vec<u8>> = components(target).map(<[u8]>::to_vec).collect();
                    todo.extend(rest.into_iter().rev());
                }
                _ if !make => return Ok(None),
                other => {
                    return refuse("a folder as parent", format!("{} at {:?}", other.name(), show(&name)));
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

    /// Takes one name from a node, and the node with all that is under it when that was the last.
    fn forget(&mut self, id: NodeId) {
        self.live -= 1;
        let node = self.node_mut(id);
        node.names -= 1;
        if node.names == 0
            && let Some(Node { kind: Kind::Dir(children), .. }) = self.nodes[id].take()
        {
            // As deep as the tree: at most MAX_DEPTH.
            children.into_values().for_each(|child| self.forget(child.id));
        }
    }

    /// Puts a node at `path`, as unpacking an archive's entry does: parents are made, what is there is replaced; a
    /// folder over a folder keeps its content and takes the new attributes.
    pub fn put(&mut self, path: &[u8], kind: Kind, meta: Meta) -> Result<NodeId, Refusal> {
        let parts = Self::check_name(path)?;
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

    /// Gives the file at `target` a second name.
    pub fn put_link(&mut self, path: &[u8], target: &[u8]) -> Result<(), Refusal> {
        let parts = Self::check_name(path)?;
        let Some((name, parents)) = parts.split_last() else {
            return refuse("a name for a hard link", "the image's root");
        };
        let to = Self::check_name(target).map_err(|r| Refusal {
            expected: format!("a hard link to {}", r.expected),
            got: format!("{} ({:?})", r.got, show(target)),
        })?;
        let Some((to_name, to_parents)) = to.split_last() else {
            return refuse("a hard link to a file", "one to the image's root");
        };
        let Some(node) = self.resolve_dir(to_parents, false)?.and_then(|d| self.child(d, to_name)) else {
            let got = format!("one to {:?}, which is not there", show(target));
            return refuse("a hard link to an existing file", got);
        };
        if matches!(self.node(node.id).kind, Kind::Dir(_)) {
            return refuse("a hard link to a file", format!("one to the folder {:?}", show(target)));
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
        self.name(dir, name, node.id);
        Ok(())
    }

    /// An OCI whiteout `.wh.<name>` in the folder `parents`: hides what lower layers have there under `name`.
    pub fn whiteout(&mut self, parents: &[&[u8]], name: &[u8]) -> Result<(), Refusal> {
        if let Some(dir) = self.resolve_dir(parents, false)? {
            self.purge_child(dir, name);
        }
        Ok(())
    }

    /// An opaque whiteout in the folder `parents`: hides everything that lower layers have in it.
    pub fn opaque(&mut self, parents: &[&[u8]]) -> Result<(), Refusal> {
        if let Some(dir) = self.resolve_dir(parents, false)? {
            self.purge(dir);
        }
        Ok(())
    }

    /// Removes what lower layers have in a folder; whether anything is left.
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
            // The folder itself is hidden, but this layer has put something into it: a new one that no entry describes.
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
