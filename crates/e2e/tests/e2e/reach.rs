//! A guest reaches only the DNS of its gateway in the machine that its VM runs in.
//!
//! The machine's control (exec as root, the daemon's whole API) listens in a separate network
//! namespace. It must not answer a guest, whatever the packet filter does.

use crate::harness::{BASE, bin, dayfly, home, machine, ok, on_host, start_on_host, until, world};
use dayfly_machine::{Machine, copy_in};
use dayfly_units::needs::{Need, met};
use std::collections::BTreeSet;
use std::fs::File;
use std::net::{Ipv4Addr, Ipv6Addr, TcpStream};

/// The guests' gateway and DNS server.
const GATEWAY: &str = "10.88.0.1";
/// Addresses at which a guest could look for the machine's control.
const CONTROL_ADDRESSES: [&str; 4] = ["10.0.2.15", "10.0.2.2", "10.88.255.254", GATEWAY];
/// A port of a VM that is published at every address.
const PUBLISHED: u16 = 18090;
/// The port of a service in the machine.
const SERVICE: u16 = 18091;
/// The program that [`Machine`] runs to count and remove packet filters.
const UNFILTER: &str = "/root/dayfly-unfilter";

/// Tries all addresses and ports at once, as the given user, and prints each that answers. A TCP
/// port answers if it accepts a connection, a UDP port if it answers a DNS question.
const TRY: &str = r#"
import os, socket, sys, threading
user, addresses, ports = sys.argv[1], sys.argv[2].split(), sys.argv[3].split()
if user != "root":
    import pwd
    os.setgroups([])
    os.setgid(pwd.getpwnam(user).pw_gid)
    os.setuid(pwd.getpwnam(user).pw_uid)
    assert os.getuid() != 0
QUESTION = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07gateway\x00\x00\x01\x00\x01"
SCOPE = "%eth0"
def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET
def whole(address, port):
    scoped = address + SCOPE if address.startswith("fe80") else address
    return socket.getaddrinfo(scoped, port, family(address))[0][4]
def limit(address, port):
    # What must answer has time on a busy host.
    return 200 if (address, port) == ("10.88.0.1", 53) else 10
def tcp(address, port):
    with socket.socket(family(address), socket.SOCK_STREAM) as s:
        s.settimeout(limit(address, port))
        s.connect(whole(address, port))
def udp(address, port):
    with socket.socket(family(address), socket.SOCK_DGRAM) as s:
        s.settimeout(limit(address, port))
        s.connect(whole(address, port))
        s.send(QUESTION)
        s.recv(512)
answered = []
def one(address, kind, port):
    try:
        {"tcp": tcp, "udp": udp}[kind](address, int(port))
    except OSError:
        return
    answered.append(f"{kind} {address} {port}")
tries = [(a, *p.split("/")) for a in addresses for p in ports]
threads = [threading.Thread(target=one, args=t) for t in tries]
[t.start() for t in threads]
[t.join() for t in threads]
print(len(tries))
[print(a) for a in sorted(answered)]
"#;

/// The attack: a frame that requests a program as root from the exec port, and requests to the API
/// port.
const ATTACK: &str = r#"
import http.client, json, os, socket, struct, sys, threading
if sys.argv[1] != "root":
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
got = []
def run(host, root):
    s = socket.create_connection((host, 1025), 10)
    s.settimeout(30)
    spec = {"argv": ["sh", "-c", "id; uname -n"], "env": [], "cwd": None, "root": root, "tty": None}
    body = json.dumps({"exec": spec}).encode()
    s.sendall(b"\x01" + struct.pack("<I", len(body)) + body)
    return f"exec {host} {s.recv(65536)!r}"
def ask(host, method, path):
    c = http.client.HTTPConnection(host, 1024, timeout=10)
    c.request(method, path)
    return f"api {host} {method} {c.getresponse().status}"
def one(attack, *words):
    try:
        got.append(attack(*words))
    except OSError:
        pass
attacks = [(run, "machine"), (run, "host"), (ask, "GET", "/v1/vms"),
    (ask, "DELETE", "/v1/vms/good?force=true")]
threads = [threading.Thread(target=one, args=(a[0], host, *a[1:]))
    for a in attacks for host in sys.argv[2].split()]
[t.start() for t in threads]
[t.join() for t in threads]
print(len(threads))
[print(line) for line in got]
"#;

/// Output of a program in the VM, line by line.
fn python(vm: &str, program: &str, arguments: &[&str]) -> Vec<String> {
    let mut words = vec!["exec", vm, "--", "python3", "-c", program];
    words.extend(arguments);
    let got = dayfly(&words);
    assert_eq!(got.code, 0, "{got:?}");
    got.out.lines().map(str::to_owned).collect()
}

/// The address of a socket table's column, which is hexadecimal words in the host's order.
fn address(hex: &str) -> String {
    let words: Vec<u32> = (0..hex.len() / 8)
        .map(|n| u32::from_str_radix(&hex[8 * n..8 * n + 8], 16).unwrap().swap_bytes())
        .collect();
    match words[..] {
        [word] => Ipv4Addr::from(word).to_string(),
        [a, b, c, d] => {
            let all =
                [a, b, c, d].into_iter().fold(0_u128, |sum, word| sum << 32 | u128::from(word));
            Ipv6Addr::from(all).to_string()
        }
        _ => panic!("{hex}: expected 8 or 32 digits"),
    }
}

/// `tcp/PORT` or `udp/PORT`, and address, of every socket that listens in the machine: in its first
/// network namespace, and in the VM network namespace.
fn listeners() -> BTreeSet<(String, String)> {
    let show = "for t in tcp tcp6 udp udp6; do sed \"s/^/$t /\" /proc/net/$t; done";
    let tables = on_host(&format!("{show}; nsenter --net=/run/dayfly/netns sh -c '{show}'"));
    assert_eq!(tables.code, 0, "{tables:?}");
    let mut found = BTreeSet::new();
    for line in tables.out.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [table, number, local, _, state, ..] = fields[..] else { continue };
        // 0A is TCP_LISTEN; a UDP socket has no such state.
        if !number.ends_with(':') || (table.starts_with("tcp") && state != "0A") {
            continue;
        }
        let (host, port) = local.split_once(':').unwrap();
        let port = u16::from_str_radix(port, 16).unwrap();
        found.insert((format!("{}/{port}", &table[..3]), address(host)));
    }
    found
}

/// Every local address of the machine's first namespace.
fn addresses() -> BTreeSet<String> {
    let text = on_host("ip -o addr").out;
    let words: Vec<&str> = text.split_whitespace().collect();
    let of = |pair: &[&str]| {
        pair[0].starts_with("inet").then(|| pair[1].split('/').next().unwrap().to_owned())
    };
    words.windows(2).filter_map(of).collect()
}

#[test]
fn a_guest_reaches_nothing_of_its_machine_but_dns() {
    // dayfly-host tests what a native host answers to a guest.
    if !met(Need::Machine, machine()) {
        return;
    }
    let world = world();
    ok(&["create", "--name", "evil", BASE]);
    ok(&["create", "--name", "good", "--publish", &format!("0.0.0.0:{PUBLISHED}:80"), BASE]);
    // A service of the machine that listens at every address.
    let mut service = start_on_host(&format!("nc -ll -p {SERVICE} -e true"));
    until("the service listens", || {
        listeners().iter().any(|(port, _)| *port == format!("tcp/{SERVICE}"))
    });
    let listeners = listeners();
    let dns = |kind: &str| (format!("{kind}/53"), GATEWAY.to_owned());
    assert!(listeners.contains(&dns("udp")) && listeners.contains(&dns("tcp")), "{listeners:?}");
    // The machine's supervisor listens, on the user's host.
    TcpStream::connect(("127.0.0.1", PUBLISHED)).unwrap();
    let control = ["tcp/1024", "tcp/1025", "tcp/1026", "tcp/1027"];
    for port in control {
        let known = listeners.iter().find(|(listener, _)| listener == port);
        assert!(known.is_none(), "the control listens where VMs' packets arrive: {known:?}");
    }
    let mut ports: BTreeSet<String> = listeners.into_iter().map(|(port, _)| port).collect();
    ports.extend(control.map(str::to_owned));
    ports.insert(format!("tcp/{PUBLISHED}"));
    let mut addresses = addresses();
    assert!(addresses.contains("10.88.255.254"), "the VMs' uplink: {addresses:?}");
    addresses.extend(CONTROL_ADDRESSES.map(str::to_owned));
    // In a guest these addresses are the guest's loopback.
    addresses.retain(|address| address != "127.0.0.1" && address != "::1");
    let words = |set: &BTreeSet<String>| set.iter().cloned().collect::<Vec<_>>().join(" ");
    let (addresses, ports) = (words(&addresses), words(&ports));
    eprintln!("e2e: trying {ports} at {addresses}");
    for user in ["root", "nobody"] {
        let lines = python("evil", TRY, &[user, &addresses, &ports]);
        let (count, answered) = lines.split_first().unwrap();
        let tries = addresses.split(' ').count() * ports.split(' ').count();
        assert_eq!(count, &tries.to_string());
        let expected = ["tcp 10.88.0.1 53", "udp 10.88.0.1 53"];
        assert_eq!(answered, expected, "{user}: what answers at {addresses} of {ports}");
    }
    drop(service.kill());
    drop(service.wait());
    world.clean();
}

#[test]
fn the_machines_control_refuses_a_guest_and_the_packet_filter_comes_back() {
    if !met(Need::Machine, machine()) {
        return;
    }
    let world = world();
    ok(&["create", "--name", "evil", BASE]);
    ok(&["create", "--name", "good", BASE]);
    let inside = Machine::open(&home().join("home")).unwrap();
    copy_in(&inside, &mut File::open(bin().join("dayfly-unfilter")).unwrap(), UNFILTER, 0o755)
        .unwrap();
    let tables = || on_host(&format!("{UNFILTER} count")).out.trim().to_owned();
    let attack = || {
        for user in ["root", "nobody"] {
            let lines = python("evil", ATTACK, &[user, &CONTROL_ADDRESSES.join(" ")]);
            assert_eq!(lines, [(4 * CONTROL_ADDRESSES.len()).to_string()], "{user}");
        }
        assert_eq!(ok(&["exec", "good", "--", "echo", "alive"]), "alive");
    };
    let with_filter = tables();
    assert_ne!(with_filter, "0", "the daemon's packet filter");
    attack();
    // The kernel notifies the daemon that its table is gone, and the daemon sets it again. The next
    // daemon sets it, too.
    let stopped = format!("kill -STOP $(pidof dayflyd); {UNFILTER} flush; {UNFILTER} count");
    let flushed = on_host(&format!("{stopped}; kill -CONT $(pidof dayflyd)"));
    assert_eq!((flushed.code, flushed.out.trim()), (0, "0"), "{flushed:?}");
    until("the packet filter is there again", || tables() == with_filter);
    attack();
    on_host(&format!("kill -9 $(pidof dayflyd); {UNFILTER} flush"));
    until("the next daemon's packet filter", || {
        dayfly(&["ps", "-q"]).code == 0 && tables() == with_filter
    });
    world.clean();
}
