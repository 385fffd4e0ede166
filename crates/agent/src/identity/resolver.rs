//! /etc/resolv.conf, where nobody else cares for it.

use super::files::{Files, read};
use super::{IdentityError, Step};
use rustix::fs::FileType;
use rustix::io::Errno;
use std::fmt::Write;
use std::net::Ipv4Addr;

const NAME: &str = "etc/resolv.conf";
/// The first line of a file of ours.
const MARK: &str = "# dayfly writes this file as long as it begins with this line.";

impl Files<'_> {
    /// Names these nameservers, where the file is missing, empty, ours, or a link to nothing. Anything else is
    /// somebody's: a program's of the image that asks for names in its own way, or a user's.
    pub(super) fn write_nameservers(&self, nameservers: &[Ipv4Addr]) -> Result<(), IdentityError> {
        let path = self.root.join(NAME);
        let failed = self.failed(Step::Network, NAME);
        let old = match rustix::fs::lstat(&path).map(|stat| FileType::from_raw_mode(stat.st_mode)) {
            Ok(FileType::RegularFile) => match read(&path) {
                Ok(Some(old)) if old.is_empty() || old.starts_with(MARK.as_bytes()) => Some(old),
                // One that is too large is none of ours.
                Ok(Some(_)) | Err(Errno::FBIG) => return Ok(()),
                Ok(None) => None,
                Err(errno) => return Err(failed(errno)),
            },
            Ok(FileType::Symlink) => match rustix::fs::stat(&path) {
                Err(Errno::NOENT) => None,
                _ => return Ok(()),
            },
            Ok(_) => return Ok(()),
            Err(Errno::NOENT) => None,
            Err(errno) => return Err(failed(errno)),
        };
        if nameservers.is_empty() && old.is_none() {
            return Ok(());
        }
        let mut text = format!("{MARK}\n");
        for nameserver in nameservers {
            let _ = writeln!(text, "nameserver {nameserver}");
        }
        self.replace(NAME, old.as_deref(), text.as_bytes(), 0o644).map_err(failed)
    }
}
