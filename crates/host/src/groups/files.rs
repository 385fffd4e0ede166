//! Files of groups.

use std::fs::File;
use std::io;
use std::path::Path;

/// Adds the path to an error of the file system.
pub(super) fn named(path: &Path) -> impl FnOnce(io::Error) -> io::Error {
    move |e| io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}

/// Writes a file of a group.
pub(super) fn write(path: &Path, text: &str) -> io::Result<()> {
    // Without O_CREAT, because the file of a missing controller cannot be made.
    let file = File::options().write(true).open(path).map_err(named(path))?;
    io::Write::write_all(&mut &file, text.as_bytes()).map_err(named(path))
}

/// Reads a file of a group; `None` if there is none, as without its controller.
pub(super) fn read(path: &Path) -> io::Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(named(path)(e)),
    }
}

/// Reads a number; `None` as in [`read`].
pub(super) fn number(path: &Path) -> io::Result<Option<u64>> {
    let parsed = read(path)?.map(|text| text.trim().parse());
    parsed.transpose().map_err(|e| named(path)(io::Error::new(io::ErrorKind::InvalidData, e)))
}

/// `used` bytes without the page cache of files, by the keys of its parts in the text of
/// `memory.stat`.
pub(super) fn without_cache(used: u64, stat: &str, keys: [&str; 2]) -> u64 {
    // The two files are read one after the other, so that the cache may be larger.
    keys.iter().fold(used, |left, key| left.saturating_sub(keyed(stat, key).unwrap_or(0)))
}

/// The number after `key` in a file of lines `key number`.
pub(super) fn keyed(text: &str, key: &str) -> Option<u64> {
    let of = |line: &str| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok();
    text.lines().find_map(of)
}
