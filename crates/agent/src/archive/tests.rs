//! Round trips of trees, and streams that try to escape the folder.

use super::*;
use dayfly_api::agent::FailureCode;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::time::Duration;
use tar::{Builder, EntryType, Header};

mod extensions;
mod properties;

fn packed(path: &Path) -> Vec<u8> {
    let mut out = Vec::new();
    pack(path.to_str().unwrap(), &mut out).unwrap();
    out
}

fn root() -> bool {
    dayfly_units::needs::root()
}

/// One line for each entry below `root`, with everything that an archive keeps.
fn describe(root: &Path) -> Vec<String> {
    describe_with(root, |meta| meta.mtime())
}

/// [`describe`] with another time for each entry.
fn describe_with(root: &Path, time: fn(&fs::Metadata) -> i64) -> Vec<String> {
    let mut lines = Vec::new();
    let mut todo = vec![root.to_owned()];
    while let Some(path) = todo.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        let what = if meta.is_symlink() {
            format!("link to {:?}", fs::read_link(&path).unwrap())
        } else if meta.is_file() {
            format!("{:?}", fs::read(&path).unwrap().len())
        } else {
            if meta.is_dir() {
                todo.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
            }
            String::new()
        };
        let name = path.strip_prefix(root).unwrap().display().to_string();
        lines.push(format!(
            "{name} {:o} {} {} {} {:x} {what}",
            meta.mode(),
            meta.uid(),
            meta.gid(),
            time(&meta),
            meta.rdev()
        ));
    }
    lines.sort();
    lines
}

#[test]
fn a_tree_comes_back_as_it_went() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let tree = from.path().join("tree");
    let deep = tree.join("a").join("x".repeat(120)).join("y".repeat(120));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("long"), vec![7; 100_001]).unwrap();
    fs::write(tree.join("empty"), b"").unwrap();
    fs::write(tree.join("run"), b"#!/bin/sh\n").unwrap();
    symlink("../nowhere", tree.join("dangling")).unwrap();
    symlink(format!("/{}", "z".repeat(200)), tree.join("longlink")).unwrap();
    fs::create_dir(tree.join("closed")).unwrap();
    fs::write(tree.join("closed/in"), b"x").unwrap();
    if root() {
        std::os::unix::fs::chown(tree.join("empty"), Some(1234), Some(4321)).unwrap();
        std::os::unix::fs::lchown(tree.join("dangling"), Some(12), Some(21)).unwrap();
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::from_raw_mode(0o644));
        rustix::fs::mknodat(rustix::fs::CWD, tree.join("fifo"), kind, mode, 0).unwrap();
        let kind = rustix::fs::FileType::CharacterDevice;
        // A container may forbid device nodes.
        let _ = rustix::fs::mknodat(
            rustix::fs::CWD,
            tree.join("null"),
            kind,
            mode,
            rustix::fs::makedev(1, 3),
        );
    }
    fs::set_permissions(tree.join("run"), fs::Permissions::from_mode(0o4755)).unwrap();
    fs::set_permissions(tree.join("closed"), fs::Permissions::from_mode(0o1500)).unwrap();
    let time = fs::FileTimes::new()
        .set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000));
    for name in ["empty", "closed", "a"] {
        fs::File::open(tree.join(name)).unwrap().set_times(time).unwrap();
    }
    let archive = packed(&tree);
    unpack(to.path(), &mut archive.as_slice()).unwrap();
    assert_eq!(describe(&to.path().join("tree")), describe(&tree));
    assert_eq!(
        fs::read(to.path().join("tree/a").join("x".repeat(120)).join("y".repeat(120)).join("long"))
            .unwrap(),
        vec![7; 100_001]
    );
    // Unpacked again, the archive replaces the existing entries.
    unpack(to.path(), &mut archive.as_slice()).unwrap();
    assert_eq!(describe(&to.path().join("tree")), describe(&tree));
    // GNU tar reads it too.
    let file = to.path().join("x.tar");
    fs::write(&file, &archive).unwrap();
    let listed = std::process::Command::new("tar").arg("-tf").arg(&file).output().unwrap();
    assert!(
        listed.status.success()
            && String::from_utf8_lossy(&listed.stdout).contains("tree/closed/in\n")
    );
}

#[test]
fn names_start_with_the_last_component() {
    let from = tempfile::tempdir().unwrap();
    fs::write(from.path().join("file"), b"x").unwrap();
    let names = |path: &str| {
        let mut out = Vec::new();
        pack(path, &mut out).unwrap();
        let mut archive = tar::Archive::new(out.as_slice());
        archive
            .entries()
            .unwrap()
            .map(|e| e.unwrap().path().unwrap().display().to_string())
            .collect::<Vec<_>>()
    };
    let base = from.path().file_name().unwrap().to_str().unwrap();
    let at = from.path().to_str().unwrap();
    assert_eq!(names(&format!("{at}/file")), ["file"]);
    assert_eq!(names(at), [format!("{base}/"), format!("{base}/file")]);
    assert_eq!(names(&format!("{at}/")), [format!("{base}/"), format!("{base}/file")]);
    fs::create_dir(from.path().join("sub")).unwrap();
    assert_eq!(names(&format!("{at}/sub/..")).last().unwrap(), &format!("{base}/sub/"));
    assert_eq!(names(&format!("{at}/sub/.")), ["sub/"]);
}

#[test]
fn what_cannot_be_read_says_so() {
    let mut out = Vec::new();
    assert!(matches!(pack("relative", &mut out), Err(PackError::Path(_))));
    assert!(matches!(pack("/no\0", &mut out), Err(PackError::Path(_))));
    let error = pack("/no/such/file", &mut out).unwrap_err();
    assert_eq!(Failure::from(&error).code, FailureCode::NotFound);
    assert!(out.is_empty());
}

/// Name, kind, link target, content.
type Entry<'a> = (&'a str, EntryType, &'a str, &'a [u8]);

/// A tar stream of raw entries.
fn stream(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (name, kind, link, content) in entries {
        let mut header = Header::new_gnu();
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_gnu_mut().unwrap().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(*kind);
        header.set_mode(0o755);
        header.set_uid(u64::from(rustix::process::getuid().as_raw()));
        header.set_gid(u64::from(rustix::process::getgid().as_raw()));
        header.set_mtime(0);
        header.set_size(content.len() as u64);
        header.set_cksum();
        builder.append(&header, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

const FILE: EntryType = EntryType::Regular;
const LINK: EntryType = EntryType::Symlink;
const HARD: EntryType = EntryType::Link;
const DIR: EntryType = EntryType::Directory;

/// Number of hidden names in a folder.
fn hidden(folder: &Path) -> usize {
    let names = fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name());
    names.filter(|name| name.as_encoded_bytes().starts_with(b".")).count()
}

struct Sandbox {
    _all: tempfile::TempDir,
    target: std::path::PathBuf,
    outside: std::path::PathBuf,
}

fn sandbox() -> Sandbox {
    let all = tempfile::tempdir().unwrap();
    let (target, outside) = (all.path().join("target"), all.path().join("outside"));
    fs::create_dir(&target).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), b"untouched").unwrap();
    symlink(&outside, target.join("abs")).unwrap();
    symlink("../outside", target.join("rel")).unwrap();
    fs::create_dir(target.join("real")).unwrap();
    symlink("real", target.join("inner")).unwrap();
    Sandbox { _all: all, target, outside }
}

#[test]
fn nothing_gets_out() {
    let hostile: Vec<Vec<Entry<'_>>> = vec![
        vec![("../outside/secret", FILE, "", b"evil")],
        vec![("a/../../outside/secret", FILE, "", b"evil")],
        vec![("..", DIR, "", b"")],
        vec![("abs/secret", FILE, "", b"evil")],
        vec![("rel/secret", FILE, "", b"evil")],
        vec![("rel/new/er", FILE, "", b"evil")],
        vec![("rel/dir", DIR, "", b"")],
        vec![("rel", DIR, "", b"")],
        vec![("x", LINK, "../outside", b""), ("x/secret", FILE, "", b"evil")],
        vec![("x", LINK, "/", b""), ("x/tmp/dayfly-evil", FILE, "", b"evil")],
        vec![
            ("a", LINK, ".", b""),
            ("a/b", LINK, "..", b""),
            ("a/b/outside/secret", FILE, "", b"evil"),
        ],
        vec![("h", HARD, "../outside/secret", b""), ("h", FILE, "", b"evil")],
        vec![("h", HARD, "/etc/passwd", b"")],
        vec![("h", HARD, "rel/secret", b"")],
        vec![("h", HARD, "abs/secret", b"")],
        vec![("h", HARD, "real", b"")],
        vec![("p", LINK, "/proc/self/root", b""), ("p/tmp/dayfly-evil", FILE, "", b"evil")],
        vec![("x", LINK, "../outside", b""), ("x", HARD, "rel/secret", b"")],
        vec![("rel/fifo", EntryType::Fifo, "", b"")],
        vec![("rel/l", LINK, "x", b"")],
        vec![("new", FILE, "", b"x"), ("..", DIR, "", b"")],
        vec![("n", LINK, "", b"")],
    ];
    for entries in hostile {
        let sandbox = sandbox();
        let all = sandbox._all.path();
        // Folders get new times, because a refused archive is staged in the target and removed.
        let describe =
            |root: &Path| describe_with(root, |meta| if meta.is_dir() { 0 } else { meta.mtime() });
        let before = describe(all);
        let outside = self::describe(&sandbox.outside);
        let error = unpack(&sandbox.target, &mut stream(&entries).as_slice())
            .expect_err(&format!("{entries:?}"));
        assert!(!error.to_string().is_empty());
        // Nothing is written outside, nor in the target by entries before the hostile one.
        assert_eq!(describe(all), before, "{entries:?}");
        assert_eq!(self::describe(&sandbox.outside), outside, "{entries:?}");
        assert!(!Path::new("/etc/dayfly-evil").exists() && !Path::new("/tmp/dayfly-evil").exists());
    }
}

#[test]
fn a_link_is_replaced_and_a_link_within_is_followed() {
    let sandbox = sandbox();
    let entries: [Entry<'_>; 7] = [
        ("rel", FILE, "", b"a file now"),
        // A leading '/' is ignored.
        ("/etc/dayfly-evil", FILE, "", b"inside"),
        // A link from the archive is followed inside the target too.
        ("inner2", LINK, "real", b""),
        ("inner/file", FILE, "", b"through"),
        ("./new/folders/./file", FILE, "", b"deep"),
        ("hard", HARD, "inner/file", b""),
        ("hard", HARD, "inner/file", b""),
    ];
    unpack(&sandbox.target, &mut stream(&entries).as_slice()).unwrap();
    assert_eq!(fs::read(sandbox.target.join("rel")).unwrap(), b"a file now");
    assert_eq!(fs::read(sandbox.target.join("etc/dayfly-evil")).unwrap(), b"inside");
    assert!(!Path::new("/etc/dayfly-evil").exists());
    unpack(&sandbox.target, &mut stream(&[("inner2/new", FILE, "", b"2")]).as_slice()).unwrap();
    assert_eq!(fs::read(sandbox.target.join("real/new")).unwrap(), b"2");
    assert!(!fs::symlink_metadata(sandbox.target.join("rel")).unwrap().is_symlink());
    assert_eq!(fs::read(sandbox.target.join("real/file")).unwrap(), b"through");
    assert_eq!(fs::read(sandbox.target.join("new/folders/file")).unwrap(), b"deep");
    assert_eq!(fs::metadata(sandbox.target.join("hard")).unwrap().nlink(), 2);
    assert_eq!(fs::read(sandbox.outside.join("secret")).unwrap(), b"untouched");
    assert_eq!(hidden(&sandbox.target), 0);
}

#[test]
fn a_full_disk_is_reported_as_such_and_leaves_nothing() {
    if !root() {
        eprintln!("left out: only root can mount a small disk");
        return;
    }
    let at = tempfile::tempdir().unwrap();
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", at.path(), "tmpfs", flags, c"size=65536").unwrap();
    let result = unpack(
        at.path(),
        &mut stream(&[("small", FILE, "", b"x"), ("big", FILE, "", &[1; 200_000])]).as_slice(),
    );
    let names: Vec<_> = fs::read_dir(at.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    rustix::mount::unmount(at.path(), rustix::mount::UnmountFlags::empty()).unwrap();
    let failure = Failure::from(&result.unwrap_err());
    assert_eq!(failure.code, FailureCode::NoSpace, "{failure:?}");
    assert!(failure.message.contains("\"big\""), "{failure:?}");
    assert!(names.is_empty(), "{names:?}");
}

#[test]
fn every_truncation_is_an_error_or_a_whole_prefix() {
    let whole =
        stream(&[("a", FILE, "", &[1; 700]), ("d", DIR, "", b""), ("d/b", FILE, "", &[2; 600])]);
    let all = tempfile::tempdir().unwrap();
    for len in 0..whole.len() - 1024 {
        let target = all.path().join(len.to_string());
        fs::create_dir(&target).unwrap();
        let result = unpack(&target, &mut &whole[..len]);
        let file = |name: &str| fs::read(target.join(name)).ok();
        assert!(matches!(file("a").as_deref(), None | Some([1, ..])), "{len}");
        assert!(
            file("a").is_none_or(|b| b.len() == 700) && file("d/b").is_none_or(|b| b.len() == 600),
            "{len}"
        );
        // Only padding after the last entry's data may be missing (umoci omits it).
        let whole = matches!(len, 0 | 1212..=1536 | 2048 | 3160..=3584);
        assert_eq!(result.is_ok(), whole, "{len}: {result:?}");
        assert!(whole || fs::read_dir(&target).unwrap().next().is_none(), "{len}");
    }
}

#[test]
fn hard_links_holes_and_attributes_travel() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let tree = from.path().join("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("n0"), vec![1; 1_000_000]).unwrap();
    for n in 1..10 {
        fs::hard_link(tree.join("n0"), tree.join(format!("n{n}"))).unwrap();
    }
    let sparse = fs::File::create(tree.join("sparse")).unwrap();
    sparse.set_len(64 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"there", 5 << 20).unwrap();
    // CAP_NET_RAW, permitted and effective, in version 2 of the kernel's format.
    let capability = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    if root() {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(tree.join("n0"), "security.capability", capability, flags).unwrap();
    }
    let archive = packed(&tree);
    assert!(archive.len() < 1_100_000, "{} bytes", archive.len());
    unpack(to.path(), &mut archive.as_slice()).unwrap();
    let at = to.path().join("tree");
    let inode = fs::metadata(at.join("n0")).unwrap().ino();
    assert!((1..10).all(|n| fs::metadata(at.join(format!("n{n}"))).unwrap().ino() == inode));
    let stat = fs::metadata(at.join("sparse")).unwrap();
    assert!(stat.len() == 64 << 20 && stat.blocks() < 1024, "{} blocks", stat.blocks());
    assert_eq!(fs::read(at.join("sparse")).unwrap()[(5 << 20) - 1..][..7], *b"\0there\0");
    if root() {
        let mut value = [0; 64];
        let n = rustix::fs::getxattr(at.join("n3"), "security.capability", &mut value[..]).unwrap();
        assert_eq!(value[..n], capability[..]);
    }
}

#[test]
fn a_silent_client_is_waited_for() {
    use crate::wire::{Buffers, wait};
    use std::os::fd::AsFd;
    let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut conn = Conn::new(std::sync::Arc::new(ours.into()), Buffers::default());
    let time_limit = Duration::ZERO;
    let flags = rustix::event::PollFlags::IN;
    assert!(matches!(wait(conn.as_fd(), flags, time_limit), Err(WireError::Slow(_))));
    let (reading, begun) = std::sync::mpsc::channel();
    let client = std::thread::spawn(move || {
        begun.recv().unwrap();
        theirs.write_all(&dayfly_api::agent::encode(FrameKind::Data, b"late")).unwrap();
        theirs.write_all(&dayfly_api::agent::encode(FrameKind::End, &[])).unwrap();
    });
    let mut reader = DataReader { conn: &mut conn, used: 0, ended: false, lost: None, time_limit };
    reading.send(()).unwrap();
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).unwrap();
    client.join().unwrap();
    assert_eq!(bytes, b"late");
}

#[test]
fn a_folder_that_is_there_takes_the_attributes_that_came() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (tree, there) = (from.path().join("tree"), to.path().join("tree"));
    fs::create_dir(&tree).unwrap();
    fs::create_dir(&there).unwrap();
    fs::write(there.join("kept"), "kept").unwrap();
    fs::set_permissions(&tree, fs::Permissions::from_mode(0o2710)).unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(&tree, "user.note", b"n", flags).unwrap();
    unpack(to.path(), &mut packed(&tree).as_slice()).unwrap();
    assert_eq!(fs::metadata(&there).unwrap().mode() & 0o7777, 0o2710);
    assert_eq!(fs::metadata(&there).unwrap().mtime(), fs::metadata(&tree).unwrap().mtime());
    let mut value = [0; 8];
    assert_eq!(rustix::fs::getxattr(&there, "user.note", &mut value[..]).unwrap(), 1);
    assert_eq!(fs::read(there.join("kept")).unwrap(), b"kept");
}

#[test]
fn files_without_a_length_are_read_to_their_end() {
    let to = tempfile::tempdir().unwrap();
    // stat reports 0 bytes for files in /proc, and a page for files in /sys.
    for (path, name) in
        [("/proc/version", "version"), ("/sys/kernel/mm/transparent_hugepage/enabled", "enabled")]
    {
        let Ok(text) = fs::read(path) else { panic!("{path} is missing on this host") };
        unpack(to.path(), &mut packed(Path::new(path)).as_slice()).unwrap();
        assert_eq!(fs::read(to.path().join(name)).unwrap(), text);
    }
}

#[test]
fn a_path_that_ends_in_a_slash_leads_through_a_link() {
    let from = tempfile::tempdir().unwrap();
    fs::create_dir(from.path().join("real")).unwrap();
    fs::write(from.path().join("real/x"), b"x").unwrap();
    symlink("real", from.path().join("link")).unwrap();
    let names = |suffix: &str| {
        let mut out = Vec::new();
        pack(&format!("{}/link{suffix}", from.path().display()), &mut out).unwrap();
        let mut archive = tar::Archive::new(out.as_slice());
        let entries = archive.entries().unwrap().map(|e| e.unwrap());
        entries
            .map(|e| (e.header().entry_type(), e.path().unwrap().display().to_string()))
            .collect::<Vec<_>>()
    };
    assert_eq!(names(""), [(LINK, "link".to_owned())]);
    for suffix in ["/", "/."] {
        assert_eq!(names(suffix), [(DIR, "link/".to_owned()), (FILE, "link/x".to_owned())]);
    }
}

#[test]
fn the_target_may_reach_into_other_file_systems() {
    if !root() {
        eprintln!("left out: only root can mount");
        return;
    }
    let at = tempfile::tempdir().unwrap();
    fs::create_dir(at.path().join("tmp")).unwrap();
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", at.path().join("tmp"), "tmpfs", flags, c"size=1048576").unwrap();
    let entries: [Entry<'_>; 4] = [
        ("tmp/a", FILE, "", b"one"),
        ("tmp/new/b", FILE, "", b"two"),
        ("tmp/l", LINK, "a", b""),
        ("c", FILE, "", b"three"),
    ];
    let result = unpack(at.path(), &mut stream(&entries).as_slice());
    let read = |name: &str| fs::read(at.path().join(name)).ok();
    let files = [read("tmp/a"), read("tmp/new/b"), read("tmp/l"), read("c")];
    let hidden = hidden(at.path()) + hidden(&at.path().join("tmp"));
    rustix::mount::unmount(at.path().join("tmp"), rustix::mount::UnmountFlags::empty()).unwrap();
    result.unwrap();
    assert_eq!(
        files.map(|f| f.map(|f| String::from_utf8(f).unwrap())).map(Option::unwrap),
        ["one", "two", "one", "three"]
    );
    assert_eq!(hidden, 0);
}
