//! Connections to a vsock port of a guest, through its VMM.

use std::io;
use std::path::Path;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// The most bytes of the line with which a VMM answers `CONNECT`.
const GREETING_MAX: usize = 32;

/// Why a connection to a port failed.

#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// No VMM, or the VMM closed the connection ([`is_closed`]).
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The VMM answered something other than `OK <port>`.
    #[error("expected `OK <port>`, got {got:?}")]
    Greeting {
        /// The answer, escaped.
        got: String,
    },
}

/// Whether the VMM closed the connection, because no program listens on the guest's port.
#[must_use]
pub fn is_closed(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
}

/// Connects to the guest's `port` behind the vsock socket at `path`. Has no deadline: it waits
/// until the guest answers.
///
/// # Errors
/// [`DialError`].
pub async fn dial(path: &Path, port: u32) -> Result<UnixStream, DialError> {
    let mut stream = UnixStream::connect(path).await?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes()).await?;
    let mut greeting = Vec::with_capacity(GREETING_MAX);
    // Byte by byte, because the bytes after the line are from the guest.
    while greeting.last() != Some(&b'\n') && greeting.len() < GREETING_MAX {
        greeting.push(stream.read_u8().await?);
    }
    let own = greeting.strip_prefix(b"OK ").and_then(|g| g.strip_suffix(b"\n"));
    if own.is_some_and(|p| !p.is_empty() && p.iter().all(u8::is_ascii_digit)) {
        Ok(stream)
    } else {
        Err(DialError::Greeting { got: greeting.escape_ascii().to_string() })
    }
}
