//! Kernel modules, in the order of the list that came with the initramfs.

use super::BootError;
use super::mounts::Early;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::path::Path;

/// One path of an uncompressed `.ko` a line, in loading order; empty lines and `#` comments count for nothing.
const LIST: &str = "/etc/dayfly/modules";

/// Every module is loaded.
pub(super) struct Loaded(());

/// Loads them; modules need the early mounts. Without a list there are none to load: everything is built in.
pub(super) fn load(_early: Early) -> Result<Loaded, BootError> {
    let list = match std::fs::read_to_string(LIST) {
        Ok(list) => list,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            return Err(BootError::File { path: LIST.into(), what: "read", errno });
        }
    };
    for line in list.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')) {
        load_one(Path::new(line))?;
    }
    Ok(Loaded(()))
}

fn load_one(path: &Path) -> Result<(), BootError> {
    let loaded = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .and_then(|file| rustix::system::finit_module(&file, c"", 0));
    match loaded {
        // Built in, or listed twice.
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => {
            let hint = match errno {
                Errno::NOEXEC => ": not an uncompressed module of this kernel",
                Errno::NOENT => ": no such file, or a symbol that a module before it should have brought",
                _ => "",
            };
            Err(BootError::Module { path: path.to_owned(), errno, hint })
        }
    }
}
