//! Connections to vsock ports of guests: made over the VM's unix socket, then relayed byte by byte.

use crate::daemon::Daemon;
use crate::error::{Fault, Outcome};
use crate::vm::Vm;
use bytes::BytesMut;
use dayfly_api::agent::{PORT, READY_PORT};
use dayfly_api::types::ErrorCode;
use std::future::Future;
use std::io;
use std::path::Path;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// The longest answer to `CONNECT <port>\n`.
const GREETING_MAX: usize = 32;
/// Read at once in either direction.
const CHUNK_BYTES: usize = 64 << 10;

/// Why there is no connection to a port.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// No VMM, or it closed the connection ([`is_closed`]).
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The VMM said something else than it should.
    #[error("expected `OK <port>`, got {got:?}")]
    Greeting {
        /// What, escaped.
        got: String,
    },
}

/// Whether the VMM was there and closed the connection: nobody listens on the guest's port.
#[must_use]
pub fn is_closed(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
}

/// Connects to the guest's `port` behind the vsock socket at `path`. Takes as long as the guest does.
///
/// # Errors
/// [`DialError`].
pub async fn dial(path: &Path, port: u32) -> Result<UnixStream, DialError> {
    let mut stream = UnixStream::connect(path).await?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes()).await?;
    let mut greeting = Vec::with_capacity(GREETING_MAX);
    // Byte by byte: what follows the line is the guest's.
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

/// Whether clients may connect to `port`.
///
/// # Errors
/// It is none, or not theirs.
pub fn check(port: u32) -> Outcome<()> {
    match port {
        0 => Err(Fault::invalid(format_args!("port: expected a number from 1 to {}, got 0", u32::MAX))),
        PORT => Err(Fault::invalid(format_args!(
            "port {PORT}: is the guest agent's own; exec, cp and run speak to it, programs listen on other ports"
        ))),
        READY_PORT => Err(Fault::invalid(format_args!(
            "port {READY_PORT}: is kept for the guest's agent; programs listen on other ports"
        ))),
        _ => Ok(()),
    }
}

/// A connection to a port of a running VM.
///
/// # Errors
/// The port is not for clients, the VM does not run, nobody listens there, or the guest does not answer in time.
pub async fn connect(daemon: &Daemon, vm: &Vm, port: u32) -> Outcome<UnixStream> {
    check(port)?;
    vm.phase().serves("connect to a port of")?;
    let within = daemon.config.deadlines.port;
    let name = &vm.name;
    let refused = match timeout(within, dial(&vm.dir.vsock(), port)).await {
        Ok(Ok(stream)) => return Ok(stream),
        Ok(Err(e)) => e,
        Err(_) => {
            return Err(Fault::new(
                ErrorCode::Timeout,
                format_args!(
                    "VM {name}, port {port}: the guest did not answer within {} ms; `dayfly logs {name}` shows its console",
                    within.as_millis()
                ),
            ));
        }
    };
    // Where it was paused, snapshotted or ended meanwhile, that is why.
    vm.phase().serves("connect to a port of")?;
    let message = match refused {
        DialError::Io(e) if is_closed(&e) => format!(
            "VM {name}, port {port}: expected a program that listens there, got a refusal; have one listen on vsock port {port} \
             of the guest (AF_VSOCK, any context id)"
        ),
        e => format!("VM {name}, port {port}: connecting through its VMM: {e}"),
    };
    Err(Fault::new(ErrorCode::Guest, message))
}

/// What it means that a client sends no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientEnd {
    /// That, and the guest is told; the client may go on reading.
    PassedOn,
    /// The client is gone: nothing is relayed any more.
    EndsAll,
}

/// How one direction ended.
#[derive(Debug, PartialEq, Eq)]
enum Passed {
    /// The sender sends no more; all that it sent is with the receiver.
    Ended,
    /// The sender's connection broke.
    SenderBroke,
    /// The receiver takes no more.
    ReceiverDeaf,
}

/// Copies until one side ends. What is received goes on at once.
async fn pass<R, W>(from: &mut R, to: &mut W) -> Passed
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut buffer = BytesMut::with_capacity(CHUNK_BYTES);
    loop {
        buffer.clear();
        match from.read_buf(&mut buffer).await {
            Ok(0) => return Passed::Ended,
            Ok(_) => {}
            Err(_) => return Passed::SenderBroke,
        }
        if to.write_all(&buffer).await.is_err() || to.flush().await.is_err() {
            return Passed::ReceiverDeaf;
        }
    }
}

/// Relays between a client and a guest's port, each direction until its end. Ends when both have ended, when the client is gone,
/// and, once all is delivered that the guest had sent, when the VM is.
pub async fn relay<C>(client: C, mut guest: UnixStream, end: ClientEnd, vm_gone: impl Future<Output = ()>)
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_guest, mut to_guest) = guest.split();
    let inwards = async {
        let passed = tokio::select! {
            passed = pass(&mut from_client, &mut to_guest) => passed,
            // The guest's direction ends by itself: its socket has.
            () = vm_gone => return Ok(()),
        };
        match (passed, end) {
            (Passed::SenderBroke, _) | (Passed::Ended, ClientEnd::EndsAll) => return Err(()),
            (Passed::Ended, ClientEnd::PassedOn) => {
                // A guest that is gone need not be told.
                let _ = to_guest.shutdown().await;
            }
            (Passed::ReceiverDeaf, ClientEnd::PassedOn) => {}
            // The VM lasts as long as the client does, not as long as its program listens.
            (Passed::ReceiverDeaf, ClientEnd::EndsAll) => {
                pass(&mut from_client, &mut tokio::io::sink()).await;
                return Err(());
            }
        }
        Ok(())
    };
    let outwards = async {
        match pass(&mut from_guest, &mut to_client).await {
            Passed::ReceiverDeaf => Err(()),
            // A VM that ended breaks its connections; for the client, that is their end.
            Passed::Ended | Passed::SenderBroke => to_client.shutdown().await.map_err(drop),
        }
    };
    // An error in either ends both, which is all that there is to do about it.
    let _ = tokio::try_join!(inwards, outwards);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;
    use std::time::Duration;
    use tokio::sync::oneshot;

    /// A relay under way: the client's end, the guest's end, and how to end the VM.
    fn under_way(
        end: ClientEnd,
    ) -> (UnixStream, UnixStream, oneshot::Sender<()>, tokio::task::JoinHandle<()>) {
        let (client, near) = UnixStream::pair().unwrap();
        let (far, guest) = UnixStream::pair().unwrap();
        let (gone, wait_gone) = oneshot::channel();
        let relay = tokio::spawn(relay(near, far, end, async {
            // A test that drops the sender has a VM that lives on.
            if wait_gone.await.is_err() {
                pending().await
            }
        }));
        (client, guest, gone, relay)
    }

    async fn ends(relay: tokio::task::JoinHandle<()>) {
        timeout(Duration::from_secs(10), relay).await.expect("an end").unwrap();
    }

    #[tokio::test]
    async fn each_direction_ends_by_itself() {
        let (mut client, mut guest, _gone, relay) = under_way(ClientEnd::PassedOn);
        let question: Vec<u8> = (0..1u32 << 20).map(|i| (i % 251).to_le_bytes()[0]).collect();
        let sent = question.clone();
        let asking = tokio::spawn(async move {
            client.write_all(&sent).await.unwrap();
            client.shutdown().await.unwrap();
            client
        });
        let mut got = Vec::new();
        guest.read_to_end(&mut got).await.unwrap();
        assert!(got == question, "{} bytes arrived", got.len());
        let mut client = asking.await.unwrap();
        // The other direction is still there.
        guest.write_all(b"answer").await.unwrap();
        drop(guest);
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "answer");
        ends(relay).await;
    }

    #[tokio::test]
    async fn a_guest_that_ends_first_still_gets_what_the_client_sends() {
        let (mut client, mut guest, _gone, relay) = under_way(ClientEnd::PassedOn);
        guest.write_all(b"said").await.unwrap();
        guest.shutdown().await.unwrap();
        let mut text = String::new();
        client.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "said");
        client.write_all(b"late").await.unwrap();
        drop(client);
        text.clear();
        guest.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "late");
        ends(relay).await;
    }

    #[tokio::test]
    async fn a_client_that_is_gone_ends_a_guest_that_talks() {
        let (client, mut guest, _gone, relay) = under_way(ClientEnd::PassedOn);
        drop(client);
        while guest.write_all(&[7; 1 << 10]).await.is_ok() {}
        ends(relay).await;
    }

    #[tokio::test]
    async fn the_end_of_a_client_that_owns_the_vm_ends_all() {
        for deaf in [false, true] {
            let (mut client, mut guest, _gone, relay) = under_way(ClientEnd::EndsAll);
            if deaf {
                drop(guest);
                // The program has ended; the VM is the client's as long as it stays.
                let mut text = String::new();
                client.read_to_string(&mut text).await.unwrap();
                client.write_all(b"anybody?").await.unwrap();
                assert!(!relay.is_finished());
                client.shutdown().await.unwrap();
            } else {
                client.write_all(b"question").await.unwrap();
                client.shutdown().await.unwrap();
                // It is not told of an end of input: its machine goes.
                let mut text = String::new();
                guest.read_to_string(&mut text).await.unwrap();
                assert_eq!(text, "question");
            }
            ends(relay).await;
        }
    }

    #[tokio::test]
    async fn the_end_of_the_vm_delivers_what_it_had_said() {
        let (mut client, mut guest, gone, relay) = under_way(ClientEnd::PassedOn);
        guest.write_all(b"last words").await.unwrap();
        drop(guest);
        gone.send(()).unwrap();
        let mut text = String::new();
        client.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "last words");
        ends(relay).await;
    }

    #[test]
    fn ports_that_are_the_agents_are_refused() {
        for port in [0, PORT, READY_PORT] {
            let refused = check(port).unwrap_err();
            assert_eq!(refused.0.code, ErrorCode::Invalid);
            assert!(refused.0.message.contains(&port.to_string()), "{refused}");
        }
        for port in [1, 1023, 1026, 5000, u32::MAX] {
            assert!(check(port).is_ok());
        }
    }
}
