//! The process that listens for published ports on another host: the machine's supervisor.
//!
//! The supervisor connects to a socket of the daemon, and gets an order for each port
//! (`dayfly_machine_init::ports`). Orders are kept here until they are dropped. So a supervisor
//! that connects anew gets all orders that hold.

use dayfly_api::types::PortProtocol;
use dayfly_machine_init::{MAX_PORT_LINE_BYTES, PortAnswer, PortOrder, PortRefusal, RefusalKind};
use dayfly_units::sync::lock;
use futures::StreamExt;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tokio::io::AsyncWriteExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio_util::codec::{FramedRead, LinesCodec};
use tokio_util::sync::CancellationToken;

/// What comes of an order: the port on which the host listens, or why it does not.
pub type Answer = oneshot::Receiver<Result<u16, PortRefusal>>;

/// The orders that hold, and the connection of the supervisor.
#[derive(Debug, Default)]
pub struct Publisher(Mutex<Orders>);

#[derive(Debug, Default)]
struct Orders {
    next: u64,
    /// The orders by number. Their number is bounded by that of published ports.
    held: BTreeMap<u64, Held>,
    supervisor: Option<UnboundedSender<PortOrder>>,
}

#[derive(Debug)]
struct Held {
    /// Port 0 until the host has chosen one.
    address: SocketAddr,
    to: u16,
    udp: bool,
    answer: Option<oneshot::Sender<Result<u16, PortRefusal>>>,
}

impl Held {
    const fn bind(&self, id: u64) -> PortOrder {
        PortOrder::Bind { id, address: self.address, to: self.to, udp: self.udp }
    }

    /// What an answer says. A supervisor of an earlier version, which does not say its port, knows
    /// only TCP.
    fn outcome(&self, answer: PortAnswer) -> Result<u16, PortRefusal> {
        match (answer.refused, answer.port) {
            (Some(refusal), _) => Err(refusal),
            (None, Some(port)) if port != 0 => Ok(port),
            (None, _) if self.udp || self.address.port() == 0 => {
                let why = "the machine's supervisor is of an earlier version: \
                           `dayfly machine restart`";
                Err(PortRefusal { kind: RefusalKind::Invalid, why: why.to_owned() })
            }
            (None, _) => Ok(self.address.port()),
        }
    }
}

/// An order that holds until this is dropped.
#[derive(Debug)]
pub struct Order {
    publisher: Arc<Publisher>,
    id: u64,
}

impl Drop for Order {
    fn drop(&mut self) {
        let mut orders = lock(&self.publisher.0);
        orders.held.remove(&self.id);
        orders.send(PortOrder::Free { id: self.id });
    }
}

impl Orders {
    fn send(&self, order: PortOrder) {
        if let Some(supervisor) = &self.supervisor {
            // A connection that has just ended: the next one gets all orders that hold.
            let _ = supervisor.send(order);
        }
    }
}

impl Publisher {
    /// Orders that connections to `address` of the host go to the loopback's port `to`.
    pub fn order(
        self: &Arc<Self>,
        address: SocketAddr,
        to: u16,
        protocol: PortProtocol,
    ) -> (Order, Answer) {
        let (sender, answer) = oneshot::channel();
        let mut orders = lock(&self.0);
        let id = orders.next;
        orders.next += 1;
        let held = Held { address, to, udp: !protocol.is_tcp(), answer: Some(sender) };
        orders.send(held.bind(id));
        orders.held.insert(id, held);
        (Order { publisher: self.clone(), id }, answer)
    }

    /// A new connection: what is sent on it, first all orders that hold.
    fn connected(&self) -> UnboundedReceiver<PortOrder> {
        let (sender, receiver) = unbounded_channel();
        let mut orders = lock(&self.0);
        orders.supervisor = Some(sender);
        orders.held.iter().for_each(|(id, held)| orders.send(held.bind(*id)));
        receiver
    }

    fn answered(&self, answer: PortAnswer) {
        let mut orders = lock(&self.0);
        let Some(held) = orders.held.get_mut(&answer.id) else { return };
        let got = held.outcome(answer);
        if let Ok(port) = got {
            // So that a supervisor that connects anew gets an order for the same port.
            held.address.set_port(port);
        }
        let address = held.address;
        let unheard = match held.answer.take() {
            Some(waiting) => waiting.send(got).err(),
            None => Some(got),
        };
        drop(orders);
        // No request waits for the port of an adopted VM.
        if let Some(Err(PortRefusal { why, .. })) = unheard {
            tracing::error!(%address, "not published any more: {why:?}");
        }
    }

    /// Makes the socket to which the supervisor connects, in the place of an earlier daemon's. Call
    /// it within a tokio runtime.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn listen(path: &Path) -> io::Result<UnixListener> {
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(listener)
    }

    /// Serves connections of the supervisor, one after the other, until the daemon stops.
    pub async fn keep(self: Arc<Self>, listener: UnixListener, stop: CancellationToken) {
        let serving = async {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        if let Err(e) = self.serve(stream).await {
                            tracing::warn!("the machine's supervisor: {e}");
                        }
                        lock(&self.0).supervisor = None;
                    }
                    Err(e) => {
                        tracing::warn!("the machine's supervisor: {e}");
                        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                    }
                }
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = serving => {}
        }
    }

    async fn serve(&self, stream: UnixStream) -> io::Result<()> {
        let (reader, mut writer) = stream.into_split();
        let codec = LinesCodec::new_with_max_length(MAX_PORT_LINE_BYTES);
        let mut lines = FramedRead::new(reader, codec);
        let mut orders = self.connected();
        let writing = async {
            while let Some(order) = orders.recv().await {
                let mut line = serde_json::to_vec(&order)?;
                line.push(b'\n');
                writer.write_all(&line).await?;
            }
            Ok::<(), io::Error>(())
        };
        let reading = async {
            while let Some(line) = lines.next().await {
                let line = line.map_err(io::Error::other)?;
                self.answered(serde_json::from_str(&line)?);
            }
            Ok::<(), io::Error>(())
        };
        tokio::select! {
            ended = writing => ended,
            ended = reading => ended,
        }
    }
}

#[cfg(test)]
#[path = "publisher_tests.rs"]
mod tests;
