//! Requests that create VMs.

use super::limits::VmLimits;
use super::volumes::VolumeRequest;
use super::wire::wire;
use crate::agent::{ExecSpec, Runs};
use dayfly_units::{CpuModel, Egress, Name, PortProtocol, VmName};
use std::collections::BTreeMap;
use std::net::IpAddr;

wire! {
    /// What a VM starts from.
    #[serde(rename_all = "snake_case")]
    pub enum Source {
        /// A clone of the snapshot with this name.
        Snapshot(Name),
        /// A cold boot of an image.
        Boot(BootSource),
    }

    /// The parameters of a cold boot.
    pub struct BootSource {
        /// Name of the image.
        pub image: Name,
        /// Name of the kernel. If `None`, the newest kernel is used.
        pub kernel: Option<Name>,
        /// RAM in bytes.
        pub memory_bytes: u64,
        /// Number of vCPUs, 1 to 16.
        pub vcpus: u8,
        /// An init of the image that replaces the agent's own init.
        pub init: Option<String>,
        /// The model of the vCPUs, which this host's CPU must have.
        #[serde(default, skip_serializing_if = "CpuModel::is_host")]
        pub cpu_model: CpuModel,
    }

    /// Creates and starts a VM. The daemon answers when the VM's agent has its identity.
    pub struct CreateRequest {
        /// What the VM starts from.
        pub source: Source,
        /// Name and hostname of the VM. If `None`, its id.
        pub name: Option<VmName>,
        /// Labels for people and programs; the daemon does not interpret them.
        #[serde(default)]
        pub labels: BTreeMap<String, String>,
        /// Number of clones of this VM that its guest's root user may make. A clone that has ended
        /// counts until it is removed.
        #[serde(default)]
        pub forks: u32,
        /// The VM's network access.
        #[serde(default)]
        pub network: NetworkRequest,
        /// When the VM ends, and what is left of it.
        #[serde(default)]
        pub lifetime: Lifetime,
        /// Folders of the host that the VM gets; at most 16.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub volumes: Vec<VolumeRequest>,
        /// Limits of what the VM takes from the host.
        #[serde(default, skip_serializing_if = "VmLimits::is_none")]
        pub limits: VmLimits,
        /// Number of vCPUs of a clone, from `vcpus` to `max_vcpus` of its snapshot. If `None`, as
        /// many as the snapshot has. A cold boot has its number in `source`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub vcpus: Option<u8>,
    }

    /// When a VM ends, and what is left of it. Without fields, it runs until it is stopped or
    /// killed, and stays listed until it is removed.
    #[derive(Copy, Default)]
    pub struct Lifetime {
        /// Time to live in milliseconds, 1 to 31,536,000,000 (365 days), from the answer to the
        /// request on. Then the daemon kills the VM, whose exit reason is `ttl`. Pauses count.
        #[serde(default)]
        pub ttl_ms: Option<u64>,
        /// Whether the daemon removes the VM when it has ended, for whatever reason.
        #[serde(default)]
        pub auto_remove: bool,
    }

    /// Changes the time to live of a VM: `PUT /v1/vms/{vm}/ttl`.
    #[derive(Copy)]
    pub struct TtlRequest {
        /// Time to live in milliseconds from now on, as in [`Lifetime`]; `null`: no limit.
        #[serde(deserialize_with = "serde::Deserialize::deserialize")]
        pub ttl_ms: Option<u64>,
    }

    /// A VM's network access. Clones that a fork makes of the VM have the same access, but no
    /// published ports.
    #[derive(Default)]
    pub struct NetworkRequest {
        /// If set, the VM has no address, and packets that it sends are dropped.
        #[serde(default)]
        pub none: bool,
        /// The network whose other VMs this VM reaches by address and by name. If `None`, it
        /// reaches no VM.
        #[serde(default)]
        pub network: Option<Name>,
        /// If set, the VM reaches only the VMs of its network, and DNS answers only for their
        /// names: the `egress` policy `none`.
        #[serde(default)]
        pub closed: bool,
        /// What the VM reaches outside its network: `none`, `internet`, or rules such as
        /// `example.org:443,192.0.2.0/24:tcp:1-1023` (docs/networks.md). If `None`, as its snapshot
        /// or the VM that was forked has it; `internet` if those have no policy.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
        pub egress: Option<Egress>,
        /// Ports of the host that are forwarded to ports of the guest; at most 256.
        #[serde(default)]
        pub publish: Vec<Publish>,
        /// Whether all ports of the image's configuration (EXPOSE) are published too, each at a
        /// free port of the host's 127.0.0.1; without those that `publish` has.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        pub publish_exposed: bool,
        /// Limit for sending, in bytes per second, with a burst of a tenth of that number. If
        /// `None`, there is no limit.
        #[serde(default)]
        pub sends_bytes_per_second: Option<u64>,
        /// Limit for receiving, in bytes per second, with a burst of a tenth of that number. If
        /// `None`, there is no limit.
        #[serde(default)]
        pub receives_bytes_per_second: Option<u64>,
    }

    /// A port of the host that is forwarded to a port of a guest.
    #[derive(Copy)]
    pub struct Publish {
        /// Address of the host. If `None`, 127.0.0.1. `0.0.0.0` or `::` means all addresses.
        #[serde(default)]
        #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
        pub host: Option<IpAddr>,
        /// Port of the host. In a request, 0 means a free one; a VM that is started again keeps
        /// it if it is still free.
        pub host_port: u16,
        /// Port of the guest.
        pub guest_port: u16,
        /// Protocol of both ports; absent if it is `tcp`.
        #[serde(default, skip_serializing_if = "PortProtocol::is_tcp")]
        pub protocol: PortProtocol,
    }

    /// Creates and starts many VMs of one kind, all of them or none.
    pub struct CreateManyRequest {
        /// What each VM starts from.
        pub source: Source,
        /// Number of VMs, 1 to 4096.
        pub count: u32,
        /// Labels of each VM.
        #[serde(default)]
        pub labels: BTreeMap<String, String>,
        /// Network access of each VM. Published ports must be free ones (`host_port` 0).
        #[serde(default)]
        pub network: NetworkRequest,
        /// When each VM ends, and what is left of it.
        #[serde(default)]
        pub lifetime: Lifetime,
        /// Folders of the host that each VM gets; at most 16.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub volumes: Vec<VolumeRequest>,
        /// Limits of what each VM takes from the host.
        #[serde(default, skip_serializing_if = "VmLimits::is_none")]
        pub limits: VmLimits,
        /// Number of vCPUs of each clone, as in [`CreateRequest`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub vcpus: Option<u8>,
    }

    /// Clones (or boots) a VM, runs a program and removes the VM, all over one connection.
    ///
    /// The request is `POST /v1/run` with `Upgrade: dayfly-exec`. After the `101` the client sends
    /// this value as a `Request` frame. The daemon answers with a [`RunReply`] in a `Reply` frame;
    /// the connection then continues as an exec ([`crate::agent`]). The VM ends with the
    /// connection, unless `keep` is set. With `keep` and a detached program (`exec.detach`), the
    /// client may go once it has the reply; [`super::Vm::program`] then names the program.
    pub struct RunRequest {
        /// The VM to create.
        pub create: CreateRequest,
        /// The program to run. Its `argv` follows the entrypoint; if empty, the image's cmd does.
        pub exec: ExecSpec,
        /// The entrypoint instead of the image's, whose cmd is then ignored. An empty list means
        /// that `argv` begins with the program.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entrypoint: Option<Vec<String>>,
        /// Whether the VM stays after the connection ends.
        pub keep: bool,
    }

    /// Clones (or boots) a VM and connects to the vsock port of a program in it, as soon as the VM
    /// runs.
    ///
    /// The request is `POST /v1/connect` with `Upgrade: dayfly-port` and this value as its body.
    /// The daemon answers `101` once the port has accepted the connection, which then carries the
    /// port's bytes both ways. The client keeps its half open as long as it needs the VM. The end
    /// of that half ends the VM, unless `keep` is set.
    pub struct ConnectRequest {
        /// The VM to create.
        pub create: CreateRequest,
        /// The guest's vsock port.
        pub port: u32,
        /// Whether the VM stays after the connection ends.
        pub keep: bool,
    }
}

impl Runs for RunRequest {
    fn program(&mut self) -> Option<&mut ExecSpec> {
        Some(&mut self.exec)
    }
}

impl CreateRequest {
    /// A request that names only what the VM starts from.
    #[must_use]
    pub fn new(source: Source) -> Self {
        Self {
            source,
            name: None,
            labels: BTreeMap::new(),
            forks: 0,
            network: NetworkRequest::default(),
            lifetime: Lifetime::UNLIMITED,
            volumes: Vec::new(),
            limits: VmLimits::default(),
            vcpus: None,
        }
    }
}

impl NetworkRequest {
    /// The egress policy that the request asks for; `None` if it leaves that to the VM's source.
    #[must_use]
    pub fn policy(&self) -> Option<Egress> {
        self.egress.clone().or_else(|| self.closed.then(Egress::none))
    }

    /// The request with this egress policy.
    #[must_use]
    pub fn with_policy(self, egress: Egress) -> Self {
        Self { closed: egress.is_none(), egress: Some(egress), ..self }
    }
}

impl Lifetime {
    /// No time limit, and the VM stays listed when it has ended.
    pub const UNLIMITED: Self = Self { ttl_ms: None, auto_remove: false };
}
