//! Requests, structures and messages of linux/userfaultfd.h.

pub(super) const API: u64 = 0xaa;
/// The flag of userfaultfd(2) by which a process without rights makes a descriptor.
pub const USER_MODE_ONLY: libc::c_int = 1;
pub(super) const EVENT_PAGEFAULT: u8 = 0x12;
pub(super) const MODE_MISSING: u64 = 1;
pub(super) const COPY_DONTWAKE: u64 = 1;
pub(super) const WRITEPROTECT_DONTWAKE: u64 = 2;
/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`
pub const UFFDIO_API: u64 = 0xc018_aa3f;
/// `_IOWR(0xaa, 0x00, struct uffdio_register)`
pub const UFFDIO_REGISTER: u64 = 0xc020_aa00;
/// `_IOR(0xaa, 0x01, struct uffdio_range)`
pub const UFFDIO_UNREGISTER: u64 = 0x8010_aa01;
/// `_IOR(0xaa, 0x02, struct uffdio_range)`
pub const UFFDIO_WAKE: u64 = 0x8010_aa02;
/// `_IOWR(0xaa, 0x03, struct uffdio_copy)`
pub const UFFDIO_COPY: u64 = 0xc028_aa03;
/// `_IOWR(0xaa, 0x04, struct uffdio_zeropage)`
pub const UFFDIO_ZEROPAGE: u64 = 0xc020_aa04;
/// `_IOWR(0xaa, 0x06, struct uffdio_writeprotect)`
pub const UFFDIO_WRITEPROTECT: u64 = 0xc018_aa06;
/// `struct uffd_msg`: the event at 0, the address of a fault at 16.
pub const MESSAGE_BYTES: usize = 32;

#[repr(C)]
pub(super) struct Api {
    pub(super) api: u64,
    pub(super) features: u64,
    pub(super) ioctls: u64,
}

#[repr(C)]
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) len: u64,
}

#[repr(C)]
pub(super) struct Register {
    pub(super) range: Range,
    pub(super) mode: u64,
    pub(super) ioctls: u64,
}

#[repr(C)]
pub(super) struct Copy {
    pub(super) dst: u64,
    pub(super) src: u64,
    pub(super) len: u64,
    pub(super) mode: u64,
    pub(super) copy: i64,
}

#[repr(C)]
pub(super) struct Zeropage {
    pub(super) range: Range,
    pub(super) mode: u64,
    pub(super) zeropage: i64,
}

#[repr(C)]
pub(super) struct Writeprotect {
    pub(super) range: Range,
    pub(super) mode: u64,
}
