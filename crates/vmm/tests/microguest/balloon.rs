//! Guests that give memory back.

use crate::harness::Vmm;
use crate::room::{BINARY, MIB, Room};
use dayfly_units::needs;
use dayfly_vmm::arch::layout;
use std::path::Path;

const PAGE: u64 = 4096;

/// The anonymous memory that a VMM has, in bytes: its guest's own pages and its heap.
fn own_bytes(vmm: &Vmm) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", vmm.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[test]
fn memory_that_a_guest_gives_back_is_the_hosts() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let generation = layout::GENERATION.0;
    // 32 MiB, of which the guest keeps the first 256 pages.
    let words = format!("fill=7:2000 until={generation:x} give=100:1f00 until={generation:x}");
    let mut vm = room.boot_with("vm", &words, 128 * MIB, 1, false);
    vm.wait_for("ready\n", 60);
    let filled = own_bytes(&vm);
    assert!(filled > 32 * MIB, "{filled}");
    let snapshot = vm.save(&room.path("filled"));
    // A clone has written nothing; what it gives back is its template's.
    let clone = |name: &str, id: u8| {
        Vmm::restore(Path::new(BINARY), &room.path(name), &snapshot, [id; 16], false)
    };
    let mut first = clone("first", 1);
    first.wait_for("given\nready\n", 60);
    assert_eq!(first.client().balloon(None).unwrap().discarded_bytes, 0x1f00 * PAGE);
    assert!(own_bytes(&first) < 8 * MIB, "{}", own_bytes(&first));
}

/// A clone that gives back what it wrote has its template's pages, and so has its fork.
#[test]
fn a_clone_that_gives_back_has_the_pages_of_its_template() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let until = format!("until={:x}", layout::GENERATION.0);
    let words = format!(
        "fill=7:800 {until} fill=8:800 say=filled give=0:800 verify=7:800 {until} verify=7:800"
    );
    let mut vm = room.boot_with("vm", &words, 64 * MIB, 1, false);
    vm.wait_for("ready\n", 60);
    let snapshot = vm.save(&room.path("saved"));
    let restored = |name: &str, of: &crate::harness::Snapshot, id: u8| {
        Vmm::restore(Path::new(BINARY), &room.path(name), of, [id; 16], false)
    };
    let mut clone = restored("clone", &snapshot, 1);
    let console = clone.wait_for("ready\n", 60);
    assert!(console.contains("ok seed 8\nfilled\ngiven\nverify ok seed 7\n"), "{console}");
    let (_, own) = (clone.client().balloon(None).unwrap(), own_bytes(&clone));
    assert!(own < 6 * MIB, "{own}");
    let (fork, _) = clone.fork(&room.path("fork"), |_| ());
    let mut child = restored("child", &fork, 2);
    let console = child.wait_for("done\n", 60);
    assert!(console.contains("verify ok seed 7\n") && !console.contains("bad"), "{console}");
    // So has a snapshot of all of its memory.
    let (frozen, _) = clone.freeze(&room.path("frozen"));
    let mut child = restored("grandchild", &frozen, 3);
    let console = child.wait_for("done\n", 60);
    assert!(console.contains("verify ok seed 7\n") && !console.contains("bad"), "{console}");
}

/// The memory of a guest that was booted reads as zeroes, and is not in its snapshot.
#[test]
fn a_snapshot_has_no_memory_that_was_given_back() {
    if !needs::kvm() {
        return;
    }
    use std::os::unix::fs::MetadataExt;
    let room = Room::new();
    let until = format!("until={:x}", layout::GENERATION.0);
    let words = format!("fill=7:2000 give=100:1f00 {until} verify=7:100 verify=7:101");
    let mut vm = room.boot_with("vm", &words, 128 * MIB, 1, false);
    vm.wait_for("given\nready\n", 60);
    assert!(own_bytes(&vm) < 8 * MIB, "{}", own_bytes(&vm));
    let snapshot = vm.save(&room.path("saved"));
    let stored = std::fs::metadata(&snapshot.memory).unwrap().blocks() * 512;
    assert!(stored < 8 * MIB, "{stored}");
    let mut clone = Vmm::restore(Path::new(BINARY), &room.path("clone"), &snapshot, [1; 16], false);
    let console = clone.wait_for("done\n", 60);
    assert!(console.contains("verify ok seed 7\nverify bad page 100\n"), "{console}");
}
