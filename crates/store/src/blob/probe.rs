//! What a store needs of its file system, tried when the store opens. Otherwise the first snapshot
//! would fail, after minutes of work.

use super::{Dir, IfTaken, Stage};
use crate::errors::{IoError, IoResult};
use dayfly_sys::writers::{Writers, writers};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, fstatfs, seek};
use rustix::io::Errno;
use std::fs::File;
use std::path::PathBuf;

/// Length of the file in which a hole is looked for, in bytes.
const FILE_BYTES: u64 = 1 << 20;

/// Why a file system cannot have a store.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: expected a file system that {expected}, got {got}; choose a folder on ext4, xfs or btrfs \
     (--state)",
    root.display()
)]
pub struct UnfitError {
    /// The store's folder.
    pub root: PathBuf,
    /// What the file system lacks.
    pub expected: &'static str,
    /// The file system's name, or its number of statfs(2).
    pub got: String,
    /// The error that the kernel reported, if it was asked.
    #[source]
    pub source: Option<std::io::Error>,
}

/// File systems by their number in statfs(2) (linux/magic.h), and whether other hosts may use them
/// too.
const KNOWN: [(u32, &str, bool); 16] = [
    (0xef53, "ext2, ext3 or ext4", false),
    (0x5846_5342, "xfs", false),
    (0x9123_683e, "btrfs", false),
    (0xf2f5_2010, "f2fs", false),
    (0x2fc1_2fc1, "zfs", false),
    (0x0102_1994, "tmpfs", false),
    (0x794c_7630, "overlayfs", false),
    (0x6573_5546, "FUSE", false),
    (0x0102_1997, "9p", false),
    (0x4d44, "vfat", false),
    (0x2011_bab0, "exfat", false),
    (0x6969, "NFS", true),
    (0xff53_4d42, "CIFS", true),
    (0xfe53_4d42, "SMB", true),
    (0x00c3_6400, "Ceph", true),
    (0x6b41_4653, "AFS", true),
];

/// The file system's name, and whether other hosts may use it too.
fn named(number: u32) -> (String, bool) {
    let known = KNOWN.iter().find(|(of, ..)| *of == number);
    known.map_or_else(
        || (format!("the file system with the number {number:#x}"), false),
        |(_, name, remote)| ((*name).to_owned(), *remote),
    )
}

/// The number of the file system in statfs(2), if the kernel reports it.
pub(crate) fn number(root: &Dir) -> Option<u32> {
    let stat = fstatfs(&root.fd).ok()?;
    // The numbers have 32 bits; the field is a signed word.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "see above")]
    Some(stat.f_type as u32)
}

/// Refuses a file system that other hosts may use too: flock(2) does not keep their daemons out.
pub(crate) fn local(root: &Dir) -> Result<(), UnfitError> {
    match number(root).map(named) {
        Some((got, true)) => {
            let root = root.path().to_owned();
            Err(UnfitError { root, expected: "only this host uses", got, source: None })
        }
        _ => Ok(()),
    }
}

/// Tries what the store does later, in a stage. What the store can do without is logged. A failure
/// that says nothing about the file system, such as a full disk, is no error here.
pub(crate) fn features(root: &Dir, staging: &Dir) -> Result<(), UnfitError> {
    let Ok(stage) = Stage::new(staging, &format!("probe-{}", std::process::id())) else {
        return Ok(());
    };
    let failed = |expected: &'static str, source: std::io::Error| -> Result<(), UnfitError> {
        if !means_lacking(&source) {
            tracing::debug!(error = %source, "not known: a file system that {expected}");
            return Ok(());
        }
        let got = number(root).map_or_else(|| "an unknown one".to_owned(), |n| named(n).0);
        Err(UnfitError { root: root.path().to_owned(), expected, got, source: Some(source) })
    };
    let Ok(file) = stage.create("a").and_then(|file| {
        stage.write_at("a", &file, &[1; 4096], 0)?;
        Ok(file)
    }) else {
        return Ok(());
    };
    let refuse = stage.rename("a", &stage, "b", IfTaken::Refuse);
    refuse.or_else(|e| failed("has RENAME_NOREPLACE", e.source))?;
    let exchange = stage
        .create("c")
        .and_then(|_| stage.rename("c", &stage, "b", IfTaken::Exchange))
        .and_then(|()| stage.rename("c", &stage, "b", IfTaken::Exchange));
    exchange.or_else(|e| failed("has RENAME_EXCHANGE", e.source))?;
    stage.link("b", &stage, "d").or_else(|e| failed("has hard links", e.source))?;
    let has_holes = has_holes(&stage, &file)
        .or_else(|e| failed("reports holes (SEEK_HOLE)", e.source).map(|()| true))?;
    if !has_holes {
        tracing::warn!("this file system has no holes: each disk takes its full length");
    }
    if punches(&stage, &file).is_err_and(|e| means_lacking(&e.source)) {
        tracing::warn!("this file system cannot free a range of a file: discards free nothing");
    }
    if stage.open("b").is_ok_and(|b| {
        drop(file);
        writers(&b).is_ok_and(|answer| answer == Writers::Unknown)
    }) {
        tracing::warn!("this file system has no leases: each frozen layer is copied");
    }
    Ok(())
}

/// Whether the error says that the file system cannot do the operation at all.
fn means_lacking(e: &std::io::Error) -> bool {
    let errno = e.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::PERM))
}

fn has_holes(stage: &Dir, file: &File) -> IoResult<bool> {
    stage.step("looking for a hole in", "b")?;
    let failed =
        |e: std::io::Error| IoError::new("looking for a hole in", &stage.path().join("b"))(e);
    file.set_len(FILE_BYTES).map_err(failed)?;
    let hole = seek(file, SeekFrom::Hole(0));
    Ok(hole.map_err(|e| failed(e.into()))? < FILE_BYTES)
}

fn punches(stage: &Dir, file: &File) -> IoResult<()> {
    stage.step("making a hole in", "b")?;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file, flags, 0, 4096).map_err(stage.fail("making a hole in", "b"))
}

#[cfg(test)]
#[path = "probe_tests.rs"]
mod tests;
