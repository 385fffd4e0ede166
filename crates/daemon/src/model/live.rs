//! The state of a VM that changes during its life.

use crate::model::deadline::Deadline;
use crate::model::disk::Disk;
use crate::model::facts::GuestIdentity;
use crate::model::memory_time::MemoryTime;
use crate::model::state::Phase;
use crate::model::volumes::VolumeState;
use dayfly_api::types::{self, VmExit};
use dayfly_host::cpus::CpuList;
use dayfly_host::process::ProcessId;
use serde::{Deserialize, Serialize};

/// By what the next daemon finds a VM's control group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmGroup {
    /// The folder of the daemon's groups, in the first hierarchy.
    pub tree: String,
    /// The group's number.
    pub number: u32,
}

/// The CPUs that a guest runs, by its own account.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpusOnline {
    /// Their number; 255 if it is more.
    pub count: u8,
    /// Why the guest started no more, escaped.
    pub why: Option<String>,
}

impl CpusOnline {
    /// The warning for the owner of a VM with this number of vCPUs.
    #[must_use]
    pub fn warning(&self, vcpus: u8) -> String {
        let why = self.why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        format!("its guest says that it runs {} CPUs, expected {vcpus}{why}", self.count)
    }
}

/// The mutable state of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Live {
    /// The VM's phase, changed by [`Phase::after`].
    pub phase: Phase,
    /// Why the VM ended; `None` while it lives.
    pub exit: Option<VmExit>,
    /// Whether its end was requested.
    pub kill_asked: bool,
    /// When the daemon ends the VM; `None`: no limit.
    #[serde(default)]
    pub deadline: Option<Deadline>,
    /// Whether its end was requested because its deadline has passed.
    #[serde(default)]
    pub expired: bool,
    /// Id of the detached program of the `run` that created the VM; its process id if the guest's
    /// agent gives no ids.
    #[serde(default)]
    pub program: Option<String>,
    /// Microseconds from the request until the agent had its identity.
    pub ready_us: Option<u64>,
    /// Microseconds of CPU time that the daemon and the zygote have taken for its creation.
    #[serde(default)]
    pub creation_us: u64,
    /// The same of relays of its published ports that have ended.
    #[serde(default)]
    pub relays_us: u64,
    /// The last look at its memory; `None` before the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_time: Option<MemoryTime>,
    /// Phases of its start, each with the microseconds since the request at which it ended.
    pub timeline: Vec<(String, u64)>,
    /// When it was requested, in microseconds of the host's `CLOCK_MONOTONIC`.
    pub asked_us: Option<u64>,
    /// The VMM's process; `None` before it starts and after it ended.
    pub process: Option<ProcessId>,
    /// Its control group; `None` if it has none, before its VMM starts and after its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<VmGroup>,
    /// The CPUs of the host that it has alone; empty if it has booked none, and after its end.
    #[serde(default, skip_serializing_if = "CpuList::is_empty")]
    pub cpus: CpuList,
    /// Whether its guest has to start the vCPUs that its snapshot does not have, with its first
    /// identity. A VM has no record before.
    #[serde(skip)]
    pub starts_vcpus: bool,
    /// What its guest says of its CPUs, if it does not run exactly its vCPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus_online: Option<CpusOnline>,
    /// The pager that fills its memory; `None` if all of it was there when the VM started, and in
    /// records of earlier versions.
    #[serde(default)]
    pub pager: Option<ProcessId>,
    /// The identity that the guest was given.
    #[serde(rename = "who")]
    pub identity: Option<GuestIdentity>,
    /// Its address, ports and other network properties.
    #[serde(default)]
    pub network: Option<types::VmNetwork>,
    /// The states of its volumes, in the order of the facts; empty before they are mounted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeState>,
    /// Version of its agent; empty if the guest has none.
    pub agent_version: String,
    /// Disks in the order vda, vdb, ….
    pub disks: Vec<Disk>,
    /// Whether its VMM accepts read-only descriptors of the layers that it freezes, and closes the
    /// writable ones. VMMs of an earlier version do not.
    #[serde(default)]
    pub read_only_layers: bool,
    /// Whether its VMM writes zeroes where layers below the writable one have data, so that the
    /// writable layer can be opened again. VMMs of an earlier version do not.
    #[serde(default)]
    pub zeroes_written: bool,
    /// Why no snapshot can be taken of the VM, such as an unknown layer below its writable one.
    pub no_snapshot: Option<String>,
}
