//! What goes between the host and the agent in a guest, over virtio-vsock.
//!
//! The agent listens on vsock port [`PORT`]; on the host that is the VM's unix socket, after `CONNECT 1024\n`
//! was answered with `OK <port>\n`. One connection carries one [`Request`]:
//!
//! ```text
//! client                                   agent
//!   Request (JSON) ───────────────────────▶
//!          ◀─────────────── Reply (JSON: Ok(..) or Err(..))
//!   exec: Stdin*, StdinEnd, Resize, Signal ▶
//!          ◀──────────── Stdout*, Stderr*, then one Exit, then close
//!   write: Data*, End ────────────────────▶
//!          ◀─────────────────────────── Reply when it is on disk
//!   read:  ◀──────────────────── Data*, End
//! ```
//!
//! A client keeps its half open until it has the last frame: an end of stream means that it is gone, which kills its
//! program (unless that is detached). A write's first `Reply` says that the folder is open, the second ends it; where a
//! read fails midway, a `Reply::Err` comes in `End`'s place. The first output of a program that takes no input may
//! come with `Started`, up to 10 ms after it. Names in an archive start with the last component of the path asked for.
//!
//! At a cold boot the agent connects to the host's port [`READY_PORT`] (unix socket `<vsock path>_1025`) once it
//! listens, and sends one [`Ready`] as a `Reply` frame; nobody polls.
//!
//! Both sides cap a frame at [`MAX_FRAME_BYTES`], before they allocate for it.

mod frame;

pub use frame::{Frame, FrameError, FrameKind, HEADER_BYTES, MAX_FRAME_BYTES, decode_header, encode};

use dayfly_units::VmId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// The vsock port that the agent listens on.
pub const PORT: u32 = 1024;
/// The vsock port on the host (CID 2) to which the agent reports [`Ready`] after a cold boot.
pub const READY_PORT: u32 = 1025;

/// The vsock port on the host (CID 2) at which a VM that may asks for clones of itself: one [`HostRequest`], one [`HostReply`], as frames.
pub const HOST_PORT: u32 = 1026;

/// What a guest asks of its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum HostRequest {
    /// Clones of this machine as it is now. In a clone the connection breaks; who it is comes with its identity.
    Fork {
        /// How many.
        count: u32,
    },
}

/// What the host answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum HostReply {
    /// This is the machine that was forked, and these are its clones.
    Forked {
        /// By number, from 1.
        ids: Vec<VmId>,
    },
    /// It was not done.
    Err {
        /// What, expected and got.
        message: String,
    },
}

/// What is asked of the agent; the first frame of a connection, as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Is the agent there? Answered with [`Reply::Ready`], also while sealed.
    Ping,
    /// Before a snapshot: flush what can be flushed (sync), then serve nothing but `Ping` and `Identity` until the next
    /// [`Request::Identity`]. A clone therefore starts sealed.
    Seal,
    /// Before a fork: do what can be done before an identity is known. From now until [`Request::Forked`] or [`Request::Identity`] this may be a
    /// clone any moment: programs whose connections break live on.
    Fork,
    /// The fork is over, and this is the machine that was forked: programs whose connections broke meanwhile end.
    Forked,
    /// Become this machine; ends the seal. Every step is done before the reply.
    Identity(Identity),
    /// Run a program.
    Exec(Box<ExecSpec>),
    /// Send a file, or a folder, as a tar stream in `Data` frames.
    ReadArchive {
        /// Absolute path in the guest.
        path: String,
    },
    /// Unpack a tar stream of `Data` frames into a folder.
    WriteArchive {
        /// Absolute path of an existing folder in the guest.
        path: String,
    },
    /// How full memory and the root disk are.
    Stat,
    /// Sync, then end the machine.
    Shutdown {
        /// `true`: reboot, `false`: power off.
        reboot: bool,
    },
}

/// What a clone becomes before anything is served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Kernel hostname and /etc/hostname.
    pub hostname: String,
    /// 32 hexadecimal digits for /etc/machine-id.
    pub machine_id: String,
    /// Wall clock, nanoseconds since 1970.
    pub wall_clock_ns: u64,
    /// Fresh host entropy (hexadecimal, at least 64 bytes) mixed in and credited: RNDADDENTROPY, then RNDRESEEDCRNG.
    pub entropy: String,
    /// Which clone of a fork it is, from 1; 0: of none.
    #[serde(default)]
    pub number: u32,
    /// Who it is on its network; `None`: it has none, and what it was configured with before is taken away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkIdentity>,
}

/// Who a machine is on its network. It has one interface, and everything but the gateway lies behind the gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkIdentity {
    /// The interface's address: six bytes in hexadecimal, `02:df:0a:58:00:02`.
    pub mac: String,
    /// The machine's address, on its own: no other is on the same link.
    pub address: Ipv4Addr,
    /// Where everything is sent to.
    pub gateway: Ipv4Addr,
    /// Its interface's address, so that it need not be asked for; where it is not known, it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway_mac: Option<String>,
    /// Who knows names: the lines of /etc/resolv.conf.
    pub nameservers: Vec<Ipv4Addr>,
}

/// A program to run in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExecSpec {
    /// Program and arguments; looked up in the PATH of `env`, or the agent's.
    pub argv: Vec<String>,
    /// Variables added to the agent's few (PATH, HOME, TERM where there is a pty).
    pub env: BTreeMap<String, String>,
    /// Working directory; the user's home where empty, `/` where that is missing.
    pub cwd: String,
    /// `name`, `uid`, `name:group` or `uid:gid`; empty: root.
    pub user: String,
    /// Give it a pseudo-terminal of this size; standard error then arrives with standard output.
    pub pty: Option<WindowSize>,
    /// Kill its process group after so many milliseconds.
    pub timeout_ms: Option<u64>,
    /// Whether `Stdin` frames will come; otherwise it reads from /dev/null.
    pub stdin: bool,
    /// Let it (and its children) live on when the connection ends; its streams go to the console log.
    pub detach: bool,
}

/// A terminal's size in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WindowSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub cols: u16,
}

/// The agent's answer to a [`Request`], as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// Done.
    Ok,
    /// The agent is there.
    Ready(Ready),
    /// The program runs.
    Started {
        /// Its process id in the guest.
        pid: u32,
    },
    /// How full the machine is.
    Stat(Stat),
    /// It could not be done.
    Err(Failure),
}

/// What the agent says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Version of the agent.
    pub version: String,
    /// Release of the guest's kernel.
    pub kernel: String,
    /// Microseconds from the kernel's start to here.
    pub uptime_us: u64,
    /// Whether it waits for an identity.
    pub sealed: bool,
}

/// How full a guest is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Stat {
    /// Size of the root file system in bytes.
    pub disk_total_bytes: u64,
    /// Bytes that an unprivileged program can still write to it.
    pub disk_available_bytes: u64,
    /// Files that can still be made.
    pub disk_available_files: u64,
    /// MemTotal in bytes.
    pub memory_total_bytes: u64,
    /// MemAvailable in bytes.
    pub memory_available_bytes: u64,
}

/// Why something was not done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What kind, for programs.
    pub code: FailureCode,
    /// What, where, expected and got, for people.
    pub message: String,
}

/// Kinds of [`Failure`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCode {
    /// The request does not make sense.
    Invalid,
    /// The agent is sealed and waits for an identity.
    Sealed,
    /// No such program (docker's exit code 127) or file.
    NotFound,
    /// There, but it cannot be run (docker's exit code 126) or read.
    NotPermitted,
    /// The disk is full.
    NoSpace,
    /// Anything else.
    Io,
}

/// How a program ended, as JSON in the `Exit` frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Its exit code, unless a signal ended it.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Whether `timeout_ms` ran out.
    pub timed_out: bool,
}
