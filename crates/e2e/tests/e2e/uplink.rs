//! VMs in the machine reach what the user's host reaches, and nothing of that host.
//!
//! A network namespace stands for the internet: it has a link to the user's host, a name server
//! and a web server. `crates/machine/src/uplink/tests.rs` has the filter's cases.

use crate::harness::{BASE, dayfly, home, machine, ok, on_host, until, world};
use dayfly_machine::guest::{InterfaceMover, set_address, set_up};
use dayfly_machine::{Machine, Uplink};
use dayfly_units::needs::{Need, met};
use rustix::thread::UnshareFlags;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

/// The server's address, and the address of the user's host on the link (RFC 5737).
pub(crate) const SERVER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);
const HOST: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const MASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 0);
/// The list of the machine's name servers, and that of the uplink.
const RESOLVERS: &str = "/etc/resolv.conf";

/// Asks the server by its name. Then tries each other address, sending first and waiting for
/// nothing, and asks the server again. Prints both answers.
const TRY: &str = r#"
import socket, sys, urllib.request
def get():
    # A busy host lets the machine stand still, and its daemon reads the list of servers every 5 s.
    for n in range(60):
        try:
            return urllib.request.urlopen("http://server.example/", timeout=60).read().decode()
        except OSError as error:
            last = error
            import time; time.sleep(1)
    raise last
first = get()
tried = []
for address in sys.argv[2:]:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        s = socket.socket(socket.AF_INET, kind)
        s.setblocking(False)
        try:
            s.connect((address, int(sys.argv[1])))
            if kind == socket.SOCK_DGRAM: s.send(b"private")
        except OSError:
            pass
        tried.append(s)
print(first, get())
"#;

/// The link and its server; dropping it removes the link and what the machine's list had.
pub(crate) struct Internet {
    /// The host's end of the link.
    link: String,
    /// What has reached the server, in order: `name QUESTION` in lower case, `web`, and
    /// `udp WORDS`, `tcp accepted` and `tcp WORDS` at port 7, which answers with the same words.
    pub(crate) seen: Seen,
}

type Seen = Arc<Mutex<Vec<String>>>;

impl Internet {
    pub(crate) fn new() -> Self {
        // At most 15 characters (IFNAMSIZ).
        let link = format!("dfu{}", std::process::id());
        assert!(ip(&["link", "add", &link, "type", "veth"]), "busybox ip link add {link}");
        let peer = peer(&link);
        let mover = InterfaceMover::new().unwrap();
        let inside = move || {
            // SAFETY: NEWNET leaves the table of descriptors alone.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
            mover.move_to(&peer, File::open("/proc/thread-self/ns/net").unwrap()).unwrap();
            set_address(&peer, SERVER, MASK).unwrap();
            set_up(&peer).unwrap();
            let [names, echo] = [53, 7].map(|port| UdpSocket::bind((SERVER, port)).unwrap());
            let [web, lines] = [80, 7].map(|port| TcpListener::bind((SERVER, port)).unwrap());
            (names, echo, web, lines)
        };
        let (names, echo, web, lines) = std::thread::spawn(inside).join().unwrap();
        set_address(&link, HOST, MASK).unwrap();
        set_up(&link).unwrap();
        let seen = Seen::default();
        let [of_names, of_echo, of_web, of_lines] = std::array::from_fn(|_| seen.clone());
        std::thread::spawn(move || answer_names(&names, &of_names));
        std::thread::spawn(move || answer_packets(&echo, &of_echo));
        std::thread::spawn(move || answer_requests(&web, &of_web));
        std::thread::spawn(move || answer_lines(&lines, &of_lines));
        Self { link, seen }
    }

    /// Has the machine's daemon ask the server for names. The user's own resolvers cannot be
    /// replaced here.
    pub(crate) fn answers_for_the_machine(&self) {
        let replaced =
            format!("cp {RESOLVERS} {RESOLVERS}.kept; echo nameserver {SERVER} >{RESOLVERS}");
        assert_eq!(on_host(&replaced).code, 0);
    }
}

/// Waits until the machine has a way to other hosts.
pub(crate) fn until_the_uplink_is_up() {
    until("the uplink is up", || {
        let status = Machine::open(&home().join("home")).unwrap().status().unwrap();
        matches!(status.uplink, Some(Uplink::Up { .. }))
    });
}

impl Drop for Internet {
    fn drop(&mut self) {
        ip(&["link", "del", &self.link]);
        on_host(&format!("test -e {RESOLVERS}.kept && mv {RESOLVERS}.kept {RESOLVERS}"));
    }
}

/// Runs busybox's ip and returns whether it succeeded.
fn ip(words: &[&str]) -> bool {
    Command::new("busybox").arg("ip").args(words).output().unwrap().status.success()
}

/// The other end of a veth, whose name the kernel has chosen.
fn peer(name: &str) -> String {
    let all = Path::new("/sys/class/net");
    let number = |name: &str, file| std::fs::read_to_string(all.join(name).join(file)).ok();
    let wanted = number(name, "iflink").unwrap();
    let names = std::fs::read_dir(all).unwrap();
    let mut names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.find(|name| number(name, "ifindex").as_ref() == Some(&wanted)).unwrap()
}

/// Answers each question for an IPv4 address with [`SERVER`], each other one with nothing
/// (RFC 1035, section 4).
fn answer_names(socket: &UdpSocket, seen: &Seen) {
    let mut question = [0; 512];
    while let Ok((length, from)) = socket.recv_from(&mut question) {
        let question = &question[..length];
        let labels = question.get(12..).unwrap_or_default();
        let Some(end) = labels.iter().position(|byte| *byte == 0) else { continue };
        let asked = &labels[..end + 5];
        let is_a = asked[end + 1..] == [0, 1, 0, 1];
        let letter = |byte: u8| if byte < b' ' { '.' } else { char::from(byte) };
        let name = asked.get(1..end).unwrap_or_default();
        let name: String = name.iter().map(|byte| letter(*byte)).collect();
        seen.lock().unwrap().push(format!("name {name}"));
        let mut answer = question[..2].to_vec();
        answer.extend_from_slice(&[0x81, 0x80, 0, 1, 0, u8::from(is_a), 0, 0, 0, 0]);
        answer.extend_from_slice(asked);
        if is_a {
            answer.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
            answer.extend_from_slice(&SERVER.octets());
        }
        drop(socket.send_to(&answer, from));
    }
}

fn answer_packets(socket: &UdpSocket, seen: &Seen) {
    let mut words = [0; 512];
    while let Ok((length, from)) = socket.recv_from(&mut words) {
        let text = String::from_utf8_lossy(&words[..length]);
        seen.lock().unwrap().push(format!("udp {text}"));
        drop(socket.send_to(&words[..length], from));
    }
}

fn answer_lines(listener: &TcpListener, seen: &Seen) {
    while let Ok((stream, _)) = listener.accept() {
        let seen = seen.clone();
        seen.lock().unwrap().push("tcp accepted".to_owned());
        std::thread::spawn(move || {
            let mut writer = stream.try_clone().unwrap();
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                seen.lock().unwrap().push(format!("tcp {line}"));
                drop(writeln!(writer, "{line}"));
            }
        });
    }
}

fn answer_requests(listener: &TcpListener, seen: &Seen) {
    while let Ok((mut stream, _)) = listener.accept() {
        seen.lock().unwrap().push("web".to_owned());
        drop(stream.read(&mut [0; 4096]));
        drop(stream.write_all(b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello"));
    }
}

/// A port of the user's host at which a VM must not arrive, for TCP and for UDP.
fn private_port() -> (u16, TcpListener, UdpSocket) {
    loop {
        let tcp = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let port = tcp.local_addr().unwrap().port();
        // Another program may have the port for UDP.
        if let Ok(udp) = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)) {
            return (port, tcp, udp);
        }
    }
}

#[test]
fn a_guest_reaches_a_server_by_name_and_nothing_of_the_users_host() {
    let root = rustix::process::geteuid().is_root();
    if !met(Need::Machine, machine()) || !met(Need::Root, root) {
        return;
    }
    let world = world();
    let internet = Internet::new();
    until_the_uplink_is_up();
    internet.answers_for_the_machine();
    let (port, tcp, udp) = private_port();
    ok(&["create", "--name", "surfer", BASE]);
    let port = port.to_string();
    let mut words = vec!["exec", "surfer", "--", "python3", "-c", TRY, &port];
    let host = HOST.to_string();
    let addresses = [host.as_str(), "10.0.2.2", "169.254.77.1", "169.254.77.3", "0.0.0.1"];
    words.extend(addresses);
    let got = dayfly(&words);
    assert_eq!((got.code, got.out.trim()), (0, "hello hello"), "{got:?}");
    // The second answer came after all tries, in the same queue.
    tcp.set_nonblocking(true).unwrap();
    udp.set_nonblocking(true).unwrap();
    assert!(tcp.accept().is_err(), "a guest has reached the user's host");
    assert!(udp.recv(&mut [0; 100]).is_err(), "a guest has reached the user's host");
    drop(internet);
    world.clean();
}
