//! Builds kernels: fetches Debian's packages, extracts the ELF file from a vmlinuz, and packs an
//! initramfs. The initramfs holds the agent and the modules that a guest needs to reach its root
//! disk. All modules are on one further disk, which each guest of the kernel has.

mod build;
mod error;
mod fetch;
mod modules;

pub use build::{GUEST_MODULES, INITRD_NAME, KernelArtefact, VMLINUX_NAME, build};
pub use dayfly_boot::{
    BootError, FormatError, KernelSource, MAX_KERNEL_BYTES, release_of, unpack_vmlinux,
};
pub use error::KernelError;
pub use fetch::{KernelTree, fetch_debian};
pub use modules::build_modules;
