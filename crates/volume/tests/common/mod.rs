//! A server, and a relay between it and a mount of this host's kernel.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]
#![allow(dead_code, reason = "each test program uses a part")]

use dayfly_volume::{Options, serve};
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
    /// By [`USER`], on a host where these system calls fail with these errors.
    Without(&'static [(i64, i32)]),
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
        As::Confined => {
            few_descriptors(command.uid(USER).gid(USER));
            confine(&mut command, &[(libc::SYS_unshare, libc::EPERM)]);
        }
        As::Without(calls) => confine(command.uid(USER).gid(USER), calls),
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

/// Lets a program have few descriptors.
fn few_descriptors(command: &mut Command) {
    // SAFETY: one system call.
    unsafe {
        command.pre_exec(|| {
            let few = Rlimit { current: Some(FEW), maximum: Some(FEW) };
            Ok(setrlimit(Resource::Nofile, few)?)
        })
    };
}

/// Lets system calls of a program fail.
fn confine(command: &mut Command, calls: &[(i64, i32)]) {
    let filter = |&(call, errno): &(i64, i32)| {
        let fails = SeccompAction::Errno(errno.cast_unsigned());
        let rules = [(call, Vec::new())].into();
        let arch = std::env::consts::ARCH.try_into().unwrap();
        SeccompFilter::new(rules, SeccompAction::Allow, fails, arch).unwrap().try_into().unwrap()
    };
    let filters: Vec<BpfProgram> = calls.iter().map(filter).collect();
    // SAFETY: only system calls; the filters are compiled already.
    unsafe {
        command.pre_exec(move || {
            rustix::thread::set_no_new_privs(true)?;
            filters
                .iter()
                .try_for_each(|f| seccompiler::apply_filter(f))
                .map_err(std::io::Error::other)
        })
    };
}

/// A folder of [`USER`] on the host.
pub fn folder() -> TempDir {
    owned(tempfile::tempdir().unwrap())
}

/// As [`folder`], in memory: making many files on a disk takes minutes.
pub fn folder_in_memory() -> TempDir {
    owned(tempfile::tempdir_in("/dev/shm").unwrap())
}

fn owned(folder: TempDir) -> TempDir {
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
    /// The server, if it is another process.
    pub server: Option<Child>,
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
        Self::served(host, here, Some(server))
    }

    /// Mounts a folder that a thread of this process serves.
    pub fn with(host: TempDir, options: Options) -> Self {
        let (here, there) = UnixStream::pair().unwrap();
        let folder: OwnedFd = File::open(host.path()).unwrap().into();
        std::thread::spawn(move || serve(there.into(), folder, options));
        Self::served(host, here, None)
    }

    fn served(host: TempDir, here: UnixStream, server: Option<Child>) -> Self {
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
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
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

fn answers(device: &File, mut from: UnixStream) {
    let mut len = [0; 4];
    while from.read_exact(&mut len).is_ok() {
        let mut message = vec![0; u32::from_ne_bytes(len) as usize];
        message[..4].copy_from_slice(&len);
        if from.read_exact(&mut message[4..]).is_err() {
            return;
        }
        let _ = (&*device).write(&message);
    }
}
