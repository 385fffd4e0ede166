//! A shared folder: any messages of /dev/fuse, while the host renames. Nothing outside of the
//! folder is read or changed.

use crate::events::Events;
use crate::target::{Heap, Outcome, Target, planted};
use dayfly_volume::fuzzing::Session;
use dayfly_volume::message::encode;
use dayfly_volume::wire::{
    CopyIn, CreateIn, EntryOut, FallocateIn, ForgetOne, FsyncIn, GetattrIn, GetxattrIn,
    IN_HEADER_BYTES, InHeader, InitIn, LinkIn, LseekIn, MkdirIn, MknodIn, OUT_HEADER_BYTES, OpenIn,
    OutHeader, ROOT, ReadIn, ReleaseIn, Rename2In, RenameIn, SetattrIn, SetxattrIn, WriteIn, op,
    valid,
};
use rustix::fs::{CWD, Mode, OFlags, RenameFlags, open, renameat_with};
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use zerocopy::{FromBytes, IntoBytes};

/// The targets of this file.
pub const TARGETS: &[Target] = &[Target {
    name: "volume",
    what: "messages of a guest to the server of a shared folder",
    stateful: true,
    most_bytes: 512,
    heap: Heap { fixed: 16 << 20, per_byte: 64 << 10 },
    run: session,
    seeds,
}];

/// Names that a guest may send, good and bad.
const NAMES: &[&[u8]] =
    &[b"a", b"d", b"l", b"new", b"fifo", b"..", b".", b"", b"../secret", b"l/secret", b"b"];
/// Names of extended attributes.
const ATTRIBUTES: &[&[u8]] = &[b"user.a", b"user.b", b"security.x", b"trusted.x", b"user.", b""];
/// Flags of RENAME2 and SETXATTR: none, NOREPLACE or CREATE, EXCHANGE or REPLACE, WHITEOUT, all.
const FLAGS: &[u32] = &[0, 1, 2, 4, u32::MAX];
/// What is outside of the folder.
const SECRET: &[u8] = b"the secret outside";
/// An event that is no message: the host exchanges the folder `d` and the link `l`.
const HOST: u8 = 0;
/// An event that is a message with any body.
const RAW: u8 = 1;
/// Added to an operation's number: the event is a message with a body of the right form.
const FORMED: u8 = 10;

fn formed(opcode: u32, rest: &[u8]) -> Vec<u8> {
    [&[u8::try_from(opcode).unwrap() + FORMED], rest].concat()
}

fn seeds() -> Vec<Vec<u8>> {
    let lookup = |name| formed(op::LOOKUP, &[1, name]);
    let read_only = 1;
    vec![
        // Found, opened, written, read, closed.
        [
            &[0][..],
            &lookup(0),
            &formed(op::OPEN, &[2, 2]),
            &formed(op::WRITE, &[2, 1, 0, 0, 3, b'x', b'y', b'z']),
            &formed(op::READ, &[2, 1, 0, 9]),
            &formed(op::RELEASE, &[2, 1]),
        ]
        .concat(),
        // A folder is read, and becomes a link.
        [
            &[0][..],
            &lookup(1),
            &formed(op::OPENDIR, &[2, 0]),
            &formed(op::READDIRPLUS, &[2, 1, 0, 10]),
            &[HOST],
            &formed(op::LOOKUP, &[2, 8]),
            &lookup(1),
        ]
        .concat(),
        // Names are made, moved and removed.
        [
            &[0][..],
            &formed(op::CREATE, &[1, 2, 3]),
            &formed(op::RENAME2, &[1, 1, 0, 3, 0]),
            &formed(op::SYMLINK, &[1, 3, 8]),
            &formed(op::UNLINK, &[1, 0]),
            &formed(op::MKDIR, &[1, 10]),
        ]
        .concat(),
        // Attributes.
        [
            &[read_only][..],
            &lookup(0),
            &formed(op::SETATTR, &[2, 8, 0, 3]),
            &formed(op::GETXATTR, &[2, 9, 0]),
            &[RAW, 3, 2, 4, 0, 0, 0, 0],
        ]
        .concat(),
    ]
}

/// A number: small ones, and those at the limits.
fn number(events: &mut Events<'_>) -> Option<u64> {
    Some(match events.byte()? {
        255 => u64::MAX,
        254 => i64::MAX.unsigned_abs(),
        253 => 1 << 62,
        252 => 1 << 40,
        251 => events.quad()?,
        250 => 1 << 20,
        small @ 0..=9 => small.into(),
        other => u64::from(other) << 6,
    })
}

fn small(events: &mut Events<'_>) -> Option<u32> {
    // A size, a mode or flags; larger numbers wrap.
    Some(u32::try_from(number(events)? & u64::from(u32::MAX)).unwrap())
}

/// A handle or a node.
fn id(events: &mut Events<'_>) -> Option<u64> {
    events.byte().map(|byte| u64::from(byte % 16))
}

fn name(events: &mut Events<'_>) -> Option<Vec<u8>> {
    events.one(NAMES).map(|name| [name, b"\0"].concat())
}

/// Bytes of a file that one message allocates or copies: the host's memory is not the subject.
fn bounded(length: u64) -> u64 {
    if i64::try_from(length).is_ok() { length & 0xffff } else { length }
}

/// A body of the right form for an operation; `None` at the end of the input.
fn body(opcode: u32, events: &mut Events<'_>) -> Option<Vec<u8>> {
    Some(match opcode {
        op::LOOKUP | op::UNLINK | op::RMDIR => name(events)?,
        op::FORGET => number(events)?.as_bytes().to_vec(),
        op::BATCH_FORGET => {
            let one = ForgetOne { nodeid: id(events)?, nlookup: number(events)? };
            [number(events)?.as_bytes(), one.as_bytes()].concat()
        }
        op::GETATTR => GetattrIn { flags: small(events)?, dummy: 0, fh: 1 }.as_bytes().to_vec(),
        op::SETATTR => setattr(events)?,
        op::SYMLINK => [name(events)?, name(events)?].concat(),
        op::MKNOD => {
            let kinds = [libc_mode::FIFO, libc_mode::FILE, libc_mode::SOCKET, libc_mode::DEVICE];
            let mode = events.one(&kinds)? | small(events)?;
            [MknodIn { mode, ..MknodIn::default() }.as_bytes(), &name(events)?].concat()
        }
        op::MKDIR => {
            [MkdirIn { mode: small(events)?, umask: 0 }.as_bytes(), &name(events)?].concat()
        }
        op::RENAME => {
            let start = RenameIn { newdir: id(events)? };
            [start.as_bytes(), &name(events)?, &name(events)?].concat()
        }
        op::RENAME2 => {
            let newdir = id(events)?;
            let (from, to) = (name(events)?, name(events)?);
            let flags = events.one(FLAGS)?;
            [Rename2In { newdir, flags, padding: 0 }.as_bytes(), &from, &to].concat()
        }
        op::LINK => [LinkIn { oldnodeid: id(events)? }.as_bytes(), &name(events)?].concat(),
        op::OPEN | op::OPENDIR => {
            OpenIn { flags: small(events)?, open_flags: 0 }.as_bytes().to_vec()
        }
        op::CREATE | op::TMPFILE => {
            let flags = small(events)?;
            let start = CreateIn { flags, mode: 0o600, ..CreateIn::default() };
            [start.as_bytes(), &name(events)?].concat()
        }
        _ => return data_body(opcode, events),
    })
}

/// Modes of mknod(2).
mod libc_mode {
    pub(super) const FIFO: u32 = 0o010_000;
    pub(super) const DEVICE: u32 = 0o020_000;
    pub(super) const FILE: u32 = 0o100_000;
    pub(super) const SOCKET: u32 = 0o140_000;
}

fn setattr(events: &mut Events<'_>) -> Option<Vec<u8>> {
    let valid = small(events)?;
    let (fh, size) = (id(events)?, number(events)?);
    let mut asked = SetattrIn { valid, fh, size, ..SetattrIn::default() };
    if valid & valid::MODE != 0 {
        asked.mode = small(events)?;
    }
    if valid & (valid::ATIME | valid::MTIME) != 0 {
        (asked.atime, asked.mtime) = (number(events)?, number(events)?);
        asked.mtimensec = small(events)?;
    }
    Some(asked.as_bytes().to_vec())
}

/// As [`body`], for operations on data and on extended attributes.
fn data_body(opcode: u32, events: &mut Events<'_>) -> Option<Vec<u8>> {
    Some(match opcode {
        op::READ | op::READDIR | op::READDIRPLUS => {
            let (fh, offset, size) = (id(events)?, number(events)?, small(events)?);
            ReadIn { fh, offset, size, ..ReadIn::default() }.as_bytes().to_vec()
        }
        op::WRITE => {
            let (fh, offset, flags) = (id(events)?, number(events)?, small(events)?);
            let data = events.bytes()?;
            let size = u32::try_from(data.len()).unwrap();
            let start = WriteIn { fh, offset, size, flags, ..WriteIn::default() };
            [start.as_bytes(), data].concat()
        }
        op::RELEASE | op::RELEASEDIR => {
            ReleaseIn { fh: id(events)?, ..ReleaseIn::default() }.as_bytes().to_vec()
        }
        op::FSYNC | op::FSYNCDIR => {
            FsyncIn { fh: id(events)?, flags: 1, padding: 0 }.as_bytes().to_vec()
        }
        op::SETXATTR => {
            let (name, flags) = (events.one(ATTRIBUTES)?, events.one(FLAGS)?);
            let value = events.bytes()?;
            let start = SetxattrIn { size: u32::try_from(value.len()).unwrap(), flags };
            [start.as_bytes(), name, b"\0", value].concat()
        }
        op::GETXATTR | op::LISTXATTR => {
            let start = GetxattrIn { size: small(events)?, padding: 0 };
            [start.as_bytes(), events.one(ATTRIBUTES)?, b"\0"].concat()
        }
        op::REMOVEXATTR => [events.one(ATTRIBUTES)?, b"\0"].concat(),
        op::FALLOCATE => {
            let (fh, offset) = (id(events)?, number(events)?);
            let (length, mode) = (bounded(number(events)?), small(events)?);
            FallocateIn { fh, offset, length, mode, padding: 0 }.as_bytes().to_vec()
        }
        op::LSEEK => {
            let (fh, offset, whence) = (id(events)?, number(events)?, small(events)?);
            LseekIn { fh, offset, whence, padding: 0 }.as_bytes().to_vec()
        }
        op::COPY_FILE_RANGE => {
            let (fh_in, off_in, nodeid_out) = (id(events)?, number(events)?, id(events)?);
            let (fh_out, off_out, len) = (id(events)?, number(events)?, bounded(number(events)?));
            let asked = CopyIn { fh_in, off_in, nodeid_out, fh_out, off_out, len, flags: 0 };
            asked.as_bytes().to_vec()
        }
        _ => events.bytes()?.to_vec(),
    })
}

/// What must not change: names and owners, and modes and times of files.
fn outside(outer: &Path) -> Vec<(String, u32, u32, i64, i64)> {
    let mut all: Vec<_> = fs::read_dir(outer)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let found = entry.path().symlink_metadata().unwrap();
            let changed = if found.is_dir() { (0, 0) } else { (found.ctime(), found.ctime_nsec()) };
            let name = entry.file_name().into_string().unwrap();
            let mode = if found.is_dir() { 0 } else { found.mode() };
            (name, mode, found.uid(), changed.0, changed.1)
        })
        .collect();
    all.sort_unstable();
    all
}

/// Checks an answer against its question.
fn check(header: InHeader, question: &[u8], answer: Option<&[u8]>) -> bool {
    let quiet = [op::FORGET, op::BATCH_FORGET, op::INTERRUPT].contains(&header.opcode);
    assert_eq!(answer.is_none(), quiet, "operation {}", header.opcode);
    let Some(answer) = answer else { return true };
    let (out, body) = OutHeader::read_from_prefix(answer).unwrap();
    assert_eq!((out.len as usize, out.unique), (answer.len(), header.unique));
    assert!((-4095..=0).contains(&out.error), "error {}", out.error);
    assert!(out.error == 0 || body.is_empty(), "an error with a body");
    assert!(!body.windows(SECRET.len()).any(|part| part == SECRET), "the secret was read");
    let room = match header.opcode {
        op::READ | op::READDIR | op::READDIRPLUS => {
            ReadIn::read_from_prefix(question).map_or(0, |(asked, _)| asked.size as usize)
        }
        op::GETXATTR | op::LISTXATTR => GetxattrIn::read_from_prefix(question)
            .map_or(0, |(asked, _)| (asked.size as usize).max(8)),
        _ => size_of::<EntryOut>() + 4096,
    };
    assert!(body.len() <= room, "operation {}: {} bytes for {room}", header.opcode, body.len());
    out.error == 0
}

fn session(input: &[u8]) -> Outcome {
    let mut events = Events::new(input);
    let Some(start) = events.byte() else { return Outcome::Refused };
    let outer = tempfile::tempdir_in(crate::scratch::folder()).unwrap();
    let shared = outer.path().join("shared");
    fs::create_dir_all(shared.join("d")).unwrap();
    fs::write(outer.path().join("secret"), SECRET).unwrap();
    fs::write(shared.join("a"), "text").unwrap();
    symlink("..", shared.join("l")).unwrap();
    let before = outside(outer.path());
    let folder = open(&shared, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let mut session = Session::new(folder, start & 1 == 1);
    let init = InitIn { major: 7, minor: 38, max_readahead: 0, flags: u32::MAX };
    let first = InHeader { opcode: op::INIT, unique: 1, ..InHeader::default() };
    session.answer(&encode(first, init.as_bytes())).unwrap();
    let mut succeeded = false;
    while let Some(event) = events.byte() {
        if event == HOST {
            let (d, l) = (shared.join("d"), shared.join("l"));
            let _ = renameat_with(CWD, d, CWD, l, RenameFlags::EXCHANGE);
            continue;
        }
        let opcode = match event {
            RAW => events.byte().map(u32::from),
            event => event.checked_sub(FORMED).map(u32::from),
        };
        let (Some(opcode), Some(nodeid)) = (opcode, id(&mut events)) else { break };
        let raw = event == RAW;
        let body = if raw { events.bytes().map(<[u8]>::to_vec) } else { body(opcode, &mut events) };
        let Some(body) = body else { break };
        let unique = 2 + events.rest().len() as u64;
        let header = InHeader { opcode, nodeid, unique, ..InHeader::default() };
        let message = encode(header, &body);
        let good = check(header, &message[IN_HEADER_BYTES..], session.answer(&message));
        planted(|| good && opcode == op::RENAME2 && body[8] == 2);
        succeeded |= good;
        let (nodes, open, handles) = session.counts();
        assert!(nodes <= 12 && open <= 9 && handles <= 6, "{nodes}, {open}, {handles}");
    }
    let root = InHeader { opcode: op::GETATTR, nodeid: ROOT, unique: 9, ..InHeader::default() };
    let asked = GetattrIn::default();
    let answer = session.answer(&encode(root, asked.as_bytes())).unwrap();
    assert!(answer.len() > OUT_HEADER_BYTES, "the root is always there");
    assert_eq!(outside(outer.path()), before, "something outside of the folder has changed");
    assert_eq!(fs::read(outer.path().join("secret")).unwrap(), SECRET);
    Outcome::of(succeeded)
}
