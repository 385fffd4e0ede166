//! Forks of a guest that writes to memory and disk with every vCPU: a clone has the content of one
//! instant.
//!
//! The guest checks this ([`dayfly_microguest`], `rings=`): no clone has a later write, and none
//! lacks an earlier one, of any vCPU or on the disk. `DAYFLY_FORKS=N` forks N times, a quarter of
//! them with 1, 2, 4 and 16 vCPUs each.
#![expect(clippy::unwrap_used, reason = "tests")]

mod harness;

use dayfly_microguest::{Growth, elf};
use dayfly_units::{CpuModel, needs};
use dayfly_vmm::arch::layout;
use harness::{Boot, Disk, Snapshot, Vmm, write_file};
use std::path::{Path, PathBuf};

const BINARY: &str = env!("CARGO_BIN_EXE_dayfly-vmm");
const MIB: u64 = 1 << 20;
/// Forks of one VM, and the number of generations in a row, each a clone of the previous one. Each
/// fork adds a layer to the disk, which has at most 64.
const OF_ONE: usize = 12;
const GENERATIONS: usize = 4;

/// A guest that writes, saved before its first clone.
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
        max_vcpus: 0,
        cpu_model: CpuModel::Host,
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

/// The number of writes, from the clone's console.
fn looked(mut clone: Vmm) -> u64 {
    // The guest writes letter by letter: the line may have only begun.
    let console = loop {
        let console = clone.wait_for("rings ", 60);
        if console.ends_with('\n') || clone.child.try_wait().unwrap().is_some() {
            break console;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    };
    let all = console.lines().find_map(|line| line.strip_prefix("rings ok "));
    let all = all.unwrap_or_else(|| panic!("{}: {console}", clone.folder.display()));
    u64::from_str_radix(all, 16).unwrap()
}

fn forks(vcpus: u8, count: usize) {
    let room = tempfile::tempdir().unwrap();
    let saved = writer(room.path(), vcpus);
    let (mut parent, mut writes, mut pauses) = (None::<Vmm>, 0, Vec::new());
    for n in 0..count {
        // Another id than the previous clone had.
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
            done if done % OF_ONE == 0 => {
                let mut child = restored(path("child"), &fork, go_on);
                child.wait_for("writing\n", 60);
                Some(child)
            }
            _ => Some(vm),
        };
    }
    pauses.sort_unstable();
    let most = pauses.last().copied().unwrap_or_default();
    println!(
        "{vcpus} vCPUs: {count} forks, stood still for {} us, {most} at most",
        pauses[count / 2]
    );
}

#[test]
fn a_fork_under_writers_on_every_vcpu_is_one_instant() {
    if !needs::kvm() {
        return;
    }
    let count =
        std::env::var("DAYFLY_FORKS").map_or(48, |n| n.parse().expect("DAYFLY_FORKS: a number"));
    for vcpus in [1, 2, 4, 16] {
        forks(vcpus, (count / 4).max(1));
    }
}
