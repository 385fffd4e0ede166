//! Tests of root disks. This file holds shared helpers: archives written byte by byte, and a tree
//! printed as text.

mod archives;
mod disks;
mod hostile;
mod model;
mod saved;

use super::error::BuildError;
use super::layer;
use super::spool::Spool;
use super::tree::{Kind, NodeId, Tree};
use super::{Limits, Progress};
use std::io::Read;
use std::path::Path;

/// One entry as raw bytes. Nothing is checked, unlike in the tar crate's builder.
pub fn raw(kind: u8, name: &[u8], link: &[u8], mode: u32, data: &[u8]) -> Vec<u8> {
    raw_sized(kind, name, link, mode, data.len() as u64, data)
}

/// Like [`raw`], with an independent size field.
pub fn raw_sized(kind: u8, name: &[u8], link: &[u8], mode: u32, size: u64, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for (long, kind) in [(name, b'L'), (link, b'K')] {
        if long.len() > 100 && !matches!(kind, b'x') {
            out.extend(raw_sized(
                kind,
                b"././@LongLink",
                b"",
                0,
                long.len() as u64 + 1,
                &[long, b"\0"].concat(),
            ));
        }
    }
    let mut header = tar::Header::new_ustar();
    let old = header.as_old_mut();
    old.name[..name.len().min(100)].copy_from_slice(&name[..name.len().min(100)]);
    old.linkname[..link.len().min(100)].copy_from_slice(&link[..link.len().min(100)]);
    header.set_entry_type(tar::EntryType::new(kind));
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1_600_000_000);
    header.set_size(size);
    header.set_cksum();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

/// A PAX header with these records, for the next entry.
pub fn pax(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let length = (rest..).find(|n| rest + n.to_string().len() == *n).unwrap();
        body.extend_from_slice(format!("{length} {key}=").as_bytes());
        body.extend_from_slice(value);
        body.push(b'\n');
    }
    raw(b'x', b"pax", b"", 0o644, &body)
}

pub fn file(name: &str, data: &[u8]) -> Vec<u8> {
    raw(b'0', name.as_bytes(), b"", 0o644, data)
}

pub fn dir(name: &str) -> Vec<u8> {
    raw(b'5', name.as_bytes(), b"", 0o755, b"")
}

pub fn symlink(name: &str, target: &str) -> Vec<u8> {
    raw(b'2', name.as_bytes(), target.as_bytes(), 0o777, b"")
}

pub fn hard_link(name: &str, target: &str) -> Vec<u8> {
    raw(b'1', name.as_bytes(), target.as_bytes(), 0o644, b"")
}

/// An archive of `entries`, with its end marker.
pub fn archive(entries: &[Vec<u8>]) -> Vec<u8> {
    let mut out = entries.concat();
    out.extend_from_slice(&[0; 1024]);
    out
}

/// Applies layers in order; contents go to files under `folder`.
pub fn unpack_in(folder: &Path, limits: Limits, layers: &[Vec<u8>]) -> Result<Tree, BuildError> {
    let mut ignored = |_: Progress<'_>| ();
    let mut spool = Spool::new(folder, limits, &mut ignored);
    let mut tree = Tree::new(usize::try_from(limits.max_entries).unwrap());
    for (number, bytes) in layers.iter().enumerate() {
        layer::apply(&mut tree, &mut spool, bytes.as_slice(), &format!("layer {number}"))?;
    }
    Ok(tree)
}

/// Applies layers and returns the tree as text.
pub fn unpack(layers: &[Vec<u8>]) -> Result<Vec<String>, BuildError> {
    let folder = tempfile::tempdir().unwrap();
    unpack_in(folder.path(), Limits::default(), layers).map(|tree| text(&tree))
}

/// Every path with its kind and content, in order.
pub fn text(tree: &Tree) -> Vec<String> {
    fn add(tree: &Tree, id: NodeId, path: &str, out: &mut Vec<String>) {
        let node = tree.node(id);
        let mode = node.meta.mode;
        out.push(match &node.kind {
            Kind::Dir(_) => format!("{path}/ {mode:o}"),
            Kind::File(content) => {
                let mut data = Vec::new();
                if let Some(path) = &content.path {
                    std::fs::File::open(path).unwrap().take(40).read_to_end(&mut data).unwrap();
                }
                format!("{path} {mode:o} {:?}", String::from_utf8_lossy(&data))
            }
            Kind::Symlink(target) => format!("{path} -> {}", String::from_utf8_lossy(target)),
            other => format!("{path} {other:?}"),
        });
        for (name, child) in tree.children(id).into_iter().flatten() {
            add(tree, child.id, &format!("{path}/{}", String::from_utf8_lossy(name)), out);
        }
    }
    let mut out = Vec::new();
    add(tree, Tree::ROOT, "", &mut out);
    out
}
