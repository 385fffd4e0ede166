//! Clones that run before their template's memory is read.

use crate::harness::{
    BASE, ok, on_host, sh, start, start_on_host, unless_the_machine_stands_still, until, wait,
    world,
};
use serde_json::Value;
use std::io::Read;

/// Replaces the daemon by a new one, which has only those templates open that were cloned last.
pub fn another_daemon() {
    let pid = || on_host("pidof dayflyd").out;
    let before = pid();
    assert_eq!(on_host("pkill -TERM -x dayflyd || killall -TERM dayflyd").code, 0);
    until("another daemon", || {
        let now = pid();
        !now.trim().is_empty() && now != before
    });
    until("its answer", || ok(&["ps", "-q"]).is_empty());
}

#[test]
#[ignore = "long"]
fn clones_have_all_of_their_memory_and_their_template_is_read_once() {
    unless_the_machine_stands_still(three_clones_of_one_template);
}

fn three_clones_of_one_template() {
    let world = world();
    ok(&["create", "--name", "early", BASE]);
    sh(
        "early",
        "head -c 20000000 /dev/urandom >/dev/shm/file; \
         head -c 3000000 /dev/urandom >/root/file; sync",
    );
    let sums = "sha256sum /dev/shm/file /root/file /bin/busybox /usr/bin/* 2>/dev/null | sha256sum";
    let expected = sh("early", sums);
    ok(&["snapshot", "early", "-t", "e2e-late"]);
    ok(&["rm", "-f", "early"]);
    another_daemon();
    // The pager that waits for a snapshot has one thread.
    let serving = "ls -d /proc/[0-9]*/task/*/comm | xargs grep -lsx ahead | wc -l";
    let pagers = || on_host(serving).out.trim().parse::<usize>().unwrap();
    // The base's template is opened first, so that the two share memory.
    ok(&["run", BASE, "true"]);
    until("the base's pager's end", || pagers() == 0);
    // A loop on the host, because the pager may end sooner than one `on_host` takes while clones
    // use the CPU.
    let one = format!(
        "echo ready; for n in $(seq 4000); do \
         [ \"$({serving})\" = 1 ] && exit; sleep 0.02; done; exit 1"
    );
    let mut seen = start_on_host(&one);
    seen.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
    let clones: Vec<_> =
        (0..3).map(|_| start(&["run", "e2e-late", "/bin/sh", "-c", sums])).collect();
    for clone in clones {
        let got = wait(clone);
        assert_eq!((got.code, got.out.trim()), (0, expected.trim()), "{got:?}");
    }
    assert_eq!(wait(seen).code, 0, "one pager for three clones");
    // A snapshot of a clone waits until the template is complete; then the pager ends.
    ok(&["create", "--name", "late", "e2e-late"]);
    ok(&["snapshot", "late", "-t", "e2e-later"]);
    until("the pager's end", || pagers() == 0);
    // The snapshot shares most of its memory with the base, once in the host's memory.
    let snapshots = ok(&["snapshots", "--format", "json"]);
    let mut snapshots = snapshots.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let late = snapshots.find(|s| s["name"] == "e2e-late").unwrap();
    let bytes = |kind: &str| late["resident"][kind].as_u64().unwrap();
    let (own, shared, stored) =
        (bytes("own_bytes"), bytes("shared_bytes"), late["memory_stored_bytes"].as_u64().unwrap());
    assert!(shared > stored / 4 && own + shared <= stored + stored / 50, "{late}");
    assert_eq!(ok(&["run", "e2e-later", "/bin/sh", "-c", sums]).trim(), expected.trim());
    ok(&["rm", "-f", "late"]);
    for snapshot in ["e2e-later", "e2e-late"] {
        ok(&["snapshots", "rm", snapshot]);
    }
    world.clean();
}
