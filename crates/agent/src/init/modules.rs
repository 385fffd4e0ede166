//! Loading kernel modules in the order of the initramfs's list.

use super::early::Early;
use super::error::BootError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::path::Path;

/// The list: one path of an uncompressed `.ko` per line, in loading order. Empty lines and `#`
/// comments are skipped.
const LIST: &str = "/etc/dayfly/modules";

/// Shows that every module is loaded.
pub(super) struct Loaded(());

/// Loads the modules, which needs the early mounts. Without a list no module is loaded, because all
/// drivers are built in.
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
        // EEXIST: built in, or listed twice.
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => {
            let hint = match errno {
                Errno::NOEXEC => ": not an uncompressed module of this kernel",
                Errno::NOENT => {
                    ": no such file, or a symbol that a module before it should have brought"
                }
                _ => "",
            };
            Err(BootError::Module { path: path.to_owned(), errno, hint })
        }
    }
}
