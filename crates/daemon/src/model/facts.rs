//! Facts about a VM that stay the same from creation to removal, and its guest's identity.

use crate::model::request_key::RequestKey;
use crate::model::volumes::VolumeFacts;
use dayfly_api::types;
use dayfly_store::{Digest, ImageConfig, KernelRef};
use dayfly_units::{CpuModel, Name, VmId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The label of a snapshot that has [`Facts::init`] of its VM.
pub const INIT_LABEL: &str = "dayfly.init";

/// The immutable facts of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// The snapshot that the VM was cloned from, or that the VM it was forked from was cloned from.
    pub snapshot: Option<Name>,
    /// The digests of the RAM of snapshots in whose state its guest once was, the oldest first.
    #[serde(default)]
    pub ancestors: Vec<Digest>,
    /// Its relation to forks.
    #[serde(default)]
    pub fork: ForkFacts,
    /// Image of its root disk.
    pub image: Name,
    /// Its kernel.
    pub kernel: KernelRef,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// The most vCPUs of a clone of it: those that its guest knows of. Below `vcpus` if those are
    /// all, as in records of earlier versions.
    #[serde(default)]
    pub max_vcpus: u8,
    /// The model of the vCPUs.
    #[serde(default, skip_serializing_if = "CpuModel::is_host")]
    pub cpu_model: CpuModel,
    /// RAM in bytes.
    pub memory_bytes: u64,
    /// Number of network devices.
    #[serde(default)]
    pub nets: u8,
    /// When it was requested, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// The network that the client requested.
    #[serde(default)]
    pub network: types::NetworkRequest,
    /// The image's entrypoint, command, environment, working directory and user.
    #[serde(deserialize_with = "dayfly_units::image_config::known")]
    pub config: ImageConfig,
    /// The init of its image that its guest runs; `None`: the agent is the init, or the VM is a
    /// clone of a snapshot of an earlier daemon.
    #[serde(default)]
    pub init: Option<String>,
    /// Whether the VM is removed when the connection or the bake that created it ends.
    pub ephemeral: bool,
    /// Whether the daemon removes the VM when it has ended.
    #[serde(default)]
    pub auto_remove: bool,
    /// Labels from the client, unchanged.
    pub labels: BTreeMap<String, String>,
    /// Its volumes, outer ones first. Clones of a fork have them too, those of a snapshot have not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeFacts>,
    /// Its limits, which it also has when it starts again.
    #[serde(default, skip_serializing_if = "types::VmLimits::is_none")]
    pub limits: types::VmLimits,
    /// The key of the request that created it, by which the next daemon recognises a repetition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<RequestKey>,
}

/// A VM's relation to forks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkFacts {
    /// The VM it was forked from.
    pub from: Option<VmId>,
    /// The number of this clone within that fork, from 1.
    pub number: u32,
    /// The most clones of itself that its guest may have at one time.
    #[serde(rename = "may")]
    pub max_clones: u32,
    /// Whether the guest of `from` asked for this clone, which then counts against its
    /// `max_clones`. Records of older daemons do not say it, and those daemons counted every clone.
    #[serde(default = "counted")]
    pub by_guest: bool,
}

const fn counted() -> bool {
    true
}

/// The identity of a guest. The daemon gives it again after a snapshot, which unseals the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestIdentity {
    /// Its hostname.
    pub hostname: String,
    /// Its machine-id.
    pub machine_id: String,
}
