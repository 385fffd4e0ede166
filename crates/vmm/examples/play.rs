//! Plays the daemon for one VMM, to try stock kernels by hand on a host whose KVM can run them.
//!
//! `play VMM FOLDER end KERNEL INITRD VCPUS MIB CMDLINE`: boots, prints console and exit record.
//! `play VMM FOLDER cycle KERNEL INITRD VCPUS MIB CMDLINE`: boots a guest that prints
//! `tick N UPTIME …` for ever, saves it in the middle and restores it three times, each time from
//! the previous clone. Reports whether ticks and uptime continue.
//!
//! `PLAY_DISK_MIB=N` gives the guest a disk of N MiB: an empty base under a copy-on-write layer.
#![allow(clippy::unwrap_used, reason = "a tool for developers; it stops at the first surprise")]

#[path = "../tests/harness/mod.rs"]
mod harness;

use harness::{Boot, Disk, Snapshot, Vmm};
use std::path::{Path, PathBuf};
use std::time::Instant;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [vmm, folder, what, kernel, initrd, vcpus, mib, cmdline] = arguments.as_slice() else {
        eprintln!("usage: play VMM FOLDER end|cycle KERNEL INITRD VCPUS MIB CMDLINE");
        std::process::exit(2);
    };
    let folder = PathBuf::from(folder);
    std::fs::create_dir_all(&folder).unwrap();
    let disk_mib: u64 = std::env::var("PLAY_DISK_MIB").map_or(0, |n| n.parse().unwrap());
    let disks = (disk_mib > 0).then(|| {
        let base = folder.join("base.raw");
        std::fs::File::create(&base).unwrap().set_len(disk_mib << 20).unwrap();
        Disk { size_bytes: disk_mib << 20, base, layers: Vec::new(), writable: true }
    });
    let boot = Boot {
        kernel: PathBuf::from(kernel),
        initrd: (initrd != "-").then(|| PathBuf::from(initrd)),
        cmdline: cmdline.clone(),
        memory_bytes: mib.parse::<u64>().unwrap() << 20,
        vcpus: vcpus.parse().unwrap(),
        max_vcpus: 0,
        cpu_model: dayfly_units::CpuModel::Host,
        disks: disks.into_iter().collect(),
        jailed: true,
    };
    let started = Instant::now();
    let mut vm = Vmm::boot(Path::new(vmm), &folder.join("vm"), &boot);
    match what.as_str() {
        "end" => {
            let (record, status) = vm.wait_exit(120);
            println!("{}", vm.console());
            println!("== {record:?} status {status} after {} ms", started.elapsed().as_millis());
        }
        "cycle" => cycle(Path::new(vmm), &folder, vm, started),
        other => panic!("{other}?"),
    }
}

/// The last whole line `tick N UPTIME …` of a console: N, and the uptime in hundredths of a second.
fn last_tick(console: &str) -> Option<(u64, u64)> {
    let whole = console.rfind('\n').map_or("", |end| &console[..end]);
    let line = whole.lines().rfind(|line| line.starts_with("tick "))?;
    let mut words = line.split_whitespace().skip(1);
    let n = words.next()?.parse().ok()?;
    let uptime = words.next()?.replace('.', "").parse().ok()?;
    Some((n, uptime))
}

fn wait_tick(vm: &mut Vmm, at_least: u64) -> (u64, u64) {
    let deadline = Instant::now() + std::time::Duration::from_secs(120);
    loop {
        if let Some(tick) = last_tick(&vm.console()).filter(|(n, _)| *n >= at_least) {
            return tick;
        }
        let ended = vm.child.try_wait().unwrap();
        assert!(
            Instant::now() < deadline && ended.is_none(),
            "no tick {at_least} (status {ended:?}):\n{}\n{}",
            vm.console(),
            std::fs::read_to_string(vm.folder.join("exit.json")).unwrap()
        );
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

fn phases(vm: &Vmm, what: &str) {
    let phases = vm.client().status().unwrap().phases;
    let first = phases[0].1;
    let text: Vec<_> = phases.iter().map(|(name, us)| format!("{name} {}", us - first)).collect();
    println!("== {what}: phases in us: {}", text.join(", "));
}

fn cycle(binary: &Path, folder: &Path, mut vm: Vmm, started: Instant) {
    wait_tick(&mut vm, 5);
    println!("{}", vm.console());
    println!("== tick 5 after {} ms", started.elapsed().as_millis());
    phases(&vm, "boot");
    let then = Instant::now();
    let mut snapshot = vm.save(&folder.join("snapshot0"));
    println!("== saved in {} ms, memory {} KiB", then.elapsed().as_millis(), blocks(&snapshot));
    let mut saved = last_tick(&vm.console()).unwrap();
    vm.client().resume().unwrap();
    let after = wait_tick(&mut vm, saved.0 + 3);
    println!("== the parent went from tick {saved:?} to {after:?}");
    drop(vm);
    std::thread::sleep(std::time::Duration::from_secs(3));
    for n in 0..3u8 {
        let then = Instant::now();
        let mut clone =
            Vmm::restore(binary, &folder.join(format!("clone{n}")), &snapshot, [n + 1; 16], false);
        let first = wait_tick(&mut clone, saved.0 + 1);
        let first_ms = then.elapsed().as_millis();
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", clone.child.id())).unwrap();
        let faults: Vec<_> = stat.split_whitespace().skip(9).take(6).collect();
        println!("== faults and ticks of the clone so far: {faults:?}");
        for entry in std::fs::read_dir("/sys/kernel/debug/kvm").into_iter().flatten().flatten() {
            if let Ok(text) = std::fs::read_to_string(entry.path().join("pf_taken")) {
                let fixed =
                    std::fs::read_to_string(entry.path().join("pf_fixed")).unwrap_or_default();
                println!(
                    "== {:?} pf_taken {} pf_fixed {}",
                    entry.file_name(),
                    text.trim(),
                    fixed.trim()
                );
            }
        }
        phases(&clone, &format!("clone {n}"));
        let later = wait_tick(&mut clone, saved.0 + 10);
        println!(
            "== clone {n}: saved at {saved:?}, first {first:?} after {first_ms} ms, later {later:?}"
        );
        // The guest's clock may advance at most by the time since its restore and the time between
        // its last tick and the save; in hundredths of a second.
        let real = u64::try_from(first_ms / 10).unwrap();
        assert!(first.1 >= saved.1 && first.1 <= saved.1 + real + 200, "the guest's uptime jumped");
        println!("{}", clone.console());
        let next = clone.save(&folder.join(format!("snapshot{}", n + 1)));
        saved = last_tick(&clone.console()).unwrap();
        println!("== saved the clone, memory {} KiB", blocks(&next));
        snapshot = next;
    }
}

fn blocks(snapshot: &Snapshot) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(&snapshot.memory).unwrap().blocks() / 2
}
