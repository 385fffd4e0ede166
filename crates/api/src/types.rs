//! The daemon's HTTP API, version 1: JSON bodies. Paths are in the OpenAPI document that `dayflyd` serves.
//!
//! Numbers end in their unit. Times of day are whole milliseconds since 1970 (`_unix_ms`), durations `_us` or `_ms`.

use crate::agent::{ExecSpec, Stat};
use dayfly_units::{Name, VmId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

#[cfg(feature = "openapi")]
use utoipa::ToSchema;

macro_rules! wire {
    ($($item:item)*) => { $(
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(ToSchema))]
        $item
    )* };
}

mod colours;
mod rehearsal;
mod store;

pub use colours::{ColourHeld, ColourUse, Colours, Footprint, MAX_PICTURE_WIDTH};
pub use rehearsal::{ColourTouched, MAX_TOUCHES, Rehearsal, RehearseRequest};
pub use store::{
    Collected, Counted, Damaged, LeftAlone, MemoryKinds, Pages, SnapshotUse, StoreStats, StoreUsage,
    Unreadable, Verified, VerifyRequest,
};

const fn one() -> u32 {
    1
}

wire! {
    /// Any error: HTTP status 4xx or 5xx, and this body.
    pub struct ApiError {
        /// What kind, for programs.
        pub code: ErrorCode,
        /// What, where, expected and got, and what to do next, for people.
        pub message: String,
    }

    /// Kinds of [`ApiError`].
    #[derive(Copy)]
    #[serde(rename_all = "snake_case")]
    pub enum ErrorCode {
        /// The request does not make sense (400).
        Invalid,
        /// No such VM, image, kernel or snapshot (404).
        NotFound,
        /// The name is taken, or something still uses it (409).
        Conflict,
        /// Stored bytes are damaged, foreign or incomplete (422).
        Damaged,
        /// The VM is not in the state that this needs (409).
        State,
        /// The host has not enough of something (507).
        Exhausted,
        /// The guest or its agent did not do it (502).
        Guest,
        /// No such program in the guest; only in [`RunReply::Failed`], docker's exit code 127.
        ProgramNotFound,
        /// The program is there and cannot be run; only in [`RunReply::Failed`], docker's exit code 126.
        ProgramNotExecutable,
        /// The agent did not answer in time (504).
        Timeout,
        /// The daemon's or the host's own fault (500).
        Internal,
    }

    /// What this daemon is and runs on.
    pub struct Info {
        /// Version of dayflyd.
        pub version: String,
        /// Its process id.
        pub pid: u32,
        /// Release of the host's kernel.
        pub host_kernel: String,
        /// Vendor of /dev/kvm as the host's modules tell: `svm`, `vmx` or what hinders.
        pub kvm: String,
        /// VMs it knows.
        pub vms: usize,
        /// Folder of images, kernels, snapshots.
        pub state_dir: String,
    }

    /// How an image wants to be started (OCI's words).
    #[derive(Default)]
    #[serde(default)]
    pub struct ImageConfig {
        /// Program and first arguments.
        pub entrypoint: Vec<String>,
        /// Further arguments.
        pub cmd: Vec<String>,
        /// `NAME=value`.
        pub env: Vec<String>,
        /// Where programs start.
        pub workdir: String,
        /// As whom they run.
        pub user: String,
    }

    /// A root disk.
    pub struct Image {
        /// Its name here.
        pub name: Name,
        /// BLAKE3 over its non-zero pages, hexadecimal.
        pub digest: String,
        /// Size that a guest sees.
        pub size_bytes: u64,
        /// Bytes it takes on the host's disk.
        pub stored_bytes: u64,
        /// When it was stored.
        pub created_unix_ms: u64,
        /// Where it was built from.
        pub source: String,
        /// How it wants to be started.
        pub config: ImageConfig,
    }

    /// The start of an image's upload: the first part of the body of `PUT /v1/images/{name}`.
    ///
    /// The body is a 4-byte little-endian length, that many bytes of this as JSON, then one zstd frame of the raw disk.
    pub struct ImageUpload {
        /// Length of the raw disk.
        pub size_bytes: u64,
        /// What the daemon must find, hexadecimal.
        pub digest: String,
        /// Where it was built from.
        pub source: String,
        /// How it wants to be started.
        pub config: ImageConfig,
    }

    /// A guest kernel with its initramfs.
    pub struct Kernel {
        /// Its name here, such as `6.12`.
        pub name: Name,
        /// `uname -r` in the guest.
        pub release: String,
        /// BLAKE3 of both files, hexadecimal.
        pub digest: String,
        /// When it was stored.
        pub created_unix_ms: u64,
    }

    /// The start of a kernel's upload: as [`ImageUpload`], followed by one zstd frame of vmlinux and initrd, one after the other.
    pub struct KernelUpload {
        /// `uname -r` in the guest.
        pub release: String,
        /// Length of vmlinux.
        pub vmlinux_bytes: u64,
        /// Length of the initramfs.
        pub initrd_bytes: u64,
        /// BLAKE3 of vmlinux followed by initrd, hexadecimal.
        pub digest: String,
    }

    /// A snapshot: what clones start from.
    pub struct Snapshot {
        /// Its name.
        pub name: Name,
        /// When it was taken.
        pub created_unix_ms: u64,
        /// Its image.
        pub image: Name,
        /// Its kernel.
        pub kernel: Name,
        /// Snapshot that its VM was cloned from.
        pub parent: Option<Name>,
        /// vCPUs.
        pub vcpus: u8,
        /// RAM of its clones.
        pub memory_bytes: u64,
        /// Bytes of RAM that are stored (the rest is zero).
        pub memory_stored_bytes: u64,
        /// Copy-on-write layers over the image, base first.
        pub layers: Vec<String>,
        /// Bytes those layers hold.
        pub layers_stored_bytes: u64,
        /// Whether it is a fork that is being stored: it can be cloned, and is gone if the daemon ends first.
        #[serde(default)]
        pub forming: bool,
        /// What of its RAM is in the host's memory; nothing where no clone was made of it of late.
        #[serde(default)]
        pub resident: Option<Resident>,
    }

    /// RAM of a snapshot in the host's memory, once for all clones.
    pub struct Resident {
        /// Bytes so far that only it has.
        pub own_bytes: u64,
        /// Bytes that its clones have from other snapshots, which have the same pages.
        pub shared_bytes: u64,
    }

    /// Boot an image, warm it up, snapshot it. Answered with a stream of [`Progress`], one JSON object a line.
    pub struct BakeRequest {
        /// The image.
        pub image: Name,
        /// Name of the snapshot to make; must be free.
        pub name: Name,
        /// The kernel; the only one, or the newest, where there is none given.
        pub kernel: Option<Name>,
        /// RAM.
        pub memory_bytes: u64,
        /// 1 to 16.
        pub vcpus: u8,
        /// A warm-up program: run to its end (exit code 0 needed) before the snapshot. What it leaves running stays in the snapshot.
        pub warmup: Option<ExecSpec>,
        /// Run twice in a throw-away clone after the bake (the first time, exit code 0 is needed): the pages it touches are laid
        /// ready in every clone.
        /// Without one, those that taking an identity touches.
        #[serde(default)]
        pub rehearsal: Option<ExecSpec>,
        /// Hand over to this init of the image instead of the agent's own.
        pub init: Option<String>,
    }

    /// A line of a stream that reports a long operation.
    #[serde(tag = "event", rename_all = "snake_case")]
    pub enum Progress {
        /// A phase began.
        Phase {
            /// What is being done, for people.
            label: String,
        },
        /// How far the phase is.
        Step {
            /// So many…
            done: u64,
            /// …of so many bytes.
            total: u64,
        },
        /// What the warm-up program wrote.
        Output {
            /// Its text, lossy.
            text: String,
        },
        /// First touches of pages, in their order: each a frame, and microseconds since the restore.
        Touched {
            /// At most 2,000.
            touches: Vec<[u32; 2]>,
        },
        /// The run was recorded; the stream ends.
        Rehearsed(Box<Rehearsal>),
        /// The snapshot is there; the stream ends.
        Snapshot(Box<Snapshot>),
        /// Everything was read; the stream ends. Damage is no failure of the operation.
        Verified(Box<Verified>),
        /// Everything that could be was removed; the stream ends.
        Collected(Box<Collected>),
        /// It failed; nothing stays of it; the stream ends.
        Failed(ApiError),
    }

    /// What a VM starts from.
    #[serde(rename_all = "snake_case")]
    pub enum Source {
        /// A clone of a snapshot.
        Snapshot(Name),
        /// A cold boot of an image.
        Boot(BootSource),
    }

    /// A cold boot.
    pub struct BootSource {
        /// The image.
        pub image: Name,
        /// As in [`BakeRequest`].
        pub kernel: Option<Name>,
        /// RAM.
        pub memory_bytes: u64,
        /// 1 to 16.
        pub vcpus: u8,
        /// As in [`BakeRequest`].
        pub init: Option<String>,
    }

    /// Make and start a VM; answered when its agent has its identity.
    pub struct CreateRequest {
        /// What it starts from.
        pub source: Source,
        /// Its name and hostname; the id where there is none.
        pub name: Option<Name>,
        /// For people and programs.
        #[serde(default)]
        pub labels: BTreeMap<String, String>,
        /// How many clones of itself, at one time, its guest may ask for.
        #[serde(default)]
        pub forks: u32,
        /// What it has of the network.
        #[serde(default)]
        pub network: NetworkRequest,
    }

    /// What a VM has of the network. Clones that are made of it by a fork have the same, but no published ports.
    #[derive(Default)]
    pub struct NetworkRequest {
        /// It has no address, and whatever it sends is lost.
        #[serde(default)]
        pub none: bool,
        /// Ports of the host at which ports of the guest are reached; at most 256.
        #[serde(default)]
        pub publish: Vec<Publish>,
        /// Bytes a second that it may send, after a burst of a tenth of them; no limit where there is none.
        #[serde(default)]
        pub sends_bytes_per_second: Option<u64>,
        /// The same that it may receive.
        #[serde(default)]
        pub receives_bytes_per_second: Option<u64>,
    }

    /// A TCP port of the host at which one of a guest is reached.
    #[derive(Copy)]
    pub struct Publish {
        /// The host's address; all of them where there is none.
        #[serde(default)]
        #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
        pub host: Option<IpAddr>,
        /// The host's port.
        pub host_port: u16,
        /// The guest's.
        pub guest_port: u16,
    }

    /// Where a VM is on the network.
    pub struct VmNetwork {
        /// Its address, which other VMs and its host reach.
        #[cfg_attr(feature = "openapi", schema(value_type = String))]
        pub address: Ipv4Addr,
        /// That of its interface, such as `02:df:0a:58:00:02`.
        pub mac: String,
        /// What is reached of it at the host's ports.
        #[serde(default)]
        pub published: Vec<Publish>,
    }

    /// Make and start many VMs of one kind; all of them, or none.
    pub struct CreateManyRequest {
        /// What each starts from.
        pub source: Source,
        /// How many: 1 to 4096.
        pub count: u32,
        /// Of each of them.
        #[serde(default)]
        pub labels: BTreeMap<String, String>,
        /// Of each of them; without published ports.
        #[serde(default)]
        pub network: NetworkRequest,
    }

    /// Remove many VMs; answered when the memory of all is free.
    pub struct RemoveManyRequest {
        /// By id, unique start of an id, or name; at most 4096.
        pub vms: Vec<String>,
        /// Also those that run.
        #[serde(default)]
        pub force: bool,
    }

    /// What a VM does.
    #[derive(Copy)]
    #[serde(rename_all = "snake_case")]
    pub enum VmState {
        /// Between request and identity.
        Starting,
        /// It answers.
        Running,
        /// Its vCPUs are stopped.
        Paused,
        /// It ended; see `exit`.
        Exited,
    }

    /// Why a VM ended.
    pub struct VmExit {
        /// The kind.
        pub reason: ExitKind,
        /// The cause, for people.
        pub message: String,
        /// When.
        pub at_unix_ms: u64,
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
        /// `kill` was asked for.
        Killed,
        /// The VMM failed, and says why.
        Failed,
        /// The VMM was killed from outside.
        Lost,
    }

    /// A VM.
    pub struct Vm {
        /// Its id.
        pub id: VmId,
        /// Its name.
        pub name: Name,
        /// What it does.
        pub state: VmState,
        /// Why it ended.
        pub exit: Option<VmExit>,
        /// Snapshot it was cloned from, or what it was forked from.
        pub snapshot: Option<Name>,
        /// The VM it was forked from.
        #[serde(default)]
        pub forked_from: Option<VmId>,
        /// Image of its root disk.
        pub image: Name,
        /// Its kernel.
        pub kernel: Name,
        /// vCPUs.
        pub vcpus: u8,
        /// RAM.
        pub memory_bytes: u64,
        /// When it was asked for.
        pub created_unix_ms: u64,
        /// Microseconds from the request to the agent's first answer.
        pub ready_us: Option<u64>,
        /// Whether it goes when the connection of the `run` that made it ends.
        pub ephemeral: bool,
        /// Where it is on the network, if it is.
        #[serde(default)]
        pub network: Option<VmNetwork>,
        /// As given.
        pub labels: BTreeMap<String, String>,
    }

    /// A VM, with what must be measured.
    pub struct VmDetails {
        /// What `ps` shows.
        pub vm: Vm,
        /// Process id of its VMM.
        pub pid: Option<u32>,
        /// Memory that only this VM takes, in KiB (private pages of the VMM).
        pub private_kib: u64,
        /// Its resident memory with what it shares, in KiB.
        pub resident_kib: u64,
        /// Bytes of disk that only this VM takes.
        pub disk_bytes: u64,
        /// How full the guest is, when its agent answers.
        pub guest: Option<GuestStat>,
        /// Anything its owner should know, such as a full disk.
        pub warnings: Vec<String>,
        /// Phases of its start: name, and microseconds since the request.
        pub timeline: Vec<(String, u64)>,
    }

    /// How full a guest is.
    pub struct GuestStat {
        /// As the agent says.
        pub stat: Stat,
        /// Whether the root disk has less than 1 % or 4 MiB left.
        pub disk_full: bool,
    }

    /// Clone (or boot), run, remove; one connection does it all.
    ///
    /// `POST /v1/run` with `Upgrade: dayfly-exec`: after `101` the client sends this as a `Request` frame, and the daemon answers with a
    /// `Reply` frame holding [`RunReply`]; from there on it is an exec ([`crate::agent`]). When the connection ends, so does the VM,
    /// unless `keep`.
    pub struct RunRequest {
        /// The VM.
        pub create: CreateRequest,
        /// The program.
        pub exec: ExecSpec,
        /// Leave the VM running afterwards.
        pub keep: bool,
    }

    /// Clone (or boot) a VM to talk to a program that runs in it as soon as the VM does, by its vsock port.
    ///
    /// `POST /v1/connect` with `Upgrade: dayfly-port` and this as its body: `101` once the port has taken the connection, which is from
    /// there on the port's bytes both ways. The client keeps its half open as long as it wants the VM: its end of stream ends the VM,
    /// unless `keep`.
    pub struct ConnectRequest {
        /// The VM.
        pub create: CreateRequest,
        /// The guest's vsock port.
        pub port: u32,
        /// Leave the VM running afterwards.
        pub keep: bool,
    }

    /// Exec in a VM: `POST /v1/vms/{vm}/exec` with `Upgrade: dayfly-exec`; after `101` the client sends [`ExecSpec`] as a `Request` frame and
    /// receives [`RunReply`] as a `Reply` frame.
    #[serde(tag = "reply", rename_all = "snake_case")]
    pub enum RunReply {
        /// The program runs.
        Started {
            /// The VM.
            vm: Box<Vm>,
            /// The program's process id in the guest.
            pid: u32,
        },
        /// It does not; the connection ends.
        Failed(ApiError),
    }

    /// Snapshot a VM: `POST /v1/vms/{vm}/snapshot`, answered with a stream of [`Progress`].
    pub struct SnapshotRequest {
        /// Name of the snapshot to make; must be free.
        pub name: Name,
    }

    /// Start clones of a VM that runs, with its memory and its disks as they are at one instant: `POST /v1/vms/{vm}/fork`. All of them, or none.
    pub struct ForkRequest {
        /// How many: 1 to 4096; 0 where there is a template.
        #[serde(default = "one")]
        pub count: u32,
        /// Name of the clone, where there is one; the id where there is none.
        #[serde(default)]
        pub name: Option<Name>,
        /// Of each of them.
        #[serde(default)]
        pub labels: BTreeMap<String, String>,
        /// How many clones of itself, at one time, the guest of each may ask for.
        #[serde(default)]
        pub forks: u32,
        /// A snapshot of this name, which must be free, is made of that instant; it can be cloned at once, and is stored meanwhile.
        #[serde(default)]
        pub template: Option<Name>,
    }

    /// What came of a fork.
    pub struct Forked {
        /// For so many microseconds the VM stood still.
        pub paused_us: u64,
        /// Pages that were copied meanwhile; all others were before.
        pub pages: u64,
        /// Microseconds from the request until it went on: from then on clones were born.
        pub frozen_us: u64,
        /// The clones; each has its identity.
        pub items: Vec<Vm>,
    }

    /// Something that a crash left behind.
    pub struct Leak {
        /// `process`, `mount`, `cgroup`, `socket`, `file`.
        pub kind: String,
        /// Which.
        pub what: String,
    }
}

/// A page of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct List<T> {
    /// What was asked for.
    pub items: Vec<T>,
}

/// The longest JSON body that the daemon reads, in bytes.
pub const MAX_JSON_BYTES: usize = 1 << 20;
/// The longest line of [`Progress`], in bytes.
pub const MAX_PROGRESS_BYTES: usize = 1 << 20;
/// The value of the `Upgrade` header for exec and run.
pub const UPGRADE: &str = "dayfly-exec";
/// The value of the `Upgrade` header for connections to ports.
pub const UPGRADE_PORT: &str = "dayfly-port";
/// The header of a `101` to a port that describes the VM: a [`Vm`] in JSON, in ASCII.
pub const VM_HEADER: &str = "dayfly-vm";
