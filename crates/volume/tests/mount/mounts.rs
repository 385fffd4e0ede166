//! A folder that is mounted by this host's own kernel.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]

use crate::common::{As, Mounted, USER, eventually};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::time::{Duration, UNIX_EPOCH};

/// Whether this host can mount. If not, a test tests nothing (`DAYFLY_REQUIRE`).
pub fn can() -> bool {
    dayfly_units::needs::root()
}

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn files_are_the_callers_on_the_host_and_roots_in_the_guest() {
    if !can() {
        return;
    }
    let m = Mounted::new(As::Root, &[]);
    fs::write(m.at("a"), "text").unwrap();
    fs::create_dir(m.at("d")).unwrap();
    std::os::unix::fs::symlink("../../etc/passwd", m.at("l")).unwrap();
    for name in ["a", "d", "l"] {
        let (host, guest) = (m.on_host(name), m.at(name));
        let (host, guest) = (host.symlink_metadata().unwrap(), guest.symlink_metadata().unwrap());
        assert_eq!((host.uid(), host.gid()), (USER, USER), "{name}");
        assert_eq!((guest.uid(), guest.gid()), (0, 0), "{name}");
    }
    fs::write(m.on_host("roots"), "").unwrap();
    let nobodys = m.at("roots").metadata().unwrap();
    assert_eq!((nobodys.uid(), nobodys.gid()), (65_534, 65_534));
    // The guest's root may open it in the guest; the host's kernel decides.
    assert_eq!(errno(OpenOptions::new().write(true).open(m.at("roots"))), libc::EACCES);
    std::os::unix::fs::chown(m.at("a"), Some(0), Some(0)).unwrap();
    assert_eq!(errno(std::os::unix::fs::chown(m.at("a"), Some(33), None)), libc::EPERM);
    assert_eq!(fs::read(m.on_host("a")).unwrap(), b"text");
    assert_eq!(fs::read_link(m.at("l")).unwrap().to_str(), Some("../../etc/passwd"));
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn names_and_links() {
    if !can() {
        return;
    }
    let m = Mounted::new(As::Root, &[]);
    fs::write(m.at("a"), "a").unwrap();
    fs::hard_link(m.at("a"), m.at("b")).unwrap();
    let inode = |name: &str| m.at(name).metadata().unwrap().ino();
    assert_eq!(inode("a"), inode("b"));
    assert_eq!(m.at("a").metadata().unwrap().nlink(), 2);
    fs::write(m.at("b"), "changed").unwrap();
    assert_eq!(fs::read(m.at("a")).unwrap(), b"changed");
    // A link itself has several names, too.
    std::os::unix::fs::symlink("nowhere", m.at("l")).unwrap();
    fs::hard_link(m.at("l"), m.at("l2")).unwrap();
    assert_eq!(fs::read_link(m.on_host("l2")).unwrap().to_str(), Some("nowhere"));
    // Renaming over an open file.
    fs::write(m.at("new"), "new").unwrap();
    let mut open = File::open(m.at("a")).unwrap();
    fs::rename(m.at("new"), m.at("a")).unwrap();
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!((text.as_str(), fs::read(m.at("a")).unwrap()), ("changed", b"new".to_vec()));
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    let rename = |from, to, flags| renameat_with(CWD, m.at(from), CWD, m.at(to), flags);
    assert_eq!(rename("a", "b", RenameFlags::NOREPLACE), Err(rustix::io::Errno::EXIST));
    rename("a", "b", RenameFlags::EXCHANGE).unwrap();
    assert_eq!(fs::read(m.at("a")).unwrap(), b"changed");
    assert!(rename("a", "b", RenameFlags::WHITEOUT).is_err());
    fs::create_dir(m.at("d")).unwrap();
    fs::rename(m.at("b"), m.at("d/b")).unwrap();
    assert_eq!(errno(fs::remove_dir(m.at("d"))), libc::ENOTEMPTY);
    assert_eq!(errno(fs::rename(m.at("d"), m.at("d/e"))), libc::EINVAL);
    assert_eq!(fs::read(m.on_host("d/b")).unwrap(), b"new");
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn unlinked_files_keep_working() {
    if !can() {
        return;
    }
    let m = Mounted::new(As::Root, &[]);
    let mut file = File::create_new(m.at("a")).unwrap();
    fs::remove_file(m.at("a")).unwrap();
    assert!(!m.on_host("a").exists());
    file.write_all(b"still there").unwrap();
    file.set_len(5).unwrap();
    file.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!((file.metadata().unwrap().len(), file.metadata().unwrap().nlink()), (5, 0));
    // A file without a name gets one.
    let flags = libc::O_TMPFILE;
    let made = OpenOptions::new().write(true).custom_flags(flags).open(&m.guest);
    let mut file = made.unwrap();
    file.write_all(b"made").unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    use rustix::fs::{AtFlags, CWD, linkat};
    linkat(CWD, &path, CWD, m.at("named"), AtFlags::SYMLINK_FOLLOW).unwrap();
    assert_eq!(fs::read(m.on_host("named")).unwrap(), b"made");
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn data_holes_and_appending() {
    if !can() {
        return;
    }
    let m = Mounted::new(As::Root, &[]);
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(m.at("a")).unwrap();
    let data: Vec<u8> = (0..3 << 20).map(|n: u32| n.to_le_bytes()[1] ^ 7).collect();
    file.write_all_at(&data, 1 << 20).unwrap();
    assert_eq!(fs::read(m.on_host("a")).unwrap()[1 << 20..], data);
    let mut back = vec![0; data.len()];
    file.read_exact_at(&mut back, 1 << 20).unwrap();
    assert_eq!(back, data);
    let seek = |from| rustix::fs::seek(&file, from).unwrap();
    assert_eq!(seek(rustix::fs::SeekFrom::Data(0)), 1 << 20);
    assert_eq!(seek(rustix::fs::SeekFrom::Hole(1 << 20)), 4 << 20);
    use rustix::fs::{FallocateFlags, fallocate};
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, punch, 2 << 20, 1 << 20).unwrap();
    assert_eq!(seek(rustix::fs::SeekFrom::Hole(1 << 20)), 2 << 20);
    fallocate(&file, FallocateFlags::empty(), 4 << 20, 4096).unwrap();
    assert_eq!(file.metadata().unwrap().len(), (4 << 20) + 4096);
    assert!(fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096).is_err());
    // Longer than a file can be.
    assert!(file.set_len(1 << 63).is_err());
    assert!(file.write_at(b"x", (1 << 63) - 1).is_err());
    file.set_len(3).unwrap();
    // Two writers append.
    let append = || OpenOptions::new().append(true).open(m.at("a")).unwrap();
    let (mut one, mut other) = (append(), append());
    for _ in 0..100 {
        one.write_all(b"1").unwrap();
        other.write_all(b"2").unwrap();
    }
    assert_eq!(m.on_host("a").metadata().unwrap().len(), 203);
    // The host appends, too: no byte is overwritten.
    OpenOptions::new().append(true).open(m.on_host("a")).unwrap().write_all(b"host").unwrap();
    one.write_all(b"guest").unwrap();
    assert!(fs::read(m.on_host("a")).unwrap().ends_with(b"hostguest"));
    // The guest believes its own length for a second.
    eventually("the host's length", || m.at("a").metadata().unwrap().len() == 212);
    // Copied on the host.
    let (from, to) = (File::open(m.at("a")).unwrap(), File::create(m.at("copy")).unwrap());
    let copied = rustix::fs::copy_file_range(&from, None, &to, None, 1 << 40).unwrap();
    assert_eq!(copied, 212);
    assert_eq!(fs::read(m.at("copy")).unwrap(), fs::read(m.at("a")).unwrap());
    // O_TRUNC, O_DIRECT and O_SYNC are the guest's.
    let flags = libc::O_DIRECT | libc::O_SYNC | libc::O_NOATIME;
    let direct = OpenOptions::new().write(true).truncate(true).custom_flags(flags).open(m.at("a"));
    direct.unwrap().write_all(b"odd").unwrap();
    assert_eq!(fs::read(m.on_host("a")).unwrap(), b"odd");
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn attributes_and_times() {
    if !can() {
        return;
    }
    let m = Mounted::new(As::Root, &[]);
    let file = File::create_new(m.at("a")).unwrap();
    let (long_ago, later) = (UNIX_EPOCH - Duration::new(5, 5), UNIX_EPOCH + Duration::new(7, 9));
    let times = fs::FileTimes::new().set_accessed(long_ago).set_modified(later);
    file.set_times(times).unwrap();
    let host = m.on_host("a").metadata().unwrap();
    assert_eq!((host.accessed().unwrap(), host.modified().unwrap()), (long_ago, later));
    assert_eq!(m.at("a").metadata().unwrap().accessed().unwrap(), long_ago);
    fs::set_permissions(m.at("a"), fs::Permissions::from_mode(0o1750)).unwrap();
    assert_eq!(m.on_host("a").metadata().unwrap().mode() & 0o7777, 0o1750);
    // Such programs would run with the caller's rights.
    for mode in [0o4755, 0o2755] {
        let refused = fs::set_permissions(m.at("a"), fs::Permissions::from_mode(mode));
        assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
        let made = OpenOptions::new().write(true).create_new(true).mode(mode).open(m.at("s"));
        assert_eq!(made.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
    }
    assert!(!m.on_host("s").exists());
    // A write removes the set-uid bit that a file of the host has.
    fs::set_permissions(m.on_host("a"), fs::Permissions::from_mode(0o4755)).unwrap();
    OpenOptions::new().write(true).open(m.at("a")).unwrap().write_all(b"x").unwrap();
    assert_eq!(m.on_host("a").metadata().unwrap().mode() & 0o7777, 0o755);
    // Times of a link itself.
    std::os::unix::fs::symlink("a", m.at("l")).unwrap();
    use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};
    let time = Timespec { tv_sec: 77, tv_nsec: 3 };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, m.at("l"), &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    assert_eq!(m.on_host("l").symlink_metadata().unwrap().mtime(), 77);
    assert_ne!(m.on_host("a").metadata().unwrap().mtime(), 77);
    let free = rustix::fs::statvfs(&m.guest).unwrap();
    assert_eq!(free.f_blocks, rustix::fs::statvfs(m.host.path()).unwrap().f_blocks);
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn only_attributes_of_users() {
    if !can() {
        return;
    }
    let m = Mounted::new(As::Root, &[]);
    fs::write(m.at("a"), "").unwrap();
    use rustix::fs::{XattrFlags, getxattr, listxattr, removexattr, setxattr};
    use rustix::io::Errno;
    let set = |name: &str, value: &[u8], flags| setxattr(m.at("a"), name, value, flags);
    set("user.one", b"1", XattrFlags::CREATE).unwrap();
    assert_eq!(set("user.one", b"1", XattrFlags::CREATE), Err(Errno::EXIST));
    assert_eq!(set("user.two", b"1", XattrFlags::REPLACE), Err(Errno::NODATA));
    for name in ["trusted.a", "security.selinux", "security.evm"] {
        assert_eq!(set(name, b"1", XattrFlags::empty()), Err(Errno::OPNOTSUPP), "{name}");
    }
    let mut value = [0; 8];
    assert_eq!(getxattr(m.at("a"), "user.one", &mut value), Ok(1));
    assert_eq!(getxattr(m.at("a"), "user.none", &mut value), Err(Errno::NODATA));
    set("user.long", &[7; 3000], XattrFlags::empty()).unwrap();
    assert_eq!(getxattr(m.at("a"), "user.long", &mut value), Err(Errno::RANGE));
    assert_eq!(rustix::fs::getxattr_query(m.at("a"), "user.long"), Ok(3000));
    setxattr(m.on_host("a"), "trusted.host", b"1", XattrFlags::empty()).unwrap();
    let mut names = [0; 64];
    let count = listxattr(m.at("a"), &mut names).unwrap();
    let mut names: Vec<_> = names[..count].split(|byte| *byte == 0).collect();
    names.sort_unstable();
    assert_eq!(names, [&b""[..], b"user.long", b"user.one"]);
    removexattr(m.at("a"), "user.one").unwrap();
    assert_eq!(removexattr(m.at("a"), "user.one"), Err(Errno::NODATA));
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn a_long_folder_is_read_while_it_is_emptied() {
    if !can() {
        return;
    }
    const COUNT: usize = 5000;
    let m = Mounted::new(As::Root, &[]);
    for n in 0..COUNT {
        File::create_new(m.at(&format!("file-{n}"))).unwrap();
    }
    let mut names: Vec<_> =
        fs::read_dir(&m.guest).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), COUNT);
    let mut removed = 0;
    for entry in fs::read_dir(&m.guest).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
        removed += 1;
    }
    assert_eq!((removed, fs::read_dir(m.host.path()).unwrap().count()), (COUNT, 0));
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn special_files_are_the_guests_own() {
    if !can() {
        return;
    }
    let m = Mounted::new(As::Root, &[]);
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let make = |name: &str, kind| mknodat(CWD, m.at(name), kind, Mode::from(0o666), 0x103);
    make("fifo", FileType::Fifo).unwrap();
    make("socket", FileType::Socket).unwrap();
    assert_eq!(make("device", FileType::CharacterDevice), Err(rustix::io::Errno::PERM));
    assert!(m.on_host("fifo").metadata().unwrap().file_type().is_fifo());
    // The guest's kernel connects both ends; the server opens nothing and does not wait.
    assert_eq!(m.sh("cat fifo & echo through > fifo; wait"), "through\n");
    // A device of the host is none in the guest.
    mknodat(CWD, m.on_host("zero"), FileType::CharacterDevice, Mode::from(0o666), 0x105).unwrap();
    assert_eq!(m.at("zero").metadata().unwrap().rdev(), 0);
    assert!(File::open(m.at("zero")).is_err());
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn changes_of_the_host_become_visible() {
    if !can() {
        return;
    }
    let m = Mounted::new(As::Root, &[]);
    fs::write(m.at("a"), "before").unwrap();
    let mut open = File::open(m.at("a")).unwrap();
    let mut read = || {
        let mut text = String::new();
        open.seek(SeekFrom::Start(0)).unwrap();
        open.read_to_string(&mut text).unwrap();
        text
    };
    assert_eq!(read(), "before");
    fs::write(m.on_host("a"), "after!").unwrap();
    // Opening sees it at once.
    assert_eq!(fs::read(m.at("a")).unwrap(), b"after!");
    assert_eq!(read(), "after!");
    fs::write(m.on_host("a"), "longer than before").unwrap();
    fs::write(m.on_host("b"), "").unwrap();
    fs::remove_file(m.on_host("a")).unwrap();
    // After the second for which names are valid.
    eventually("the host's names", || !m.at("a").exists() && m.at("b").exists());
    eventually("the host's content", || read() == "longer than before");
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn read_only_changes_nothing() {
    if !can() {
        return;
    }
    let host = crate::common::folder();
    fs::write(host.path().join("a"), "text").unwrap();
    std::os::unix::fs::chown(host.path().join("a"), Some(USER), Some(USER)).unwrap();
    let m = Mounted::of(host, As::Root, &["--read-only"]);
    let erofs = libc::EROFS;
    assert_eq!(fs::read(m.at("a")).unwrap(), b"text");
    assert_eq!(errno(fs::write(m.at("a"), "x")), erofs);
    assert_eq!(errno(fs::write(m.at("b"), "x")), erofs);
    assert_eq!(errno(fs::create_dir(m.at("d"))), erofs);
    assert_eq!(errno(fs::remove_file(m.at("a"))), erofs);
    assert_eq!(errno(fs::rename(m.at("a"), m.at("b"))), erofs);
    assert_eq!(errno(fs::hard_link(m.at("a"), m.at("b"))), erofs);
    assert_eq!(errno(std::os::unix::fs::symlink("a", m.at("b"))), erofs);
    assert_eq!(errno(fs::set_permissions(m.at("a"), fs::Permissions::from_mode(0o0))), erofs);
    let flags = rustix::fs::XattrFlags::empty();
    let set = rustix::fs::setxattr(m.at("a"), "user.a", b"", flags);
    assert_eq!(set, Err(rustix::io::Errno::ROFS));
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn tar_git_and_sqlite_work() {
    if !can() {
        return;
    }
    let m = Mounted::new(As::Root, &[]);
    m.sh("mkdir src out; for n in $(seq 200); do mkdir -p src/d$((n % 10)); \
         seq $n > src/d$((n % 10))/f$n; done; ln -s f1 src/d1/link; ln src/d1/f1 src/d1/hard; \
         tar -C src -cf - . | tar -C out -xpf -; diff -r src out; \
         test \"$(stat -c %h out/d1/f1)\" = 2");
    assert_eq!(fs::read_link(m.on_host("out/d1/link")).unwrap().to_str(), Some("f1"));
    m.sh("git init -q repo; cd repo; git config user.name n; git config user.email e; \
         cp -r ../src .; git add .; git commit -qm one; git mv src moved; git commit -qam two; \
         git gc -q; git fsck --strict; cd ..; git clone -q repo clone; cd clone; \
         test -z \"$(git status --porcelain)\"; test \"$(git log --oneline | wc -l)\" = 2");
    let found = m.sh("sqlite3 db 'pragma journal_mode=wal; create table t(a); begin; \
         with recursive n(x) as (select 1 union all select x+1 from n where x<20000) \
         insert into t select x from n; commit; pragma integrity_check; \
         select count(*), sum(a) from t;'");
    assert!(found.ends_with("ok\n20000|200010000\n"), "{found}");
    m.sh("sqlite3 db 'pragma journal_mode=delete; delete from t where a % 2; vacuum;'");
    m.sh("cp -a src copy; rm -r src out copy");
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn programs_get_enotconn_when_the_server_dies() {
    if !can() {
        return;
    }
    let mut m = Mounted::new(As::Root, &[]);
    fs::write(m.at("a"), "x").unwrap();
    let mut open = File::open(m.at("a")).unwrap();
    m.server.as_mut().unwrap().kill().unwrap();
    m.server.as_mut().unwrap().wait().unwrap();
    // The relay sees the end of the stream a little later; what it had sent already is aborted.
    let notconn = loop {
        match fs::metadata(m.at("b")) {
            Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) => break e,
            Err(e) if e.raw_os_error() == Some(libc::ECONNABORTED) => {}
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(notconn.kind(), ErrorKind::NotConnected);
    assert!(open.read(&mut [0; 1]).is_err());
    assert_eq!(fs::read(m.on_host("a")).unwrap(), b"x");
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn an_ordinary_user_can_share_a_folder() {
    if !can() {
        return;
    }
    let m = Mounted::new(As::User, &[]);
    fs::write(m.at("a"), "text").unwrap();
    assert_eq!(m.on_host("a").metadata().unwrap().uid(), USER);
    assert_eq!(m.at("a").metadata().unwrap().uid(), 0);
    fs::write(m.on_host("roots"), "").unwrap();
    assert_eq!(m.at("roots").metadata().unwrap().uid(), 65_534);
    m.sh("mkdir d; mv a d; tar cf t d; rm -r d; tar xf t; cat d/a");
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn a_user_without_namespaces_can_share_a_folder() {
    if !can() {
        return;
    }
    let m = Mounted::new(As::Confined, &[]);
    m.sh("mkdir d; echo text > d/a; ln d/a d/b; tar cf t d; rm -r d; tar xf t; cat d/a d/b");
    assert_eq!(m.on_host("d/a").metadata().unwrap().uid(), USER);
    rustix::fs::setxattr(m.at("t"), "user.a", b"1", rustix::fs::XattrFlags::empty()).unwrap();
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn a_guest_that_has_too_many_files_open_gets_enfile() {
    if !can() {
        return;
    }
    let m = Mounted::new(As::Confined, &[]);
    let mut open = Vec::new();
    let failed = (0..crate::common::FEW).find_map(|n| {
        let path = m.at(&n.to_string());
        match fs::write(&path, "").and_then(|()| File::open(&path)) {
            Ok(file) => {
                open.push(file);
                None
            }
            Err(e) => e.raw_os_error(),
        }
    });
    assert_eq!(failed, Some(libc::ENFILE));
    // An eighth of the descriptors are for handles. The guest closes, and goes on.
    assert_eq!(open.len() as u64, crate::common::FEW / 8);
    drop(open);
    fs::write(m.at("more"), "more").unwrap();
    assert_eq!(fs::read(m.on_host("more")).unwrap(), b"more");
}
