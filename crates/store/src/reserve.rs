//! The reserve: disk space that only a gc may spend.
//!
//! On a full disk a gc must write before it can free: the live pages of a pack that is mostly
//! unused, or the folder into which an object is renamed before it is deleted. The reserve is the
//! file `reserve`, whose blocks are allocated and never written. A gc or a removal that meets a
//! full disk deletes the file and tries again. Afterwards the reserve is made anew, or later if
//! there is no space for it yet.

use crate::errors::{IoError, IoResult};
use crate::inner::{Inner, Store};
use dayfly_units::error::chain;
use dayfly_units::sync::lock;
use rustix::fs::fstatvfs;
use rustix::io::Errno;

/// The name of the file.
const FILE: &str = "reserve";
/// The size of the reserve on a large file system.
const MOST_BYTES: u64 = 64 << 20;
/// The most of a file system that is kept, in per cent.
const MOST_PERCENT: u64 = 3;

impl Store {
    /// Keeps a part of the disk for gc from now on: 64 MiB, which is more than a pack takes, or 3 %
    /// of a small file system. A file system that cannot allocate blocks ahead has no reserve.
    ///
    /// # Errors
    /// The host cannot make the file now, as on a full disk. Each gc and each removal tries again.
    pub fn keep_reserve(&self) -> Result<(), IoError> {
        let total = self.total_bytes()?;
        self.keep_reserve_of((total / 100 * MOST_PERCENT).min(MOST_BYTES))
    }

    fn keep_reserve_of(&self, bytes: u64) -> Result<(), IoError> {
        self.0.writable()?;
        let mut wanted = lock(&self.0.reserve);
        *wanted = bytes;
        self.0.make_reserve(bytes)
    }

    /// The size of the state folder's file system in bytes.
    fn total_bytes(&self) -> Result<u64, IoError> {
        let root = &self.0.root;
        let stat = fstatvfs(root).map_err(|e| {
            IoError::new("asking for the size of the disk of", root.path())(e.into())
        })?;
        Ok(stat.f_blocks.saturating_mul(stat.f_frsize))
    }
}

impl Inner {
    /// Makes the reserve, unless it has this size.
    fn make_reserve(&self, bytes: u64) -> IoResult<()> {
        let there = crate::gc::allocated(&self.root.path().join(FILE));
        if there >= bytes && (bytes > 0 || !self.root.has(FILE)?) {
            return Ok(());
        }
        self.root.unlink(FILE)?;
        if bytes == 0 {
            return Ok(());
        }
        match self.root.allocate(FILE, bytes) {
            Err(e) if e.source.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error()) => {
                tracing::warn!("no reserve for gc: {}", chain(&e));
                Ok(())
            }
            other => other,
        }
    }

    /// Runs `change`, which frees space. On a full disk it spends the reserve and runs it again.
    pub(crate) fn with_reserve<T, E>(
        &self,
        is_no_space: impl Fn(&E) -> bool,
        mut change: impl FnMut() -> Result<T, E>,
    ) -> Result<T, E> {
        match change() {
            Err(e) if is_no_space(&e) && self.spend_reserve() => change(),
            done => done,
        }
    }

    /// Deletes the reserve. Returns whether there was one.
    fn spend_reserve(&self) -> bool {
        let _wanted = lock(&self.reserve);
        let there = self.root.has(FILE).unwrap_or(false);
        there && self.root.unlink(FILE).is_ok()
    }

    /// Makes the reserve anew after it may have been spent.
    pub(crate) fn restore_reserve(&self) {
        let wanted = lock(&self.reserve);
        if *wanted == 0 {
            return;
        }
        if let Err(e) = self.make_reserve(*wanted) {
            tracing::warn!("gc has no reserve until there is space: {}", chain(&e));
        }
    }
}

#[cfg(test)]
#[path = "reserve_tests.rs"]
mod tests;
