//! VMs on the network: reachability, published ports, and forks of a busy web server.

use crate::harness::{
    BASE, World, dayfly, inspect, ok, on_host, port, refused, sh, start, until, wait, world,
};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream, UdpSocket};
use std::time::Duration;

/// The network of VMs that reach each other.
const LAB: &str = "lab";

/// A minimal HTTP/1.1 server with persistent connections, which answers with its host name.
pub const WEB: &str = r#"
import socket, threading
def serve(stream):
    lines = stream.makefile("rb")
    while True:
        head = lines.readline()
        if not head:
            return stream.shutdown(socket.SHUT_RDWR)
        while lines.readline().strip():
            pass
        body = socket.gethostname().encode()
        stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
listener = socket.create_server(("", 80), backlog=256)
open("/run/web", "w").close()
while True:
    stream, _ = listener.accept()
    threading.Thread(target=serve, args=(stream,), daemon=True).start()
"#;

/// Sends requests over eight persistent connections until /run/enough exists. Prints the number of
/// requests, the fewest of a connection, failures, the longest request in ms, and the errors.
const LOAD: &str = r#"
import os, socket, sys, threading, time
address, asked, wrong, worst = sys.argv[1], [0] * 8, [], [0.0] * 8
def ask(n):
    try:
        stream = socket.create_connection((address, 80), 200)
        lines = stream.makefile("rb")
        # Each connection has an answer in the end, however slow the host is.
        while not asked[n] or not os.path.exists("/run/enough"):
            began = time.monotonic()
            stream.sendall(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n")
            length = 0
            while line := lines.readline().strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            body = lines.read(length)
            assert body == b"web", body
            worst[n] = max(worst[n], time.monotonic() - began)
            asked[n] += 1
    except Exception as e:
        wrong.append(repr(e))
threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
[t.start() for t in threads]
open("/run/loading", "w").close()
[t.join() for t in threads]
print(sum(asked), min(asked), len(wrong), round(max(worst) * 1000), *wrong)
"#;

/// Keeps a connection to a server that sends nothing, and notes how it ends.
const WAITING: &str = r#"
import socket, sys
stream = socket.create_connection((sys.argv[1], 80), 200)
stream.settimeout(None)
open("/run/waiting", "w").close()
try:
    end = "end" if not stream.recv(1) else "bytes"
except OSError as e:
    end = type(e).__name__
open("/run/broke", "w").write(end)
"#;

/// Sends one request and prints the answer, which is a host name. The third argument is the time
/// limit in seconds, for a server that does not answer.
const ASK: &str = r#"
import socket, sys
limit = float(sys.argv[3]) if len(sys.argv) > 3 else 200
stream = socket.create_connection((sys.argv[1], int(sys.argv[2])), limit)
stream.sendall(b"GET / HTTP/1.1\r\n\r\n")
lines = stream.makefile("rb")
while lines.readline().strip():
    pass
stream.shutdown(socket.SHUT_WR)
print(lines.read().decode())
"#;

fn address(vm: &str) -> String {
    inspect(vm)["vm"]["network"]["address"]
        .as_str()
        .unwrap_or_else(|| panic!("{vm} has no address"))
        .to_owned()
}

fn python(vm: &str, program: &str, arguments: &[&str]) -> crate::harness::Ended {
    let mut words = vec!["exec", vm, "--", "python3", "-c", program];
    words.extend(arguments);
    dayfly(&words)
}

fn ask(from: &str, server: &str) -> String {
    let got = python(from, ASK, &[server, "80"]);
    assert_eq!(got.code, 0, "{from} asks {server}: {got:?}");
    got.out.trim().to_owned()
}

pub fn wait_for_file(vm: &str, file: &str) {
    until(&format!("{file} in {vm}"), || {
        sh(vm, &format!("test -e {file} && echo yes || :")) == "yes"
    });
}

/// The test's port of this host, published as this port of a VM.
fn published(guest_port: u16) -> String {
    format!("{}:{guest_port}", port(18080))
}

/// What the web server answers at the published port of this host, if anything.
fn fetch() -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port(18080)))?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer.rsplit("\r\n\r\n").next().unwrap_or_default().trim().to_owned())
}

/// Creates a VM with a web server, and one for its clients.
fn web_and_client() -> World {
    let world = world();
    ok(&["create", "--name", "web", "--network", LAB, "--publish", &published(80), BASE]);
    ok(&["create", "--name", "client", "--network", LAB, BASE]);
    ok(&["exec", "-d", "web", "--", "python3", "-c", WEB]);
    wait_for_file("web", "/run/web");
    world
}

/// Starts an echo server at UDP port 53 of a VM.
fn echo_over_udp(vm: &str) {
    let echo = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); \
                s.bind((\"\", 53)); open(\"/run/echo\", \"w\").close()\n\
                while True: d, a = s.recvfrom(65535); s.sendto(d[::-1], a)";
    ok(&["exec", "-d", vm, "--", "python3", "-c", echo]);
    wait_for_file(vm, "/run/echo");
}

/// Asks a VM with [`echo_over_udp`], whose port is published at a free port.
fn asks_over_udp(vm: &str) {
    let at = ok(&["port", vm, "53/udp"]);
    assert!(ok(&["port", vm]).contains(&format!("53/udp -> {}", at.trim())));
    let [one, other] = [(); 2].map(|()| {
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect(at.trim()).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        client
    });
    for (client, said, expected) in [(&one, b"abc", b"cba"), (&other, b"xyz", b"zyx")] {
        // UDP may lose each datagram.
        until("an answer over UDP", || {
            let mut buffer = [0; 16];
            client.send(said).unwrap();
            client.recv(&mut buffer).is_ok_and(|count| &buffer[..count] == expected)
        });
    }
}

#[test]
fn vms_find_each_other_by_name_and_the_host_finds_their_ports() {
    let world = web_and_client();
    assert_eq!(ask("client", &address("web")), "web");
    assert_eq!(ask("client", "web"), "web", "by the search list");
    assert_eq!(ask("client", "web.dayfly.internal"), "web");
    let unknown = python("client", ASK, &["absent.dayfly.internal", "80"]);
    assert!(unknown.code != 0 && unknown.err.contains("gaierror"), "{unknown:?}");
    let place = format!("{}:80", address("web"));
    let got = on_host(&format!("wget -q -O - http://{place}/ || curl -s http://{place}/"));
    assert_eq!(got.out.trim(), "web", "{place}: {got:?}");
    assert_eq!(fetch().unwrap(), "web");
    let taken = port(18080);
    assert!(ok(&["ps"]).contains(&format!("{taken}->80")));
    refused(&["create", "-p", &published(81), BASE], &[&format!("port {taken}")]);
    // A VM without a network has no interface.
    ok(&["create", "--name", "alone", "--network", "none", BASE]);
    assert!(inspect("alone")["vm"]["network"].is_null());
    let got = python("alone", ASK, &[&address("web"), "80"]);
    assert!(got.code != 0, "{got:?}");
    refused(&["create", "--network", "none", "-p", "18081:80", BASE], &["no network"]);
    // A VM outside the network neither reaches its VMs nor resolves their names; one of another
    // network neither.
    ok(&["create", "--name", "stranger", BASE]);
    ok(&["create", "--name", "neighbour", "--network", "other", "--closed", BASE]);
    for outside in ["stranger", "neighbour"] {
        let got = python(outside, ASK, &[&address("web"), "80", "20"]);
        assert!(got.code != 0 && got.err.contains("timed out"), "{outside}: {got:?}");
        let got = python(outside, ASK, &["web.dayfly.internal", "80"]);
        assert!(got.code != 0 && got.err.contains("gaierror"), "{outside}: {got:?}");
    }
    refused(&["create", "--network", "host", BASE], &["host", "a name of your own"]);
    // Removing the VM frees its port.
    ok(&["rm", "-f", "web"]);
    until("the port is free", || TcpStream::connect(("127.0.0.1", taken)).is_err());
    ok(&["create", "--name", "again", "-p", &published(80), "-p", "53/udp", BASE]);
    echo_over_udp("again");
    asks_over_udp("again");
    // The ports of a clone are its request's, and its programs are its parent's.
    let clone = ok(&["fork", "-p", "53/udp", "again"]);
    assert_ne!(ok(&["port", &clone]), ok(&["port", "again"]));
    asks_over_udp(&clone);
    world.clean();
}

#[test]
fn a_daemon_that_was_killed_publishes_again_and_its_vms_keep_their_addresses() {
    let world = web_and_client();
    let before = address("web");
    assert_eq!(on_host("pkill -9 -x dayflyd || killall -9 dayflyd").code, 0);
    assert_eq!(address("web"), before);
    assert_eq!(ask("client", "web"), "web");
    until("the port leads to the VM again", || fetch().is_ok_and(|said| said == "web"));
    let other = ok(&["create", BASE]);
    assert_ne!(address(&other), before, "an address that is taken was given away");
    world.clean();
}

#[test]
fn a_web_server_is_forked_under_load_without_lost_requests() {
    let world = web_and_client();
    // The server's VM has a connection to a third VM, which sends nothing.
    ok(&["create", "--name", "silent", "--network", LAB, BASE]);
    let silent = "import socket, time; s = socket.create_server((\"\", 80)); \
                  open(\"/run/web\", \"w\").close(); c = s.accept(); time.sleep(600)";
    ok(&["exec", "-d", "silent", "--", "python3", "-c", silent]);
    wait_for_file("silent", "/run/web");
    ok(&["exec", "-d", "web", "--", "python3", "-c", WAITING, &address("silent")]);
    wait_for_file("web", "/run/waiting");
    let (web, load) =
        (address("web"), start(&["exec", "client", "--", "python3", "-c", LOAD, &address("web")]));
    wait_for_file("client", "/run/loading");
    let mut clones = Vec::new();
    for _ in 0..3 {
        std::thread::sleep(Duration::from_secs(1));
        let clone = ok(&["fork", "web"]);
        // The first program that the clone serves already finds the inherited connections closed.
        assert_eq!(sh(&clone, "cat /run/broke"), "ConnectionAbortedError", "{clone}");
        // The inherited listener serves at once, at the clone's address.
        assert_ne!(address(&clone), web);
        assert_eq!(
            ask("silent", &address(&clone)),
            inspect(&clone)["vm"]["name"].as_str().unwrap()
        );
        let timeline = inspect(&clone)["timeline"].clone();
        eprintln!("e2e: {clone}: {timeline}");
        clones.push(clone);
    }
    sh("client", "touch /run/enough");
    let load = wait(load);
    assert_eq!(load.code, 0, "{load:?}");
    let counts: Vec<&str> = load.out.split_whitespace().collect();
    eprintln!("e2e: requests, least of a connection, failed, longest in ms: {counts:?}");
    assert_eq!(counts[2], "0", "requests were lost: {counts:?}");
    assert_ne!(counts[1], "0", "a connection stood still: {counts:?}");
    assert_eq!(
        sh("web", "test -e /run/broke || echo open"),
        "open",
        "the parent's own connection was broken"
    );
    // Every VM has a unique address and MAC.
    let mut seen = std::collections::BTreeSet::new();
    for vm in clones.iter().map(String::as_str).chain(["web", "client", "silent"]) {
        let network = inspect(vm)["vm"]["network"].clone();
        let mac = sh(vm, "cat /sys/class/net/eth0/address");
        assert_eq!(network["mac"].as_str(), Some(mac.as_str()), "{vm}");
        assert!(
            seen.insert(mac) && seen.insert(network["address"].to_string()),
            "{vm}: {network} twice"
        );
    }
    world.clean();
}

#[test]
fn no_packet_of_a_clone_passes_before_its_hooks_are_done() {
    let world = world();
    ok(&["create", "--name", "parent", "--network", LAB, BASE]);
    ok(&["create", "--name", "listener", "--network", LAB, BASE]);
    let hook = "mkdir -p /etc/dayfly/clone.d; f=/etc/dayfly/clone.d/10-slow; \
                printf '#!/bin/sh\\nsleep 3\\n' >$f; chmod +x $f";
    sh("parent", hook);
    let listen = r#"
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("", 999))
open("/run/web", "w").close()
while True:
    said, (address, _) = s.recvfrom(99)
    with open("/run/heard", "a") as f:
        f.write("%s %s\n" % (address, said.decode()))
"#;
    ok(&["exec", "-d", "listener", "--", "python3", "-c", listen]);
    wait_for_file("listener", "/run/web");
    let say = r#"
import os, socket, sys, time
while True:
    try:
        with open("/run/dayfly/clone-id") as f:
            who = f.read().strip()
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(who.encode(), (sys.argv[1], 999))
    except OSError:
        pass
    time.sleep(0.02)
"#;
    ok(&["exec", "-d", "parent", "--", "python3", "-c", say, &address("listener")]);
    // Without the last line: of one that goes over a page's end, the first page may be seen alone.
    let heard = || sh("listener", "head -n -1 /run/heard 2>/dev/null | sort | uniq -c || :");
    until("the parent to be heard", || !heard().is_empty());
    let clone = ok(&["fork", "parent"]);
    until("the clone to be heard", || heard().contains(&address(&clone)));
    // Parent and clone each sent their own id from their own address. During the three seconds of
    // its hooks the clone tried to send the parent's id a hundred times. At most one packet with
    // the parent's id may pass: if the program read the id before the hooks ended and sent it
    // after.
    let (parent, own) = (address("parent"), address(&clone));
    let (parent_id, clone_id) =
        (sh("parent", "cat /run/dayfly/clone-id"), sh(&clone, "cat /run/dayfly/clone-id"));
    assert_ne!(parent_id, clone_id);
    for line in heard().lines() {
        let [count, from, who] = line.split_whitespace().collect::<Vec<_>>()[..] else {
            panic!("{line:?}")
        };
        let itself = (from == parent && who == parent_id) || (from == own && who == clone_id);
        assert!(
            itself || (from == own && who == parent_id && count == "1"),
            "{line}, of {parent} and {own}"
        );
    }
    world.clean();
}
