//! Guests that are saved while paused, and their clones.

use crate::harness::{Snapshot, Vmm, write_file};
use crate::room::{BINARY, Room, content, threads};
use dayfly_microguest::{End, orders};
use dayfly_units::{CpuModel, needs};
use dayfly_vmm::arch::{cpuid, layout};
use dayfly_vmm::control::{ClientError, ExitReason};
use dayfly_vmm::{state, vcpu};
use kvm_ioctls::{Kvm, VmFd};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

#[test]
fn vcpus_whose_cpuid_was_set_ahead_are_those_of_the_guest() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let (_parent, snapshot) = room.snapshot(4, false);
    let saved = state::decode(&std::fs::read(&snapshot.state).unwrap()).unwrap();
    let kvm = Kvm::new().unwrap();
    let limits = |vm: &VmFd| vcpu::state::HostLimits::new(vcpu::state::msrs(&kvm).unwrap(), vm);
    // Makes vCPUs with the CPUID of the template, if there is one, and loads the guest's state.
    // Returns whether the CPUID was alike, and the CPUID afterwards.
    let loaded = |ahead: Option<cpuid::Template>| {
        let vm = kvm.create_vm().unwrap();
        vm.set_identity_map_address(layout::KVM_IDENTITY_MAP).unwrap();
        vm.set_tss_address(layout::KVM_TSS).unwrap();
        vm.create_irq_chip().unwrap();
        let words = limits(&vm).xsave_words();
        let mut vcpus: Vec<_> = (0..4).map(|id| vm.create_vcpu(id).unwrap()).collect();
        let mut alike = Vec::new();
        for (id, (fd, state)) in (0..).zip(vcpus.iter_mut().zip(&saved.vcpus)) {
            vcpu::first_run(fd);
            let is = ahead.as_ref().map(|ahead| {
                fd.set_cpuid2(&cpuid::for_kvm(&ahead.of(id)).unwrap()).unwrap();
                fd.get_cpuid2(vcpu::state::MAX_CPUID).unwrap().as_slice().to_vec()
            });
            vcpu::state::load(fd, state, is.as_deref(), words).unwrap();
            alike.push(is.is_some_and(|is| cpuid::alike(&is, &state.cpuid)));
        }
        let cpuid = |fd| vcpu::state::save(fd, &limits(&vm)).unwrap().cpuid;
        (alike, vcpus.iter().map(cpuid).collect::<Vec<_>>())
    };
    let wanted: Vec<_> = saved.vcpus.iter().map(|state| state.cpuid.clone()).collect();
    let supported = cpuid::Supported::new(&kvm).unwrap();
    let of = |vcpus| Some(cpuid::Template::new(&supported, vcpus, CpuModel::Host));
    // What CR4, XCR0 and others decide is as in the guest, for any CPUID set before.
    for (ahead, expected) in [(of(4), true), (of(1), false), (None, false)] {
        let (alike, is) = loaded(ahead);
        assert_eq!(alike, [expected; 4]);
        assert!(
            is == wanted,
            "vCPUs with any CPUID or none set ahead ({expected}) are not the guest's"
        );
    }
}

#[test]
fn a_saved_guest_goes_on_and_its_clones_share_nothing_they_write() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let (parent, snapshot) = room.snapshot(1, false);
    let memory = content(&snapshot.memory);
    let at_save = parent.console();
    let mut clones: Vec<_> = (1..=5u32)
        .map(|n| (n, room.clone(&format!("clone{n}"), &snapshot, 0x100 + n, End::Not)))
        .collect();
    for (n, clone) in &mut clones {
        let console = clone.wait_for(&format!("obeyed 10{n}\n"), 60);
        // First the pages as they were saved, then the clone's own pages, never those of another
        // clone.
        assert_eq!(console.matches("verify ok seed 7\n").count(), 1, "{console}");
        assert_eq!(console.matches(&format!("verify ok seed 10{n}\n")).count(), 1, "{console}");
        assert!(!console.contains("bad"), "{console}");
        assert!(!console.contains("microguest"), "a clone does not boot: {console}");
    }
    assert_eq!(content(&snapshot.memory), memory, "clones wrote to the snapshot's memory file");

    // The parent is still paused at the save, and continues from there with its own pages.
    assert_eq!(parent.console(), at_save);
    parent.client().resume().unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(600);
    while parent.console().len() < at_save.len() + 20 {
        assert!(std::time::Instant::now() < deadline, "the parent did not go on");
        std::thread::sleep(Duration::from_millis(5));
    }

    // A clone of a clone of a clone: each sees what its parent wrote last.
    let (_, mut clone) = clones.pop().unwrap();
    let mut seed = 0x105;
    for depth in 0..3u32 {
        let next = clone.save(&room.path(&format!("snapshot{depth}")));
        let fresh = 0x200 + depth;
        let mut child = room.clone(&format!("depth{depth}"), &next, fresh, End::Not);
        let console = child.wait_for(&format!("obeyed {fresh:x}\n"), 60);
        assert!(
            console.contains(&format!("verify ok seed {seed:x}\n")),
            "depth {depth}: {console}"
        );
        seed = fresh;
        clone = child;
    }
}

#[test]
fn clones_end_as_ordered() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let (_parent, snapshot) = room.snapshot(1, false);
    for (end, reason) in [
        (End::PowerOff, ExitReason::PowerOff),
        (End::TripleFault, ExitReason::Reboot),
        (End::Panic, ExitReason::Panic),
    ] {
        let mut clone = room.clone(&format!("{end:?}"), &snapshot, 9, end);
        let (record, status) = clone.wait_exit(60);
        assert_eq!((record.reason, status), (reason, 0), "{}", record.message);
    }
}

#[test]
fn a_jailed_guest_with_four_vcpus_is_saved_and_cloned() {
    if !needs::kvm() || !needs::root() {
        return;
    }
    let room = Room::new();
    let (parent, snapshot) = room.snapshot(4, true);
    let threads = threads(&parent);
    let names: Vec<_> = threads.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["dayfly-vmm", "devices", "disks", "vcpu0", "vcpu1", "vcpu2", "vcpu3"]);
    let jailed = [
        "Uid:\t61234\t61234\t61234\t61234",
        "Gid:\t61234\t61234\t61234\t61234",
        "Groups:\t \n",
        "CapInh:\t0000000000000000",
        "CapPrm:\t0000000000000000",
        "CapBnd:\t0000000000000000",
        "CapEff:\t0000000000000000",
        "CapAmb:\t0000000000000000",
        "Seccomp:\t2",
        "NoNewPrivs:\t1",
    ];
    // Each thread becomes the VM's user before its work; on a busy host a thread may not have begun
    // yet.
    let begun = Instant::now();
    for (_, thread) in threads {
        let status = || std::fs::read_to_string(thread.join("status")).unwrap();
        while let Some(line) = jailed.iter().find(|line| !status().contains(**line)) {
            assert!(begun.elapsed() < Duration::from_secs(600), "{line}: {}", status());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let root = std::fs::read_dir(format!("/proc/{}/root/", parent.child.id())).unwrap();
    let names: Vec<_> = root.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["vsock.sock"], "the jail's root holds the VM's sockets only");
    for n in 0..3 {
        let mut clone = room.clone(&format!("clone{n}"), &snapshot, 0x30 + n, End::PowerOff);
        let (record, status) = clone.wait_exit(60);
        assert_eq!((record.reason, status), (ExitReason::PowerOff, 0), "{}", record.message);
        assert!(clone.console().contains("verify ok seed 7\n"));
    }
    // Prints the phases of a clone's start.
    let clone = room.clone("timed", &snapshot, 0x40, End::Not);
    let status = clone.client().status().unwrap();
    assert_eq!((status.shape, status.paused), (snapshot.shape, false));
    let start = status.phases[0].1;
    let names: Vec<_> = status.phases.iter().map(|(name, _)| name.as_str()).collect();
    let (before, after) = names.split_at(5);
    let (after, guest) = after.split_at(7);
    assert!(guest.is_empty() || guest == ["first port write"]);
    assert_eq!(before, ["started", "jail", "kvm", "devices", "vcpus"]);
    let expected =
        ["asked", "state", "memory", "devices loaded", "vcpus loaded", "working set", "running"];
    assert_eq!(after, expected);
    assert!(status.phases[..12].is_sorted_by_key(|(_, us)| *us));
    println!(
        "phases in us: {:?}",
        status.phases.iter().map(|(n, us)| (n, us - start)).collect::<Vec<_>>()
    );
}

#[test]
fn a_clone_that_starts_paused_waits_for_resume_and_can_be_saved_first() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let (_parent, snapshot) = room.snapshot(1, false);
    let binary = Path::new(BINARY);
    let mut clone =
        Vmm::restore(binary, &room.path("paused"), &snapshot, orders(0x77, End::PowerOff), true);
    assert!(clone.client().status().unwrap().paused);
    // Saved before it ran, and started again with other orders: the first orders are in its memory
    // already.
    let again = clone.save(&room.path("again"));
    let mut second = room.clone("second", &again, 0x88, End::PowerOff);
    assert_eq!(second.wait_exit(60).0.reason, ExitReason::PowerOff);
    assert!(second.console().contains("obeyed 88\n"), "{}", second.console());
    assert_eq!(clone.console(), "", "it ran, as another clone of it did meanwhile");
    // The guest has little to do: the process may end before it can answer.
    let resumed = clone.client().resume();
    assert!(matches!(resumed, Ok(()) | Err(ClientError::Gone)), "{resumed:?}");
    assert_eq!(clone.wait_exit(60).0.reason, ExitReason::PowerOff);
    assert!(clone.console().contains("obeyed 77\n"));
}

#[test]
fn a_save_that_fails_leaves_the_vm_paused_and_usable() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let mut vm = room.boot("vm", &format!("wait={:x}", layout::GENERATION.0));
    vm.wait_for("count 0\n", 20);
    let mut client = vm.client();
    let refused = |result| match result {
        Err(ClientError::Refused(message)) => message,
        other => panic!("{other:?}"),
    };
    assert!(refused(client.save(&[])).contains("pause it first"));
    client.pause().unwrap();
    assert!(refused(client.save(&[])).contains("expected 6 descriptors"));
    let read_only = std::fs::File::open(&room.kernel).unwrap();
    let message = refused(client.save(&[read_only.as_fd(); 5]));
    assert!(message.contains("empty file"), "{message}");
    assert!(client.status().unwrap().paused);
    drop(client);
    let snapshot = vm.save(&room.path("snapshot"));
    let mut clone = room.clone("clone", &snapshot, 5, End::PowerOff);
    assert_eq!(clone.wait_exit(60).0.reason, ExitReason::PowerOff);
    vm.client().resume().unwrap();
    vm.wait_for("count 4000\n", 30);
}

#[test]
fn a_damaged_snapshot_is_refused_with_the_place() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let (_parent, good) = room.snapshot(1, false);
    let state = std::fs::read(&good.state).unwrap();
    let memory_length = std::fs::metadata(&good.memory).unwrap().len();
    let mut flipped = state.clone();
    flipped[41] ^= 4;
    let mut payload = state.clone();
    *payload.last_mut().unwrap() ^= 1;
    let foreign = dayfly_units::sealed::seal(b"DFstate\n", 99, &state[96..]);
    let cases: [(&str, &[u8], &str); 5] = [
        ("truncated", &state[..state.len() - 1], "payload length at byte 48"),
        ("header", &flipped, "header digest at byte 8"),
        ("payload", &payload, "payload digest at byte 64"),
        ("version", &foreign, "version at byte 40: expected 1 to 2, got 99"),
        ("empty", &[], "header at byte 0"),
    ];
    for (name, bytes, expected) in cases {
        let bad = Snapshot { state: write_file(&room.path(name), bytes), ..good.clone() };
        let mut clone = room.clone(&format!("clone-{name}"), &bad, 1, End::Not);
        let (record, status) = clone.wait_exit(10);
        assert_eq!((record.reason, status), (ExitReason::Failed, 1));
        assert!(record.message.contains(expected), "{name}: {}", record.message);
    }
    let short = room.path("short");
    std::fs::copy(&good.memory, &short).unwrap();
    std::fs::File::options()
        .write(true)
        .open(&short)
        .unwrap()
        .set_len(memory_length - 4096)
        .unwrap();
    let mut clone = room.clone("clone-short", &Snapshot { memory: short, ..good }, 1, End::Not);
    let (record, _) = clone.wait_exit(10);
    assert!(record.message.contains("memory file: expected 67108864 bytes"), "{}", record.message);
}
