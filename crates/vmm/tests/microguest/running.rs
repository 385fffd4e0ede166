//! Guests that are saved or forked while they run.

use crate::harness::{Boot, Disk, Snapshot, Vmm};
use crate::room::{BINARY, MIB, Room, content};
use dayfly_microguest::{End, Growth};
use dayfly_sys::writers::{Writers, writers};
use dayfly_units::{CpuModel, needs};
use dayfly_vmm::arch::layout;
use dayfly_vmm::control::wire::{self, Received, Receiver};
use dayfly_vmm::control::{Answer, Busy, ClientError, Command, FileId, PROTOCOL, Status};
use dayfly_vmm::disk::page_map::record;
use dayfly_vmm::memory::backing;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

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
        max_vcpus: 0,
        cpu_model: CpuModel::Host,
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

/// Copies memory under the running VM, pauses it, copies the rest, and compares the copy with a
/// copy of all of its memory; once for each of `turns`. In each turn the guest works for longer
/// between the first copy and the pause.
fn copied_while_running(room: &Room, vm: &mut Vmm, name: &str, turns: std::ops::Range<u64>) {
    let mut again = 0;
    for turn in turns {
        let (copied, files) = vm.files(&room.path(&format!("{name}{turn}")));
        vm.disks.clone_from(&copied.disks);
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        again += vm.client().precopy(false, fds[1]).unwrap().pages;
        vm.works(turn * 5);
        vm.client().pause().unwrap();
        vm.client().save(&fds).unwrap();
        let whole = vm.save(&room.path(&format!("{name}-whole{turn}")));
        let (copied, whole) = (content(&copied.memory), content(&whole.memory));
        let wrong =
            copied.chunks(4096).zip(whole.chunks(4096)).position(|(copied, whole)| copied != whole);
        assert_eq!(wrong, None, "the first page that is not the same, {name}, turn {turn}");
        vm.client().resume().unwrap();
    }
    println!("{name}: {again} pages were copied more than once");
}

#[test]
fn a_copy_made_while_the_guest_runs_equals_its_memory_when_paused() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let mut vm = churner(&room);
    copied_while_running(&room, &mut vm, "writes", 0..12);
    // A guest that reads: its disk's device writes pages that no vCPU writes.
    let (snapshot, _) = vm.freeze(&room.path("frozen"));
    drop(vm);
    let look = Growth::Look.generation();
    // On a busy host a copy may take longer than a guest reads. So readers are started until six
    // copies were made during reads.
    let mut while_they_read = 0;
    for reader in 0..60 {
        let name = format!("reads{reader}-");
        let mut vm = Vmm::restore(Path::new(BINARY), &room.path(&name), &snapshot, look, false);
        for turn in 0.. {
            copied_while_running(&room, &mut vm, &name, turn..turn + 1);
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
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let mut vm = churner(&room);
    for turn in 0..3 {
        vm.works(500);
        let (snapshot, frozen) = vm.freeze(&room.path(&format!("frozen{turn}")));
        println!("stood still for {} us, {} pages", frozen.paused_us, frozen.pages);
        let look = Growth::Look.generation();
        let mut child = Vmm::restore(
            Path::new(BINARY),
            &room.path(&format!("look{turn}")),
            &snapshot,
            look,
            false,
        );
        let console = child.wait_for("ready\n", 120);
        assert!(console.contains("found ") && !console.contains("failed"), "{console}");
    }
    // The VM goes on, and writes are not noted any more.
    assert!(!vm.client().status().unwrap().paused);
}

/// All of RAM of the clones of `snapshot`.
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
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let mut vm = churner(&room);
    let mut rows = 0;
    for turn in 0..8 {
        // Forked while it is paused: another save shows its content at that time.
        vm.works(turn * 30);
        let (forked, _) = vm.fork(&room.path(&format!("stood{turn}")), |vm| {
            vm.works(turn * 5);
            vm.client().pause().unwrap();
        });
        assert!(vm.client().status().unwrap().paused, "one that stood goes on standing");
        let whole = vm.save(&room.path(&format!("stood-whole{turn}")));
        let (got, expected) = (ram(&forked), ram(&whole));
        let wrong =
            got.chunks(4096).zip(expected.chunks(4096)).position(|(got, expected)| got != expected);
        assert_eq!(wrong, None, "the first page that is not the same, turn {turn}");
        let list = &forked.shared.as_ref().unwrap().0;
        rows = rows.max(backing::decode(&std::fs::File::open(list).unwrap()).unwrap().len());
        vm.client().resume().unwrap();
    }
    assert!(rows > 10, "{rows} rows: what it wrote lies apart");
    // Forked while it runs: its memory shows what its disk must hold. Also clones of clones of
    // clones.
    for turn in 0..4 {
        let (snapshot, frozen) = vm.fork(&room.path(&format!("forked{turn}")), |_| ());
        println!("stood still for {} us, {} pages", frozen.paused_us, frozen.pages);
        assert!(!vm.client().status().unwrap().paused);
        // It would only take the CPU from its children.
        vm.client().pause().unwrap();
        let look = |name: String, snapshot: &Snapshot| {
            let look = Growth::Look.generation();
            let mut child =
                Vmm::restore(Path::new(BINARY), &room.path(&name), snapshot, look, false);
            let console = child.wait_for("ready\n", 120);
            assert!(console.contains("found ") && !console.contains("failed"), "{name}: {console}");
        };
        look(format!("looks{turn}"), &snapshot);
        let churn = Growth::Churn(1000 * (1 + u32::try_from(turn).unwrap())).generation();
        let mut child = Vmm::restore(
            Path::new(BINARY),
            &room.path(&format!("child{turn}")),
            &snapshot,
            churn,
            false,
        );
        child.wait_for("churning\n", 30);
        child.works(200);
        let (grandchild, _) = child.fork(&room.path(&format!("forked-child{turn}")), |_| ());
        look(format!("grandchild{turn}"), &grandchild);
        // From here on the child is the next parent.
        if turn == 1 {
            vm = child;
        } else {
            vm.client().resume().unwrap();
        }
    }
}

#[test]
fn a_guest_that_booted_is_forked_whole() {
    if !needs::kvm() {
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
    std::fs::rename(
        room.path("refused").join("disk0.layer"),
        room.path("parent").join("disk0.cow"),
    )
    .unwrap();
    let (snapshot, _) = vm.fork(&room.path("forked"), |_| ());
    let mut child = room.clone("child", &snapshot, 0x100, End::Not);
    child.wait_for("obeyed 100\n", 60);
    assert_eq!(child.console().matches("verify ok seed 7\n").count(), 1, "{}", child.console());
    let (_, files) = child.files(&room.path("short"));
    refused(
        child.client().precopy(true, files[1].as_fd()).map(drop),
        "expected 67108864 bytes, got 0",
    );
}

#[test]
fn a_copy_for_a_fork_is_refused_for_a_freeze_and_a_save() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let (_parent, snapshot) = room.snapshot(1, false);
    let mut clone = room.clone("clone", &snapshot, 0x100, End::Not);
    clone.wait_for("obeyed 100\n", 60);
    let (_, files) = clone.files(&room.path("copy"));
    files[1].set_len(64 * MIB).unwrap();
    let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let refused = |result: Result<(), ClientError>| match result {
        Err(ClientError::Refused(message)) => assert!(message.contains("for a fork"), "{message}"),
        other => panic!("{other:?}"),
    };
    let mut client = clone.client();
    client.precopy(true, fds[1]).unwrap();
    refused(client.freeze(&fds).map(drop));
    client.precopy(true, fds[1]).unwrap();
    client.pause().unwrap();
    refused(client.save(&fds));
}

fn ask(stream: &UnixStream, command: &Command, fds: &[BorrowedFd<'_>]) {
    wire::send(stream, &serde_json::to_vec(command).unwrap(), fds).unwrap();
}

fn answer(stream: &UnixStream) -> Answer {
    let mut receiver = Receiver::without_descriptors();
    loop {
        match receiver.receive(stream).unwrap() {
            Received::Message(json, _) => return serde_json::from_slice(&json).unwrap(),
            Received::Part => {}
            Received::End => panic!("the VMM ended"),
        }
    }
}

/// Sends `command`, and then `Status` on a connection that the VMM knows and on a new one, so that
/// the VMM finds all three at once. Returns the answers to the command and to `Status`.
fn status_during(vm: &Vmm, command: &Command, fds: &[BorrowedFd<'_>]) -> (Answer, [Status; 2]) {
    let connect = || UnixStream::connect(vm.folder.join("control.sock")).unwrap();
    let status = |stream: &UnixStream| match answer(stream) {
        Answer::Status(status) => status,
        other => panic!("{other:?}"),
    };
    // The VMM serves connections in the order in which it accepts them.
    let [long, known] = [(); 2].map(|()| {
        let stream = connect();
        ask(&stream, &Command::Status, &[]);
        assert_eq!(status(&stream).busy, None);
        stream
    });
    let pid = i32::try_from(vm.child.id()).unwrap();
    // SAFETY: a signal to a child of this process, and a wait until it has stopped.
    unsafe {
        assert_eq!(libc::kill(pid, libc::SIGSTOP), 0);
        assert_eq!(libc::waitpid(pid, std::ptr::null_mut(), libc::WUNTRACED), pid);
    }
    let new = connect();
    ask(&long, command, fds);
    ask(&known, &Command::Status, &[]);
    ask(&new, &Command::Status, &[]);
    // SAFETY: a signal to a child of this process.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGCONT) }, 0);
    (answer(&long), [status(&known), status(&new)])
}

#[test]
fn status_is_answered_while_memory_is_copied_and_while_the_page_map_is_made() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let mut vm = churner(&room);
    vm.works(100);
    // A guest that is quick writes all blocks again before the map is made, which is empty then.
    let found = (0..20).any(|round| freeze_and_ask(&room, &mut vm, round));
    assert!(found, "no page map named a block");
}

/// Copies and freezes a VM, asks for its status meanwhile, and checks the page map. Returns whether
/// it names a block.
fn freeze_and_ask(room: &Room, vm: &mut Vmm, round: usize) -> bool {
    let folder = room.path(&format!("frozen{round}"));
    let (snapshot, files) = vm.files(&folder);
    let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let before = vm.client().status().unwrap();
    let (copied, during) = status_during(vm, &Command::Precopy { own: false }, &fds[1..2]);
    assert!(matches!(copied, Answer::Precopied(_)), "{copied:?}");
    for status in during {
        assert_eq!((status.busy, status.paused), (Some(Busy::Precopy), false));
        assert_eq!(status.layers, before.layers);
    }
    let (frozen, during) = status_during(vm, &Command::Freeze, &fds);
    assert!(matches!(frozen, Answer::Frozen(_)), "{frozen:?}");
    vm.disks.clone_from(&snapshot.disks);
    for status in during {
        assert_eq!((status.busy, status.paused), (Some(Busy::Freeze), false));
        assert_eq!(status.layers, layer_files(vm), "the freeze is done");
    }
    // The map that was made while the guest went on writing names no layer above the frozen ones.
    let map = std::fs::File::open(folder.join("pagemap")).unwrap();
    let runs = record::read(&map, snapshot.shape.memory_bytes).unwrap();
    let frozen = snapshot.disks[0].layers.len();
    assert!(runs.iter().all(|run| usize::from(run.layer) <= frozen), "{runs:?}");
    !runs.is_empty()
}

/// The files of the layers of a VM's disks, by their paths.
fn layer_files(vm: &Vmm) -> Vec<Vec<FileId>> {
    let id = |path: &Path| {
        let file = std::fs::metadata(path).unwrap();
        FileId { dev: file.dev(), ino: file.ino() }
    };
    let of_disk = |(n, disk): (usize, &Disk)| {
        let writable = vm.folder.join(format!("disk{n}.cow"));
        let frozen = disk.layers.iter().map(|(data, _)| id(data));
        frozen.chain(disk.writable.then(|| id(&writable))).collect()
    };
    vm.disks.iter().enumerate().map(of_disk).collect()
}

/// Asserts which of data and map of the layer frozen last have a writer. A process that another
/// test is about to execute has copies of this process's descriptors, so it waits for that.
fn assert_writers_of_top(snapshot: &Snapshot, expected: [Writers; 2]) {
    let (data, map) = snapshot.disks[0].layers.last().unwrap();
    let now = || [data, map].map(|file| writers(&std::fs::File::open(file).unwrap()).unwrap());
    let begun = Instant::now();
    while now() != expected && begun.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(now(), expected);
}

#[test]
fn a_vmm_closes_what_it_froze_for_writing_if_it_gets_it_read_only() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let mut vm = churner(&room);
    // The VMM reports the files that it has open, before and after each kind of freeze.
    let reported = |vm: &Vmm| {
        let status = vm.client().status().unwrap();
        assert_eq!((status.protocol, status.busy), (PROTOCOL, None));
        assert_eq!(status.layers, layer_files(vm));
    };
    reported(&vm);
    let (forked, _) = vm.fork(&room.path("forked"), |_| ());
    reported(&vm);
    let (frozen, _) = vm.freeze(&room.path("frozen"));
    reported(&vm);
    vm.client().pause().unwrap();
    let saved = vm.save(&room.path("saved"));
    reported(&vm);
    for snapshot in [&forked, &frozen, &saved] {
        assert_writers_of_top(snapshot, [Writers::None; 2]);
    }
    // A daemon of an earlier version sends no read-only descriptors.
    let (old, mut files) = vm.files(&room.path("old"));
    let read_only = files.pop();
    let mut client = vm.client();
    client.save(&files.iter().map(AsFd::as_fd).collect::<Vec<_>>()).unwrap();
    vm.disks.clone_from(&old.disks);
    drop((files, read_only));
    assert_writers_of_top(&old, [Writers::Some, Writers::None]);
    reported(&vm);
    // A descriptor of another file is refused, and nothing is frozen.
    let before = client.status().unwrap();
    let (_, mut files) = vm.files(&room.path("wrong"));
    files[5] = std::fs::File::open(&old.state).unwrap();
    match client.save(&files.iter().map(AsFd::as_fd).collect::<Vec<_>>()) {
        Err(ClientError::Refused(message)) => {
            assert!(message.contains("opened read-only"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(client.status().unwrap(), before);
}
