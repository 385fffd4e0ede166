//! Guests that send what no kernel sends, and hosts that rename while a guest works.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]

mod common;

use dayfly_volume::message::encode;
use dayfly_volume::wire::*;
use dayfly_volume::{Options, ServeError, serve};
use rustix::fd::OwnedFd;
use rustix::fs::{CWD, Mode, OFlags, RenameFlags, openat, renameat_with};
use rustix::mount::{MountFlags, mount};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;
use tempfile::TempDir;
use zerocopy::{FromBytes, Immutable, IntoBytes};

fn open(path: &Path) -> OwnedFd {
    openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

/// A guest that speaks the protocol itself.
struct Guest {
    stream: UnixStream,
    server: Option<JoinHandle<Result<(), ServeError>>>,
    unique: u64,
}

type Answer = Result<Vec<u8>, i32>;

impl Guest {
    fn new(folder: &Path, options: Options) -> Self {
        let mut guest = Self::silent(folder, options);
        let init = InitIn { major: 7, minor: 38, max_readahead: 0, flags: u32::MAX };
        let answer = guest.call(op::INIT, 0, init.as_bytes()).unwrap();
        assert_eq!(InitOut::read_from_bytes(&answer).unwrap().flags, feature::WANTED);
        guest
    }

    /// A guest that has not said INIT.
    fn silent(folder: &Path, options: Options) -> Self {
        let (stream, there) = UnixStream::pair().unwrap();
        let folder = open(folder);
        let server = std::thread::spawn(move || serve(there.into(), folder, options));
        Self { stream, server: Some(server), unique: 0 }
    }

    fn send(&mut self, opcode: u32, nodeid: u64, body: &[u8]) -> u64 {
        self.unique += 2;
        let header = InHeader { opcode, nodeid, unique: self.unique, ..InHeader::default() };
        self.stream.write_all(&encode(header, body)).unwrap();
        self.unique
    }

    fn receive(&mut self) -> (u64, Answer) {
        let mut header = [0; OUT_HEADER_BYTES];
        self.stream.read_exact(&mut header).unwrap();
        let header = OutHeader::read_from_bytes(&header).unwrap();
        let mut body = vec![0; header.len as usize - OUT_HEADER_BYTES];
        self.stream.read_exact(&mut body).unwrap();
        let answer = if header.error == 0 { Ok(body) } else { Err(-header.error) };
        (header.unique, answer)
    }

    fn call(&mut self, opcode: u32, nodeid: u64, body: &[u8]) -> Answer {
        let unique = self.send(opcode, nodeid, body);
        let (answered, answer) = self.receive();
        assert_eq!(answered, unique);
        answer
    }

    fn with<T: IntoBytes + Immutable>(&mut self, opcode: u32, node: u64, value: &T) -> Answer {
        self.call(opcode, node, value.as_bytes())
    }

    fn lookup(&mut self, folder: u64, name: &str) -> Result<u64, i32> {
        let answer = self.call(op::LOOKUP, folder, format!("{name}\0").as_bytes())?;
        Ok(EntryOut::read_from_bytes(&answer).unwrap().nodeid)
    }

    fn open(&mut self, node: u64, opcode: u32, flags: u32) -> Result<u64, i32> {
        let answer = self.with(opcode, node, &OpenIn { flags, open_flags: 0 })?;
        Ok(OpenOut::read_from_bytes(&answer).unwrap().fh)
    }

    /// The end of the server, after the guest has gone.
    fn end(mut self) -> Result<(), ServeError> {
        self.stream.shutdown(std::net::Shutdown::Both).unwrap();
        self.server.take().unwrap().join().unwrap()
    }
}

fn file(folder: &TempDir, name: &str, text: &str) {
    fs::write(folder.path().join(name), text).unwrap();
}

#[test]
fn before_init_nothing_is_answered_but_init() {
    let folder = tempfile::tempdir().unwrap();
    let mut guest = Guest::silent(folder.path(), Options::own());
    assert_eq!(guest.lookup(ROOT, "a"), Err(libc::EIO));
    let init = |major, minor| InitIn { major, minor, max_readahead: 0, flags: 0 };
    assert_eq!(guest.with(op::INIT, 0, &init(7, 30)), Err(libc::EPROTO));
    assert_eq!(guest.with(op::INIT, 0, &init(6, 99)), Err(libc::EPROTO));
    let newer = guest.with(op::INIT, 0, &init(8, 0)).unwrap();
    assert_eq!(InitOut::read_from_bytes(&newer).unwrap().major, 7);
    guest.with(op::INIT, 0, &init(7, 31)).unwrap();
    assert_eq!(guest.with(op::INIT, 0, &init(7, 31)), Err(libc::EPROTO));
    assert_eq!(guest.lookup(ROOT, "a"), Err(libc::ENOENT));
    guest.end().unwrap();
}

#[test]
fn a_message_of_a_wrong_length_ends_the_server() {
    let folder = tempfile::tempdir().unwrap();
    for len in [0, 39, 2 << 20, u32::MAX] {
        let mut guest = Guest::new(folder.path(), Options::own());
        let header = InHeader { len, opcode: op::LOOKUP, ..InHeader::default() };
        guest.stream.write_all(header.as_bytes()).unwrap();
        assert_eq!(guest.stream.read(&mut [0; 1]).unwrap(), 0);
        let end = guest.server.take().unwrap().join().unwrap();
        assert!(matches!(end, Err(ServeError::Length(got)) if got == len), "{end:?}");
    }
}

#[test]
fn names_never_lead_out_of_their_folder() {
    let outer = tempfile::tempdir().unwrap();
    file(&outer, "secret", "secret");
    let folder = outer.path().join("shared");
    fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink("..", folder.join("up")).unwrap();
    std::os::unix::fs::symlink("/etc", folder.join("etc")).unwrap();
    std::os::unix::fs::symlink("../secret", folder.join("out")).unwrap();
    let mut guest = Guest::new(&folder, Options::own());
    for name in ["..", ".", "", "../secret", "up/secret", "/etc/passwd", "./up"] {
        assert_eq!(guest.lookup(ROOT, name), Err(libc::EINVAL), "{name:?}");
    }
    for (link, name) in [("up", "secret"), ("etc", "passwd")] {
        let link = guest.lookup(ROOT, link).unwrap();
        assert_eq!(guest.lookup(link, name), Err(libc::ENOTDIR));
        assert_eq!(guest.open(link, op::OPENDIR, 0), Err(libc::ENOTDIR));
    }
    let out = guest.lookup(ROOT, "out").unwrap();
    assert_eq!(guest.open(out, op::OPEN, 0), Err(libc::ELOOP));
    let truncate = SetattrIn { valid: valid::SIZE, ..SetattrIn::default() };
    assert_eq!(guest.with(op::SETATTR, out, &truncate), Err(libc::EINVAL));
    let mode = SetattrIn { valid: valid::MODE, ..SetattrIn::default() };
    assert_eq!(guest.with(op::SETATTR, out, &mode), Err(libc::EOPNOTSUPP));
    let create = CreateIn { flags: 2, mode: 0o600, ..CreateIn::default() };
    let body = [create.as_bytes(), b"out\0"].concat();
    assert_eq!(guest.call(op::CREATE, ROOT, &body), Err(libc::EEXIST));
    let rename = [RenameIn { newdir: ROOT }.as_bytes(), b"out\0../moved\0"].concat();
    assert_eq!(guest.call(op::RENAME, ROOT, &rename), Err(libc::EINVAL));
    assert_eq!(fs::read(outer.path().join("secret")).unwrap(), b"secret");
    assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 2);
    guest.end().unwrap();
}

#[test]
fn a_folder_that_becomes_a_link_leads_nowhere() {
    let outer = tempfile::tempdir().unwrap();
    file(&outer, "secret", "secret");
    let folder = outer.path().join("shared");
    fs::create_dir_all(folder.join("d")).unwrap();
    std::os::unix::fs::symlink("..", folder.join("l")).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let mut guest = Guest::new(&folder, Options::own());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let (d, l) = (folder.join("d"), folder.join("l"));
                renameat_with(CWD, d, CWD, l, RenameFlags::EXCHANGE).unwrap();
            }
        });
        let (mut links, mut folders) = (0, 0);
        while links < 200 || folders < 200 {
            let node = guest.lookup(ROOT, "d").unwrap();
            match guest.lookup(node, "secret") {
                Err(libc::ENOENT) => folders += 1,
                Err(libc::ENOTDIR) => links += 1,
                other => panic!("{other:?}"),
            }
            let made = CreateIn { flags: 1, mode: 0o600, ..CreateIn::default() };
            let _ = guest.call(op::CREATE, node, &[made.as_bytes(), b"x\0"].concat());
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(!outer.path().join("x").exists());
    guest.end().unwrap();
}

#[test]
fn nodes_and_handles_have_bounds_and_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    for n in 0..10 {
        file(&folder, &n.to_string(), "text");
    }
    let few = Options { max_nodes: 8, max_open_nodes: 5, max_handles: 3, ..Options::own() };
    let mut guest = Guest::new(folder.path(), few);
    let oldest = guest.lookup(ROOT, "9").unwrap();
    let nodes: Vec<u64> = (0..5).map(|n| guest.lookup(ROOT, &n.to_string()).unwrap()).collect();
    for name in ["5", "6"] {
        guest.lookup(ROOT, name).unwrap();
    }
    assert_eq!(guest.with(op::GETATTR, oldest, &GetattrIn::default()), Err(libc::ESTALE));
    let fh = guest.open(ROOT, op::OPENDIR, 0).unwrap();
    let read = ReadIn { fh, size: 1 << 20, ..ReadIn::default() };
    let listing = guest.with(op::READDIR, ROOT, &read).unwrap();
    assert!(listing.len() >= 12 * 24, "{}", listing.len());
    guest.open(nodes[0], op::OPEN, 0).unwrap();
    let other = guest.open(nodes[1], op::OPEN, 0).unwrap();
    assert_eq!(guest.open(nodes[2], op::OPEN, 0), Err(libc::ENFILE));
    assert_eq!(guest.open(ROOT, op::OPENDIR, 0), Err(libc::ENFILE));
    // A handle of another file, a folder's for a file, a file's for a folder, none.
    let read = |fh| ReadIn { fh, size: 9, ..ReadIn::default() };
    assert_eq!(guest.with(op::READ, nodes[0], &read(other)), Err(libc::EBADF));
    assert_eq!(guest.with(op::READ, ROOT, &read(fh)), Err(libc::EBADF));
    assert_eq!(guest.with(op::READDIR, nodes[1], &read(other)), Err(libc::EBADF));
    assert_eq!(guest.with(op::READ, nodes[1], &read(99)), Err(libc::EBADF));
    assert_eq!(guest.with(op::READ, nodes[1], &read(other)), Ok(b"text".to_vec()));
    let release = ReleaseIn { fh: other, ..ReleaseIn::default() };
    assert_eq!(guest.with(op::RELEASE, nodes[0], &release), Err(libc::EBADF));
    guest.with(op::RELEASE, nodes[1], &release).unwrap();
    assert_eq!(guest.with(op::RELEASE, nodes[1], &release), Err(libc::EBADF));
    // Forgetting, with counts that are too high.
    let one = |node| ForgetOne { nodeid: node, nlookup: u64::MAX };
    let all: Vec<u8> = nodes.iter().flat_map(|node| one(*node).as_bytes().to_vec()).collect();
    let count = BatchForgetIn { count: u32::MAX, dummy: 0 };
    guest.send(op::BATCH_FORGET, 0, &[count.as_bytes(), &all].concat());
    guest.send(op::FORGET, ROOT, &u64::MAX.to_ne_bytes());
    guest.send(op::FORGET, 12_345, &1_u64.to_ne_bytes());
    assert_eq!(guest.with(op::GETATTR, nodes[0], &GetattrIn::default()), Err(libc::ESTALE));
    let again = guest.lookup(ROOT, "0").unwrap();
    assert!(!nodes.contains(&again), "numbers are not used again");
    guest.end().unwrap();
}

#[test]
fn numbers_at_their_limits_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    file(&folder, "a", "text");
    let mut guest = Guest::new(folder.path(), Options::own());
    let node = guest.lookup(ROOT, "a").unwrap();
    let fh = guest.open(node, op::OPEN, 2 | 0o3000 | 0o40000 | 0o10_000_000).unwrap();
    assert_eq!(guest.open(node, op::OPEN, 3), Err(libc::EINVAL));
    let read = |offset, size| ReadIn { fh, offset, size, ..ReadIn::default() };
    assert_eq!(guest.with(op::READ, node, &read(u64::MAX, 4)), Err(libc::EINVAL));
    assert_eq!(guest.with(op::READ, node, &read(i64::MAX.unsigned_abs(), 4)), Err(libc::EINVAL));
    assert_eq!(guest.with(op::READ, node, &read(0, u32::MAX)), Err(libc::EINVAL));
    assert_eq!(guest.with(op::READ, node, &read(0, 1 << 20)), Ok(b"text".to_vec()));
    let write = |offset, size| WriteIn { fh, offset, size, ..WriteIn::default() };
    for (offset, size, errno) in [
        (u64::MAX, 4, libc::EFBIG),
        (i64::MAX.unsigned_abs(), 4, libc::EFBIG),
        (0, 5, libc::EINVAL),
        (0, u32::MAX, libc::EINVAL),
    ] {
        let body = [write(offset, size).as_bytes(), b"data"].concat();
        assert_eq!(guest.call(op::WRITE, node, &body), Err(errno), "{offset} {size}");
    }
    let allocate = |offset, length, mode| FallocateIn { fh, offset, length, mode, padding: 0 };
    assert_eq!(guest.with(op::FALLOCATE, node, &allocate(1, u64::MAX, 0)), Err(libc::EFBIG));
    for mode in [2, 8, 0x20, 0x40, u32::MAX] {
        let answer = guest.with(op::FALLOCATE, node, &allocate(0, 1, mode));
        assert_eq!(answer, Err(libc::EOPNOTSUPP), "{mode}");
    }
    let seek = |offset, whence| LseekIn { fh, offset, whence, padding: 0 };
    assert_eq!(guest.with(op::LSEEK, node, &seek(u64::MAX, 3)), Err(libc::EINVAL));
    assert_eq!(guest.with(op::LSEEK, node, &seek(0, 0)), Err(libc::EINVAL));
    assert_eq!(guest.with(op::LSEEK, node, &seek(9, 3)), Err(libc::ENXIO));
    let set = |valid, value: u64, nsec| SetattrIn {
        valid,
        size: value,
        mtime: value,
        mtimensec: nsec,
        mode: u32::MAX,
        ..SetattrIn::default()
    };
    assert_eq!(guest.with(op::SETATTR, node, &set(valid::SIZE, u64::MAX, 0)), Err(libc::EFBIG));
    for nsec in [1_000_000_000, 0x3fff_ffff, 0x3fff_fffe, u32::MAX] {
        let answer = guest.with(op::SETATTR, node, &set(valid::MTIME, 0, nsec));
        assert_eq!(answer, Err(libc::EINVAL), "{nsec}");
    }
    for seconds in [u64::MAX, i64::MAX.unsigned_abs(), 1 << 63] {
        let _ = guest.with(op::SETATTR, node, &set(valid::MTIME, seconds, 0));
    }
    // All bits at once: set-uid is among them.
    assert_eq!(guest.with(op::SETATTR, node, &set(valid::MODE, 0, 0)), Err(libc::EPERM));
    assert_eq!(fs::read(folder.path().join("a")).unwrap(), b"text");
    // Much is copied in parts.
    let copy = |len, flags| CopyIn {
        fh_in: fh,
        nodeid_out: node,
        fh_out: fh,
        off_out: 1 << 40,
        len,
        flags,
        ..CopyIn::default()
    };
    assert_eq!(guest.with(op::COPY_FILE_RANGE, node, &copy(1, 1)), Err(libc::EINVAL));
    let done = guest.with(op::COPY_FILE_RANGE, node, &copy(u64::MAX, 0)).unwrap();
    assert_eq!(WriteOut::read_from_bytes(&done).unwrap().size, 4);
    guest.end().unwrap();
}

#[test]
fn folders_are_answered_within_the_guests_room() {
    let folder = tempfile::tempdir().unwrap();
    for n in 0..1000 {
        file(&folder, &format!("{n}-{}", "x".repeat(200)), "");
    }
    let mut guest = Guest::new(folder.path(), Options::own());
    let fh = guest.open(ROOT, op::OPENDIR, 0).unwrap();
    let read = |offset, size| ReadIn { fh, offset, size, ..ReadIn::default() };
    for opcode in [op::READDIR, op::READDIRPLUS] {
        assert_eq!(guest.with(opcode, ROOT, &read(0, 0)), Err(libc::EINVAL));
        for size in [512, 4096, 10_000, u32::MAX] {
            let answer = guest.with(opcode, ROOT, &read(0, size)).unwrap();
            assert!((1..=size.min(128 << 10) as usize).contains(&answer.len()), "{}", answer.len());
        }
        assert_eq!(guest.with(opcode, ROOT, &read(u64::MAX, 4096)), Err(libc::EINVAL));
        for forged in [1, 2, 77, 1 << 40, i64::MAX.unsigned_abs()] {
            if let Ok(answer) = guest.with(opcode, ROOT, &read(forged, 4096)) {
                assert!(answer.len() <= 4096);
            }
        }
    }
    guest.end().unwrap();
}

#[test]
fn interrupts_fail_no_short_operation_and_end_copies() {
    let folder = tempfile::tempdir().unwrap();
    file(&folder, "a", "text");
    let mut guest = Guest::new(folder.path(), Options::own());
    // Nothing that exists: no answer, and no harm.
    guest.send(op::INTERRUPT, 0, &77_u64.to_ne_bytes());
    guest.send(op::INTERRUPT, 0, b"short");
    // Each has one answer, and a lookup is not given up.
    for _ in 0..2000 {
        let unique = guest.send(op::LOOKUP, ROOT, b"a\0");
        guest.send(op::INTERRUPT, 0, &unique.to_ne_bytes());
        let (answered, answer) = guest.receive();
        assert_eq!(answered, unique);
        assert!(answer.is_ok(), "{answer:?}");
    }
    fs::File::create(folder.path().join("b")).unwrap().set_len(32 << 20).unwrap();
    let node = guest.lookup(ROOT, "b").unwrap();
    let fh = guest.open(node, op::OPEN, 2).unwrap();
    let ids = CopyIn { fh_in: fh, nodeid_out: node, fh_out: fh, ..CopyIn::default() };
    let asked = CopyIn { off_out: 1 << 30, len: 32 << 20, ..ids };
    // Interrupted while it waits, while it runs, or after it.
    for _ in 0..20 {
        let unique = guest.send(op::COPY_FILE_RANGE, node, asked.as_bytes());
        guest.send(op::INTERRUPT, 0, &unique.to_ne_bytes());
        let (answered, answer) = guest.receive();
        assert_eq!(answered, unique);
        assert!(matches!(answer, Ok(_) | Err(libc::EINTR)), "{answer:?}");
    }
    guest.end().unwrap();
}

#[test]
fn a_guest_that_does_not_read_stops_only_itself() {
    let folder = tempfile::tempdir().unwrap();
    file(&folder, "a", &"x".repeat(1 << 20));
    let mut guest = Guest::new(folder.path(), Options::own());
    let node = guest.lookup(ROOT, "a").unwrap();
    let fh = guest.open(node, op::OPEN, 0).unwrap();
    let read = ReadIn { fh, size: 1 << 20, ..ReadIn::default() };
    guest.stream.set_nonblocking(true).unwrap();
    let header = InHeader { opcode: op::READ, nodeid: node, unique: 9, ..InHeader::default() };
    let message = encode(header, read.as_bytes());
    // Until the server reads no more: its memory is bounded.
    let mut sent = 0;
    let mut idle = 0;
    while idle < 50 && sent < 10_000 * message.len() {
        match guest.stream.write(&message) {
            Ok(count) => (sent, idle) = (sent + count, 0),
            Err(_) => {
                idle += 1;
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }
    assert!(sent < 10_000 * message.len(), "{sent}");
    // The server's threads end, although they wait for the guest.
    guest.end().unwrap();
}

#[test]
fn what_is_mounted_in_the_folder_is_not_entered() {
    if !dayfly_units::needs::root() {
        return;
    }
    common::own_mounts();
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("below");
    fs::create_dir(&below).unwrap();
    mount("none", &below, "tmpfs", MountFlags::empty(), None).unwrap();
    fs::write(below.join("secret"), "").unwrap();
    let mut guest = Guest::new(folder.path(), Options::own());
    assert_eq!(guest.lookup(ROOT, "below").unwrap_err(), libc::EXDEV);
    guest.end().unwrap();
}

#[test]
fn noise_is_answered() {
    let folder = tempfile::tempdir().unwrap();
    file(&folder, "a", "text");
    let mut guest = Guest::new(folder.path(), Options::own());
    let mut state = 1_u64;
    let mut random = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    for _ in 0..20_000 {
        let opcode = u32::try_from(random() % 56).unwrap();
        let quiet = [op::FORGET, op::BATCH_FORGET, op::INTERRUPT];
        let body: Vec<u8> = (0..random() % 100).map(|_| random().to_le_bytes()[0] & 3).collect();
        let node = random() % 4;
        if quiet.contains(&opcode) {
            guest.send(opcode, node, &body);
        } else {
            let _ = guest.call(opcode, node, &body);
        }
    }
    file(&folder, "after", "");
    guest.lookup(ROOT, "after").unwrap();
    guest.end().unwrap();
}

#[test]
fn the_kernels_own_file_systems_are_not_shared() {
    for path in ["/proc", "/sys", "/proc/self/fd"] {
        let (_here, there) = UnixStream::pair().unwrap();
        let end = serve(there.into(), open(Path::new(path)), Options::own());
        let text = end.unwrap_err().to_string();
        assert!(text.contains("belongs to the kernel"), "{path}: {text}");
    }
    let (_here, there) = UnixStream::pair().unwrap();
    let end = serve(there.into(), open(Path::new("/etc/passwd")), Options::own());
    assert!(end.unwrap_err().to_string().contains("expected a folder"));
}

/// A guest's kernel opens no FIFO at the server; one that does must not stop it.
#[test]
fn special_files_of_the_host_stop_no_worker() {
    use rustix::fs::{FileType, mknodat};
    let folder = tempfile::tempdir().unwrap();
    file(&folder, "a", "text");
    for (name, kind) in [("fifo", FileType::Fifo), ("socket", FileType::Socket)] {
        mknodat(CWD, folder.path().join(name), kind, Mode::from(0o666), 0).unwrap();
    }
    let mut guest = Guest::new(folder.path(), Options::own());
    let truncate = SetattrIn { valid: valid::SIZE, ..SetattrIn::default() };
    let create = CreateIn { flags: 1 | 0o1000, mode: 0o600, ..CreateIn::default() };
    // More often than there are workers.
    for _ in 0..2 * dayfly_volume::serve::WORKERS {
        for name in ["fifo", "socket"] {
            let node = guest.lookup(ROOT, name).unwrap();
            for flags in [0, 1, 2] {
                assert_eq!(guest.open(node, op::OPEN, flags), Err(libc::ENXIO));
            }
            assert_eq!(guest.with(op::SETATTR, node, &truncate), Err(libc::EINVAL));
            let body = [create.as_bytes(), name.as_bytes(), b"\0"].concat();
            assert_eq!(guest.call(op::CREATE, ROOT, &body), Err(libc::EEXIST));
            assert_eq!(guest.open(node, op::OPENDIR, 0), Err(libc::ENOTDIR));
        }
    }
    // A program of the host that holds a lease delays its own file only.
    let leased = fs::File::options().write(true).read(true).open(folder.path().join("a")).unwrap();
    // SAFETY: fcntl(2) with integer arguments; SIGIO, which breaking sends, is ignored by default.
    let set = unsafe {
        libc::signal(libc::SIGIO, libc::SIG_IGN);
        libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&leased), libc::F_SETLEASE, libc::F_WRLCK)
    };
    assert_eq!(set, 0);
    let node = guest.lookup(ROOT, "a").unwrap();
    assert_eq!(guest.open(node, op::OPEN, 0), Err(libc::EAGAIN));
    drop(leased);
    guest.open(node, op::OPEN, 0).unwrap();
    guest.end().unwrap();
}
