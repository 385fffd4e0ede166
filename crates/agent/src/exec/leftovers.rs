//! Streams of programs that have ended while processes that they left behind still write.
//!
//! A program may leave a process in the background, which has the program's standard output. If
//! the agent closed its end, that process would die of SIGPIPE at its next line. So one thread
//! reads such streams to their end, and discards what it reads.

use super::streams::Streams;
use dayfly_units::sync::lock;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

/// Maximum number of streams. Beyond it, the oldest is closed.
const MOST: usize = 512;
/// Maximum bytes per read.
const CHUNK_BYTES: usize = 16 << 10;

/// The streams, and the thread that reads them, which is started with the first one.
#[derive(Debug, Default)]
pub struct Leftovers(Mutex<Option<Shared>>);

#[derive(Debug, Clone)]
struct Shared {
    new: Arc<Mutex<Vec<OwnedFd>>>,
    /// A byte in this pipe wakes the thread.
    wake: Arc<OwnedFd>,
}

impl Leftovers {
    /// Reads the output of a program that has ended, until nothing can write to it any more.
    /// Streams that are at their end, and terminals, are closed.
    pub(crate) fn keep(&self, streams: Streams) {
        if streams.terminal {
            return;
        }
        let open = [streams.stdout, streams.stderr].into_iter().flatten().filter(is_held);
        let open: Vec<OwnedFd> = open.collect();
        if open.is_empty() {
            return;
        }
        let mut shared = lock(&self.0);
        if shared.is_none() {
            *shared = start().inspect_err(|e| crate::say!("exec: reading what is left: {e}")).ok();
        }
        if let Some(shared) = shared.as_ref() {
            lock(&shared.new).extend(open);
            // A full pipe wakes the thread as well.
            let _ = rustix::io::write(&*shared.wake, &[0]);
        }
    }
}

/// Whether a process can still write to `stream`.
fn is_held(stream: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    let now = crate::wire::timespec(std::time::Duration::ZERO);
    !matches!(poll(&mut fds, Some(&now)), Ok(1..) if fds[0].revents().contains(PollFlags::HUP)
        && !fds[0].revents().contains(PollFlags::IN))
}

/// Starts the thread.
fn start() -> Result<Shared, Errno> {
    let (woken, wake) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let new = Arc::new(Mutex::new(Vec::new()));
    let shared = Shared { new: Arc::clone(&new), wake: Arc::new(wake) };
    let thread = std::thread::Builder::new().name("leftovers".into()).stack_size(64 << 10);
    thread
        .spawn(move || read_all(&woken, &new))
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?;
    Ok(shared)
}

fn read_all(woken: &OwnedFd, new: &Mutex<Vec<OwnedFd>>) {
    let mut open: Vec<OwnedFd> = Vec::new();
    let mut nowhere = vec![0; CHUNK_BYTES];
    loop {
        let mut fds: Vec<PollFd<'_>> =
            [woken].into_iter().chain(&open).map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::INTR | Errno::AGAIN) => continue,
            Err(error) => {
                // Without memory for poll(2): the processes get SIGPIPE.
                crate::say!("exec: waiting for what is left: {error}");
                open.clear();
                continue;
            }
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let mut ready = ready.into_iter();
        if ready.next() == Some(true) {
            let _ = rustix::io::read(woken, &mut nowhere[..]);
        }
        open.retain(|stream| {
            if !ready.next().unwrap_or(false) {
                return true;
            }
            let read = rustix::io::read(stream, &mut nowhere[..]);
            matches!(read, Ok(1..) | Err(Errno::INTR | Errno::AGAIN))
        });
        open.append(&mut lock(new));
        let surplus = open.len().saturating_sub(MOST);
        open.drain(..surplus);
    }
}
