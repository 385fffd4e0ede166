//! What the server has given up before it reads the first message.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]

mod common;

use common::{As, USER, folder, start};
use rustix::mount::{MountPropagationFlags, mount_change};
use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::process::Child;

/// A field of /proc/PID/status of each thread.
fn field(server: &Child, name: &str) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{}/task", server.id())).unwrap();
    let of = |thread: fs::DirEntry| {
        let status = fs::read_to_string(thread.path().join("status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(&format!("{name}:")));
        line.unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
    };
    threads.map(|thread| of(thread.unwrap())).collect()
}

fn check(by: As, groups: &str, more: &[&str]) {
    let folder = folder();
    fs::write(folder.path().join("only"), "").unwrap();
    let (here, there) = UnixStream::pair().unwrap();
    let mut server = start(by, folder.path(), there.into(), more);
    let pid = server.id();
    for (name, expected) in [
        ("Uid", &*format!("{USER} {USER} {USER} {USER}")),
        ("Gid", &*format!("{USER} {USER} {USER} {USER}")),
        ("Groups", groups),
        ("CapEff", "0000000000000000"),
        ("CapPrm", "0000000000000000"),
        ("CapInh", "0000000000000000"),
        ("CapBnd", "0000000000000000"),
        ("CapAmb", "0000000000000000"),
        ("NoNewPrivs", "1"),
        ("Seccomp", "2"),
    ] {
        let found = field(&server, name);
        assert!(found.len() == 9 && found.iter().all(|value| value == expected), "{found:?}");
    }
    let names: Vec<_> = fs::read_dir(format!("/proc/{pid}/root")).unwrap().collect();
    assert_eq!(names.len(), 1, "{names:?}");
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    assert_eq!(mounts.lines().count(), 1, "{mounts}");
    let options: Vec<_> = mounts.split(' ').nth(5).unwrap().split(',').collect();
    assert!(options.contains(&"nosuid") && options.contains(&"nodev"), "{mounts}");
    assert_eq!(options.contains(&"ro"), more.contains(&"--read-only"), "{mounts}");
    for space in ["net", "ipc", "uts", "mnt"] {
        let of = |who: &str| fs::read_link(format!("/proc/{who}/ns/{space}")).unwrap();
        assert_ne!(of(&pid.to_string()), of("self"), "{space}");
    }
    // It ends with the stream.
    drop(here);
    assert!(server.wait().unwrap().success());
}

#[test]
fn started_by_root() {
    if dayfly_units::needs::root() {
        check(As::Root, "7 12345", &["--groups", "7,12345"]);
        check(As::Root, "", &["--read-only"]);
    }
}

#[test]
fn started_by_root_on_a_mount_that_is_shared_as_those_of_systemd() {
    if dayfly_units::needs::root() {
        common::own_mounts();
        mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::SHARED).unwrap();
        check(As::Root, "", &[]);
    }
}

#[test]
fn started_by_a_user() {
    if dayfly_units::needs::root() {
        check(As::User, "", &["--read-only"]);
    }
}

#[test]
fn a_path_is_opened_as_the_caller() {
    if !dayfly_units::needs::root() {
        return;
    }
    let outer = tempfile::tempdir().unwrap();
    fs::create_dir(outer.path().join("shared")).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    fs::set_permissions(outer.path(), mode).unwrap();
    let (_here, there) = UnixStream::pair().unwrap();
    let path = outer.path().join("shared");
    let started = std::panic::catch_unwind(|| start(As::Root, &path, there.into(), &[]));
    let why = *started.err().unwrap().downcast::<String>().unwrap();
    assert!(why.contains("as the caller: Permission denied"), "{why}");
}

/// As AppArmor's restriction on Ubuntu 23.10 and later, kernel.unprivileged_userns_clone=0 of
/// Debian, and user.max_user_namespaces=0.
#[test]
fn a_host_that_forbids_user_namespaces_or_rights_in_them_leaves_landlock() {
    if !dayfly_units::needs::root() {
        return;
    }
    for call in [
        &[(libc::SYS_unshare, libc::EPERM)],
        &[(libc::SYS_unshare, libc::EACCES)],
        &[(libc::SYS_unshare, libc::ENOSPC)],
        &[(libc::SYS_open_tree, libc::EPERM)],
        &[(libc::SYS_move_mount, libc::EACCES)],
    ] {
        let (here, there) = UnixStream::pair().unwrap();
        let folder = folder();
        let mut server = start(As::Without(call), folder.path(), there.into(), &[]);
        let spaces = |who: &str| fs::read_link(format!("/proc/{who}/ns/user")).unwrap();
        assert_eq!(spaces(&server.id().to_string()), spaces("self"), "{call:?}");
        drop(here);
        let mut line = String::new();
        server.stderr.take().unwrap().read_to_string(&mut line).unwrap();
        assert!(line.contains("jailed without a user namespace"), "{call:?}: {line}");
        assert!(server.wait().unwrap().success());
    }
}

#[test]
fn a_host_with_neither_user_namespaces_nor_landlock_is_refused_with_what_to_do() {
    if !dayfly_units::needs::root() {
        return;
    }
    let neither =
        &[(libc::SYS_unshare, libc::EPERM), (libc::SYS_landlock_create_ruleset, libc::EOPNOTSUPP)];
    let (_here, there) = UnixStream::pair().unwrap();
    let folder = folder();
    let start = || start(As::Without(neither), folder.path(), there.into(), &[]);
    let started = std::panic::catch_unwind(std::panic::AssertUnwindSafe(start));
    let why = *started.err().unwrap().downcast::<String>().unwrap();
    assert!(why.contains("Landlock") && why.contains("sysctl"), "{why}");
}
