//! Names of VMs, for VMs (RFC 1035): each finds the others by name, by hostname and by id, alone or below `.dayfly.internal`, and by
//! address. All else is asked of the host's own servers, byte for byte.
//!
//! Questions come from guests: they are parsed by `simple-dns`, answers are as long as a question, and so many are under way
//! at one time and no more.

use super::{Network, Prefix};
use crate::daemon::Daemon;
use simple_dns::rdata::{A, PTR, RData};
use simple_dns::{CLASS, Name, Packet, PacketFlag, QTYPE, RCODE, ResourceRecord, TYPE};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// DNS's port.
const PORT: u16 = 53;
/// The longest question or answer over UDP.
const MAX_BYTES: usize = 4096;
/// Questions that are asked of others at one time; more are answered with a failure.
const MAX_ASKED: usize = 256;
/// How long another server may take, each of at most [`MAX_SERVERS`].
const PATIENCE: Duration = Duration::from_secs(2);
/// Servers that are asked, one after the other.
const MAX_SERVERS: usize = 3;
/// How long an answer may be kept: VMs come and go.
const TTL_SECONDS: u32 = 1;
/// Below this all names are ours.
const DOMAIN: &str = "dayfly.internal";

/// Answers until it is dropped.
pub(super) struct Serving(Vec<AbortHandle>);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

/// Answers at the gateway's address. Within a runtime.
pub(super) fn serve(daemon: &Arc<Daemon>, network: &Arc<Network>) -> io::Result<Serving> {
    let at = SocketAddr::from((network.prefix.gateway(), PORT));
    let sockets =
        move || Ok::<_, io::Error>((std::net::UdpSocket::bind(at)?, std::net::TcpListener::bind(at)?));
    let (udp, tcp) = network.tenant.run(sockets).map_err(io::Error::other)??;
    udp.set_nonblocking(true)?;
    tcp.set_nonblocking(true)?;
    let (udp, tcp) = (Arc::new(UdpSocket::from_std(udp)?), TcpListener::from_std(tcp)?);
    let answerer = Answerer {
        daemon: daemon.clone(),
        prefix: network.prefix,
        turns: Arc::new(Semaphore::new(MAX_ASKED)),
    };
    let packets = tokio::spawn(packets(answerer.clone(), udp)).abort_handle();
    let streams = tokio::spawn(streams(answerer, tcp)).abort_handle();
    Ok(Serving(vec![packets, streams]))
}

async fn packets(answerer: Answerer, socket: Arc<UdpSocket>) {
    let mut bytes = vec![0; MAX_BYTES];
    loop {
        // An error tells of an answer that did not arrive.
        let Ok((length, from)) = socket.recv_from(&mut bytes).await else { continue };
        let question = bytes[..length].to_vec();
        if let Some(answer) = answerer.own(&question) {
            let _ = socket.send_to(&answer, from).await;
            continue;
        }
        let Ok(turn) = answerer.turns.clone().try_acquire_owned() else {
            if let Some(answer) = refuse(&question) {
                let _ = socket.send_to(&answer, from).await;
            }
            continue;
        };
        let socket = socket.clone();
        tokio::spawn(async move {
            if let Some(answer) = by_packets(&question).await.or_else(|| refuse(&question)) {
                let _ = socket.send_to(&answer, from).await;
            }
            drop(turn);
        });
    }
}

async fn streams(answerer: Answerer, listener: TcpListener) {
    loop {
        let Ok((mut stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Ok(turn) = answerer.turns.clone().try_acquire_owned() else { continue };
        let answerer = answerer.clone();
        tokio::spawn(async move {
            let _ = timeout(PATIENCE * 4, async {
                while let Some(question) = read(&mut stream).await {
                    let answer = match answerer.own(&question) {
                        Some(answer) => Some(answer),
                        None => by_stream(&question).await.or_else(|| refuse(&question)),
                    };
                    let Some(answer) = answer else { return };
                    if write(&mut stream, &answer).await.is_err() {
                        return;
                    }
                }
            })
            .await;
            drop(turn);
        });
    }
}

/// One message of a stream (RFC 1035, 4.2.2): two bytes of length come first.
async fn read(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut bytes = vec![0; usize::from(stream.read_u16().await.ok()?)];
    stream.read_exact(&mut bytes).await.ok()?;
    Some(bytes)
}

async fn write(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), message].concat()).await
}

/// The servers of the host's /etc/resolv.conf (resolv.conf(5)).
fn servers() -> Vec<SocketAddr> {
    let text = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let address = |line: &str| line.trim().strip_prefix("nameserver")?.trim().parse::<IpAddr>().ok();
    text.lines().filter_map(address).take(MAX_SERVERS).map(|ip| SocketAddr::from((ip, PORT))).collect()
}

async fn by_packets(question: &[u8]) -> Option<Vec<u8>> {
    for server in servers() {
        let any: IpAddr = if server.is_ipv6() {
            std::net::Ipv6Addr::UNSPECIFIED.into()
        } else {
            Ipv4Addr::UNSPECIFIED.into()
        };
        let asked = async {
            let socket = UdpSocket::bind((any, 0)).await?;
            socket.connect(server).await?;
            socket.send(question).await?;
            let mut bytes = vec![0; MAX_BYTES];
            let length = socket.recv(&mut bytes).await?;
            bytes.truncate(length);
            Ok::<_, io::Error>(bytes)
        };
        if let Ok(Ok(answer)) = timeout(PATIENCE, asked).await
            && answer.get(..2) == question.get(..2)
        {
            return Some(answer);
        }
    }
    None
}

async fn by_stream(question: &[u8]) -> Option<Vec<u8>> {
    for server in servers() {
        let asked = async {
            let mut stream = TcpStream::connect(server).await.ok()?;
            write(&mut stream, question).await.ok()?;
            read(&mut stream).await
        };
        if let Ok(Some(answer)) = timeout(PATIENCE, asked).await {
            return Some(answer);
        }
    }
    None
}

/// SERVFAIL for a question, if it is one.
fn refuse(question: &[u8]) -> Option<Vec<u8>> {
    let asked = Packet::parse(question).ok().filter(|packet| !packet.has_flags(PacketFlag::RESPONSE))?;
    let mut answer = reply(&asked);
    *answer.rcode_mut() = RCODE::ServerFailure;
    answer.build_bytes_vec().ok()
}

fn reply<'a>(asked: &Packet<'a>) -> Packet<'a> {
    let mut answer = Packet::new_reply(asked.id());
    answer.set_flags(PacketFlag::RECURSION_AVAILABLE);
    if asked.has_flags(PacketFlag::RECURSION_DESIRED) {
        answer.set_flags(PacketFlag::RECURSION_DESIRED);
    }
    answer.questions.clone_from(&asked.questions);
    answer
}

#[derive(Clone)]
struct Answerer {
    daemon: Arc<Daemon>,
    prefix: Prefix,
    turns: Arc<Semaphore>,
}

/// What a question for one of our names comes to.
#[derive(Debug, PartialEq, Eq)]
enum Known {
    Address(Ipv4Addr),
    Name(String),
    /// The name is ours, and there is nothing of what was asked.
    Nothing,
    /// The name is one that only we could know, and do not.
    Nobody,
}

impl Answerer {
    /// The answer to a question that is ours to answer.
    fn own(&self, question: &[u8]) -> Option<Vec<u8>> {
        let asked = Packet::parse(question).ok().filter(|packet| !packet.has_flags(PacketFlag::RESPONSE))?;
        let [one] = asked.questions.as_slice() else { return None };
        let known = known(
            &one.qname.to_string(),
            one.qtype,
            self.prefix,
            |name| self.address_of(name),
            |ip| self.name_of(ip),
        )?;
        let mut answer = reply(&asked);
        answer.set_flags(PacketFlag::AUTHORITATIVE_ANSWER);
        let name = one.qname.clone();
        match &known {
            Known::Address(ip) => {
                let data = RData::A(A { address: (*ip).into() });
                answer.answers.push(ResourceRecord::new(name, CLASS::IN, TTL_SECONDS, data));
            }
            Known::Name(host) => {
                let data = RData::PTR(PTR(Name::new(host).ok()?));
                answer.answers.push(ResourceRecord::new(name, CLASS::IN, TTL_SECONDS, data));
            }
            Known::Nothing => {}
            Known::Nobody => *answer.rcode_mut() = RCODE::NameError,
        }
        answer.build_bytes_vec().ok()
    }

    fn address_of(&self, name: &str) -> Option<Ipv4Addr> {
        let called = |vm: &crate::vm::Vm| {
            let live = vm.live();
            let hostname = live.who.is_some_and(|who| who.hostname.eq_ignore_ascii_case(name));
            let named = vm.name.as_str().eq_ignore_ascii_case(name) || vm.id.to_string() == name;
            live.network.filter(|_| live.phase.alive() && (named || hostname)).map(|network| network.address)
        };
        self.daemon.registry.all().iter().find_map(|vm| called(vm))
    }

    fn name_of(&self, address: Ipv4Addr) -> Option<String> {
        let all = self.daemon.registry.all();
        let has = |vm: &&Arc<crate::vm::Vm>| {
            let live = vm.live();
            live.phase.alive() && live.network.is_some_and(|network| network.address == address)
        };
        all.iter().find(has).map(|vm| format!("{}.{DOMAIN}", vm.name))
    }
}

/// Decides; `None`: it is not ours to answer.
fn known(
    name: &str,
    kind: QTYPE,
    prefix: Prefix,
    address_of: impl Fn(&str) -> Option<Ipv4Addr>,
    name_of: impl Fn(Ipv4Addr) -> Option<String>,
) -> Option<Known> {
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    if let Some(reversed) = name.strip_suffix(".in-addr.arpa") {
        let octets: Vec<u8> = reversed.split('.').rev().map(str::parse).collect::<Result<_, _>>().ok()?;
        let address = Ipv4Addr::from(<[u8; 4]>::try_from(octets).ok()?);
        prefix.index(address)?;
        return Some(match name_of(address) {
            Some(host) if matches!(kind, QTYPE::TYPE(TYPE::PTR) | QTYPE::ANY) => Known::Name(host),
            Some(_) => Known::Nothing,
            None => Known::Nobody,
        });
    }
    let ours = name.strip_suffix(DOMAIN).and_then(|rest| rest.strip_suffix('.'));
    match address_of(ours.unwrap_or(&name)) {
        Some(ip) if matches!(kind, QTYPE::TYPE(TYPE::A) | QTYPE::ANY) => Some(Known::Address(ip)),
        Some(_) => Some(Known::Nothing),
        None if ours.is_some() => Some(Known::Nobody),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_ours_where_a_vm_has_them_or_nobody_else_could() {
        let prefix: Prefix = "10.88.0.0/16".parse().unwrap();
        let web = Ipv4Addr::new(10, 88, 0, 2);
        let ask = |name: &str, kind| {
            let of = |asked: &str| (asked == "web").then_some(web);
            known(name, QTYPE::TYPE(kind), prefix, of, |ip| {
                (ip == web).then(|| "web.dayfly.internal".to_owned())
            })
        };
        assert_eq!(ask("WEB", TYPE::A), Some(Known::Address(web)));
        assert_eq!(ask("web.dayfly.internal.", TYPE::A), Some(Known::Address(web)));
        assert_eq!(ask("web", TYPE::AAAA), Some(Known::Nothing));
        assert_eq!(ask("other.dayfly.internal", TYPE::A), Some(Known::Nobody));
        assert_eq!(ask("example.org", TYPE::A), None);
        assert_eq!(ask("xdayfly.internal", TYPE::A), None);
        assert_eq!(ask("2.0.88.10.in-addr.arpa", TYPE::PTR), Some(Known::Name("web.dayfly.internal".into())));
        assert_eq!(ask("3.0.88.10.in-addr.arpa", TYPE::PTR), Some(Known::Nobody));
        assert_eq!(ask("8.8.8.8.in-addr.arpa", TYPE::PTR), None);
        assert_eq!(ask("300.0.88.10.in-addr.arpa", TYPE::PTR), None);
    }

    #[test]
    fn a_failure_answers_questions_and_nothing_else() {
        let mut question = Packet::new_query(7);
        let name = Name::new("example.org").unwrap();
        question.questions.push(simple_dns::Question::new(name, TYPE::A.into(), CLASS::IN.into(), false));
        let bytes = question.build_bytes_vec().unwrap();
        let refused = refuse(&bytes).unwrap();
        let answer = Packet::parse(&refused).unwrap();
        assert_eq!((answer.id(), answer.rcode(), answer.questions.len()), (7, RCODE::ServerFailure, 1));
        assert_eq!(refuse(&refused), None, "an answer is answered: two such servers would never end");
        for length in 0..bytes.len() {
            assert_eq!(refuse(&bytes[..length]).is_some(), length == bytes.len());
        }
    }
}
