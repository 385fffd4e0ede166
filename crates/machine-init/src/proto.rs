//! The protocol between the host and the machine.
//!
//! * The **control line** is a virtio-serial port with text lines. The machine sends `phase TEXT`,
//!   `ready`, `failed TEXT` and `bye`. The host sends `token HEX` first, then `poweroff` and `time
//!   NANOSECONDS` (since 1970).
//! * Port [`API_PORT`] is a plain stream, joined to the daemon's unix socket.
//! * Port [`EXEC_PORT`] carries frames: one byte kind, four bytes little-endian length, body. The
//!   client sends one [`Request`]; the kind of the request determines the machine's answer.
//!
//! Each connection to a port begins with the [`TOKEN_BYTES`] bytes of the start's
//! [`crate::token::Token`].
//!
//! ```text
//! the host                        │ the machine
//! supervisor's network namespace ─┼─ control namespace: eth0, the listeners of both ports
//!                                 │      no interface in common, no route
//!                                 │  first namespace: dayflyd, the VMs' uplinks
//! ```
//! The card of the uplink, if there is one, is in the first namespace.
//! A VM that owns every address of the first namespace still has no way to a port. The network
//! between supervisor and machine is in the control namespace, which holds nothing else.

use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::Ipv4Addr;
use std::time::Duration;

/// Name of the virtio-serial port of the control line.
pub const CONTROL_PORT_NAME: &str = "dayfly.control";
/// Name of the virtio-serial port for the daemon's output.
pub const LOG_PORT_NAME: &str = "dayfly.log";
/// TCP port in the machine that leads to the daemon's socket.
pub const API_PORT: u16 = 1024;
/// TCP port in the machine for [`Request`]s.
pub const EXEC_PORT: u16 = 1025;
/// The machine's address on the network between machine and supervisor.
pub const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
/// The network mask of the machine's and the supervisor's addresses.
pub const GUEST_MASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 0);
/// MAC of the network card whose link has only supervisor and machine.
pub const CONTROL_MAC: [u8; 6] = [0x02, 0xdf, 0, 0, 1, 1];
/// MAC of the network card by which the machine and its VMs reach other hosts: the uplink.
pub const UPLINK_MAC: [u8; 6] = [0x02, 0xdf, 0, 0, 1, 2];
/// The machine's address on the uplink: a link-local one (RFC 3927), because it must be free on
/// the user's host too.
pub const UPLINK_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 77, 2);
/// The network mask of the uplink's addresses.
pub const UPLINK_MASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 248);
/// The uplink's gateway.
pub const UPLINK_GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 77, 1);
/// The uplink's DNS server, which forwards to the resolvers of the user's host.
pub const UPLINK_DNS: Ipv4Addr = Ipv4Addr::new(169, 254, 77, 3);
/// Length in bytes of the token at the start of each connection.
pub const TOKEN_BYTES: usize = 32;
/// How long the machine waits for a connection's token.
pub const TOKEN_DEADLINE: Duration = Duration::from_secs(10);
/// Connections to [`API_PORT`] that are served at a time; further ones wait.
pub const MAX_API_CONNECTIONS: usize = 1024;
/// Connections to [`EXEC_PORT`] that are served at a time; further ones wait.
pub const MAX_EXEC_CONNECTIONS: usize = 128;
/// Path of the [`GuestConfig`] in the machine.
pub const GUEST_CONFIG_PATH: &str = "/etc/machine.json";
/// Path of the daemon's socket in the machine.
pub const DAEMON_SOCKET: &str = "/run/dayfly/dayflyd.sock";
/// Longest body of a frame in bytes. A longer one is an error before anything is allocated.
pub const MAX_FRAME_BYTES: usize = 256 << 10;

/// The configuration of the machine's init, stored in the initramfs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestConfig {
    /// Modules to load, in order.
    pub modules: Vec<String>,
    /// The daemon to start, if any.
    pub daemon: Option<DaemonConfig>,
    /// Folders of the host. Outer folders come before those inside them.
    pub shares: Vec<GuestShare>,
    /// Symbolic links of the host's root into shared folders (`/bin` to `usr/bin`): name, target.
    pub links: Vec<(String, String)>,
    /// The machine's hostname.
    pub hostname: String,
    /// Whether the machine has an uplink.
    #[serde(default)]
    pub uplink: bool,
}

/// One shared folder of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestShare {
    /// Name of its folder below `/shares`.
    pub name: String,
    /// Virtiofs tag.
    pub tag: String,
    /// Path on the host.
    pub path: String,
    /// Whether the machine may write into the folder.
    pub writable: bool,
}

/// How to start the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonConfig {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables added to its environment.
    pub env: Vec<(String, String)>,
}

/// The first frame of a connection to [`EXEC_PORT`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Runs a program.
    Exec(ExecSpec),
    /// Asks for the [`GuestStatus`].
    Status,
}

/// The file tree that a program sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Root {
    /// The machine's own tree: busybox, the daemon, the VMM.
    #[default]
    Machine,
    /// The shared folders of the host, each at its path on the host, with the machine's own /proc,
    /// /sys, /dev, /run, /tmp and /var/lib/dayfly. A machine without shares has no such tree.
    Host,
}

/// A program to run as root in the machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecSpec {
    /// Program (looked up in PATH) and arguments.
    pub argv: Vec<String>,
    /// Variables added to a small default environment.
    pub env: Vec<(String, String)>,
    /// Folder to start in; if `None`, `/`.
    pub cwd: Option<String>,
    /// The file tree that the program sees.
    pub root: Root,
    /// If set, the program gets a pseudo-terminal of this size instead of three pipes.
    pub tty: Option<WindowSize>,
}

/// Size of a terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowSize {
    /// Lines of text.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    /// The program returned this code.
    Code(i32),
    /// This signal ended the program.
    Signal(i32),
}

impl Exit {
    /// The exit code as a shell reports it: the code, or 128 + the signal.
    #[must_use]
    pub fn shell_code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

/// The machine's status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestStatus {
    /// Kernel version, as `uname -r` prints it.
    pub kernel: String,
    /// Milliseconds since the machine's kernel started.
    pub uptime_ms: u64,
    /// Number of online CPUs.
    pub cpus: u32,
    /// Whether `/dev/kvm` exists.
    pub kvm: bool,
    /// Whether the CPUs have SVM.
    pub svm: bool,
    /// Whether the CPUs have nested paging.
    pub npt: bool,
    /// Total memory in bytes.
    pub memory_total_bytes: u64,
    /// Memory in bytes that is available without swapping.
    pub memory_available_bytes: u64,
    /// Size in bytes of the disk at /var/lib/dayfly.
    pub disk_total_bytes: u64,
    /// Free bytes of that disk.
    pub disk_free_bytes: u64,
    /// Names of the host's folders below /shares.
    #[serde(default)]
    pub shares: Vec<String>,
    /// The daemon's status, if a daemon is configured.
    pub daemon: Option<DaemonStatus>,
}

/// The daemon's status, as the machine's init sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// The daemon's process id in the machine, while it lives.
    pub pid: Option<u32>,
    /// Number of restarts.
    pub restarts: u32,
    /// Whether the daemon answered a request just now.
    pub answering: bool,
    /// Cause of the daemon's last end.
    pub last_end: Option<String>,
}

/// The kind of a frame, which determines its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// JSON of a [`Request`].
    Request = 1,
    /// Bytes for standard input.
    Stdin = 2,
    /// No more standard input.
    StdinEnd = 3,
    /// JSON of a [`WindowSize`].
    Resize = 4,
    /// Bytes of standard output.
    Stdout = 10,
    /// Bytes of standard error.
    Stderr = 11,
    /// JSON of an [`Exit`]; the last frame.
    Exit = 12,
    /// Text that says why the request failed; the last frame.
    Failed = 13,
    /// JSON of a [`GuestStatus`]; the last frame.
    Status = 14,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        use Kind::{Exit, Failed, Request, Resize, Status, Stderr, Stdin, StdinEnd, Stdout};
        [Request, Stdin, StdinEnd, Resize, Stdout, Stderr, Exit, Failed, Status]
            .into_iter()
            .find(|k| *k as u8 == byte)
    }
}

/// Writes one frame in one call. If several threads write, the caller must hold a lock around each
/// call.
///
/// # Errors
/// The sink's errors, and `InvalidInput` for a body longer than [`MAX_FRAME_BYTES`].
pub fn write_frame(out: &mut impl Write, kind: Kind, body: &[u8]) -> io::Result<()> {
    let length = u32::try_from(body.len()).ok().filter(|_| body.len() <= MAX_FRAME_BYTES);
    let length = length.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("frame: at most {MAX_FRAME_BYTES} bytes, got {}", body.len()),
        )
    })?;
    let mut frame = Vec::with_capacity(5 + body.len());
    frame.push(kind as u8);
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(body);
    out.write_all(&frame)
}

/// Reads one frame; `None` if the stream ends before a frame begins.
///
/// # Errors
/// The source's errors, and `InvalidData` for an unknown kind or a length above
/// [`MAX_FRAME_BYTES`].
pub fn read_frame(from: &mut impl Read) -> io::Result<Option<(Kind, Vec<u8>)>> {
    let mut header = [0; 5];
    let mut have = 0;
    while have < header.len() {
        match from.read(&mut header[have..]) {
            Ok(0) if have == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => have += count,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let [kind, a, b, c, d] = header;
    let bad = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    let kind = Kind::from_byte(kind)
        .ok_or_else(|| bad(format!("frame kind at byte 0: unknown {kind}")))?;
    let length = u32::from_le_bytes([a, b, c, d]);
    let length =
        usize::try_from(length).ok().filter(|n| *n <= MAX_FRAME_BYTES).ok_or_else(|| {
            bad(format!("frame length at byte 1: expected at most {MAX_FRAME_BYTES}, got {length}"))
        })?;
    let mut body = vec![0; length];
    from.read_exact(&mut body)?;
    Ok(Some((kind, body)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_and_truncated_ones_do_not() {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, Kind::Stdout, b"hello").unwrap();
        for length in 0..bytes.len() {
            let read = read_frame(&mut &bytes[..length]);
            assert!(if length == 0 { matches!(read, Ok(None)) } else { read.is_err() }, "{length}");
        }
        assert_eq!(read_frame(&mut &bytes[..]).unwrap(), Some((Kind::Stdout, b"hello".to_vec())));
    }

    #[test]
    fn foreign_kinds_and_lengths_are_refused_before_allocation() {
        assert!(read_frame(&mut &[99, 0, 0, 0, 0][..]).is_err());
        assert!(read_frame(&mut &[10, 0xff, 0xff, 0xff, 0xff, 0, 0][..]).is_err());
        assert!(write_frame(&mut Vec::new(), Kind::Stdout, &vec![0; MAX_FRAME_BYTES + 1]).is_err());
    }
}
