//! Applies a layer's tar stream to a [`Tree`], with the whiteouts of the OCI image specification
//! (layer.md).

use super::error::BuildError;
use super::spool::Spool;
use super::tree::{Content, Kind, Meta, Tree};
use dayfly_archive::path::MAX_PATH_BYTES;
use dayfly_archive::{
    ArchiveError, CopyOptions, Entry, EntryPath, Limits, Reader, Refusal, refuse, show, xattr,
};
use std::io::{self, Read};
use std::path::PathBuf;

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Prefix of AUFS metadata, which old images contain. Such entries are skipped, as in container
/// runtimes.
const AUFS: &[u8] = b".wh..wh.";

/// Applies the archive in `reader` to `tree`. Errors call the layer `name`. Returns the reader,
/// positioned after the archive's end.
pub fn apply<R: Read>(
    tree: &mut Tree,
    spool: &mut Spool<'_>,
    reader: R,
    name: &str,
) -> Result<R, BuildError> {
    // The reader has no limits here because the spool counts its limits over all layers.
    let mut archive = Reader::new(reader, Limits::NONE);
    tree.begin_layer();
    loop {
        let Some(entry) = archive.next_entry().map_err(|e| archive_error(name, e))? else {
            return Ok(archive.into_inner());
        };
        one(tree, spool, &mut archive, &entry).map_err(|problem| match problem {
            Problem::Refusal(why) => archive_error(name, entry.refused(why)),
            Problem::Archive(error) => archive_error(name, error),
            Problem::Io(path, source) => BuildError::Io { what: "write", path, source },
        })?;
        spool.report(archive.position());
    }
}

enum Problem {
    Refusal(Refusal),
    Archive(ArchiveError),
    Io(PathBuf, io::Error),
}

impl From<Refusal> for Problem {
    fn from(why: Refusal) -> Self {
        Self::Refusal(why)
    }
}

pub(super) fn archive_error(layer: &str, error: ArchiveError) -> BuildError {
    let layer = layer.to_owned();
    match error {
        ArchiveError::Stream { at, cause } => BuildError::Stream { layer, at, source: cause },
        ArchiveError::Write { entry, cause } => {
            let path = PathBuf::from(show(&entry));
            BuildError::Io { what: "write the content of", path, source: cause }
        }
        ArchiveError::Refused { entry, at, why } => BuildError::Refused {
            layer,
            entry: show(&entry),
            at,
            expected: why.expected,
            got: why.got,
        },
    }
}

fn one<R: Read>(
    tree: &mut Tree,
    spool: &mut Spool<'_>,
    archive: &mut Reader<R>,
    entry: &Entry,
) -> Result<(), Problem> {
    spool.count_entry()?;
    let path = EntryPath::parse(&entry.head.path)?;
    let parts: Vec<&[u8]> = path.parts().collect();
    if let Some((name, parents)) = parts.split_last() {
        if *name == OPAQUE {
            return Ok(tree.opaque(parents)?);
        }
        if parts.iter().any(|p| p.starts_with(AUFS)) {
            return Ok(());
        }
        if let Some(hidden) = name.strip_prefix(WHITEOUT) {
            if matches!(hidden, b"" | b"." | b"..") {
                return Ok(refuse(
                    "a whiteout that names what it hides",
                    "one that names a folder itself",
                )?);
            }
            return Ok(tree.whiteout(parents, hidden)?);
        }
        if parents.iter().any(|p| p.starts_with(WHITEOUT)) {
            return Ok(refuse("a path without a whiteout among its folders", "one with it")?);
        }
    }
    let meta = meta(entry)?;
    let kind = match entry.head.kind {
        dayfly_archive::Kind::Folder => Kind::empty_dir(),
        dayfly_archive::Kind::File => return file(tree, spool, archive, entry, &path, meta),
        dayfly_archive::Kind::Symlink => Kind::Symlink(symlink(entry)?),
        dayfly_archive::Kind::HardLink => {
            return Ok(tree.put_link(&path, &link_target(entry)?)?);
        }
        dayfly_archive::Kind::Char => Kind::Char(entry.head.device.0, entry.head.device.1),
        dayfly_archive::Kind::Block => Kind::Block(entry.head.device.0, entry.head.device.1),
        dayfly_archive::Kind::Fifo => Kind::Fifo,
        dayfly_archive::Kind::Other(byte) => {
            let got = format!("type {:?}", char::from(byte));
            return Ok(refuse("a file, folder, link, device or pipe", got)?);
        }
    };
    if let Kind::Char(major, minor) | Kind::Block(major, minor) = kind
        && (major > 0xfff || minor > 0xffff)
    {
        let got = format!("{major}:{minor}");
        return Ok(refuse("a device number of at most 4095:65535", got)?);
    }
    tree.put(&path, kind, meta)?;
    Ok(())
}

fn symlink(entry: &Entry) -> Result<Vec<u8>, Refusal> {
    let link = &entry.head.link;
    if link.is_empty() || link.contains(&0) || link.len() > MAX_PATH_BYTES {
        let expected = format!("a link's target of 1 to {MAX_PATH_BYTES} bytes");
        return refuse(expected, format!("{} bytes", link.len()));
    }
    Ok(link.clone())
}

fn link_target(entry: &Entry) -> Result<EntryPath, Refusal> {
    EntryPath::parse(&entry.head.link).map_err(|why| Refusal {
        expected: format!("a hard link to {}", why.expected),
        got: format!("{} ({:?})", why.got, show(&entry.head.link)),
    })
}

fn file<R: Read>(
    tree: &mut Tree,
    spool: &mut Spool<'_>,
    archive: &mut Reader<R>,
    entry: &Entry,
    name: &EntryPath,
    meta: Meta,
) -> Result<(), Problem> {
    let mut content = Content { path: None, size_bytes: entry.size_bytes, data_bytes: 0 };
    if entry.size_bytes > 0 {
        let (path, file) = spool.create().map_err(|(path, error)| Problem::Io(path, error))?;
        let how = CopyOptions { zeroes_are_holes: true, room: spool.room() };
        content.data_bytes = archive.copy_data(entry, &file, how).map_err(Problem::Archive)?;
        spool.used(content.data_bytes);
        content.path = Some(path);
    }
    tree.put(name, Kind::File(content), meta)?;
    Ok(())
}

fn meta(entry: &Entry) -> Result<Meta, Refusal> {
    let id = |what: &str, id: u64| {
        // For system calls, 2^32-1 means "no owner".
        u32::try_from(id)
            .ok()
            .filter(|id| *id != u32::MAX)
            .map_or_else(|| refuse(format!("a {what} below 4294967295"), id.to_string()), Ok)
    };
    let head = &entry.head;
    let mut xattrs = head.xattrs.clone();
    xattrs.retain(|name, _| xattr::portable(name));
    check_xattrs(&xattrs)?;
    Ok(Meta {
        mode: head.mode,
        uid: id("user id", head.uid)?,
        gid: id("group id", head.gid)?,
        mtime_s: head.mtime_s,
        mtime_ns: head.mtime_ns,
        xattrs,
    })
}

/// Checks that a file's extended attributes fit. ext4 keeps them in the inode and in one block.
pub fn check_xattrs(xattrs: &std::collections::BTreeMap<Vec<u8>, Vec<u8>>) -> Result<(), Refusal> {
    const MAX_BYTES: usize = 3800;
    // Each attribute takes its name, its value and a 16-byte entry, with name and value padded to 4
    // bytes.
    let bytes: usize = xattrs.iter().map(|(name, value)| name.len() + value.len() + 24).sum();
    if bytes > MAX_BYTES {
        return refuse(
            format!("extended attributes of at most {MAX_BYTES} bytes in a file"),
            bytes.to_string(),
        );
    }
    let odd =
        |name: &[u8]| name.len() > 200 || name.iter().any(|b| !b.is_ascii_graphic() || *b == b'"');
    match xattrs.keys().find(|name| odd(name)) {
        Some(name) => refuse("names of extended attributes in printable ASCII", show(name)),
        None => Ok(()),
    }
}
