//! fio and stress-ng find no wrong byte on disk or in memory across pause, snapshot and clone.

use crate::harness::{BASE, ok, sh, until, world};

/// Starts `text` in the VM, detached; [`result`] waits for its end.
fn begin(vm: &str, text: &str) {
    sh(
        vm,
        &format!(
            "setsid sh -c '({text}) >/root/log 2>&1; echo $? >/root/code' \
             >/dev/null 2>&1 </dev/null &"
        ),
    );
}

/// Waits until the text of [`begin`] has ended, which must be with code 0.
fn result(vm: &str) {
    until(&format!("the checker in {vm}"), || {
        !sh(vm, "cat /root/code 2>/dev/null || true").is_empty()
    });
    let code = sh(vm, "cat /root/code");
    assert_eq!(code, "0", "in {vm}: {}", sh(vm, "tail -c 2000 /root/log"));
}

#[test]
fn fio_verifies_random_writes_across_a_snapshot_and_a_clone() {
    let world = world();
    ok(&["create", "--name", "writer", BASE]);
    begin(
        "writer",
        "cd /root && fio --name=v --filename=/root/f --rw=randwrite --bsrange=4k-128k --size=8m \
         --direct=1 --ioengine=psync --verify=crc32c --do_verify=1 --verify_fatal=1 \
         --randrepeat=0 --group_reporting",
    );
    until("half of the writes", || {
        let kib: u64 = sh("writer", "du -k /root/f 2>/dev/null | cut -f1").parse().unwrap_or(0);
        kib > 3 << 10
    });
    ok(&["snapshot", "writer", "-t", "e2e-fio"]);
    ok(&["create", "--name", "heir", "e2e-fio"]);
    result("writer");
    result("heir");
    ok(&["rm", "-f", "writer", "heir"]);
    ok(&["snapshots", "rm", "e2e-fio"]);
    world.clean();
}

#[test]
fn stress_ng_verifies_memory_across_a_pause_and_a_restore() {
    let world = world();
    ok(&["create", "--name", "memory", BASE]);
    begin("memory", "stress-ng --vm 2 --vm-bytes 64M --verify -t 6");
    sh("memory", "sleep 2");
    ok(&["pause", "memory"]);
    ok(&["unpause", "memory"]);
    ok(&["snapshot", "memory", "-t", "e2e-stress"]);
    ok(&["create", "--name", "restored", "e2e-stress"]);
    result("memory");
    result("restored");
    ok(&["rm", "-f", "memory", "restored"]);
    ok(&["snapshots", "rm", "e2e-stress"]);
    world.clean();
}
