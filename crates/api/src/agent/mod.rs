//! The protocol between the host and the agent in a guest, over virtio-vsock.
//!
//! The agent listens on vsock port [`PORT`]. On the host that is the VM's unix socket, after
//! `CONNECT 1024\n` is answered with `OK <port>\n`. One connection carries one [`Request`]:
//!
//! ```text
//! client                                   agent
//!   Request (JSON), Strings* ─────────────▶
//!          ◀─────────────── Reply (JSON: Ok(..) or Err(..))
//!   exec: Stdin*, StdinEnd, Resize, Signal ▶
//!          ◀──────────── Stdout*, Stderr*, then one Exit, then close
//!   write: Data*, End ────────────────────▶
//!          ◀─────────────────────────── Reply when it is on disk
//!   read, log: ◀──────────────── Data*, End
//!   mount: after Ok, FUSE messages both ways, without frames
//! ```
//!
//! A client keeps its half of the connection open until it has the last frame. If the client's half
//! ends, the client is gone, and the agent kills its program unless the program is detached.
//!
//! - `Strings` follow an exec whose arguments and environment do not fit into its frame.
//! - The first `Reply` to a write reports that the folder is open; the second `Reply` ends the
//!   write.
//! - If a read fails midway, a `Reply::Err` replaces `End`.
//! - No `Data` frame that an agent sends is empty.
//! - The first output of a program without input may come with `Started`, up to 10 ms after the
//!   start.
//! - Names in an archive start with the last component of the requested path.
//!
//! At a cold boot the agent connects to the host's port [`READY_PORT`] (unix socket `<vsock
//! path>_1025`) once it listens. The agent then sends one [`Ready`] as a `Reply` frame, so the host
//! does not poll.
//!
//! Both sides check a frame against [`MAX_FRAME_BYTES`] before they allocate its body.

mod frame;
mod program;
mod spec;
mod strings;

pub use frame::{
    Frame, FrameError, FrameKind, HEADER_BYTES, MAX_FRAME_BYTES, decode_header, encode,
};

pub use program::{Exit, Program, find as find_program};
pub use spec::{ExecSpec, Strings, WindowSize};
pub use strings::{
    Collector, MAX_STRINGS_BYTES, Runs, STRINGS_PROTOCOL, StringsError, check_strings,
    kernel_bytes, request_frames,
};

use dayfly_units::VmId;
use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;

/// The version of this protocol. Agents of versions before have none. [`protocol_of`] reads it.
///
/// | version | adds |
/// |---|---|
/// | 1 | ids of detached programs; `program`, `tail` and `since_unix_ms` of `Log` |
/// | 1 | `Programs`, `SignalProgram`, `WaitForProgram`, `ForgetProgram` |
/// | 2 | `Mount` |
/// | 3 | `Strings` frames behind an `Exec` |
/// | 4 | `cpus` of an identity, and its reply `Cpus` |
pub const PROTOCOL: u32 = 4;

/// The version of this protocol from which on an agent starts CPUs.
pub const CPUS_PROTOCOL: u32 = 4;

/// The version of the protocol that an agent speaks: [`Ready::version`] is `<version>+<protocol>`,
/// and of agents without a version of the protocol `<version>`. Snapshots have it, so it is known
/// of a clone whose agent was never asked.
#[must_use]
pub fn protocol_of(agent_version: &str) -> u32 {
    agent_version.rsplit_once('+').and_then(|(_, protocol)| protocol.parse().ok()).unwrap_or(0)
}

/// The longest FUSE message in bytes: 1 MiB of data, and a page for headers.
pub const MAX_FUSE_BYTES: usize = (1 << 20) + 4096;
/// The shortest FUSE message in bytes: a `fuse_out_header` (linux/fuse.h).
pub const MIN_FUSE_BYTES: usize = 16;

/// The vsock port that the agent listens on.
pub const PORT: u32 = 1024;
/// The vsock port on the host (CID 2) to which the agent reports [`Ready`] after a cold boot.
pub const READY_PORT: u32 = 1025;

/// The vsock port on the host (CID 2) on which a VM with the right to fork asks for clones of
/// itself. A connection carries one [`HostRequest`] and one [`HostReply`], as frames.
pub const HOST_PORT: u32 = 1026;

/// A guest's request to its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum HostRequest {
    /// Asks for clones of this VM in its present state. In a clone the connection breaks; the clone
    /// learns its number from its identity.
    Fork {
        /// Number of clones.
        count: u32,
    },
}

/// The host's answer to a [`HostRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum HostReply {
    /// The fork is done. Only the VM that was forked receives this reply.
    Forked {
        /// Ids of the clones, by clone number from 1.
        ids: Vec<VmId>,
    },
    /// The fork was not done.
    Err {
        /// The cause, with expected and got.
        message: String,
    },
}

/// A request to the agent; the first frame of a connection, as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Asks for a [`Reply::Ready`], which the agent sends even while sealed.
    Ping,
    /// Prepares for a snapshot. The agent flushes what it can (sync), and then serves only `Ping`
    /// and `Identity` until the next [`Request::Identity`]. So a clone starts sealed.
    Seal,
    /// Prepares for a fork with all work that needs no identity. From now until [`Request::Forked`]
    /// or [`Request::Identity`], this VM may become a clone at any moment. Programs survive the
    /// loss of their connection meanwhile.
    Fork,
    /// Reports to the VM that was forked that the fork is over. Programs whose connections broke
    /// meanwhile end.
    Forked,
    /// Gives the VM a new identity, which ends the seal. The reply follows the last step.
    Identity(Identity),
    /// Runs a program.
    Exec(Box<ExecSpec>),
    /// Asks for a file or folder, as a tar stream in `Data` frames.
    ReadArchive {
        /// Absolute path in the guest.
        path: String,
    },
    /// Unpacks a tar stream of `Data` frames into a folder.
    WriteArchive {
        /// Absolute path of an existing folder in the guest.
        path: String,
    },
    /// Asks for the newest 256 KiB of a detached program's output. The answer is `Ok`, then `Data`
    /// frames, then `End`.
    Log {
        /// The program's process id, if there is no `program`.
        pid: u32,
        /// Whether to continue until no process can write to the output any more.
        follow: bool,
        /// The program's id, the unique start of it, or its process id (protocol 1).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        program: Option<String>,
        /// Begin with this number of last lines of the output so far (protocol 1).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tail: Option<u64>,
        /// Begin with the output since this time, to a second (protocol 1).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        since_unix_ms: Option<u64>,
    },
    /// Asks for the detached programs whose output is kept ([`Reply::Programs`]; protocol 1).
    Programs,
    /// Sends a signal to the process group of a detached program (protocol 1).
    SignalProgram {
        /// As in `Log`.
        program: String,
        /// The signal's number.
        signal: i32,
    },
    /// Waits for the end of a detached program ([`Reply::Program`]; protocol 1).
    WaitForProgram {
        /// As in `Log`.
        program: String,
    },
    /// Forgets a detached program that has ended, and its output (protocol 1).
    ForgetProgram {
        /// As in `Log`.
        program: String,
    },
    /// Mounts a file system whose FUSE messages come over this connection (protocol 2). After the
    /// reply `Ok` the connection carries whole messages both ways, the first four bytes of each
    /// are its length ([`MAX_FUSE_BYTES`]). The end of the connection ends the file system. An
    /// identity that makes this another machine unmounts it.
    Mount {
        /// Absolute path in the guest. It is made if it is missing.
        path: String,
        /// The source that the guest's list of mounts shows.
        name: String,
        /// Whether the guest may only read.
        read_only: bool,
    },
    /// Asks for the use of memory and root disk ([`Reply::Stat`]).
    Stat,
    /// Syncs and then ends the VM.
    Shutdown {
        /// `true` reboots, `false` powers off.
        reboot: bool,
    },
}

impl Runs for Request {
    fn program(&mut self) -> Option<&mut ExecSpec> {
        match self {
            Self::Exec(spec) => Some(spec),
            _ => None,
        }
    }
}

/// The identity that a clone gets before its agent serves requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Kernel hostname and /etc/hostname.
    pub hostname: String,
    /// 32 hexadecimal digits for /etc/machine-id.
    pub machine_id: String,
    /// Time of day, in nanoseconds since 1970.
    pub wall_clock_ns: u64,
    /// Fresh entropy of the host (hexadecimal, at least 64 bytes). The agent mixes it in and
    /// credits it: RNDADDENTROPY, then RNDRESEEDCRNG.
    pub entropy: String,
    /// Number of this clone within its fork, from 1. 0 means that the VM is not a clone of a fork.
    #[serde(default)]
    pub number: u32,
    /// The VM's identity on its network. `None` means no network: the agent removes an earlier
    /// configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkIdentity>,
    /// How long this host waits for an answer of the agent, in milliseconds. The agent's own time
    /// limits, for hooks and for programs with a barrier, are parts of it. If `None`, as from older
    /// hosts, [`ANSWER_MS`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_ms: Option<u64>,
    /// Number of CPUs that the machine has, if it has more than the agent's snapshot. Once the
    /// machine has its identity, the agent starts those that do not run, and answers
    /// [`Reply::Cpus`]; without them, [`Reply::Ok`] (protocol 4).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
}

/// How long a host waits for an answer of the agent if it does not say so, in milliseconds.
pub const ANSWER_MS: u64 = 30_000;

impl Identity {
    /// How long the host waits for an answer of the agent: `answer_ms`, within 1 s and 1 h.
    #[must_use]
    pub fn answer_time(&self) -> std::time::Duration {
        let ms = self.answer_ms.unwrap_or(ANSWER_MS).clamp(1_000, 3_600_000);
        std::time::Duration::from_millis(ms)
    }
}

/// The domain of VM names. The VMs' nameserver answers for it, and the agent makes it a guest's
/// search list. `internal` is reserved for private use (ICANN, resolution of 2024-07-29).
pub const DOMAIN: &str = "dayfly.internal";

/// A VM's identity on its network. The VM has one interface, and reaches everything except the
/// gateway through the gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkIdentity {
    /// MAC address of the interface: six bytes in hexadecimal, `02:df:0a:58:00:02`.
    pub mac: String,
    /// IPv4 address of the VM, with prefix length 32: no other host is on the link.
    pub address: Ipv4Addr,
    /// IPv4 address of the gateway, the next hop for every destination.
    pub gateway: Ipv4Addr,
    /// MAC address of the gateway, which saves the guest an ARP request. If `None`, the guest sends
    /// one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway_mac: Option<String>,
    /// The nameservers in /etc/resolv.conf.
    pub nameservers: Vec<Ipv4Addr>,
}

/// The agent's answer to a [`Request`], as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// The request is done.
    Ok,
    /// The machine has its identity, and the agent has started CPUs (protocol 4).
    Cpus {
        /// Number of CPUs that run now.
        online: u32,
        /// Why no more run; absent if all do that were to.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
    /// The agent is ready.
    Ready(Ready),
    /// The program has started.
    Started {
        /// The program's process id in the guest.
        pid: u32,
        /// The program's id, if it is detached (protocol 1).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<String>,
    },
    /// The detached programs whose output is kept, the oldest first.
    Programs {
        /// The programs.
        programs: Vec<Program>,
    },
    /// A detached program that has ended.
    Program(Program),
    /// The use of memory and root disk.
    Stat(Stat),
    /// The request failed.
    Err(Failure),
}

/// The agent's description of itself and its guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Version of the agent, `+`, and [`PROTOCOL`].
    pub version: String,
    /// Release of the guest's kernel.
    pub kernel: String,
    /// Microseconds from the kernel's start to this reply.
    pub uptime_us: u64,
    /// Whether the agent is sealed: it waits for an identity.
    pub sealed: bool,
}

/// The use of a guest's root disk and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Stat {
    /// Size of the root file system in bytes.
    pub disk_total_bytes: u64,
    /// Bytes that an unprivileged program can still write to it.
    pub disk_available_bytes: u64,
    /// Number of files that can still be created.
    pub disk_available_files: u64,
    /// MemTotal in bytes.
    pub memory_total_bytes: u64,
    /// MemAvailable in bytes.
    pub memory_available_bytes: u64,
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The kind of failure, for programs.
    pub code: FailureCode,
    /// What failed and where, with expected and got, for people.
    pub message: String,
}

/// Kinds of [`Failure`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCode {
    /// The request is invalid.
    Invalid,
    /// The agent is sealed and waits for an identity.
    Sealed,
    /// The program (docker's exit code 127) or file does not exist.
    NotFound,
    /// The program cannot be run (docker's exit code 126), or the file cannot be read.
    NotPermitted,
    /// The disk is full.
    NoSpace,
    /// Any other failure.
    Io,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_protocol_of_an_agent_is_behind_its_version() {
        for (version, protocol) in
            [("0.1.0", 0), ("0.1.0+1", 1), ("", 0), ("1+x", 0), ("2+rc+7", 7), ("0.1.0+-1", 0)]
        {
            assert_eq!(protocol_of(version), protocol, "{version}");
        }
    }

    #[test]
    fn requests_are_those_of_the_version_before_unless_they_need_more() {
        let log = |program, tail| Request::Log {
            pid: 7,
            follow: true,
            program,
            tail,
            since_unix_ms: None,
        };
        let json = serde_json::to_string(&log(None, None)).unwrap();
        assert_eq!(json, r#"{"op":"log","pid":7,"follow":true}"#);
        assert_eq!(serde_json::from_str::<Request>(&json).unwrap(), log(None, None));
        let json = serde_json::to_string(&Reply::Started { pid: 7, id: None }).unwrap();
        assert_eq!(json, r#"{"reply":"started","pid":7}"#);
        let more = log(Some("a".into()), Some(0));
        let json = serde_json::to_string(&more).unwrap();
        assert_eq!(serde_json::from_str::<Request>(&json).unwrap(), more);
    }
}
