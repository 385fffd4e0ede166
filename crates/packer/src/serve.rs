//! The packer's process: classifies RAM, then writes packs until the daemon closes the socket.

use crate::jail::MAX_THREADS;
use crate::wire::{self, Begin, FULL_BYTES, FromPacker, add_frame, receive, send};
use dayfly_store::{BlockHint, RamDisk, RamSource, limit_threads};
use dayfly_units::error::chain;
use dayfly_units::sync::lock;
use rustix::fd::OwnedFd;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::Mutex;
use std::thread::Builder;

/// The most disk files and block indexes.
const MAX_FILES: usize = 2048;
/// The longest sheet: a hint for each frame of 256 GiB.
const MAX_SHEET_BYTES: u64 = 1 << 30;

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Serves the daemon at the other end of `socket` until it closes it.
///
/// # Errors
/// A message is invalid, or RAM or a disk cannot be read, or a pack not written. The daemon
/// receives the cause, if it still listens.
pub fn run(socket: &OwnedFd) -> io::Result<()> {
    work(socket).inspect_err(|e| {
        let failed = FromPacker::Failed { text: chain(e), is_no_space: false };
        let _ = send(socket, &failed.encode(), &[]);
    })
}

fn work(socket: &OwnedFd) -> io::Result<()> {
    limit_threads(MAX_THREADS);
    let Some(source) = begin(socket)? else { return Ok(()) };
    classify(&source, socket)?;
    std::thread::scope(|scope| {
        let write = || write_packs(&source, socket);
        let start = |_| Builder::new().spawn_scoped(scope, write).ok();
        // The VM's control group may allow fewer threads (`--pids-max`).
        let threads: Vec<_> = (1..threads()).map_while(start).collect();
        let own = write();
        let ended = threads.into_iter().map(|thread| thread.join());
        let ended = ended.map(|ended| ended.unwrap_or_else(|_| Err(invalid("a thread panicked"))));
        own.and(ended.collect())
    })
}

/// The number of packs that are written at a time.
#[must_use]
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS))
}

/// Receives what there is to do; `None` if the daemon closes the socket first.
fn begin(socket: &OwnedFd) -> io::Result<Option<RamSource>> {
    let (mut buffer, mut fds) = (Vec::new(), Vec::new());
    let Some(packet) = receive(socket, &mut buffer, &mut fds)? else { return Ok(None) };
    let json = packet.strip_prefix(b"b").ok_or_else(|| invalid("expected a beginning"))?;
    let Begin { tenant, free, hints, disks } = serde_json::from_slice(json)?;
    let [memory, sheet] =
        <[OwnedFd; 2]>::try_from(fds).map_err(|_| invalid("expected RAM and a sheet"))?;
    let (free, hints) = read_sheet(File::from(sheet), free, hints)?;
    let expected = disks.iter().flatten().map(|(_, has_index)| 1 + usize::from(*has_index)).sum();
    let mut files = Vec::new();
    while files.len() < expected {
        let mut more = Vec::new();
        let Some(packet) = receive(socket, &mut buffer, &mut more)? else { return Ok(None) };
        files.append(&mut more);
        if packet != b"f" || files.len() > expected.min(MAX_FILES) {
            return Err(invalid("expected files of disks"));
        }
    }
    let mut files = files.into_iter().map(File::from);
    let mut next = || files.next().ok_or_else(|| invalid("expected another file"));
    let mut disk = |(digest, has_index)| {
        let file = next()?;
        let index = if has_index { Some(next()?) } else { None };
        Ok(RamDisk { file, digest, index })
    };
    let disks = disks.into_iter().map(|files| files.into_iter().map(&mut disk).collect());
    let disks = disks.collect::<io::Result<_>>()?;
    let tenant = tenant.parse().map_err(io::Error::other)?;
    let source = RamSource::open(tenant, memory.into(), free, hints, disks);
    source.map(Some).map_err(io::Error::other)
}

type Hints = Vec<(u32, BlockHint)>;

fn read_sheet(mut sheet: File, free: u64, hints: u64) -> io::Result<(Vec<Range<u32>>, Hints)> {
    let mut bytes = Vec::new();
    (&mut sheet).take(MAX_SHEET_BYTES).read_to_end(&mut bytes)?;
    wire::read_sheet(&bytes, free, hints).ok_or_else(|| invalid("a sheet of another length"))
}

fn classify(source: &RamSource, socket: &OwnedFd) -> io::Result<()> {
    let packet = Mutex::new(Vec::with_capacity(wire::MAX_BYTES));
    let classified = source.classify(&|first, frames| {
        let mut packet = lock(&packet);
        for (frame, found) in (first..).zip(frames) {
            if let Some(found) = found {
                add_frame(&mut packet, frame, found);
            }
        }
        if packet.len() >= FULL_BYTES {
            send(socket, &packet, &[])?;
            packet.clear();
        }
        Ok(())
    });
    let classified = classified.map_err(io::Error::other)?;
    let packet = lock(&packet);
    if !packet.is_empty() {
        send(socket, &packet, &[])?;
    }
    send(socket, &FromPacker::Classified(classified).encode(), &[])
}

/// Writes packs until the daemon closes the socket.
fn write_packs(source: &RamSource, socket: &OwnedFd) -> io::Result<()> {
    let mut buffer = Vec::new();
    loop {
        let mut fds = Vec::new();
        let Some(packet) = receive(socket, &mut buffer, &mut fds)? else { return Ok(()) };
        let pack = wire::pack_of(packet).zip(fds.pop());
        let ((number, frames), file) = pack.ok_or_else(|| invalid("expected a pack"))?;
        let file = File::from(file);
        let written = source.write_pack(&frames, &file);
        // Before the daemon looks at it.
        drop(file);
        match written {
            Ok(()) => send(socket, &FromPacker::Written(number).encode(), &[])?,
            // The other threads go on to wait, so the error is sent here.
            Err(e) => {
                let failed = FromPacker::Failed { text: chain(&e), is_no_space: e.is_no_space() };
                send(socket, &failed.encode(), &[])?;
                return Err(io::Error::other(e));
            }
        }
    }
}
