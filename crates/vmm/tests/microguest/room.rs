//! A folder for a test's VMs, and VMs of the microguest in it.

use crate::harness::{Boot, Disk, Snapshot, Vmm, write_file};
use dayfly_microguest::{End, elf, orders};
use dayfly_units::CpuModel;
use dayfly_vmm::arch::layout;
use std::path::{Path, PathBuf};

pub const BINARY: &str = env!("CARGO_BIN_EXE_dayfly-vmm");
pub const MIB: u64 = 1 << 20;

pub struct Room {
    pub folder: tempfile::TempDir,
    pub kernel: PathBuf,
}

impl Room {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let kernel = write_file(&folder.path().join("microguest.elf"), elf());
        Self { folder, kernel }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn boot(&self, name: &str, cmdline: &str) -> Vmm {
        self.boot_with(name, cmdline, 64 * MIB, 1, false)
    }

    pub fn boot_with(
        &self,
        name: &str,
        cmdline: &str,
        memory_bytes: u64,
        vcpus: u8,
        jailed: bool,
    ) -> Vmm {
        self.boot_sized(name, cmdline, memory_bytes, (vcpus, 0), jailed)
    }

    /// Boots a guest with the first number of vCPUs, which knows of the second number.
    pub fn boot_sized(
        &self,
        name: &str,
        cmdline: &str,
        memory_bytes: u64,
        (vcpus, max_vcpus): (u8, u8),
        jailed: bool,
    ) -> Vmm {
        let base = self.path(&format!("{name}.raw"));
        std::fs::File::create(&base).unwrap().set_len(MIB).unwrap();
        let boot = Boot {
            kernel: self.kernel.clone(),
            initrd: None,
            cmdline: cmdline.to_owned(),
            memory_bytes,
            vcpus,
            max_vcpus,
            cpu_model: CpuModel::Host,
            disks: vec![Disk { size_bytes: MIB, base, layers: Vec::new(), writable: true }],
            jailed,
        };
        Vmm::boot(Path::new(BINARY), &self.path(name), &boot)
    }

    /// Boots a guest of two vCPUs of this model, without disks, that waits for orders.
    pub fn boot_of(&self, cpu_model: CpuModel) -> Vmm {
        let boot = Boot {
            kernel: self.kernel.clone(),
            initrd: None,
            cmdline: format!("fill=7:40 wait={:x}", layout::GENERATION.0),
            memory_bytes: 64 * MIB,
            vcpus: 2,
            max_vcpus: 0,
            cpu_model,
            disks: Vec::new(),
            jailed: false,
        };
        Vmm::boot(Path::new(BINARY), &self.path(cpu_model.name()), &boot)
    }

    pub fn clone(&self, name: &str, snapshot: &Snapshot, seed: u32, end: End) -> Vmm {
        Vmm::restore(Path::new(BINARY), &self.path(name), snapshot, orders(seed, end), false)
    }

    /// A saved guest that filled 64 pages with seed 7 and waits for orders.
    pub fn snapshot(&self, vcpus: u8, jailed: bool) -> (Vmm, Snapshot) {
        let words = format!("fill=7:40 wait={:x}", layout::GENERATION.0);
        let mut vm = self.boot_with("parent", &words, 64 * MIB, vcpus, jailed);
        vm.wait_for("count 4000\n", 30);
        let snapshot = vm.save(&self.path("snapshot"));
        (vm, snapshot)
    }
}

/// The bytes of a file.
pub fn content(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

/// Name and folder in /proc of each of a VMM's threads, sorted by name. KVM keeps a thread in the
/// process, which runs none of the VMM's code and is left out.
pub fn threads(vmm: &Vmm) -> Vec<(String, PathBuf)> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", vmm.child.id())).unwrap();
    let named = |task: PathBuf| {
        let name = std::fs::read_to_string(task.join("comm")).unwrap();
        (name.trim_end().to_owned(), task)
    };
    let mut all: Vec<_> = tasks.map(|task| named(task.unwrap().path())).collect();
    all.retain(|(name, _)| !name.starts_with("kvm-"));
    all.sort();
    all
}
