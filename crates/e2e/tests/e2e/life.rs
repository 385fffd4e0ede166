//! Clones have unique identities, share no writes, pause, and can be snapshotted.

use crate::harness::{BASE, dayfly, inspect, ok, refused, sh, start, until, wait, world};
use std::collections::BTreeSet;

#[test]
fn clones_share_nothing_that_names_them() {
    let world = world();
    let show = "hostname; cat /etc/machine-id; od -An -tx1 -N32 /dev/urandom | tr -d ' \\n'; \
                echo; date +%s";
    let now =
        || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let begun = now();
    let started: Vec<_> = (0..6).map(|_| start(&["run", BASE, "/bin/sh", "-c", show])).collect();
    let mut seen = BTreeSet::new();
    for child in started {
        let got = wait(child);
        assert_eq!(got.code, 0, "{}", got.err);
        let lines: Vec<&str> = got.out.lines().collect();
        assert_eq!(lines.len(), 4, "{}", got.out);
        assert!(lines[1].len() == 32 && lines[2].len() == 64, "{}", got.out);
        for line in &lines[..3] {
            assert!(seen.insert((*line).to_owned()), "{line} twice");
        }
        let (theirs, ours) = (lines[3].parse::<u64>().unwrap(), begun - 120..now() + 120);
        assert!(ours.contains(&theirs), "the guest's clock says {theirs}, ours {ours:?}");
    }
    world.clean();
}

#[test]
fn what_a_clone_writes_no_other_sees() {
    let world = world();
    ok(&["create", "--name", "one", BASE]);
    // Both clones have the pages of the working set already, but not what the recording wrote.
    let timeline = inspect("one")["timeline"].to_string();
    assert!(
        timeline.contains("working set") || timeline.contains("the clone was ready"),
        "{timeline}"
    );
    sh("one", "echo mine >/root/mine; sync; echo keep k one >/run/ask; cat /run/answer");
    ok(&["create", "--name", "two", BASE]);
    assert_eq!(dayfly(&["exec", "two", "test", "-e", "/root/mine"]).code, 1);
    let kept = sh("two", "echo kept >/run/ask; cat /run/answer");
    assert!(kept.contains(r#""kept": {}"#), "{kept}");
    world.clean();
}

#[test]
fn a_paused_machine_stands_still() {
    let world = world();
    ok(&["create", "--name", "still", BASE]);
    // A busy guest, so that its CPU time shows whether it is paused.
    sh(
        "still",
        "setsid sh -c 'i=0; while :; do i=$((i+1)); echo $i >/run/count; done' \
         >/dev/null 2>&1 </dev/null &",
    );
    let count = || sh("still", "cat /run/count 2>/dev/null || :").parse::<u64>().unwrap_or(0);
    until("the counter", || count() > 3);
    let pid = inspect("still")["pid"].as_u64().unwrap();
    let running = vcpu_ticks(pid);
    until("CPU time of the guest", || vcpu_ticks(pid) >= running + 50);
    ok(&["pause", "still"]);
    assert_eq!(inspect("still")["vm"]["state"], "paused");
    refused(&["exec", "still", "true"], &["paused"]);
    let before = vcpu_ticks(pid);
    std::thread::sleep(std::time::Duration::from_secs(2));
    let paused = vcpu_ticks(pid) - before;
    assert!(paused <= 1, "paused its CPU ran for {paused} ticks in 2 s");
    ok(&["unpause", "still"]);
    let then = count();
    until("the counter to go on", || count() > then);
    world.clean();
}

/// User and system time of a VM's only vCPU, in clock ticks.
fn vcpu_ticks(pid: u64) -> u64 {
    let text =
        format!("cut -d' ' -f14,15 $(dirname $(grep -lx vcpu0 /proc/{pid}/task/*/comm))/stat");
    let got = crate::harness::on_host(&text);
    assert_eq!(got.code, 0, "{}", got.err);
    got.out.split_whitespace().map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}

#[test]
fn a_snapshot_of_a_clone_has_what_the_clone_wrote_and_the_clone_goes_on() {
    let world = world();
    ok(&["create", "--name", "parent", BASE]);
    sh("parent", "echo disk >/root/before; echo keep where memory >/run/ask; cat /run/answer");
    ok(&["snapshot", "parent", "-t", "e2e-second"]);
    sh("parent", "echo later >/root/after; echo keep later yes >/run/ask; cat /run/answer");
    ok(&["create", "--name", "child", "e2e-second"]);
    assert_eq!(sh("child", "cat /root/before; test -e /root/after || echo none"), "disk\nnone");
    let kept = sh("child", "echo kept >/run/ask; cat /run/answer");
    assert!(kept.contains(r#""kept": {"where": "memory"}"#), "{kept}");
    let both = |file: &str| [sh("parent", file), sh("child", file)];
    for file in ["hostname", "cat /etc/machine-id"] {
        let [parent, child] = both(file);
        assert_ne!(parent, child);
    }
    refused(&["snapshots", "rm", "no-such-snapshot"], &["no-such-snapshot"]);
    refused(&["snapshot", "parent", "-t", "e2e-second"], &["e2e-second"]);
    ok(&["rm", "-f", "parent", "child"]);
    ok(&["snapshots", "rm", "e2e-second"]);
    world.clean();
}
