//! A running program: streams in both directions, signals, time limit, end.
//!
//! One thread with one `poll(2)`. Back-pressure means not reading: while a frame waits for a slow
//! client, the session reads nothing more from the program. While the program does not take its
//! input, the session reads no further frame from the client. So a signal can wait behind unread
//! input, but the time limit and a disconnect cannot.
//!
//! ```text
//!  runs ──(program ended)──▶ drains ──(both streams at their end, or grace is over)──▶ Exit sent
//!   │ └──(time is up: kill)──▲
//!   └──(client gone: kill, or detach)──▶ waits for the end, sends nothing
//! ```
//!
//! In a clone, the client is gone too, but the program lives on ([`Fork`]): its output is
//! discarded, and its input has ended.

use super::cage::Cage;
use super::fork::Fork;
use super::orders::{Order, control, feed};
use super::programs::{Programs, Running};
use super::spawn::Child;
use super::streams::{Streams, window};
use super::wait::mind;
use crate::wire::{Conn, Filled, WireError, timespec};
use dayfly_api::agent::{ExecSpec, Exit, FrameKind, Reply};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::termios::tcsetwinsize;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit for output that other processes may still write to an ended program's streams.
const GRACE: Duration = Duration::from_millis(50);
/// Maximum delay of the reply that a program runs, so that it leaves together with the program's
/// first output. One message then carries the whole answer of a short program; over virtio every
/// message costs an exit and an interrupt on each side. A program that takes input is answered at
/// once, because its client may wait for the reply.
const SILENT: Duration = Duration::from_millis(100);
/// How long the first output may wait for more output: a quarter of the time until the first
/// output, within these bounds. A short program ends sooner.
const GATHER: RangeInclusive<Duration> = Duration::from_millis(2)..=Duration::from_millis(10);
/// Bytes at which gathered output is sent in any case.
const GATHER_BYTES: usize = 32 << 10;
/// Maximum bytes per read from a program: a pipe's default capacity.
const CHUNK_BYTES: usize = 64 << 10;
/// Interval of the check whether this machine is a clone, while that is unknown.
const SETTLE: Duration = Duration::from_millis(100);
/// `^D`: the end of input on a terminal.
const END_OF_INPUT: &[u8] = b"\x04";

/// The results of poll(2).
#[derive(Debug, Default)]
struct Events {
    conn: Option<PollFlags>,
    stdin: bool,
    stdout: bool,
    stderr: bool,
    ended: bool,
}

struct Session<'a> {
    fork: &'a Fork,
    /// [`Fork::times`] when the program was started.
    forks: u64,
    conn: &'a mut Conn,
    child: Child,
    cage: Cage,
    streams: Streams,
    detach: bool,
    takes_stdin: bool,
    /// Bytes that the program has taken of the first `Stdin` frame.
    taken: usize,
    /// Whether the rest of that frame waits for the program.
    blocked: bool,
    deadline: Option<Instant>,
    started: Instant,
    /// Output is gathered until this time.
    gather: Option<Instant>,
    timed_out: bool,
    gone: bool,
    /// Whether the client is gone because this machine is a clone.
    orphan: Orphan,
    malformed: Option<WireError>,
    exit: Option<Ended>,
}

/// Whether a program lives on without its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Orphan {
    No,
    /// Yes if this machine turns out to be a clone.
    Perhaps,
    Yes,
}

/// The program has ended; its streams may hold more.
struct Ended {
    exit: Exit,
    until: Instant,
    /// Bytes that were in the streams at the program's end; they are sent even after `until`.
    owed: u64,
}

pub(super) fn run(
    programs: &Arc<Programs>,
    conn: &mut Conn,
    spec: &ExecSpec,
    running: Running,
) -> Result<(), WireError> {
    let forks = programs.fork.times();
    let Running { child, cage, streams, log } = running;
    let id = log.as_ref().map(|log| log.id().to_owned());
    conn.push_json(FrameKind::Reply, &Reply::Started { pid: child.pid, id });
    let mut session = Session {
        fork: &programs.fork,
        forks,
        conn,
        child,
        cage,
        streams,
        detach: spec.detach,
        takes_stdin: spec.stdin,
        taken: 0,
        blocked: false,
        deadline: spec
            .timeout_ms
            .and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms))),
        started: Instant::now(),
        gather: (!spec.stdin && !spec.detach).then(|| Instant::now() + SILENT),
        timed_out: false,
        gone: false,
        orphan: Orphan::No,
        malformed: None,
        exit: None,
    };
    session.flush_some();
    session.serve();
    let Session { conn, child, cage, deadline, exit, gone, malformed, streams, .. } = session;
    let Some(ended) = exit else {
        // The program is detached and still runs: a thread enforces its time limit and reaps it.
        mind(programs, child, cage, deadline, log);
        return Ok(());
    };
    if let Some(log) = log {
        log.exited(ended.exit);
    }
    // Processes that the program left behind would get SIGPIPE.
    programs.leftovers.keep(streams);
    let sent = match malformed {
        Some(error) => Err(error),
        None if gone => Ok(()),
        None => {
            conn.push_json(FrameKind::Exit, &ended.exit);
            conn.flush()
        }
    };
    programs.cages.give_back(cage);
    // An I/O error means that the client disconnected during the last flush, which is no protocol
    // error.
    if matches!(sent, Err(WireError::Io(_))) { Ok(()) } else { sent }
}

impl Session<'_> {
    fn serve(&mut self) {
        loop {
            let now = Instant::now();
            if let Some(ended) = &self.exit {
                let dry = self.streams.stdout.is_none() && self.streams.stderr.is_none();
                let enough = now >= ended.until && ended.owed == 0;
                if self.gone || dry || (enough && !self.conn.pending()) {
                    return;
                }
            } else if self.gone && self.detach {
                return;
            }
            self.settle();
            if self.gather.is_some_and(|g| now >= g) {
                self.release();
            }
            if self.exit.is_none() && !self.timed_out && self.deadline.is_some_and(|d| now >= d) {
                self.timed_out = true;
                self.cage.kill(self.child.pid);
            }
            let events = match self.wait(now) {
                Ok(events) => events,
                Err(errno) => {
                    // poll(2) has no memory: nothing can be served any more.
                    self.leave(Some(WireError::Io(errno)));
                    continue;
                }
            };
            if let Some(flags) = events.conn {
                self.on_client(flags);
            }
            if events.stdin {
                self.on_frames();
            }
            if events.stdout {
                self.on_output(FrameKind::Stdout);
            }
            if events.stderr && !self.stuck() {
                self.on_output(FrameKind::Stderr);
            }
            if events.ended {
                self.on_end();
            }
        }
    }

    /// Waits until something can proceed.
    fn wait(&self, now: Instant) -> Result<Events, Errno> {
        let until = match &self.exit {
            Some(ended) if ended.owed == 0 => Some(ended.until),
            Some(_) => None,
            None if self.timed_out => None,
            None => self.deadline,
        };
        let settled = (self.orphan == Orphan::Perhaps).then(|| now + SETTLE);
        let until = [until, self.gather, settled].into_iter().flatten().min();
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(5);
        let mut add = |fd, flags| {
            fds.push(PollFd::from_borrowed_fd(fd, flags));
            fds.len() - 1
        };
        let conn = (!self.gone).then(|| {
            let mut flags = PollFlags::RDHUP;
            flags.set(PollFlags::IN, !self.blocked && self.exit.is_none());
            flags.set(PollFlags::OUT, self.stuck());
            add(self.conn.as_fd(), flags)
        });
        let reads = !self.stuck();
        let stdin = self
            .streams
            .stdin
            .as_ref()
            .filter(|_| self.blocked)
            .map(|f| add(f.as_fd(), PollFlags::OUT));
        let stdout =
            self.streams.stdout.as_ref().filter(|_| reads).map(|f| add(f.as_fd(), PollFlags::IN));
        let stderr =
            self.streams.stderr.as_ref().filter(|_| reads).map(|f| add(f.as_fd(), PollFlags::IN));
        let ended = self.exit.is_none().then(|| add(self.child.pidfd.as_fd(), PollFlags::IN));
        let timeout = until.map(|u| timespec(u.saturating_duration_since(now)));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR | Errno::AGAIN) => return Ok(Events::default()),
            Err(errno) => return Err(errno),
        }
        let found = |at: Option<usize>| {
            at.and_then(|i| fds.get(i)).map(PollFd::revents).filter(|flags| !flags.is_empty())
        };
        Ok(Events {
            conn: found(conn),
            stdin: found(stdin).is_some(),
            stdout: found(stdout).is_some(),
            stderr: found(stderr).is_some(),
            ended: found(ended).is_some(),
        })
    }

    /// The client is gone or sent a malformed frame: its program ends too, unless it is detached.
    fn leave(&mut self, malformed: Option<WireError>) {
        if self.gone {
            return;
        }
        self.gone = true;
        if self.detach {
            self.malformed = malformed;
            return;
        }
        // Read in this order, because `times` changes before the fork is over.
        let under_way = self.fork.is_under_way();
        let cloned = self.fork.times() != self.forks;
        if malformed.is_none() && (under_way || cloned) {
            self.orphan = Orphan::Perhaps;
            self.streams.stdin = None;
            return;
        }
        self.malformed = malformed;
        self.end();
    }

    /// Closes the streams and kills the program, because no client is interested any more.
    fn end(&mut self) {
        self.streams = Streams::default();
        if self.exit.is_none() {
            self.cage.kill(self.child.pid);
        }
    }

    /// Decides about an orphan as soon as the fork is over.
    fn settle(&mut self) {
        if self.orphan != Orphan::Perhaps {
            return;
        }
        // In the same order as in `leave`.
        let under_way = self.fork.is_under_way();
        if self.fork.times() != self.forks {
            self.orphan = Orphan::Yes;
        } else if !under_way {
            self.orphan = Orphan::No;
            self.end();
        }
    }

    /// Whether a slow client must take pending bytes before more is read from the program.
    fn stuck(&self) -> bool {
        !self.gone && self.gather.is_none() && self.conn.pending()
    }

    /// Shortens the gathering after the first output, or at the program's end.
    fn hurry(&mut self) {
        if let Some(gather) = &mut self.gather {
            let quarter = self.started.elapsed() / 4;
            *gather = (*gather).min(Instant::now() + quarter.clamp(*GATHER.start(), *GATHER.end()));
        }
    }

    /// Ends the gathering and sends what was gathered.
    fn release(&mut self) {
        if self.gather.take().is_some() && !self.gone {
            self.flush_some();
        }
    }

    fn flush_some(&mut self) {
        if self.gather.is_some() {
            if self.conn.pending_bytes() < GATHER_BYTES {
                return;
            }
            self.gather = None;
        }
        if self.conn.flush_some().is_err() {
            self.leave(None);
        }
    }

    fn on_client(&mut self, flags: PollFlags) {
        if flags.contains(PollFlags::OUT) {
            self.flush_some();
        }
        if flags.contains(PollFlags::IN) && self.exit.is_none() && !self.gone {
            match self.conn.fill() {
                Ok(Filled::Some) => self.on_frames(),
                Ok(Filled::Nothing) => {}
                Ok(Filled::End) | Err(WireError::Io(_)) => self.leave(None),
                Err(error) => self.leave(Some(error)),
            }
        }
        if flags.intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
            self.leave(None);
        }
    }

    /// Handles the received frames, until one must wait for the program.
    fn on_frames(&mut self) {
        self.blocked = false;
        while !self.gone {
            let step = match self.conn.frame() {
                Ok(None) => return,
                Ok(Some((FrameKind::Stdin, body))) if self.takes_stdin => {
                    match feed(&mut self.streams.stdin, body, &mut self.taken) {
                        true => Ok(()),
                        false => {
                            self.blocked = true;
                            return;
                        }
                    }
                }
                Ok(Some((kind, body))) => {
                    control(kind, body, self.takes_stdin).map(|order| match order {
                        Order::EndInput => {
                            if let Some(fd) =
                                self.streams.stdin.take().filter(|_| self.streams.terminal)
                            {
                                let _ = rustix::io::write(&fd, END_OF_INPUT);
                            }
                        }
                        Order::Resize(size) => {
                            if let Some(fd) =
                                self.streams.stdout.as_ref().filter(|_| self.streams.terminal)
                            {
                                let _ = tcsetwinsize(fd, window(size));
                            }
                        }
                        Order::Signal(signal) => self.child.signal(signal),
                    })
                }
                Err(error) => Err(error.into()),
            };
            match step {
                Ok(()) => {
                    self.taken = 0;
                    self.conn.consume();
                }
                Err(error) => self.leave(Some(error)),
            }
        }
    }

    fn on_output(&mut self, kind: FrameKind) {
        let stream = if kind == FrameKind::Stdout {
            &mut self.streams.stdout
        } else {
            &mut self.streams.stderr
        };
        let Some(fd) = stream else { return };
        if self.orphan != Orphan::No {
            let mut nowhere = [0; 4096];
            match rustix::io::read(&*fd, &mut nowhere) {
                Ok(1..) | Err(Errno::INTR | Errno::AGAIN) => {}
                Ok(0) | Err(_) => *stream = None,
            }
            return;
        }
        match self.conn.push_from(kind, fd.as_fd(), CHUNK_BYTES) {
            Ok(0) => *stream = None,
            Ok(n) => {
                if let Some(ended) = &mut self.exit {
                    ended.owed = ended.owed.saturating_sub(n as u64);
                }
                self.hurry();
                self.flush_some();
            }
            Err(Errno::INTR | Errno::AGAIN) => {}
            // EIO: no process holds the other end of the terminal any more.
            Err(_) => *stream = None,
        }
    }

    fn on_end(&mut self) {
        let Some(exit) = self.child.reap() else { return };
        let waiting = |fd: &Option<OwnedFd>| {
            fd.as_ref().and_then(|fd| rustix::io::ioctl_fionread(fd).ok()).unwrap_or(0)
        };
        let owed = waiting(&self.streams.stdout) + waiting(&self.streams.stderr);
        self.streams.stdin = None;
        self.hurry();
        let exit = Exit { timed_out: self.timed_out, ..exit };
        self.exit = Some(Ended { exit, until: Instant::now() + GRACE, owed });
    }
}
