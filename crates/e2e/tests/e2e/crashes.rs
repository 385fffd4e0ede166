//! After kill -9 of any process the next command works, and nothing is left over.

use crate::harness::{
    BASE, IMAGE, World, dayfly, end_of, inspect, machine, ok, on_host, refused, sh, start, until,
    wait, world,
};
use dayfly_units::needs::{Need, met};
use std::process::Child;
use std::time::Duration;

/// Starts a bake whose warm-up waits, so that a crash interrupts the bake.
fn long_bake() -> Child {
    let child = start(&["bake", IMAGE, "-t", "e2e-cut", "--cmd", "sleep 600"]);
    until("the bake's VM", || !ok(&["ps", "-q"]).is_empty());
    std::thread::sleep(Duration::from_secs(2));
    child
}

/// Starts six clones.
fn six() -> Vec<Child> {
    let clones =
        (0..6).map(|_| start(&["run", BASE, "/bin/sh", "-c", "echo up; sleep 600"])).collect();
    until("some of the clones", || ok(&["ps", "-q"]).lines().count() >= 4);
    clones
}

/// Waits until all children have ended, each with an error.
fn over(children: Vec<Child>) {
    for child in children {
        let got = wait(child);
        assert_ne!(got.code, 0, "{got:?}");
    }
}

/// Checks that the next command works and that nothing is left of the interrupted commands.
fn recovered(world: &World) {
    assert_eq!(ok(&["run", BASE, "echo", "well"]), "well");
    until("the interrupted VMs to be gone", || ok(&["ps", "-aq"]).is_empty());
    assert_eq!(dayfly(&["snapshots", "inspect", "e2e-cut"]).code, 125);
    world.clean();
}

fn kill9(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn of_the_command_line() {
    let world = world();
    let mut bake = long_bake();
    kill9(&mut bake);
    let mut clones = six();
    clones.iter_mut().for_each(kill9);
    recovered(&world);
}

#[test]
fn of_the_vmm() {
    let world = world();
    let bake = long_bake();
    on_host("pkill -9 dayfly-vmm || killall -9 dayfly-vmm");
    let got = wait(bake);
    assert_eq!(got.code, 125, "{got:?}");
    let clones = six();
    ok(&["create", "--name", "struck", BASE]);
    until("no VMM left", || {
        on_host("pkill -9 dayfly-vmm || killall -9 dayfly-vmm");
        ok(&["ps", "-q"]).is_empty()
    });
    over(clones);
    assert_eq!(end_of("struck").0, "lost");
    ok(&["rm", "struck"]);
    recovered(&world);
}

#[test]
fn of_the_daemon() {
    let world = world();
    ok(&["create", "--name", "survivor", BASE]);
    sh("survivor", "echo still >/run/here");
    let pid = || inspect("survivor")["pid"].as_u64();
    let before = pid();
    let bake = long_bake();
    let clones = six();
    let killed = on_host("pkill -9 -x dayflyd || killall -9 dayflyd");
    assert_eq!(killed.code, 0, "{killed:?}");
    over(clones);
    assert_eq!(wait(bake).code, 125);
    assert_eq!(sh("survivor", "cat /run/here"), "still");
    assert_eq!(pid(), before, "the VM has another process");
    until("only the survivor", || ok(&["ps", "-aq"]).lines().count() == 1);
    let leaks = dayfly(&["doctor", "--leaks"]);
    assert_eq!(leaks.code, 0, "{}{}", leaks.out, leaks.err);
    // The new daemon also controls the adopted VM.
    ok(&["pause", "survivor"]);
    ok(&["unpause", "survivor"]);
    ok(&["snapshot", "survivor", "-t", "e2e-adopted"]);
    assert_eq!(ok(&["run", "e2e-adopted", "cat", "/run/here"]), "still");
    ok(&["rm", "-f", "survivor"]);
    ok(&["snapshots", "rm", "e2e-adopted"]);
    recovered(&world);
}

#[test]
#[ignore = "long"]
fn of_qemu() {
    let world = world();
    if !met(Need::Machine, machine()) {
        return;
    }
    let qemu = || {
        let status: serde_json::Value = serde_json::from_str(&ok(&["machine", "status"])).unwrap();
        let mut processes = status["processes"].as_array().unwrap().iter();
        let qemu = processes.find(|process| process[1] == "dayfly-machine");
        qemu.and_then(|process| process[0].as_u64())
            .unwrap_or_else(|| panic!("no QEMU in {status}"))
    };
    let mut children = vec![long_bake()];
    children.extend(six());
    let killed =
        std::process::Command::new("kill").args(["-9", &qemu().to_string()]).status().unwrap();
    assert!(killed.success());
    over(children);
    recovered(&world);
    refused(&["exec", "absent", "true"], &["absent"]);
}
