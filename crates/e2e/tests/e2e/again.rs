//! VMs that have ended and boot from their own disks.

use crate::harness::{BASE, inspect, ok, port, refused, sh, until, world};
use crate::networks::{WEB, wait_for_file};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

/// What must be the same after a VM started again.
fn identity(vm: &str) -> String {
    let of_the_guest = sh(vm, "cat /etc/machine-id; hostname; cat /root/kept /usr/bin/* | md5sum");
    let shown = inspect(vm);
    let shown = &shown["vm"];
    format!("{of_the_guest} {} {} {}", shown["id"], shown["name"], shown["labels"])
}

#[test]
#[ignore = "minutes: make long"]
fn vms_that_ended_start_with_their_files_and_identity() {
    let world = world();
    for (name, end) in [("off", "stop"), ("dead", "kill")] {
        ok(&["create", "--name", name, "--label", "tier=web", "--ttl", "7d", BASE]);
        // Blocks of the image are written, freed and discarded.
        sh(
            name,
            "set -e; echo kept >/root/kept; rm -rf /usr/share/doc; \
             head -c 4M /dev/urandom >/root/x; sync; rm /root/x; sync; fstrim /; sync",
        );
        let before = identity(name);
        let boot = sh(name, "cat /proc/sys/kernel/random/boot_id");
        ok(&[end, name]);
        ok(&["start", name]);
        assert_eq!(identity(name), before, "{name}");
        assert_ne!(sh(name, "cat /proc/sys/kernel/random/boot_id"), boot, "a boot, not a clone");
        assert_eq!(sh(name, "ls /usr/share/doc 2>/dev/null; touch /root/w && echo works"), "works");
        assert!(inspect(name)["vm"]["ends_unix_ms"].is_u64());

        ok(&["snapshot", name, "-t", "e2e-again"]);
        ok(&["create", "--name", "copy", "e2e-again"]);
        assert_eq!(sh("copy", "cat /root/kept"), "kept");
        ok(&["rm", "--force", "copy"]);
        ok(&["snapshots", "rm", "e2e-again"]);
        let clone = ok(&["fork", name]);
        assert_eq!(sh(&clone, "cat /root/kept"), "kept");
        ok(&["rm", "--force", &clone]);
    }
    ok(&["restart", "-t", "60s", "off"]);
    assert_eq!(sh("off", "cat /root/kept"), "kept");

    // Published ports are published again.
    let place = format!("127.0.0.1:{}", port(18090));
    ok(&["create", "--name", "web", "-p", &format!("{place}:80"), BASE]);
    let published = ok(&["port", "web"]);
    for again in [false, true] {
        if again {
            ok(&["restart", "-t", "60s", "web"]);
        }
        assert_eq!(ok(&["port", "web"]), published);
        ok(&["exec", "-d", "web", "--", "python3", "-c", WEB]);
        wait_for_file("web", "/run/web");
        let mut stream = TcpStream::connect(&place).unwrap();
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.ends_with("web"), "{answer}");
    }
    until("it is listed as started", || {
        ok(&["events", "--since", "1d", "--until", "now", "--filter", "vm=off"]).contains("started")
    });
    ok(&["create", "--rm", "--name", "brief", BASE]);
    refused(&["restart", "brief"], &["--rm"]);
    world.clean();
}
