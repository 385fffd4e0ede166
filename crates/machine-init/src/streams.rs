//! Joins two byte streams; each direction is copied until its end.

use rustix::net::Shutdown;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Buffer size in bytes of each socket. On a busy host every hop waits for its turn on a CPU, and
/// larger buffers need fewer turns.
const BUFFER_BYTES: usize = 4 << 20;

/// A duration as poll(2) takes it.
#[must_use]
pub fn timespec(time: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}

/// Enlarges the socket's buffers. The size may exceed the system's limit only if this process has
/// that right.
pub fn widen(socket: &impl AsFd) {
    use rustix::net::sockopt;
    let forced = sockopt::set_socket_send_buffer_size_force(socket, BUFFER_BYTES).is_ok()
        && sockopt::set_socket_recv_buffer_size_force(socket, BUFFER_BYTES).is_ok();
    if !forced {
        // A failure costs only speed.
        let _ = sockopt::set_socket_send_buffer_size(socket, BUFFER_BYTES);
        let _ = sockopt::set_socket_recv_buffer_size(socket, BUFFER_BYTES);
    }
}

/// Copies in both directions. The end of one direction is passed on as a half-close; an error ends
/// both.
///
/// # Errors
/// The first error of either direction, after both have ended.
pub fn join_streams(a: &(impl AsFd + Sync), b: &(impl AsFd + Sync)) -> io::Result<()> {
    let (a, b) = (a.as_fd(), b.as_fd());
    std::thread::scope(|scope| {
        let there = std::thread::Builder::new()
            .stack_size(256 << 10)
            .spawn_scoped(scope, move || copy(a, b))?;
        let back = copy(b, a);
        let there = there.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()));
        there.and(back)
    })
}

fn copy(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
    let result = copy_until_end(from, to);
    if result.is_ok() {
        let _ = rustix::net::shutdown(to, Shutdown::Write);
    } else {
        let _ = rustix::net::shutdown(to, Shutdown::Both);
        let _ = rustix::net::shutdown(from, Shutdown::Both);
    }
    result
}

fn copy_until_end(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
    let mut buffer = vec![0; 256 << 10];
    loop {
        let count = match rustix::io::read(from, &mut buffer[..]) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
        };
        let mut rest = buffer.get(..count).unwrap_or_default();
        while !rest.is_empty() {
            // MSG_NOSIGNAL: if the reader has disconnected, the call returns an error and no
            // SIGPIPE kills this process.
            match rustix::net::send(to, rest, rustix::net::SendFlags::NOSIGNAL) {
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn bytes_and_ends_pass_both_ways() {
        let (mut client, a) = UnixStream::pair().unwrap();
        let (b, mut server) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let joined = scope.spawn(|| join_streams(&a, &b));
            client.write_all(b"question").unwrap();
            client.shutdown(std::net::Shutdown::Write).unwrap();
            let mut text = String::new();
            server.read_to_string(&mut text).unwrap();
            assert_eq!(text, "question");
            // The other direction still works after one has ended.
            server.write_all(b"answer").unwrap();
            drop(server);
            text.clear();
            client.read_to_string(&mut text).unwrap();
            assert_eq!(text, "answer");
            joined.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_side_that_leaves_ends_the_other() {
        let (client, a) = UnixStream::pair().unwrap();
        let (b, mut server) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let joined = scope.spawn(|| join_streams(&a, &b));
            drop(client);
            // More bytes than all buffers hold: without the error this would block for ever.
            let sent = server.write_all(&vec![0; 64 << 20]);
            assert!(sent.is_err());
            assert!(joined.join().unwrap().is_err());
        });
    }
}
