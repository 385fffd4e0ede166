//! Memory that a stock guest frees is the host's again.

use crate::harness::{BASE, ok, sh, until, world};
use crate::lazy::another_daemon;
use serde_json::Value;

/// Bytes that the guest fills and frees.
const FILLED: u64 = 64 << 20;

fn own_bytes(vm: &str) -> u64 {
    let of: Value = serde_json::from_str(&ok(&["stats", vm, "--format", "json"])).unwrap();
    of["colours"].as_array().unwrap().iter().map(|of| of["own_bytes"].as_u64().unwrap()).sum()
}

/// A command that fills a folder in the guest's memory, until `umount /mnt`.
fn fill(bytes: u64) -> String {
    format!("mount -t tmpfs none /mnt && head -c {bytes} /dev/urandom >/mnt/new")
}

/// The own bytes of a VM that has used the programs that fill. These stay in its memory.
fn own_bytes_before(vm: &str) -> u64 {
    sh(vm, &format!("{}; umount /mnt", fill(2 << 20)));
    own_bytes(vm)
}

#[test]
#[ignore = "long"]
fn memory_that_a_guest_frees_is_the_hosts_and_its_clones_are_sound() {
    let world = world();
    ok(&["create", "--name", "giver", BASE]);
    let (sums, drivers) = (
        "sha256sum /root/file /bin/busybox /usr/bin/* 2>/dev/null | sha256sum",
        "ls /sys/bus/virtio/drivers/virtio_balloon/ | grep -c virtio",
    );
    assert_eq!(sh("giver", drivers).trim(), "1");
    sh("giver", "head -c 3000000 /dev/urandom >/root/file; sync");
    let expected = sh("giver", sums);
    let before = own_bytes_before("giver");
    sh("giver", &fill(FILLED));
    let full = own_bytes("giver");
    assert!(full >= before + FILLED / 10 * 9, "{before} bytes, then {full}");
    // The kernel begins to report after 2 s, and works through its lists in turns.
    sh("giver", "umount /mnt");
    let most = before + FILLED / 10;
    until("the guest's memory is given back", || own_bytes("giver") <= most);
    assert_eq!(sh("giver", sums), expected, "the guest is sound");

    // A fork, a snapshot, and a clone whose memory arrives while it runs.
    ok(&["fork", "giver", "--name", "forked"]);
    assert_eq!(sh("forked", sums), expected);
    ok(&["rm", "-f", "forked"]);
    ok(&["snapshot", "giver", "-t", "e2e-given"]);
    ok(&["rm", "-f", "giver"]);
    another_daemon();
    assert_eq!(ok(&["run", "e2e-given", "/bin/sh", "-c", sums]).trim(), expected.trim());
    // A clone gives back what it wrote, but for what lies in blocks of less than 2 MiB.
    ok(&["create", "--name", "clone", "e2e-given"]);
    let before = own_bytes_before("clone");
    sh("clone", &format!("{}; umount /mnt", fill(FILLED)));
    let most = before + FILLED / 4;
    until("the clone's memory is given back", || own_bytes("clone") <= most);
    assert_eq!(sh("clone", sums), expected);
    ok(&["rm", "-f", "clone"]);
    ok(&["snapshots", "rm", "e2e-given"]);
    world.clean();
}
