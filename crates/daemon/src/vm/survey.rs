//! What an earlier daemon left in the run folder, read once at the start.
//!
//! ```text
//!  <run>/vms/<id> ─▶ record read ──────────────▶ Found::Record
//!                 ─▶ no record file ───────────▶ Found::Nothing     its start was never answered
//!                 ─▶ record cannot be read ────▶ Found::Unreadable  kept, whatever the cause is
//! ```
//!
//! An absent record and an unreadable one differ: the daemon writes a VM's record before a client
//! learns that the VM has started.

use crate::base::config::{Config, VMM_NAME};
use crate::model::deadline::Deadline;
use crate::model::disk::Disk;
use crate::model::facts::Facts;
use crate::net::{mac, mac_text};
use crate::vm::record::{Record, RecordError, is_this_boot};
use dayfly_api::types::{NetworkRequest, VmNetwork};
use dayfly_host::net::taps_of;
use dayfly_host::process::{self, Process, ProcessId, VmProcess};
use dayfly_units::error::chain;
use dayfly_units::{Name, VmId};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fs::File;
use std::io::{self, Read};
use std::net::Ipv4Addr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The most bytes of an unreadable record that are searched for traces.
const TRACED_BYTES: u64 = 8 << 20;

/// What a VM's folder holds.
#[derive(Debug)]
pub enum Found {
    /// A record.
    Record(Box<Record>),
    /// No record.
    Nothing,
    /// A record that cannot be read.
    Unreadable(Box<Unreadable>),
}

/// A VM that cannot be adopted as its record says.
#[derive(Debug)]
pub struct Unreadable {
    /// The VM's id.
    pub id: VmId,
    /// Why it cannot be adopted.
    pub why: String,
    /// What is known of it all the same.
    pub traces: Traces,
}

/// What an unreadable record still says. A later format may mean something else by these fields, so
/// they are only shown, reserved and retained.
#[derive(Debug, Default)]
pub struct Traces {
    /// Its name.
    pub name: Option<Name>,
    /// Its facts.
    pub facts: Option<Facts>,
    /// Its network attachment.
    pub network: Option<VmNetwork>,
    /// Its disks.
    pub disks: Vec<Disk>,
    /// Its process.
    pub process: Option<ProcessId>,
    /// Its deadline, if this version knows the record's format: the VM ends for it.
    pub deadline: Option<Deadline>,
}

impl Traces {
    /// The traces in the file `path` of VM `id`.
    fn of(path: &Path, id: VmId) -> Self {
        let mut bytes = Vec::new();
        let read =
            File::open(path).and_then(|file| file.take(TRACED_BYTES).read_to_end(&mut bytes));
        let value: Value = match read.map(|_| serde_json::from_slice(&bytes)) {
            Ok(Ok(value)) => value,
            _ => return Self::default(),
        };
        if get::<VmId>(&value, "/id") != Some(id) {
            // They are those of another VM.
            return Self::default();
        }
        let boot: Option<String> = get(&value, "/boot_id");
        let process = get(&value, "/live/process").filter(|_| is_this_boot(boot.as_deref()));
        Self {
            name: get(&value, "/name"),
            facts: get(&value, "/facts"),
            network: get(&value, "/live/network"),
            disks: get(&value, "/live/disks").unwrap_or_default(),
            process,
            deadline: None,
        }
    }
}

/// The field at this JSON pointer, if it has the form that this version gives it.
fn get<T: DeserializeOwned>(value: &Value, pointer: &str) -> Option<T> {
    serde_json::from_value(value.pointer(pointer)?.clone()).ok()
}

impl Unreadable {
    /// The VM of `record`, which cannot be adopted because of `why`.
    #[must_use]
    pub fn of(record: Record, why: String) -> Self {
        let Record { id, name, facts, live, .. } = record;
        let (name, facts, process) = (Some(name), Some(facts), live.process);
        let (network, disks, deadline) = (live.network, live.disks, live.deadline);
        let traces = Traces { name, facts, network, disks, process, deadline };
        Self { id, why, traces }
    }

    /// Its VMM, if that lives.
    ///
    /// # Errors
    /// The host does not say whether it lives.
    pub fn vmm(&self, config: &Config) -> io::Result<Option<Process>> {
        if let Some(process) = self.traces.process.map(alive).transpose()?.flatten() {
            return Ok(Some(process));
        }
        vmm_of(config, self.id)
    }

    /// Its network attachment, and the network that it asked for. `vmm` is its process. If the
    /// request is not known, the VM reaches nothing but its gateway.
    #[must_use]
    pub fn network(
        &self,
        config: &Config,
        vmm: Option<&Process>,
    ) -> Option<(VmNetwork, NetworkRequest)> {
        let traced = self.traces.network.clone();
        let prefix = config.network?;
        let taps = vmm.map(|vmm| taps_of(vmm.id().pid));
        let taps = match taps.transpose() {
            Ok(taps) => taps.unwrap_or_default(),
            Err(e) => {
                tracing::error!(vm = %self.id, "its tap: {e}");
                Vec::new()
            }
        };
        let place = taps.iter().find_map(|tap| tap.strip_prefix("vm")?.parse::<u32>().ok());
        let address = place.and_then(|place| prefix.address(place));
        match (traced, address) {
            (Some(traced), address) if address.is_none_or(|a| a == traced.address) => {
                let asked = self.traces.facts.as_ref().map(|facts| facts.network.clone());
                let network = traced.network.clone();
                let closed = NetworkRequest { network, closed: true, ..NetworkRequest::default() };
                let policy = traced.policy();
                let asked = asked.map(|asked| asked.with_policy(policy));
                Some((traced, asked.unwrap_or(closed)))
            }
            (_, address) => {
                let address = address?;
                let mac = mac_text(mac(address));
                let (network, closed, egress, published) = (None, true, None, Vec::new());
                let asked = NetworkRequest { closed, ..NetworkRequest::default() };
                Some((VmNetwork { address, mac, network, closed, egress, published }, asked))
            }
        }
    }
}

/// The process `id`, if it has not ended.
///
/// # Errors
/// The host does not say.
pub fn alive(id: ProcessId) -> io::Result<Option<Process>> {
    let Some(process) = Process::open(id)? else { return Ok(None) };
    Ok(process.is_alive()?.then_some(process))
}

/// The living VMM of this daemon's run folder whose command line names VM `id`.
///
/// # Errors
/// The host does not say.
pub fn vmm_of(config: &Config, id: VmId) -> io::Result<Option<Process>> {
    for VmProcess { process, vm } in process::scan(VMM_NAME)? {
        if vm == id
            && is_ours(config, process.pid)
            && let Some(process) = alive(process)?
        {
            return Ok(Some(process));
        }
    }
    Ok(None)
}

/// Whether a VMM was started for this run folder, and not by another daemon.
#[must_use]
pub fn is_ours(config: &Config, pid: u32) -> bool {
    let name = config.vmm_name();
    let name = name.as_os_str().as_bytes();
    let cmdline = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    cmdline.strip_prefix(name).is_some_and(|rest| rest.first() == Some(&0))
}

/// Every VM's folder in the run folder, by id.
///
/// # Errors
/// The run folder cannot be listed. The daemon must not go on then: it would take every VM for
/// removed.
pub fn survey(config: &Config) -> io::Result<Vec<(VmId, Found)>> {
    let folder = config.vms();
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", folder.display()));
    let entries = match std::fs::read_dir(&folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(named)?,
    };
    let mut ids = Vec::new();
    for entry in entries {
        ids.extend(
            entry.map_err(named)?.file_name().to_str().and_then(|name| name.parse::<VmId>().ok()),
        );
    }
    ids.sort_unstable();
    Ok(ids.into_iter().map(|id| (id, find(config, id))).collect())
}

fn find(config: &Config, id: VmId) -> Found {
    let dir = config.vm(id);
    match Record::read(&dir, id) {
        Ok(record) => Found::Record(Box::new(record)),
        Err(e) if e.is_absent() => Found::Nothing,
        Err(e) => {
            let traces = match &e {
                RecordError::Io { .. } => Traces::default(),
                _ => Traces::of(&dir.record(), id),
            };
            let why = format!(
                "its record cannot be read: {}; a daemon that can read it adopts the VM",
                chain(&e)
            );
            Found::Unreadable(Box::new(Unreadable { id, why, traces }))
        }
    }
}

/// Addresses and network requests of the VMs that an earlier daemon left alive.
///
/// # Errors
/// As [`survey`].
pub fn addresses(config: &Config) -> io::Result<Vec<(Ipv4Addr, NetworkRequest)>> {
    let of = |found: Found| match found {
        Found::Record(record) => {
            let (alive, facts) = (record.live.phase.alive(), record.facts);
            record.live.network.filter(|_| alive).map(|had| {
                let policy = had.policy();
                (had.address, facts.network.with_policy(policy))
            })
        }
        Found::Nothing => None,
        Found::Unreadable(left) => {
            let vmm = left.vmm(config);
            // If it is not known whether the VMM lives, it counts as living.
            let lives = vmm.as_ref().map_or(true, Option::is_some);
            let network = left.network(config, vmm.ok().flatten().as_ref());
            network.filter(|_| lives).map(|(had, asked)| (had.address, asked))
        }
    };
    Ok(survey(config)?.into_iter().filter_map(|(_, found)| of(found)).collect())
}
