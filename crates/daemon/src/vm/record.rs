//! What a daemon writes down of a VM, so that the next daemon finds it again: `vm.json`.
//!
//! Written by rename, so it is whole or not there. Read with care all the same: the run folder survives a crash, not a reboot,
//! but a human may have been there.

use super::registry::Seat;
use super::{Facts, Live, Vm};
use crate::config::VmDir;
use dayfly_units::{Name, VmId};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// The version of this record; a daemon sweeps what it cannot read.
const VERSION: u32 = 1;
/// The longest record that is read.
const MAX_BYTES: u64 = 1 << 20;

/// A VM, written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// Its id.
    pub id: VmId,
    /// Its name.
    pub name: Name,
    /// Its slot.
    pub slot: u32,
    /// Its memory node.
    #[serde(default)]
    pub node: usize,
    /// What does not change.
    pub facts: Facts,
    /// What it was when this was written.
    pub live: Live,
}

/// Why a record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Longer than any record.
    #[error("{}: expected at most {MAX_BYTES} bytes", .0.display())]
    TooLong(PathBuf),
    /// Not a record.
    #[error("{}: {source}", path.display())]
    Json {
        /// Which.
        path: PathBuf,
        /// Where, and why.
        #[source]
        source: serde_json::Error,
    },
    /// Of another version of dayflyd.
    #[error("{}: version: expected {VERSION}, got {got}", path.display())]
    Version {
        /// Which.
        path: PathBuf,
        /// What it says.
        got: u32,
    },
    /// In another VM's folder.
    #[error("{}: id: expected {expected}, got {got}", path.display())]
    Id {
        /// Which.
        path: PathBuf,
        /// The folder's name.
        expected: VmId,
        /// What it says.
        got: VmId,
    },
}

impl Record {
    /// `vm` as it is now.
    #[must_use]
    pub fn of(vm: &Vm) -> Self {
        let (facts, live) = (vm.facts.clone(), vm.live());
        let (id, name, slot, node) = (vm.id, vm.name.clone(), vm.slot, vm.node);
        Self { version: VERSION, id, name, slot, node, facts, live }
    }

    /// The VM it tells of.
    #[must_use]
    pub fn into_vm(self, dir: VmDir) -> Vm {
        let seat = Seat { id: self.id, slot: self.slot, node: self.node };
        Vm::with(seat, self.name, dir, self.facts, self.live)
    }

    /// Writes it; whole or not at all.
    ///
    /// # Errors
    /// The file system's, with the path.
    pub fn write(&self, dir: &VmDir) -> io::Result<()> {
        write_whole(&dir.record(), &serde_json::to_vec(self)?)
    }

    /// Reads the record of the VM whose folder this is.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn read(dir: &VmDir, expected: VmId) -> Result<Self, RecordError> {
        let path = dir.record();
        let record: Self = read_json(&path)?;
        if record.version != VERSION {
            return Err(RecordError::Version { path, got: record.version });
        }
        if record.id != expected {
            return Err(RecordError::Id { path, expected, got: record.id });
        }
        Ok(record)
    }
}

/// Reads a small JSON file.
///
/// # Errors
/// [`RecordError`].
pub fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, RecordError> {
    let io = |source| RecordError::Io { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    File::open(path).map_err(io)?.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(RecordError::TooLong(path.to_owned()));
    }
    serde_json::from_slice(&bytes).map_err(|source| RecordError::Json { path: path.to_owned(), source })
}

/// Writes a file beside `path` and renames it over. Not synced: the run folder means nothing after a reboot.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let beside = path.with_extension("json.new");
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", beside.display()));
    let mut file = File::create(&beside).map_err(named)?;
    file.write_all(bytes).map_err(named)?;
    std::fs::rename(&beside, path).map_err(named)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::fixture;
    use crate::vm::registry::Registry;
    use crate::vm::state::Phase;
    use crate::vm::{Disk, Who};
    use dayfly_store::{ChainLayer, Digest, ImageRef, KernelRef, VmLayer};

    fn vm(run: &Path) -> std::sync::Arc<Vm> {
        let config = Config { run: run.into(), ..fixture::config(run) };
        let facts = Facts {
            snapshot: Some("s".parse().unwrap()),
            fork: crate::vm::ForkFacts::default(),
            image: "i".parse().unwrap(),
            kernel: KernelRef {
                name: "k".parse().unwrap(),
                release: "6.12".into(),
                digest: Digest::of(b"k"),
            },
            config: Default::default(),
            vcpus: 4,
            memory_bytes: 1 << 30,
            nets: 0,
            network: Default::default(),
            created_unix_ms: 7,
            ephemeral: true,
            labels: [("a".to_owned(), "b".to_owned())].into(),
        };
        let vm = Registry::default().reserve(&config, None, facts, fixture::memory(), None).unwrap();
        let id = vm.id;
        vm.update(|live| {
            live.phase = Phase::Paused;
            live.who = Some(Who { hostname: "h".into(), machine_id: "0".repeat(32) });
            let layer = |number| VmLayer { vm: id, disk: 0, number };
            live.disks = vec![Disk {
                image: ImageRef { name: "i".parse().unwrap(), digest: Digest::of(b"i") },
                size_bytes: 1 << 30,
                layers: vec![ChainLayer::Frozen(layer(0))],
                writable: Some(layer(1)),
            }];
            live.no_snapshot = Some("x".into());
        });
        std::fs::create_dir_all(vm.dir.path()).unwrap();
        vm
    }

    #[test]
    fn a_record_reads_back_whole() {
        let run = tempfile::tempdir().unwrap();
        let vm = vm(run.path());
        let record = Record::of(&vm);
        record.write(&vm.dir).unwrap();
        let back = Record::read(&vm.dir, vm.id).unwrap();
        assert_eq!(back, record);
        let again = back.into_vm(vm.dir.clone());
        assert_eq!((again.live(), again.shown()), (vm.live(), vm.shown()));
        assert_eq!(std::fs::read_dir(vm.dir.path()).unwrap().count(), 1, "nothing beside it stays");
    }

    #[test]
    fn every_truncation_another_version_and_another_vm_are_refused() {
        let run = tempfile::tempdir().unwrap();
        let vm = vm(run.path());
        let mut record = Record::of(&vm);
        let bytes = serde_json::to_vec(&record).unwrap();
        for length in 0..bytes.len() {
            std::fs::write(vm.dir.record(), &bytes[..length]).unwrap();
            assert!(matches!(Record::read(&vm.dir, vm.id), Err(RecordError::Json { .. })), "{length}");
        }
        record.write(&vm.dir).unwrap();
        assert!(matches!(Record::read(&vm.dir, VmId::random()), Err(RecordError::Id { .. })));
        record.version = 2;
        record.write(&vm.dir).unwrap();
        assert!(matches!(Record::read(&vm.dir, vm.id), Err(RecordError::Version { got: 2, .. })));
        let long = vec![b' '; usize::try_from(MAX_BYTES).unwrap() + 1];
        std::fs::write(vm.dir.record(), long).unwrap();
        assert!(matches!(Record::read(&vm.dir, vm.id), Err(RecordError::TooLong(_))));
    }
}
