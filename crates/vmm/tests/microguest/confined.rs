//! What a VMM still has when its guest runs: descriptors, limits, filters, addresses.

use crate::harness::Vmm;
use crate::room::{BINARY, MIB, Room, threads};
use dayfly_microguest::{End, orders};
use dayfly_units::{CpuModel, needs};
use dayfly_vmm::config::Shape;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The targets of a process's descriptors.
fn descriptors(vmm: &Vmm) -> BTreeSet<PathBuf> {
    let folder = format!("/proc/{}/fd", vmm.child.id());
    let links = std::fs::read_dir(folder).unwrap();
    links.filter_map(|link| std::fs::read_link(link.unwrap().path()).ok()).collect()
}

/// The value of a line in a file of /proc that begins with `name`.
fn line(path: &str, name: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("{path}: no {name}")).trim().to_owned()
}

#[test]
fn a_vmm_whose_guest_runs_has_neither_kvm_nor_memory_files_and_all_threads_are_narrowed() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let (parent, snapshot) = room.snapshot(2, true);
    let warm = Vmm::warm(Path::new(BINARY), &room.path("warm"), snapshot.shape, true);
    warm.client().status().unwrap();
    // Without a guest, nothing waits until its workers are narrowed.
    let workers = || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", warm.child.id())).unwrap();
        let tasks = tasks.map(|task| task.unwrap().path().join("status").display().to_string());
        tasks.filter(|task| !line(task, "Name:").starts_with("dayfly-vmm")).collect::<Vec<_>>()
    };
    while workers().iter().any(|task| line(task, "Seccomp_filters:") == "1") {
        std::thread::yield_now();
    }
    let mut clone = room.clone("clone", &snapshot, 0x77, End::Not);
    clone.wait_for("obeyed 77\n", 60);
    // A clone of a fork has rows of the first snapshot's memory file over its own.
    let (fork, _) = clone.fork(&room.path("fork"), |_| ());
    let (list, others) = fork.shared.clone().unwrap();
    let mut child = room.clone("child", &fork, 0x78, End::Not);
    child.wait_for("obeyed 78\n", 60);
    let mut closed = vec![PathBuf::from("/dev/kvm"), snapshot.memory.clone(), fork.memory, list];
    closed.extend([snapshot.state, fork.state]);
    closed.extend(others);
    for (vmm, what) in [(&parent, "booted"), (&warm, "warm"), (&clone, "clone"), (&child, "child")]
    {
        let open = descriptors(vmm);
        assert!(open.contains(Path::new("anon_inode:kvm-vm")), "{what}: {open:?}");
        for file in &closed {
            assert!(!open.contains(file), "{what}: {} is open", file.display());
        }
        let pid = vmm.child.id();
        for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
            let task = task.unwrap().path().join("status").display().to_string();
            let name = line(&task, "Name:");
            // The main thread of a warm VMM is still to load a guest.
            let expected = if what == "warm" && name == "dayfly-vmm" { "1" } else { "2" };
            if !name.starts_with("kvm-") {
                assert_eq!(line(&task, "Seccomp_filters:"), expected, "{what}: {name}");
                assert_eq!(line(&task, "CapPrm:"), "0000000000000000", "{what}: {name}");
            }
        }
        let limits = format!("/proc/{pid}/limits");
        assert!(line(&limits, "Max core file size").starts_with("0 "), "{what}");
        assert!(line(&limits, "Max open files").starts_with("4096 "), "{what}");
        if what != "warm" {
            // RAM and the slack; the disk is smaller.
            let file_bytes = (64 * MIB + 64 * MIB).to_string();
            assert!(line(&limits, "Max file size").starts_with(&file_bytes), "{what}");
            assert!(!line(&limits, "Max address space").starts_with("unlimited"), "{what}");
        }
    }
}

#[test]
fn a_recorded_clone_keeps_only_the_files_that_it_serves() {
    if !needs::kvm() || !needs::root() {
        return;
    }
    let room = Room::new();
    let (_parent, snapshot) = room.snapshot(1, false);
    let (binary, folder) = (Path::new(BINARY), room.path("recorded"));
    let mut vmm = Vmm::recording_vmm(binary, &folder, snapshot.shape, true);
    vmm.adopt(&snapshot, orders(0x79, End::Not), false).unwrap();
    vmm.wait_for("obeyed 79\n", 60);
    let open = descriptors(&vmm);
    assert!(open.contains(&snapshot.memory) && !open.contains(Path::new("/dev/kvm")), "{open:?}");
    let recorder = std::fs::read_dir(format!("/proc/{}/task", vmm.child.id())).unwrap();
    let filters = recorder
        .map(|task| task.unwrap().path().join("status").display().to_string())
        .filter(|task| line(task, "Name:") == "recorder")
        .map(|task| line(&task, "Seccomp_filters:"));
    assert_eq!(filters.collect::<Vec<_>>(), ["2"]);
}

#[test]
fn a_vmm_without_disks_has_no_thread_for_them() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let shape = Shape {
        memory_bytes: 64 * MIB,
        vcpus: 2,
        max_vcpus: 0,
        disks: 0,
        nets: 1,
        cpu_model: CpuModel::Host,
    };
    for disks in [0, 1, 2] {
        let shape = Shape { disks, ..shape };
        let warm = Vmm::warm(Path::new(BINARY), &room.path(&format!("{disks}")), shape, true);
        warm.client().status().unwrap();
        // A thread has its own name once it runs.
        let names = loop {
            let names: Vec<_> = threads(&warm).into_iter().map(|(name, _)| name).collect();
            if names.windows(2).all(|pair| pair[0] != pair[1]) {
                break names;
            }
            std::thread::yield_now();
        };
        let all = ["dayfly-vmm", "devices", "disks", "vcpu0", "vcpu1"];
        let expected: Vec<_> = all.into_iter().filter(|n| disks > 0 || *n != "disks").collect();
        assert_eq!(names, expected, "{disks} disks");
        // The thread of the disks makes its ring before it is narrowed.
        let narrowed = || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", warm.child.id())).unwrap();
            let tasks = tasks.map(|task| task.unwrap().path().join("status").display().to_string());
            let mut disks = tasks.filter(|task| line(task, "Name:") == "disks");
            disks.all(|task| line(&task, "Seccomp_filters:") == "2")
        };
        while !narrowed() {
            std::thread::yield_now();
        }
        let ring = descriptors(&warm).contains(Path::new("anon_inode:[io_uring]"));
        assert_eq!(ring, disks > 0, "{disks} disks");
    }
}
