//! Egress policies of Debian guests: TCP, UDP, ICMP, names, open connections, and inheritance.

use crate::harness::{BASE, inspect, machine, ok, sh, start, until, wait, world};
use crate::uplink::{Internet, SERVER, until_the_uplink_is_up};
use dayfly_units::needs::{Need, met};

/// Asks for a name until it is answered, because the machine's daemon reads its list of servers
/// every 5 s. Then sends what must not arrive, without waiting for anything, and at last what must.
const TRY: &str = r#"
import os, socket, sys, time
server, forbidden, allowed = sys.argv[1], sys.argv[2].split(), sys.argv[3].split()
def named(name, tries):
    for n in range(tries):
        try: return socket.gethostbyname(name)
        except OSError: time.sleep(1)
def use(what, wait):
    kind, word = what.split(":")
    if kind == "name":
        assert named(word, 120 if wait else 1) == (server if wait else None), what
    elif kind == "udp":
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for n in range(60):
            s.settimeout(10)
            s.sendto(word.encode(), (server, 7))
            if not wait: return
            try: return s.recv(100)
            except TimeoutError: pass
        raise Exception(what)
    elif kind == "tcp":
        s = socket.socket()
        s.settimeout(300 if wait else 0)
        try: s.connect((server, 7))
        except BlockingIOError: pass
        open_ones.append(s)
        if wait:
            s.sendall(word.encode() + b"\n")
            assert s.recv(100).decode().strip() == word
    elif kind == "ping":
        s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
        s.sendto(b"\x08\0\xf7\xfd\0\1\0\1", (server, 0))
open_ones = []
for what in forbidden: use(what, False)
for what in allowed: use(what, True)
print("done")
"#;

/// Opens a connection, waits for a file, and sends more.
const OPEN: &str = r#"
import os, socket, sys, time
s = socket.create_connection((sys.argv[1], 7), timeout=300)
s.sendall(b"open\n")
assert s.recv(100) == b"open\n"
while not os.path.exists("/run/go"): time.sleep(0.2)
s.sendall(b"cut\n")
print("sent")
"#;

fn refused(vm: &str, what: &str) -> u64 {
    inspect(vm)["refused"][what].as_u64().unwrap()
}

/// Sends from a VM what must not arrive and what must.
fn tries(vm: &str, forbidden: &str, allowed: &str) {
    let server = SERVER.to_string();
    let words = ["exec", vm, "--", "python3", "-c", TRY, &server, forbidden, allowed];
    assert_eq!(ok(&words), "done", "{vm}: {forbidden}; {allowed}");
}

#[test]
#[ignore = "minutes in the machine: make long"]
fn a_guest_reaches_what_its_policy_names_and_so_do_its_clones() {
    let root = rustix::process::geteuid().is_root();
    if !met(Need::Machine, machine()) || !met(Need::Root, root) {
        return;
    }
    let world = world();
    let internet = Internet::new();
    until_the_uplink_is_up();
    internet.answers_for_the_machine();
    let seen = || std::mem::take(&mut *internet.seen.lock().unwrap());
    let policy = |vm: &str| inspect(vm)["vm"]["network"]["egress"].clone();

    // TCP by name and no UDP, no ping, no other name.
    ok(&["create", "--name", "limited", "--forks", "1", "--egress", "server.example:tcp:7", BASE]);
    assert_eq!(policy("limited"), "server.example:tcp:7");
    tries("limited", "udp:no ping:x name:data.evil.example", "name:server.example tcp:yes");
    let all = seen();
    assert!(all.contains(&"tcp yes".to_owned()), "{all:?}");
    let asks = |one: &String| one.starts_with("name ") && one != "name server.example";
    assert!(!all.iter().any(|one| asks(one) || one.starts_with("udp")), "{all:?}");
    assert!(refused("limited", "packets") >= 2 && refused("limited", "names") >= 1);

    // A clone, a clone that the guest makes, and a snapshot.
    ok(&["fork", "--name", "child", "limited"]);
    let own = sh("limited", "/run/dayfly/dayfly-fork");
    let own = own.split_whitespace().last().unwrap().to_owned();
    ok(&["snapshot", "limited", "-t", "kept"]);
    ok(&["create", "--name", "later", "kept"]);
    for vm in ["child", &own, "later"] {
        assert_eq!(policy(vm), "server.example:tcp:7", "{vm}");
    }
    tries("child", "udp:child ping:x name:data.evil.example", "name:server.example tcp:child");
    let all = seen();
    assert!(all.contains(&"tcp child".to_owned()), "{all:?}");
    assert!(!all.iter().any(|one| asks(one) || one.starts_with("udp")), "{all:?}");

    // A connection that was open is cut; UDP and ping are permitted instead.
    let server = SERVER.to_string();
    let open = start(&["exec", "limited", "--", "python3", "-c", OPEN, &server]);
    until("the connection is open", || seen().contains(&"tcp open".to_owned()));
    let rules = format!("{SERVER}:udp,{SERVER}:icmp");
    ok(&["update", "--egress", &rules, "limited"]);
    let before = refused("limited", "packets");
    sh("limited", "touch /run/go");
    assert_eq!(wait(open).out.trim(), "sent");
    until("a packet of the connection is refused", || refused("limited", "packets") > before);
    tries("limited", "name:server.example tcp:no", "udp:now");
    let all = seen();
    assert!(all.contains(&"udp now".to_owned()), "{all:?}");
    assert!(!all.iter().any(|one| one.starts_with("tcp") || one.starts_with("name")), "{all:?}");
    // A ping is not refused any more.
    let before = refused("limited", "packets");
    tries("limited", "ping:x", "udp:then");
    assert_eq!(refused("limited", "packets"), before);
    until("the datagram has arrived", || seen().contains(&"udp then".to_owned()));
    // The clones keep theirs.
    assert_eq!(policy("child"), "server.example:tcp:7");
    ok(&["update", "--egress", "none", "limited"]);
    tries("limited", "name:server.example tcp:no udp:no ping:x", "");
    let all = seen();
    assert!(all.is_empty(), "{all:?}");
    ok(&["update", "--egress", "internet", "limited"]);
    tries("limited", "", "name:server.example tcp:free udp:free");
    let all = seen();
    assert!(["tcp free", "udp free"].iter().all(|one| all.contains(&(*one).to_owned())), "{all:?}");
    drop(internet);
    world.remove_all();
    ok(&["snapshots", "rm", "kept"]);
    world.clean();
}
