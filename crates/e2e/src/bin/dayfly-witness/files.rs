//! A checksum of all files of a file system, read from the disk, and a comparison of their cached
//! pages with the disk.

use crate::error::{Result, at};
use crate::sum::Sum;
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::fs::{self, File, OpenOptions};
use std::io::IoSliceMut;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Files below the root that differ in every clone, because they are its identity
/// (`agent::identity`).
const IDENTITY: [&str; 5] =
    ["etc/hostname", "etc/hosts", "etc/machine-id", "var/lib/dbus/machine-id", "var/lib/dayfly"];
/// `O_DIRECT` of x86 (fcntl.h).
const O_DIRECT: i32 = 0o40000;
/// Alignment of buffers for `O_DIRECT`.
const ALIGNED: usize = 4096;
const BUFFER: usize = 1 << 20;
const PAGE: usize = 4096;

/// State of a walk through the file system.
struct Walk {
    root: PathBuf,
    buffer: Vec<u8>,
    files: u64,
    bytes: u64,
    direct: Sum,
    /// `None` if the page cache is not compared.
    cache: Option<Cache>,
}

/// Result of comparing the page cache with the disk.
#[derive(Debug, Default)]
struct Cache {
    page: Vec<u8>,
    /// Bytes of the cached pages that were compared.
    bytes: u64,
    /// Of these, bytes of pages that differ from the disk.
    other_bytes: u64,
}

impl Cache {
    fn new() -> Self {
        Self { page: vec![0; PAGE], ..Self::default() }
    }

    /// Compares the cached pages of `file` from `offset` on, a multiple of a page, with `disk`.
    /// Reads nothing into the cache.
    fn compare(&mut self, file: &File, offset: u64, disk: &[u8]) -> std::io::Result<()> {
        for (page, n) in disk.chunks(PAGE).zip(0..) {
            let cached = &mut self.page[..page.len()];
            let at = offset + n * PAGE as u64;
            match preadv2(file, &mut [IoSliceMut::new(cached)], at, ReadWriteFlags::NOWAIT) {
                Err(Errno::AGAIN) => {}
                Ok(got) if got == page.len() => {
                    self.bytes += got as u64;
                    if cached != page {
                        self.other_bytes += got as u64;
                    }
                }
                Ok(got) => {
                    return Err(std::io::Error::other(format!(
                        "at {at}: expected {} bytes from the page cache, got {got}",
                        page.len()
                    )));
                }
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }
}

impl Walk {
    fn folder(&mut self, folder: &Path, device: u64) -> Result<()> {
        let entries = at(fs::read_dir(folder), &folder.display())?;
        let mut paths =
            entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
        paths.sort();
        for path in paths {
            let name = path.strip_prefix(&self.root).unwrap_or(&path);
            if IDENTITY.iter().any(|except| name == Path::new(except)) {
                continue;
            }
            let name = name.as_os_str().as_bytes().to_owned();
            let meta = at(fs::symlink_metadata(&path), &path.display())?;
            if meta.dev() != device {
                continue;
            }
            self.direct.update(&name);
            self.direct.update(&[0]);
            self.direct.update(&meta.mode().to_le_bytes());
            if meta.is_dir() {
                self.folder(&path, device)?;
            } else if meta.is_symlink() {
                let target = at(fs::read_link(&path), &path.display())?;
                self.direct.update(target.as_os_str().as_bytes());
            } else if meta.is_file() {
                self.direct.update(&meta.len().to_le_bytes());
                let read = self.file(&path).map_err(|e| format!("{}: {e}", path.display()))?;
                if read != meta.len() {
                    return Err(format!(
                        "{}: expected {} bytes, got {read}",
                        path.display(),
                        meta.len()
                    )
                    .into());
                }
                self.files += 1;
                self.bytes += read;
            }
        }
        Ok(())
    }

    fn file(&mut self, path: &Path) -> std::io::Result<u64> {
        let mut disk = OpenOptions::new().read(true).custom_flags(O_DIRECT).open(path)?;
        let through = File::open(path)?;
        let start = self.buffer.as_ptr().align_offset(ALIGNED);
        let mut read = 0;
        loop {
            let buffer = &mut self.buffer[start..start + BUFFER];
            let got = disk.read(buffer)?;
            if got == 0 {
                return Ok(read);
            }
            self.direct.update(&buffer[..got]);
            if let Some(cache) = &mut self.cache {
                cache.compare(&through, read, &buffer[..got])?;
            }
            read += got as u64;
        }
    }
}

/// Checksum of all files below `root` in its file system, as JSON; with `cache`, also compares the
/// cached pages.
pub fn digest(root: &Path, cache: bool) -> Result<String> {
    let meta = at(fs::metadata(root), &root.display())?;
    let buffer = vec![0; BUFFER + ALIGNED];
    let cache = cache.then(Cache::new);
    let mut walk =
        Walk { root: root.to_owned(), buffer, files: 0, bytes: 0, direct: Sum::new(), cache };
    walk.folder(root, meta.dev())?;
    let cache = walk.cache.unwrap_or_default();
    Ok(format!(
        "{{\"files\":{},\"bytes\":{},\"direct\":\"{}\",\
          \"cached_bytes\":{},\"cached_other_bytes\":{}}}",
        walk.files,
        walk.bytes,
        walk.direct.finish(),
        cache.bytes,
        cache.other_bytes
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(said: &str, name: &str) -> String {
        let rest = said.split(&format!("\"{name}\":")).nth(1).expect("a field");
        rest.split([',', '}']).next().expect("a value").to_owned()
    }

    /// Not in /tmp, because a tmpfs does not support `O_DIRECT` before Linux 6.6.
    fn folder_on_disk() -> tempfile::TempDir {
        tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder")
    }

    #[test]
    fn disk_and_cache_agree_and_a_changed_byte_shows() {
        let folder = folder_on_disk();
        let path = folder.path().join("f");
        let write = |bytes: &[u8]| {
            fs::write(&path, bytes).expect("a file");
            File::open(&path).and_then(|f| f.sync_all()).expect("a sync");
        };
        write(&[3; 5000]);
        fs::create_dir_all(folder.path().join("etc")).expect("a folder");
        fs::write(folder.path().join("etc/hostname"), "a").expect("a file");
        let before = digest(folder.path(), true).expect("a digest");
        assert_eq!((field(&before, "files"), field(&before, "bytes")), ("1".into(), "5000".into()));
        assert_eq!(field(&before, "cached_bytes"), "5000");
        assert_eq!(field(&before, "cached_other_bytes"), "0");
        fs::write(folder.path().join("etc/hostname"), "b").expect("a file");
        let same = digest(folder.path(), false).expect("a digest");
        assert_eq!(field(&same, "direct"), field(&before, "direct"));
        let mut bytes = [3; 5000];
        bytes[4999] = 4;
        write(&bytes);
        let after = digest(folder.path(), true).expect("a digest");
        assert_ne!(field(&after, "direct"), field(&before, "direct"));
    }

    #[test]
    fn a_cached_page_that_is_another_is_counted() {
        let folder = folder_on_disk();
        let path = folder.path().join("f");
        fs::write(&path, [3; 5000]).expect("a file");
        let file = File::open(&path).expect("a file");
        let mut cache = Cache::new();
        let mut disk = [3; 5000];
        cache.compare(&file, 0, &disk).expect("compared");
        assert_eq!((cache.bytes, cache.other_bytes), (5000, 0));
        disk[4999] = 4;
        cache.compare(&file, 0, &disk).expect("compared");
        assert_eq!((cache.bytes, cache.other_bytes), (10_000, 904));
        assert!(cache.compare(&file, 0, &[3; 5001]).is_err());
    }
}
