//! The record of a VM, `vm.json`, by which the next daemon finds it again.
//!
//! A record is written by rename, so it is complete or absent. The reader still checks it, because
//! an operator may have changed files in the run folder.
//!
//! | format | adds |
//! |---|---|
//! | 1 | |
//! | 2 | `format`, `boot_id`; unknown fields survive |
//!
//! `format` is what the writer knew. `version` is the lowest format that a reader must know. A
//! later format that only adds fields keeps the `version`, so that a daemon can be rolled back.
//! Daemons of format 1 know only `version`, and require a 1.

use crate::base::config::VmDir;
use crate::base::error::{ApiError, Outcome, blocking};
use crate::model::facts::Facts;
use crate::model::live::Live;
use crate::model::state::Phase;
use crate::model::vm_slot::{OLD_FIRST_UID, VmSlot};
use crate::vm::Vm;
use crate::vm::registry::Registry;
use crate::vm::unknown::{Carried, Unknown};
use dayfly_api::types::ErrorCode;
use dayfly_host::process::boot_id;
use dayfly_units::{Name, VmId};
use dayfly_vmm::control::ExitRecord;
use dayfly_vmm::meter::{self, METER_BYTES, Metered};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use tokio::sync::MutexGuard;

/// The format that this daemon writes, and the latest that it knows.
const FORMAT: u32 = 2;
/// The lowest format that a reader of this daemon's records must know.
const READABLE_SINCE: u32 = 1;
/// The longest record that is read or written, in bytes.
pub const MAX_BYTES: u64 = 1 << 20;

/// The record of one VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The lowest format that a reader must know.
    version: u32,
    /// The format that the writer knew.
    #[serde(default = "first_format")]
    format: u32,
    /// The host's boot in which the record was written; absent in format 1. VMs of another boot are
    /// gone.
    #[serde(default)]
    boot_id: Option<String>,
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
    #[serde(skip)]
    unknown: Unknown,
}

const fn first_format() -> u32 {
    1
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
    #[error(
        "{}: expected at most {MAX_BYTES} bytes, got {got}; the VM's labels or its image's \
         environment are too long",
        path.display()
    )]
    TooLong {
        /// The record's file.
        path: PathBuf,
        /// Its length.
        got: u64,
    },
    /// The file is not a record.
    #[error("{}: {source}", path.display())]
    Json {
        /// The record's file.
        path: PathBuf,
        /// Position and cause.
        #[source]
        source: serde_json::Error,
    },
    /// A later version of dayflyd wrote the record.
    #[error(
        "{}: version: expected 1 to {FORMAT}, got {got}; a later version of dayflyd reads it",
        path.display()
    )]
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
        let Carried { version, unknown } = vm.carried.clone();
        let version = version.max(READABLE_SINCE);
        let boot_id = this_boot().map(ToOwned::to_owned);
        let format = FORMAT;
        Self { version, format, boot_id, id, name, slot, uid, node, facts, live, unknown }
    }

    /// Whether the record was written in the host's current boot. `true` if that is not known.
    #[must_use]
    pub fn is_of_this_boot(&self) -> bool {
        is_this_boot(self.boot_id.as_deref())
    }

    /// The VM of this record, with the run directory `dir`.
    #[must_use]
    pub fn into_vm(self, dir: VmDir) -> Vm {
        let uid = self.uid.unwrap_or_else(|| OLD_FIRST_UID.saturating_add(self.slot));
        let vm_slot = VmSlot { id: self.id, slot: self.slot, uid, node: self.node };
        let mut vm = Vm::with(vm_slot, self.name, dir, self.facts, self.live);
        vm.carried = Carried { version: self.version, unknown: self.unknown };
        vm
    }

    /// The record's JSON, with the fields that a later daemon added.
    ///
    /// # Errors
    /// The error of serde; no record causes one.
    pub fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
        if self.unknown.is_empty() {
            return serde_json::to_vec(self);
        }
        let mut value = serde_json::to_value(self)?;
        self.unknown.add_to(&mut value);
        serde_json::to_vec(&value)
    }

    /// Writes the record to `dir`, complete or not at all. If it fails, the record before stays.
    ///
    /// # Errors
    /// The record is too long, or the file system's error.
    pub fn write(&self, dir: &VmDir) -> Result<(), RecordError> {
        let path = dir.record();
        let json = |source| RecordError::Json { path: path.clone(), source };
        let bytes = self.encode().map_err(json)?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(RecordError::TooLong { path, got: bytes.len() as u64 });
        }
        write_whole(&path, &bytes)
    }

    /// Reads the record in `dir`, which must be that of VM `expected`.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn read(dir: &VmDir, expected: VmId) -> Result<Self, RecordError> {
        let path = dir.record();
        let bytes = read_bytes(&path)?;
        Self::decode(path, &bytes, expected)
    }

    /// Decodes the bytes of the record at `path`.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn decode(path: PathBuf, bytes: &[u8], expected: VmId) -> Result<Self, RecordError> {
        /// What every format has.
        #[derive(Deserialize)]
        struct Header {
            version: u32,
        }
        let json = |source| RecordError::Json { path: path.clone(), source };
        // The version first, because a later format may have other fields.
        let got = serde_json::from_slice::<Header>(bytes).map_err(json)?.version;
        if !(1..=FORMAT).contains(&got) {
            return Err(RecordError::Version { path, got });
        }
        let mut record: Self = serde_json::from_slice(bytes).map_err(json)?;
        if record.id != expected {
            return Err(RecordError::Id { path, expected, got: record.id });
        }
        let read = serde_json::from_slice(bytes).map_err(json)?;
        let known = serde_json::to_value(&record).map_err(json)?;
        record.unknown = Unknown::of(&read, &known);
        Ok(record)
    }
}

impl RecordError {
    /// Whether there is no record.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// The host's current boot; `None` if the host does not say.
fn this_boot() -> Option<&'static str> {
    static BOOT: OnceLock<Option<String>> = OnceLock::new();
    let read = || boot_id().inspect_err(|e| tracing::error!("the host's boot id: {e}")).ok();
    BOOT.get_or_init(read).as_deref()
}

/// Whether `boot` is the host's current boot. `true` if that is not known.
pub(crate) fn is_this_boot(boot: Option<&str>) -> bool {
    boot.zip(this_boot()).is_none_or(|(boot, this)| boot == this)
}

/// What a VM's exit file says: what its VMM has counted, if it has, and why it ended.
///
/// # Errors
/// [`RecordError`], in place of the exit record: the file cannot be read, or has none.
pub fn read_exit(path: &Path) -> (Option<Metered>, Result<ExitRecord, RecordError>) {
    let bytes = match read_bytes(path) {
        Ok(bytes) => bytes,
        Err(e) => return (None, Err(e)),
    };
    let (metered, record) = meter::split(&bytes);
    let json = |source| RecordError::Json { path: path.to_owned(), source };
    (metered, serde_json::from_slice(record).map_err(json))
}

/// What the VMM with this exit file has counted until now; `None` if it does not count, as VMMs of
/// an earlier version.
#[must_use]
pub fn read_meter(path: &Path) -> Option<Metered> {
    let mut page = [0; METER_BYTES];
    File::open(path).and_then(|mut file| file.read_exact(&mut page)).ok()?;
    Metered::decode(&page)
}

/// Reads a JSON file of at most 1 MiB.
///
/// # Errors
/// [`RecordError`].
pub fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, RecordError> {
    serde_json::from_slice(&read_bytes(path)?)
        .map_err(|source| RecordError::Json { path: path.to_owned(), source })
}

fn read_bytes(path: &Path) -> Result<Vec<u8>, RecordError> {
    let io = |source| RecordError::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(io)?;
    let mut bytes = Vec::new();
    (&file).take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > MAX_BYTES {
        let got = file.metadata().map_err(io)?.len();
        return Err(RecordError::TooLong { path: path.to_owned(), got });
    }
    Ok(bytes)
}

/// Writes a file beside `path` and renames it over `path`. It is not synced, because the run folder
/// is not used after a reboot.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), RecordError> {
    let beside = path.with_extension("json.new");
    let written = File::create(&beside).and_then(|mut file| file.write_all(bytes));
    let written = written.and_then(|()| std::fs::rename(&beside, path));
    written.map_err(|source| {
        let _ = std::fs::remove_file(&beside);
        RecordError::Io { path: beside, source }
    })
}

/// Writes the record of `vm`, if the VM is not removed yet. The record of a VM that this daemon
/// could not adopt stays as it is, for a daemon that can read it. So does that of a VM that starts
/// again.
///
/// # Errors
/// [`RecordError`]; the record before stays.
pub async fn write(registry: &Registry, vm: &Arc<Vm>) -> Outcome<()> {
    write_changed(registry, vm, |_| {}).await.map(drop)
}

/// As [`write`], with a state that differs by `change`, which the VM itself has not made yet.
/// Returns whether the record was written. A failure is logged.
pub async fn write_with(
    registry: &Registry,
    vm: &Arc<Vm>,
    change: impl FnOnce(&mut Live) + Send + 'static,
) -> bool {
    let written = write_changed(registry, vm, change).await;
    written.unwrap_or_else(|e| {
        tracing::error!(vm = %vm.id, "its record is not up to date: {e}");
        false
    })
}

async fn write_changed(
    registry: &Registry,
    vm: &Arc<Vm>,
    change: impl FnOnce(&mut Live) + Send + 'static,
) -> Outcome<bool> {
    // A file made while the folder is being removed would make the removal fail.
    let one = vm.removal.lock().await;
    write_locked(registry, vm, &one, change).await
}

/// As [`write_with`], and makes the change in the VM too, once it is written. Does nothing while
/// the
/// record is written or the VM is removed.
pub async fn change(
    registry: &Registry,
    vm: &Arc<Vm>,
    change: impl FnOnce(&mut Live) + Send + Clone + 'static,
) {
    let Ok(one) = vm.removal.try_lock() else { return };
    match write_locked(registry, vm, &one, change.clone()).await {
        Ok(true) => vm.update(change),
        Ok(false) => {}
        Err(e) => tracing::error!(vm = %vm.id, "its record is not up to date: {e}"),
    }
}

/// Writes the record. `_one`: the lock of `vm.removal`.
async fn write_locked(
    registry: &Registry,
    vm: &Arc<Vm>,
    _one: &MutexGuard<'_, ()>,
    change: impl FnOnce(&mut Live) + Send + 'static,
) -> Outcome<bool> {
    // The next daemon removes a VM that is recorded as starting, with its disks. A start, and a
    // failed one, write the record when they end.
    if !registry.holds(vm) || vm.unadopted.is_some() || vm.phase() == Phase::Starting {
        return Ok(false);
    }
    let vm = vm.clone();
    blocking(move || {
        let mut record = Record::of(&vm);
        change(&mut record.live);
        match record.write(&vm.dir) {
            Ok(()) => Ok(true),
            Err(e @ RecordError::TooLong { .. }) => Err(ApiError::new(ErrorCode::Invalid, e)),
            Err(e) if vm.dir.path().exists() => Err(ApiError::internal(e)),
            Err(_) => Ok(false),
        }
    })
    .await
}

/// As [`write()`], after a change of a VM that has a record. Returns whether it is written, or the
/// VM is gone. If not, that is logged: the next daemon then finds the record before.
pub async fn note(registry: &Registry, vm: &Arc<Vm>) -> bool {
    let written = write(registry, vm).await;
    if let Err(e) = &written {
        tracing::error!(vm = %vm.id, "its record is not up to date: {e}");
    }
    written.is_ok()
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
