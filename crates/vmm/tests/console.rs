//! A full console that vCPUs write under their seccomp filters.

mod harness;

use dayfly_microguest::elf;
use dayfly_units::{CpuModel, needs};
use dayfly_vmm::control::ExitReason;
use dayfly_vmm::platform::{START_BYTES, start_of};
use harness::{Boot, Disk, Vmm, write_file};
use std::path::Path;
use std::sync::atomic::Ordering;

#[test]
fn the_newest_output_of_a_guest_is_kept() {
    const MAX: u64 = 200;
    const MIB: u64 = 1 << 20;
    if !needs::kvm() {
        return;
    }
    harness::CONSOLE_MAX_BYTES.store(MAX, Ordering::Relaxed);
    let folder = tempfile::tempdir().unwrap();
    let kernel = write_file(&folder.path().join("microguest.elf"), elf());
    let base = folder.path().join("base.raw");
    std::fs::File::create(&base).unwrap().set_len(MIB).unwrap();
    let lines: Vec<String> = (100..160).map(|n| format!("line-{n}")).collect();
    let words = lines.iter().map(|line| format!("say={line} ")).collect::<String>();
    let boot = Boot {
        kernel,
        initrd: None,
        cmdline: format!("{words}end=o"),
        memory_bytes: 64 * MIB,
        vcpus: 1,
        max_vcpus: 0,
        cpu_model: CpuModel::Host,
        disks: vec![Disk { size_bytes: MIB, base, layers: Vec::new(), writable: true }],
        jailed: true,
    };
    let home = folder.path().join("vm");
    let mut vm = Vmm::boot(Path::new(env!("CARGO_BIN_EXE_dayfly-vmm")), &home, &boot);
    let (record, status) = vm.wait_exit(20);
    assert_eq!((record.reason, status), (ExitReason::PowerOff, 0), "{}", record.message);
    let mut files =
        ["console.log", "console-2.log"].map(|name| std::fs::read(home.join(name)).unwrap());
    files.sort_by_key(|bytes| start_of(bytes).0);
    assert!(files.iter().all(|bytes| bytes.len() <= 100 + START_BYTES), "{files:?}");
    let kept: String =
        files.iter().map(|bytes| String::from_utf8_lossy(&bytes[start_of(bytes).1..])).collect();
    let all = format!("microguest\n{}\n", lines.join("\n"));
    assert!(all.ends_with(&kept) && kept.len() >= 100 && kept.len() <= 200, "{kept}");
}
