//! Opens an open file once more. The result is another open file description (open(2)): it shares
//! neither the offset nor the flags of fcntl(F_SETFL) with the first one, unlike a duplicate.

use rustix::fs::{Mode, OFlags, open, openat};
use rustix::path::DecInt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

/// Opens the file of `file` for reading only (proc_pid_fd(5)). It may be a memfd, or have no name.
/// One system call, after the first time.
///
/// # Errors
/// The error of open(2). Sockets cannot be opened.
pub fn read_only(file: impl AsFd) -> io::Result<OwnedFd> {
    /// The folder, because the path to it would be walked each time.
    static DESCRIPTORS: OnceLock<OwnedFd> = OnceLock::new();
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let folder = match DESCRIPTORS.get() {
        Some(folder) => folder,
        None => {
            let folder = open("/proc/self/fd", flags | OFlags::DIRECTORY, Mode::empty())?;
            DESCRIPTORS.get_or_init(|| folder)
        }
    };
    Ok(openat(folder, DecInt::from_fd(file), flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_getfl, fcntl_setfl, memfd_create};
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    #[test]
    fn what_is_done_with_one_description_does_not_show_in_another() {
        let memfd = File::from(memfd_create("m", MemfdFlags::ALLOW_SEALING).unwrap());
        let unnamed = tempfile::tempfile().unwrap();
        for mut first in [memfd, unnamed] {
            first.write_all(b"content").unwrap();
            let (mut one, mut other) =
                (File::from(read_only(&first).unwrap()), File::from(read_only(&first).unwrap()));
            let duplicate = one.try_clone().unwrap();
            for flag in [OFlags::DIRECT, OFlags::NONBLOCK, OFlags::APPEND] {
                let before = fcntl_getfl(&duplicate).unwrap();
                // Not every file system has O_DIRECT.
                if fcntl_setfl(&duplicate, before | flag).is_err() {
                    assert_eq!(flag, OFlags::DIRECT);
                    continue;
                }
                assert!(fcntl_getfl(&one).unwrap().contains(flag), "a duplicate shares them");
                for file in [&first, &other, &File::from(read_only(&one).unwrap())] {
                    assert!(!fcntl_getfl(file).unwrap().contains(flag), "{flag:?}");
                }
            }
            fcntl_setfl(&duplicate, OFlags::empty()).unwrap();
            (&duplicate).seek(std::io::SeekFrom::Start(3)).unwrap();
            let mut got = [String::new(), String::new()];
            one.read_to_string(&mut got[0]).unwrap();
            other.read_to_string(&mut got[1]).unwrap();
            assert_eq!(got, ["tent", "content"]);
            assert!(other.write_all(b"x").is_err() && other.set_len(0).is_err());
        }
        let sealed = File::from(memfd_create("m", MemfdFlags::ALLOW_SEALING).unwrap());
        rustix::fs::fcntl_add_seals(&sealed, SealFlags::WRITE | SealFlags::SEAL).unwrap();
        let seals = rustix::fs::fcntl_get_seals(read_only(&sealed).unwrap()).unwrap();
        assert_eq!(seals, SealFlags::WRITE | SealFlags::SEAL);
    }
}
