//! /etc/resolv.conf, if no other program maintains it.

use super::error::{IdentityError, Step};
use super::files::{Files, read};
use dayfly_api::agent::DOMAIN;
use rustix::fs::FileType;
use rustix::io::Errno;
use std::fmt::Write;
use std::net::Ipv4Addr;

const NAME: &str = "etc/resolv.conf";
/// The first line of a file that the agent wrote.
const MARK: &str = "# dayfly writes this file as long as it begins with this line.";

impl Files<'_> {
    /// Writes these nameservers if the file is missing, empty, written by the agent, or a dangling
    /// link. Any other file belongs to a program of the image that resolves names in another way,
    /// or to a user.
    pub(super) fn write_nameservers(&self, nameservers: &[Ipv4Addr]) -> Result<(), IdentityError> {
        let path = self.root.join(NAME);
        let failed = self.failed(Step::Network, NAME);
        let old = match rustix::fs::lstat(&path).map(|stat| FileType::from_raw_mode(stat.st_mode)) {
            Ok(FileType::RegularFile) => match read(&path) {
                Ok(Some(old)) if old.is_empty() || old.starts_with(MARK.as_bytes()) => Some(old),
                // A file that is too large was not written by the agent.
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
        if !nameservers.is_empty() {
            // Resolvers append the search domain to a name without a dot (resolv.conf(5): ndots is
            // 1).
            let _ = writeln!(text, "search {DOMAIN}");
        }
        for nameserver in nameservers {
            let _ = writeln!(text, "nameserver {nameserver}");
        }
        self.replace(NAME, old.as_deref(), text.as_bytes(), 0o644).map_err(failed)
    }
}
