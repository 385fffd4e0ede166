//! Reads a folder of the host as a root file system.
//!
//! The reader follows no symbolic link and keeps owners and modes. It skips sockets and does not
//! enter file systems that are mounted inside the folder.

use super::error::{BuildError, on};
use super::layer::check_xattrs;
use super::spool::Spool;
use super::tree::{Content, Kind, Meta, Tree};
use dayfly_archive::xattr::portable;
use dayfly_archive::{EntryPath, Refusal, show};
use std::collections::{BTreeMap, HashMap};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Reads the folder `root` into `tree`.
pub fn read(tree: &mut Tree, spool: &mut Spool<'_>, root: &Path) -> Result<(), BuildError> {
    spool.begin("reading the folder".to_owned());
    // The root is resolved once, so the caller may pass a symbolic link to the folder.
    let root = &std::fs::canonicalize(root).map_err(on("open", root))?;
    let mut links: HashMap<(u64, u64), EntryPath> = HashMap::new();
    let walk =
        walkdir::WalkDir::new(root).follow_links(false).same_file_system(true).sort_by_file_name();
    for entry in walk {
        let entry = entry.map_err(|e| {
            let path = e.path().unwrap_or(root).to_owned();
            on("read", &path)(e.into())
        })?;
        let path = entry.path();
        let relative = path.strip_prefix(root).unwrap_or(path).as_os_str().as_bytes();
        let name = if relative.is_empty() { b"." } else { relative };
        let refused = |why: Refusal| BuildError::Refused {
            layer: root.display().to_string(),
            entry: show(name),
            at: 0,
            expected: why.expected,
            got: why.got,
        };
        spool.count_entry().map_err(refused)?;
        let at = EntryPath::parse(name).map_err(refused)?;
        let stat = path.symlink_metadata().map_err(on("stat", path))?;
        let kind = stat.file_type();
        if kind.is_socket() {
            continue;
        }
        if !kind.is_dir() && stat.nlink() > 1 {
            let key = (stat.dev(), stat.ino());
            if let Some(first) = links.get(&key) {
                tree.put_link(&at, first).map_err(refused)?;
                continue;
            }
            links.insert(key, at.clone());
        }
        let device = || {
            let dev = stat.rdev();
            (rustix::fs::major(dev), rustix::fs::minor(dev))
        };
        let kind = if kind.is_dir() {
            Kind::empty_dir()
        } else if kind.is_symlink() {
            Kind::Symlink(
                std::fs::read_link(path).map_err(on("read", path))?.as_os_str().as_bytes().to_vec(),
            )
        } else if kind.is_char_device() {
            Kind::Char(device().0, device().1)
        } else if kind.is_block_device() {
            Kind::Block(device().0, device().1)
        } else if kind.is_fifo() {
            Kind::Fifo
        } else {
            let data_bytes = data_bytes(path, &stat)?;
            if data_bytes > spool.room() {
                let expected = "a folder within the limit on content".to_owned();
                return Err(refused(Refusal { expected, got: "more".to_owned() }));
            }
            spool.used(data_bytes);
            let from = (stat.len() > 0).then(|| path.to_owned());
            Kind::File(Content { path: from, size_bytes: stat.len(), data_bytes })
        };
        let meta = Meta {
            mode: stat.mode() & 0o7777,
            uid: stat.uid(),
            gid: stat.gid(),
            mtime_s: stat.mtime(),
            mtime_ns: u32::try_from(stat.mtime_nsec()).unwrap_or(0),
            xattrs: xattrs(path)?,
        };
        check_xattrs(&meta.xattrs).map_err(refused)?;
        tree.put(&at, kind, meta).map_err(refused)?;
    }
    Ok(())
}

/// Bytes outside holes, in whole pages. A file whose blocks cover its length has no holes. Other
/// files are searched with SEEK_DATA, because recently written data may have no blocks yet.
fn data_bytes(path: &Path, stat: &std::fs::Metadata) -> Result<u64, BuildError> {
    if stat.len() <= 4096 || stat.blocks().saturating_mul(512) >= stat.len() {
        return Ok(stat.len().next_multiple_of(4096));
    }
    let mut bytes = 0;
    let mut at = 0;
    let file = std::fs::File::open(path).map_err(on("open", path))?;
    let end = |e: rustix::io::Errno| on("read", path)(e.into());
    while at < stat.len() {
        let start = match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(end(error)),
        };
        at = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(start)).map_err(end)?;
        bytes += at - start;
    }
    Ok(bytes.next_multiple_of(4096))
}

fn xattrs(path: &Path) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, BuildError> {
    let mut found = BTreeMap::new();
    let names = match xattr::list(path) {
        Ok(names) => names,
        Err(error) if error.kind() == std::io::ErrorKind::Unsupported => return Ok(found),
        Err(error) => return Err(on("read the attributes of", path)(error)),
    };
    for name in names.filter(|n| portable(n.as_bytes())) {
        if let Some(value) = xattr::get(path, &name).map_err(on("read the attributes of", path))? {
            found.insert(name.as_bytes().to_vec(), value);
        }
    }
    Ok(found)
}
