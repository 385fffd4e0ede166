//! Connections to vsock ports of guests: made over the VM's unix socket, then relayed byte by byte.

use crate::base::error::{ApiError, Outcome};
use crate::daemon::Daemon;
use crate::vm::Vm;
use crate::vmm::dial::{DialError, dial, is_closed};
use bytes::BytesMut;
use dayfly_api::agent::{PORT, READY_PORT};
use dayfly_api::types::ErrorCode;
use std::future::Future;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Bytes of one read in either direction.
const CHUNK_BYTES: usize = 64 << 10;

/// Checks that clients may connect to `port`.
///
/// # Errors
/// The port is 0, or reserved for the agent.
pub fn check(port: u32) -> Outcome<()> {
    match port {
        0 => Err(ApiError::invalid(format_args!(
            "port: expected a number from 1 to {}, got 0",
            u32::MAX
        ))),
        PORT => Err(ApiError::invalid(format_args!(
            "port {PORT}: is the guest agent's own; exec, cp and run speak to it, \
             programs listen on other ports"
        ))),
        READY_PORT => Err(ApiError::invalid(format_args!(
            "port {READY_PORT}: is kept for the guest's agent; programs listen on other ports"
        ))),
        _ => Ok(()),
    }
}

/// Connects to a port of a running VM.
///
/// # Errors
/// The port is not for clients, the VM does not run, no program listens on the port, or the guest
/// does not answer in time.
pub async fn connect(daemon: &Daemon, vm: &Vm, port: u32) -> Outcome<UnixStream> {
    check(port)?;
    vm.serves("connect to a port of")?;
    let within = daemon.config.deadlines.port;
    let name = &vm.name;
    let refused = match timeout(within, dial(&vm.dir.vsock(), port)).await {
        Ok(Ok(stream)) => return Ok(stream),
        Ok(Err(e)) => e,
        Err(_) => {
            return Err(ApiError::new(
                ErrorCode::Timeout,
                format_args!(
                    "VM {name}, port {port}: the guest did not answer within {} ms; \
                     `dayfly logs {name}` shows its console",
                    within.as_millis()
                ),
            ));
        }
    };
    // If the VM was paused, snapshotted or ended meanwhile, the error reports that.
    vm.serves("connect to a port of")?;
    let message = match refused {
        DialError::Io(e) if is_closed(&e) => format!(
            "VM {name}, port {port}: expected a program that listens there, got a refusal; \
             have one listen on vsock port {port} of the guest (AF_VSOCK, any context id)"
        ),
        e => format!("VM {name}, port {port}: connecting through its VMM: {e}"),
    };
    Err(ApiError::new(ErrorCode::Guest, message))
}

/// The meaning of the end of a client's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientEnd {
    /// The end is passed on to the guest; the client may go on reading.
    PassedOn,
    /// The client is gone, and the relay ends.
    EndsAll,
}

/// How one direction ended.
#[derive(Debug, PartialEq, Eq)]
enum Passed {
    /// The sender has ended its stream, and the receiver has all bytes.
    Ended,
    /// The sender's connection broke.
    SenderBroke,
    /// The receiver accepts no more bytes.
    ReceiverDeaf,
}

/// Copies bytes until one side ends. Flushes after each read.
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

/// Relays between a client and a guest's port, each direction until its end. Ends when both
/// directions have ended, or when the client is gone. If the VM is gone, it ends once all bytes
/// from the guest are delivered.
pub async fn relay<C>(
    client: C,
    mut guest: UnixStream,
    end: ClientEnd,
    vm_gone: impl Future<Output = ()>,
) where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_guest, mut to_guest) = guest.split();
    let inwards = async {
        let passed = tokio::select! {
            passed = pass(&mut from_client, &mut to_guest) => passed,
            // The other direction ends by itself, because the guest's socket has ended.
            () = vm_gone => return Ok(()),
        };
        match (passed, end) {
            (Passed::SenderBroke, _) | (Passed::Ended, ClientEnd::EndsAll) => return Err(()),
            (Passed::Ended, ClientEnd::PassedOn) => {
                // An error means that the guest is gone.
                let _ = to_guest.shutdown().await;
            }
            (Passed::ReceiverDeaf, ClientEnd::PassedOn) => {}
            // The VM lasts as long as the client, even if its program has closed the connection.
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
            // A VM that ended breaks its connections; the client sees an end of stream.
            Passed::Ended | Passed::SenderBroke => to_client.shutdown().await.map_err(drop),
        }
    };
    // An error of one direction ends the other too.
    let _ = tokio::try_join!(inwards, outwards);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;
    use std::time::Duration;
    use tokio::sync::oneshot;

    /// A running relay: the client's end, the guest's end, and a sender that ends the VM.
    fn under_way(
        end: ClientEnd,
    ) -> (UnixStream, UnixStream, oneshot::Sender<()>, tokio::task::JoinHandle<()>) {
        let (client, near) = UnixStream::pair().unwrap();
        let (far, guest) = UnixStream::pair().unwrap();
        let (gone, wait_gone) = oneshot::channel();
        let relay = tokio::spawn(relay(near, far, end, async {
            // Dropping the sender does not end the VM.
            if wait_gone.await.is_err() {
                pending().await
            }
        }));
        (client, guest, gone, relay)
    }

    async fn ends(relay: tokio::task::JoinHandle<()>) {
        timeout(Duration::from_secs(120), relay).await.expect("an end").unwrap();
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
        // The other direction still works.
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
                // The program has ended, but the VM lasts as long as its client.
                let mut text = String::new();
                client.read_to_string(&mut text).await.unwrap();
                client.write_all(b"listening?").await.unwrap();
                assert!(!relay.is_finished());
                client.shutdown().await.unwrap();
            } else {
                client.write_all(b"question").await.unwrap();
                client.shutdown().await.unwrap();
                // The guest gets no end of input, because its VM is removed.
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
