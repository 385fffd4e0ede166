//! Forwarding to the host's servers. Each question is written again from the parsed fields of a
//! guest's question, with a random id. Each answer is parsed and written again
//! ([`answer`](super::answer)).

use crate::base::random::random;
use crate::net::names::answer::{self, Bad};
use crate::net::names::message::{Head, Query, rcode};
use ipnet::Ipv4Net;
use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::time::timeout;

/// The DNS port.
pub const PORT: u16 = 53;
/// Time limit for a server. Servers of tests may stand still for longer on a busy host.
const TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 600 } else { 2 });
/// Maximum number of servers, which are asked in order (MAXNS, resolv.conf(5)).
const MAX_SERVERS: usize = 3;
/// Maximum bytes of a UDP answer that is read; the announced maximum is smaller.
const PACKET_BYTES: usize = 4096;
/// Maximum number of foreign packets that are skipped while waiting for an answer.
const MAX_OTHERS: usize = 16;
/// Interval of reading the host's list of servers.
const TICK: Duration = Duration::from_secs(5);
/// Maximum bytes of that list.
const MAX_LIST_BYTES: u64 = 64 << 10;

/// The servers to ask, in order.
pub type Servers = watch::Receiver<Arc<[SocketAddr]>>;

/// Ranges that guests reach although they are not public.
pub type Reach = Arc<[Ipv4Net]>;

/// The servers in a text in the format of resolv.conf(5).
fn listed(text: &str) -> Arc<[SocketAddr]> {
    let address =
        |line: &str| line.trim().strip_prefix("nameserver")?.trim().parse::<IpAddr>().ok();
    let servers = text.lines().filter_map(address).take(MAX_SERVERS);
    servers.map(|ip| SocketAddr::from((ip, PORT))).collect()
}

fn of_the_host() -> Arc<[SocketAddr]> {
    let mut text = String::new();
    let read = File::open("/etc/resolv.conf")
        .and_then(|file| file.take(MAX_LIST_BYTES).read_to_string(&mut text));
    // An unreadable list counts as empty, so guests get SERVFAIL.
    drop(read);
    listed(&text)
}

/// Publishes the host's list of servers until the receiver is dropped.
pub async fn follow_the_host(sender: watch::Sender<Arc<[SocketAddr]>>) {
    while !sender.is_closed() {
        if let Ok(servers) = tokio::task::spawn_blocking(of_the_host).await {
            sender.send_if_modified(|known| std::mem::replace(known, servers.clone()) != servers);
        }
        tokio::select! {
            () = sender.closed() => {}
            () = tokio::time::sleep(TICK) => {}
        }
    }
}

/// The transport of a question: the one that the guest used, so that truncation is right for the
/// guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// UDP.
    Packet,
    /// TCP.
    Stream,
}

/// Asks the servers in order and returns the first successful answer, written for the guest. If a
/// server fails, the next one is asked, as in every resolver.
///
/// With `follow`, the result has the addresses of the answer.
pub async fn ask(
    servers: &[SocketAddr],
    reach: &Reach,
    query: &Query,
    by: By,
    follow: bool,
) -> Got {
    let how = How { reach, follow };
    let mut failed = None;
    for server in servers.iter().take(MAX_SERVERS) {
        let asked = async {
            match by {
                By::Packet => packet(*server, how, query).await,
                By::Stream => stream(*server, how, query).await,
            }
        };
        match timeout(TIMEOUT, asked).await {
            Ok(Ok(got)) if [rcode::NOERROR, rcode::NXDOMAIN].contains(&got.rcode) => return got,
            Ok(Ok(got)) => failed = Some(got),
            Ok(Err(e)) => tracing::debug!(%server, "asking for a name: {e}"),
            Err(_) => tracing::debug!(%server, "asking for a name: no answer in {TIMEOUT:?}"),
        }
    }
    failed.unwrap_or_else(|| Got {
        rcode: rcode::SERVFAIL,
        bytes: query.answer(Head::of(rcode::SERVFAIL), &[]),
        addresses: Vec::new(),
    })
}

/// What a server has answered.
#[derive(Debug)]
pub struct Got {
    /// The response code.
    pub rcode: u16,
    /// The answer for a guest.
    pub bytes: Vec<u8>,
    /// The addresses of the name in question, each with its seconds to live.
    pub addresses: Vec<(Ipv4Addr, u32)>,
}

/// How an answer is read.
#[derive(Debug, Clone, Copy)]
struct How<'a> {
    reach: &'a Reach,
    /// Whether the addresses of the name are wanted.
    follow: bool,
}

fn rewritten(bytes: &[u8], query: &Query, id: u16, how: How<'_>, limit: usize) -> Result<Got, Bad> {
    let answer = answer::parse(bytes, query, id, how.reach, &mut 0)?;
    let addresses = if how.follow { answer.addresses() } else { Vec::new() };
    Ok(Got { rcode: answer.rcode, bytes: answer.write(query, limit), addresses })
}

async fn packet(server: SocketAddr, how: How<'_>, query: &Query) -> io::Result<Got> {
    let any: IpAddr =
        if server.is_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let id = u16::from_be_bytes(random());
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    socket.send(&query.forwarded(id)).await?;
    let mut bytes = vec![0; PACKET_BYTES];
    for _ in 0..MAX_OTHERS {
        let length = socket.recv(&mut bytes).await?;
        match rewritten(&bytes[..length], query, id, how, query.udp_bytes()) {
            Err(Bad::Other) => {}
            got => return got.map_err(io::Error::other),
        }
    }
    Err(io::Error::other(Bad::Other))
}

async fn stream(server: SocketAddr, how: How<'_>, query: &Query) -> io::Result<Got> {
    let id = u16::from_be_bytes(random());
    let mut stream = TcpStream::connect(server).await?;
    write(&mut stream, &query.forwarded(id)).await?;
    let mut bytes = vec![0; stream.read_u16().await?.into()];
    stream.read_exact(&mut bytes).await?;
    if bytes.len() <= PACKET_BYTES {
        return rewritten(&bytes, query, id, how, answer::MAX_TCP_BYTES).map_err(io::Error::other);
    }
    // The longest answers take most of a millisecond, too long for an async worker.
    let (query, reach, follow) = (query.clone(), how.reach.clone(), how.follow);
    let work = move || {
        let how = How { reach: &reach, follow };
        rewritten(&bytes, &query, id, how, answer::MAX_TCP_BYTES)
    };
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?.map_err(io::Error::other)
}

/// Writes one message to a stream, after two bytes of length (RFC 1035, 4.2.2).
pub async fn write(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), message].concat()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_read_as_resolvers_do() {
        let text = "# nameserver 9.9.9.9\nsearch a b\n nameserver 1.1.1.1\nnameserver ::1\n\
            nameserver x\n\
            nameserver 8.8.8.8\nnameserver 8.8.4.4\n";
        let expected = ["1.1.1.1:53", "[::1]:53", "8.8.8.8:53"].map(|at| at.parse().unwrap());
        assert_eq!(*listed(text), expected);
        assert!(listed("").is_empty());
    }
}
