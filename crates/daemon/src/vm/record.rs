//! The record of a VM, `vm.json`, by which the next daemon finds it again.
//!
//! A record is written by rename, so it is complete or absent. The reader still checks it, because
//! an operator may have changed files in the run folder.

use crate::base::config::{Config, VmDir};
use crate::base::error::{ApiError, blocking};
use crate::model::facts::Facts;
use crate::model::live::Live;
use crate::model::vm_slot::{OLD_FIRST_UID, VmSlot};
use crate::vm::Vm;
use crate::vm::registry::Registry;
use dayfly_api::types::NetworkRequest;
use dayfly_units::{Name, VmId};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Version of this record's format. A daemon sweeps VMs whose records it cannot read.
const VERSION: u32 = 1;
/// The longest record that is read, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// The record of one VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// The VM's id.
    pub id: VmId,
    /// The VM's name.
    pub name: Name,
    /// The VM's slot.
    pub slot: u32,
    /// The user and group id of its VMM; absent in records of older daemons.
    #[serde(default)]
    pub uid: Option<u32>,
    /// Index of the VM's memory node.
    #[serde(default)]
    pub node: usize,
    /// The VM's immutable facts.
    pub facts: Facts,
    /// The VM's mutable state when the record was written.
    pub live: Live,
}

/// Why a record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The record's file.
        path: PathBuf,
        /// The error of the file system.
        #[source]
        source: io::Error,
    },
    /// The file is longer than any record.
    #[error("{}: expected at most {MAX_BYTES} bytes", .0.display())]
    TooLong(PathBuf),
    /// The file is not a record.
    #[error("{}: {source}", path.display())]
    Json {
        /// The record's file.
        path: PathBuf,
        /// Position and cause.
        #[source]
        source: serde_json::Error,
    },
    /// The record is from another version of dayflyd.
    #[error("{}: version: expected {VERSION}, got {got}", path.display())]
    Version {
        /// The record's file.
        path: PathBuf,
        /// The version in it.
        got: u32,
    },
    /// The record is that of another VM than the folder's.
    #[error("{}: id: expected {expected}, got {got}", path.display())]
    Id {
        /// The record's file.
        path: PathBuf,
        /// The id in the folder's name.
        expected: VmId,
        /// The id in the record.
        got: VmId,
    },
}

impl Record {
    /// The record of `vm` in its current state.
    #[must_use]
    pub fn of(vm: &Vm) -> Self {
        let (facts, live) = (vm.facts.clone(), vm.live());
        let VmSlot { id, slot, uid, node } = vm.vm_slot();
        let (name, uid) = (vm.name.clone(), Some(uid));
        Self { version: VERSION, id, name, slot, uid, node, facts, live }
    }

    /// The VM of this record, with the run directory `dir`.
    #[must_use]
    pub fn into_vm(self, dir: VmDir) -> Vm {
        let uid = self.uid.unwrap_or_else(|| OLD_FIRST_UID.saturating_add(self.slot));
        let vm_slot = VmSlot { id: self.id, slot: self.slot, uid, node: self.node };
        Vm::with(vm_slot, self.name, dir, self.facts, self.live)
    }

    /// Writes the record to `dir`, complete or not at all.
    ///
    /// # Errors
    /// The file system's error, with the path.
    pub fn write(&self, dir: &VmDir) -> io::Result<()> {
        write_whole(&dir.record(), &serde_json::to_vec(self)?)
    }

    /// Reads the record in `dir`, which must be that of VM `expected`.
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

    /// Every readable record in the run folder, in no order.
    pub fn all(config: &Config) -> impl Iterator<Item = Self> {
        let folders = std::fs::read_dir(config.vms()).into_iter().flatten();
        let ids =
            folders.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<VmId>().ok());
        ids.filter_map(|id| Self::read(&config.vm(id), id).ok())
    }
}

/// Addresses and network requests of the VMs that an earlier daemon left alive.
#[must_use]
pub fn addresses(config: &Config) -> Vec<(Ipv4Addr, NetworkRequest)> {
    Record::all(config)
        .filter(|record| record.live.phase.alive())
        .filter_map(|record| Some((record.live.network?.address, record.facts.network)))
        .collect()
}

/// Reads a JSON file of at most 1 MiB.
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
    serde_json::from_slice(&bytes)
        .map_err(|source| RecordError::Json { path: path.to_owned(), source })
}

/// Writes a file beside `path` and renames it over `path`. It is not synced, because the run folder
/// is not used after a reboot.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let beside = path.with_extension("json.new");
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", beside.display()));
    let mut file = File::create(&beside).map_err(named)?;
    file.write_all(bytes).map_err(named)?;
    std::fs::rename(&beside, path).map_err(named)
}

/// Writes the record of `vm`, if its folder still exists. Returns whether it is written, or the VM
/// is gone; if not, a new daemon finds an older record.
pub async fn note(registry: &Registry, vm: &Arc<Vm>) -> bool {
    // A file made while the folder is being removed would make the removal fail.
    let _one = vm.removal.lock().await;
    if !registry.has(vm.id) {
        return true;
    }
    let vm = vm.clone();
    let written = blocking(move || match Record::of(&vm).write(&vm.dir) {
        Err(e) if vm.dir.path().exists() => Err(ApiError::internal(e)),
        _ => Ok(()),
    });
    // [`ApiError::internal`] has logged the error. A VM without a record lives, and the next daemon
    // sweeps it.
    written.await.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use crate::model::disk::Disk;
    use crate::model::facts::GuestIdentity;
    use crate::model::state::Phase;
    use crate::vm::registry::Registry;
    use dayfly_store::{ChainLayer, Digest, ImageRef, KernelRef, VmLayer};

    fn vm(run: &Path) -> std::sync::Arc<Vm> {
        let config = Config { run: run.into(), ..fixture::config(run) };
        let facts = Facts {
            snapshot: Some("s".parse().unwrap()),
            ancestors: Vec::new(),
            fork: crate::model::facts::ForkFacts::default(),
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
        let vm =
            Registry::default().reserve(&config, None, facts, fixture::memory(), None).unwrap();
        let id = vm.id;
        vm.update(|live| {
            live.phase = Phase::Paused;
            let machine_id = "0".repeat(32);
            live.identity = Some(GuestIdentity { hostname: "h".into(), machine_id });
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

    #[tokio::test]
    async fn a_record_that_was_not_written_is_reported() {
        let run = tempfile::tempdir().unwrap();
        let config = Config { run: run.path().into(), ..fixture::config(run.path()) };
        let (registry, facts) = (Registry::default(), vm(run.path()).facts.clone());
        let vm = registry.reserve(&config, None, facts, fixture::memory(), None).unwrap();
        std::fs::create_dir_all(vm.dir.path()).unwrap();
        assert!(note(&registry, &vm).await);
        let before = std::fs::read(vm.dir.record()).unwrap();
        std::fs::create_dir(vm.dir.record().with_extension("json.new")).unwrap();
        vm.update(|live| live.phase = Phase::Paused);
        assert!(!note(&registry, &vm).await);
        assert_eq!(std::fs::read(vm.dir.record()).unwrap(), before);
    }

    #[test]
    fn a_vmm_of_an_older_daemon_gets_no_read_only_layers() {
        let run = tempfile::tempdir().unwrap();
        let vm = vm(run.path());
        assert!(vm.live().read_only_layers);
        let mut old = serde_json::to_value(Record::of(&vm)).unwrap();
        old["live"].as_object_mut().unwrap().remove("read_only_layers").unwrap();
        std::fs::write(vm.dir.record(), old.to_string()).unwrap();
        let adopted = Record::read(&vm.dir, vm.id).unwrap().into_vm(vm.dir.clone());
        assert!(!adopted.live().read_only_layers);
    }

    #[test]
    fn a_vm_that_an_older_daemon_named_as_a_host_of_the_internet_lives_on() {
        let run = tempfile::tempdir().unwrap();
        let vm = vm(run.path());
        let mut record = Record::of(&vm);
        record.name = "pypi.org".parse().unwrap();
        record.write(&vm.dir).unwrap();
        let old = Record::read(&vm.dir, vm.id).unwrap().into_vm(vm.dir.clone());
        let registry = Registry::default();
        let adopted = registry.adopt(old).unwrap();
        assert_eq!(
            (adopted.name.as_str(), registry.find("pypi.org").unwrap().id),
            ("pypi.org", vm.id)
        );
        // `ps` and programs parse it too.
        let shown = serde_json::to_value(adopted.shown()).unwrap();
        assert!(serde_json::from_value::<dayfly_api::types::Vm>(shown).is_ok());
    }

    #[test]
    fn an_adopted_vm_keeps_the_user_of_its_vmm() {
        let run = tempfile::tempdir().unwrap();
        let vm = vm(run.path());
        let mut record = Record::of(&vm);
        assert_eq!(record.uid, Some(vm.uid));
        record.uid = Some(77);
        assert_eq!(record.clone().into_vm(vm.dir.clone()).uid, 77);
        // As an older daemon wrote it.
        let mut json = serde_json::to_value(&record).unwrap();
        json.as_object_mut().unwrap().remove("uid");
        let old: Record = serde_json::from_value(json).unwrap();
        assert_eq!(old.into_vm(vm.dir.clone()).uid, 200_000 + vm.slot);
    }

    #[test]
    fn every_truncation_another_version_and_another_vm_are_refused() {
        let run = tempfile::tempdir().unwrap();
        let vm = vm(run.path());
        let mut record = Record::of(&vm);
        let bytes = serde_json::to_vec(&record).unwrap();
        for length in 0..bytes.len() {
            std::fs::write(vm.dir.record(), &bytes[..length]).unwrap();
            assert!(
                matches!(Record::read(&vm.dir, vm.id), Err(RecordError::Json { .. })),
                "{length}"
            );
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
