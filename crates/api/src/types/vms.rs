//! VMs, and requests to an existing VM.

use super::balloon::Balloon;
use super::create::{Lifetime, Publish};
use super::error::ApiError;
use super::limits::{DiskReads, DiskTraffic, NetTraffic, VmLimits, VmUsage};
use super::volumes::VmVolume;
use super::wire::wire;
use crate::agent::{Exit, Stat};
use dayfly_units::{Egress, Name, VmId, VmName};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

const fn one() -> u32 {
    1
}

wire! {
    /// The state of a VM.
    #[derive(Copy)]
    #[serde(rename_all = "snake_case")]
    pub enum VmState {
        /// The VM was requested and does not have its identity yet.
        Starting,
        /// The VM runs and has its identity.
        Running,
        /// The VM's vCPUs are stopped.
        Paused,
        /// The VM has ended; `exit` has the cause.
        Exited,
        /// The VM lives, and this daemon cannot control it; `problem` has the cause. It can be
        /// removed.
        Unknown,
    }

    /// Why a VM is paused.
    #[derive(Copy)]
    #[serde(rename_all = "snake_case")]
    pub enum PauseReason {
        /// A client asked for it.
        Request,
        /// A snapshot of it is being taken.
        Snapshot,
        /// Its disk has no space on the host; `problem` has more. It goes on by itself when there
        /// is space.
        NoSpace,
    }

    /// Why a VM ended.
    pub struct VmExit {
        /// The kind of end, for programs.
        pub reason: ExitKind,
        /// The cause, for people.
        pub message: String,
        /// Time of the end.
        pub at_unix_ms: u64,
        /// What the VM had taken from the host; `None` if it had no control group.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub usage: Option<VmUsage>,
        /// What the guest has moved to and from each disk, in the order vda, vdb, …; absent if the
        /// VMM is of an earlier version.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub disk_traffic: Vec<DiskTraffic>,
        /// What the guest has sent and received; absent without a network device, and if the VMM
        /// is of an earlier version.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub net_traffic: Option<NetTraffic>,
    }

    /// Kinds of [`VmExit`].
    #[derive(Copy)]
    #[serde(rename_all = "snake_case")]
    pub enum ExitKind {
        /// The guest powered itself off.
        PowerOff,
        /// The guest asked for a reboot.
        Reboot,
        /// The guest's kernel panicked.
        Panic,
        /// A client asked for `kill`.
        Killed,
        /// Its time to live was over.
        Ttl,
        /// The VMM failed and reported the cause.
        Failed,
        /// The kernel killed the VMM because the host, or its group, was out of memory.
        Memory,
        /// The VMM was killed from outside.
        Lost,
    }

    /// A VM's network attachment.
    pub struct VmNetwork {
        /// The VM's address, which the host and the other VMs of its network reach.
        #[cfg_attr(feature = "openapi", schema(value_type = String))]
        pub address: Ipv4Addr,
        /// MAC address of the VM's interface, such as `02:df:0a:58:00:02`.
        pub mac: String,
        /// The network whose other VMs this VM reaches.
        #[serde(default)]
        pub network: Option<Name>,
        /// Whether the VM reaches only the VMs of its network: the `egress` policy `none`.
        #[serde(default)]
        pub closed: bool,
        /// The VM's egress policy; absent if it is `internet`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
        pub egress: Option<Egress>,
        /// The published ports, each with the port of the host that it has.
        #[serde(default)]
        pub published: Vec<Publish>,
    }

    /// A VM, without measurements.
    pub struct Vm {
        /// The VM's id.
        pub id: VmId,
        /// The VM's name.
        pub name: Name,
        /// The VM's state.
        pub state: VmState,
        /// Why the VM is paused; `None` if it is not.
        #[serde(default)]
        pub paused_for: Option<PauseReason>,
        /// Why the VM ended; `None` while it lives.
        pub exit: Option<VmExit>,
        /// Snapshot that the VM was cloned from. For a fork, the snapshot of the forked VM.
        pub snapshot: Option<Name>,
        /// Id of the VM that was forked, if this VM is a clone of a fork.
        #[serde(default)]
        pub forked_from: Option<VmId>,
        /// Name of the image of its root disk.
        pub image: Name,
        /// Name of its kernel.
        pub kernel: Name,
        /// Number of vCPUs.
        pub vcpus: u8,
        /// Number of CPUs that the guest says it runs, if it was to start vCPUs that its snapshot
        /// does not have, and that is not all of them. `warnings` of the VM's details say why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub cpus_online: Option<u8>,
        /// RAM in bytes.
        pub memory_bytes: u64,
        /// Time of the request.
        pub created_unix_ms: u64,
        /// Microseconds from the request to the agent's first answer.
        pub ready_us: Option<u64>,
        /// Whether the VM is removed when the connection of the `run` that created it ends.
        pub ephemeral: bool,
        /// Whether the daemon removes the VM when it has ended.
        #[serde(default)]
        pub auto_remove: bool,
        /// When the daemon ends the VM, by the host's clock at the time of the request; `None`: no
        /// limit.
        #[serde(default)]
        pub ends_unix_ms: Option<u64>,
        /// Id of the detached program of the `run` that created the VM; its process id if the
        /// guest's agent gives no ids.
        #[serde(default)]
        pub program: Option<String>,
        /// The VM's network attachment; `None` without a network.
        #[serde(default)]
        pub network: Option<VmNetwork>,
        /// The VM's volumes.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub volumes: Vec<VmVolume>,
        /// Labels of the request.
        pub labels: BTreeMap<String, String>,
        /// Why the VM does not go on: its disk has no space on the host. Or why this daemon cannot
        /// control a VM of an earlier daemon: its record cannot be read, or its VMM does not
        /// answer. `None` for most VMs.
        #[serde(default)]
        pub problem: Option<String>,
    }

    /// A VM with its measurements.
    pub struct VmDetails {
        /// The VM, as `ps` shows it.
        pub vm: Vm,
        /// Process id of its VMM.
        pub pid: Option<u32>,
        /// Memory of this VM alone (private pages of the VMM), in KiB.
        pub private_kib: u64,
        /// Resident memory including shared pages, in KiB.
        pub resident_kib: u64,
        /// Bytes of disk that only this VM takes.
        pub disk_bytes: u64,
        /// The guest's use of disk and memory; `None` if its agent does not answer.
        pub guest: Option<GuestStat>,
        /// Warnings for the VM's owner, such as a full disk.
        pub warnings: Vec<String>,
        /// Its limits.
        #[serde(default, skip_serializing_if = "VmLimits::is_none")]
        pub limits: VmLimits,
        /// The CPUs of the host that it has booked and has alone, in ascending order.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub cpus: Vec<u32>,
        /// What it has taken from the host; `None` if it has no control group.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub usage: Option<VmUsage>,
        /// What the guest has moved to and from each disk, in the order vda, vdb, …; absent if the
        /// VMM is of an earlier version and does not answer.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub disk_traffic: Vec<DiskTraffic>,
        /// What the guest has sent and received; absent without a network device, and if the VMM
        /// is of an earlier version.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub net_traffic: Option<NetTraffic>,
        /// How the VMM reads the disks; absent if the VMM does not answer, if it is of an earlier
        /// version, and for a VM without disks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub disk_reads: Option<DiskReads>,
        /// Its balloon; absent if it has none, if its VMM does not answer, and while a fork or
        /// snapshot copies its memory.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub balloon: Option<Balloon>,
        /// What the VM's egress policy has refused since this daemon started; `None` without a
        /// policy.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub refused: Option<Refused>,
        /// Phases of the VM's start: name, and microseconds since the request.
        pub timeline: Vec<(String, u64)>,
    }

    /// What an egress policy has refused.
    #[derive(Copy, Default)]
    pub struct Refused {
        /// Packets that were dropped.
        pub packets: u64,
        /// Questions for names that were not answered, and addresses of answers that were not
        /// opened because too many are open.
        pub names: u64,
    }

    /// Changes the egress policy of a VM: `PUT /v1/vms/{vm}/egress`.
    pub struct EgressRequest {
        /// The policy, as in `NetworkRequest`: `none`, `internet`, or rules.
        #[cfg_attr(feature = "openapi", schema(value_type = String))]
        pub egress: Egress,
    }

    /// A guest's use of disk and memory.
    pub struct GuestStat {
        /// The figures that the agent reports.
        pub stat: Stat,
        /// Whether less than 1 % or 4 MiB of the root disk is free.
        pub disk_full: bool,
    }

    /// The answer to an exec or run. For `POST /v1/vms/{vm}/exec` with `Upgrade: dayfly-exec`, the
    /// client sends [`ExecSpec`] as a `Request` frame after the `101`. This value arrives as a
    /// `Reply` frame.
    #[serde(tag = "reply", rename_all = "snake_case")]
    pub enum RunReply {
        /// The program has started.
        Started {
            /// The VM that the program runs in.
            vm: Box<Vm>,
            /// The program's process id in the guest.
            pid: u32,
            /// The program's id, if it is detached and the guest's agent gives ids.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            id: Option<String>,
        },
        /// The program did not start, or the VM ended before the program did; the connection ends.
        Failed(ApiError),
    }

    /// The last frame (`Reply`) of an archive or an output with `Upgrade: dayfly-stream`, unless
    /// that is `End`. [`crate::agent`] has the frames.
    #[serde(tag = "reply", rename_all = "snake_case")]
    pub enum StreamReply {
        /// The archive that the client sent is on the guest's disk.
        Done {},
        /// What was sent or read is not complete.
        Failed(ApiError),
    }

    /// A text message of a client that runs a program over a WebSocket, after the first one, which
    /// is an [`ExecSpec`](crate::agent::ExecSpec).
    #[derive(Copy)]
    #[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
    pub enum ExecControl {
        /// The terminal has another size.
        Resize {
            /// Lines of text.
            rows: u16,
            /// Characters in a line.
            cols: u16,
        },
        /// Sends a signal to the program's process group.
        Signal {
            /// The signal's number on x86-64, 1 to 64.
            signal: i32,
        },
        /// Ends the program's standard input.
        StdinEnd {},
    }

    /// A text message to a client that runs a program over a WebSocket.
    #[serde(tag = "type", rename_all = "snake_case")]
    pub enum ExecNotice {
        /// The program has started. Its output follows.
        Started {
            /// The VM that the program runs in.
            vm: Box<Vm>,
            /// The program's process id in the guest.
            pid: u32,
            /// The program's id, if it is detached and the guest's agent gives ids.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            id: Option<String>,
        },
        /// The program has ended. The connection is closed.
        Exit(Exit),
        /// The program did not start, or the VM ended before the program did, or the client broke
        /// the protocol. The connection is closed.
        Failed(ApiError),
    }

    /// The answer to an exec without an upgrade: what a program wrote, and how it ended.
    #[derive(Default)]
    pub struct ExecResult {
        /// The beginning of its standard output; bytes that are not UTF-8 became U+FFFD.
        pub stdout: String,
        /// The beginning of its standard error, likewise.
        pub stderr: String,
        /// Whether `stdout` lacks the rest.
        pub stdout_truncated: bool,
        /// Whether `stderr` lacks the rest.
        pub stderr_truncated: bool,
        /// The exit code, unless a signal ended the program or it is detached.
        pub exit_code: Option<i32>,
        /// The signal that ended the program.
        pub signal: Option<i32>,
        /// Whether `timeout_ms` ran out.
        pub timed_out: bool,
        /// The id of a program that is detached; its process id if the agent gives no ids.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub program: Option<String>,
    }

    /// Starts clones of a running VM, with its memory and its disks as they are at one instant:
    /// `POST /v1/vms/{vm}/fork`. Either all clones start or none.
    pub struct ForkRequest {
        /// Number of clones, 1 to 4096. 0 is allowed if `template` is set.
        #[serde(default = "one")]
        pub count: u32,
        /// Name of the clone, if there is only one. If `None`, its id.
        #[serde(default)]
        pub name: Option<VmName>,
        /// Labels of each clone.
        #[serde(default)]
        pub labels: BTreeMap<String, String>,
        /// Number of clones of itself that each clone's root user may make. A clone that has ended
        /// counts until it is removed.
        #[serde(default)]
        pub forks: u32,
        /// Egress policy of each clone. If `None`, the VM's own.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
        pub egress: Option<Egress>,
        /// Ports of the host that are forwarded to ports of the clone. For more than one clone
        /// they must be free ones (`host_port` 0). The VM's own ports are not inherited.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub publish: Vec<Publish>,
        /// As in [`super::NetworkRequest`].
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        pub publish_exposed: bool,
        /// When each clone ends, and what is left of it. The VM's own time to live is not
        /// inherited.
        #[serde(default)]
        pub lifetime: Lifetime,
        /// Limits of each clone. One that is absent is the VM's own.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub limits: Option<VmLimits>,
        /// Name of a snapshot to make of that instant, which must be free. The snapshot can be
        /// cloned at once, and is stored meanwhile.
        #[serde(default)]
        pub template: Option<Name>,
    }

    /// The result of a fork.
    pub struct Forked {
        /// Microseconds for which the VM's vCPUs were stopped.
        pub paused_us: u64,
        /// Pages that were copied while the vCPUs were stopped; all others were copied before.
        pub pages: u64,
        /// Microseconds from the request until the VM ran again. The clones are created after that
        /// moment.
        pub frozen_us: u64,
        /// The clones; each has its identity.
        pub items: Vec<Vm>,
    }

    /// Removes many VMs. The daemon answers when the memory of all is free.
    pub struct RemoveManyRequest {
        /// The VMs by id, unique start of an id, or name; at most 4096.
        pub vms: Vec<String>,
        /// Whether to remove VMs that have not exited, too.
        #[serde(default)]
        pub force: bool,
    }
}

impl VmState {
    /// All states with their names.
    pub const ALL: [(Self, &'static str); 5] = [
        (Self::Starting, "starting"),
        (Self::Running, "running"),
        (Self::Paused, "paused"),
        (Self::Exited, "exited"),
        (Self::Unknown, "unknown"),
    ];

    /// The state's name, as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(state, _)| *state == self).map_or("unknown", |(_, name)| name)
    }
}

impl VmNetwork {
    /// The VM's egress policy. Records of earlier daemons only say `closed`.
    #[must_use]
    pub fn policy(&self) -> Egress {
        let of_closed = || if self.closed { Egress::none() } else { Egress::internet() };
        self.egress.clone().unwrap_or_else(of_closed)
    }

    /// Changes the policy.
    pub fn set_policy(&mut self, egress: Egress) {
        self.closed = egress.is_none();
        self.egress = Some(egress).filter(|egress| !egress.is_internet());
    }
}
