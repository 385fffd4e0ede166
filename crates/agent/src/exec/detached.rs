//! Detached programs: how they end, and their output, whose last bytes stay in memory for the host.
//!
//! ```text
//! program ──pipe──▶ a thread ──▶ Log (a ring of at most LOG_BYTES) ◀── Request::Log
//! ```
//!
//! Both output streams share one pipe, which keeps their order. The thread reads until the last
//! process that holds the pipe has closed it; this may be a service that outlives the program. A
//! log is part of the machine's memory, so a clone has its parent's logs.

use super::orders::{signal, signal_group};
use super::spawn::Child;
use crate::wire::{Conn, WireError};
use dayfly_api::agent::{
    ExecSpec, Exit, Failure, FailureCode, FrameKind, MAX_FRAME_BYTES, Program, Reply, find_program,
};
use dayfly_units::{VmId, sync::lock};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Maximum bytes kept of each program.
pub const LOG_BYTES: usize = 256 << 10;
/// Maximum number of programs whose output is kept.
pub const MOST_LOGS: usize = 32;
/// Maximum bytes per read.
const CHUNK_BYTES: usize = 16 << 10;
/// Interval of the check whether a following client is still connected.
const LOOK: Duration = Duration::from_millis(500);

/// Maximum bytes of a program's arguments that are kept.
const COMMAND_BYTES: usize = 512;
/// Minimum distance of the times that are kept of a program's output.
const TIMES_MS: u64 = 1000;
/// Maximum number of times that are kept of a program's output.
const MOST_TIMES: usize = 1024;

/// The last detached programs, oldest first.
#[derive(Debug, Default)]
pub struct Logs(Mutex<VecDeque<Arc<Log>>>);

/// One detached program, and its output.
#[derive(Debug)]
pub struct Log {
    id: String,
    pid: u32,
    /// For signals; `None` if there was no descriptor for it.
    pidfd: Option<OwnedFd>,
    command: Vec<String>,
    user: String,
    started_unix_ms: u64,
    kept: Mutex<Kept>,
    more: Condvar,
}

/// Which excerpt of an output is sent.
#[derive(Debug, Clone, Copy, Default)]
pub struct Excerpt {
    /// Whether to continue until no process can write any more.
    pub follow: bool,
    /// The number of last lines of the output so far.
    pub tail: Option<u64>,
    /// Only output since this time, to [`TIMES_MS`].
    pub since_unix_ms: Option<u64>,
}

#[derive(Debug, Default)]
struct Kept {
    bytes: VecDeque<u8>,
    /// Number of bytes dropped before `bytes`.
    dropped: u64,
    /// Offsets in everything that was ever written, and when the byte there was read.
    times: VecDeque<(u64, u64)>,
    /// No process can write to the pipe any more.
    ended: bool,
    /// How the program ended, and when.
    exit: Option<(Exit, u64)>,
    /// The log was dropped in favour of newer programs, or by a client, and keeps nothing.
    forgotten: bool,
}

/// A thread that reads a pipe, and first waits for the log to write to.
pub(super) struct Reader {
    log: std::sync::mpsc::SyncSender<Arc<Log>>,
}

impl Log {
    fn add(&self, bytes: &[u8]) {
        let mut kept = lock(&self.kept);
        if kept.forgotten {
            return;
        }
        let room = LOG_BYTES.saturating_sub(bytes.len());
        let drop = kept.bytes.len().saturating_sub(room);
        kept.bytes.drain(..drop);
        kept.bytes.extend(bytes);
        kept.dropped += drop as u64;
        let (at, now) = (kept.dropped + (kept.bytes.len() - bytes.len()) as u64, unix_ms());
        if kept.times.back().is_none_or(|(_, last)| now.abs_diff(*last) >= TIMES_MS) {
            if kept.times.len() == MOST_TIMES {
                kept.times.pop_front();
            }
            kept.times.push_back((at, now));
        }
        self.more.notify_all();
    }

    /// The program's id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Notes the end of the program.
    pub(super) fn exited(&self, exit: Exit) {
        self.change(|kept| kept.exit = Some((exit, unix_ms())));
    }

    fn shown(&self) -> Program {
        let exit = lock(&self.kept).exit;
        Program {
            id: self.id.clone(),
            pid: self.pid,
            command: self.command.clone(),
            user: self.user.clone(),
            started_unix_ms: self.started_unix_ms,
            exit: exit.map(|(exit, _)| exit),
            ended_unix_ms: exit.map(|(_, at)| at),
        }
    }

    fn change(&self, change: impl FnOnce(&mut Kept)) {
        change(&mut lock(&self.kept));
        self.more.notify_all();
    }
}

/// Creates the pipe for a program's output and the thread that reads it. Called before the program
/// starts, so that no program runs without a reader.
///
/// # Errors
/// No pipe or no thread can be created.
pub(super) fn pipe() -> Result<(OwnedFd, Reader), Errno> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    let (log, whose) = std::sync::mpsc::sync_channel::<Arc<Log>>(1);
    let drain = move || {
        // A closed channel: the program did not start.
        let Ok(log) = whose.recv() else { return };
        let mut bytes = vec![0; CHUNK_BYTES];
        loop {
            match rustix::io::read(&read, &mut bytes[..]) {
                Ok(0) => break,
                Ok(n) => log.add(bytes.get(..n).unwrap_or_default()),
                Err(Errno::INTR) => {}
                Err(_) => break,
            }
        }
        log.change(|kept| kept.ended = true);
    };
    let thread = std::thread::Builder::new().name("detached".into()).stack_size(64 << 10);
    thread.spawn(drain).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?;
    Ok((write, Reader { log }))
}

impl Logs {
    /// Adds a program that has started. If there are [`MOST_LOGS`] already, one is dropped
    /// ([`dispensable`]).
    pub(super) fn add(&self, child: &Child, spec: &ExecSpec, reader: Reader) -> Arc<Log> {
        let pidfd = rustix::io::fcntl_dupfd_cloexec(&child.pidfd, 3).ok();
        self.add_with(child.pid, pidfd, spec, reader)
    }

    fn add_with(
        &self,
        pid: u32,
        pidfd: Option<OwnedFd>,
        spec: &ExecSpec,
        reader: Reader,
    ) -> Arc<Log> {
        let mut logs = lock(&self.0);
        let log = Arc::new(Log {
            id: unused_id(&logs),
            pid,
            pidfd,
            command: cut(&spec.argv),
            user: spec.user.chars().take(64).collect(),
            started_unix_ms: unix_ms(),
            kept: Mutex::default(),
            more: Condvar::new(),
        });
        if logs.len() >= MOST_LOGS
            && let Some(old) = dispensable(&logs).and_then(|at| logs.remove(at))
        {
            old.drop_all();
        }
        logs.push_back(Arc::clone(&log));
        drop(logs);
        // The reader thread waits for this log.
        let _ = reader.log.send(Arc::clone(&log));
        log
    }

    fn find(&self, word: &str) -> Result<Arc<Log>, Failure> {
        let logs = lock(&self.0);
        if let Some(log) = find_program(logs.iter().map(|log| (log.id.as_str(), log.pid)), word)
            .and_then(|at| logs.get(at))
        {
            return Ok(Arc::clone(log));
        }
        let known = logs.iter().rev().map(|log| {
            let program = log.command.first().map_or("", String::as_str);
            let program: String = program.chars().take(64).collect();
            format!("{} ({program})", log.id)
        });
        let known = known.collect::<Vec<_>>();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        let word: String = word.chars().take(64).collect();
        let message =
            format!("detached program {word}: expected one whose output is kept: {known}");
        Err(Failure { code: FailureCode::NotFound, message })
    }

    /// The reply to [`dayfly_api::agent::Request::Programs`].
    #[must_use]
    pub fn list(&self) -> Reply {
        Reply::Programs { programs: lock(&self.0).iter().map(|log| log.shown()).collect() }
    }

    /// The reply to [`dayfly_api::agent::Request::SignalProgram`].
    #[must_use]
    pub fn signal(&self, word: &str, number: i32) -> Reply {
        let failed = |code, message| Reply::Err(Failure { code, message });
        let log = match self.find(word) {
            Ok(log) => log,
            Err(failure) => return Reply::Err(failure),
        };
        let Some(signal) = signal(number) else {
            let message = format!("signal: expected 1 to 31 or 34 to 64, got {number}");
            return failed(FailureCode::Invalid, message);
        };
        let id = &log.id;
        // With the lock: nothing notes the end of the program in between.
        let kept = lock(&log.kept);
        match (&log.pidfd, kept.exit) {
            (_, Some(_)) => {
                failed(FailureCode::NotFound, format!("program {id}: has ended already"))
            }
            (None, None) => failed(
                FailureCode::Io,
                format!("program {id}: its start found no descriptor for signals"),
            ),
            (Some(pidfd), None) => {
                signal_group(log.pid, pidfd, signal);
                Reply::Ok
            }
        }
    }

    /// The reply to [`dayfly_api::agent::Request::ForgetProgram`].
    #[must_use]
    pub fn forget(&self, word: &str) -> Reply {
        let log = match self.find(word) {
            Ok(log) => log,
            Err(failure) => return Reply::Err(failure),
        };
        if lock(&log.kept).exit.is_none() {
            let message = format!("program {}: still runs; kill it first", log.id);
            return Reply::Err(Failure { code: FailureCode::Invalid, message });
        }
        lock(&self.0).retain(|other| !Arc::ptr_eq(other, &log));
        log.drop_all();
        Reply::Ok
    }

    /// Serves [`dayfly_api::agent::Request::WaitForProgram`].
    ///
    /// # Errors
    /// [`WireError`] if the client is gone.
    pub fn outlast(&self, conn: &mut Conn, word: &str) -> Result<(), WireError> {
        let log = match self.find(word) {
            Ok(log) => log,
            Err(failure) => return conn.reply(&Reply::Err(failure)),
        };
        loop {
            {
                // A program that is forgotten meanwhile ends too.
                let kept = lock(&log.kept);
                let kept = if kept.exit.is_none() { wait(&log, kept) } else { kept };
                if kept.exit.is_some() {
                    drop(kept);
                    return conn.reply(&Reply::Program(log.shown()));
                }
            }
            if is_gone(conn) {
                return Ok(());
            }
        }
    }

    /// Serves [`dayfly_api::agent::Request::Log`]: sends the kept output. With `follow` it also
    /// sends new output until no process can write any more.
    ///
    /// # Errors
    /// [`WireError`] if the client is gone.
    pub fn send(&self, conn: &mut Conn, word: &str, excerpt: Excerpt) -> Result<(), WireError> {
        let log = match self.find(word) {
            Ok(log) => log,
            Err(failure) => return conn.reply(&Reply::Err(failure)),
        };
        conn.reply(&Reply::Ok)?;
        let follow = excerpt.follow;
        // Offset in everything that was ever written.
        let mut at = lock(&log.kept).start_of(excerpt);
        loop {
            let (gap, bytes, more) = {
                let mut kept = lock(&log.kept);
                let end = kept.dropped + kept.bytes.len() as u64;
                if follow && at == end && !kept.ended {
                    kept = self::wait(&log, kept);
                }
                let gap = kept.dropped.saturating_sub(at);
                let from = usize::try_from(at.saturating_sub(kept.dropped)).unwrap_or(usize::MAX);
                let bytes: Vec<u8> =
                    kept.bytes.iter().skip(from).take(MAX_FRAME_BYTES / 2).copied().collect();
                at += gap + bytes.len() as u64;
                let rest = at < kept.dropped + kept.bytes.len() as u64;
                (gap, bytes, rest || (follow && !kept.ended))
            };
            if gap > 0 {
                let note = format!("[dayfly: {gap} bytes of older output are dropped]\n");
                conn.push(FrameKind::Data, note.as_bytes());
            }
            if !bytes.is_empty() {
                conn.push(FrameKind::Data, &bytes);
            }
            conn.flush()?;
            if !more {
                conn.push(FrameKind::End, &[]);
                return conn.flush();
            }
            if is_gone(conn) {
                return Ok(());
            }
        }
    }
}

impl Kept {
    /// The offset at which `excerpt` begins.
    fn start_of(&self, excerpt: Excerpt) -> u64 {
        let end = self.dropped + self.bytes.len() as u64;
        let since = excerpt.since_unix_ms.map_or(0, |since| {
            // The entry before `since` may have later bytes too.
            let mut times = self.times.iter().rev();
            let first = times.find(|(_, time)| *time <= since);
            match first {
                Some((at, _)) => *at,
                None => 0,
            }
        });
        let newest = self.times.back().map_or(0, |(_, time)| *time);
        let since = match excerpt.since_unix_ms {
            Some(asked) if asked > newest.saturating_add(TIMES_MS) => end,
            _ => since,
        };
        let tail = excerpt.tail.map_or(0, |lines| self.start_of_lines(lines));
        since.max(tail)
    }

    /// The offset of the last `lines` lines; a last line without an end counts.
    fn start_of_lines(&self, lines: u64) -> u64 {
        let end = self.dropped + self.bytes.len() as u64;
        if lines == 0 {
            return end;
        }
        let unended = self.bytes.back().is_some_and(|byte| *byte != b'\n');
        let before = usize::try_from(lines).unwrap_or(usize::MAX) - usize::from(unended);
        let mut ends = self.bytes.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
        ends.nth(before).map_or(0, |(at, _)| self.dropped + at as u64 + 1)
    }
}

impl Log {
    /// Drops everything, because nothing lists the program any more.
    fn drop_all(&self) {
        self.change(|kept| {
            *kept = Kept { forgotten: true, ended: true, exit: kept.exit, ..Kept::default() };
        });
    }
}

/// The index of the program to forget: the oldest that has ended and whose output has, else the
/// oldest that has ended, else the second oldest. The oldest of `run -d` is the program by which
/// the VM may end.
fn dispensable(logs: &VecDeque<Arc<Log>>) -> Option<usize> {
    let find = |is: fn(&Kept) -> bool| logs.iter().position(|log| is(&lock(&log.kept)));
    find(|kept| kept.exit.is_some() && kept.ended)
        .or_else(|| find(|kept| kept.exit.is_some()))
        .or_else(|| logs.len().checked_sub(1).map(|last| last.min(1)))
}

/// An id that none of `logs` has.
fn unused_id(logs: &VecDeque<Arc<Log>>) -> String {
    let used = |id: &String| logs.iter().any(|log| log.id == *id);
    std::iter::repeat_with(|| VmId::random().to_string()).find(|id| !used(id)).unwrap_or_default()
}

/// The arguments, cut to [`COMMAND_BYTES`].
fn cut(argv: &[String]) -> Vec<String> {
    let mut left = COMMAND_BYTES;
    let mut command = Vec::new();
    for word in argv {
        if left == 0 {
            break;
        }
        let mut end = word.len().min(left);
        while !word.is_char_boundary(end) {
            end -= 1;
        }
        // An empty word takes room too.
        left = left.saturating_sub(end.max(1));
        command.push(word[..end].to_owned());
        if end < word.len() {
            break;
        }
    }
    command
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Waits for more output, or until the next check of the client.
fn wait<'a>(log: &'a Log, kept: MutexGuard<'a, Kept>) -> MutexGuard<'a, Kept> {
    log.more.wait_timeout(kept, LOOK).unwrap_or_else(PoisonError::into_inner).0
}

fn is_gone(conn: &Conn) -> bool {
    let mut fds = [PollFd::new(conn, PollFlags::RDHUP)];
    let now = crate::wire::timespec(Duration::ZERO);
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    matches!(poll(&mut fds, Some(&now)), Ok(1..)) && fds[0].revents().intersects(gone)
}

#[cfg(test)]
#[path = "detached_tests.rs"]
mod tests;
