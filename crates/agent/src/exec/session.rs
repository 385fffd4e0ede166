//! A program's life after it was started: streams both ways, signals, its time limit, its end.
//!
//! One thread, one `poll(2)`. Back-pressure is by not reading: while a frame waits for a slow client nothing more is
//! read from the program, and while the program does not take its input no further frame is read from the client. So
//! a signal can wait behind input that the program does not read; the time limit and the client's leaving cannot.
//!
//! ```text
//!  runs ──(program ended)──▶ drains ──(both streams at their end, or the grace ran out)──▶ Exit sent
//!   │ └──(time is up: kill)──▲
//!   └──(client gone: kill, or detach)──▶ waits for the end, says nothing
//! ```
//!
//! In the clone of a machine that was forked the client is gone, too, but the program lives on ([`super::Fork`]): what it writes goes nowhere, and its
//! input has ended.

use super::cage::Cage;
use super::spawn::Child;
use super::{Fork, Programs, Running, Streams, window};
use crate::wire::{Conn, Filled, WireError, timespec};
use dayfly_api::agent::{ExecSpec, Exit, Failure, FrameKind, Reply, WindowSize};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};
use rustix::termios::tcsetwinsize;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long output is awaited that something else than the ended program may still write to its streams.
const GRACE: Duration = Duration::from_millis(50);
/// How long the news that a program runs may wait for its first output, so that the whole answer of a short program
/// goes out at once: over virtio every message costs an exit and an interrupt on each side. A program that takes input
/// is answered at once, since its client may wait for that.
const SILENT: Duration = Duration::from_millis(100);
/// How long that first output may wait for more then: a quarter of the time that it took to come, within these bounds. A short program's end
/// comes sooner.
const GATHER: RangeInclusive<Duration> = Duration::from_millis(2)..=Duration::from_millis(10);
/// Bytes that are gathered before they go out in any case.
const GATHER_BYTES: usize = 32 << 10;
/// What is read from a program at once: a pipe's usual capacity.
const CHUNK_BYTES: usize = 64 << 10;
/// How often it is looked whether this is a clone, while that is not known.
const SETTLE: Duration = Duration::from_millis(100);
/// `^D`: the end of input on a terminal.
const END_OF_INPUT: &[u8] = b"\x04";

/// What poll(2) found.
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
    /// How often this machine had become another when the program was started.
    forks: u64,
    conn: &'a mut Conn,
    child: Child,
    cage: Cage,
    streams: Streams,
    detach: bool,
    takes_stdin: bool,
    /// Bytes of the `Stdin` frame at the head that the program has taken.
    taken: usize,
    /// Whether that frame's rest waits for the program.
    blocked: bool,
    deadline: Option<Instant>,
    started: Instant,
    /// Until when output is gathered.
    gather: Option<Instant>,
    timed_out: bool,
    gone: bool,
    /// The client is gone because this is a clone, or may be one.
    orphan: Orphan,
    malformed: Option<WireError>,
    exit: Option<Ended>,
}

/// Whether a program lives on though its client is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Orphan {
    No,
    /// Where this turns out to be a clone.
    Perhaps,
    Yes,
}

/// The program has ended; its streams may hold more.
struct Ended {
    exit: Exit,
    until: Instant,
    /// Bytes that were in the streams when it ended: sent even past `until`.
    owed: u64,
}

pub(super) fn run(
    programs: &Arc<Programs>,
    conn: &mut Conn,
    spec: &ExecSpec,
    running: Running,
) -> Result<(), WireError> {
    let forks = programs.fork.times();
    let Running { child, cage, streams } = running;
    conn.push_json(FrameKind::Reply, &Reply::Started { pid: child.pid });
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
        deadline: spec.timeout_ms.and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms))),
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
    let Session { conn, child, cage, deadline, exit, gone, malformed, .. } = session;
    let Some(ended) = exit else {
        // Only a detached program is left alive: somebody has to honour its time limit and reap it.
        mind(programs, child, cage, deadline);
        return Ok(());
    };
    let told = match malformed {
        Some(error) => Err(error),
        None if gone => Ok(()),
        None => {
            conn.push_json(FrameKind::Exit, &ended.exit);
            conn.flush()
        }
    };
    programs.cages.give_back(cage);
    // A client that left during the last flush is gone, not malformed.
    if matches!(told, Err(WireError::Io(_))) { Ok(()) } else { told }
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
                    // Out of memory for poll(2): nothing can be served any more.
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

    /// Waits for whatever can go on.
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
        let stdin =
            self.streams.stdin.as_ref().filter(|_| self.blocked).map(|f| add(f.as_fd(), PollFlags::OUT));
        let stdout = self.streams.stdout.as_ref().filter(|_| reads).map(|f| add(f.as_fd(), PollFlags::IN));
        let stderr = self.streams.stderr.as_ref().filter(|_| reads).map(|f| add(f.as_fd(), PollFlags::IN));
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

    /// The client is gone, or has sent something malformed: its program ends too, unless it is detached.
    fn leave(&mut self, malformed: Option<WireError>) {
        if self.gone {
            return;
        }
        self.gone = true;
        if self.detach {
            self.malformed = malformed;
            return;
        }
        // In this order: it is a clone before the fork is over.
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

    /// Nobody wants it any more.
    fn end(&mut self) {
        self.streams = Streams::default();
        if self.exit.is_none() {
            self.cage.kill(self.child.pid);
        }
    }

    /// Whether this is a clone, once that is known.
    fn settle(&mut self) {
        if self.orphan != Orphan::Perhaps {
            return;
        }
        // In this order, as above.
        let under_way = self.fork.is_under_way();
        if self.fork.times() != self.forks {
            self.orphan = Orphan::Yes;
        } else if !under_way {
            self.orphan = Orphan::No;
            self.end();
        }
    }

    /// Whether a slow client has to take something before more is read from the program.
    fn stuck(&self) -> bool {
        !self.gone && self.gather.is_none() && self.conn.pending()
    }

    /// The first has come: what was gathered waits for little more.
    fn hurry(&mut self) {
        if let Some(gather) = &mut self.gather {
            let quarter = self.started.elapsed() / 4;
            *gather = (*gather).min(Instant::now() + quarter.clamp(*GATHER.start(), *GATHER.end()));
        }
    }

    /// No more gathering.
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

    /// Deals with the frames that have come, until one has to wait for the program.
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
                Ok(Some((kind, body))) => control(kind, body, self.takes_stdin).map(|order| match order {
                    Order::EndInput => {
                        if let Some(fd) = self.streams.stdin.take().filter(|_| self.streams.terminal) {
                            let _ = rustix::io::write(&fd, END_OF_INPUT);
                        }
                    }
                    Order::Resize(size) => {
                        if let Some(fd) = self.streams.stdout.as_ref().filter(|_| self.streams.terminal) {
                            let _ = tcsetwinsize(fd, window(size));
                        }
                    }
                    Order::Signal(signal) => self.child.signal(signal),
                }),
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
        let stream =
            if kind == FrameKind::Stdout { &mut self.streams.stdout } else { &mut self.streams.stderr };
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
            // EIO is how a terminal says that nobody holds its other end any more.
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

/// Writes what the program takes of `body` from `taken` on. Whether all of it is dealt with.
fn feed(stdin: &mut Option<OwnedFd>, body: &[u8], taken: &mut usize) -> bool {
    while let (Some(fd), Some(rest)) = (&stdin, body.get(*taken..).filter(|r| !r.is_empty())) {
        match rustix::io::write(fd, rest) {
            Ok(n) => *taken += n,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return false,
            // The program has closed its input (or a terminal hung up): the rest goes nowhere.
            Err(_) => *stdin = None,
        }
    }
    true
}

/// What a client may ask of a running program, apart from input.
enum Order {
    EndInput,
    Resize(WindowSize),
    Signal(Signal),
}

fn control(kind: FrameKind, body: &[u8], takes_stdin: bool) -> Result<Order, WireError> {
    match kind {
        FrameKind::StdinEnd if takes_stdin => Ok(Order::EndInput),
        FrameKind::Resize => serde_json::from_slice(body)
            .map(Order::Resize)
            .map_err(|source| WireError::Json { what: "resize", source }),
        FrameKind::Signal => {
            let bytes: [u8; 4] = body.try_into().map_err(|_| WireError::Length {
                what: "signal",
                expected: 4,
                got: body.len(),
            })?;
            let number = i32::from_le_bytes(bytes);
            // Not 32 and 33, which libc keeps for itself.
            let known = (1..=31).contains(&number) || (34..=64).contains(&number);
            // SAFETY: 1 to 31 and 34 to 64 are Linux's signals, none of them libc's own.
            let signal = known.then(|| unsafe { Signal::from_raw_unchecked(number) });
            signal
                .map(Order::Signal)
                .ok_or(WireError::Unexpected { expected: "a signal from 1 to 64", got: kind })
        }
        got => {
            let expected =
                if takes_stdin { "stdin, stdin end, resize or signal" } else { "resize or signal" };
            Err(WireError::Unexpected { expected, got })
        }
    }
}

impl Child {
    /// Signals the process group, or the program alone where it has moved to another one.
    fn signal(&self, signal: Signal) {
        let group = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let sent = group.is_some_and(|g| rustix::process::kill_process_group(g, signal).is_ok());
        if !sent {
            let _ = pidfd_send_signal(&self.pidfd, signal);
        }
    }

    /// How it ended, if it has.
    fn reap(&self) -> Option<Exit> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        match waitid(WaitId::PidFd(self.pidfd.as_fd()), options) {
            Ok(Some(status)) => Some(Exit {
                code: status.exit_status(),
                signal: status.terminating_signal(),
                timed_out: false,
            }),
            Ok(None) | Err(Errno::INTR) => None,
            // Somebody else has reaped it, which nothing of ours does; how it ended is unknown.
            Err(_) => Some(Exit { code: None, signal: None, timed_out: false }),
        }
    }
}

/// Waits for a program's end; kills it at the deadline.
pub(super) fn outlast(child: &Child, cage: &Cage, mut deadline: Option<Instant>) -> Exit {
    let mut timed_out = false;
    loop {
        let timeout = deadline.map(|d| timespec(d.saturating_duration_since(Instant::now())));
        let mut fds = [PollFd::new(&child.pidfd, PollFlags::IN)];
        let _ = poll(&mut fds, timeout.as_ref());
        if let Some(exit) = child.reap() {
            return Exit { timed_out, ..exit };
        }
        if deadline.is_some_and(|d| Instant::now() >= d) {
            (deadline, timed_out) = (None, true);
            cage.kill(child.pid);
        }
    }
}

/// Waits for a program that nobody listens to any more, in a thread of its own.
fn mind(programs: &Arc<Programs>, child: Child, cage: Cage, deadline: Option<Instant>) {
    let pid = child.pid;
    let programs = Arc::clone(programs);
    let minder = move || {
        outlast(&child, &cage, deadline);
        programs.cages.give_back(cage);
    };
    let thread = std::thread::Builder::new().name(format!("mind-{pid}")).stack_size(64 << 10);
    if let Err(error) = thread.spawn(minder) {
        crate::say!(
            "exec: no thread to wait for detached process {pid}: {error}: its time limit is not kept"
        );
    }
}

impl From<&WireError> for Failure {
    fn from(error: &WireError) -> Self {
        error
            .failure()
            .unwrap_or(Self { code: dayfly_api::agent::FailureCode::Io, message: error.to_string() })
    }
}
