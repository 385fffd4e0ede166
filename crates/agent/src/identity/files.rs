//! The files that name a machine.
//!
//! Each file is replaced by a rename. Creating a file and freeing the replaced one touches many of
//! a clone's pages, which must be copied during the clone's start. So a seal prepares a
//! second file for each of them in [`PREPARED`], with its block on disk. An identity writes the
//! prepared file and exchanges the two (`RENAME_EXCHANGE`), which is just as atomic and causes half
//! the page faults. The replaced file becomes the prepared file for the next identity. If a
//! prepared file does not fit, a new file is made.

use super::error::{IdentityError, Step};
use crate::small_file::{self, SmallFileError};
use rustix::fs::{CWD, FileType, Gid, Mode, OFlags, RenameFlags, Stat, Uid};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Maximum bytes read of a file that is to be changed.
const MAX_BYTES: usize = 1 << 20;
/// The folder of the prepared files; only root may enter it.
const PREPARED: &str = "var/lib/dayfly/spare";
/// The files that have a prepared file.
const NAMED: [&str; 4] = ["etc/hostname", "etc/hosts", "etc/machine-id", COPY];
/// The machine's identity, for programs in the guest.
const CLONE_ID: &str = "run/dayfly/clone-id";
/// D-Bus's copy of the machine id, or a link to it.
const COPY: &str = "var/lib/dbus/machine-id";
/// Seeds and keys that two machines must not share. Their programs create new ones.
const STALE: [&str; 6] = [
    "var/lib/systemd/random-seed",
    "var/lib/urandom/random-seed",
    "var/lib/misc/random-seed",
    "var/lib/seedrng/seed.credit",
    "var/lib/seedrng/seed.no-credit",
    "var/lib/NetworkManager/secret_key",
];

/// The files below `root`.
pub(super) struct Files<'a> {
    pub(super) root: &'a Path,
}

impl Files<'_> {
    /// Before a snapshot: does as much as possible in advance for the identity that follows. Errors
    /// are ignored, because the identity then does the work.
    pub(super) fn prepare(&self) {
        // This also fills the kernel's cache of negative directory entries.
        let _ = self.drop_stale();
        let mode = Mode::from_raw_mode(0o700);
        for folder in ["var/lib/dayfly", PREPARED] {
            let _ = rustix::fs::mkdir(self.root.join(folder), mode);
        }
        for name in NAMED {
            let _ = self.prepare_file(name);
        }
    }

    fn prepared(&self, name: &str) -> PathBuf {
        self.root.join(PREPARED).join(name.replace('/', "-"))
    }

    fn prepare_file(&self, name: &str) -> Result<(), Errno> {
        let (path, prepared) = (self.root.join(name), self.prepared(name));
        let stat = match rustix::fs::lstat(&path) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => {
                Some(stat)
            }
            // An image may lack these files. D-Bus's copy gets one only if the copy exists.
            Err(Errno::NOENT) if name != COPY => None,
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno),
        };
        if open_prepared(&prepared, stat.as_ref()).is_ok() {
            return Ok(());
        }
        match rustix::fs::unlink(&prepared) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
        let bytes =
            read(&path)?.filter(|b| !b.is_empty()).unwrap_or_else(|| b"uninitialized\n".to_vec());
        write_new(
            &prepared,
            &bytes,
            stat.as_ref().map_or(0o644, |s| s.st_mode & 0o7777),
            stat.as_ref(),
        )
    }

    /// Replaces a file, unless it has these bytes already. An existing file keeps its mode.
    pub(super) fn replace(
        &self,
        name: &str,
        old: Option<&[u8]>,
        new: &[u8],
        mode: u32,
    ) -> Result<(), Errno> {
        let path = self.root.join(name);
        if old == Some(new) || self.exchange(name, new, mode).is_ok() {
            return Ok(());
        }
        let stat = rustix::fs::stat(&path).ok();
        let mode = stat.as_ref().map_or(mode, |s| s.st_mode & 0o7777);
        let temporary = temporary(&path).ok_or(Errno::INVAL)?;
        match rustix::fs::unlink(&temporary) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
        let done = write_new(&temporary, new, mode, stat.as_ref())
            .and_then(|()| rustix::fs::renameat(CWD, &temporary, CWD, &path));
        if done.is_err() {
            let _ = rustix::fs::unlink(&temporary);
        }
        done
    }

    /// Writes the prepared file and exchanges it with the file. If the file does not exist, the
    /// prepared file is moved to its path.
    fn exchange(&self, name: &str, new: &[u8], mode: u32) -> Result<(), Errno> {
        let (path, prepared) = (self.root.join(name), self.prepared(name));
        let stat = match rustix::fs::lstat(&path) {
            Ok(stat) => Some(stat),
            Err(Errno::NOENT) => None,
            Err(errno) => return Err(errno),
        };
        let file = open_prepared(&prepared, stat.as_ref())?;
        // Truncated first, because a reader of the earlier file may still have it open.
        if rustix::fs::fstat(&file)?.st_size > i64::try_from(new.len()).map_err(|_| Errno::FBIG)? {
            rustix::fs::ftruncate(&file, new.len() as u64)?;
        }
        let mut rest = new;
        let mut at = 0;
        while !rest.is_empty() {
            let n = rustix::io::pwrite(&file, rest, at)?;
            at += n as u64;
            rest = rest.get(n..).unwrap_or_default();
        }
        let how = if stat.is_some() {
            RenameFlags::EXCHANGE
        } else {
            rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))?;
            RenameFlags::NOREPLACE
        };
        rustix::fs::renameat_with(CWD, &prepared, CWD, &path, how)
    }

    pub(super) fn failed(&self, step: Step, name: &str) -> impl Fn(Errno) -> IdentityError + use<> {
        let path = self.root.join(name);
        move |errno| IdentityError::File { step, path: path.clone(), errno }
    }

    /// Writes /etc/hostname and returns the name that was in it.
    pub(super) fn write_hostname(&self, name: &str) -> Result<Option<String>, IdentityError> {
        let path = self.root.join("etc/hostname");
        let failed = self.failed(Step::HostnameFile, "etc/hostname");
        let old = read(&path).map_err(&failed)?;
        self.replace("etc/hostname", old.as_deref(), format!("{name}\n").as_bytes(), 0o644)
            .map_err(&failed)?;
        let old = old.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned());
        Ok(old.filter(|name| !name.is_empty()))
    }

    /// Edits /etc/hosts so that the new name resolves and the old one does not.
    pub(super) fn fix_hosts(&self, old: Option<&str>, new: &str) -> Result<(), IdentityError> {
        let path = self.root.join("etc/hosts");
        let failed = self.failed(Step::HostsFile, "etc/hosts");
        let before = read(&path).map_err(&failed)?;
        let text = before.as_deref().map(String::from_utf8_lossy).unwrap_or_default();
        let after = hosts(&text, old, new);
        self.replace("etc/hosts", before.as_deref(), after.as_bytes(), 0o644).map_err(&failed)
    }

    /// Writes the machine id. Returns whether it changed or was missing.
    pub(super) fn write_machine_id(&self, id: &str) -> Result<bool, IdentityError> {
        let line = format!("{id}\n");
        let path = self.root.join("etc/machine-id");
        let failed = self.failed(Step::MachineId, "etc/machine-id");
        let old = read(&path).map_err(&failed)?;
        let changed = old.as_deref() != Some(line.as_bytes());
        self.replace("etc/machine-id", old.as_deref(), line.as_bytes(), 0o444).map_err(&failed)?;
        // Usually a link to /etc/machine-id; a regular file must be changed too.
        let copy = self.root.join(COPY);
        let failed = self.failed(Step::MachineId, COPY);
        match rustix::fs::lstat(&copy) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => {
                let old = read(&copy).map_err(&failed)?;
                self.replace(COPY, old.as_deref(), line.as_bytes(), 0o444).map_err(&failed)?;
            }
            Ok(_) | Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(errno) => return Err(failed(errno)),
        }
        Ok(changed)
    }

    /// Removes the files that two machines must not share.
    pub(super) fn drop_stale(&self) -> Result<(), IdentityError> {
        for name in STALE {
            match rustix::fs::unlink(self.root.join(name)) {
                Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(errno) => return Err(self.failed(Step::StaleState, name)(errno)),
            }
        }
        Ok(())
    }

    /// The content of clone-id, which [`Self::publish`] wrote last.
    pub(super) fn published(&self) -> Result<Option<Vec<u8>>, IdentityError> {
        read(&self.root.join(CLONE_ID)).map_err(self.failed(Step::Publish, CLONE_ID))
    }

    /// Writes the machine's id to /run/dayfly/clone-id, whose present content is `old`. The last
    /// step of an identity.
    pub(super) fn publish(&self, id: &str, old: Option<&[u8]>) -> Result<(), IdentityError> {
        let (folder, name) = ("run/dayfly", CLONE_ID);
        for part in ["run", folder] {
            match rustix::fs::mkdir(self.root.join(part), Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(self.failed(Step::Publish, folder)(errno)),
            }
        }
        let failed = self.failed(Step::Publish, name);
        self.replace(name, old, format!("{id}\n").as_bytes(), 0o644).map_err(&failed)
    }
}

/// Reads a file. `None` if the file does not exist or is no regular file: such a file has no text
/// to keep, and is replaced if possible.
pub(super) fn read(path: &Path) -> Result<Option<Vec<u8>>, Errno> {
    match small_file::read(path, MAX_BYTES) {
        Err(SmallFileError::Kind { .. }) => Ok(None),
        read => read.map_err(|error| error.errno()),
    }
}

/// Opens a prepared file for writing, if it can replace a file with `stat`: a regular file with one
/// link, and with the same mode and owner.
fn open_prepared(path: &Path, stat: Option<&Stat>) -> Result<OwnedFd, Errno> {
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let own = rustix::fs::fstat(&file)?;
    let same = |stat: &Stat| {
        own.st_mode == stat.st_mode && own.st_uid == stat.st_uid && own.st_gid == stat.st_gid
    };
    let plain = FileType::from_raw_mode(own.st_mode) == FileType::RegularFile && own.st_nlink == 1;
    if plain && stat.is_none_or(same) { Ok(file) } else { Err(Errno::INVAL) }
}

/// Writes a new file, with the owner of `like` if there is one.
fn write_new(path: &Path, bytes: &[u8], mode: u32, like: Option<&Stat>) -> Result<(), Errno> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600))?;
    let mut rest = bytes;
    while !rest.is_empty() {
        let n = rustix::io::write(&file, rest)?;
        rest = rest.get(n..).unwrap_or_default();
    }
    if let Some(like) = like {
        rustix::fs::fchown(
            &file,
            Some(Uid::from_raw(like.st_uid)),
            Some(Gid::from_raw(like.st_gid)),
        )?;
    }
    rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))
}

fn temporary(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    Some(path.with_file_name(format!(".{name}.dayfly")))
}

/// The text of /etc/hosts in which `new` names this machine instead of `old`.
pub(crate) fn hosts(text: &str, old: Option<&str>, new: &str) -> String {
    let loopback = |address: &str| address.starts_with("127.") || address == "::1";
    // The old name stays if it is "localhost" or the new name.
    let old = old.filter(|old| *old != new && *old != "localhost");
    let mut out = String::with_capacity(text.len() + 64);
    let mut named = false;
    for line in text.lines() {
        // `lines` leaves all but the last of several carriage returns.
        let line = line.trim_end_matches('\r');
        let (entry, comment) = line.split_at(line.find('#').unwrap_or(line.len()));
        let mut fields = entry.split_ascii_whitespace();
        let address = fields.next().unwrap_or_default();
        let names: Vec<&str> = fields.collect();
        if !loopback(address) {
            out.push_str(line);
        } else if names.iter().any(|n| Some(*n) == old) {
            let kept = names.iter().map(|n| if Some(*n) == old { new } else { n });
            out.push_str(address);
            for name in kept {
                out.push(' ');
                out.push_str(name);
            }
            if !comment.is_empty() {
                out.push(' ');
                out.push_str(comment);
            }
            named = true;
        } else {
            named |= names.contains(&new);
            out.push_str(line);
        }
        out.push('\n');
    }
    if out.is_empty() {
        out.push_str("127.0.0.1 localhost\n::1 localhost\n");
    }
    if !named {
        out.push_str("127.0.1.1 ");
        out.push_str(new);
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_new_name_resolves_and_the_old_one_does_not() {
        assert_eq!(hosts("", None, "a"), "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 a\n");
        assert_eq!(
            hosts(
                "127.0.0.1\tlocalhost\n127.0.1.1 old old.x # me\n10.0.0.1 old\n",
                Some("old"),
                "new"
            ),
            "127.0.0.1\tlocalhost\n127.0.1.1 new old.x # me\n10.0.0.1 old\n"
        );
        assert_eq!(
            hosts("127.0.0.1 localhost new", Some("old"), "new"),
            "127.0.0.1 localhost new\n"
        );
        assert_eq!(
            hosts("127.0.0.1 localhost\n", Some("localhost"), "new"),
            "127.0.0.1 localhost\n127.0.1.1 new\n"
        );
        let once = hosts("127.0.0.1 a\r\r\n10.0.0.1 b\r\r\r\n", None, "a");
        assert_eq!(once, "127.0.0.1 a\n10.0.0.1 b\n");
    }

    proptest! {
        #[test]
        fn a_chain_of_clones_does_not_grow_the_file(
            text in "([a-z0-9.: \t#\n]{0,200})",
            names in proptest::collection::vec("[a-z]{1,8}", 1..20),
        ) {
            let mut now = hosts(&text, None, "first");
            let lines = now.lines().count();
            let mut old = "first".to_owned();
            for name in names {
                now = hosts(&now, Some(&old), &name);
                let has = now.lines().any(|l| {
                    let l = l.split('#').next().unwrap_or_default();
                    let mut fields = l.split_ascii_whitespace();
                    fields.next().is_some_and(|a| a.starts_with("127.") || a == "::1")
                        && fields.any(|n| n == name)
                });
                prop_assert!(has, "{name} in {now:?}");
                old = name;
            }
            prop_assert_eq!(now.lines().count(), lines);
        }
    }
}
