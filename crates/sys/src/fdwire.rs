//! Bytes with descriptors over a unix socket (SCM_RIGHTS, unix(7)): one system call each. The
//! framing of messages is the caller's.

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The most descriptors of one system call. The kernel's limit SCM_MAX_FD is 253.
pub const MAX_FDS: usize = 250;
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// Sends `bytes` with `fds` by one sendmsg(2), without SIGPIPE; tries again after a signal. Returns
/// the number of bytes sent.
///
/// # Errors
/// `InvalidInput` for more than [`MAX_FDS`] descriptors; else the error of sendmsg(2).
#[inline]
pub fn send(to: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    // The buffer, which is aligned, may have space for more than `MAX_FDS`.
    if fds.len() > MAX_FDS
        || (!fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)))
    {
        let text = format!("{} descriptors: at most {MAX_FDS}", fds.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(rustix::io::retry_on_intr(|| {
        sendmsg(&to, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    })?)
}

/// The result of [`receive`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Bytes received; 0 if the other side has closed.
    pub bytes: usize,
    /// The packet has more bytes than the buffer; they are lost.
    pub truncated: bool,
    /// The packet has more descriptors than [`MAX_FDS`], or than this process may open; they are
    /// lost.
    pub fds_truncated: bool,
}

/// Receives bytes by one recvmsg(2). Appends the descriptors, which are close-on-exec, to `fds`.
///
/// # Errors
/// The error of recvmsg(2); `Interrupted` after a signal.
#[inline]
pub fn receive(from: impl AsFd, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(from, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    Ok(Received {
        bytes: received.bytes,
        truncated: received.flags.contains(ReturnFlags::TRUNC),
        fds_truncated: received.flags.contains(ReturnFlags::CTRUNC),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn descriptors_arrive_with_their_bytes_up_to_the_limit() {
        let (here, there) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let file = tempfile::tempfile().unwrap();
        let mut fds = Vec::new();
        for count in [0, 1, MAX_FDS] {
            assert_eq!(send(&here, b"bytes", &vec![file.as_fd(); count]).unwrap(), 5);
            let mut buffer = [0; 8];
            fds.clear();
            let got = receive(&there, &mut buffer, &mut fds).unwrap();
            assert_eq!(got, Received { bytes: 5, truncated: false, fds_truncated: false });
            assert_eq!((&buffer[..5], fds.len()), (&b"bytes"[..], count));
        }
        let many = vec![file.as_fd(); MAX_FDS + 1];
        assert_eq!(send(&here, b"x", &many).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        send(&here, b"too long", &[]).unwrap();
        assert!(receive(&there, &mut [0; 3], &mut fds).unwrap().truncated);
        drop(here);
        assert_eq!(receive(&there, &mut [0; 3], &mut fds).unwrap().bytes, 0);
    }
}
