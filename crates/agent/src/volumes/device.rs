//! The kernel's FUSE device. If FUSE is a module, it is loaded from the disk with the kernel's
//! modules.

use super::mount::MountError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::Path;

/// The device.
const DEVICE: &str = "/dev/fuse";
/// The module, below the folder of the kernel's modules.
const MODULE: &str = "kernel/fs/fuse/fuse.ko";
/// What follows the module's name, and the flags with which the kernel loads it:
/// `MODULE_INIT_COMPRESSED_FILE` of linux/module.h.
const FORMS: [(&str, u32); 4] = [("", 0), (".xz", 4), (".zst", 4), (".gz", 4)];

/// Opens the device, without waiting in reads.
pub(super) fn open() -> Result<OwnedFd, MountError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let open = || rustix::fs::open(DEVICE, flags, Mode::empty());
    match open() {
        Err(Errno::NOENT | Errno::NODEV | Errno::NXIO) => {
            load()?;
            open()
        }
        opened => opened,
    }
    .map_err(|errno| MountError::Device { errno })
}

fn load() -> Result<(), MountError> {
    let uname = rustix::system::uname();
    let folder = format!("/lib/modules/{}", uname.release().to_string_lossy());
    let mut why = Errno::NOENT;
    for (form, flags) in FORMS {
        let path = Path::new(&folder).join(format!("{MODULE}{form}"));
        let loaded = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .and_then(|file| finit_module(&file, flags));
        match loaded {
            Ok(()) | Err(Errno::EXIST) => return Ok(()),
            Err(Errno::NOENT) => {}
            Err(errno) => why = errno,
        }
    }
    Err(MountError::Module { folder, errno: why })
}

fn finit_module(file: &OwnedFd, flags: u32) -> Result<(), Errno> {
    rustix::system::finit_module(file, c"", flags.cast_signed())
}
