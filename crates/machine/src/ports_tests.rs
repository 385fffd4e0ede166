use super::*;
use crate::places::MAX_OF_PORT;
use dayfly_machine_init::set_up;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::UnshareFlags;
use std::net::Ipv4Addr;

/// The daemon's side of a session.
struct Daemon(BufReader<TcpStream>);

impl Daemon {
    fn order(&mut self, order: &PortOrder) {
        let line = format!("{}\n", serde_json::to_string(order).unwrap());
        self.0.get_mut().write_all(line.as_bytes()).unwrap();
    }

    fn bind(&mut self, id: u64, port: u16, to: u16) -> Option<PortRefusal> {
        self.outcome(id, port, to, false).refused
    }

    fn outcome(&mut self, id: u64, port: u16, to: u16, udp: bool) -> PortAnswer {
        self.order(&PortOrder::Bind { id, address: at(port), to, udp });
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        let answer: PortAnswer = serde_json::from_str(&line).unwrap();
        assert_eq!(answer.id, id);
        answer
    }
}

fn at(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// Runs a test in a network namespace, in which no other program takes ports. It gets the daemon's
/// side of a session, and a listener to which every connection goes.
fn with_session(test: impl FnOnce(&mut Daemon, &TcpListener) + Send) {
    assert!(rustix::process::geteuid().is_root(), "makes network namespaces: run as root");
    let run = || {
        // SAFETY: NEWNET leaves the table of descriptors alone.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        set_up("lo").unwrap();
        let outside = Outside::start(true).unwrap();
        let guest = TcpListener::bind(at(0)).unwrap();
        let guest_at = guest.local_addr().unwrap();
        let connect: Connect = Arc::new(move |port| {
            let mut stream = TcpStream::connect(guest_at)?;
            stream.write_all(&port.to_be_bytes())?;
            Ok(stream)
        });
        let session = TcpListener::bind(at(0)).unwrap();
        let daemon = TcpStream::connect(session.local_addr().unwrap()).unwrap();
        let stream = session.accept().unwrap().0;
        std::thread::scope(|scope| {
            let rooms = Arc::new(Rooms::default());
            let serving = scope.spawn(move || serve(&stream, &outside, &connect, &rooms));
            let mut daemon = Daemon(BufReader::new(daemon));
            test(&mut daemon, &guest);
            drop(daemon);
            serving.join().unwrap().unwrap();
        });
        // The end of the session has freed its ports.
        TcpListener::bind(at(5001)).unwrap();
        TcpListener::bind(at(5002)).unwrap();
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap());
}

fn accepted(guest: &TcpListener) -> (u16, TcpStream) {
    let mut stream = guest.accept().unwrap().0;
    let mut port = [0; 2];
    stream.read_exact(&mut port).unwrap();
    (u16::from_be_bytes(port), stream)
}

#[test]
fn a_port_leads_into_the_machine_until_it_is_freed() {
    with_session(|daemon, guest| {
        assert_eq!(daemon.bind(1, 5001, 40_001), None);
        let taken = daemon.bind(2, 5001, 40_002).unwrap();
        assert_eq!(taken.kind, RefusalKind::Taken);
        let address = "192.0.2.9:5001".parse().unwrap();
        let absent = PortOrder::Bind { id: 3, address, to: 1, udp: false };
        daemon.order(&absent);
        let mut line = String::new();
        daemon.0.read_line(&mut line).unwrap();
        assert!(line.contains(r#""kind":"invalid""#), "{line}");

        let mut client = TcpStream::connect(at(5001)).unwrap();
        let (port, mut stream) = accepted(guest);
        assert_eq!(port, 40_001);
        client.write_all(b"question").unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        assert_eq!(said, "question");
        stream.write_all(b"answer").unwrap();
        drop(stream);
        said.clear();
        client.read_to_string(&mut said).unwrap();
        assert_eq!(said, "answer");

        daemon.order(&PortOrder::Free { id: 1 });
        // The answer to a later order shows that this one is done.
        assert_eq!(daemon.bind(4, 5002, 40_004), None);
        let error = TcpStream::connect(at(5001)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(daemon.bind(5, 5001, 40_005), None, "free again");
        // An order that is unknown, or freed twice, does no harm.
        daemon.order(&PortOrder::Free { id: 1 });
    });
}

#[test]
fn privileged_ports_are_refused_and_without_a_network_all_ports() {
    with_session(|daemon, _| {
        for udp in [false, true] {
            let refused = daemon.outcome(1, 1023, 1, udp).refused.unwrap();
            assert_eq!(refused.kind, RefusalKind::Invalid);
            assert!(refused.why.contains("ip_unprivileged_port_start=1023"), "{refused:?}");
        }
        assert_eq!(daemon.bind(2, 1024, 1), None);
        // A port that the host chooses.
        for (id, udp) in [(3, false), (4, true)] {
            let answer = daemon.outcome(id, 0, 1, udp);
            assert!(answer.refused.is_none() && answer.port > Some(1023), "{answer:?}");
        }
    });
    let refused = refusal(Outside::start(false).unwrap().listen(at(0), false).unwrap_err());
    assert_eq!(refused.kind, RefusalKind::Invalid);
    assert!(refused.why.contains("--no-network"), "{refused:?}");
}

#[test]
fn a_port_that_is_full_resets_further_connections_and_others_are_served() {
    // Each connection takes four descriptors of this process, and many hosts allow 1,024.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    with_session(|daemon, guest| {
        assert_eq!(daemon.bind(1, 5001, 1), None);
        assert_eq!(daemon.bind(2, 5002, 2), None);
        let mut held = Vec::new();
        for _ in 0..MAX_OF_PORT {
            let client = TcpStream::connect(at(5001)).unwrap();
            held.push((client, accepted(guest)));
        }
        let mut more = TcpStream::connect(at(5001)).unwrap();
        let error = more.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        let client = TcpStream::connect(at(5002)).unwrap();
        assert_eq!(accepted(guest).0, 2);
        drop(client);
    });
}

#[test]
fn a_line_that_is_no_order_or_too_long_ends_the_session() {
    for bad in [&b"{}\n"[..], b"x", &[b'x'; MAX_PORT_LINE_BYTES + 1]] {
        let error = read_order(&mut &bad[..]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
    assert_eq!(read_order(&mut &b""[..]).unwrap(), None);
}
