//! A network namespace with the gateway's and the guests' addresses, and the service in it.

use crate::base::prefix::Prefix;
use crate::net::names::index::{Index, Policy, Registration};
use crate::net::names::policy::Scope;
use crate::net::names::server::{Opener, Serving, place, serve};
use crate::net::names::sockets;
use dayfly_host::net::Found;
use dayfly_units::sync::lock;
use dayfly_units::{Egress, VmId};
use simple_dns::rdata::RData;
use simple_dns::{Packet, RCODE};
use std::io::{Read, Write};
use std::net::UdpSocket as Blocking;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;

/// Time limit for what must happen, which only a hang exceeds.
pub(super) const LONGEST: Duration = Duration::from_secs(120);

pub(super) fn prefix() -> Prefix {
    "10.88.0.0/24".parse().unwrap()
}

pub(super) fn scope() -> Scope {
    Scope { prefix: prefix(), reach: ["10.7.0.0/16".parse().unwrap()].into() }
}

pub(super) fn ip(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 88, 0, last)
}

pub(super) fn gateway() -> SocketAddr {
    place(prefix())
}

/// Runs a command in the calling thread's namespace.
pub(super) fn run(line: &str) {
    let out = std::process::Command::new("sh").args(["-c", line]).output().unwrap();
    assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
}

/// Runs `act` in a new network namespace, with the gateway's address and the guests' addresses on
/// its loopback. Threads that it starts are in the namespace too.
pub(in crate::net) fn alone<R: Send>(act: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| {
        let inside = scope.spawn(|| {
            // SAFETY: NEWNET changes only the network namespace of this thread and of threads that
            // it starts, and nothing that it shares with others.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
                .expect("these tests need CAP_SYS_ADMIN");
            run("ip link set lo up && ip addr add 10.88.0.0/24 dev lo");
            act()
        });
        inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// The service with three VMs: `web` at .2 and `db` at .3 are in one network, `shut` at .4 is
/// closed.
pub(super) struct World {
    pub(super) runtime: tokio::runtime::Runtime,
    pub(super) index: Arc<Index>,
    pub(super) _guests: Vec<Registration>,
    pub(super) serving: Serving,
    /// Sends the service its list of servers.
    pub(super) servers: watch::Sender<Arc<[SocketAddr]>>,
    /// What the service has opened for which guest.
    pub(super) opened: Arc<Mutex<Vec<(Ipv4Addr, Found)>>>,
}

pub(super) fn world() -> World {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let index = Arc::new(Index::default());
    let policy = |group: &str, closed: bool| {
        let egress = if closed { Egress::none() } else { Egress::internet() };
        Policy { group: Some(group.into()), egress }
    };
    let insert = |last, name: &str, policy| {
        index.insert(ip(last), VmId::random(), &name.parse().unwrap(), policy)
    };
    let guests = vec![
        insert(2, "web", policy("a", false)),
        insert(3, "db", policy("a", false)),
        insert(4, "shut", policy("b", true)),
        insert(5, "lone", Policy::default()),
    ];
    let (servers, receiver) = watch::channel(Arc::from([]));
    let opened: Arc<Mutex<Vec<_>>> = Arc::default();
    let serving = {
        let opened = opened.clone();
        let opener: Opener = Arc::new(move |guest, found| {
            lock(&opened).push((guest, found.clone()));
            Ok(0)
        });
        let _within = runtime.enter();
        serve(index.clone(), scope(), receiver, sockets::bind(gateway()).unwrap(), Some(opener))
            .unwrap()
    };
    World { runtime, index, _guests: guests, serving, servers, opened }
}

pub(super) fn udp(last: u8) -> Blocking {
    let socket = Blocking::bind((ip(last), 0)).unwrap();
    socket.connect(gateway()).unwrap();
    socket.set_read_timeout(Some(LONGEST)).unwrap();
    socket
}

/// Sends a question over UDP, and waits for the answer.
pub(super) fn ask(socket: &Blocking, question: &[u8]) -> Vec<u8> {
    socket.send(question).unwrap();
    let mut bytes = vec![0; 4096];
    let length = socket.recv(&mut bytes).expect("an answer");
    bytes.truncate(length);
    bytes
}

pub(super) fn tcp(last: u8) -> std::net::TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let fd = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&fd, &SocketAddr::from((ip(last), 0))).unwrap();
    connect(&fd, &gateway()).unwrap();
    let stream = std::net::TcpStream::from(fd);
    stream.set_read_timeout(Some(LONGEST)).unwrap();
    stream
}

pub(super) fn say(stream: &mut std::net::TcpStream, message: &[u8]) {
    let length = u16::try_from(message.len()).unwrap().to_be_bytes();
    stream.write_all(&[&length, message].concat()).unwrap();
}

/// The next answer of a connection; `None` if it was closed.
pub(super) fn hear(stream: &mut std::net::TcpStream) -> Option<Vec<u8>> {
    let mut length = [0; 2];
    stream.read_exact(&mut length).ok()?;
    let mut bytes = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut bytes).ok()?;
    Some(bytes)
}

pub(super) fn address(answer: &[u8]) -> Option<Ipv4Addr> {
    match Packet::parse(answer).unwrap().answers.first()?.rdata {
        RData::A(ref a) => Some(a.address.into()),
        _ => None,
    }
}

pub(super) fn code_of(answer: &[u8]) -> RCODE {
    Packet::parse(answer).unwrap().rcode()
}

/// A server that records its questions and answers them with `answer`.
pub(super) fn server(
    answer: impl Fn(&[u8]) -> Option<Vec<u8>> + Send + Sync + 'static,
) -> (SocketAddr, Arc<Mutex<Vec<Vec<u8>>>>) {
    let (asked, answer) = (Arc::new(Mutex::new(Vec::new())), Arc::new(answer));
    let udp = Blocking::bind("127.0.0.1:0").unwrap();
    let at = udp.local_addr().unwrap();
    let tcp = std::net::TcpListener::bind(at).unwrap();
    let (keep, make) = (asked.clone(), answer.clone());
    std::thread::spawn(move || {
        let mut bytes = vec![0; 1 << 16];
        while let Ok((length, from)) = udp.recv_from(&mut bytes) {
            keep.lock().unwrap().push(bytes[..length].to_vec());
            if let Some(answer) = make(&bytes[..length]) {
                let _ = udp.send_to(&answer, from);
            }
        }
    });
    let keep = asked.clone();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = tcp.accept() {
            let Some(question) = hear(&mut stream) else { continue };
            keep.lock().unwrap().push(question.clone());
            if let Some(answer) = answer(&question) {
                say(&mut stream, &answer);
            }
        }
    });
    (at, asked)
}

/// Turns a question into an answer with one address.
pub(super) fn with_address(question: &[u8], ip: [u8; 4]) -> Vec<u8> {
    let mut bytes = question.to_vec();
    bytes[2] |= 0x80;
    bytes[7] = 1;
    // An OPT record must follow the answers.
    let at = if bytes[11] == 1 { bytes.len() - 11 } else { bytes.len() };
    bytes.splice(at..at, [&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4][..], &ip].concat());
    bytes
}
