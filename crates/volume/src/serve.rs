//! The stream and the threads.
//!
//! ```text
//! stream ─▶ reader ─▶ queue (bounded) ─▶ workers ─▶ stream (one whole answer at a time)
//!             └ FORGET, INTERRUPT, INIT: at once
//! ```
//!
//! If the guest does not read its answers, the workers wait, then the queue is full, then the
//! reader waits: nothing grows.

use crate::message::{Message, Reply};
use crate::ops::{Interrupted, Volume};
use crate::options::{Options, StartError};
use crate::own::OwnFds;
use crate::wire::{IN_HEADER_BYTES, InHeader, InterruptIn, MAX_MESSAGE_BYTES, op};
use dayfly_units::sync::lock;
use rustix::fd::OwnedFd;
use rustix::net::{Shutdown, shutdown};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier, Condvar, Mutex, PoisonError};
use zerocopy::FromBytes;

/// Operations at once.
pub const WORKERS: usize = 8;
/// Messages that wait for a worker.
const MAX_QUEUED: usize = 64;
/// Bytes of messages that wait for a worker, beside one that may be longer.
const MAX_QUEUED_BYTES: usize = 4 << 20;

/// Why serving has ended before the stream.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// It has not begun.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The guest has sent what is no message.
    #[error(
        "message of the guest: expected {IN_HEADER_BYTES} to {MAX_MESSAGE_BYTES} bytes, got {0}"
    )]
    Length(u32),
    /// The stream failed.
    #[error("reading the guest's messages")]
    Stream(#[source] io::Error),
}

/// A message that waits for a worker.
struct Job {
    bytes: Vec<u8>,
    interrupted: Arc<Interrupted>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    bytes: usize,
    ended: bool,
    /// Operations that wait or run, by their numbers.
    pending: HashMap<u64, Arc<Interrupted>>,
}

impl Queue {
    fn is_full(&self) -> bool {
        self.jobs.len() >= MAX_QUEUED || self.bytes >= MAX_QUEUED_BYTES
    }
}

struct Server {
    volume: Volume,
    stream: File,
    /// Held while an answer is written.
    writing: Mutex<()>,
    queue: Mutex<Queue>,
    /// A job came, or the end.
    came: Condvar,
    /// A job was taken, or the end.
    taken: Condvar,
}

/// Serves a folder until the stream ends. The process keeps its user, and its umask applies to what
/// the guest makes; the program sets it to 0.
///
/// # Errors
/// [`ServeError`].
pub fn serve(stream: OwnedFd, folder: OwnedFd, options: Options) -> Result<(), ServeError> {
    let step = |what| move |e: rustix::io::Errno| StartError::Step { what, source: e.into() };
    let own = OwnFds::by_path().map_err(step("opening /proc/self/fd"))?;
    serve_after(stream, folder, own, options, || Ok(()))
}

/// As [`serve`]; when all threads run, and before the first message is read, calls `ready`.
///
/// # Errors
/// [`ServeError`].
pub fn serve_after(
    stream: OwnedFd,
    folder: OwnedFd,
    own: OwnFds,
    options: Options,
    ready: impl FnOnce() -> io::Result<()>,
) -> Result<(), ServeError> {
    let volume = Volume::new(folder, own, options)?;
    let step = |what| move |source| StartError::Step { what, source };
    rustix::io::ioctl_fionbio(&stream, false)
        .map_err(|e| step("making the stream wait")(e.into()))?;
    let server = Server {
        volume,
        stream: stream.into(),
        writing: Mutex::new(()),
        queue: Mutex::default(),
        came: Condvar::new(),
        taken: Condvar::new(),
    };
    let started = Barrier::new(WORKERS + 1);
    std::thread::scope(|scope| {
        for n in 0..WORKERS {
            let work = || {
                let _end = EndOnPanic(&server);
                started.wait();
                server.work();
            };
            let thread = std::thread::Builder::new().name(format!("worker-{n}"));
            if let Err(source) = thread.spawn_scoped(scope, work) {
                // The threads that were started wait for ever.
                say(&format!("starting a thread: {source}"));
                std::process::exit(1);
            }
        }
        started.wait();
        let result = match ready() {
            Ok(()) => server.read(),
            Err(source) => Err(step("the filter of system calls")(source).into()),
        };
        server.end();
        result
    })
}

/// Writes a line to stderr, if there is one.
pub fn say(line: &str) {
    let _ = writeln!(io::stderr(), "dayfly-volume: {line}");
}

/// A worker that panics ends all: an operation without an answer would hang the guest's program.
struct EndOnPanic<'a>(&'a Server);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.end();
        }
    }
}

impl Server {
    /// Ends all threads: what waits is not done any more.
    fn end(&self) {
        let mut queue = lock(&self.queue);
        queue.ended = true;
        queue.jobs.clear();
        for interrupted in queue.pending.values() {
            interrupted.0.store(true, Ordering::Relaxed);
        }
        drop(queue);
        self.came.notify_all();
        self.taken.notify_all();
        // Wakes the reader, and workers that wait for the guest to read. It fails if the stream has
        // ended, as intended.
        let _ = shutdown(&self.stream, Shutdown::Both);
    }

    /// Reads messages until the stream ends.
    fn read(&self) -> Result<(), ServeError> {
        let mut reply = Reply::default();
        loop {
            let Some(bytes) = read_message(&self.stream)? else { return Ok(()) };
            let Some(message) = Message::parse(&bytes) else { return Ok(()) };
            match message.header.opcode {
                op::INTERRUPT => {
                    if let Ok(InterruptIn { unique }) = message.body().take() {
                        self.interrupt(unique);
                    }
                }
                op::FORGET | op::BATCH_FORGET | op::INIT => {
                    let now = Interrupted::default();
                    if let Some(answer) = self.volume.handle(message, &mut reply, &now)
                        && self.send(answer).is_err()
                    {
                        return Ok(());
                    }
                }
                _ => {
                    if !self.push(message.header, bytes) {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// An operation that waits or runs ends early, if it can. One that has ended has its answer
    /// already: the guest needs no other one.
    fn interrupt(&self, unique: u64) {
        if let Some(interrupted) = lock(&self.queue).pending.get(&unique) {
            interrupted.0.store(true, Ordering::Relaxed);
        }
    }

    /// Gives a message to the workers. Returns whether there are any.
    fn push(&self, header: InHeader, bytes: Vec<u8>) -> bool {
        let mut queue = lock(&self.queue);
        while queue.is_full() && !queue.ended {
            queue = self.taken.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        if queue.ended {
            return false;
        }
        let interrupted = Arc::new(Interrupted::default());
        queue.pending.insert(header.unique, interrupted.clone());
        queue.bytes += bytes.len();
        queue.jobs.push_back(Job { bytes, interrupted });
        drop(queue);
        self.came.notify_one();
        true
    }

    fn take(&self) -> Option<Job> {
        let mut queue = lock(&self.queue);
        loop {
            if queue.ended {
                return None;
            }
            if let Some(job) = queue.jobs.pop_front() {
                queue.bytes -= job.bytes.len();
                drop(queue);
                self.taken.notify_one();
                return Some(job);
            }
            queue = self.came.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self) {
        let mut reply = Reply::default();
        while let Some(job) = self.take() {
            let Some(message) = Message::parse(&job.bytes) else { continue };
            let answer = self.volume.handle(message, &mut reply, &job.interrupted);
            self.forget(message.header.unique, &job.interrupted);
            let sent = answer.map_or(Ok(()), |answer| self.send(answer));
            if sent.is_err() {
                self.end();
            }
        }
    }

    /// The operation has ended; a hostile guest may have used its number for another one.
    fn forget(&self, unique: u64, interrupted: &Arc<Interrupted>) {
        let mut queue = lock(&self.queue);
        if queue.pending.get(&unique).is_some_and(|other| Arc::ptr_eq(other, interrupted)) {
            queue.pending.remove(&unique);
        }
    }

    fn send(&self, message: &[u8]) -> io::Result<()> {
        let _writing = lock(&self.writing);
        (&self.stream).write_all(message)
    }
}

/// The next message. `None` at the end of the stream, also within a message.
fn read_message(mut stream: &File) -> Result<Option<Vec<u8>>, ServeError> {
    let mut read = |part: &mut [u8]| match stream.read_exact(part) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(e) if e.kind() == io::ErrorKind::ConnectionReset => Ok(false),
        Err(e) => Err(ServeError::Stream(e)),
    };
    let mut header = [0; IN_HEADER_BYTES];
    if !read(&mut header)? {
        return Ok(None);
    }
    let len = InHeader::read_from_bytes(&header).map_or(0, |header| header.len);
    let count = usize::try_from(len).unwrap_or(usize::MAX);
    if !(IN_HEADER_BYTES..=MAX_MESSAGE_BYTES).contains(&count) {
        return Err(ServeError::Length(len));
    }
    let mut bytes = vec![0; count];
    bytes[..IN_HEADER_BYTES].copy_from_slice(&header);
    Ok(read(&mut bytes[IN_HEADER_BYTES..])?.then_some(bytes))
}
