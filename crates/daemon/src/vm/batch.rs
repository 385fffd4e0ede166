//! VMs of one request, all of which exist or none: also if the daemon ends in the middle.
//!
//! ```text
//!  <run>/batches/<id>      the ids of the VMs, one a line, while the request is unanswered
//!
//!  Batch::begin ─▶ add(id) before the record of each VM ─▶ commit: the file is deleted
//! ```
//!
//! Each VM has a record once it runs. The next daemon discards the VMs in the files that it finds,
//! because the request was never answered. The file is not synced, as the records are not.

use crate::base::config::Config;
use dayfly_units::{VmId, sync::lock};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// An unanswered request for several VMs. The guard of each VM has a reference, so that the file
/// outlives the removal of VMs whose request failed.
#[derive(Debug)]
pub struct Batch {
    path: PathBuf,
    file: Mutex<File>,
}

fn named(path: &Path, e: &io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}

impl Batch {
    /// A batch for a request for `count` VMs. One VM needs none, because it has a record or not.
    ///
    /// # Errors
    /// The file system's error, with the path.
    pub fn of(config: &Config, count: u32) -> io::Result<Option<Arc<Self>>> {
        (count > 1).then(|| Self::begin(config).map(Arc::new)).transpose()
    }

    /// A batch for one VM that is not to stay if its request is not answered, although it has a
    /// record before.
    ///
    /// # Errors
    /// The file system's error, with the path.
    pub fn of_one(config: &Config) -> io::Result<Arc<Self>> {
        Self::begin(config).map(Arc::new)
    }

    fn begin(config: &Config) -> io::Result<Self> {
        let folder = config.batches();
        let path = folder.join(VmId::random().to_string());
        let made = std::fs::create_dir_all(&folder).and_then(|()| File::create_new(&path));
        Ok(Self { file: Mutex::new(made.map_err(|e| named(&path, &e))?), path })
    }

    /// Adds a VM, which has no record yet.
    ///
    /// # Errors
    /// The file system's error, with the path.
    pub fn add(&self, vm: VmId) -> io::Result<()> {
        let line = format!("{vm}\n");
        lock(&self.file).write_all(line.as_bytes()).map_err(|e| named(&self.path, &e))
    }

    /// Ends the batch: from now on each of its VMs stays.
    ///
    /// # Errors
    /// The file system's error, with the path.
    pub fn commit(&self) -> io::Result<()> {
        std::fs::remove_file(&self.path).map_err(|e| named(&self.path, &e))
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        match std::fs::remove_file(&self.path) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                tracing::warn!("{}: {e}; the next start removes it", self.path.display());
            }
            _ => {}
        }
    }
}

/// The VMs of the batches that an earlier daemon left unanswered.
#[must_use]
pub fn unanswered(config: &Config) -> BTreeSet<VmId> {
    let files = std::fs::read_dir(config.batches()).into_iter().flatten().flatten();
    let texts = files.filter_map(|entry| std::fs::read_to_string(entry.path()).ok());
    let ids = |text: String| text.lines().filter_map(|id| id.parse().ok()).collect::<Vec<_>>();
    texts.flat_map(ids).collect()
}

/// Forgets the batches of an earlier daemon, whose VMs are removed.
///
/// # Errors
/// The file system's error, with the path.
pub fn forget(config: &Config) -> io::Result<()> {
    let folder = config.batches();
    match std::fs::remove_dir_all(&folder) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(named(&folder, &e)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    #[test]
    fn the_next_daemon_finds_the_vms_of_unanswered_batches_only() {
        let folder = tempfile::tempdir().unwrap();
        let config = fixture::config(folder.path());
        assert_eq!(unanswered(&config), BTreeSet::new());
        let vms: Vec<VmId> = std::iter::repeat_with(VmId::random).take(3).collect();
        let begin = || Batch::of_one(&config).unwrap();
        let (answered, failed, unfinished) = (begin(), begin(), begin());
        answered.add(vms[0]).unwrap();
        failed.add(vms[1]).unwrap();
        unfinished.add(vms[2]).unwrap();
        unfinished.add(vms[1]).unwrap();
        assert_eq!(unanswered(&config), vms.iter().copied().collect());
        answered.commit().unwrap();
        drop((answered, failed));
        assert_eq!(unanswered(&config), [vms[1], vms[2]].into());
        forget(&config).unwrap();
        assert_eq!(unanswered(&config), BTreeSet::new());
        forget(&config).unwrap();
    }
}
