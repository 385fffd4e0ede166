//! A fork into new namespaces, with a pidfd (clone3(2)).

use dayfly_sys::clone3::{self, CloneArgs};
use dayfly_sys::group::{self, Entry};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
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
/// With `group`, the child is in that control group when this returns. A child that cannot enter it
/// ends, and the fork fails.
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
    let tasks: &[OwnedFd] = group.map_or(&[], Entry::tasks);
    let entered = (!tasks.is_empty()).then(io::pipe).transpose()?;
    // SAFETY: there is no other thread whose locks the child could find taken. The kernel writes
    // `pidfd` and, in the child, the thread's id.
    match unsafe { clone3::fork(&args)? } {
        0 => {
            if let Some((_, report)) = entered {
                enter(tasks, report);
            }
            Ok(None)
        }
        pid => {
            // SAFETY: the kernel has just made the descriptor, and nothing else owns it.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            if let Some((answer, report)) = entered {
                // So that a read ends if the child ends.
                drop(report);
                has_entered(answer)?;
            }
            Ok(Some((pid, pidfd)))
        }
    }
}

/// Has the child enter the groups of `tasks`, and reports the number of the kernel's error, or 0.
/// Ends the child after an error.
fn enter(tasks: &[OwnedFd], mut report: PipeWriter) {
    let entered = group::enter_alone(tasks);
    let errno = entered.err().map_or(0, |e| e.raw_os_error().unwrap_or(libc::EIO));
    let reported = report.write_all(&errno.to_ne_bytes());
    if errno != 0 || reported.is_err() {
        // SAFETY: ends this process, and runs no code of it.
        unsafe { libc::_exit(1) };
    }
}

/// Reads what [`enter`] reports.
fn has_entered(mut answer: PipeReader) -> io::Result<()> {
    let mut errno = [0; size_of::<i32>()];
    answer.read_exact(&mut errno)?;
    match i32::from_ne_bytes(errno) {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// The address at which glibc keeps this thread's id.
fn tid_address() -> Option<u64> {
    let mut place: u64 = 0;
    // SAFETY: PR_GET_TID_ADDRESS (prctl(2)) writes one pointer to `place`.
    let result = unsafe { libc::prctl(libc::PR_GET_TID_ADDRESS, &raw mut place) };
    (result == 0 && place != 0).then_some(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fork_of_a_child_that_cannot_enter_its_group_fails() {
        if !dayfly_units::needs::root() {
            return;
        }
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        // This process has several threads, so its children only make system calls.
        match fork(Some(&Entry::Tasks(vec![full.into()]))) {
            // SAFETY: ends the child, which must not go on with the tests.
            Ok(None) => unsafe { libc::_exit(2) },
            Ok(Some(_)) => panic!("expected an error of the child, got a process"),
            Err(e) => assert_eq!(e.raw_os_error(), Some(libc::ENOSPC)),
        }
        let null = std::fs::File::options().write(true).open("/dev/null").unwrap();
        match fork(Some(&Entry::Tasks(vec![null.into()]))).unwrap() {
            // SAFETY: as above.
            None => unsafe { libc::_exit(0) },
            Some((pid, _pidfd)) => assert!(pid > 0),
        }
    }
}
