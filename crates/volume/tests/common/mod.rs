//! A server, and a relay between it and a mount of this host's kernel.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]
#![allow(dead_code, reason = "each test program uses a part")]

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use tempfile::TempDir;

/// The caller on the host.
pub const USER: u32 = 12_345;
/// Descriptors of a confined server.
pub const FEW: u64 = 1024;
/// The number of the stream in the server.
const STREAM: i32 = 3;

/// How a server is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum As {
    /// By root, for [`USER`].
    Root,
    /// By [`USER`] itself.
    User,
    /// By [`USER`], with [`FEW`] descriptors, on a host that forbids user namespaces.
    Confined,
}

/// Starts the program, and waits until it serves.
pub fn start(by: As, folder: &Path, stream: OwnedFd, more: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dayfly-volume"));
    command.args(["--stream", &STREAM.to_string(), "--path"]).arg(folder).args(more);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    match by {
        As::Root => {
            command.args(["--uid", &USER.to_string(), "--gid", &USER.to_string()]);
        }
        As::User => {
            command.uid(USER).gid(USER);
        }
        As::Confined => confine(command.uid(USER).gid(USER)),
    }
    let from = stream.as_raw_fd();
    // SAFETY: dup2(2) is async-signal-safe, and both numbers are the child's.
    unsafe {
        command.pre_exec(move || match libc::dup2(from, STREAM) {
            STREAM => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        })
    };
    let mut child = command.spawn().unwrap();
    drop(stream);
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    if line != "ready\n" {
        let mut why = String::new();
        child.stderr.take().unwrap().read_to_string(&mut why).unwrap();
        panic!("the server has not started: {why} {:?}", child.wait());
    }
    child
}

/// Lets a program have few descriptors, and no namespaces.
fn confine(command: &mut Command) {
    let eperm = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    let rules = [(libc::SYS_unshare, Vec::new())].into();
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, eperm, arch).unwrap();
    let filter: BpfProgram = filter.try_into().unwrap();
    // SAFETY: only system calls; the filter is compiled already.
    unsafe {
        command.pre_exec(move || {
            let few = Rlimit { current: Some(FEW), maximum: Some(FEW) };
            setrlimit(Resource::Nofile, few)?;
            rustix::thread::set_no_new_privs(true)?;
            seccompiler::apply_filter(&filter).map_err(std::io::Error::other)
        })
    };
}

/// A folder of [`USER`] on the host.
pub fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(folder.path(), Some(USER), Some(USER)).unwrap();
    folder
}

/// Gives this thread its own mounts.
pub fn own_mounts() {
    // SAFETY: CLONE_FILES is not among the flags.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }.unwrap();
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE).unwrap();
}

/// Waits until `done` returns true, at most two minutes, which end only a hang.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..6000 {
        if done() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    panic!("not within two minutes: {what}");
}

/// A folder, its server, and where it is mounted.
pub struct Mounted {
    /// The folder on the host.
    pub host: TempDir,
    /// The mount.
    pub guest: PathBuf,
    /// The server.
    pub server: Child,
    _point: TempDir,
}

impl Mounted {
    /// Mounts a new folder in a mount namespace of this thread.
    pub fn new(by: As, more: &[&str]) -> Self {
        Self::of(folder(), by, more)
    }

    /// Mounts a folder.
    pub fn of(host: TempDir, by: As, more: &[&str]) -> Self {
        let (here, there) = UnixStream::pair().unwrap();
        let server = start(by, host.path(), there.into(), more);
        own_mounts();
        let point = tempfile::tempdir().unwrap();
        let device = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
            device.as_raw_fd()
        );
        let options = std::ffi::CString::new(options).unwrap();
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("dayfly", point.path(), "fuse", flags, Some(options.as_c_str())).unwrap();
        relay(device, here);
        Self { host, guest: point.path().to_owned(), server, _point: point }
    }

    /// A path in the guest.
    pub fn at(&self, name: &str) -> PathBuf {
        self.guest.join(name)
    }

    /// The same path on the host.
    pub fn on_host(&self, name: &str) -> PathBuf {
        self.host.path().join(name)
    }

    /// Runs a shell script in the mount, and returns what it prints.
    pub fn sh(&self, script: &str) -> String {
        let mut command = Command::new("/bin/sh");
        command.args(["-ec", script]).current_dir(&self.guest).env("HOME", &self.guest);
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "{script}: {:?}\n{}\n{}",
            output.status,
            text(&output.stdout),
            text(&output.stderr)
        );
        text(&output.stdout)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.guest, rustix::mount::UnmountFlags::DETACH);
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// Copies whole messages in both directions, as a guest's agent does. Two threads, because a server
/// whose answers are not read does not read either.
fn relay(device: File, stream: UnixStream) {
    let device = Arc::new(device);
    let (to, from) = (stream.try_clone().unwrap(), stream);
    let reader = device.clone();
    std::thread::spawn(move || requests(&reader, &to));
    std::thread::spawn(move || answers(&device, from));
}

fn requests(device: &File, mut to: &UnixStream) {
    let mut buffer = vec![0; (1 << 20) + 4096];
    loop {
        // A thread that waits in read(2) would keep the device open when the stream has ended.
        let mut wait = [PollFd::new(device, PollFlags::IN), PollFd::new(to, PollFlags::RDHUP)];
        let _ = poll(&mut wait, None);
        if !wait[1].revents().is_empty() {
            return;
        }
        match (&*device).read(&mut buffer) {
            Ok(count) => {
                if to.write_all(&buffer[..count]).is_err() {
                    return;
                }
            }
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => {
                let _ = to.shutdown(std::net::Shutdown::Both);
                return;
            }
            Err(_) => {}
        }
    }
}

fn answers(device: &Arc<File>, mut from: UnixStream) {
    // Writing a notification may wait for locks that are held until another answer comes.
    let (notify, notifications) = std::sync::mpsc::sync_channel::<Vec<u8>>(64);
    let notified = device.clone();
    std::thread::spawn(move || {
        for message in notifications {
            let _ = (&*notified).write(&message);
        }
    });
    let mut len = [0; 4];
    while from.read_exact(&mut len).is_ok() {
        let mut message = vec![0; u32::from_ne_bytes(len) as usize];
        message[..4].copy_from_slice(&len);
        if from.read_exact(&mut message[4..]).is_err() {
            return;
        }
        if message[8..16] == [0; 8] {
            let _ = notify.try_send(message);
        } else {
            let _ = (&**device).write(&message);
        }
    }
}
