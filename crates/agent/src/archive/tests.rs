//! Trees that come back as they went, and streams that want out.

use super::*;
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use tar::{Builder, EntryType, Header};

fn packed(path: &Path) -> Vec<u8> {
    let mut out = Vec::new();
    pack(path.to_str().unwrap(), &mut out).unwrap();
    out
}

fn root() -> bool {
    rustix::process::geteuid().is_root()
}

/// One line for each thing below `root`: all that an archive keeps.
fn describe(root: &Path) -> Vec<String> {
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
            meta.mtime(),
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
        let _ =
            rustix::fs::mknodat(rustix::fs::CWD, tree.join("null"), kind, mode, rustix::fs::makedev(1, 3));
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
        fs::read(to.path().join("tree/a").join("x".repeat(120)).join("y".repeat(120)).join("long")).unwrap(),
        vec![7; 100_001]
    );
    // Over itself: what is there is replaced.
    unpack(to.path(), &mut archive.as_slice()).unwrap();
    assert_eq!(describe(&to.path().join("tree")), describe(&tree));
    // GNU tar reads it too.
    let file = to.path().join("x.tar");
    fs::write(&file, &archive).unwrap();
    let listed = std::process::Command::new("tar").arg("-tf").arg(&file).output().unwrap();
    assert!(listed.status.success() && String::from_utf8_lossy(&listed.stdout).contains("tree/closed/in\n"));
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
        vec![("/etc/dayfly-evil", FILE, "", b"evil")],
        vec![("a/../../outside/secret", FILE, "", b"evil")],
        vec![("..", DIR, "", b"")],
        vec![("abs/secret", FILE, "", b"evil")],
        vec![("rel/secret", FILE, "", b"evil")],
        vec![("rel/new/er", FILE, "", b"evil")],
        vec![("rel/dir", DIR, "", b"")],
        vec![("rel", DIR, "", b"")],
        vec![("x", LINK, "../outside", b""), ("x/secret", FILE, "", b"evil")],
        vec![("x", LINK, "/", b""), ("x/tmp/dayfly-evil", FILE, "", b"evil")],
        vec![("a", LINK, ".", b""), ("a/b", LINK, "..", b""), ("a/b/outside/secret", FILE, "", b"evil")],
        vec![("h", HARD, "../outside/secret", b""), ("h", FILE, "", b"evil")],
        vec![("h", HARD, "/etc/passwd", b"")],
        vec![("h", HARD, "rel/secret", b"")],
        vec![("h", HARD, "abs/secret", b"")],
        vec![("h", HARD, "real", b"")],
        vec![("p", LINK, "/proc/self/root", b""), ("p/tmp/dayfly-evil", FILE, "", b"evil")],
        vec![("x", LINK, "../outside", b""), ("x", HARD, "rel/secret", b"")],
        vec![("rel/fifo", EntryType::Fifo, "", b"")],
        vec![("rel/l", LINK, "x", b"")],
        vec![("s", EntryType::GNUSparse, "", b"")],
        vec![("n", LINK, "", b"")],
    ];
    for entries in hostile {
        let sandbox = sandbox();
        let before = describe(&sandbox.outside);
        let error =
            unpack(&sandbox.target, &mut stream(&entries).as_slice()).expect_err(&format!("{entries:?}"));
        assert!(!error.to_string().is_empty());
        assert_eq!(describe(&sandbox.outside), before, "{entries:?}");
        assert!(!Path::new("/etc/dayfly-evil").exists() && !Path::new("/tmp/dayfly-evil").exists());
    }
}

#[test]
fn a_link_is_replaced_and_a_link_within_is_followed() {
    let sandbox = sandbox();
    let entries: [Entry<'_>; 5] = [
        ("rel", FILE, "", b"a file now"),
        ("inner/file", FILE, "", b"through"),
        ("./new/folders/./file", FILE, "", b"deep"),
        ("hard", HARD, "inner/file", b""),
        ("hard", HARD, "inner/file", b""),
    ];
    unpack(&sandbox.target, &mut stream(&entries).as_slice()).unwrap();
    assert_eq!(fs::read(sandbox.target.join("rel")).unwrap(), b"a file now");
    assert!(!fs::symlink_metadata(sandbox.target.join("rel")).unwrap().is_symlink());
    assert_eq!(fs::read(sandbox.target.join("real/file")).unwrap(), b"through");
    assert_eq!(fs::read(sandbox.target.join("new/folders/file")).unwrap(), b"deep");
    assert_eq!(fs::metadata(sandbox.target.join("hard")).unwrap().nlink(), 2);
    assert_eq!(fs::read(sandbox.outside.join("secret")).unwrap(), b"untouched");
    assert!(!sandbox.target.join(".dayfly-unpack").exists());
}

/// Letters without end; how many were read.
struct Counted(usize);

impl Read for Counted {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        into.fill(b'a');
        self.0 += into.len();
        Ok(into.len())
    }
}

#[test]
fn an_extension_header_takes_no_more_memory_than_its_cap() {
    for kind in [EntryType::GNULongName, EntryType::GNULongLink, EntryType::XHeader, EntryType::XGlobalHeader]
    {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(1 << 40);
        header.set_cksum();
        let mut taken = Counted(0);
        let mut endless = (&header.as_bytes()[..]).chain(&mut taken);
        let error = unpack(sandbox().target.as_path(), &mut endless).unwrap_err().to_string();
        assert!(taken.0 < 3 << 20, "{} bytes of it were read", taken.0);
        assert!(error.contains("expected at most 1048576 bytes"), "{error}");
    }
}

#[test]
fn pax_records_count_and_a_lying_size_is_refused() {
    let pax = |records: &[(&str, &[u8])]| {
        let mut builder = Builder::new(Vec::new());
        builder.append_pax_extensions(records.iter().copied()).unwrap();
        let mut bytes = builder.into_inner().unwrap();
        bytes.truncate(bytes.len() - 1024);
        bytes.extend(stream(&[("short", FILE, "", b"four")]));
        bytes
    };
    let sandbox = sandbox();
    let long = "p".repeat(150);
    let good = pax(&[("path", long.as_bytes()), ("mtime", b"1234567890.25"), ("size", b"4")]);
    unpack(&sandbox.target, &mut good.as_slice()).unwrap();
    let meta = fs::metadata(sandbox.target.join(&long)).unwrap();
    assert_eq!((meta.mtime(), meta.mtime_nsec()), (1_234_567_890, 250_000_000));
    for bad in [("path", b"../x".as_slice()), ("path", b"/x"), ("path", b"a\0b"), ("size", b"512")] {
        assert!(unpack(&sandbox.target, &mut pax(&[bad]).as_slice()).is_err(), "{bad:?}");
    }
}

#[test]
fn a_full_disk_is_told_apart_and_leaves_no_half_file() {
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
    assert_eq!(names, ["small"]);
}

#[test]
fn every_truncation_is_an_error_or_a_whole_prefix() {
    let whole = stream(&[("a", FILE, "", &[1; 700]), ("d", DIR, "", b""), ("d/b", FILE, "", &[2; 600])]);
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
        if len % 512 != 0 {
            assert!(result.is_err(), "{len}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// Any entries, with names made of pieces that are likely to hurt.
    #[test]
    fn any_stream_stays_within(entries in proptest::collection::vec((
        proptest::collection::vec(prop_oneof!["a", "b", "\\.\\.", "\\.", "abs", "rel", "inner", "real", ""], 1..5),
        prop_oneof![Just(FILE), Just(LINK), Just(HARD), Just(DIR)],
        proptest::collection::vec(prop_oneof!["a", "b", "\\.\\.", "\\.", "", "outside", "secret", "real"], 1..5),
    ), 1..8)) {
        let sandbox = sandbox();
        let before = describe(&sandbox.outside);
        let owned: Vec<_> = entries.iter().map(|(name, kind, link)| (name.join("/"), *kind, link.join("/"))).collect();
        let refs: Vec<_> = owned.iter().map(|(n, k, l)| (n.as_str(), *k, l.as_str(), b"evil".as_slice())).collect();
        let refs: Vec<_> = refs.into_iter().map(|(n, k, l, c)| if k == FILE { (n, k, "", c) } else { (n, k, l, &c[..0]) }).collect();
        let _ = unpack(&sandbox.target, &mut stream(&refs).as_slice());
        prop_assert_eq!(describe(&sandbox.outside), before);
    }

    #[test]
    fn any_bytes_are_refused_or_unpacked_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..3000), at in 0..512_usize, flip in any::<u8>()) {
        let sandbox = sandbox();
        let _ = unpack(&sandbox.target, &mut bytes.as_slice());
        let mut near = stream(&[("a", FILE, "", b"x"), ("b", LINK, "a", b"")]);
        near[at] ^= flip;
        let mut header = Header::from_byte_slice(&near[..512]).clone();
        header.set_cksum();
        near[..512].copy_from_slice(header.as_bytes());
        let _ = unpack(&sandbox.target, &mut near.as_slice());
        prop_assert_eq!(fs::read(sandbox.outside.join("secret")).unwrap(), b"untouched");
    }
}
