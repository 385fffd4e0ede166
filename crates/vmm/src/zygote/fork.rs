//! A fork into new namespaces, with a pidfd.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Forks this process, which has one thread. `None` in the child; pid and pidfd of the child in the parent.
///
/// The call goes past glibc, whose fork(3) takes no flags. What that would do besides is locking the allocator against other threads, of
/// which there are none, and writing the thread's new id into the thread's descriptor: the kernel does that here, where it
/// tells the place (PR_GET_TID_ADDRESS); where it does not, the stale id is used by nothing that a VMM calls (owners of
/// recursive and robust mutexes).
pub(super) fn fork() -> io::Result<Option<(u32, OwnedFd)>> {
    let mut pidfd: i32 = -1;
    // SAFETY: clone_args is plain integers, for which all-zero is valid (clone(2): absent options are 0).
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    let mut flags = libc::CLONE_PIDFD | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    if let Some(place) = tid_address() {
        flags |= libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID;
        args.child_tid = place;
    }
    args.flags = u64::from(flags.cast_unsigned());
    args.pidfd = std::ptr::from_mut(&mut pidfd).addr() as u64;
    args.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    // SAFETY: without CLONE_VM the child has a copy of this memory and goes on on its copy of this stack, as after fork(2);
    // there is no other thread whose locks it could find taken. The kernel writes `pidfd` and, in the child, the thread's id.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) };
    match u32::try_from(pid) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(0) => Ok(None),
        // SAFETY: the kernel has just made it, and nobody else knows it.
        Ok(pid) => Ok(Some((pid, unsafe { OwnedFd::from_raw_fd(pidfd) }))),
    }
}

/// Where glibc keeps this thread's id.
fn tid_address() -> Option<u64> {
    let mut place: u64 = 0;
    // SAFETY: PR_GET_TID_ADDRESS (prctl(2)) writes one pointer to `place`.
    let result = unsafe { libc::prctl(libc::PR_GET_TID_ADDRESS, &raw mut place) };
    (result == 0 && place != 0).then_some(place)
}
