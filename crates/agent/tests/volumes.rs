//! Volumes with the kernel's FUSE and the server of the host, in a mount namespace of this test.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Client, Guest, eventually, identity};
use dayfly_api::agent::{FailureCode, Reply, Request};
use dayfly_volume::{Options, serve};
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
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

/// Runs a script in the mounts of this thread. No thread of this process, which relays, uses a
/// volume: if the process were killed while one waits for an answer, that thread would keep the
/// device open and wait for ever.
fn sh(script: &str, arguments: &[&Path]) -> String {
    let output = Command::new("timeout")
        .args(["240", "sh", "-ec", script, "sh"])
        .args(arguments)
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&text).trim_end().to_owned()
}

#[test]
fn files_pass_in_both_directions_until_the_server_ends() {
    own_mounts();
    let guest = Guest::start();
    let (shared, outer) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let big: Vec<u8> = (0..5_000_000_u32).map(|n| n.to_le_bytes()[n as usize % 3]).collect();
    let host = shared.path().join("host");
    std::fs::write(&host, &big).unwrap();
    std::os::unix::fs::symlink("real", outer.path().join("link")).unwrap();
    std::fs::create_dir(outer.path().join("real")).unwrap();
    // A link is followed, and what is missing is made.
    let server = mounted(&guest, shared.path(), &outer.path().join("link/new"), false);
    let at = outer.path().join("real/new");
    let copied = sh("cmp \"$1/host\" \"$2\"; cp \"$2\" \"$1/guest\"; echo same", &[&at, &host]);
    assert_eq!(copied, "same");
    assert_eq!(std::fs::read(shared.path().join("guest")).unwrap(), big);
    let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let own = mounts.lines().find(|line| line.contains("/real/new ")).unwrap();
    assert!(own.contains("nosuid,nodev") && own.contains(" - fuse shared "), "{own}");

    // Many programs at once, each of which waits for its answers.
    let many = "for n in 1 2 3 4 5 6 7 8; do \
                (cp \"$2\" \"$1/of-$n\" && cmp \"$2\" \"$1/of-$n\" && echo same) & done; wait";
    assert_eq!(sh(many, &[&at, &host]), ["same"; 8].join("\n"));

    let readable = outer.path().join("ro");
    let second = mounted(&guest, shared.path(), &readable, true);
    let refused = sh("touch \"$1/x\" || cmp \"$1/guest\" \"$2\"", &[&readable, &host]);
    assert!(refused.ends_with("Read-only file system"), "{refused}");

    // The guest unmounts one: its server ends, the other goes on.
    assert_eq!(sh("umount \"$1\"", &[&readable]), "");
    second.join().unwrap();
    assert_eq!(sh("stat -c %s \"$1/guest\"", &[&at]), "5000000");

    // Another machine: programs keep the old files, which are dead, and new paths see none.
    let script = "exec 3<\"$1/host\"; echo open; read line; cat <&3 2>&1 || :";
    let mut program = Command::new("sh");
    program.args(["-c", script, "sh"]).arg(&at).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = program.spawn().unwrap();
    let mut out = BufReader::new(program.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "open\n");
    assert_eq!(guest.ask(&Request::Identity(identity("first", 'a'))), Reply::Ok);
    server.join().unwrap();
    assert_eq!(sh("ls \"$1\"", &[&at]), "", "the folder below is to be seen");
    drop(program.stdin.take());
    line.clear();
    out.read_to_string(&mut line).unwrap();
    assert!(line.contains("not connected"), "{line}");
    program.wait().unwrap();
    let third = mounted(&guest, shared.path(), &at, false);
    assert_eq!(sh("cmp \"$1/guest\" \"$2\"; echo same", &[&at, &host]), "same");
    // The same machine again, as after a snapshot: all goes on.
    assert_eq!(guest.ask(&Request::Seal), Reply::Ok);
    assert_eq!(guest.ask(&Request::Identity(identity("first", 'a'))), Reply::Ok);
    assert_eq!(sh("cmp \"$1/guest\" \"$2\"; echo same", &[&at, &host]), "same");
    assert_eq!(sh("umount -l \"$1\"", &[&at]), "");
    third.join().unwrap();
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
        let says = sh("ls \"$1\" || :", &[&at]);
        says.contains("not connected") || says.contains("connection abort")
    });
    // Something else over it is left alone.
    rustix::mount::mount("t", &at, "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
    std::fs::write(at.join("x"), "").unwrap();
    assert_eq!(guest.ask(&Request::Identity(identity("first", 'a'))), Reply::Ok);
    assert!(at.join("x").exists());
    assert_eq!(sh("umount \"$1\"; umount -l \"$1\"", &[&at]), "");
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
