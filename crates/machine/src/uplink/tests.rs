//! The uplink with its real programs, between a machine that the test plays and a host that is a
//! network namespace.

use super::filter::tests::{checksum, ipv4, udp};
use super::frames::{body, framed, read_frame};
use super::host::{Changes, Host};
use super::{Kind, Uplink, start};
use dayfly_machine_init::{
    InterfaceMover, UPLINK_ADDRESS, UPLINK_DNS, UPLINK_GATEWAY, set_address, set_up,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::thread::UnshareFlags;
use std::fs::{self, File};
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

/// A host of the internet (RFC 5737), and the user's host on the same link.
const SERVER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);
const HOST: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const MASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 0);
/// Ends only a hang: a busy host may let a program stand still.
const LONG: Duration = Duration::from_secs(240);
/// A port of the user's host, and one of the server.
const PRIVATE: u16 = 7001;
const ECHO: u16 = 7;
const NAME: &[u8] = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01x\x00\x00\x01\x00\x01";

fn enter_new(namespaces: UnshareFlags) {
    assert!(rustix::process::geteuid().is_root(), "makes namespaces: run as root");
    // SAFETY: these flags leave the table of descriptors alone.
    unsafe { rustix::thread::unshare_unsafe(namespaces) }.unwrap();
}

fn busybox(words: &str) {
    let status = Command::new("busybox").args(words.split(' ')).status().unwrap();
    assert!(status.success(), "{words}");
}

/// Makes the calling thread's namespaces those of a host with the resolver and the link of SERVER.
/// Returns the server's sockets: TCP port 80, UDP ports for names and echoes.
fn host(folder: &std::path::Path) -> (TcpListener, UdpSocket, UdpSocket) {
    enter_new(UnshareFlags::NEWNET | UnshareFlags::NEWNS);
    use rustix::mount::{MountPropagationFlags as Propagation, mount_bind, mount_change};
    mount_change("/", Propagation::PRIVATE | Propagation::REC).unwrap();
    let list = folder.join("resolv.conf");
    fs::write(&list, format!("nameserver {SERVER}\n")).unwrap();
    mount_bind(&list, "/etc/resolv.conf").unwrap();
    set_up("lo").unwrap();
    busybox("ip link add lan type veth");
    let table = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let other = table.lines().filter_map(|line| line.trim().split_once(':'));
    let other = other.map(|(name, _)| name.to_owned()).find(|name| name.starts_with("veth"));
    let (other, mover) = (other.unwrap(), InterfaceMover::new().unwrap());
    let server = std::thread::spawn(move || {
        enter_new(UnshareFlags::NEWNET);
        mover.move_to(&other, File::open("/proc/thread-self/ns/net").unwrap()).unwrap();
        set_address(&other, SERVER, MASK).unwrap();
        set_up(&other).unwrap();
        let udp = |port| UdpSocket::bind((SERVER, port)).unwrap();
        (TcpListener::bind((SERVER, 80)).unwrap(), udp(53), udp(ECHO))
    });
    set_address("lan", HOST, MASK).unwrap();
    set_up("lan").unwrap();
    server.join().unwrap()
}

/// The machine's side of an uplink.
struct Machine {
    frames: UnixStream,
    states: Receiver<Uplink>,
}

impl Machine {
    fn send(&mut self, frame: &[u8]) {
        self.frames.write_all(&framed(frame)).unwrap();
    }

    fn syn(&mut self, from: Ipv4Addr, to: Ipv4Addr, port: u16) {
        let mut segment = [0; 20];
        segment[..2].copy_from_slice(&5555_u16.to_be_bytes());
        segment[2..4].copy_from_slice(&port.to_be_bytes());
        (segment[12], segment[13], segment[14]) = (0x50, 2, 0xff);
        let pseudo = [&from.octets()[..], &to.octets(), &[0, 6, 0, 20]].concat();
        let sum = checksum(&[&pseudo[..], &segment].concat());
        segment[16..18].copy_from_slice(&sum.to_be_bytes());
        self.send(&ipv4(6, from, to, &segment));
    }

    /// The next IPv4 packet from `from` with this protocol; answers ARP meanwhile.
    fn packet(&mut self, kind: u8, from: Ipv4Addr) -> Vec<u8> {
        let mut frame = Vec::new();
        loop {
            assert!(read_frame(&mut &self.frames, &mut frame).unwrap(), "the uplink has ended");
            let frame = body(&frame).to_vec();
            match frame[12..14] {
                [8, 6] if frame[21] == 1 && frame[38..42] == UPLINK_ADDRESS.octets() => {
                    let mac = [2, 0xdf, 0, 0, 1, 2];
                    let head = [&frame[6..12], &mac, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2], &mac];
                    let ends = [&UPLINK_ADDRESS.octets()[..], &frame[6..12], &frame[28..32]];
                    self.send(&[head.concat(), ends.concat()].concat());
                }
                [8, 0] if frame[23] == kind && frame[26..30] == from.octets() => {
                    // QEMU pads short frames.
                    let total = usize::from(frame[16]) << 8 | usize::from(frame[17]);
                    return frame[..14 + total].to_vec();
                }
                _ => {}
            }
        }
    }

    /// Sends a datagram to the server and waits for its answer.
    fn echo(&mut self, server: &UdpSocket, text: &[u8]) {
        self.send(&udp(UPLINK_ADDRESS, SERVER, ECHO, text));
        answer(server, text);
        assert_eq!(&self.packet(17, SERVER)[42..], text);
    }

    fn wait_for(&self, what: &str, holds: impl Fn(&Uplink) -> bool) -> Uplink {
        loop {
            let state = self.states.recv_timeout(LONG).expect(what);
            if holds(&state) {
                return state;
            }
        }
    }
}

/// Answers one datagram, which must be `text`, with itself.
fn answer(server: &UdpSocket, text: &[u8]) {
    let mut got = [0; 1000];
    server.set_read_timeout(Some(LONG)).unwrap();
    let (length, from) = server.recv_from(&mut got).unwrap();
    assert_eq!(&got[..length], text);
    server.send_to(text, from).unwrap();
}

/// A handle of this process's only child in this host's namespace whose name begins so.
fn child(name: &str) -> OwnedFd {
    let here = fs::read_link("/proc/thread-self/ns/net").unwrap();
    let children = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let (front, back) = stat.rsplit_once(')')?;
        let parent = back.split_whitespace().nth(1)?;
        let ours = parent == std::process::id().to_string()
            && front.split_once('(')?.1.starts_with(name)
            && fs::read_link(entry.path().join("ns/net")).ok()? == here;
        ours.then_some(pid)
    });
    let children: Vec<i32> = children.collect();
    let [pid] = children[..] else { panic!("{name}: {children:?}") };
    pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap()
}

fn has_ended(program: &OwnedFd) {
    let time = dayfly_machine_init::timespec(LONG);
    assert_eq!(poll(&mut [PollFd::new(program, PollFlags::IN)], Some(&time)), Ok(1));
}

fn uplink(kinds: &'static [Kind], name: &str, by: &str) {
    let folder = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let run = || {
            let (tcp, names, echo) = host(folder.path());
            let (frames, other) = UnixStream::pair().unwrap();
            frames.set_read_timeout(Some(LONG)).unwrap();
            let (sender, states) = mpsc::channel();
            start(folder.path(), kinds, other, move |state| drop(sender.send(state))).unwrap();
            let mut machine = Machine { frames, states };
            let up = |state: &Uplink| matches!(state, Uplink::Up { .. });
            let state = machine.wait_for("the program answers", up);
            assert_eq!(state, Uplink::Up { by: by.to_owned(), without: None });

            machine.echo(&echo, b"one");
            machine.send(&udp(UPLINK_ADDRESS, UPLINK_DNS, 53, NAME));
            answer_name(&names);
            assert_eq!(machine.packet(17, UPLINK_DNS)[54..], NAME[12..]);
            machine.syn(UPLINK_ADDRESS, SERVER, 80);
            assert_eq!(machine.packet(6, SERVER)[47], 0x12, "SYN and ACK");
            tcp.accept().unwrap();

            the_host_is_not_reached(&mut machine, &echo);

            let program = child(name);
            pidfd_send_signal(&program, Signal::KILL).unwrap();
            has_ended(&program);
            machine.wait_for("the end is reported", |state| matches!(state, Uplink::Down { .. }));
            machine.wait_for("another program answers", up);
            machine.echo(&echo, b"three");

            busybox("ip link set lan down");
            machine.wait_for(
                "no route",
                |state| matches!(state, Uplink::Down { why } if why.contains("no route")),
            );
            let program = child(name);
            drop(machine);
            has_ended(&program);
        };
        scope.spawn(run).join().unwrap();
    });
}

/// Answers a question for a name; a resolver may ask with another id.
fn answer_name(server: &UdpSocket) {
    let mut got = [0; 1000];
    server.set_read_timeout(Some(LONG)).unwrap();
    let (length, from) = server.recv_from(&mut got).unwrap();
    assert_eq!(got[2..length], NAME[2..]);
    server.send_to(&got[..length], from).unwrap();
}

/// Nothing that listens on the host is reached: neither by an address of the host, nor by one that
/// a kernel or a program maps to loopback, nor with a forged source.
fn the_host_is_not_reached(machine: &mut Machine, echo: &UdpSocket) {
    let tcp = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PRIVATE)).unwrap();
    let datagrams = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PRIVATE)).unwrap();
    let loopback = Ipv4Addr::LOCALHOST;
    let unspecified = Ipv4Addr::UNSPECIFIED;
    let also = Ipv4Addr::new(127, 0, 1, 1);
    for (from, to) in [
        (UPLINK_ADDRESS, loopback),
        (UPLINK_ADDRESS, also),
        (UPLINK_ADDRESS, unspecified),
        (UPLINK_ADDRESS, HOST),
        (UPLINK_ADDRESS, UPLINK_GATEWAY),
        (UPLINK_ADDRESS, UPLINK_DNS),
        (loopback, loopback),
        (SERVER, HOST),
    ] {
        machine.syn(from, to, PRIVATE);
        machine.send(&udp(from, to, PRIVATE, b"private"));
    }
    // The program handles frames in order, so it would have connected before this answer.
    machine.echo(echo, b"two");
    tcp.set_nonblocking(true).unwrap();
    assert!(tcp.accept().is_err(), "a connection to the host");
    datagrams.set_nonblocking(true).unwrap();
    assert!(datagrams.recv(&mut [0; 100]).is_err(), "a datagram to the host");
    // By comparison, the host itself reaches both.
    std::net::TcpStream::connect((loopback, PRIVATE)).unwrap();
    tcp.accept().unwrap();
}

#[test]
fn passt_reaches_what_the_host_reaches_and_nothing_of_the_host() {
    uplink(&[Kind::Passt], "passt", "passt");
}

#[test]
fn qemus_user_network_does_the_same() {
    uplink(&[Kind::Qemu], "qemu", "QEMU's user network");
}

#[test]
fn a_host_without_a_route_is_not_said_to_be_reached() {
    let folder = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let run = || {
            enter_new(UnshareFlags::NEWNET);
            set_up("lo").unwrap();
            let (frames, other) = UnixStream::pair().unwrap();
            let (sender, states) = mpsc::channel();
            start(folder.path(), &[Kind::Passt], other, move |state| drop(sender.send(state)))
                .unwrap();
            let machine = Machine { frames, states };
            machine.wait_for("the program answers", |state| {
                assert!(!matches!(state, Uplink::Up { .. }), "{state:?}");
                matches!(state, Uplink::Down { why } if why.contains("no route"))
            });
            // A route that comes later counts.
            busybox("ip link add lan type veth");
            set_address("lan", HOST, MASK).unwrap();
            set_up("lan").unwrap();
            machine.wait_for("up", |state| matches!(state, Uplink::Up { .. }));
        };
        scope.spawn(run).join().unwrap();
    });
}

#[test]
fn an_address_that_the_host_gets_later_is_its_own_and_one_that_it_loses_is_not() {
    std::thread::scope(|scope| {
        let run = || {
            enter_new(UnshareFlags::NEWNET);
            let changes = Changes::new().unwrap();
            let has = |address: Ipv4Addr| {
                Host::read().unwrap().own.iter().any(|range| range.contains(address))
            };
            set_up("lo").unwrap();
            assert!(changes.wait());
            assert!(has(Ipv4Addr::LOCALHOST) && !has(HOST));
            set_address("lo", HOST, MASK).unwrap();
            assert!(changes.wait());
            assert!(has(HOST));
            busybox("ip addr flush dev lo");
            assert!(changes.wait());
            assert!(!has(HOST));
        };
        scope.spawn(run).join().unwrap();
    });
}
