//! Messages of /dev/fuse as they lie in memory (linux/fuse.h, version 7.31 to 7.45).
//!
//! Numbers have the byte order of the host; guest and host have the same architecture.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The version of the protocol that the server speaks.
pub const MAJOR: u32 = 7;
/// The newest minor version of which the server uses anything.
pub const MINOR: u32 = 38;
/// The oldest minor version that the server accepts: Linux 5.4.
pub const LEAST_MINOR: u32 = 31;

/// The most bytes of a file in one message.
pub const MAX_DATA_BYTES: usize = 1 << 20;
/// The longest message of a guest: [`MAX_DATA_BYTES`] and what comes before them.
pub const MAX_MESSAGE_BYTES: usize = MAX_DATA_BYTES + 4096;
/// Bytes of [`InHeader`].
pub const IN_HEADER_BYTES: usize = size_of::<InHeader>();
/// Bytes of [`OutHeader`].
pub const OUT_HEADER_BYTES: usize = size_of::<OutHeader>();

/// The root folder's node.
pub const ROOT: u64 = 1;

/// Numbers of operations (enum fuse_opcode).
#[expect(missing_docs, reason = "the names of linux/fuse.h")]
pub mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
}

/// Features that a guest's kernel offers and the server may accept (FUSE_INIT).
pub mod feature {
    /// Several reads of one file at once.
    pub const ASYNC_READ: u32 = 1;
    /// Writes of more than 4 KiB.
    pub const BIG_WRITES: u32 = 1 << 5;
    /// The kernel drops cached pages if time or size of a file have changed.
    pub const AUTO_INVAL_DATA: u32 = 1 << 12;
    /// READDIRPLUS exists.
    pub const DO_READDIRPLUS: u32 = 1 << 13;
    /// The kernel chooses between READDIR and READDIRPLUS.
    pub const READDIRPLUS_AUTO: u32 = 1 << 14;
    /// Direct I/O in several requests at once.
    pub const ASYNC_DIO: u32 = 1 << 15;
    /// Several lookups in one folder at once.
    pub const PARALLEL_DIROPS: u32 = 1 << 18;
    /// `max_pages` of the answer counts.
    pub const MAX_PAGES: u32 = 1 << 22;
    /// Writes and truncation remove set-uid bits on the server's side.
    pub const HANDLE_KILLPRIV_V2: u32 = 1 << 28;

    /// What the server accepts.
    pub const WANTED: u32 = ASYNC_READ
        | BIG_WRITES
        | AUTO_INVAL_DATA
        | DO_READDIRPLUS
        | READDIRPLUS_AUTO
        | ASYNC_DIO
        | PARALLEL_DIROPS
        | MAX_PAGES
        | HANDLE_KILLPRIV_V2;
}

/// Bits of [`SetattrIn::valid`].
#[expect(missing_docs, reason = "the names of linux/fuse.h")]
pub mod valid {
    pub const MODE: u32 = 1;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
}

/// [`GetattrIn::flags`]: `fh` is a handle.
pub const GETATTR_FH: u32 = 1;
/// [`WriteIn::write_flags`]: pages of the guest's cache, not a write(2).
pub const WRITE_CACHE: u32 = 1;
/// [`FsyncIn::flags`]: data only.
pub const FSYNC_DATA: u32 = 1;
/// [`OpenOut::open_flags`]: cached pages of the file are still right.
pub const KEEP_CACHE: u32 = 1 << 1;

macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        #[expect(missing_docs, reason = "the fields of linux/fuse.h")]
        pub struct $name { $(pub $field: $kind),* }
    )*};
}

structures! {
    /// Before each message of the guest.
    InHeader {
        len: u32, opcode: u32, unique: u64, nodeid: u64,
        uid: u32, gid: u32, pid: u32, total_extlen: u16, padding: u16,
    }
    /// Before each answer and notification.
    OutHeader { len: u32, error: i32, unique: u64 }
    /// INIT, without the fields that Linux 5.17 has added.
    InitIn { major: u32, minor: u32, max_readahead: u32, flags: u32 }
    /// Answer to INIT.
    InitOut {
        major: u32, minor: u32, max_readahead: u32, flags: u32,
        max_background: u16, congestion_threshold: u16, max_write: u32, time_gran: u32,
        max_pages: u16, map_alignment: u16, flags2: u32, unused: [u32; 7],
    }
    /// Attributes of a file.
    Attr {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32,
        mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32,
    }
    /// A name's node, and for how long the guest may believe it.
    EntryOut {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64,
        entry_valid_nsec: u32, attr_valid_nsec: u32, attr: Attr,
    }
    /// Answer to GETATTR and SETATTR.
    AttrOut { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr }
    /// FORGET.
    ForgetIn { nlookup: u64 }
    /// One of BATCH_FORGET.
    ForgetOne { nodeid: u64, nlookup: u64 }
    /// BATCH_FORGET, before its [`ForgetOne`]s.
    BatchForgetIn { count: u32, dummy: u32 }
    /// GETATTR.
    GetattrIn { flags: u32, dummy: u32, fh: u64 }
    /// SETATTR.
    SetattrIn {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64,
        atime: u64, mtime: u64, ctime: u64, atimensec: u32, mtimensec: u32, ctimensec: u32,
        mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    /// MKNOD, before the name.
    MknodIn { mode: u32, rdev: u32, umask: u32, padding: u32 }
    /// MKDIR, before the name.
    MkdirIn { mode: u32, umask: u32 }
    /// RENAME, before both names.
    RenameIn { newdir: u64 }
    /// RENAME2, before both names.
    Rename2In { newdir: u64, flags: u32, padding: u32 }
    /// LINK, before the name.
    LinkIn { oldnodeid: u64 }
    /// OPEN and OPENDIR.
    OpenIn { flags: u32, open_flags: u32 }
    /// CREATE, before the name; TMPFILE.
    CreateIn { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    /// Answer to OPEN and OPENDIR; follows [`EntryOut`] in the answer to CREATE.
    OpenOut { fh: u64, open_flags: u32, padding: u32 }
    /// RELEASE and RELEASEDIR.
    ReleaseIn { fh: u64, flags: u32, release_flags: u32, lock_owner: u64 }
    /// READ, READDIR and READDIRPLUS.
    ReadIn {
        fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    /// WRITE, before the data.
    WriteIn {
        fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64,
        flags: u32, padding: u32,
    }
    /// Answer to WRITE and COPY_FILE_RANGE.
    WriteOut { size: u32, padding: u32 }
    /// Answer to STATFS.
    StatfsOut {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64,
        bsize: u32, namelen: u32, frsize: u32, padding: u32, reserved: [u32; 6],
    }
    /// FSYNC and FSYNCDIR.
    FsyncIn { fh: u64, flags: u32, padding: u32 }
    /// SETXATTR, before name and value.
    SetxattrIn { size: u32, flags: u32 }
    /// GETXATTR, before the name; LISTXATTR.
    GetxattrIn { size: u32, padding: u32 }
    /// Answer to GETXATTR and LISTXATTR of size 0.
    GetxattrOut { size: u32, padding: u32 }
    /// ACCESS.
    AccessIn { mask: u32, padding: u32 }
    /// INTERRUPT.
    InterruptIn { unique: u64 }
    /// FALLOCATE.
    FallocateIn { fh: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    /// LSEEK.
    LseekIn { fh: u64, offset: u64, whence: u32, padding: u32 }
    /// Answer to LSEEK.
    LseekOut { offset: u64 }
    /// COPY_FILE_RANGE.
    CopyIn {
        fh_in: u64, off_in: u64, nodeid_out: u64, fh_out: u64, off_out: u64, len: u64, flags: u64,
    }
    /// An entry of a folder, before the name, which is padded to 8 bytes.
    Dirent { ino: u64, off: u64, namelen: u32, kind: u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_kernel() {
        assert_eq!((IN_HEADER_BYTES, OUT_HEADER_BYTES), (40, 16));
        assert_eq!((size_of::<InitOut>(), size_of::<Attr>(), size_of::<EntryOut>()), (64, 88, 128));
        assert_eq!((size_of::<AttrOut>(), size_of::<SetattrIn>()), (104, 88));
        assert_eq!((size_of::<ReadIn>(), size_of::<WriteIn>()), (40, 40));
        assert_eq!((size_of::<StatfsOut>(), size_of::<CopyIn>()), (80, 56));
        assert_eq!((size_of::<Dirent>(), size_of::<FallocateIn>()), (24, 32));
    }
}
