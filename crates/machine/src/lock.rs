//! Two locks: one per command, one for the life of the machine.
//!
//! The life lock is a `flock` on an open file that the supervisor passes to QEMU and virtiofsd. The
//! lock is free only when all of them have ended, and the kernel frees it however they die. A POSIX
//! record lock on the same file identifies the supervisor: the kernel names its holder (`F_GETLK`).
//! So no pid file can be stale.

use crate::files::FileError;
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

fn open(path: &Path) -> Result<File, FileError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(|e| FileError::new("opening", path, e))
}

/// Takes an exclusive lock. `waiting` is called once if another process holds it.
pub(crate) fn exclusive(
    path: &Path,
    time_limit: Duration,
    mut waiting: impl FnMut(),
) -> Result<File, FileError> {
    let file = open(path)?;
    let deadline = Instant::now() + time_limit;
    let mut reported = false;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                if !reported {
                    waiting();
                    reported = true;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(e) => return Err(FileError::new("locking", path, e)),
        }
    }
}

fn record(kind: libc::c_int) -> libc::flock {
    // SAFETY: struct flock is plain data, for which all zeroes is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::c_short::try_from(kind).unwrap_or_default();
    lock.l_whence = libc::c_short::try_from(libc::SEEK_SET).unwrap_or_default();
    lock
}

/// Marks this process as the supervisor. The mark lasts until the process ends or closes any
/// descriptor of this file.
pub(crate) fn sign(file: &File) -> io::Result<()> {
    let lock = record(libc::F_WRLCK);
    // SAFETY: `lock` is a valid struct flock and outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw const lock) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The supervisor's process id, in the caller's pid namespace.
pub(crate) fn signer(path: &Path) -> Option<i32> {
    let file = File::open(path).ok()?;
    let mut lock = record(libc::F_WRLCK);
    // SAFETY: `lock` is a valid struct flock that F_GETLK may write, and that outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &raw mut lock) };
    (result == 0 && i32::from(lock.l_type) != libc::F_UNLCK && lock.l_pid > 0).then_some(lock.l_pid)
}

/// Whether the supervisor, QEMU or a virtiofsd is alive.
pub(crate) fn held(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    flock(&file, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK)
}
