//! The machine's disk: a sparse ext4 image.

use crate::errors::{InitError, StartError};
use crate::files::FileError;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

/// Makes an image of `bytes` at `path`. A failure leaves no file at `path`.
pub(crate) fn make(path: &Path, bytes: u64) -> Result<(), InitError> {
    let staged = path.with_extension("new");
    let wrong = |why: String| InitError::Disk { path: path.to_owned(), why };
    let file = File::create(&staged).map_err(|e| FileError::new("making", &staged, e))?;
    file.set_len(bytes).map_err(|e| FileError::new("making", &staged, e))?;
    // No blocks are reserved for root. Inode tables and journal of a new sparse file are zero
    // already.
    let out = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-m", "0", "-i", "65536", "-L", "dayfly"])
        .args(["-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"])
        .arg(&staged)
        .env("PATH", path_with_sbin())
        .output()
        .map_err(|e| wrong(e.to_string()))?;
    if !out.status.success() {
        return Err(wrong(String::from_utf8_lossy(&out.stderr).trim().to_owned()));
    }
    file.sync_all()
        .and_then(|()| fs::rename(&staged, path))
        .map_err(|e| FileError::new("making", path, e).into())
}

/// After an unclean end: replays the journal and makes safe repairs. Without e2fsck on the host,
/// mounting replays the journal.
pub(crate) fn check(path: &Path) -> Result<(), StartError> {
    let run = Command::new("e2fsck").arg("-p").arg(path).env("PATH", path_with_sbin()).output();
    // e2fsck's exit codes: 0 clean, 1 repaired, 4 and more damage that needs a decision.
    match run {
        Ok(out) if out.status.code().is_none_or(|code| code > 2) => Err(StartError::Disk {
            path: path.to_owned(),
            said: String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).trim().to_owned(),
        }),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// PATH with the folders of mke2fs, which a user's PATH may lack.
fn path_with_sbin() -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin");
    path
}
