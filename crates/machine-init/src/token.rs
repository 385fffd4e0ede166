//! The secret at the start of each connection to the machine's control ports.
//!
//! The supervisor makes one token per start, and sends it to the machine's init as the first line
//! of the control line. The control line is a virtio-serial port that only root of the machine can
//! open. The token is in no file, no argument and no environment.

use crate::proto::TOKEN_BYTES;
use crate::streams::timespec;
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// The secret of one start.
#[derive(Clone)]
pub struct Token(blake3::Hash);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Token {
    /// Makes a token from random bytes of the kernel.
    ///
    /// # Errors
    /// The system's error.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; TOKEN_BYTES];
        let mut have = 0;
        while have < bytes.len() {
            let flags = rustix::rand::GetRandomFlags::empty();
            have += rustix::rand::getrandom(&mut bytes[have..], flags)?;
        }
        Ok(Self(blake3::Hash::from_bytes(bytes)))
    }

    /// Decodes the text of [`Token::to_hex`].
    ///
    /// # Errors
    /// `InvalidData` for anything but 64 hexadecimal digits. The error does not repeat the text.
    pub fn from_hex(text: &str) -> io::Result<Self> {
        blake3::Hash::from_hex(text).map(Self).map_err(|_| {
            let expected = format!("token: expected {} hexadecimal digits", 2 * TOKEN_BYTES);
            io::Error::new(io::ErrorKind::InvalidData, expected)
        })
    }

    /// The token as 64 hexadecimal digits.
    #[must_use]
    pub fn to_hex(&self) -> String {
        self.0.to_hex().to_string()
    }

    /// Writes the token as the first bytes of a connection.
    ///
    /// # Errors
    /// The stream's errors.
    pub fn send(&self, stream: &mut impl Write) -> io::Result<()> {
        stream.write_all(self.0.as_bytes())
    }

    /// Reads the token of a connection, and not one byte more.
    ///
    /// # Errors
    /// `PermissionDenied` if the bytes differ, `TimedOut` if they do not arrive within `within`,
    /// `UnexpectedEof` if the connection ends before. The caller closes the connection without an
    /// answer.
    pub fn admit(&self, stream: &impl AsFd, within: Duration) -> io::Result<()> {
        let deadline = Instant::now() + within;
        let mut bytes = [0; TOKEN_BYTES];
        let mut have = 0;
        while have < bytes.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut wait = [PollFd::new(stream, PollFlags::IN)];
            match poll(&mut wait, Some(&timespec(left))) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            }
            match rustix::io::read(stream, &mut bytes[have..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => have += count,
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                Err(e) => return Err(e.into()),
            }
        }
        // `blake3::Hash` compares in constant time.
        if blake3::Hash::from_bytes(bytes) == self.0 {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "the connection began with a wrong token",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    const LONG: Duration = Duration::from_secs(240);

    /// The result of `admit` for a connection that sends these bytes and ends.
    fn said_to(token: &Token, bytes: &[u8]) -> io::Result<()> {
        let (mut client, server) = UnixStream::pair().unwrap();
        client.write_all(bytes).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        token.admit(&server, LONG)
    }

    #[test]
    fn the_right_token_is_admitted_and_what_follows_is_left() {
        let token = Token::random().unwrap();
        let (mut client, mut server) = UnixStream::pair().unwrap();
        token.send(&mut client).unwrap();
        client.write_all(b"request").unwrap();
        drop(client);
        token.admit(&server, LONG).unwrap();
        let mut rest = String::new();
        server.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "request");
    }

    #[test]
    fn a_token_in_pieces_is_admitted() {
        let token = Token::random().unwrap();
        let mut bytes = Vec::new();
        token.send(&mut bytes).unwrap();
        let (mut client, server) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let admitted = scope.spawn(|| token.admit(&server, LONG));
            for byte in bytes {
                client.write_all(&[byte]).unwrap();
            }
            admitted.join().unwrap().unwrap();
        });
    }

    #[test]
    fn every_changed_bit_and_every_missing_byte_is_refused() {
        let token = Token::random().unwrap();
        let mut good = Vec::new();
        token.send(&mut good).unwrap();
        assert_eq!(good.len(), TOKEN_BYTES);
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let kind = said_to(&token, &bad).unwrap_err().kind();
            assert_eq!(kind, io::ErrorKind::PermissionDenied, "bit {bit}");
        }
        for length in 0..good.len() {
            let kind = said_to(&token, &good[..length]).unwrap_err().kind();
            assert_eq!(kind, io::ErrorKind::UnexpectedEof, "{length} bytes");
        }
        said_to(&token, &good).unwrap();
    }

    #[test]
    fn a_connection_that_says_too_little_is_given_up() {
        let token = Token::random().unwrap();
        let (mut client, server) = UnixStream::pair().unwrap();
        client.write_all(&[7; TOKEN_BYTES - 1]).unwrap();
        let kind = token.admit(&server, Duration::from_millis(1)).unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::TimedOut);
    }

    #[test]
    fn tokens_differ_are_not_printed_and_come_back_from_hex() {
        let (one, two) = (Token::random().unwrap(), Token::random().unwrap());
        assert_ne!(one.to_hex(), two.to_hex());
        assert_eq!(Token::from_hex(&one.to_hex()).unwrap().to_hex(), one.to_hex());
        assert!(!format!("{one:?}").contains(&one.to_hex()[..8]));
        for bad in ["", "00", &"0".repeat(63), &"0".repeat(65), &"g".repeat(64)] {
            assert!(Token::from_hex(bad).is_err(), "{bad:?}");
        }
    }
}
