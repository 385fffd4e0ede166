//! The VMM with a bare-metal guest, on any `/dev/kvm`: boot, ends, pause, save, load, clones.
#![expect(clippy::unwrap_used, reason = "tests")]

mod harness;

use dayfly_microguest::{End, Growth, elf, orders, sorted};
use dayfly_vmm::arch::{cpuid, layout};
use dayfly_vmm::config::Shape;
use dayfly_vmm::control::{ClientError, Command, ExitReason};
use dayfly_vmm::memory::{backing, working_set};
use dayfly_vmm::{state, vcpu};
use harness::{Boot, Disk, Snapshot, Vmm, kvm_or_nothing, write_file};
use kvm_ioctls::{Kvm, VmFd};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const BINARY: &str = env!("CARGO_BIN_EXE_dayfly-vmm");
const MIB: u64 = 1 << 20;

struct Room {
    folder: tempfile::TempDir,
    kernel: PathBuf,
}

impl Room {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let kernel = write_file(&folder.path().join("microguest.elf"), elf());
        Self { folder, kernel }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn boot(&self, name: &str, cmdline: &str) -> Vmm {
        self.boot_with(name, cmdline, 64 * MIB, 1, false)
    }

    fn boot_with(&self, name: &str, cmdline: &str, memory_bytes: u64, vcpus: u8, jailed: bool) -> Vmm {
        let base = self.path(&format!("{name}.raw"));
        std::fs::File::create(&base).unwrap().set_len(MIB).unwrap();
        let boot = Boot {
            kernel: self.kernel.clone(),
            initrd: None,
            cmdline: cmdline.to_owned(),
            memory_bytes,
            vcpus,
            disks: vec![Disk { size_bytes: MIB, base, layers: Vec::new(), writable: true }],
            jailed,
        };
        Vmm::boot(Path::new(BINARY), &self.path(name), &boot)
    }

    fn clone(&self, name: &str, snapshot: &Snapshot, seed: u32, end: End) -> Vmm {
        Vmm::restore(Path::new(BINARY), &self.path(name), snapshot, orders(seed, end), false)
    }

    /// A guest that filled 64 pages with seed 7 and waits for orders, saved.
    fn snapshot(&self, vcpus: u8, jailed: bool) -> (Vmm, Snapshot) {
        let words = format!("fill=7:40 wait={:x}", layout::GENERATION.0);
        let mut vm = self.boot_with("parent", &words, 64 * MIB, vcpus, jailed);
        vm.wait_for("count 4000\n", 30);
        let snapshot = vm.save(&self.path("snapshot"));
        (vm, snapshot)
    }
}

#[test]
fn a_guest_boots_prints_and_every_end_is_told_apart() {
    if !kvm_or_nothing("ends") {
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
    if !kvm_or_nothing("sort") {
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
fn vcpus_that_were_told_their_cpuid_ahead_are_those_of_the_guest() {
    if !kvm_or_nothing("cpuid") {
        return;
    }
    let room = Room::new();
    let (_parent, snapshot) = room.snapshot(4, false);
    let saved = state::decode(&std::fs::read(&snapshot.state).unwrap()).unwrap();
    let kvm = Kvm::new().unwrap();
    let limits = |vm: &VmFd| vcpu::state::HostLimits::new(&kvm, vm).unwrap();
    // vCPUs that were told to be those of a VM of so many, and what they are when they have loaded the guest's.
    let loaded = |told: Option<cpuid::Template>| {
        let vm = kvm.create_vm().unwrap();
        vm.set_identity_map_address(layout::KVM_IDENTITY_MAP).unwrap();
        vm.set_tss_address(layout::KVM_TSS).unwrap();
        vm.create_irq_chip().unwrap();
        let words = vcpu::state::host_xsave_words(&vm);
        let mut vcpus: Vec<_> = (0..4).map(|id| vm.create_vcpu(id).unwrap()).collect();
        let mut alike = Vec::new();
        for (id, (fd, state)) in (0..).zip(vcpus.iter_mut().zip(&saved.vcpus)) {
            vcpu::first_run(fd);
            let is = told.as_ref().map(|told| {
                fd.set_cpuid2(&cpuid::for_kvm(&told.of(id)).unwrap()).unwrap();
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
    let of = |vcpus| Some(cpuid::Template::new(&supported, vcpus));
    // What CR4, XCR0 and others decide is as it was in the guest, whoever told it.
    for (told, expected) in [(of(4), true), (of(1), false), (None, false)] {
        let (alike, is) = loaded(told);
        assert_eq!(alike, [expected; 4]);
        assert!(
            is == wanted,
            "vCPUs that were told anything or nothing ahead ({expected}) are not the guest's"
        );
    }
}

#[test]
fn memory_on_both_sides_of_the_hole_is_there() {
    if !kvm_or_nothing("hole") {
        return;
    }
    let room = Room::new();
    let mut vm = room.boot_with("big", "say=hello end=o", 5 << 30, 1, false);
    assert_eq!(vm.wait_exit(20).0.reason, ExitReason::PowerOff);
}

#[test]
fn a_paused_guest_stands_still_and_goes_on() {
    if !kvm_or_nothing("pause") {
        return;
    }
    let room = Room::new();
    let mut vm = room.boot("vm", "count");
    vm.wait_for("count 4000\n", 20);
    let mut client = vm.client();
    for _ in 0..20 {
        client.pause().unwrap();
        client.pause().unwrap(); // idempotent
        assert!(client.status().unwrap().paused);
        let then = vm.console().len();
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(vm.console().len(), then, "a paused guest printed");
        client.resume().unwrap();
        client.resume().unwrap();
        assert!(!client.status().unwrap().paused);
    }
    let last = vm.console().lines().count();
    let begun = Instant::now();
    while vm.console().lines().count() <= last {
        assert!(begun.elapsed() < Duration::from_secs(60), "it prints nothing more");
        std::thread::sleep(Duration::from_millis(10));
    }
    client.quit().unwrap();
    let (record, status) = vm.wait_exit(5);
    assert_eq!((record.reason, status), (ExitReason::Quit, 0));
}

#[test]
fn a_saved_guest_goes_on_and_its_clones_share_nothing_they_write() {
    if !kvm_or_nothing("clones") {
        return;
    }
    let room = Room::new();
    let (parent, snapshot) = room.snapshot(1, false);
    let memory = content(&snapshot.memory);
    let at_save = parent.console();
    let mut clones: Vec<_> =
        (1..=5u32).map(|n| (n, room.clone(&format!("clone{n}"), &snapshot, 0x100 + n, End::Not))).collect();
    for (n, clone) in &mut clones {
        let console = clone.wait_for(&format!("obeyed 10{n}\n"), 60);
        // First the pages as they were saved, then its own, and never another clone's.
        assert_eq!(console.matches("verify ok seed 7\n").count(), 1, "{console}");
        assert_eq!(console.matches(&format!("verify ok seed 10{n}\n")).count(), 1, "{console}");
        assert!(!console.contains("bad"), "{console}");
        assert!(!console.contains("microguest"), "a clone does not boot: {console}");
    }
    assert_eq!(content(&snapshot.memory), memory, "clones wrote to the snapshot's memory file");

    // The parent is still paused where it was, and goes on from there with its own pages.
    assert_eq!(parent.console(), at_save);
    parent.client().resume().unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
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
        assert!(console.contains(&format!("verify ok seed {seed:x}\n")), "depth {depth}: {console}");
        seed = fresh;
        clone = child;
    }
}

/// A guest that writes pages and blocks without end.
fn churner(room: &Room) -> Vmm {
    let base = room.path("churner.raw");
    std::fs::File::create(&base).unwrap().set_len(64 * MIB).unwrap();
    let boot = Boot {
        kernel: room.kernel.clone(),
        initrd: None,
        cmdline: format!("grow={:x}:1:0", layout::GENERATION.0),
        memory_bytes: 80 * MIB,
        vcpus: 1,
        disks: vec![Disk { size_bytes: 64 * MIB, base, layers: Vec::new(), writable: true }],
        jailed: false,
    };
    let mut idle = Vmm::boot(Path::new(BINARY), &room.path("idle"), &boot);
    idle.wait_for("ready\n", 30);
    let snapshot = idle.save(&room.path("grown"));
    let churn = Growth::Churn(1).generation();
    let mut vm = Vmm::restore(Path::new(BINARY), &room.path("churner"), &snapshot, churn, false);
    vm.wait_for("churning\n", 30);
    vm
}

/// Copies memory beneath the running VM, stops it, copies the rest, and compares that with a copy of all of it; so often.
fn copied_beneath(room: &Room, vm: &mut Vmm, name: &str, turns: std::ops::Range<u64>) {
    let mut again = 0;
    for turn in turns {
        let (copied, files) = vm.files(&room.path(&format!("{name}{turn}")));
        vm.disks.clone_from(&copied.disks);
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        again += vm.client().precopy(false, fds[1]).unwrap().pages;
        std::thread::sleep(Duration::from_micros(turn * 700));
        vm.client().pause().unwrap();
        vm.client().save(&fds).unwrap();
        let whole = vm.save(&room.path(&format!("{name}-whole{turn}")));
        let (copied, whole) = (content(&copied.memory), content(&whole.memory));
        let wrong = copied.chunks(4096).zip(whole.chunks(4096)).position(|(copied, whole)| copied != whole);
        assert_eq!(wrong, None, "the first page that is not the same, {name}, turn {turn}");
        vm.client().resume().unwrap();
    }
    println!("{name}: {again} pages were copied more than once");
}

#[test]
fn what_was_copied_beneath_a_guest_is_what_it_has_when_it_stands() {
    if !kvm_or_nothing("precopy") {
        return;
    }
    let room = Room::new();
    let mut vm = churner(&room);
    copied_beneath(&room, &mut vm, "writes", 0..12);
    // One that reads: what its disk's device writes, no vCPU does.
    let (snapshot, _) = vm.freeze(&room.path("frozen"));
    drop(vm);
    let look = Growth::Look.generation();
    // On a busy host copying takes longer than one reads: as many then as it takes for six copies beneath them.
    let mut while_they_read = 0;
    for reader in 0..12 {
        let name = format!("reads{reader}-");
        let mut vm = Vmm::restore(Path::new(BINARY), &room.path(&name), &snapshot, look, false);
        for turn in 0.. {
            copied_beneath(&room, &mut vm, &name, turn..turn + 1);
            if vm.console().contains("ready") {
                break;
            }
            while_they_read += 1;
            if while_they_read == 6 {
                return;
            }
        }
    }
    panic!("{while_they_read} of 6 copies were made while one still had something to read");
}

#[test]
fn a_guest_that_is_saved_while_it_runs_has_its_memory_and_disk_of_one_instant() {
    if !kvm_or_nothing("freeze") {
        return;
    }
    let room = Room::new();
    let mut vm = churner(&room);
    for turn in 0..3 {
        std::thread::sleep(Duration::from_millis(200));
        let (snapshot, frozen) = vm.freeze(&room.path(&format!("frozen{turn}")));
        println!("stood still for {} us, {} pages", frozen.paused_us, frozen.pages);
        let look = Growth::Look.generation();
        let mut child =
            Vmm::restore(Path::new(BINARY), &room.path(&format!("look{turn}")), &snapshot, look, false);
        let console = child.wait_for("ready\n", 120);
        assert!(console.contains("found ") && !console.contains("failed"), "{console}");
    }
    // It goes on, and nothing is noted any more.
    assert!(!vm.client().status().unwrap().paused);
}

/// All of RAM that clones of `snapshot` have.
fn ram(snapshot: &Snapshot) -> Vec<u8> {
    let mut ram = content(&snapshot.memory);
    if let Some((list, others)) = &snapshot.shared {
        let others: Vec<Vec<u8>> = others.iter().map(|file| content(file)).collect();
        for row in backing::decode(&std::fs::File::open(list).unwrap()).unwrap() {
            let bytes = |page: u32| page as usize * 4096..(page + row.pages) as usize * 4096;
            ram[bytes(row.first)].copy_from_slice(&others[row.file as usize][bytes(row.from)]);
        }
    }
    ram
}

#[test]
fn clones_of_a_running_guest_have_what_it_had_when_it_stood_still() {
    if !kvm_or_nothing("fork") {
        return;
    }
    let room = Room::new();
    let mut vm = churner(&room);
    let mut rows = 0;
    for turn in 0..8 {
        // Forked while it stands: what it has then, another save tells.
        std::thread::sleep(Duration::from_millis(turn * 5));
        let (forked, _) = vm.fork(&room.path(&format!("stood{turn}")), |vm| {
            std::thread::sleep(Duration::from_micros(turn * 700));
            vm.client().pause().unwrap();
        });
        assert!(vm.client().status().unwrap().paused, "one that stood goes on standing");
        let whole = vm.save(&room.path(&format!("stood-whole{turn}")));
        let (got, expected) = (ram(&forked), ram(&whole));
        let wrong = got.chunks(4096).zip(expected.chunks(4096)).position(|(got, expected)| got != expected);
        assert_eq!(wrong, None, "the first page that is not the same, turn {turn}");
        let list = &forked.shared.as_ref().unwrap().0;
        rows = rows.max(backing::decode(&std::fs::File::open(list).unwrap()).unwrap().len());
        vm.client().resume().unwrap();
    }
    assert!(rows > 10, "{rows} rows: what it wrote lies apart");
    // While it runs: its memory tells what its disk must hold. And clones of clones of clones.
    for turn in 0..4 {
        let (snapshot, frozen) = vm.fork(&room.path(&format!("forked{turn}")), |_| ());
        println!("stood still for {} us, {} pages", frozen.paused_us, frozen.pages);
        assert!(!vm.client().status().unwrap().paused);
        let look = |name: String, snapshot: &Snapshot| {
            let look = Growth::Look.generation();
            let mut child = Vmm::restore(Path::new(BINARY), &room.path(&name), snapshot, look, false);
            let console = child.wait_for("ready\n", 120);
            assert!(console.contains("found ") && !console.contains("failed"), "{name}: {console}");
        };
        look(format!("looks{turn}"), &snapshot);
        let churn = Growth::Churn(1000 * (1 + u32::try_from(turn).unwrap())).generation();
        let mut child =
            Vmm::restore(Path::new(BINARY), &room.path(&format!("child{turn}")), &snapshot, churn, false);
        child.wait_for("churning\n", 30);
        std::thread::sleep(Duration::from_millis(100));
        let (grandchild, _) = child.fork(&room.path(&format!("forked-child{turn}")), |_| ());
        look(format!("grandchild{turn}"), &grandchild);
        // From here on the line of descent is the child's.
        if turn == 1 {
            vm = child;
        }
    }
}

#[test]
fn a_guest_that_booted_is_forked_whole() {
    if !kvm_or_nothing("fork-booted") {
        return;
    }
    let room = Room::new();
    let words = format!("fill=7:40 wait={:x}", layout::GENERATION.0);
    let mut vm = room.boot("parent", &words);
    vm.wait_for("count 4000\n", 30);
    assert!(vm.client().fork(&[]).is_err(), "without descriptors");
    let (_, files) = vm.files(&room.path("refused"));
    let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let refused = |result: Result<_, ClientError>, why: &str| match result {
        Err(ClientError::Refused(message)) => assert!(message.contains(why), "{message}"),
        other => panic!("{other:?}"),
    };
    refused(vm.client().fork(&fds).map(drop), "memory was copied before");
    refused(vm.client().precopy(true, fds[1]).map(drop), "expected a VM that is a clone");
    std::fs::rename(room.path("refused").join("disk0.layer"), room.path("parent").join("disk0.cow")).unwrap();
    let (snapshot, _) = vm.fork(&room.path("forked"), |_| ());
    let mut child = room.clone("child", &snapshot, 0x100, End::Not);
    child.wait_for("obeyed 100\n", 60);
    assert_eq!(child.console().matches("verify ok seed 7\n").count(), 1, "{}", child.console());
    let (_, files) = child.files(&room.path("short"));
    refused(child.client().precopy(true, files[1].as_fd()).map(drop), "expected 67108864 bytes, got 0");
}

#[test]
fn clones_end_as_they_are_told() {
    if !kvm_or_nothing("clone ends") {
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
    if !kvm_or_nothing("jail") {
        return;
    }
    // SAFETY: geteuid(2) has no arguments and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("jail: not root, cannot make namespaces: nothing was tested");
        return;
    }
    let room = Room::new();
    let (parent, snapshot) = room.snapshot(4, true);
    let threads = std::fs::read_dir(format!("/proc/{}/task", parent.child.id())).unwrap();
    // KVM keeps one of its own in the process, which runs nothing of ours.
    let ours = |thread: &std::fs::DirEntry| {
        !std::fs::read_to_string(thread.path().join("comm")).unwrap().starts_with("kvm-")
    };
    let threads: Vec<_> = threads.map(Result::unwrap).filter(ours).collect();
    assert_eq!(threads.len(), 6, "main, devices, vCPUs");
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
    // Each becomes the VM's user before it does anything; on a busy host one may not have begun yet.
    let begun = Instant::now();
    for thread in threads {
        let status = || std::fs::read_to_string(thread.path().join("status")).unwrap();
        while let Some(line) = jailed.iter().find(|line| !status().contains(**line)) {
            assert!(begun.elapsed() < Duration::from_secs(20), "{line}: {}", status());
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
    // Where the time of a birth goes, for whoever reads the test's output.
    let clone = room.clone("timed", &snapshot, 0x40, End::Not);
    let status = clone.client().status().unwrap();
    assert_eq!((status.shape, status.paused), (snapshot.shape, false));
    let start = status.phases[0].1;
    let names: Vec<_> = status.phases.iter().map(|(name, _)| name.as_str()).collect();
    let (before, after) = names.split_at(5);
    let (after, guest) = after.split_at(7);
    assert!(guest.is_empty() || guest == ["first port write"]);
    assert_eq!(before, ["started", "jail", "kvm", "devices", "vcpus"]);
    let expected = ["asked", "state", "memory", "devices loaded", "vcpus loaded", "working set", "running"];
    assert_eq!(after, expected);
    assert!(status.phases[..12].is_sorted_by_key(|(_, us)| *us));
    println!("phases in us: {:?}", status.phases.iter().map(|(n, us)| (n, us - start)).collect::<Vec<_>>());
}

#[test]
fn a_shell_waits_for_a_guest_of_its_shape() {
    if !kvm_or_nothing("shell") {
        return;
    }
    let room = Room::new();
    let (_parent, snapshot) = room.snapshot(1, false);
    let binary = Path::new(BINARY);
    let mut shell = Vmm::shell(binary, &room.path("shell"), snapshot.shape, false);
    let mut client = shell.client();
    let refused = |result: Result<(), ClientError>| match result {
        Err(ClientError::Refused(message)) => message,
        other => panic!("{other:?}"),
    };
    assert!(client.status().unwrap().paused);
    for result in [client.pause(), client.resume(), client.save(&[])] {
        assert!(refused(result).contains("no guest yet"));
    }
    shell.adopt(&snapshot, orders(0x99, End::Not), false).unwrap();
    shell.wait_for("obeyed 99\n", 60);
    let no_disks = Snapshot { disks: Vec::new(), ..snapshot.clone() };
    let again = refused(shell.adopt(&no_disks, orders(0x9a, End::Not), false));
    assert!(again.contains("got a VM"), "{again}");
    // One that waits can be told to go.
    let mut idle = Vmm::shell(binary, &room.path("idle"), snapshot.shape, false);
    idle.client().quit().unwrap();
    assert_eq!(idle.wait_exit(10).0.reason, ExitReason::Quit);
    for (shape, expected) in [
        (Shape { vcpus: 2, ..snapshot.shape }, "vCPUs: expected 2"),
        (Shape { memory_bytes: 128 * MIB, ..snapshot.shape }, "bytes of memory: expected 134217728"),
        (Shape { disks: 2, ..snapshot.shape }, "disks: expected 2"),
    ] {
        let mut other = Vmm::shell(binary, &room.path(expected), shape, false);
        assert!(matches!(other.adopt(&snapshot, [0; 16], false), Err(ClientError::Gone)));
        let (record, _) = other.wait_exit(10);
        assert!(record.message.contains(expected), "{}", record.message);
    }
}

#[test]
fn what_a_rehearsal_touched_is_laid_ready_in_the_clones_after_it() {
    if !kvm_or_nothing("rehearsal") {
        return;
    }
    // SAFETY: geteuid(2) has no arguments and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("rehearsal: not root, no userfaultfd that sees KVM's faults: nothing was tested");
        return;
    }
    let room = Room::new();
    let (_parent, snapshot) = room.snapshot(1, true);
    let binary = Path::new(BINARY);
    let mut rehearsal = Vmm::recording_shell(binary, &room.path("rehearsal"), snapshot.shape, true);
    rehearsal.adopt(&snapshot, orders(0x51, End::Not), false).unwrap();
    let console = rehearsal.wait_for("obeyed 51\n", 60);
    assert!(console.contains("verify ok seed 7\n"), "it sees the pages as they were saved: {console}");
    let record = room.path("working-set");
    let file = std::fs::File::create(&record).unwrap();
    let fds = [std::os::fd::AsFd::as_fd(&file)];
    rehearsal.client().call(&Command::WorkingSet, &fds).unwrap();
    let working_set::Record { runs, order } =
        working_set::decode(&std::fs::read(&record).unwrap(), 64 * MIB).unwrap();
    let count = |written| -> u32 { runs.iter().filter(|r| r.written == written).map(|r| r.pages).sum() };
    // It verified 64 pages and filled them anew; its code it only read. Nothing else of its 16,384 pages.
    assert!((64..100).contains(&count(true)) && (1..100).contains(&count(false)), "{runs:?}");
    assert_eq!(order.len(), runs.iter().map(|run| run.pages as usize).sum::<usize>(), "each once");
    // A saved rehearsal is a snapshot like any other.
    let next = rehearsal.save(&room.path("next"));
    let mut after = room.clone("after", &next, 0x52, End::PowerOff);
    assert_eq!(after.wait_exit(60).0.reason, ExitReason::PowerOff);
    assert!(after.console().contains("verify ok seed 51\n"), "{}", after.console());

    let ready = Snapshot { working_set: Some(record), ..snapshot.clone() };
    let mut clone = room.clone("clone", &ready, 0x53, End::PowerOff);
    assert_eq!(clone.wait_exit(60).0.reason, ExitReason::PowerOff);
    assert!(
        clone.console().contains("verify ok seed 7\n") && clone.console().contains("verify ok seed 53\n")
    );
    // A clone that is not recorded tells what became its own: all that the recorded one wrote, and nothing that is not written.
    let mut plain = room.clone("plain", &snapshot, 0x54, End::Not);
    plain.wait_for("obeyed 54\n", 60);
    let second = room.path("written");
    let file = std::fs::File::create(&second).unwrap();
    plain.client().call(&Command::WorkingSet, &[std::os::fd::AsFd::as_fd(&file)]).unwrap();
    let written = working_set::decode(&std::fs::read(&second).unwrap(), 64 * MIB).unwrap().runs;
    assert!(written.iter().all(|run| run.written), "{written:?}");
    let pages = |runs: &[working_set::Run]| -> std::collections::BTreeSet<u32> {
        runs.iter().filter(|run| run.written).flat_map(|run| run.first..run.first + run.pages).collect()
    };
    assert!(pages(&written).is_superset(&pages(&runs)), "{runs:?} {written:?}");
    assert!(pages(&written).len() < 200, "{written:?}");
    // A shell without a guest has nothing to tell.
    let shell = Vmm::shell(binary, &room.path("no-guest"), snapshot.shape, true);
    let refused = shell.client().call(&Command::WorkingSet, &fds);
    assert!(matches!(&refused, Err(ClientError::Refused(_))), "{refused:?}");
}

#[test]
fn a_clone_that_starts_paused_waits_for_resume_and_can_be_saved_first() {
    if !kvm_or_nothing("paused clone") {
        return;
    }
    let room = Room::new();
    let (_parent, snapshot) = room.snapshot(1, false);
    let binary = Path::new(BINARY);
    let mut clone = Vmm::restore(binary, &room.path("paused"), &snapshot, orders(0x77, End::PowerOff), true);
    assert!(clone.client().status().unwrap().paused);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(clone.console(), "");
    // Saved before it ran, and started again with other orders: the first orders are in its memory already.
    let again = clone.save(&room.path("again"));
    let mut second = room.clone("second", &again, 0x88, End::PowerOff);
    assert_eq!(second.wait_exit(60).0.reason, ExitReason::PowerOff);
    assert!(second.console().contains("obeyed 88\n"), "{}", second.console());
    // It has little to do: the process may have ended before it could answer.
    let resumed = clone.client().resume();
    assert!(matches!(resumed, Ok(()) | Err(ClientError::Gone)), "{resumed:?}");
    assert_eq!(clone.wait_exit(60).0.reason, ExitReason::PowerOff);
    assert!(clone.console().contains("obeyed 77\n"));
}

#[test]
fn a_save_that_fails_leaves_the_vm_paused_and_usable() {
    if !kvm_or_nothing("failed save") {
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
    assert!(refused(client.save(&[])).contains("expected 5 descriptors"));
    use std::os::fd::AsFd;
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
    if !kvm_or_nothing("damage") {
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
        ("version", &foreign, "version at byte 40: expected 1 to 1, got 99"),
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
    std::fs::File::options().write(true).open(&short).unwrap().set_len(memory_length - 4096).unwrap();
    let mut clone = room.clone("clone-short", &Snapshot { memory: short, ..good }, 1, End::Not);
    let (record, _) = clone.wait_exit(10);
    assert!(record.message.contains("memory file: expected 67108864 bytes"), "{}", record.message);
}

#[test]
fn what_is_no_kernel_is_refused() {
    if !kvm_or_nothing("kernel") {
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
            disks: Vec::new(),
            jailed: false,
        };
        let mut vm = Vmm::boot(Path::new(BINARY), &room.path(name), &boot);
        let (record, status) = vm.wait_exit(10);
        assert_eq!((record.reason, status), (ExitReason::Failed, 1));
        assert!(record.message.contains(expected), "{name}: {}", record.message);
    }
}

fn content(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}
