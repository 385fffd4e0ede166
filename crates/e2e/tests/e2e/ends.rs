//! Each way in which a guest can end has a different reason in the VM's description.

use crate::harness::{BASE, dayfly, end_of, inspect, ok, sh, world};

#[test]
fn power_off_reboot_and_panic_are_reported() {
    let world = world();
    for (name, text, reason) in [
        ("off", "echo o >/proc/sysrq-trigger", "power_off"),
        ("again", "echo b >/proc/sysrq-trigger", "reboot"),
        ("broken", "echo c >/proc/sysrq-trigger", "panic"),
    ] {
        ok(&["create", "--name", name, BASE]);
        ok(&["exec", "-d", name, "/bin/sh", "-c", &format!("sleep 0.2; {text}")]);
        let (got, message) = end_of(name);
        assert_eq!(got, reason, "{name}: {message}");
    }
    let logs = ok(&["logs", "broken"]);
    assert!(logs.contains("Kernel panic"), "{logs}");
    let table = ok(&["ps", "-a"]);
    for word in ["power", "reboot", "panic"] {
        assert!(table.to_lowercase().contains(word), "{table}");
    }
    world.clean();
}

#[test]
fn a_run_whose_machine_ends_says_how() {
    let world = world();
    let got = dayfly(&["run", BASE, "/bin/sh", "-c", "echo c >/proc/sysrq-trigger; sleep 60"]);
    assert_eq!(got.code, 125, "{got:?}");
    assert!(got.err.contains("panic"), "{}", got.err);
    world.clean();
}

#[test]
fn a_full_disk_is_reported() {
    let world = world();
    ok(&["create", "--name", "full", BASE]);
    let got = dayfly(&[
        "exec",
        "full",
        "/bin/sh",
        "-c",
        "fallocate -l $(df --output=avail -B1 / | tail -1) /root/fill; echo x >/root/more",
    ]);
    assert_ne!(got.code, 0);
    assert!(got.err.contains("No space left on device"), "{}", got.err);
    let details = inspect("full");
    assert_eq!(details["guest"]["disk_full"], true, "{details}");
    assert!(details["warnings"].to_string().contains("full"), "{details}");
    assert_eq!(sh("full", "rm /root/fill; echo better"), "better");
    assert_eq!(inspect("full")["guest"]["disk_full"], false);
    world.clean();
}
