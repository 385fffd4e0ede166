//! The line of a stream that was handed over ([`dayfly_relay::streams::message`]).

use dayfly_host::process::Process;
use dayfly_relay::streams::message::{EVENT_MAX_BYTES, Event, Order};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

/// How each message is sent.
pub(super) const SEND: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);

/// A process, and what is known of its streams.
#[derive(Debug)]
pub(super) struct Shared {
    pub process: Arc<Process>,
    /// The most streams that it takes.
    pub most: usize,
    /// Streams that it has, or that are being handed over.
    open: AtomicUsize,
    /// Notified when one is over.
    pub changed: Notify,
}

impl Shared {
    pub(super) fn new(process: Process, most: usize) -> Self {
        let (process, open) = (Arc::new(process), AtomicUsize::new(0));
        Self { process, most, open, changed: Notify::new() }
    }

    pub(super) fn has_streams(&self) -> bool {
        self.open.load(Ordering::SeqCst) > 0
    }
}

/// One of the streams of a process.
#[derive(Debug)]
pub(super) struct Open(Arc<Shared>);

impl Open {
    pub(super) fn new(shared: &Arc<Shared>) -> Option<Self> {
        let counted = Self(shared.clone());
        (shared.open.fetch_add(1, Ordering::SeqCst) < shared.most).then_some(counted)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
        self.0.changed.notify_one();
    }
}

/// A stream's line, on which the daemon and the process exchange messages.
#[derive(Debug)]
pub struct Line {
    line: AsyncFd<OwnedFd>,
    open: Open,
}

impl Line {
    pub(super) fn new(line: OwnedFd, open: Open) -> io::Result<Self> {
        // SAFETY: `OwnedFd` gives the same open descriptor as long as it lives, and the `AsyncFd`
        // owns it.
        let line = unsafe { AsyncFd::register(line) }?;
        Ok(Self { line, open })
    }

    /// A line whose other end is the test's, of a stream of `process`.
    #[cfg(test)]
    pub(crate) fn of_test(process: Process) -> (Self, OwnedFd) {
        let (ours, theirs) = pair().unwrap();
        let open = Open::new(&Arc::new(Shared::new(process, 1))).unwrap();
        (Self::new(ours, open).unwrap(), theirs)
    }

    pub(super) const fn shared(&self) -> &Arc<Shared> {
        &self.open.0
    }

    /// The process's next message; `None` if it has closed the line, or sends what it may not.
    pub async fn next(&self) -> Option<Event> {
        loop {
            let mut ready = self.line.readable().await.ok()?;
            // Not before, because most lines are silent for as long as the stream lasts.
            let mut message = vec![0; EVENT_MAX_BYTES + 1];
            match ready.try_io(|line| received(line.get_ref(), &mut message)) {
                Ok(got) => return Event::decode(message.get(..got.ok()?)?),
                Err(_not_ready) => {}
            }
        }
    }

    /// Sends the process a message.
    ///
    /// # Errors
    /// The process is gone, or reads nothing.
    pub fn order(&self, order: &Order) -> io::Result<()> {
        send(&self.line, &order.encode(), SEND)?;
        Ok(())
    }
}

fn received(line: &OwnedFd, into: &mut [u8]) -> io::Result<usize> {
    let mut receive = || recv(line, &mut *into, RecvFlags::DONTWAIT).map(|(_, count)| count);
    Ok(match receive() {
        // The end of the connection is reported once before the messages that came earlier, if the
        // process had not read everything (unix_release in net/unix/af_unix.c).
        Err(Errno::CONNRESET) => receive()?,
        got => got?,
    })
}

/// Sockets for datagrams that arrive whole: one of the daemon, and one of the process.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_before_the_end_is_received_although_something_was_not_read() {
        let (line, of_process) = pair().unwrap();
        send(&line, b"Q", SEND).unwrap();
        send(&of_process, b"D", SEND).unwrap();
        drop(of_process);
        let mut message = [0; 9];
        assert_eq!(received(&line, &mut message).unwrap(), 1);
        assert_eq!(message[0], b'D');
        assert_eq!(received(&line, &mut message).unwrap(), 0);
    }
}
