//! Priorities of threads: work ahead of demand runs at low priority, so that it does not slow down
//! current requests; short urgent work runs at high priority.

use std::io;

/// The nice value of background work: about a tenth of the CPU weight of nice 0.
const BACKGROUND: i32 = 10;

fn set(nice: i32) -> io::Result<()> {
    // SAFETY: setpriority(2) with integers; 0 is the calling thread (Linux sets the nice value of
    // one thread).
    let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Runs `work` with this thread's nice value at 10. Processes and threads that `work` starts
/// inherit the nice value.
///
/// Without CAP_SYS_NICE the kernel would not restore the thread's priority, so `work` then runs at
/// the unchanged priority.
pub fn background<T>(work: impl FnOnce() -> T) -> T {
    let lowered = rustix::process::geteuid().is_root() && set(BACKGROUND).is_ok();
    let result = work();
    if lowered && let Err(e) = set(0) {
        // Not fatal: one thread of a pool stays slow.
        eprintln!("priority of a thread: {e}");
    }
    result
}

fn policy(policy: libc::c_int, priority: libc::c_int) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: sched_setscheduler(2) reads one struct sched_param; 0 is the calling thread.
    let result = unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Runs `work`, which must be short, with this thread under SCHED_RR, ahead of all threads of the
/// normal policy. (The kernel leaves a twentieth of each second to the other threads.) A nice value
/// is not enough, because the scheduler does not weigh threads of different sessions against each
/// other (autogroups, sched(7)).
///
/// Without CAP_SYS_NICE `work` runs under the unchanged policy.
pub fn first<T>(work: impl FnOnce() -> T) -> T {
    struct Back(bool);
    impl Drop for Back {
        fn drop(&mut self) {
            if self.0
                && let Err(e) = policy(libc::SCHED_OTHER, 0)
            {
                eprintln!("policy of a thread: {e}");
            }
        }
    }
    // SCHED_RESET_ON_FORK: threads that `work` starts have the normal policy.
    let _back = Back(policy(libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, 1).is_ok());
    work()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nice() -> String {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        // Field 19, counted after the name, because the name may hold spaces.
        stat.rsplit(')').next().unwrap().split_whitespace().nth(16).unwrap().to_owned()
    }

    #[test]
    fn short_work_comes_first_and_no_longer() {
        // SAFETY: sched_getscheduler(2) of the calling thread.
        let now = || unsafe { libc::sched_getscheduler(0) };
        let within = first(now);
        assert_eq!(now(), libc::SCHED_OTHER);
        if rustix::process::geteuid().is_root() {
            assert_eq!(within, libc::SCHED_RR | libc::SCHED_RESET_ON_FORK);
        }
    }

    #[test]
    fn work_in_the_background_has_its_priority_and_no_longer() {
        let before = nice();
        let within = background(nice);
        assert_eq!(nice(), before);
        if rustix::process::geteuid().is_root() {
            assert_eq!(within, "10");
        }
    }
}
