//! Attributes of files as the guest sees them.

use crate::owner::Id;
use crate::wire::Attr;
use rustix::fs::{FileType, Statx};

/// For how many seconds the guest may believe attributes and names. A change on the host is visible
/// after at most this time.
pub const VALID_S: u64 = 1;

/// What the guest sees of a file.
#[must_use]
pub fn shown(stat: &Statx, user: Id, group: Id) -> Attr {
    Attr {
        ino: stat.stx_ino,
        size: stat.stx_size,
        blocks: stat.stx_blocks,
        atime: stat.stx_atime.tv_sec.cast_unsigned(),
        mtime: stat.stx_mtime.tv_sec.cast_unsigned(),
        ctime: stat.stx_ctime.tv_sec.cast_unsigned(),
        atimensec: stat.stx_atime.tv_nsec,
        mtimensec: stat.stx_mtime.tv_nsec,
        ctimensec: stat.stx_ctime.tv_nsec,
        mode: stat.stx_mode.into(),
        nlink: stat.stx_nlink,
        uid: user.shown(stat.stx_uid),
        gid: group.shown(stat.stx_gid),
        // A device of the host would be another device in the guest.
        rdev: 0,
        blksize: stat.stx_blksize,
        flags: 0,
    }
}

/// The type of an entry of a folder (linux/dirent.h: DT_REG and so on).
#[must_use]
pub fn entry_type(kind: FileType) -> u32 {
    match kind {
        FileType::Fifo => 1,
        FileType::CharacterDevice => 2,
        FileType::Directory => 4,
        FileType::BlockDevice => 6,
        FileType::RegularFile => 8,
        FileType::Symlink => 10,
        FileType::Socket => 12,
        FileType::Unknown => 0,
    }
}
