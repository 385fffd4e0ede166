//! What a guest does from its boot to its end, and what is refused at the boot.

use crate::harness::{Boot, Vmm, write_file};
use crate::room::{BINARY, MIB, Room};
use dayfly_microguest::{End, elf, sorted};
use dayfly_units::{CpuModel, needs};
use dayfly_vmm::control::ExitReason;
use std::path::Path;
use std::time::{Duration, Instant};

#[test]
fn a_guest_boots_prints_and_each_end_has_its_reason() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let cases = [
        (End::PowerOff, ExitReason::PowerOff),
        (End::Keyboard, ExitReason::Reboot),
        (End::AcpiReset, ExitReason::Reboot),
        (End::TripleFault, ExitReason::Reboot),
        (End::Panic, ExitReason::Panic),
    ];
    for (end, reason) in cases {
        let how = char::from(end as u8);
        let mut vm = room.boot(&format!("end-{how}"), &format!("say=hello fill=3:8 end={how}"));
        let (record, status) = vm.wait_exit(20);
        assert_eq!((record.reason, status), (reason, 0), "{end:?}: {}", record.message);
        assert_eq!(vm.console(), "microguest\nhello\nverify ok seed 3\n");
    }
}

#[test]
fn a_guest_sorts_what_its_seed_makes() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    for (seed, keys) in [(0, 0), (3, 1), (7, 0x100), (0xffff_ffff_ffff_ffff, 0x321)] {
        let mut vm = room.boot(&format!("sort-{keys}"), &format!("sort={seed:x}:{keys:x} end=o"));
        let (record, status) = vm.wait_exit(20);
        assert_eq!((record.reason, status), (ExitReason::PowerOff, 0), "{}", record.message);
        assert_eq!(vm.console(), format!("microguest\n{}", sorted(seed, keys)), "seed {seed:x}");
    }
    assert_ne!(sorted(7, 0x100), sorted(8, 0x100));
}

#[test]
fn memory_on_both_sides_of_the_hole_is_there() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let mut vm = room.boot_with("big", "say=hello end=o", 5 << 30, 1, false);
    assert_eq!(vm.wait_exit(20).0.reason, ExitReason::PowerOff);
}

/// Waits until a guest that counts has printed two more lines, so one of them whole.
fn prints_more(vm: &Vmm) {
    let (last, begun) = (vm.console().lines().count(), Instant::now());
    while vm.console().lines().count() < last + 2 {
        assert!(begun.elapsed() < Duration::from_secs(600), "it prints nothing more");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_paused_guest_stands_still_and_goes_on() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let mut vm = room.boot("vm", "count");
    vm.wait_for("count 4000\n", 20);
    let (mut client, other) = (vm.client(), room.boot("other", "count"));
    for _ in 0..8 {
        client.pause().unwrap();
        client.pause().unwrap(); // idempotent
        assert!(client.status().unwrap().paused);
        let then = vm.console().len();
        prints_more(&other);
        assert_eq!(vm.console().len(), then, "a paused guest printed, as one that runs did");
        client.resume().unwrap();
        client.resume().unwrap();
        assert!(!client.status().unwrap().paused);
    }
    prints_more(&vm);
    client.quit().unwrap();
    let (record, status) = vm.wait_exit(5);
    assert_eq!((record.reason, status), (ExitReason::Quit, 0));
}

#[test]
fn what_is_no_kernel_is_refused() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let mut bad = elf().to_vec();
    bad[18] = 3;
    for (name, bytes, expected) in [
        ("text", b"#!/bin/sh is not a kernel at all".to_vec(), "ELF magic"),
        ("machine", bad, "ELF machine"),
        ("empty", Vec::new(), "reading the kernel"),
    ] {
        let boot = Boot {
            kernel: write_file(&room.path(&format!("{name}.elf")), &bytes),
            initrd: None,
            cmdline: String::new(),
            memory_bytes: 64 * MIB,
            vcpus: 1,
            max_vcpus: 0,
            cpu_model: CpuModel::Host,
            disks: Vec::new(),
            jailed: false,
        };
        let mut vm = Vmm::boot(Path::new(BINARY), &room.path(name), &boot);
        let (record, status) = vm.wait_exit(10);
        assert_eq!((record.reason, status), (ExitReason::Failed, 1));
        assert!(record.message.contains(expected), "{name}: {}", record.message);
    }
}
