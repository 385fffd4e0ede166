//! Forks of a guest that writes with every vCPU, to memory and disk: what a clone has is what there was at one instant.
//!
//! The guest tells ([`dayfly_microguest`], `rings=`): no clone has a write that came later, none lacks one that came before, of no vCPU and not on the disk.
//! `DAYFLY_FORKS=N` forks N times, a quarter of them with 1, 2, 4 and 16 vCPUs.
#![expect(clippy::unwrap_used, reason = "tests")]

mod harness;

use dayfly_microguest::{Growth, elf};
use dayfly_vmm::arch::layout;
use harness::{Boot, Disk, Snapshot, Vmm, kvm_or_nothing, write_file};
use std::path::{Path, PathBuf};

const BINARY: &str = env!("CARGO_BIN_EXE_dayfly-vmm");
const MIB: u64 = 1 << 20;
/// Forks of one VM, and how many of them in a row are each a clone of the one before. Each fork is a layer of its disk, of which there are at most 64.
const OF_ONE: usize = 12;
const GENERATIONS: usize = 4;

/// A guest that writes, saved before it was cloned for the first time.
fn writer(folder: &Path, vcpus: u8) -> Snapshot {
    let kernel = write_file(&folder.join("microguest.elf"), elf());
    let base = folder.join("disk.raw");
    std::fs::File::create(&base).unwrap().set_len(MIB).unwrap();
    let boot = Boot {
        kernel,
        initrd: None,
        cmdline: format!("rings={:x}:{vcpus:x}", layout::GENERATION.0),
        memory_bytes: 64 * MIB,
        vcpus,
        disks: vec![Disk { size_bytes: MIB, base, layers: Vec::new(), writable: true }],
        jailed: false,
    };
    let mut first = Vmm::boot(Path::new(BINARY), &folder.join("first"), &boot);
    first.wait_for("writing\n", 30);
    first.save(&folder.join("saved"))
}

fn restored(folder: PathBuf, snapshot: &Snapshot, what: Growth) -> Vmm {
    Vmm::restore(Path::new(BINARY), &folder, snapshot, what.generation(), false)
}

/// How many writes there were, by the clone's console.
fn looked(mut clone: Vmm) -> u64 {
    let console = clone.wait_for("rings ", 60);
    let console = if console.ends_with('\n') { console } else { clone.wait_for("\n", 5) };
    let all = console.lines().find_map(|line| line.strip_prefix("rings ok "));
    let all = all.unwrap_or_else(|| panic!("{}: {console}", clone.folder.display()));
    u64::from_str_radix(all, 16).unwrap()
}

fn forks(vcpus: u8, count: usize) {
    let room = tempfile::tempdir().unwrap();
    let saved = writer(room.path(), vcpus);
    let (mut parent, mut writes, mut pauses) = (None::<Vmm>, 0, Vec::new());
    for n in 0..count {
        // Another than the one before had.
        let go_on = Growth::Churn(u32::try_from(n).unwrap() + 1);
        let path = |what: &str| room.path().join(format!("{what}{n}"));
        let mut vm = parent.take().unwrap_or_else(|| {
            writes = 0;
            let mut vm = restored(path("parent"), &saved, go_on);
            vm.wait_for("writing\n", 60);
            vm
        });
        let (fork, frozen) = vm.fork(&path("fork"), |_| ());
        pauses.push(frozen.paused_us);
        let all = looked(restored(path("clone"), &fork, Growth::Look));
        assert!(all > writes, "clone {n} has {all} writes, one before it had {writes}");
        writes = all;
        std::fs::remove_dir_all(path("clone")).unwrap();
        parent = match (n + 1) % (OF_ONE * GENERATIONS) {
            0 => None,
            so_many if so_many % OF_ONE == 0 => {
                let mut child = restored(path("child"), &fork, go_on);
                child.wait_for("writing\n", 60);
                Some(child)
            }
            _ => Some(vm),
        };
    }
    pauses.sort_unstable();
    let most = pauses.last().copied().unwrap_or_default();
    println!("{vcpus} vCPUs: {count} forks, stood still for {} us, {most} at most", pauses[count / 2]);
}

#[test]
fn a_fork_under_writers_on_every_vcpu_is_one_instant() {
    if !kvm_or_nothing("forks") {
        return;
    }
    let count = std::env::var("DAYFLY_FORKS").map_or(48, |n| n.parse().expect("DAYFLY_FORKS: a number"));
    for vcpus in [1, 2, 4, 16] {
        forks(vcpus, (count / 4).max(1));
    }
}
