//! Whether a process can write to a file (F_SETLEASE of fcntl(2)), and files to which no process
//! can write any more (fs-verity, Documentation/filesystems/fsverity.rst).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// F_SETSIG of fcntl(2), which libc lacks for this target.
const F_SETSIG: libc::c_int = 10;

/// The processes that can write to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writers {
    /// No open file description of the file is writable, those of shared mappings included.
    None,
    /// A file description of the file is writable, in some process or in a message on its way.
    Some,
    /// The file system or the host does not grant leases.
    Unknown,
}

/// Asks the kernel for a read lease on `file`, which is open for reading only, and gives the lease
/// back. The kernel grants it only if no file description is writable.
///
/// The answer says nothing about descriptors opened later. So no process that must not write may be
/// able to open the file.
///
/// # Errors
/// The error of fcntl(2), other than those that mean a writer or no leases.
pub fn writers(file: &File) -> io::Result<Writers> {
    let fcntl = |command, argument: libc::c_int| {
        // SAFETY: these commands take an integer and change only the owned descriptor's lease and
        // its signal.
        match unsafe { libc::fcntl(file.as_raw_fd(), command, argument) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    };
    // An open(2) that breaks the lease sends this signal. SIGIO, the default, would end the
    // process; SIGURG is ignored. The kernel resets the choice when the lease ends.
    fcntl(F_SETSIG, libc::SIGURG)?;
    match fcntl(libc::F_SETLEASE, libc::F_RDLCK) {
        Ok(()) => fcntl(libc::F_SETLEASE, libc::F_UNLCK).map(|()| Writers::None),
        Err(error) => match error.raw_os_error() {
            Some(libc::EAGAIN) => Ok(Writers::Some),
            Some(libc::EINVAL | libc::EACCES | libc::ENOLCK | libc::EOPNOTSUPP) => {
                Ok(Writers::Unknown)
            }
            _ => Err(error),
        },
    }
}

/// `_IOW('f', 133, struct fsverity_enable_arg)`.
const FS_IOC_ENABLE_VERITY: libc::Ioctl = 0x4080_6685;

/// `struct fsverity_enable_arg`.
#[repr(C)]
struct EnableVerity {
    version: u32,
    hash_algorithm: u32,
    block_bytes: u32,
    salt_bytes: u32,
    salt: u64,
    signature_bytes: u32,
    reserved1: u32,
    signature: u64,
    reserved2: [u64; 11],
}

const _: () = assert!(size_of::<EnableVerity>() == 128, "the size in the ioctl's number");

/// Makes the kernel refuse every later open(2) of `file` for writing, and verify each page that is
/// read. The kernel reads the whole file once, holes included. Returns whether the file system does
/// that.
///
/// # Errors
/// `ETXTBSY`: a file description is writable. Otherwise the error of the ioctl.
pub fn enable_verity(file: &File) -> io::Result<bool> {
    let argument = EnableVerity {
        version: 1,
        hash_algorithm: 1, // FS_VERITY_HASH_ALG_SHA256
        block_bytes: 4096,
        salt_bytes: 0,
        salt: 0,
        signature_bytes: 0,
        reserved1: 0,
        signature: 0,
        reserved2: [0; 11],
    };
    // SAFETY: the argument has the layout that the ioctl reads, and outlives the call.
    match unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_ENABLE_VERITY, &raw const argument) } {
        -1 => {
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS | libc::EINVAL) => Ok(false),
                Some(libc::EEXIST) => Ok(true),
                _ => Err(error),
            }
        }
        _ => Ok(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::time::{Duration, Instant};

    /// Asserts that no description is writable any more. Children that other tests have forked have
    /// copies of this process's descriptors until they end, so it waits for them.
    fn no_writer(file: &File) {
        let until = Instant::now() + Duration::from_secs(120);
        while writers(file).unwrap() != Writers::None {
            assert!(Instant::now() < until, "there still is a writer");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn file() -> (tempfile::TempDir, File, File) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut writable = File::create_new(&path).unwrap();
        writable.write_all(&[7; 8192]).unwrap();
        (folder, writable, File::open(&path).unwrap())
    }

    #[test]
    fn a_writable_descriptor_is_a_writer_wherever_it_is() {
        let (_folder, writable, file) = file();
        assert_eq!(writers(&file).unwrap(), Writers::Some);
        let copy = writable.try_clone().unwrap();
        drop(writable);
        assert_eq!(writers(&file).unwrap(), Writers::Some);
        drop(copy);
        let other = file.try_clone().unwrap();
        no_writer(&file);
        // The lease was given back: an open for writing neither waits nor fails.
        assert_eq!(writers(&other).unwrap(), Writers::None);
    }

    #[test]
    fn a_shared_mapping_is_a_writer_without_a_descriptor() {
        use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
        let (folder, writable, file) = file();
        drop(writable);
        let path = folder.path().join("file");
        let writable = File::options().read(true).write(true).open(path).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, which only this test uses.
        let mapped =
            unsafe { mmap(std::ptr::null_mut(), 4096, protection, MapFlags::SHARED, &writable, 0) };
        let mapped = mapped.unwrap();
        drop(writable);
        assert_eq!(writers(&file).unwrap(), Writers::Some);
        // SAFETY: the mapping made above, to which no reference exists.
        unsafe { munmap(mapped, 4096) }.unwrap();
        no_writer(&file);
    }

    #[test]
    fn a_file_is_sealed_or_its_file_system_says_that_it_cannot() {
        let (folder, writable, file) = file();
        let sealed = enable_verity(&file);
        if !matches!(sealed, Ok(false)) {
            assert_eq!(sealed.unwrap_err().raw_os_error(), Some(libc::ETXTBSY));
            drop(writable);
            no_writer(&file);
            assert!(enable_verity(&file).unwrap());
            let again = File::options().write(true).open(folder.path().join("file"));
            assert!(again.is_err(), "a sealed file was opened for writing");
        }
    }
}
