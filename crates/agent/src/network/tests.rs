//! Tests against the kernel, in network namespaces that end with their threads: a machine (`v0`),
//! and a peer at the other end of a veth (`v1`), its gateway, which lets every packet through.

use super::connections::proc_net;
use super::*;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// The limit of waits for what has to happen; only a hang takes this long.
const LONG: Duration = Duration::from_secs(60);

const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 1);
const PORT: u16 = 4000;

/// The settings of machine number `n`.
fn machine(n: u8) -> Settings {
    Settings {
        mac: [2, 0xdf, 10, 88, 0, n],
        address: Ipv4Addr::new(10, 88, 0, n),
        gateway: GATEWAY,
        gateway_mac: None,
        nameservers: Vec::new(),
    }
}

/// Runs `work` in a thread with a new network namespace, in which loopback is up.
fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let alone = move || {
        // SAFETY: no pointers; the call changes only this thread.
        let done = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        assert_eq!(done, 0, "these tests need CAP_SYS_ADMIN");
        ip("link set lo up");
        work()
    };
    std::thread::spawn(alone).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Runs ip(8) with these arguments.
fn ip(arguments: &str) -> String {
    let done = Command::new("ip").args(arguments.split_ascii_whitespace()).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "ip {arguments}: {err}");
    out.into_owned()
}

type Job = Box<dyn FnOnce() + Send>;

/// The thread of another machine.
struct Peer(Sender<Job>);

impl Peer {
    fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, result) = channel();
        self.0.send(Box::new(move || done.send(job()).unwrap())).unwrap();
        result.recv().unwrap()
    }

    /// A listening socket of the peer.
    fn listen(&self) -> TcpListener {
        self.run(|| TcpListener::bind((GATEWAY, PORT)).unwrap())
    }
}

/// A root in which the interfaces `names` have the driver virtio_net, and /proc is the real one.
fn root(names: &[&str]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/proc", root.path().join("proc")).unwrap();
    for (name, driver) in names.iter().map(|n| (*n, "virtio_net")).chain([("eth9", "e1000")]) {
        let device = root.path().join("sys/class/net").join(name).join("device");
        std::fs::create_dir_all(&device).unwrap();
        std::os::unix::fs::symlink(
            format!("../../bus/virtio/drivers/{driver}"),
            device.join("driver"),
        )
        .unwrap();
    }
    std::fs::create_dir_all(root.path().join("sys/class/net/lo")).unwrap();
    root
}

/// A machine with `v0`, which is down, and its peer.
fn wired<T: Send + 'static>(work: impl FnOnce(&Path, &Peer) -> T + Send + 'static) -> T {
    apart(move || {
        let (jobs, queue) = channel::<Job>();
        let (known, thread) = channel();
        let peer = std::thread::spawn(move || {
            apart_here(&known);
            queue.iter().for_each(|job| job());
        });
        ip(&format!("link add v0 type veth peer name v1 netns {}", thread.recv().unwrap()));
        let peer = (Peer(jobs), peer);
        peer.0.run(|| {
            ip("address add 10.88.0.1/24 dev v1");
            ip("link set v1 up");
        });
        let root = root(&["v0"]);
        let result = work(root.path(), &peer.0);
        drop(peer.0);
        peer.1.join().unwrap();
        result
    })
}

fn apart_here(known: &Sender<i32>) {
    // SAFETY: no pointers; the call changes only this thread.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
    ip("link set lo up");
    known.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
}

/// Writes and reads a byte in each direction.
fn alive(a: &mut TcpStream, b: &mut TcpStream) {
    for stream in [&*a, &*b] {
        stream.set_read_timeout(Some(LONG)).unwrap();
    }
    let mut byte = [0];
    a.write_all(b"x").unwrap();
    b.read_exact(&mut byte).unwrap();
    b.write_all(b"y").unwrap();
    a.read_exact(&mut byte).unwrap();
    assert_eq!(byte, *b"y");
}

/// A thread that waits in a read from the stream, and returns the error.
fn reader(stream: &TcpStream) -> std::thread::JoinHandle<ErrorKind> {
    let mut stream = stream.try_clone().unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let (number, known) = channel();
    let reader = std::thread::spawn(move || {
        number.send(rustix::thread::gettid().as_raw_nonzero()).unwrap();
        stream.read(&mut [0]).unwrap_err().kind()
    });
    // The kernel shows the system call in which a thread sleeps.
    let call = format!("/proc/self/task/{}/syscall", known.recv().unwrap());
    let recv = format!("{} ", libc::SYS_recvfrom);
    while !std::fs::read_to_string(&call).unwrap().starts_with(&recv) {
        assert!(!reader.is_finished(), "it does not wait");
        std::thread::yield_now();
    }
    reader
}

/// Asserts that the peer has received nothing. Packets that were sent before others which have
/// arrived have arrived too.
fn heard_nothing(stream: &mut TcpStream) {
    stream.set_nonblocking(true).unwrap();
    let error = stream.read(&mut [0]).expect_err("it was closed").kind();
    assert_eq!(error, ErrorKind::WouldBlock);
}

/// Asserts that a read fails with ECONNABORTED.
fn ended(stream: &mut TcpStream) {
    stream.set_read_timeout(Some(LONG)).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionAborted);
}

fn pair(listener: &TcpListener, to: impl Into<SocketAddr>) -> (TcpStream, TcpStream) {
    let one = TcpStream::connect_timeout(&to.into(), LONG).unwrap();
    (one, listener.accept().unwrap().0)
}

fn addresses() -> String {
    ip("-o -4 address show dev v0")
}

#[test]
fn an_interface_becomes_another_machines_and_keeps_its_users_routes() {
    wired(|root, peer| {
        // As another tool might leave it: two addresses in a /24, one in another network, and an
        // IPv6 address.
        ip("link set v0 address 02:00:00:00:00:99 up");
        for address in ["10.88.0.2/24", "10.88.0.66/24", "192.168.7.7/30"] {
            ip(&format!("address add {address} dev v0"));
        }
        ip("address add fd00::7/64 dev v0 nodad");
        assert!(ip("-6 address show dev v0").contains("fe80::"), "it has made itself an address");
        ip("route add 10.88.0.9/32 dev v0");
        ip("route add default via 10.88.0.9 dev v0");
        ip("route add 10.99.0.0/16 via 10.88.0.1 dev v0 metric 7");
        ip("route add 203.0.113.0/24 dev v0 table 50");

        take_on(root, Some(&machine(3)), true).unwrap();
        let now = addresses();
        assert_eq!((now.lines().count(), now.contains(" 10.88.0.3/32 ")), (1, true), "{now}");
        let link = ip("link show dev v0");
        assert!(link.contains("02:df:0a:58:00:03") && link.contains(",UP"), "{link}");
        assert_eq!(ip("-6 address show dev v0"), "");
        let routes = ip("-4 route show dev v0");
        assert!(routes.contains("default via 10.88.0.1 proto static src 10.88.0.3"), "{routes}");
        assert!(routes.contains("10.88.0.1 proto static scope link src 10.88.0.3"), "{routes}");
        assert!(routes.contains("10.99.0.0/16 via 10.88.0.1 metric 7"), "{routes}");
        assert!(
            !routes.contains("10.88.0.0/24") && routes.matches("default").count() == 1,
            "{routes}"
        );
        assert!(ip("-4 route show table 50").contains("203.0.113.0/24 dev v0"));
        let mut ends = pair(&peer.listen(), (GATEWAY, PORT));
        assert_eq!(ends.1.peer_addr().unwrap().ip(), machine(3).address);
        alive(&mut ends.0, &mut ends.1);

        // From one identity to the next, no route of the agent stays, but the routes of users do.
        let gateway = Settings { gateway: Ipv4Addr::new(10, 88, 1, 1), ..machine(4) };
        take_on(root, Some(&gateway), true).unwrap();
        let routes = ip("-4 route show dev v0");
        assert!(routes.contains("default via 10.88.1.1 proto static src 10.88.0.4"), "{routes}");
        assert!(!routes.contains("10.88.0.1 proto") && !routes.contains("10.88.0.3"), "{routes}");
        assert!(routes.contains("10.99.0.0/16 via 10.88.0.1 metric 7"), "{routes}");
        assert!(addresses().contains(" 10.88.0.4/32 ") && addresses().lines().count() == 1);
    });
}

#[test]
fn connections_of_the_previous_machine_end_at_once_and_no_peer_hears_of_it() {
    wired(|root, peer| {
        take_on(root, Some(&machine(2)), false).unwrap();
        ip("link add v8 type veth peer name v9");
        ip("address add 172.17.0.1/24 dev v8");
        ip("link set v8 up");
        // A connection begun here, an IPv4 connection accepted on an IPv6 socket, and a UDP socket.
        let there = peer.listen();
        let (here, mut far) = pair(&there, (GATEWAY, PORT));
        let listener = TcpListener::bind(("::", PORT)).unwrap();
        let mut asked = peer.run(|| TcpStream::connect((machine(2).address, PORT)).unwrap());
        let answered = listener.accept().unwrap().0;
        assert!(answered.local_addr().unwrap().is_ipv6());
        let old_listener = TcpListener::bind((machine(2).address, PORT + 1)).unwrap();
        // A connection that no program has accepted yet.
        let mut waits = peer.run(|| TcpStream::connect((machine(2).address, PORT)).unwrap());
        let datagrams = UdpSocket::bind("0.0.0.0:0").unwrap();
        datagrams.connect((GATEWAY, 53)).unwrap();
        datagrams.set_read_timeout(Some(LONG)).unwrap();
        // Connections with both ends in this machine.
        let inner = TcpListener::bind("127.0.0.5:0").unwrap();
        let mut looped = pair(&inner, inner.local_addr().unwrap());
        let six = TcpListener::bind("[::1]:0").unwrap();
        let mut looped6 = pair(&six, six.local_addr().unwrap());
        let both = TcpListener::bind(("::", PORT + 2)).unwrap();
        let mut mapped = pair(&both, (Ipv4Addr::LOCALHOST, PORT + 2));
        let bridge = TcpListener::bind("172.17.0.1:0").unwrap();
        let mut bridged = pair(&bridge, bridge.local_addr().unwrap());

        let readers = [reader(&here), reader(&answered)];
        take_on(root, Some(&machine(3)), true).unwrap();
        for reader in readers {
            // Another error is the time limit's.
            assert_eq!(reader.join().unwrap(), ErrorKind::ConnectionAborted);
        }
        assert_eq!(datagrams.recv(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionAborted);
        for end in [&mut looped, &mut looped6, &mut mapped, &mut bridged] {
            alive(&mut end.0, &mut end.1);
        }
        // Connections that were not accepted have ended too; listening sockets stay.
        ended(&mut listener.accept().unwrap().0);
        old_listener.set_nonblocking(true).unwrap();
        assert_eq!(old_listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        let mut again = peer.run(|| TcpStream::connect((machine(3).address, PORT)).unwrap());
        let mut answered = listener.accept().unwrap().0;
        alive(&mut again, &mut answered);
        let mut ends = pair(&there, (GATEWAY, PORT));
        alive(&mut ends.0, &mut ends.1);
        // No reset reaches the peer, although the link lets every packet through.
        for end in [&mut far, &mut asked, &mut waits] {
            heard_nothing(end);
        }
        assert!(here.peer_addr().is_err());
    });
}

#[test]
fn more_connections_than_go_into_one_message_end_all() {
    wired(|root, peer| {
        take_on(root, Some(&machine(2)), false).unwrap();
        let there = peer.listen();
        let ends: Vec<_> = (0..150).map(|_| pair(&there, (GATEWAY, PORT))).collect();
        // A connection in FIN_WAIT, because the peer has not closed its half.
        ends[0].0.shutdown(std::net::Shutdown::Write).unwrap();
        // A connection without a program.
        let orphan = ends[1].0.local_addr().unwrap().port();
        let ends: Vec<_> = ends
            .into_iter()
            .enumerate()
            .map(|(n, (mut here, there))| {
                if n == 1 {
                    let _ = here.write(&[0; 100_000]);
                    return (None, there);
                }
                (Some(here), there)
            })
            .collect();
        take_on(root, Some(&machine(3)), true).unwrap();
        for here in ends.iter().filter_map(|(here, _)| here.as_ref()) {
            assert!(here.peer_addr().is_err(), "still connected");
        }
        let left = std::fs::read_to_string(proc_net(Path::new("/")).join("tcp")).unwrap();
        assert!(!left.contains(&format!(":{orphan:04X} ")), "{left}");
    });
}

#[test]
fn who_it_is_already_keeps_its_connections_unless_it_was_another() {
    wired(|root, peer| {
        take_on(root, Some(&machine(2)), false).unwrap();
        let there = peer.listen();
        let mut ends = pair(&there, (GATEWAY, PORT));
        take_on(root, Some(&machine(2)), false).unwrap();
        alive(&mut ends.0, &mut ends.1);
        // A clone with the address of its parent, which has ended.
        take_on(root, Some(&machine(2)), true).unwrap();
        ended(&mut ends.0);

        let mut ends = pair(&there, (GATEWAY, PORT));
        take_on(root, Some(&Settings { mac: machine(9).mac, ..machine(2) }), false).unwrap();
        ended(&mut ends.0); // A different MAC means a different machine.
    });
}

#[test]
fn a_machine_without_a_network_has_no_address() {
    wired(|root, peer| {
        take_on(root, Some(&machine(2)), false).unwrap();
        ip("address add 192.168.7.7/30 dev v0");
        let mut ends = pair(&peer.listen(), (GATEWAY, PORT));
        for _ in 0..2 {
            take_on(root, None, false).unwrap();
            assert_eq!(addresses(), "");
            assert!(!ip("link show dev v0").contains(",UP"));
            assert_eq!(ip("route show"), "");
        }
        ended(&mut ends.0);
        take_on(root, Some(&machine(3)), false).unwrap();
        assert!(addresses().contains(" 10.88.0.3/32 "));
    });
}

#[test]
fn which_interface_it_is_has_to_be_clear() {
    let none = root(&[]);
    take_on(none.path(), None, true).unwrap();
    let error = take_on(none.path(), Some(&machine(2)), true).unwrap_err().to_string();
    assert!(
        error.contains("virtio_net")
            && error.contains("sys/class/net")
            && error.contains("got none"),
        "{error}"
    );
    let error = take_on(tempfile::tempdir().unwrap().path(), Some(&machine(2)), true).unwrap_err();
    assert!(matches!(error, NetworkError::Missing { .. }), "{error}");
    let error = take_on(root(&["v0", "v1"]).path(), None, true).unwrap_err().to_string();
    assert!(
        error.contains("v0") && error.contains("v1") && error.contains("expected one"),
        "{error}"
    );
    apart(|| {
        let error = take_on(root(&["v7"]).path(), Some(&machine(2)), true).unwrap_err();
        assert_eq!(error.to_string(), format!("interface v7: read it: {}", Errno::NODEV));
    });
}

#[test]
fn a_mac_that_cannot_change_while_up_changes_with_the_routes_kept() {
    wired(|root, _| {
        take_on(root, Some(&machine(2)), false).unwrap();
        ip("route add 10.99.0.0/16 via 10.88.0.1 dev v0 metric 7");
        ip("route add 203.0.113.0/24 dev v0 table 50");
        let before = ip("-4 route show table all dev v0");
        let mut channel = Channel::open(NETLINK_ROUTE).unwrap();
        let interface = Interface::read(&mut channel, "v0".into()).unwrap();
        interface.replug(&mut channel, machine(3).mac).unwrap();
        assert_eq!(ip("-4 route show table all dev v0"), before);
        let link = ip("link show dev v0");
        assert!(link.contains("02:df:0a:58:00:03") && link.contains(",UP"), "{link}");
    });
}

#[test]
fn the_gateways_mac_is_forgotten_where_it_may_be_another() {
    wired(|root, _| {
        take_on(root, Some(&machine(2)), false).unwrap();
        ip("neighbour replace 10.88.0.1 lladdr 02:00:00:00:00:11 dev v0 nud reachable");
        take_on(root, Some(&machine(2)), false).unwrap();
        assert!(ip("neighbour show dev v0").contains("02:00:00:00:00:11"));
        take_on(root, Some(&Settings { mac: machine(2).mac, ..machine(3) }), false).unwrap();
        assert!(!ip("neighbour show dev v0").contains("02:00:00:00:00:11"));
        ip("neighbour replace 10.88.0.1 lladdr 02:00:00:00:00:11 dev v0 nud reachable");
        take_on(root, Some(&machine(4)), false).unwrap();
        assert!(!ip("neighbour show dev v0").contains("02:00:00:00:00:11"));
    });
}

#[test]
fn a_gateway_whose_mac_is_given_is_never_asked_for_it() {
    wired(|root, _| {
        let with_mac = |n| Settings { gateway_mac: Some([2, 0, 0, 0, 0, 0x22]), ..machine(n) };
        for n in [2, 3] {
            take_on(root, Some(&with_mac(n)), false).unwrap();
            let known = ip("neighbour show dev v0");
            assert!(known.contains("02:00:00:00:00:22") && known.contains("PERMANENT"), "{known}");
        }
    });
}

/// Makes the kernel refuse NETLINK_SOCK_DIAG sockets to this thread, as a kernel without sock_diag
/// does (seccomp(2)).
fn without_sock_diag() {
    let code =
        |code: u32, jt, jf, k| libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let answer = libc::BPF_RET | libc::BPF_K;
    let refuse = libc::SECCOMP_RET_ERRNO | u32::try_from(libc::EPROTONOSUPPORT).unwrap();
    let mut program = [
        // `struct seccomp_data`: the call's number is at 0, its third argument at 32.
        code(load, 0, 0, 0),
        code(equal, 0, 3, u32::try_from(libc::SYS_socket).unwrap()),
        code(load, 0, 0, 32),
        code(equal, 0, 1, u32::try_from(libc::NETLINK_SOCK_DIAG).unwrap()),
        code(answer, 0, 0, refuse),
        code(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 6, filter: program.as_mut_ptr() };
    // SAFETY: the program has six instructions and lives until the kernel has copied it, in this
    // call; it applies to this thread and its children.
    let done =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn connections_that_cannot_be_ended_are_an_error_until_there_are_none() {
    wired(|root, peer| {
        take_on(root, Some(&machine(2)), false).unwrap();
        let _listener = TcpListener::bind(("0.0.0.0", PORT)).unwrap();
        let inner = TcpListener::bind("127.0.0.5:0").unwrap();
        let _looped = pair(&inner, inner.local_addr().unwrap());
        without_sock_diag();
        take_on(root, Some(&machine(3)), true).unwrap();
        let (here, there) = pair(&peer.listen(), (GATEWAY, PORT));
        // The second time the new address is already set, and `clone` is false.
        for clone in [true, false] {
            let error = take_on(root, Some(&machine(4)), clone).unwrap_err();
            assert!(matches!(error, NetworkError::Unable { count: 1, .. }), "{error}");
            assert!(error.to_string().contains("the first from 10.88.0.3"), "{error}");
            assert!(!ip("link show dev v0").contains(",UP"), "nothing goes out");
        }
        rustix::net::sockopt::set_socket_linger(&here, Some(Duration::ZERO)).unwrap();
        drop((here, there));
        // A program that another test is about to execute has copies of the sockets until then.
        assert!((0..1_000_000).any(|_| take_on(root, Some(&machine(4)), false).is_ok()));
        assert!(
            ip("link show dev v0").contains(",UP")
                && ip("route show").contains("default via 10.88.0.1")
        );
    });
}

#[test]
fn a_step_that_failed_is_named_and_connections_of_the_previous_machine_end_all_the_same() {
    wired(|root, peer| {
        take_on(root, Some(&machine(2)), false).unwrap();
        let mut ends = pair(&peer.listen(), (GATEWAY, PORT));
        // A group MAC, which no interface accepts.
        let bad = Settings { mac: [1, 0, 0, 0, 0, 1], ..machine(3) };
        let error = take_on(root, Some(&bad), false).unwrap_err().to_string();
        assert!(error.starts_with("interface v0: set the MAC, and up: "), "{error}");
        // The interface now has the new address and its previous MAC.
        take_on(root, Some(&Settings { mac: machine(2).mac, ..machine(3) }), false).unwrap();
        ended(&mut ends.0);
    });
}

/// Costs at a clone's start: `cargo test -p dayfly-agent --lib -- --ignored --nocapture costs`.
#[test]
#[ignore = "a measurement"]
fn what_it_costs_at_a_clones_start() {
    wired(|root, peer| {
        let there = peer.listen();
        let median = |name: &str, with: &dyn Fn() -> Vec<(TcpStream, TcpStream)>| {
            let mut times = Vec::new();
            for n in 0..201 {
                let kept = with();
                let before = Instant::now();
                take_on(root, Some(&machine(2 + n % 2)), true).unwrap();
                times.push(before.elapsed());
                drop(kept);
            }
            times.sort_unstable();
            println!("{name}: {:?}, least {:?}", times[100], times[0]);
        };
        median("no socket", &Vec::new);
        let listener = TcpListener::bind(("0.0.0.0", PORT)).unwrap();
        median("one that listens", &Vec::new);
        median("one connection", &|| vec![pair(&there, (GATEWAY, PORT))]);
        drop(listener);
    });
}
