//! The daemon's end of the connection to a packer.

use crate::wire::{self, Begin, FromPacker, MAX_FDS, pack, receive, sheet};
use dayfly_store::{Classified, RamJob, TakeFrame, WorkError};
use dayfly_units::error::chain;
use dayfly_units::text::{LONG, escaped};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::MemfdFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// The longest wait before the time limit and the caller are asked again.
const WAIT: Duration = Duration::from_secs(1);
/// The shortest wait: zero would be without limit.
const LEAST_WAIT: Duration = Duration::from_millis(1);
/// The longest time limit, which every clock can add.
const MOST_WITHIN: Duration = Duration::from_secs(1 << 32);

/// A packer that may be asked to work.
pub struct Client {
    socket: OwnedFd,
    buffer: Vec<u8>,
    /// When all of its work has to be done.
    until: Instant,
    within: Duration,
    is_wanted: Box<dyn Fn() -> bool + Send>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("within", &self.within).finish_non_exhaustive()
    }
}

fn failed(doing: &'static str) -> impl FnOnce(io::Error) -> WorkError {
    move |e| WorkError::new(format!("{doing}: {}", chain(&e)))
}

impl Client {
    /// A packer at the other end of `socket`. All of its work has to be done `within` this time,
    /// because each limit of a single answer can be stretched without end. A call fails about a
    /// second after `is_wanted` returns false.
    #[must_use]
    pub fn new(
        socket: OwnedFd,
        within: Duration,
        is_wanted: impl Fn() -> bool + Send + 'static,
    ) -> Self {
        let until = Instant::now() + within.min(MOST_WITHIN);
        Self { socket, buffer: Vec::new(), until, within, is_wanted: Box::new(is_wanted) }
    }

    /// Sets how long the next call on the socket may wait.
    fn may_wait(&self, to: Timeout) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let text = format!("it has not done its work within {} s", self.within.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        if !(self.is_wanted)() {
            return Err(io::Error::other("nothing waits for its work any more"));
        }
        Ok(set_socket_timeout(&self.socket, to, Some(left.clamp(LEAST_WAIT, WAIT)))?)
    }

    fn send(&self, packet: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        loop {
            self.may_wait(Timeout::Send)?;
            match wire::send(&self.socket, packet, fds) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                sent => return sent,
            }
        }
    }

    /// As [`dayfly_store::RamWork::classify`].
    ///
    /// # Errors
    /// As there.
    pub fn classify(
        &mut self,
        job: &RamJob<'_>,
        found: &mut TakeFrame<'_>,
    ) -> Result<Classified, WorkError> {
        self.send_job(job).map_err(failed("sending it the VM's memory"))?;
        loop {
            match self.next("hashing memory")? {
                FromPacker::Frames(frames) => {
                    frames.into_iter().try_for_each(|(frame, class)| found(frame, class))?;
                }
                FromPacker::Classified(done) => return Ok(done),
                other @ FromPacker::Written(_) => return Err(unexpected("frames", &other)),
                FromPacker::Failed { text, is_no_space } => {
                    return Err(reported("hashing memory", &text, is_no_space));
                }
            }
        }
    }

    fn send_job(&self, job: &RamJob<'_>) -> io::Result<()> {
        let mut written = File::from(rustix::fs::memfd_create("sheet", MemfdFlags::CLOEXEC)?);
        written.write_all(&sheet(job.free, job.hints))?;
        let sheet = dayfly_sys::reopen::read_only(&written)?;
        drop(written);
        let known = |disk: &dayfly_store::RamDisk| (disk.digest, disk.index.is_some());
        let begin = Begin {
            tenant: job.tenant.to_string(),
            free: job.free.len() as u64,
            hints: job.hints.len() as u64,
            disks: job.disks.iter().map(|files| files.iter().map(known).collect()).collect(),
        };
        let mut packet = vec![b'b'];
        serde_json::to_writer(&mut packet, &begin)?;
        self.send(&packet, &[job.memory.as_fd(), sheet.as_fd()])?;
        let mut files: Vec<BorrowedFd<'_>> = Vec::new();
        for disk in job.disks.iter().flatten() {
            files.push(disk.file.as_fd());
            files.extend(disk.index.as_ref().map(AsFd::as_fd));
        }
        files.chunks(MAX_FDS).try_for_each(|some| self.send(b"f", some))
    }

    /// As [`dayfly_store::PackWork::begin`].
    ///
    /// # Errors
    /// As there.
    pub fn begin(&mut self, number: u32, frames: &[u32], into: &File) -> Result<(), WorkError> {
        self.send(&pack(number, frames), &[into.as_fd()]).map_err(failed("asking it for a pack"))
    }

    /// As [`dayfly_store::PackWork::written`].
    ///
    /// # Errors
    /// As there.
    pub fn written(&mut self) -> Result<u32, WorkError> {
        match self.next("storing new pages")? {
            FromPacker::Written(number) => Ok(number),
            FromPacker::Failed { text, is_no_space } => {
                Err(reported("storing new pages", &text, is_no_space))
            }
            other => Err(unexpected("a pack that is written", &other)),
        }
    }

    fn next(&mut self, doing: &'static str) -> Result<FromPacker, WorkError> {
        // Descriptors that it sends are closed.
        let mut fds = Vec::new();
        loop {
            self.may_wait(Timeout::Recv).map_err(failed(doing))?;
            return match receive(&self.socket, &mut self.buffer, &mut fds) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
                Err(e) => Err(failed(doing)(e)),
                Ok(None) => Err(WorkError::new(format!("{doing}: it has ended"))),
                Ok(Some(packet)) => FromPacker::decode(packet)
                    .ok_or_else(|| WorkError::new(format!("{doing}: its message cannot be read"))),
            };
        }
    }
}

/// A failure that the packer reports.
fn reported(doing: &str, text: &str, is_no_space: bool) -> WorkError {
    let text = format!("{doing}: it reports: {}", escaped(text, LONG));
    WorkError { text, is_no_space }
}

fn unexpected(expected: &str, got: &FromPacker) -> WorkError {
    let got = match got {
        FromPacker::Frames(_) => "frames",
        FromPacker::Classified(_) => "the end of the frames",
        FromPacker::Written(_) => "a pack that is written",
        FromPacker::Failed { .. } => "a failure",
    };
    WorkError::new(format!("expected {expected}, got {got}"))
}
