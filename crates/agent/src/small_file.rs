//! Reading small files by path in an untrusted file system.
//!
//! /etc/passwd, /etc/hostname and similar files belong to the image and to the guest's root.
//! Reading such a path never blocks: a fifo, a device, a socket or a folder is refused before any
//! read, and so is a file of more than the permitted bytes.

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use std::path::{Path, PathBuf};

/// Bytes per read; most such files are shorter.
const CHUNK_BYTES: usize = 4096;

/// Why a file was not read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SmallFileError {
    /// The path is no regular file.
    #[error("{}: expected a regular file, got {got}", path.display())]
    Kind {
        /// The path.
        path: PathBuf,
        /// The kind of the file.
        got: &'static str,
    },
    /// The file is too long.
    #[error("{}: expected at most {most} bytes, got more", path.display())]
    Long {
        /// The path.
        path: PathBuf,
        /// Maximum bytes.
        most: usize,
    },
    /// The kernel refused.
    #[error("{}: {errno}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        errno: Errno,
    },
}

impl SmallFileError {
    /// The error as an error number.
    #[must_use]
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Kind { .. } => Errno::INVAL,
            Self::Long { .. } => Errno::FBIG,
            Self::Io { errno, .. } => *errno,
        }
    }
}

/// Reads the regular file at `path`, of at most `most` bytes; `None` if the path does not exist.
/// Follows symbolic links. Never waits for another program.
///
/// # Errors
/// [`SmallFileError`].
pub fn read(path: &Path, most: usize) -> Result<Option<Vec<u8>>, SmallFileError> {
    let failed = |errno| SmallFileError::Io { path: path.to_owned(), errno };
    // O_NONBLOCK: opening a fifo does not wait for a writer. O_NOCTTY: a terminal does not become
    // the controlling terminal.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
        // The result of open(2) on a socket.
        Err(Errno::NXIO) => {
            return Err(SmallFileError::Kind { path: path.to_owned(), got: "a socket" });
        }
        Err(errno) => return Err(failed(errno)),
    };
    let got = match FileType::from_raw_mode(rustix::fs::fstat(&file).map_err(failed)?.st_mode) {
        FileType::RegularFile => None,
        FileType::Directory => Some("a folder"),
        FileType::Fifo => Some("a fifo"),
        FileType::CharacterDevice => Some("a character device"),
        FileType::BlockDevice => Some("a block device"),
        FileType::Socket => Some("a socket"),
        FileType::Symlink | FileType::Unknown => Some("something else"),
    };
    if let Some(got) = got {
        return Err(SmallFileError::Kind { path: path.to_owned(), got });
    }
    let mut bytes = Vec::with_capacity(CHUNK_BYTES);
    loop {
        // The check counts read bytes, because the length in stat is 0 in /proc and may change
        // meanwhile.
        if bytes.len() > most {
            return Err(SmallFileError::Long { path: path.to_owned(), most });
        }
        bytes.reserve(CHUNK_BYTES);
        match rustix::io::read(&file, rustix::buffer::spare_capacity(&mut bytes)) {
            Ok(0) => return Ok(Some(bytes)),
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(failed(errno)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn regular_files_are_read_up_to_their_bound() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        assert_eq!(read(&at("none"), 10), Ok(None));
        assert_eq!(read(&at("none/below"), 10), Ok(None));
        std::fs::write(at("file"), [b'x'; 9000]).unwrap();
        assert_eq!(read(&at("file"), 9000).unwrap().unwrap().len(), 9000);
        assert_eq!(read(&at("file/below"), 9000), Ok(None));
        let error = read(&at("file"), 8999).unwrap_err();
        assert_eq!(error, SmallFileError::Long { path: at("file"), most: 8999 });
        assert!(
            error.to_string().ends_with("file: expected at most 8999 bytes, got more"),
            "{error}"
        );
        std::os::unix::fs::symlink("file", at("link")).unwrap();
        assert_eq!(read(&at("link"), 9000).unwrap().unwrap().len(), 9000);
        // A file whose stat has length 0.
        assert!(!read(Path::new("/proc/self/status"), 1 << 20).unwrap().unwrap().is_empty());
        // A sparse file of a terabyte does not cost a terabyte of memory.
        std::fs::File::create(at("sparse")).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(read(&at("sparse"), 1 << 20).unwrap_err().errno(), Errno::FBIG);
    }

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        rustix::fs::mknodat(
            rustix::fs::CWD,
            at("fifo"),
            FileType::Fifo,
            Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        let names = [("fifo", "a fifo"), ("socket", "a socket"), ("", "a folder")];
        let paths = names.map(|(name, got)| (at(name), got));
        let devices =
            ["/dev/null", "/dev/zero", "/dev/ptmx"].map(|path| (path.into(), "a character device"));
        for (path, got) in paths.into_iter().chain(devices) {
            assert_eq!(read(&path, 100), Err(SmallFileError::Kind { path: path.clone(), got }));
            let link = at("link");
            let _ = std::fs::remove_file(&link);
            std::os::unix::fs::symlink(&path, &link).unwrap();
            assert_eq!(
                read(&link, 100),
                Err(SmallFileError::Kind { path: link, got }),
                "{}",
                path.display()
            );
        }
        let itself = at("loop");
        std::os::unix::fs::symlink("loop", &itself).unwrap();
        assert_eq!(
            read(&itself, 100),
            Err(SmallFileError::Io { path: itself, errno: Errno::LOOP })
        );
    }
}
