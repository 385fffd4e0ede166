//! Applying a layer's tar stream to a [`Tree`], with the whiteouts of the OCI image specification (layer.md).

use super::error::BuildError;
use super::spool::Spool;
use super::tarstream::{Entry, TarError, TarStream};
use super::tree::{Content, Kind, MAX_PATH_BYTES, Meta, Refusal, Tree, refuse, show};
use std::io::{self, Read};
use std::path::PathBuf;
use tar::EntryType;

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// AUFS's own bookkeeping, which old images carry: skipped, as container runtimes do.
const AUFS: &[u8] = b".wh..wh.";

/// Applies the archive in `reader` to `tree`; `name` is what errors call it. Gives the reader back, at the archive's end.
pub fn apply<R: Read>(
    tree: &mut Tree,
    spool: &mut Spool<'_>,
    reader: R,
    name: &str,
) -> Result<R, BuildError> {
    let mut stream = TarStream::new(reader);
    tree.begin_layer();
    loop {
        let result = match stream.next() {
            Ok(None) => return Ok(stream.into_inner()),
            Ok(Some(entry)) => {
                let (path, at) = (entry.path.clone(), entry.at);
                one(tree, spool, &mut stream, entry).map_err(|problem| match problem {
                    Problem::Refusal(why) => refused(name, &path, at, why),
                    Problem::Tar(error) => tar_error(name, stream.position(), error),
                    Problem::Io(path, source) => BuildError::Io { what: "write", path, source },
                })
            }
            Err(error) => Err(tar_error(name, stream.position(), error)),
        };
        result?;
        spool.report(stream.position());
    }
}

enum Problem {
    Refusal(Refusal),
    Tar(TarError),
    Io(PathBuf, io::Error),
}

impl From<Refusal> for Problem {
    fn from(why: Refusal) -> Self {
        Self::Refusal(why)
    }
}

fn refused(layer: &str, entry: &[u8], at: u64, why: Refusal) -> BuildError {
    BuildError::Refused {
        layer: layer.to_owned(),
        entry: show(entry),
        at,
        expected: why.expected,
        got: why.got,
    }
}

pub(super) fn tar_error(layer: &str, position: u64, error: TarError) -> BuildError {
    match error {
        TarError::Io(source) => BuildError::Stream { layer: layer.to_owned(), at: position, source },
        TarError::Refused { entry, at, why } => refused(layer, &entry, at, why),
    }
}

fn one<R: Read>(
    tree: &mut Tree,
    spool: &mut Spool<'_>,
    stream: &mut TarStream<R>,
    entry: Entry,
) -> Result<(), Problem> {
    spool.count_entry()?;
    let parts = Tree::check_name(&entry.path)?;
    if let Some((name, parents)) = parts.split_last() {
        if *name == OPAQUE {
            return Ok(tree.opaque(parents)?);
        }
        if parts.iter().any(|p| p.starts_with(AUFS)) {
            return Ok(());
        }
        if let Some(hidden) = name.strip_prefix(WHITEOUT) {
            if matches!(hidden, b"" | b"." | b"..") {
                return Ok(refuse("a whiteout that names what it hides", "one that names a folder itself")?);
            }
            return Ok(tree.whiteout(parents, hidden)?);
        }
        if parents.iter().any(|p| p.starts_with(WHITEOUT)) {
            return Ok(refuse("a path without a whiteout among its folders", "one with it")?);
        }
    }
    let meta = meta(&entry)?;
    let kind = match entry.kind {
        EntryType::Directory => Kind::empty_dir(),
        // A regular file whose name ends in '/' is a folder (tar before POSIX).
        EntryType::Regular if entry.path.ends_with(b"/") => Kind::empty_dir(),
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
            return file(tree, spool, stream, &entry, meta);
        }
        EntryType::Symlink => Kind::Symlink(symlink(&entry)?),
        EntryType::Link => return Ok(tree.put_link(&entry.path, &entry.link)?),
        EntryType::Char => Kind::Char(entry.device.0, entry.device.1),
        EntryType::Block => Kind::Block(entry.device.0, entry.device.1),
        EntryType::Fifo => Kind::Fifo,
        other => {
            let got = format!("type {:?}", char::from(other.as_byte()));
            return Ok(refuse("a file, folder, link, device or pipe", got)?);
        }
    };
    if let Kind::Char(major, minor) | Kind::Block(major, minor) = kind
        && (major > 0xfff || minor > 0xffff)
    {
        let got = format!("{major}:{minor}");
        return Ok(refuse("a device number of at most 4095:65535", got)?);
    }
    tree.put(&entry.path, kind, meta)?;
    Ok(())
}

fn symlink(entry: &Entry) -> Result<Vec<u8>, Refusal> {
    if entry.link.is_empty() || entry.link.contains(&0) || entry.link.len() > MAX_PATH_BYTES {
        let expected = format!("a link's target of 1 to {MAX_PATH_BYTES} bytes");
        return refuse(expected, format!("{} bytes", entry.link.len()));
    }
    Ok(entry.link.clone())
}

fn file<R: Read>(
    tree: &mut Tree,
    spool: &mut Spool<'_>,
    stream: &mut TarStream<R>,
    entry: &Entry,
    meta: Meta,
) -> Result<(), Problem> {
    let mut content = Content { path: None, size_bytes: entry.size_bytes, data_bytes: 0 };
    if entry.size_bytes > 0 {
        let (path, file) = spool.create().map_err(|(path, error)| Problem::Io(path, error))?;
        content.data_bytes = stream.copy_data(entry, &file, spool.room()).map_err(Problem::Tar)?;
        spool.used(content.data_bytes);
        content.path = Some(path);
    }
    tree.put(&entry.path, Kind::File(content), meta)?;
    Ok(())
}

fn meta(entry: &Entry) -> Result<Meta, Refusal> {
    let id = |what: &str, id: u64| {
        // 2^32-1 is "no owner" to the system calls.
        u32::try_from(id)
            .ok()
            .filter(|id| *id != u32::MAX)
            .map_or_else(|| refuse(format!("a {what} below 4294967295"), id.to_string()), Ok)
    };
    let mut xattrs = entry.xattrs.clone();
    xattrs.retain(|name, _| keep_xattr(name));
    check_xattrs(&xattrs)?;
    Ok(Meta {
        mode: entry.mode & 0o7777,
        uid: id("user id", entry.uid)?,
        gid: id("group id", entry.gid)?,
        mtime_s: entry.mtime_s,
        mtime_ns: entry.mtime_ns,
        xattrs,
    })
}

/// Attributes that mean something in the guest. Overlayfs's own would make it read the image as a layer.
pub fn keep_xattr(name: &[u8]) -> bool {
    let starts = |prefix: &[u8]| name.starts_with(prefix);
    let ours = starts(b"user.") || starts(b"security.") || starts(b"trusted.");
    let acl = matches!(name, b"system.posix_acl_access" | b"system.posix_acl_default");
    (ours || acl) && !starts(b"trusted.overlay.") && !starts(b"user.overlay.")
}

/// ext4 keeps the attributes of a file in its inode and one block.
pub fn check_xattrs(xattrs: &std::collections::BTreeMap<Vec<u8>, Vec<u8>>) -> Result<(), Refusal> {
    const MAX_BYTES: usize = 3800;
    // Each takes its name, its value, a 16-byte entry, and padding of both to 4 bytes.
    let bytes: usize = xattrs.iter().map(|(name, value)| name.len() + value.len() + 24).sum();
    if bytes > MAX_BYTES {
        return refuse(
            format!("extended attributes of at most {MAX_BYTES} bytes in a file"),
            bytes.to_string(),
        );
    }
    let odd = |name: &[u8]| name.len() > 200 || name.iter().any(|b| !b.is_ascii_graphic() || *b == b'"');
    match xattrs.keys().find(|name| odd(name)) {
        Some(name) => refuse("names of extended attributes in printable ASCII", show(name)),
        None => Ok(()),
    }
}
