//! Work that gives way, and work that others give way to: what is made ahead of demand must not slow down what is asked for now.

use std::io;

/// The nice value of such work: about a tenth of the weight of the rest.
const BACKGROUND: i32 = 10;

fn set(nice: i32) -> io::Result<()> {
    // SAFETY: setpriority(2) with integers; 0 is the calling thread (Linux sets the nice value of one thread).
    let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Does `work` with this thread's priority lowered. Processes and threads it starts inherit that, until they call [`normal`].
///
/// Without CAP_SYS_NICE a thread could not come back, so it works as it is.
pub fn background<T>(work: impl FnOnce() -> T) -> T {
    let lowered = rustix::process::geteuid().is_root() && set(BACKGROUND).is_ok();
    let result = work();
    if lowered && let Err(e) = set(0) {
        // Only a thread of a pool that stays slow: told, not fatal.
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

/// Does `work`, which must be short, with this thread before all that share CPUs by weight (SCHED_RR, of which the kernel leaves a twentieth of each
/// second to the rest). A nice value would not do: threads of different sessions are not weighed against each other (autogroups, sched(7)).
///
/// Without CAP_SYS_NICE it works as all others do.
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
    // Threads that it starts are as all others are.
    let _back = Back(policy(libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, 1).is_ok());
    work()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nice() -> String {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        // Field 19, counted after the name, which may hold spaces.
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
