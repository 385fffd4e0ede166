//! Waiting until the other end of a connection is closed.

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::io;
use std::os::fd::AsFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Resolves when the other end of `connection` sends nothing more, because it was closed or shut
/// down. Bytes that arrive wake nothing: another process may read them.
///
/// It has an epoll instance of its connection alone, because the runtime's own instance reports
/// bytes too.
///
/// # Errors
/// No descriptor is free, or `connection` cannot be registered.
pub async fn hung_up(connection: impl AsFd) -> io::Result<()> {
    let ends = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&ends, connection, EventData::new_u64(0), EventFlags::RDHUP)?;
    // SAFETY: `OwnedFd` gives the same open descriptor as long as it lives, and the `AsyncFd` owns
    // the `OwnedFd`.
    let ends = unsafe { AsyncFd::register_with_interest(ends, Interest::READABLE) }?;
    ends.readable().await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;
    use tokio::time::timeout;

    #[tokio::test]
    async fn an_end_is_seen_and_bytes_are_not() {
        for is_closed in [true, false] {
            let (near, mut far) = UnixStream::pair().unwrap();
            let mut end = std::pin::pin!(hung_up(&near));
            assert!(timeout(Duration::from_millis(1), &mut end).await.is_err());
            far.write_all(b"bytes").unwrap();
            assert!(timeout(Duration::from_millis(1), &mut end).await.is_err());
            match is_closed {
                true => drop(far),
                false => far.shutdown(std::net::Shutdown::Write).unwrap(),
            }
            timeout(Duration::from_secs(120), end).await.expect("the end is not seen").unwrap();
        }
    }
}
