//! A fork into new namespaces, with a pidfd (clone3(2)).

use dayfly_sys::clone3::{self, CloneArgs};
use dayfly_sys::group::{self, Entry};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Forks this process, which has one thread. Returns `None` in the child, and the child's pid and
/// pidfd in the parent.
///
/// The raw system call is needed because glibc's fork(3) takes no flags. glibc would in addition do
/// two things. It locks the allocator against other threads, of which there are none. It also
/// writes the new thread id into the thread's descriptor: the kernel does that here, if it reports
/// the place (PR_GET_TID_ADDRESS). If it does not, the stale id stays; only recursive and robust
/// mutexes use it, and a VMM uses neither.
///
/// With `group`, the child is in that control group before it runs.
pub(super) fn fork(group: Option<&Entry>) -> io::Result<Option<(u32, OwnedFd)>> {
    let mut pidfd: i32 = -1;
    let namespaces = libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    let mut args = CloneArgs::new(namespaces, &mut pidfd);
    if let Some(place) = tid_address() {
        args = args.with_child_tid(place);
    }
    if let Some(folder) = group.and_then(Entry::folder) {
        args = args.with_cgroup(folder);
    }
    // SAFETY: there is no other thread whose locks the child could find taken. The kernel writes
    // `pidfd` and, in the child, the thread's id.
    match unsafe { clone3::fork(&args)? } {
        0 => {
            group::enter_alone(group.map_or(&[], Entry::tasks))?;
            Ok(None)
        }
        // SAFETY: the kernel has just made the descriptor, and nothing else owns it.
        pid => Ok(Some((pid, unsafe { OwnedFd::from_raw_fd(pidfd) }))),
    }
}

/// The address at which glibc keeps this thread's id.
fn tid_address() -> Option<u64> {
    let mut place: u64 = 0;
    // SAFETY: PR_GET_TID_ADDRESS (prctl(2)) writes one pointer to `place`.
    let result = unsafe { libc::prctl(libc::PR_GET_TID_ADDRESS, &raw mut place) };
    (result == 0 && place != 0).then_some(place)
}
