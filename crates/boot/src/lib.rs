//! # boot
//!
//! Reads and writes the files that a Linux kernel starts from: kernels, their modules, static ELF
//! programs, and initramfs archives. Guests (`dayfly-image`) and the machine (`dayfly-machine`) are
//! started from the same code.
//!
//! This crate treats every file as hostile: each field is checked against the file's bounds and
//! against a limit before it is used. It starts no program and writes no file.
//!
//! | file | concern |
//! |---|---|
//! | `source` | finds kernel and modules in an unpacked package |
//! | `kernel` | bzImage to ELF, the kernel's release |
//! | `payload` | decompresses a bzImage's payload |
//! | `elf` | checks of kernels and programs, removal of debug sections |
//! | `modules` | modules with their dependencies, in load order |
//! | `cpio` | the archive format of an initramfs |
//! | `initramfs` | the entries with which every initramfs begins |

mod cpio;
pub mod elf;
mod error;
mod fields;
mod files;
#[doc(hidden)]
pub mod fuzzing;
mod initramfs;
mod kernel;
pub mod modules;
mod payload;
mod source;

#[cfg(test)]
mod samples;

pub use cpio::Archive;
pub use error::{BootError, FormatError};
pub use files::{MAX_KERNEL_BYTES, read_capped};
pub use initramfs::initramfs;
pub use kernel::{release_of, unpack_vmlinux};
pub use source::KernelSource;
