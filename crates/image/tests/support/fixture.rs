//! Boots a guest, lets it fill its memory, freezes it, and keeps its RAM as a file below
//! `target/tmp`. A guest is made once for each kernel, script and command line.

use super::kpageflags::PageFlags;
use dayfly_boot::initramfs;
use dayfly_introspect::{Extent, Layout, RootHint};
use flate2::bufread::GzDecoder;
use std::collections::hash_map::DefaultHasher;
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const BUSYBOX: &str = "/bin/busybox";
const INIT: &str = include_str!("init.sh");
/// Time limit for a boot. Boots take 10 s under QEMU's TCG, and longer on a loaded host.
const BOOT_LIMIT: Duration = Duration::from_secs(900);
/// QEMU 7.2's emulation of several CPUs crashes a kernel that patches its own code, in about one of
/// twelve boots (docs/lab-notes/2026-11-21-emulated-host.md).
const TRIES: usize = 4;
/// Number of files on the guest's disk, all of which the guest reads.
pub const DISK_FILES: usize = 8;
/// Bytes in each file, not a whole number of pages.
pub const DISK_FILE_BYTES: usize = 2_500_000;
/// Number of 2 MiB pages that the guest reserves.
pub const HUGE_PAGES: usize = 2;
/// Start address of the RAM above the hole.
const HOLE_END: u64 = 4 << 30;

/// The guest to boot.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    /// Version of Debian's kernel: `6.1`, `6.12`.
    pub kernel: &'static str,
    pub five_levels: bool,
    /// Whether page-table isolation is on.
    pub isolated: bool,
    pub memory_mib: u64,
    /// RAM below the hole; the rest starts at 4 GiB.
    pub low_mib: u64,
}

/// A guest in its frozen state.
pub struct Fixture {
    pub spec: Spec,
    pub folder: PathBuf,
    pub hints: Vec<RootHint>,
    /// Content of /proc/iomem.
    iomem: String,
    /// The first 16 KiB of /proc/kcore.
    pub kcore: Vec<u8>,
    /// Page numbers of a process's mapped code and of its heap, from /proc/PID/pagemap.
    pub code: Vec<u64>,
    pub heap: Vec<u64>,
    /// Content of /proc/kpageflags, by page number.
    pub flags: PageFlags,
}

impl Spec {
    fn name(&self) -> String {
        let levels = if self.five_levels { 5 } else { 4 };
        let isolated = if self.isolated { "-pti" } else { "" };
        format!("linux{}-{levels}level{isolated}-{}m", self.kernel, self.memory_mib)
    }

    /// The guest, from the kept files or from a boot.
    pub fn fixture(self) -> Fixture {
        let tree = dayfly_image::kernel::fetch_debian(self.kernel, None).expect("a kernel package");
        let mut hasher = DefaultHasher::new();
        (format!("{self:?}"), &tree.package, INIT, include_str!("fixture.rs")).hash(&mut hasher);
        let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guests");
        fs::create_dir_all(&kept).unwrap();
        let folder = kept.join(format!("{}-{:016x}", self.name(), hasher.finish()));
        let lock = File::create(kept.join(format!("{}.lock", self.name()))).unwrap();
        lock.lock().unwrap();
        if !folder.is_dir() {
            sweep(&kept, &self.name());
            let staging = kept.join(format!("{}-staging", self.name()));
            for tries_left in (0..TRIES).rev() {
                let _ = fs::remove_dir_all(&staging);
                fs::create_dir_all(&staging).unwrap();
                let Err(why) = self.boot(&vmlinuz(&tree.folder), &staging) else { break };
                eprintln!("{self:?}: {why}");
                assert!(tries_left > 0, "{self:?} did not boot in {TRIES} tries");
            }
            fs::rename(&staging, &folder).unwrap();
        }
        Fixture::load(self, folder)
    }

    /// Boots and freezes the guest. The error is the cause of a crash.
    fn boot(&self, vmlinuz: &Path, folder: &Path) -> Result<(), String> {
        let busybox = fs::read(BUSYBOX).expect("busybox-static");
        let mut initrd = initramfs(&["proc", "sys", "tmp", "mnt"]);
        initrd.file("bin/busybox", 0o755, &busybox);
        initrd.file("init", 0o755, INIT.as_bytes());
        fs::write(folder.join("initrd"), initrd.finish().unwrap()).unwrap();
        make_disk(folder);
        let path = |name: &str| folder.join(name).display().to_string();
        let pti = if self.isolated { "on" } else { "off" };
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args([
            "-accel",
            "tcg,thread=multi",
            "-smp",
            "2",
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
            "-display",
            "none",
        ]);
        qemu.args(["-cpu", if self.five_levels { "max,la57=on" } else { "max,la57=off" }]);
        qemu.arg("-m").arg(self.memory_mib.to_string());
        qemu.arg("-machine")
            .arg(format!("q35,memory-backend=ram,max-ram-below-4g={}M", self.low_mib));
        qemu.arg("-object").arg(format!(
            "memory-backend-file,id=ram,size={}M,mem-path={},share=on",
            self.memory_mib,
            path("ram")
        ));
        qemu.arg("-kernel").arg(vmlinuz).arg("-initrd").arg(path("initrd"));
        qemu.arg("-append")
            .arg(format!("console=ttyS0 loglevel=4 panic=-1 hugepages={HUGE_PAGES} pti={pti}"));
        qemu.arg("-serial").arg(format!("file:{}", path("log")));
        qemu.arg("-serial").arg(format!("file:{}", path("reports")));
        qemu.arg("-monitor").arg(format!("unix:{},server=on,wait=off", path("monitor")));
        qemu.arg("-drive").arg(format!("if=none,id=disk,file={},format=raw", path("disk")));
        qemu.args(["-device", "nvme,drive=disk,serial=1"]);
        let child =
            qemu.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("qemu-system-x86");
        let mut guest = Guest(child);
        let start = Instant::now();
        let log = || fs::read_to_string(path("log")).unwrap_or_default();
        while !log().contains("FROZEN") {
            if guest.0.try_wait().unwrap().is_some() {
                return Err(format!("the guest ended while it booted:\n{}", log()));
            }
            if start.elapsed() > BOOT_LIMIT {
                return Err(format!("not frozen in {BOOT_LIMIT:?}:\n{}", log()));
            }
            sleep(Duration::from_millis(50));
        }
        let mut monitor = UnixStream::connect(path("monitor")).unwrap();
        monitor.write_all(b"stop\ninfo registers -a\nquit\n").unwrap();
        let mut said = Vec::new();
        // QEMU may close the socket before everything is read from it.
        let _ = monitor.read_to_end(&mut said);
        fs::write(path("registers"), said).unwrap();
        guest.0.wait().unwrap();
        for name in ["initrd", "disk", "monitor"] {
            let _ = fs::remove_file(path(name));
        }
        Ok(())
    }
}

/// A QEMU that does not outlive the test.
struct Guest(Child);

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Fixture {
    fn load(spec: Spec, folder: PathBuf) -> Self {
        let reports = fs::read(folder.join("reports")).unwrap();
        let mut rest = &reports[..];
        let mut member = || {
            let mut bytes = Vec::new();
            GzDecoder::new(&mut rest).read_to_end(&mut bytes).unwrap();
            bytes
        };
        let iomem = String::from_utf8(member()).unwrap();
        let kcore = member();
        let mut words = || {
            member().as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w)).collect::<Vec<_>>()
        };
        let (code, heap, flags) = (mapped(&words()), mapped(&words()), PageFlags(words()));
        let said =
            String::from_utf8_lossy(&fs::read(folder.join("registers")).unwrap()).into_owned();
        let values = |name: &str| {
            let after = said.split(name).skip(1);
            after
                .map(|text| {
                    u64::from_str_radix(text.split_whitespace().next().unwrap(), 16).unwrap()
                })
                .collect()
        };
        let (cr3, cr4): (Vec<u64>, Vec<u64>) = (values("CR3="), values("CR4="));
        let hints =
            cr3.into_iter().zip(cr4).map(|(cr3, cr4)| RootHint::from_registers(cr3, cr4)).collect();
        Self { spec, folder, hints, iomem, kcore, code, heap, flags }
    }

    /// The RAM file.
    pub fn ram(&self) -> File {
        File::open(self.folder.join("ram")).unwrap()
    }

    /// Page numbers of the kernel's code, from /proc/iomem.
    pub fn kernel_code(&self) -> Vec<u64> {
        let line = self.iomem.lines().find(|line| line.ends_with("Kernel code")).unwrap();
        let (start, end) = line.trim().split_once(' ').unwrap().0.split_once('-').unwrap();
        let page = |text| u64::from_str_radix(text, 16).unwrap() / 4096;
        (page(start)..=page(end)).collect()
    }

    /// The layout of the guest's RAM.
    pub fn layout(&self) -> Layout {
        Layout::new(&self.extents()).unwrap()
    }

    pub fn extents(&self) -> Vec<Extent> {
        let (low, all) = (self.spec.low_mib << 20, self.spec.memory_mib << 20);
        let mut extents = vec![Extent { guest: 0, offset: 0, bytes: low.min(all) }];
        if all > low {
            extents.push(Extent { guest: HOLE_END, offset: low, bytes: all - low });
        }
        extents
    }
}

/// The page numbers of a pagemap's pages that are in memory (bit 63; the number is in bits 0 to
/// 54).
fn mapped(pagemap: &[u64]) -> Vec<u64> {
    pagemap.iter().filter(|entry| *entry >> 63 == 1).map(|entry| entry & ((1 << 55) - 1)).collect()
}

fn vmlinuz(tree: &Path) -> PathBuf {
    let entries = fs::read_dir(tree.join("boot")).unwrap().map(|entry| entry.unwrap().path());
    let is_kernel = |path: &PathBuf| {
        path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("vmlinuz-"))
    };
    entries.into_iter().find(is_kernel).expect("a vmlinuz in the package")
}

/// Makes an ext4 disk with busybox and files with different contents.
fn make_disk(folder: &Path) {
    let root = folder.join("root");
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::create_dir_all(root.join("files")).unwrap();
    fs::copy(BUSYBOX, root.join("bin/busybox")).unwrap();
    let mut state = 1_u64;
    for n in 0..DISK_FILES {
        let bytes = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_be_bytes()[0]
        });
        fs::write(root.join(format!("files/{n}")), bytes.take(DISK_FILE_BYTES).collect::<Vec<_>>())
            .unwrap();
    }
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-t", "ext4", "-d"]).arg(&root).arg(folder.join("disk")).arg("64M");
    assert!(mke2fs.status().expect("e2fsprogs").success());
    fs::remove_dir_all(root).unwrap();
}

/// Removes the files of this guest that an earlier script or kernel made.
fn sweep(kept: &Path, name: &str) {
    for entry in fs::read_dir(kept).unwrap() {
        let path = entry.unwrap().path();
        let stale = path
            .file_name()
            .is_some_and(|file| file.to_string_lossy().starts_with(&format!("{name}-")));
        if stale && path.is_dir() {
            fs::remove_dir_all(path).unwrap();
        }
    }
}
