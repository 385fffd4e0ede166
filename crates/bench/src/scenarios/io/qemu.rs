//! A guest of QEMU, with the daemon's kernel and initramfs, and a copy of its image's disk.

use super::guests::{Aio, Shape};
use super::network::Network;
use crate::prelude::*;
use dayfly_units::sparse::copy_file;
use rustix::io::FdFlags;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use std::fs::{File, read_to_string};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::process::{ExitStatus, Stdio};
use tempfile::TempDir;
use tokio::process::{Child, Command};

const PROGRAM: &str = "/usr/bin/qemu-system-x86_64";
/// The daemon's words, without what differs between its VMs.
const CMDLINE: &str = "console=ttyS0 quiet reboot=t panic=-1 i8042.noaux i8042.nokbd \
                       random.trust_cpu=on root=/dev/vda dayfly.init=/usr/local/sbin/bench-init";
/// The names of guests' folders begin so.
const PREFIX: &str = "bench-io-";
/// Bytes of console and errors that are shown if a guest fails.
const SHOWN_BYTES: usize = 2000;

/// What guests are made of.
#[derive(Debug, Clone)]
pub struct Parts {
    /// The folder to change root to before QEMU is started, if it is not there.
    pub root: Option<PathBuf>,
    /// The folder of the kernel `vmlinux` and its `initrd`.
    pub kernel: PathBuf,
    /// The image's disk.
    pub disk: PathBuf,
    /// A folder of the same file system as the daemon's writable disks.
    pub beside: PathBuf,
}

impl Parts {
    /// The parts of `kernel` and `image` in the daemon's folder `state`.
    pub fn of(state: &Path, kernel: &Name, image: &Name, root: Option<PathBuf>) -> Self {
        Self {
            root,
            kernel: state.join("kernels").join(kernel.as_str()),
            disk: state.join("images").join(image.as_str()).join("disk"),
            // A store empties this folder when it opens, as the next run does.
            beside: state.join("staging"),
        }
    }

    /// Removes the files of guests of a run that was killed. The caller has the network's lock, so
    /// no other run has guests.
    ///
    /// # Errors
    /// They cannot be removed.
    pub fn sweep(&self) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.beside)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(PREFIX) {
                std::fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    }

    fn command(&self) -> Command {
        let (mut command, root, parent) = (Command::new(PROGRAM), self.root.clone(), getpid());
        command.kill_on_drop(true).stdin(Stdio::null());
        // SAFETY: between fork and exec the child makes only four system calls through rustix, on a
        // path that was allocated before and is short enough for rustix's buffer on the stack.
        unsafe {
            command.pre_exec(move || {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                // The parent may have ended before.
                if getppid() != Some(parent) {
                    return Err(io::Error::from_raw_os_error(libc::ESRCH));
                }
                if let Some(root) = &root {
                    rustix::process::chroot(root)?;
                    rustix::process::chdir("/")?;
                }
                Ok(())
            });
        }
        command
    }

    /// The version of QEMU.
    ///
    /// # Errors
    /// There is none.
    pub async fn version(&self) -> Result<String> {
        let missing = || format!("{PROGRAM}: is Debian's qemu-system-x86 installed?");
        let output = self.command().arg("--version").output().await.with_context(missing)?;
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{PROGRAM}: {}: {errors}", output.status);
        Ok(text.lines().next().unwrap_or_default().to_owned())
    }
}

/// What differs between the guests of a run.
#[derive(Debug, Clone, Copy)]
pub struct Choice {
    /// How requests of the disk are performed.
    pub aio: Aio,
    /// Whether the host's kernel moves the packets.
    pub vhost: bool,
}

/// A running guest. A drop ends it and removes its files.
#[derive(Debug)]
pub struct Qemu {
    child: Child,
    folder: TempDir,
}

impl Qemu {
    /// Starts it. A drop of the future leaves nothing.
    ///
    /// # Errors
    /// No file can be copied, or QEMU cannot be started.
    pub async fn start(
        parts: &Parts,
        shape: Shape,
        choice: Choice,
        network: &Network,
    ) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(&parts.beside);
        let folder = folder.with_context(|| parts.beside.display().to_string())?;
        copy(&parts.disk, &folder.path().join("disk")).context("copying the image's disk")?;
        let errors = File::create(folder.path().join("errors"))?;
        let tap = network.tap()?;
        let words = words(parts, shape, choice, network, folder.path(), tap.as_raw_fd());
        let child = spawn(parts.command().args(words).stdout(Stdio::null()).stderr(errors), tap)?;
        Ok(Self { child, folder })
    }

    /// Waits for its end, which is an error.
    pub async fn lost(&mut self) -> anyhow::Error {
        match self.child.wait().await {
            Ok(status) => self.ended(status),
            Err(error) => anyhow!(error).context("waiting for QEMU"),
        }
    }

    fn ended(&self, status: ExitStatus) -> anyhow::Error {
        anyhow!("QEMU ended ({status}): {}", self.last_lines())
    }

    /// The ends of its errors and of the guest's console.
    pub fn last_lines(&self) -> String {
        let texts = ["errors", "console"].map(|name| {
            let text = read_to_string(self.folder.path().join(name)).unwrap_or_default();
            let from = text.floor_char_boundary(text.len().saturating_sub(SHOWN_BYTES));
            text[from..].trim().to_owned()
        });
        texts.join("\n")
    }

    /// Ends it.
    ///
    /// # Errors
    /// Its files cannot be removed.
    pub async fn end(mut self) -> Result<()> {
        self.child.kill().await.context("ending QEMU")?;
        self.folder.close().context("removing the files of QEMU's guest")
    }
}

/// Copies the disk, and waits until the copy is on the host's disk: writing it must not slow down
/// a job.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let to = File::create(to)?;
    copy_file(&File::open(from)?, &to)?;
    to.sync_all()
}

/// Starts QEMU with the tap.
fn spawn(command: &mut Command, tap: OwnedFd) -> Result<Child> {
    let inherited = tap.as_raw_fd();
    // SAFETY: between fork and exec the child makes one system call, on a descriptor that is open
    // until after the exec.
    unsafe {
        command.pre_exec(move || {
            let tap = BorrowedFd::borrow_raw(inherited);
            Ok(rustix::io::fcntl_setfd(tap, FdFlags::empty())?)
        });
    }
    let child = command.spawn().context(PROGRAM)?;
    // QEMU has its own.
    drop(tap);
    Ok(child)
}

/// QEMU's words.
fn words(
    parts: &Parts,
    shape: Shape,
    choice: Choice,
    network: &Network,
    folder: &Path,
    tap: i32,
) -> Vec<String> {
    let append = format!("{CMDLINE} {}", network.words());
    words_of(parts, shape, choice, folder, &append, &network.mac(), tap)
}

fn words_of(
    parts: &Parts,
    Shape { cpus, memory, .. }: Shape,
    Choice { aio, vhost }: Choice,
    folder: &Path,
    append: &str,
    mac: &str,
    tap: i32,
) -> Vec<String> {
    let file = |name: &str| folder.join(name).display().to_string();
    let kernel = |name: &str| parts.kernel.join(name).display().to_string();
    let mut words: Vec<String> =
        "-nodefaults -no-user-config -display none -no-reboot -M q35,accel=kvm -cpu host"
            .split(' ')
            .map(str::to_owned)
            .collect();
    let with_value = [
        ("-smp", cpus.to_string()),
        ("-m", format!("{}M", memory.0 >> 20)),
        ("-kernel", kernel("vmlinux")),
        ("-initrd", kernel("initrd")),
        ("-append", append.to_owned()),
        ("-serial", format!("file:{}", file("console"))),
        ("-object", "iothread,id=disks".to_owned()),
        (
            "-drive",
            format!(
                "if=none,id=root,format=raw,cache=writeback,discard=unmap,aio={},file={}",
                aio.name(),
                file("disk")
            ),
        ),
        ("-device", "virtio-blk-pci,drive=root,iothread=disks".to_owned()),
        ("-netdev", format!("tap,id=net,fd={tap},vhost={}", if vhost { "on" } else { "off" })),
        ("-device", format!("virtio-net-pci,netdev=net,mac={mac},romfile=")),
        ("-device", "virtio-rng-pci".to_owned()),
    ];
    words.extend(with_value.into_iter().flat_map(|(name, value)| [name.to_owned(), value]));
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_gets_the_daemon_s_kernel_and_the_guest_s_shape() {
        let name = |text: &str| text.parse().unwrap();
        let parts = Parts::of(Path::new("/state"), &name("6.12"), &name("io"), None);
        let shape = Shape { cpus: 2, memory: Bytes(512 << 20), file: Bytes(1 << 20), seconds: 1 };
        let choice = Choice { aio: Aio::IoUring, vhost: false };
        let (folder, mac) = (Path::new("/state/staging/x"), "02:df:00:00:00:02");
        let words = words_of(&parts, shape, choice, folder, "quiet bench.net=a,b,c", mac, 9);
        let after = |name: &str, part: &str| {
            let mut pairs = words.windows(2).filter(|pair| pair[0] == name);
            assert!(pairs.any(|pair| pair[1].contains(part)), "{name} {part}: {words:?}");
        };
        after("-smp", "2");
        after("-m", "512M");
        after("-kernel", "/state/kernels/6.12/vmlinux");
        after("-append", "quiet bench.net=a,b,c");
        after("-drive", "cache=writeback,discard=unmap,aio=io_uring,file=/state/staging/x/disk");
        after("-device", "virtio-blk-pci,drive=root,iothread=disks");
        after("-netdev", "fd=9,vhost=off");
        assert_eq!(parts.disk, Path::new("/state/images/io/disk"));
    }

    #[test]
    fn what_a_killed_run_has_left_is_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["bench-io-x", "other"] {
            std::fs::create_dir(at(name)).unwrap();
            std::fs::write(at(name).join("disk"), "").unwrap();
        }
        let [kernel, disk] = ["kernel", "disk"].map(PathBuf::from);
        let beside = folder.path().to_owned();
        Parts { root: None, kernel, disk, beside }.sweep().unwrap();
        assert!(!at("bench-io-x").exists() && at("other").join("disk").exists());
    }

    #[test]
    fn a_copy_of_a_disk_has_its_bytes_and_its_length() {
        let folder = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
        std::fs::write(&from, [[7; 4096], [0; 4096]].concat()).unwrap();
        File::options().write(true).open(&from).unwrap().set_len(1 << 20).unwrap();
        copy(&from, &to).unwrap();
        assert!(std::fs::read(&from).unwrap() == std::fs::read(&to).unwrap());
    }
}
