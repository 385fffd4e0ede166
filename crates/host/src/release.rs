//! Freeing the memory of a killed process before the process is gone.

use crate::process::Process;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// Interval between two looks at a process that is freeing its memory itself.
const LOOK: Duration = Duration::from_micros(100);
/// Time limit for that. The kernel frees about 25 GiB of 4 KiB pages in a second.
const WITHIN: Duration = Duration::from_secs(10);

impl Process {
    /// Frees the process's memory on the calling thread and its CPU, while the kernel still tears
    /// the process down (process_mrelease(2), Linux 5.15). After the return, the memory that only
    /// this process used is available again, however long the process's exit takes.
    ///
    /// The caller must have called [`Self::kill`], best just before. A process whose last thread
    /// has dropped its memory map frees that memory itself, with KVM after RCU grace periods; this
    /// function then waits for it.
    ///
    /// # Errors
    /// The kernel refuses, or the process takes more than 10 s; its memory is free once it has
    /// ended.
    pub fn release_memory(&self) -> io::Result<()> {
        // SAFETY: process_mrelease(2) with a pidfd that lives and no flags; it touches nothing of
        // this process.
        let release = || match unsafe {
            libc::syscall(libc::SYS_process_mrelease, self.as_fd().as_raw_fd(), 0)
        } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        match repeated(release, std::thread::sleep) {
            // No thread of the process has a memory map: the memory was freed, or is being freed.
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => self.wait_released(),
            result => result,
        }
    }

    /// Waits until the process has freed its memory itself. A thread closes its files after
    /// dropping its memory map, and the last thread to drop the map frees all memory (do_exit in
    /// kernel/exit.c: exit_mm, then exit_files). So threads without open files show that the memory
    /// is free.
    fn wait_released(&self) -> io::Result<()> {
        let threads = format!("/proc/{}/task", self.id().pid);
        let begun = Instant::now();
        // The pid cannot be reused while the process is alive.
        while self.is_alive()? && have_files(Path::new(&threads)) {
            if begun.elapsed() > WITHIN {
                let message =
                    format!("it is still freeing its memory after {} s", WITHIN.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, message));
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

/// Calls `release` again while a part of the memory map is locked or a signal comes, at most until
/// [`WITHIN`] of pauses has passed. The pauses are necessary: the caller may have real-time
/// priority, and the thread that holds the lock may need the caller's CPU.
fn repeated(
    mut release: impl FnMut() -> io::Result<()>,
    mut pause: impl FnMut(Duration),
) -> io::Result<()> {
    let mut paused = Duration::ZERO;
    loop {
        match release() {
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => {
                if paused >= WITHIN {
                    let message = format!(
                        "its memory map is still locked after {} s of pauses",
                        WITHIN.as_secs()
                    );
                    return Err(io::Error::new(io::ErrorKind::TimedOut, message));
                }
                pause(LOOK);
                paused += LOOK;
            }
            result => return result,
        }
    }
}

/// Whether any of these threads has a file open. A thread that ended has none.
fn have_files(threads: &Path) -> bool {
    let threads = std::fs::read_dir(threads).into_iter().flatten().filter_map(Result::ok);
    threads
        .map(|thread| std::fs::read_dir(thread.path().join("fd")))
        .any(|files| files.is_ok_and(|mut files| files.next().is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::ProcessId;
    use std::process::{Command, Stdio};

    #[test]
    fn a_locked_memory_map_is_tried_again_with_pauses_and_not_for_ever() {
        for errno in [libc::EAGAIN, libc::EINTR] {
            let (mut calls, mut pauses) = (0_u32, 0_u32);
            let error = repeated(
                || {
                    calls += 1;
                    Err(io::Error::from_raw_os_error(errno))
                },
                |_| {
                    pauses += 1;
                    assert!(pauses < 1_000_000, "no end");
                },
            );
            assert_eq!(error.unwrap_err().kind(), io::ErrorKind::TimedOut);
            // One pause, which gives up the CPU, between each two calls.
            assert_eq!((calls, u128::from(pauses)), (pauses + 1, WITHIN.as_micros() / 100));
        }
        let mut left = 3;
        let release = || {
            left -= 1;
            if left == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EAGAIN)) }
        };
        repeated(release, |_| {}).unwrap();
        let other = repeated(|| Err(io::Error::from_raw_os_error(libc::EPERM)), |_| panic!("no"));
        assert_eq!(other.unwrap_err().raw_os_error(), Some(libc::EPERM));
    }

    /// The value in KiB of a line `name:` in a file of /proc.
    fn kib(path: &str, name: &str) -> Option<u64> {
        let text = std::fs::read_to_string(path).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.trim().parse().ok()
    }

    /// Free memory in KiB, including the pages in the per-CPU lists.
    fn free_kib() -> u64 {
        let zones = std::fs::read_to_string("/proc/zoneinfo").unwrap();
        let lists = zones
            .lines()
            .filter_map(|line| line.trim().strip_prefix("count:")?.trim().parse::<u64>().ok());
        kib("/proc/meminfo", "MemFree").unwrap() + lists.sum::<u64>() * 4
    }

    #[test]
    fn memory_is_released_only_from_a_process_that_ends() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::open(ProcessId::of(child.id()).unwrap().unwrap()).unwrap().unwrap();
        assert!(process.release_memory().is_err(), "it has not been killed");
        assert!(process.is_alive().unwrap());
        process.kill().unwrap();
        process.release_memory().unwrap();
        child.wait().unwrap();
        process.release_memory().unwrap();
    }

    /// Calls `release_memory` when the process is already freeing its memory itself. Returns the
    /// KiB that became free.
    fn released_kib(kib_of_it: u64) -> u64 {
        // dd's buffer is one block of this size. Nothing reads dd's output, so dd keeps the buffer.
        let mut child = Command::new("dd")
            .args(["if=/dev/zero", &format!("bs={kib_of_it}K"), "count=1"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let status = format!("/proc/{}/status", child.id());
        let begun = Instant::now();
        while kib(&status, "VmRSS").is_some_and(|rss| rss < kib_of_it) {
            assert!(begun.elapsed() < Duration::from_secs(600), "dd does not fill its buffer");
            std::thread::sleep(Duration::from_millis(5));
        }
        let process = Process::open(ProcessId::of(child.id()).unwrap().unwrap()).unwrap().unwrap();
        let before = free_kib();
        process.kill().unwrap();
        // From here on process_mrelease(2) finds no memory map.
        while kib(&status, "VmRSS").is_some() {}
        process.release_memory().unwrap();
        let after = free_kib();
        child.wait().unwrap();
        process.release_memory().unwrap();
        after.saturating_sub(before)
    }

    #[test]
    fn memory_that_a_process_is_freeing_itself_is_waited_for() {
        const KIB: u64 = 512 << 10;
        // Other processes on this host take memory in the meantime, but not in every round.
        let mut released: Vec<u64> = Vec::new();
        while released.len() < 20 && released.last().is_none_or(|kib| *kib <= KIB / 2) {
            released.push(released_kib(KIB));
        }
        assert!(released.last().is_some_and(|kib| *kib > KIB / 2), "of {KIB} KiB: {released:?}");
    }
}
