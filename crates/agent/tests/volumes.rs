//! Volumes with the kernel's FUSE and the server of the host, in a mount namespace of this test.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Client, Guest, eventually, identity};
use dayfly_api::agent::{FailureCode, Reply, Request};
use dayfly_volume::{Options, serve};
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::fs::File;
use std::path::Path;
use std::thread::JoinHandle;

/// Gives this thread, and those that it starts, another mount namespace.
fn own_mounts() {
    // SAFETY: unshare(2) of the mount namespace affects only this thread and threads that it
    // starts.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.expect("these tests need CAP_SYS_ADMIN");
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
}

fn request(path: &Path, read_only: bool) -> Request {
    Request::Mount { path: path.to_str().unwrap().into(), name: "shared".into(), read_only }
}

/// Mounts `folder` at `path`, and serves it as the host does.
fn mounted(guest: &Guest, folder: &Path, path: &Path, read_only: bool) -> JoinHandle<()> {
    let mut client: Client = guest.connect();
    client.request(&request(path, read_only));
    assert_eq!(client.reply(), Reply::Ok);
    client.stream.set_read_timeout(None).unwrap();
    client.stream.set_write_timeout(None).unwrap();
    let (stream, folder) = (client.stream.into(), File::open(folder).unwrap().into());
    let options = Options { read_only, ..Options::own() };
    std::thread::spawn(move || serve(stream, folder, options).unwrap())
}

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

#[test]
fn files_pass_in_both_directions_until_the_server_ends() {
    own_mounts();
    let guest = Guest::start();
    let (shared, outer) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let big: Vec<u8> = (0..5_000_000_u32).map(|n| n.to_le_bytes()[n as usize % 3]).collect();
    std::fs::write(shared.path().join("host"), &big).unwrap();
    std::os::unix::fs::symlink("real", outer.path().join("link")).unwrap();
    std::fs::create_dir(outer.path().join("real")).unwrap();
    // A link is followed, and what is missing is made.
    let server = mounted(&guest, shared.path(), &outer.path().join("link/new"), false);
    let at = outer.path().join("real/new");
    assert_eq!(std::fs::read(at.join("host")).unwrap(), big);
    std::fs::write(at.join("guest"), &big).unwrap();
    assert_eq!(std::fs::read(shared.path().join("guest")).unwrap(), big);
    let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let own = mounts.lines().find(|line| line.contains("/real/new ")).unwrap();
    assert!(own.contains("nosuid,nodev") && own.contains(" - fuse shared "), "{own}");

    // Many threads at once, each of which waits for its answers.
    std::thread::scope(|scope| {
        for n in 0..8 {
            let (at, big) = (&at, &big);
            scope.spawn(move || {
                let path = at.join(format!("of-{n}"));
                std::fs::write(&path, big).unwrap();
                assert_eq!(std::fs::read(path).unwrap(), *big);
            });
        }
    });

    let readable = outer.path().join("ro");
    let second = mounted(&guest, shared.path(), &readable, true);
    assert_eq!(errno(std::fs::write(readable.join("x"), "")), libc::EROFS);
    assert_eq!(std::fs::read(readable.join("guest")).unwrap(), big);

    // The guest unmounts one: its server ends, the other goes on.
    rustix::mount::unmount(&readable, rustix::mount::UnmountFlags::empty()).unwrap();
    second.join().unwrap();
    assert_eq!(std::fs::metadata(at.join("guest")).unwrap().len(), 5_000_000);

    // Another machine: programs keep the old files, which are dead, and new paths see none.
    let open = File::open(at.join("host")).unwrap();
    assert_eq!(guest.ask(&Request::Identity(identity("first", 'a'))), Reply::Ok);
    server.join().unwrap();
    assert!(!at.join("guest").exists(), "the folder below is to be seen");
    assert_eq!(errno(std::fs::metadata(format!("/proc/self/fd/{}", fd(&open)))), libc::ENOTCONN);
    let third = mounted(&guest, shared.path(), &at, false);
    assert_eq!(std::fs::read(at.join("guest")).unwrap(), big);
    // The same machine again, as after a snapshot: all goes on.
    assert_eq!(guest.ask(&Request::Seal), Reply::Ok);
    assert_eq!(guest.ask(&Request::Identity(identity("first", 'a'))), Reply::Ok);
    assert_eq!(std::fs::read(at.join("guest")).unwrap(), big);
    rustix::mount::unmount(&at, rustix::mount::UnmountFlags::DETACH).unwrap();
    third.join().unwrap();
}

fn fd(file: &File) -> i32 {
    std::os::fd::AsRawFd::as_raw_fd(file)
}

#[test]
fn a_server_that_ends_leaves_a_mount_that_says_so() {
    own_mounts();
    let guest = Guest::start();
    let outer = tempfile::tempdir().unwrap();
    let at = outer.path().join("at");
    let mut client = guest.connect();
    client.request(&request(&at, false));
    assert_eq!(client.reply(), Reply::Ok);
    drop(client);
    eventually("the mount is dead", || {
        let got = std::fs::read_dir(&at).map(drop).map_err(|e| e.raw_os_error());
        matches!(got, Err(Some(libc::ENOTCONN | libc::ECONNABORTED)))
    });
    // Something else over it is left alone.
    rustix::mount::mount("t", &at, "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
    std::fs::write(at.join("x"), "").unwrap();
    assert_eq!(guest.ask(&Request::Identity(identity("first", 'a'))), Reply::Ok);
    assert!(at.join("x").exists());
    rustix::mount::unmount(&at, rustix::mount::UnmountFlags::DETACH).unwrap();
    rustix::mount::unmount(&at, rustix::mount::UnmountFlags::DETACH).unwrap();
    for (path, code) in [
        ("relative", FailureCode::Invalid),
        ("/", FailureCode::Invalid),
        ("/a/../b", FailureCode::Invalid),
        ("/proc/none/x", FailureCode::Io),
        ("/etc/passwd/x", FailureCode::Io),
        ("/etc/passwd", FailureCode::Io),
    ] {
        let reply = guest.ask(&request(Path::new(path), false));
        assert!(matches!(&reply, Reply::Err(f) if f.code == code), "{path}: {reply:?}");
    }
}
