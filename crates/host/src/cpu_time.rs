//! CPU time of threads and processes, as the scheduler counts it.

use std::io;
use std::time::Duration;

fn clock(id: libc::clockid_t) -> io::Result<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    match unsafe { libc::clock_gettime(id, &raw mut time) } {
        0 => {
            let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
            Ok(Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0)))
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// That of the calling thread. One system call.
#[must_use]
pub fn own() -> Duration {
    // Each thread has this clock.
    clock(libc::CLOCK_THREAD_CPUTIME_ID).unwrap_or_default()
}

/// Runs `work`, and returns the CPU time that the calling thread took for it. Two system calls.
pub fn of<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let before = own();
    let result = work();
    (result, own().saturating_sub(before))
}

/// That of all threads of the process `pid`, ended ones too; `None` if there is no such process.
#[must_use]
pub fn of_process(pid: u32) -> Option<Duration> {
    /// CPUCLOCK_SCHED of the kernel's posix-timers.
    const SCHED: libc::clockid_t = 2;
    let pid = libc::clockid_t::try_from(pid).ok()?;
    clock(!pid << 3 | SCHED).ok()
}

/// That of the threads of the process `pid` whose names begin with `name`. Each figure goes up
/// while its thread lives.
///
/// # Errors
/// There is no such process, or the kernel does not count (CONFIG_SCHED_INFO).
pub fn of_threads(pid: u32, name: &str) -> io::Result<Duration> {
    let mut sum = Duration::ZERO;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let folder = thread?.path();
        // A thread may end meanwhile.
        let Ok(own) = std::fs::read_to_string(folder.join("comm")) else { continue };
        if !own.starts_with(name) {
            continue;
        }
        let path = folder.join("schedstat");
        let ns = std::fs::read_to_string(&path)?;
        let ns = ns.split(' ').next().and_then(|ns| ns.parse().ok());
        let wrong = || io::Error::other(format!("{}: expected three numbers", path.display()));
        sum += Duration::from_nanos(ns.ok_or_else(wrong)?);
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    fn spin() {
        let begun = own();
        while own() < begun + Duration::from_millis(3) {}
    }

    #[test]
    fn each_thread_has_its_own_time_and_all_are_the_process() {
        let ((), took) = of(spin);
        assert!(took >= Duration::from_millis(3));
        let pid = std::process::id();
        let before = of_process(pid).unwrap();
        std::thread::spawn(spin).join().unwrap();
        let (spun, wait) = channel();
        let (end, ended) = channel::<()>();
        let this = std::thread::Builder::new().name("cputime0".to_owned()).spawn(move || {
            spin();
            spun.send(()).unwrap();
            let _ = ended.recv();
        });
        wait.recv().unwrap();
        let one = of_threads(pid, "cputime").unwrap();
        assert!(one >= Duration::from_millis(3), "{one:?}");
        assert_eq!(of_threads(pid, "cputime1").unwrap(), Duration::ZERO);
        // Both threads count, the ended one too.
        assert!(of_process(pid).unwrap() >= before + Duration::from_millis(6));
        drop(end);
        this.unwrap().join().unwrap();
    }

    #[test]
    fn a_process_that_has_ended_has_none() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert_eq!(of_process(child.id()), None);
        of_threads(child.id(), "").unwrap_err();
    }
}
