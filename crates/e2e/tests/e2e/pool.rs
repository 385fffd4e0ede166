//! Warm clones: they serve requests, may be killed, and are removed with their snapshot and daemon.

use crate::harness::{BASE, dayfly, inspect, ok, on_host, sh, until, world};
use std::time::Duration;

/// Whether this VM was created from a warm clone.
fn was_ready(vm: &str) -> bool {
    inspect(vm)["timeline"].to_string().contains("the clone was ready")
}

/// Creates VMs until one was created from a warm clone. Returns its name.
fn a_ready_one(snapshot: &str, name: &str) -> String {
    let mut n = 0;
    let mut vm = String::new();
    until("a clone that was ready", || {
        n += 1;
        vm = format!("{name}-{n}");
        ok(&["create", "--name", &vm, snapshot]);
        was_ready(&vm) || {
            ok(&["rm", "-f", &vm]);
            std::thread::sleep(Duration::from_millis(500));
            false
        }
    });
    vm
}

/// Processes of VMMs on the VMs' host.
fn vmms() -> Vec<u64> {
    // The machine's busybox has no pgrep. The brackets exclude the command line of this `sh`. A
    // zygote has no id.
    let list = "for p in /proc/[0-9]*; do \
        tr '\\0' ' ' <$p/cmdline 2>/dev/null | grep -q '[d]ayfly-vmm .*--id [0-9a-f]' && \
        echo ${p#/proc/}; done; true";
    on_host(list).out.lines().map(|pid| pid.trim().parse().unwrap()).collect()
}

#[test]
fn a_clone_that_was_ready_is_one_like_any_other() {
    let world = world();
    let (a, b) = (a_ready_one(BASE, "a"), a_ready_one(BASE, "b"));
    for what in ["hostname", "cat /etc/machine-id", "od -An -tx1 -N16 /dev/urandom"] {
        assert_ne!(sh(&a, what), sh(&b, what));
    }
    // The clock is right, however long the warm clone waited.
    let now =
        || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let (before, theirs) = (now(), sh(&a, "date +%s").parse::<u64>().unwrap());
    assert!((before - 30..now() + 30).contains(&theirs), "{theirs}, asked for at {before}");
    // The disk is not shared with the other clone, and can be snapshotted.
    sh(&a, "echo mine >/root/mine; sync");
    assert_eq!(dayfly(&["exec", &b, "test", "-e", "/root/mine"]).code, 1);
    ok(&["snapshot", &a, "-t", "e2e-of-ready"]);
    assert_eq!(ok(&["run", "e2e-of-ready", "cat", "/root/mine"]), "mine");
    // Removing a snapshot also removes its warm clones, but no VM.
    let third = a_ready_one("e2e-of-ready", "c");
    ok(&["snapshots", "rm", "e2e-of-ready"]);
    assert_eq!(sh(&third, "cat /root/mine"), "mine");
    assert_eq!(dayfly(&["create", "e2e-of-ready"]).code, 125);
    world.clean();
}

#[test]
fn warm_clones_may_be_killed_and_end_with_their_daemon() {
    let world = world();
    let vm = a_ready_one(BASE, "a");
    let keep = inspect(&vm)["pid"].as_u64().unwrap();
    let waiting = || -> Vec<u64> { vmms().into_iter().filter(|pid| *pid != keep).collect() };
    until("a process that waits", || !waiting().is_empty());
    for pid in waiting() {
        // By now the process may serve another VM, or have ended.
        on_host(&format!("kill -9 {pid}"));
    }
    assert_eq!(ok(&["run", BASE, "echo", "well"]), "well");
    // A daemon that stops ends its warm clones, and no VM.
    until("a process that waits", || !waiting().is_empty());
    on_host("pkill -TERM -x dayflyd || killall -TERM dayflyd");
    until("only the VM", || vmms() == [keep]);
    assert_eq!(sh(&vm, "echo here"), "here");
    assert_eq!(inspect(&vm)["pid"].as_u64(), Some(keep));
    world.clean();
}

#[test]
fn many_are_made_and_removed_with_one_command() {
    let world = world();
    let made = ok(&["create", "--count", "4", "--label", "kind=many", BASE]);
    let ids: Vec<&str> = made.lines().collect();
    assert_eq!(ids.len(), 4, "{made}");
    let names: std::collections::BTreeSet<String> =
        ids.iter().map(|id| sh(id, "hostname")).collect();
    assert_eq!(names.len(), 4, "two VMs have one hostname");
    // A request for several VMs fails as a whole: a name fits one VM only, and the limit is checked
    // before the first VM is created.
    assert_ne!(dayfly(&["create", "--count", "2", "--name", "twin", BASE]).code, 0);
    let refused = dayfly(&["create", "--count", "4096", BASE]);
    assert!(refused.code != 0 && refused.err.contains("are missing"), "{refused:?}");
    let listed = ok(&["ps", "-a"]);
    assert_eq!(
        listed.lines().filter(|line| ids.iter().any(|id| line.starts_with(id))).count(),
        4,
        "{listed}"
    );
    let removed = ok(&[&["rm", "-f"], ids.as_slice()].concat());
    assert_eq!(removed.lines().collect::<Vec<_>>(), ids);
    world.clean();
}
