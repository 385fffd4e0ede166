//! Programs in the guest that are informed when their machine is forked or becomes a clone
//! (Kaleidoscope, sections 6.2.1 and 6.2.2: the write barrier, SIGCLONE).
//!
//! ```text
//! program                              agent
//!    │── watch [barrier] [SIGNAL] ─────▶│
//!    │◀──────────────────────────── ok ─│
//!    │◀────────── fork (with barrier) ──│  before a fork or snapshot, which waits until
//!    │── go ───────────────────────────▶│  the program has finished its writes
//!    │◀──── parent │ clone NUMBER ID ───│  which machine this is; a clone also gets SIGNAL,
//!    │                                  │  if the program named one
//! ```
//!
//! A program watches as long as its connection is open. If a program does not send `go` in time,
//! the fork fails with an error.

use dayfly_api::agent::{ANSWER_MS, Identity};
use dayfly_units::sync::lock;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Maximum number of watching programs.
const MOST: usize = 64;
/// Time limit for all programs together to send `go`, a third of the time that a host waits for
/// the agent, until an identity gives that of this host.
const TIMEOUT: Duration = Duration::from_millis(ANSWER_MS / 3);
/// Time limit for a write to a program that does not read.
const WRITE_TIMEOUT: Duration = Duration::from_millis(100);
/// Real-time signals that libc does not reserve.
const SIGNALS: std::ops::RangeInclusive<i32> = 34..=64;

/// Which machine this is after a fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Is<'a> {
    /// The original machine, or a machine whose fork did not take place.
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
    /// Whether the program got `fork` and waits for the result.
    waits: bool,
}

/// All watching programs.
#[derive(Debug)]
pub struct Watchers {
    all: Mutex<Vec<Watcher>>,
    /// As [`TIMEOUT`].
    timeout: Mutex<Duration>,
}

impl Default for Watchers {
    fn default() -> Self {
        Self { all: Mutex::default(), timeout: Mutex::new(TIMEOUT) }
    }
}

impl Watcher {
    /// Sends a line; returns whether the program took it.
    fn send(&mut self, line: &str) -> bool {
        self.stream.write_all(format!("{line}\n").as_bytes()).is_ok()
    }

    fn is_there(&self) -> bool {
        let mut fds = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let now = rustix::time::Timespec::default();
        !matches!(poll(&mut fds, Some(&now)), Ok(n) if n > 0)
    }

    /// Waits for `go` until `until`, which is `timeout` after the begin.
    fn go(&mut self, until: Instant, timeout: Duration) -> Result<(), String> {
        let mut line = Vec::new();
        while !line.ends_with(b"\n") && line.len() < 16 {
            let left = until.saturating_duration_since(Instant::now());
            let late =
                || format!("process {}: no `go` within {} s", self.pid, timeout.as_secs_f32());
            if left.is_zero() {
                return Err(late());
            }
            let mut byte = [0];
            let got =
                self.stream.set_read_timeout(Some(left)).and_then(|()| self.stream.read(&mut byte));
            match got {
                Ok(1) => line.extend(byte),
                // The program has ended or closed the connection.
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
        lock(&self.all)
    }

    /// Adds the program at the other end, which sent `watch` and these words.
    ///
    /// # Errors
    /// A word is invalid, or too many programs watch.
    pub fn add<'a>(
        &self,
        mut stream: UnixStream,
        words: impl Iterator<Item = &'a str>,
    ) -> Result<(), String> {
        let (mut barrier, mut signal) = (false, None);
        for word in words {
            match word.parse::<i32>() {
                Ok(number) if SIGNALS.contains(&number) && signal.is_none() => {
                    // SAFETY: 34 to 64 are Linux's signals, and libc reserves none of them.
                    signal = Some(unsafe { Signal::from_raw_unchecked(number) });
                }
                _ if word == "barrier" => barrier = true,
                _ => {
                    return Err(format!(
                        "expected `watch [barrier] [SIGNAL]` with a signal from 34 to 64, got \
                         {word:?}"
                    ));
                }
            }
        }
        let peer =
            rustix::net::sockopt::socket_peercred(&stream).map_err(|e| format!("who asks: {e}"))?;
        let program = pidfd_open(peer.pid, PidfdFlags::empty())
            .map_err(|e| format!("process {}: {e}", Pid::as_raw(Some(peer.pid))))?;
        let timeouts = stream.set_write_timeout(Some(WRITE_TIMEOUT));
        timeouts.map_err(|e| format!("a timeout: {e}"))?;
        let mut all = self.all();
        all.retain(Watcher::is_there);
        if all.len() >= MOST {
            return Err(format!("{MOST} programs watch: expected fewer"));
        }
        if stream.write_all(b"ok\n").is_ok() {
            let pid = Pid::as_raw(Some(peer.pid));
            all.push(Watcher { stream, pid, program, signal, barrier, waits: false });
        }
        Ok(())
    }

    /// Takes over how long the host that gave `identity` waits.
    pub fn wait_for(&self, identity: &Identity) {
        *lock(&self.timeout) = identity.answer_time() / 3;
    }

    /// Informs programs with a barrier of the coming fork, and waits for their `go`.
    ///
    /// # Errors
    /// Names a program that did not send `go`; all programs are released then.
    pub fn hold(&self) -> Result<(), String> {
        let mut all = self.all();
        all.retain(Watcher::is_there);
        let timeout = *lock(&self.timeout);
        let until = Instant::now() + timeout;
        for watcher in all.iter_mut().filter(|watcher| watcher.barrier) {
            watcher.waits = watcher.send("fork");
        }
        let mut waiting = all.iter_mut().filter(|watcher| watcher.waits);
        let result = waiting.try_for_each(|watcher| watcher.go(until, timeout));
        drop(all);
        if result.is_err() {
            self.release(Is::Parent);
        }
        result
    }

    /// Reports which machine this is: a parent to the programs that wait, a clone to all.
    pub fn release(&self, is: Is<'_>) {
        let mut all = self.all();
        all.retain_mut(|watcher| {
            let waits = std::mem::take(&mut watcher.waits);
            match is {
                Is::Parent => !waits || watcher.send("parent"),
                Is::Clone { number, id } => {
                    if let Some(signal) = watcher.signal {
                        let _ended = pidfd_send_signal(&watcher.program, signal);
                    }
                    watcher.send(&format!("clone {number} {id}"))
                }
            }
        });
    }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
