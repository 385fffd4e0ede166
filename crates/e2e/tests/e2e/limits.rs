//! Limits and bills of VMs, by their control groups.

use crate::harness::{
    BASE, end_of, inspect, machine, ok, on_host, refused, sh, start, until, world,
};
use dayfly_units::needs::{Need, met};
use serde_json::Value;

/// The folders of the groups with `limit` in this file, on the host that runs the VMs. The machine
/// has cgroup v2.
fn groups_with(file: &str, limit: &str) -> Vec<String> {
    let find = format!("grep -lx '{limit}' /sys/fs/cgroup/dayfly-*/vms/*/{file}");
    let found = on_host(&find).out;
    found.lines().map(|path| path.trim_end_matches(file).to_owned()).collect()
}

fn cpu_us(vm: &str) -> u64 {
    inspect(vm)["usage"]["cpu_us"].as_u64().unwrap()
}

#[test]
fn a_vm_is_limited_and_billed_and_ends_alone() {
    let world = world();
    ok(&["create", "--name", "other", BASE]);
    // Only a VM with a control group has a bill. The machine's daemon has groups.
    if !met(Need::Groups, machine() || inspect("other")["usage"].is_object()) {
        return world.clean();
    }
    let limits = ["--cpu-max", "0.5", "--cpu-weight", "50", "--pids-max", "65"];
    let words = ["create", "--name", "small", "--memory-max", "2G"];
    ok(&[&words[..], &limits, &[BASE]].concat());
    let clone = ok(&["fork", "small"]);
    let shown = |vm: &str| -> Value { inspect(vm)["limits"].clone() };
    assert_eq!(shown("small")["cpu_max_millicpus"], 500);
    assert_eq!(shown(&clone), shown("small"));
    assert_eq!(shown("other")["pids_max"], Value::Null);
    refused(&["create", "--pids-max", "3", BASE], &["pids_max", "expected", "got 3"]);

    // The bill grows with the guest's work, and a daemon that was killed loses nothing of it.
    let before = cpu_us("small");
    sh("small", "i=0; while [ $i -lt 20000 ]; do i=$((i + 1)); done");
    let after = cpu_us("small");
    assert!(after > before, "{before} {after}");
    assert_eq!(on_host("pkill -9 -x dayflyd || killall -9 dayflyd").code, 0);
    assert!(cpu_us("small") >= after);
    assert!(ok(&["stats"]).contains("CPU"));
    if machine() {
        assert_eq!(groups_with("cpu.max", "50000 100000").len(), 2);
        assert_eq!(groups_with("cpu.weight", "50").len(), 2);
        let groups = groups_with("pids.max", "65");
        assert_eq!(groups.len(), 2);
        // A VMM that takes more than its limit: here the limit is lowered to what it has taken.
        let small = groups.iter().find(|group| {
            let pids = on_host(&format!("cat {group}/cgroup.procs")).out;
            let vmm = inspect("small")["pid"].to_string();
            pids.lines().any(|pid| pid == vmm)
        });
        let small = small.unwrap_or_else(|| panic!("{groups:?}: {}", inspect("small")));
        on_host(&format!("echo 0 >{small}/memory.swap.max; echo 4M >{small}/memory.max"));
        let busy = start(&["exec", "small", "--", "python3", "-c", "x = bytearray(64 << 20)"]);
        let (reason, message) = end_of("small");
        assert_eq!(reason, "memory", "{message}");
        drop(busy);
        assert!(inspect("small")["vm"]["exit"]["usage"]["cpu_us"].as_u64().unwrap() >= after);
        until("its group is removed", || groups_with("pids.max", "65").len() == 1);
    }
    assert_eq!(sh("other", "echo lives"), "lives");
    world.clean();
}
