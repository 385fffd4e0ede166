//! Plays the daemon for tests and for the example `play`: opens files, starts `dayfly-vmm`, and
//! sends it commands.
#![allow(dead_code, reason = "each user takes what it needs")]
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, missing_docs, reason = "a test harness")]

use dayfly_units::CpuModel;
use dayfly_vmm::config::{
    BootConfig, DiskConfig, JailConfig, LayerConfig, RestoreConfig, Shape, SharedConfig, Start,
    VmmConfig,
};
use dayfly_vmm::control::{Client, ClientError, ExitRecord, Frozen};
use dayfly_vmm::memory::backing::{self, Row};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The times of tests are those of an idle host; on a busy one, threads stand still for seconds. A
/// limit ends only what hangs.
const TIMEOUT_FACTOR: u32 = 20;

/// The limit on a console's output in bytes; a variable for the test of the limit.
pub static CONSOLE_MAX_BYTES: AtomicU64 = AtomicU64::new(4 << 20);

/// The files of a disk.
#[derive(Debug, Clone)]
pub struct Disk {
    pub size_bytes: u64,
    pub base: PathBuf,
    pub layers: Vec<(PathBuf, PathBuf)>,
    pub writable: bool,
}

/// A cold boot.
#[derive(Debug, Clone)]
pub struct Boot {
    pub kernel: PathBuf,
    pub initrd: Option<PathBuf>,
    pub cmdline: String,
    pub memory_bytes: u64,
    pub vcpus: u8,
    pub max_vcpus: u8,
    pub cpu_model: CpuModel,
    pub disks: Vec<Disk>,
    pub jailed: bool,
}

/// The files that a save wrote.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub state: PathBuf,
    pub memory: PathBuf,
    pub disks: Vec<Disk>,
    pub shape: Shape,
    pub working_set: Option<PathBuf>,
    pub jailed: bool,
    /// A list of shared pages, and the memory files that have them.
    pub shared: Option<(PathBuf, Vec<PathBuf>)>,
}

/// A running VMM process and its folder.
pub struct Vmm {
    pub binary: PathBuf,
    pub child: Child,
    pub folder: PathBuf,
    pub disks: Vec<Disk>,
    pub jailed: bool,
    /// The snapshot that it was cloned from.
    pub of: Option<Snapshot>,
    pub spawned: Instant,
    ended: bool,
}

fn inherit(fd: &impl AsRawFd) -> i32 {
    let number = fd.as_raw_fd();
    // SAFETY: clears close-on-exec of a descriptor that this process owns.
    unsafe { libc::fcntl(number, libc::F_SETFD, 0) };
    number
}

/// Descriptors that a process inherits.
struct Files(Vec<OwnedFd>);

impl Collect for Files {
    fn keep(&mut self, fd: OwnedFd) -> i32 {
        let number = inherit(&fd);
        self.0.push(fd);
        number
    }
}

/// Descriptors that come with a message, numbered by their places.
struct Places(Vec<OwnedFd>);

impl Collect for Places {
    fn keep(&mut self, fd: OwnedFd) -> i32 {
        self.0.push(fd);
        i32::try_from(self.0.len() - 1).unwrap()
    }
}

trait Collect {
    fn keep(&mut self, fd: OwnedFd) -> i32;

    fn read(&mut self, path: &Path) -> i32 {
        self.keep(File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).into())
    }

    fn disks(&mut self, folder: &Path, disks: &[Disk]) -> Vec<DiskConfig> {
        let mut out = Vec::new();
        for (n, disk) in disks.iter().enumerate() {
            let layers = disk
                .layers
                .iter()
                .map(|(data, map)| LayerConfig { data_fd: self.read(data), map_fd: self.read(map) })
                .collect();
            let writable_fd = disk.writable.then(|| {
                let path = folder.join(format!("disk{n}.cow"));
                let file =
                    OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
                self.keep(file.into())
            });
            let base_fd = self.read(&disk.base);
            let (size_bytes, trees) = (disk.size_bytes, Vec::new());
            out.push(DiskConfig { size_bytes, base_fd, layers, writable_fd, trees });
        }
        out
    }
}

impl Vmm {
    /// Starts `binary` in `folder`, which must not exist yet, and boots a guest.
    pub fn boot(binary: &Path, folder: &Path, boot: &Boot) -> Self {
        Self::spawn(binary, folder, boot.disks.clone(), boot.jailed, |files| {
            let disks = files.disks(folder, &boot.disks);
            Start::Boot(BootConfig {
                kernel_fd: files.read(&boot.kernel),
                initrd_fd: boot.initrd.as_ref().map(|path| files.read(path)),
                cmdline: boot.cmdline.clone(),
                memory_bytes: boot.memory_bytes,
                vcpus: boot.vcpus,
                max_vcpus: boot.max_vcpus,
                cpu_model: boot.cpu_model,
                disks,
                nets: 0,
            })
        })
    }

    /// Starts a warm VMM for VMs of this shape.
    pub fn warm(binary: &Path, folder: &Path, shape: Shape, jailed: bool) -> Self {
        Self::spawn(binary, folder, Vec::new(), jailed, |_| Start::WarmVmm { shape, record: false })
    }

    /// Starts a warm VMM that records the pages that its guest touches.
    pub fn recording_vmm(binary: &Path, folder: &Path, shape: Shape, jailed: bool) -> Self {
        Self::spawn(binary, folder, Vec::new(), jailed, |_| Start::WarmVmm { shape, record: true })
    }

    /// Restores a guest in a warm VMM.
    pub fn adopt(
        &mut self,
        snapshot: &Snapshot,
        generation: [u8; 16],
        paused: bool,
    ) -> Result<(), ClientError> {
        let mut files = Places(Vec::new());
        let disks = files.disks(&self.folder, &snapshot.disks);
        let config = RestoreConfig {
            state_fd: files.read(&snapshot.state),
            memory_fd: files.read(&snapshot.memory),
            shared: snapshot.shared.as_ref().map(|(list, others)| SharedConfig {
                list_fd: files.read(list),
                file_fds: others.iter().map(|file| files.read(file)).collect(),
            }),
            disks,
            generation,
            working_set_fd: snapshot.working_set.as_ref().map(|path| files.read(path)),
            pager_fd: None,
            paused,
        };
        self.disks.clone_from(&snapshot.disks);
        self.of = Some(snapshot.clone());
        let fds: Vec<_> = files.0.iter().map(AsFd::as_fd).collect();
        self.client().restore(config, &fds)
    }

    pub fn restore(
        binary: &Path,
        folder: &Path,
        snapshot: &Snapshot,
        generation: [u8; 16],
        paused: bool,
    ) -> Self {
        let mut vmm = Self::warm(binary, folder, snapshot.shape, snapshot.jailed);
        match vmm.adopt(snapshot, generation, paused) {
            // The exit record names the cause.
            Ok(()) | Err(ClientError::Gone) => vmm,
            Err(error) => panic!("{error}"),
        }
    }

    fn spawn(
        binary: &Path,
        folder: &Path,
        disks: Vec<Disk>,
        jailed: bool,
        start: impl FnOnce(&mut Files) -> Start,
    ) -> Self {
        std::fs::create_dir_all(folder.join("root")).unwrap();
        let mut files = Files(Vec::new());
        let kvm = OpenOptions::new().read(true).write(true).open("/dev/kvm").unwrap();
        let control = UnixListener::bind(folder.join("control.sock")).unwrap();
        let vsock = UnixListener::bind(folder.join("root/vsock.sock")).unwrap();
        let append = |name: &str| {
            OpenOptions::new().append(true).create_new(true).open(folder.join(name)).unwrap()
        };
        let jail =
            jailed.then(|| JailConfig { root: folder.join("root"), uid: 61_234, gid: 61_234 });
        let vsock_path =
            if jailed { PathBuf::from("/vsock.sock") } else { folder.join("root/vsock.sock") };
        let config = VmmConfig {
            limits_fd: None,
            id: dayfly_units::VmId::random(),
            jail,
            kvm_fd: Some(files.keep(kvm.into())),
            control_fd: files.keep(control.into()),
            link_fd: None,
            background: false,
            vsock_fd: files.keep(vsock.into()),
            vsock_path,
            console_fds: ["console.log", "console-2.log"]
                .map(|name| files.keep(append(name).into())),
            console_max_bytes: CONSOLE_MAX_BYTES.load(Ordering::Relaxed),
            exit_fd: files.keep(append("exit.json").into()),
            metered: false,
            start: start(&mut files),
        };
        let path = folder.join("config.json");
        std::fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
        let config_fd = files.read(&path);
        let mut command = Command::new(binary);
        command.args(["--config-fd", &config_fd.to_string(), "--id", &config.id.to_string()]);
        if jailed {
            // SAFETY: unshare(2) is async-signal-safe and touches no memory.
            unsafe {
                command.pre_exec(|| {
                    let flags = libc::CLONE_NEWNS
                        | libc::CLONE_NEWNET
                        | libc::CLONE_NEWIPC
                        | libc::CLONE_NEWUTS;
                    if libc::unshare(flags) == 0 {
                        Ok(())
                    } else {
                        Err(std::io::Error::last_os_error())
                    }
                });
            }
        }
        let spawned = Instant::now();
        let child = command.spawn().unwrap();
        let binary = binary.to_owned();
        Self {
            binary,
            child,
            folder: folder.to_owned(),
            disks,
            jailed,
            of: None,
            spawned,
            ended: false,
        }
    }

    pub fn client(&self) -> Client {
        let within = TIMEOUT_FACTOR * Duration::from_secs(60);
        Client::connect(&self.folder.join("control.sock"), Some(within)).unwrap()
    }

    pub fn console(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.folder.join("console.log")).unwrap())
            .into_owned()
    }

    /// Waits for `text` on the console and returns the console. Panics with the console if the VMM
    /// ends or [`TIMEOUT_FACTOR`] times the time passes.
    pub fn wait_for(&mut self, text: &str, seconds: u64) -> String {
        let deadline = Instant::now() + TIMEOUT_FACTOR * Duration::from_secs(seconds);
        loop {
            let ended = self.child.try_wait().unwrap().is_some();
            let console = self.console();
            if console.contains(text) {
                return console;
            }
            let exit = std::fs::read_to_string(self.folder.join("exit.json")).unwrap_or_default();
            assert!(
                !ended && Instant::now() < deadline,
                "no {text:?} on the console ({}): exit record {exit:?}, console:\n{console}",
                if ended { "the VMM ended" } else { "timeout" }
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until the guest has worked with its disks: until the VMM has made `calls` more system
    /// calls that read or write, or the guest prints `ready` and rests.
    pub fn works(&self, calls: u64) {
        let made = || {
            let counts = std::fs::read_to_string(format!("/proc/{}/io", self.child.id())).unwrap();
            let counts = counts.lines().filter_map(|line| line.split_once(": "));
            let counts = counts.filter(|(name, _)| ["syscr", "syscw"].contains(name));
            counts.map(|(_, count)| count.parse::<u64>().unwrap()).sum::<u64>()
        };
        let (before, begun) = (made(), Instant::now());
        while made() < before + calls && !self.console().contains("ready\n") {
            let within = TIMEOUT_FACTOR * Duration::from_secs(60);
            assert!(begun.elapsed() < within, "it does not work with its disks");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Waits until the process ends by itself.
    pub fn wait_exit(&mut self, seconds: u64) -> (ExitRecord, i32) {
        let deadline = Instant::now() + TIMEOUT_FACTOR * Duration::from_secs(seconds);
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "the VMM did not end; console:\n{}", self.console());
            std::thread::sleep(Duration::from_millis(2));
        };
        self.ended = true;
        let json = std::fs::read_to_string(self.folder.join("exit.json")).unwrap();
        let record = serde_json::from_str(&json)
            .unwrap_or_else(|e| panic!("exit record {json:?}: {e}; status {status}"));
        (record, status.code().unwrap_or_else(|| panic!("{status}; {json}")))
    }

    /// Pauses the VM, saves it to `target` and leaves it paused.
    pub fn save(&mut self, target: &Path) -> Snapshot {
        let (snapshot, files) = self.files(target);
        let mut client = self.client();
        client.pause().unwrap();
        client.save(&files.iter().map(AsFd::as_fd).collect::<Vec<_>>()).unwrap();
        self.disks.clone_from(&snapshot.disks);
        snapshot
    }

    /// Saves the running VM to `target`; returns how long it was paused.
    pub fn freeze(&mut self, target: &Path) -> (Snapshot, Frozen) {
        let (snapshot, files) = self.files(target);
        let mut client = self.client();
        client.precopy(false, files[1].as_fd()).unwrap();
        let frozen = client.freeze(&files.iter().map(AsFd::as_fd).collect::<Vec<_>>()).unwrap();
        self.disks.clone_from(&snapshot.disks);
        (snapshot, frozen)
    }

    /// Forks the running VM to `target`, with only the pages that it wrote since its creation;
    /// returns how long it was paused. `between` is called after the precopy.
    pub fn fork(&mut self, target: &Path, between: impl FnOnce(&mut Self)) -> (Snapshot, Frozen) {
        let (mut snapshot, files) = self.files(target);
        let mut client = self.client();
        let bytes = snapshot.shape.memory_bytes;
        files[1].set_len(bytes).unwrap();
        let of = self.of.clone();
        client.precopy(of.is_some(), files[1].as_fd()).unwrap();
        between(self);
        let frozen = client.fork(&files.iter().map(AsFd::as_fd).collect::<Vec<_>>()).unwrap();
        self.disks.clone_from(&snapshot.disks);
        let rows = backing::decode(&File::open(target.join("pagemap")).unwrap()).unwrap();
        let Some(of) = of else {
            assert!(rows.is_empty(), "everything was copied");
            return (snapshot, frozen);
        };
        let (below, mut others) = of.shared.map_or_else(Default::default, |(list, others)| {
            (backing::decode(&File::open(list).unwrap()).unwrap(), others)
        });
        let file = u32::try_from(others.len()).unwrap();
        let above: Vec<Row> = rows.into_iter().map(|row| Row { file, ..row }).collect();
        let list =
            write_file(&target.join("list"), &backing::encode(&backing::overlay(&below, &above)));
        others.push(std::mem::replace(&mut snapshot.memory, of.memory));
        snapshot.shared = Some((list, others));
        (snapshot, frozen)
    }

    /// The files of a save to `target`: state, memory, page map, and two files for each writable
    /// disk.
    pub fn files(&mut self, target: &Path) -> (Snapshot, Vec<File>) {
        std::fs::create_dir_all(target).unwrap();
        let create = |name: String| {
            let path = target.join(name);
            let file =
                OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
            (path, file)
        };
        let (state, state_file) = create("state".to_owned());
        let (memory, memory_file) = create("memory".to_owned());
        let (_, page_map_file) = create("pagemap".to_owned());
        let mut files = vec![state_file, memory_file, page_map_file];
        let mut disks = self.disks.clone();
        for (n, disk) in disks.iter_mut().enumerate().filter(|(_, disk)| disk.writable) {
            let (map, map_file) = create(format!("disk{n}.map"));
            let (fresh, fresh_file) = create(format!("disk{n}.fresh"));
            // The old writable layer becomes the snapshot's; the fresh one becomes this VM's.
            let frozen = target.join(format!("disk{n}.layer"));
            std::fs::rename(self.folder.join(format!("disk{n}.cow")), &frozen).unwrap();
            std::fs::rename(fresh, self.folder.join(format!("disk{n}.cow"))).unwrap();
            files.extend([map_file, fresh_file, File::open(&frozen).unwrap()]);
            disk.layers.push((frozen, map));
        }
        let shape = self.client().status().unwrap().shape;
        (
            Snapshot {
                state,
                memory,
                disks,
                shape,
                working_set: None,
                jailed: self.jailed,
                shared: None,
            },
            files,
        )
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Writes `bytes` to a new file.
pub fn write_file(path: &Path, bytes: &[u8]) -> PathBuf {
    let mut file = File::create(path).unwrap();
    file.write_all(bytes).unwrap();
    path.to_owned()
}
