//! The daemon's side of streams.

use dayfly_relay::streams::message::{Event, Handed, Heard, LINE_MAX_BYTES, Order, Rules};
use dayfly_relay::streams::{MAX_STREAMS, Streams};
use rustix::io::{Errno, IoSlice};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, recv, send, sendmsg, socketpair,
};
use std::io::PipeWriter;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Kinds of frames that pass, and one that ends a stream.
pub const OUT: u8 = 5;
pub const EXIT: u8 = 9;
pub const RULES: Rules =
    Rules { passed: 1 << OUT, ending: 1 << EXIT, passed_max: 256 << 10, ending_max: 1 << 10 };

pub fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap();
    [&length.to_le_bytes(), [kind].as_slice(), body].concat()
}

/// Only a test that hangs takes this long.
pub const HANG: Duration = Duration::from_secs(120);

pub fn plain() -> Handed {
    Handed { rules: RULES, farewell: b"no daemon".to_vec(), ..Handed::default() }
}

/// A pair of sockets for datagrams.
pub fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC;
    let (own, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    set_socket_timeout(&own, Timeout::Recv, Some(HANG)).unwrap();
    (own, other)
}

/// A stream, seen from outside.
pub struct Handover {
    /// The client's end of its connection.
    pub client: UnixStream,
    /// The agent's end of its connection.
    pub agent: UnixStream,
    /// The daemon's end of the line.
    pub line: Line,
}

/// The daemon's end of a line.
pub struct Line(pub OwnedFd);

impl Line {
    /// The next message of the process; `None`: it has closed the line.
    pub fn next(&self) -> Option<Event> {
        let mut message = vec![0; LINE_MAX_BYTES];
        loop {
            match recv(&self.0, &mut *message, RecvFlags::empty()) {
                Err(Errno::AGAIN) => panic!("the process says nothing"),
                // It has closed the line with unread orders. What it said before comes next.
                Err(Errno::CONNRESET) => {}
                Ok((0, _)) | Err(_) => return None,
                Ok((count, _)) => return Some(Event::decode(&message[..count]).unwrap()),
            }
        }
    }

    pub fn order(&self, order: &Order) {
        send(&self.0, &order.encode(), SendFlags::NOSIGNAL).unwrap();
    }
}

/// Sends a hand-over, with these descriptors.
pub fn hand(control: &OwnedFd, message: &[u8], fds: &[OwnedFd]) {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(control, &[IoSlice::new(message)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
}

fn nonblocking(socket: UnixStream) -> OwnedFd {
    socket.set_nonblocking(true).unwrap();
    socket.into()
}

/// Hands over a stream, which is taken or not.
pub fn hand_over(control: &OwnedFd, handed: &Handed) -> Handover {
    let (client, of_client) = UnixStream::pair().unwrap();
    let (agent, of_agent) = UnixStream::pair().unwrap();
    let (line, of_line) = pair();
    let fds = [nonblocking(of_client), nonblocking(of_agent), of_line];
    hand(control, &handed.encode(), &fds);
    let stream = Handover { client, agent, line: Line(line) };
    // A break shows as an error, and not as a test that hangs.
    for end in [&stream.client, &stream.agent] {
        end.set_read_timeout(Some(HANG)).unwrap();
        end.set_write_timeout(Some(HANG)).unwrap();
    }
    stream
}

/// Asks the question of this number, and returns the answer.
pub fn asked(line: &Line, question: u64) -> Heard {
    line.order(&Order::Ask(question));
    match line.next() {
        Some(Event::Heard { question: of, heard }) if of == question => heard,
        other => panic!("question {question}: {other:?}"),
    }
}

/// A process of streams, as a thread of the test.
pub struct Running {
    pub control: Option<OwnedFd>,
    pub vmm: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

pub fn running() -> Running {
    running_with(MAX_STREAMS)
}

pub fn running_with(most: usize) -> Running {
    let (ended, vmm) = std::io::pipe().unwrap();
    let (control, of_process) = pair();
    let mut streams = Streams::new(of_process, ended.into(), most).unwrap();
    let thread = std::thread::spawn(move || streams.serve().unwrap());
    Running { control: Some(control), vmm: Some(vmm), thread: Some(thread) }
}

impl Running {
    /// Hands over a stream, and waits until it is taken.
    pub fn take(&self, handed: &Handed) -> Handover {
        let stream = self.offer(handed);
        stream.line.order(&Order::Go);
        stream
    }

    /// As [`Self::take`], but the daemon has not answered yet.
    pub fn offer(&self, handed: &Handed) -> Handover {
        let stream = hand_over(self.control.as_ref().unwrap(), handed);
        assert_eq!(stream.line.next(), Some(Event::Taken));
        stream
    }

    /// The end of the daemon.
    pub fn without_daemon(&mut self) {
        drop(self.control.take());
    }

    /// Waits for the end of the process.
    pub fn join(&mut self) {
        let thread = self.thread.take().unwrap();
        let begun = Instant::now();
        while !thread.is_finished() {
            assert!(begun.elapsed() < HANG, "the process does not end");
            std::thread::yield_now();
        }
        thread.join().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop((self.control.take(), self.vmm.take()));
        if self.thread.is_some() && !std::thread::panicking() {
            self.join();
        }
    }
}
