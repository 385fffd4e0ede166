//! Programs in the guest that watch whether their machine is forked or becomes another one (Kaleidoscope, sections 6.2.1 and 6.2.2: the write barrier, SIGCLONE).
//!
//! ```text
//! program                              agent
//!    │── watch [barrier] [SIGNAL] ─────▶│
//!    │◀──────────────────────────── ok ─│
//!    │◀────────── fork (with barrier) ──│  before the machine is forked or snapshotted, which waits
//!    │── go ───────────────────────────▶│  for the program to have let its writes end
//!    │◀──── parent │ clone NUMBER ID ───│  which of them it is; in a clone SIGNAL comes too, if one was named
//! ```
//!
//! A program watches as long as its connection is open. One that does not say `go` in time keeps the machine from being forked: that ends with an error.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Programs that watch at one time, at most.
const MOST: usize = 64;
/// How long all of them may take to say `go`; the host waits longer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a program that does not read may hold up the others.
const TELL: Duration = Duration::from_millis(100);
/// Real-time signals that libc does not keep for itself.
const SIGNALS: std::ops::RangeInclusive<i32> = 34..=64;

/// Which machine this turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Is<'a> {
    /// The one that was forked, or that nothing was made of.
    Parent,
    /// A clone.
    Clone {
        /// As [`dayfly_api::agent::Identity::number`].
        number: u32,
        /// Its machine id.
        id: &'a str,
    },
}

#[derive(Debug)]
struct Watcher {
    stream: UnixStream,
    pid: i32,
    program: OwnedFd,
    signal: Option<Signal>,
    barrier: bool,
    /// It was told that the machine is about to be forked.
    told: bool,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Watchers(Mutex<Vec<Watcher>>);

impl Watcher {
    /// Whether it took that.
    fn tell(&mut self, line: &str) -> bool {
        self.stream.write_all(format!("{line}\n").as_bytes()).is_ok()
    }

    fn is_there(&self) -> bool {
        let mut fds = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let now = rustix::time::Timespec::default();
        !matches!(poll(&mut fds, Some(&now)), Ok(n) if n > 0)
    }

    /// Waits for `go`.
    fn go(&mut self, until: Instant) -> Result<(), String> {
        let mut line = Vec::new();
        while !line.ends_with(b"\n") && line.len() < 16 {
            let left = until.saturating_duration_since(Instant::now());
            let late = || format!("process {}: no `go` within {} s", self.pid, PATIENCE.as_secs());
            if left.is_zero() {
                return Err(late());
            }
            let mut byte = [0];
            let got = self.stream.set_read_timeout(Some(left)).and_then(|()| self.stream.read(&mut byte));
            match got {
                Ok(1) => line.extend(byte),
                // It has ended, or does not care any more.
                Ok(_) => return Ok(()),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Err(late()),
                Err(_) => return Ok(()),
            }
        }
        if line == b"go\n" {
            return Ok(());
        }
        let got = String::from_utf8_lossy(&line);
        Err(format!("process {}: expected `go`, got {:?}", self.pid, got.trim_end()))
    }
}

impl Watchers {
    fn all(&self) -> MutexGuard<'_, Vec<Watcher>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the program at the other end, which said `watch` and these words.
    ///
    /// # Errors
    /// What is wrong with them, or that there are too many.
    pub fn add<'a>(
        &self,
        mut stream: UnixStream,
        words: impl Iterator<Item = &'a str>,
    ) -> Result<(), String> {
        let (mut barrier, mut signal) = (false, None);
        for word in words {
            match word.parse::<i32>() {
                Ok(number) if SIGNALS.contains(&number) && signal.is_none() => {
                    // SAFETY: 34 to 64 are Linux's signals, none of them libc's own.
                    signal = Some(unsafe { Signal::from_raw_unchecked(number) });
                }
                _ if word == "barrier" => barrier = true,
                _ => {
                    return Err(format!(
                        "expected `watch [barrier] [SIGNAL]` with a signal from 34 to 64, got {word:?}"
                    ));
                }
            }
        }
        let peer = rustix::net::sockopt::socket_peercred(&stream).map_err(|e| format!("who asks: {e}"))?;
        let program = pidfd_open(peer.pid, PidfdFlags::empty())
            .map_err(|e| format!("process {}: {e}", Pid::as_raw(Some(peer.pid))))?;
        let timeouts = stream.set_write_timeout(Some(TELL));
        timeouts.map_err(|e| format!("a timeout: {e}"))?;
        let mut all = self.all();
        all.retain(Watcher::is_there);
        if all.len() >= MOST {
            return Err(format!("{MOST} programs watch: expected fewer"));
        }
        if stream.write_all(b"ok\n").is_ok() {
            let pid = Pid::as_raw(Some(peer.pid));
            all.push(Watcher { stream, pid, program, signal, barrier, told: false });
        }
        Ok(())
    }

    /// Tells those with a barrier that the machine is about to be forked, and waits for their `go`.
    ///
    /// # Errors
    /// Who did not say it; nobody is kept then.
    pub fn hold(&self) -> Result<(), String> {
        let mut all = self.all();
        all.retain(Watcher::is_there);
        let until = Instant::now() + PATIENCE;
        for watcher in all.iter_mut().filter(|watcher| watcher.barrier) {
            watcher.told = watcher.tell("fork");
        }
        let mut held = all.iter_mut().filter(|watcher| watcher.told);
        let result = held.try_for_each(|watcher| watcher.go(until));
        drop(all);
        if result.is_err() {
            self.release(Is::Parent);
        }
        result
    }

    /// Tells what this machine is: a parent to those who hold for that, a clone to all.
    pub fn release(&self, is: Is<'_>) {
        let mut all = self.all();
        all.retain_mut(|watcher| {
            let told = std::mem::take(&mut watcher.told);
            match is {
                Is::Parent => !told || watcher.tell("parent"),
                Is::Clone { number, id } => {
                    if let Some(signal) = watcher.signal {
                        let _ended = pidfd_send_signal(&watcher.program, signal);
                    }
                    watcher.tell(&format!("clone {number} {id}"))
                }
            }
        });
    }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
