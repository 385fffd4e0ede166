//! CPUs that a VM has alone, and rates of disks: on the machine's cgroup v2.

use crate::harness::{
    BASE, inspect, machine, ok, on_host, refused, sh, start, state_dir, until, world,
};
use dayfly_units::needs::{Need, met};

/// The text of a file of the group of this VM.
fn of_group(vm: &str, file: &str) -> String {
    let pid = inspect(vm)["pid"].to_string();
    let group = on_host(&format!("sed -n 's/^0:://p' /proc/{pid}/cgroup")).out;
    on_host(&format!("cat /sys/fs/cgroup{}/{file}", group.trim())).out.trim().to_owned()
}

/// The CPUs on which all threads of the VM's VMM may run, one line for each set.
fn allowed(vm: &str) -> String {
    let pid = inspect(vm)["pid"].to_string();
    let threads =
        format!("sed -n 's/^Cpus_allowed_list:\t//p' /proc/{pid}/task/*/status | sort -u");
    on_host(&threads).out.trim().to_owned()
}

#[test]
fn a_vm_has_its_cpus_alone_and_its_disk_is_limited() {
    let world = world();
    ok(&["create", "--name", "other", BASE]);
    if !met(Need::Groups, machine() || inspect("other")["usage"].is_object()) {
        return world.clean();
    }
    let cpus: usize = on_host("nproc --all").out.trim().parse().unwrap();
    let many = cpus.to_string();
    refused(
        &["create", "--cpus-booked", &many, BASE],
        &["cpus_booked", "expected at least 1", &many],
    );
    if machine() && cpus > 1 {
        let all = allowed("other");
        let most = (cpus - 1).to_string();
        ok(&["create", "--name", "alone", "--cpus-booked", &most, BASE]);
        let own = of_group("alone", "cpuset.cpus.effective");
        let shown: Vec<String> =
            inspect("alone")["cpus"].as_array().unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(shown.len(), cpus - 1);
        assert_eq!(allowed("alone"), own, "each thread may run on all of them, and no other");
        let rest = allowed("other");
        assert_ne!(rest, all);
        assert!(!shown.contains(&rest), "{shown:?} {rest}");
        assert_eq!(of_group("other", "../cpuset.cpus"), rest);
        assert!(!of_group("alone", "cpuset.mems").is_empty());
        refused(&["create", "--cpus-booked", "1", BASE], &["cpus_booked", "at most 0"]);
        refused(&["fork", "alone"], &["cpus_booked", "VM that is forked"]);
        // A daemon that was killed gives none away, and the end of the VM gives all back.
        assert_eq!(on_host("pkill -9 -x dayflyd || killall -9 dayflyd").code, 0);
        assert_eq!(inspect("alone")["cpus"].as_array().unwrap().len(), cpus - 1);
        assert_eq!((allowed("alone"), allowed("other")), (own, rest));
        refused(&["create", "--cpus-booked", "1", BASE], &["cpus_booked"]);
        assert!(ok(&["stats"]).contains(&shown.join(",")));
        assert_eq!(sh("alone", "echo lives"), "lives");
        ok(&["rm", "--force", "alone"]);
        until("the others have all CPUs again", || allowed("other") == all);
        until("its group is removed", || {
            on_host("ls -d /sys/fs/cgroup/dayfly-*/booked/[0-9]*").out.trim().is_empty()
        });
    }
    refused(&["create", "--io-max", "wbps=1", BASE], &["io_max.write_bytes_per_s", "65536"]);
    let rates = ["create", "--name", "slow", "--io-max", "wbps=4M,wiops=500", BASE];
    // A major number of 0 is no disk.
    let on_disk = format!("test $((0x$(stat -c %D {}) >> 8)) -ne 0", state_dir());
    if machine() && on_host(&on_disk).code == 0 {
        ok(&rates);
        let limit = of_group("slow", "io.max");
        assert!(limit.contains("wbps=4194304") && limit.contains("wiops=500"), "{limit}");
        assert!(limit.contains("rbps=max"), "{limit}");
        // A VM that waits for its disk ends as quickly as another.
        let busy = start(&["exec", "slow", "--", "dd", "if=/dev/zero", "of=/big", "bs=1M"]);
        until("it has written", || sh("slow", "stat -c %s /big || echo 0") != "0");
        ok(&["rm", "--force", "slow"]);
        drop(busy);
    } else {
        refused(&rates, &["io_max"]);
    }
    assert_eq!(sh("other", "echo lives"), "lives");
    world.clean();
}

/// Asserts that the guest runs this number of CPUs, and a program on each.
fn runs_on(vm: &str, cpus: usize) {
    assert_eq!(inspect(vm)["vm"]["vcpus"], cpus, "{vm}");
    assert_eq!(inspect(vm)["warnings"].as_array().map(Vec::len), Some(0), "{vm}");
    assert_eq!(sh(vm, "nproc"), cpus.to_string(), "{vm}");
    for cpu in 0..cpus {
        // The 39th field is the CPU on which the process ran last.
        let shown = sh(vm, &format!("taskset -c {cpu} cut -d ' ' -f 39 /proc/self/stat"));
        assert_eq!(shown, cpu.to_string(), "{vm}");
    }
}

#[test]
fn a_snapshot_of_one_cpu_makes_vms_of_more() {
    let world = world();
    assert_eq!(ok(&["run", BASE, "nproc"]).trim(), "1");
    assert_eq!(ok(&["run", "--cpus", "2", BASE, "nproc"]).trim(), "2");
    ok(&["create", "--name", "four", "--cpus", "4", BASE]);
    runs_on("four", 4);
    for known in ["possible", "present"] {
        assert_eq!(sh("four", &format!("cat /sys/devices/system/cpu/{known}")), "0-15");
    }
    let forked = ok(&["fork", "four"]);
    runs_on(forked.trim(), 4);
    runs_on("four", 4);
    ok(&["snapshot", "four", "-t", "e2e-four"]);
    runs_on("four", 4);
    ok(&["create", "--name", "of-four", "e2e-four"]);
    runs_on("of-four", 4);
    refused(&["create", "--cpus", "2", "e2e-four"], &["expected 4 to 16, got 2"]);
    // A VM that starts again boots with its own number.
    ok(&["rm", "--force", forked.trim(), "of-four"]);
    ok(&["stop", "four"]);
    ok(&["start", "four"]);
    runs_on("four", 4);
    ok(&["rm", "--force", "four"]);
    ok(&["snapshots", "rm", "e2e-four"]);
    world.clean();
}
