//! The whole tree of a disk as one tar.

use super::dir;
use super::error::{SaveError, format};
use super::ext4::Ext4;
use super::extents::{self, Extent};
use super::inode::Inode;
use super::xattrs;
use dayfly_archive::path::{MAX_DEPTH, MAX_PATH_BYTES};
use dayfly_archive::{Head, Kind, Writer};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read, Write};

const ROOT: u32 = 2;
/// Upper limit for the names of an image.
const MAX_NAMES: usize = 4_000_000;
/// Upper limit for the names that are kept for further names of the same file, in bytes.
const MAX_KEPT_BYTES: usize = 256 << 20;
/// Attributes may take this more than the disk does: several files may have one block of them.
const MORE_ATTRIBUTE_BYTES: u64 = 64 << 20;
/// The folder that mke2fs makes.
const LOST_FOUND: &[u8] = b"lost+found";

/// Writes all entries of a disk, parents before children and names in order.
///
/// # Errors
/// The disk is no ext4 file system of a known form, or is damaged; errors of `out`.
pub fn write(disk: &File, out: &mut dyn Write) -> Result<(), SaveError> {
    let ext4 = Ext4::open(disk)?;
    let mut walk = Walk {
        ext4: &ext4,
        out: Writer::new(out),
        first: HashMap::new(),
        folders: HashSet::new(),
        left: MAX_NAMES,
        kept_left: MAX_KEPT_BYTES,
        attributes_left: ext4.blocks * ext4.block_bytes + MORE_ATTRIBUTE_BYTES,
    };
    walk.entry(b"./", ROOT)?;
    walk.folder(&mut Vec::new(), ROOT, 0)?;
    walk.out.finish()?;
    Ok(())
}

struct Walk<'a, W> {
    ext4: &'a Ext4<'a>,
    out: Writer<W>,
    /// The first name of each inode that has several.
    first: HashMap<u32, Vec<u8>>,
    /// Folders that were read. Each has one place, so there are no circles.
    folders: HashSet<u32>,
    left: usize,
    kept_left: usize,
    attributes_left: u64,
}

impl<W: Write> Walk<'_, W> {
    /// Writes what is in a folder. The recursion is at most [`MAX_DEPTH`] deep.
    fn folder(&mut self, path: &mut Vec<u8>, number: u32, depth: usize) -> Result<(), SaveError> {
        let place = || format!("folder, inode {number}");
        if depth > MAX_DEPTH {
            return format(place(), format!("at most {MAX_DEPTH} folders deep"), "a deeper one");
        }
        if !self.folders.insert(number) {
            return format(place(), "one place in the tree", "another one");
        }
        let inode = Inode::read(self.ext4, number)?;
        let names = dir::read(self.ext4, &inode, self.left)?;
        self.left -= names.len();
        let length = path.len();
        for (name, child) in names {
            if length > 0 {
                path.push(b'/');
            }
            path.extend_from_slice(&name);
            if path.len() > MAX_PATH_BYTES {
                let expected = format!("paths of at most {MAX_PATH_BYTES} bytes");
                return format(place(), expected, format!("{} bytes", path.len()));
            }
            if !(path == LOST_FOUND && self.is_empty(child)?) && self.entry(path, child)? {
                self.folder(path, child, depth + 1)?;
            }
            path.truncate(length);
        }
        Ok(())
    }

    /// Whether this is a folder without content, whose blocks are not counted as read.
    fn is_empty(&self, number: u32) -> Result<bool, SaveError> {
        let inode = Inode::read(self.ext4, number)?;
        if inode.kind()? != Some(Kind::Folder) {
            return Ok(false);
        }
        // mke2fs gives it four blocks, which are read twice if it has entries; others give it less.
        let again = Ext4::open(self.ext4.disk())?;
        Ok(dir::read(&again, &inode, self.left)?.is_empty())
    }

    /// Writes one entry. Returns whether it is a folder.
    fn entry(&mut self, path: &[u8], number: u32) -> Result<bool, SaveError> {
        let inode = Inode::read(self.ext4, number)?;
        // An archive has no sockets; they are made anew when a program listens.
        let Some(kind) = inode.kind()? else { return Ok(false) };
        let mut head = Head::new(path, kind, inode.mode());
        // Also of further names, because docker sets the owner again for each.
        (head.uid, head.gid) = (inode.uid().into(), inode.gid().into());
        (head.mtime_s, head.mtime_ns) = inode.mtime();
        head.xattrs = self.attributes(&inode)?;
        if kind != Kind::Folder && inode.links() > 1 {
            if let Some(first) = self.first.get(&number) {
                head.kind = Kind::HardLink;
                head.link.clone_from(first);
                self.out.entry(&head)?;
                return Ok(false);
            }
            let Some(left) = self.kept_left.checked_sub(path.len()) else {
                let expected = format!("{MAX_KEPT_BYTES} bytes of names of files with several");
                return format("names", expected, "more");
            };
            self.kept_left = left;
            self.first.insert(number, path.to_vec());
        }
        match kind {
            Kind::File => self.file(&head, &inode)?,
            Kind::Symlink => {
                head.link = target(self.ext4, &inode)?;
                self.out.entry(&head)?;
            }
            Kind::Char | Kind::Block => {
                head.device = inode.device();
                self.out.entry(&head)?;
            }
            _ => self.out.entry(&head)?,
        }
        Ok(kind == Kind::Folder)
    }

    fn attributes(&mut self, inode: &Inode) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, SaveError> {
        let attributes = xattrs::of(self.ext4, inode)?;
        let bytes: usize = attributes.iter().map(|(name, value)| name.len() + value.len()).sum();
        let Some(left) = self.attributes_left.checked_sub(bytes as u64) else {
            return format("attributes", "about as many bytes as the disk has", "more");
        };
        self.attributes_left = left;
        Ok(attributes)
    }

    fn file(&mut self, head: &Head, inode: &Inode) -> Result<(), SaveError> {
        let extents = extents::of(self.ext4, inode)?;
        let length = inode.size_bytes;
        let stored: u64 = extents.iter().map(|extent| extent.bytes).sum();
        let mut data = Data { ext4: self.ext4, extents: extents.iter(), part: None };
        if stored == length {
            self.out.file(head, length, &mut data)?;
        } else {
            let runs: Vec<_> = extents.iter().map(|e| (e.offset, e.bytes)).collect();
            self.out.sparse_file(head, length, &runs, &mut data)?;
        }
        Ok(())
    }
}

/// The bytes of extents, one after the other.
struct Data<'a> {
    ext4: &'a Ext4<'a>,
    extents: std::slice::Iter<'a, Extent>,
    part: Option<Box<dyn Read + 'a>>,
}

impl Read for Data<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(part) = &mut self.part {
                let got = part.read(buffer)?;
                if got > 0 || buffer.is_empty() {
                    return Ok(got);
                }
            }
            let Some(extent) = self.extents.next() else { return Ok(0) };
            self.part = Some(Box::new(self.ext4.bytes(extent.at, extent.bytes)));
        }
    }
}

/// The target of a symbolic link.
fn target(ext4: &Ext4<'_>, inode: &Inode) -> Result<Vec<u8>, SaveError> {
    let place = format!("symbolic link, inode {}", inode.number);
    let length = usize::try_from(inode.size_bytes).unwrap_or(usize::MAX);
    if length == 0 || length > MAX_PATH_BYTES {
        let got = format!("{} bytes", inode.size_bytes);
        return format(place, format!("a target of 1 to {MAX_PATH_BYTES} bytes"), got);
    }
    let target = if inode.has_extents() {
        let mut target = vec![0; length];
        for extent in extents::of(ext4, inode)? {
            let start = usize::try_from(extent.offset).unwrap_or(usize::MAX);
            let end = start.saturating_add(usize::try_from(extent.bytes).unwrap_or(usize::MAX));
            if let Some(part) = target.get_mut(start..end) {
                ext4.read(extent.at, part)?;
            }
        }
        target
    } else {
        inode.content().get(..length).unwrap_or_default().to_vec()
    };
    if target.is_empty() || target.contains(&0) {
        return format(place, "a target without a NUL byte", "one with it, or none");
    }
    Ok(target)
}
