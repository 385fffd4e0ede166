//! Guests of a host whose disk gets full: none gets an error, and all go on.

use crate::harness::{BASE, dayfly, machine, ok, on_host, refused, sh, state_dir, until, world};

/// Guests of the test.
const GUESTS: usize = 20;
/// Bytes that each guest writes: more than the share of a VM on the machine's disk, 16 MiB.
const EACH_BYTES: usize = 40 << 20;
/// Free space for all guests together, in MiB, beside what is kept for their shares.
const LEFT_MIB: u64 = 100;

/// A guest's program: a file of random bytes, its checksum, and a mark when both are on the disk.
fn write() -> String {
    format!(
        "head -c {EACH_BYTES} /dev/urandom >/root/file && sha256sum /root/file >/root/sum && sync \
         && touch /run/written"
    )
}

/// Free bytes of the host's disk.
fn free() -> u64 {
    // The machine's df is busybox's.
    let got = on_host(&format!("stat -f -c '%a %S' {}", state_dir()));
    let numbers: Vec<u64> = got.out.split_whitespace().map(|n| n.parse().unwrap()).collect();
    assert_eq!(numbers.len(), 2, "{got:?}");
    numbers[0] * numbers[1]
}

fn states() -> Vec<String> {
    let vms = ok(&["ps", "--format", "json"]);
    let vms = vms.lines().map(|vm| serde_json::from_str::<serde_json::Value>(vm).unwrap());
    vms.map(|vm| vm["paused_for"].as_str().unwrap_or("runs").to_owned()).collect()
}

#[test]
#[ignore = "long: fills the machine's disk"]
fn twenty_debian_guests_on_a_full_disk_go_on_with_clean_file_systems() {
    let world = world();
    assert!(machine(), "natively this test would fill the disk of this host");
    let count = GUESTS.to_string();
    ok(&["create", "--count", &count, BASE]);
    let guests: Vec<String> = ok(&["ps", "-q"]).lines().map(ToOwned::to_owned).collect();
    assert_eq!(guests.len(), GUESTS);
    let other = format!("{}/other", state_dir());
    // Half of the reserve of 1 GiB, and the shares.
    let kept = (512 << 20) + GUESTS as u64 * (16 << 20);
    let take = free() - (kept + (LEFT_MIB << 20));
    let filled = on_host(&format!("fallocate -l {take} {other}"));
    assert_eq!(filled.code, 0, "{filled:?}");
    for guest in &guests {
        ok(&["exec", "-d", guest, "--", "/bin/sh", "-c", &write()]);
    }
    until("guests wait for space", || states().iter().any(|state| state == "no_space"));
    refused(&["create", BASE], &["free on the file system", "store gc"]);
    assert_eq!(on_host(&format!("rm {other}")).code, 0);
    until("all guests go on", || states().iter().all(|state| state == "runs"));
    for guest in &guests {
        until("a guest has written", || {
            dayfly(&["exec", guest, "test", "-e", "/run/written"]).code == 0
        });
        assert!(sh(guest, "sha256sum -c /root/sum").contains("OK"), "{guest}");
        // The kernel stops writing to all file systems (sysrq-trigger), so the check is exact.
        let check = "echo u >/proc/sysrq-trigger; \
                     until grep -q ' / ext4 ro' /proc/mounts; do :; done; e2fsck -fn /dev/vda";
        let got = dayfly(&["exec", guest, "--", "/bin/sh", "-c", check]);
        assert_eq!(got.code, 0, "{guest}: {}{}", got.out, got.err);
        let said = sh(guest, "dmesg | grep -c 'I/O error' || true");
        assert_eq!(said.trim(), "0", "{guest}");
    }
    world.clean();
}
