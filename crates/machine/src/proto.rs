//! What the host and the machine say to each other.
//!
//! * The **control line**, a virtio-serial port: text lines. From the machine `phase TEXT`, `ready`, `failed TEXT`, `bye`;
//!   from the host `poweroff` and `time NANOSECONDS` (since 1970).
//! * Port [`API_PORT`]: a plain stream, joined to the daemon's unix socket.
//! * Port [`EXEC_PORT`]: frames of one byte kind, four bytes little-endian length, body. The client sends one
//!   [`Request`]; the machine answers as its kind says.
//!
//! Both ports are reached through a network that only the supervisor's namespace and the machine are in.

use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};

/// Name of the virtio-serial port of the control line.
pub const CONTROL_PORT_NAME: &str = "dayfly.control";
/// Name of the virtio-serial port that the daemon's output goes to.
pub const LOG_PORT_NAME: &str = "dayfly.log";
/// TCP port in the machine that leads to the daemon's socket.
pub const API_PORT: u16 = 1024;
/// TCP port in the machine for [`Request`]s.
pub const EXEC_PORT: u16 = 1025;
/// Where the machine finds its [`GuestConfig`].
pub const GUEST_CONFIG_PATH: &str = "/etc/machine.json";
/// Where the daemon listens in the machine.
pub const DAEMON_SOCKET: &str = "/run/dayfly/dayflyd.sock";
/// Longest body of a frame; longer is an error before anything is allocated.
pub const MAX_FRAME_BYTES: usize = 256 << 10;

/// What the initramfs tells the machine's init.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestConfig {
    /// Modules to load, in order.
    pub modules: Vec<String>,
    /// The daemon; nothing is started without.
    pub daemon: Option<DaemonConfig>,
    /// Virtiofs tags and the folder of the host that each shows; the one for `/` comes first.
    pub shares: Vec<GuestShare>,
    /// Folders that lie on the file system shared for `/` and are wanted unbuffered and read-only below `/host`.
    pub live: Vec<String>,
    /// The machine's own hostname.
    pub hostname: String,
}

/// One file system of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestShare {
    /// Virtiofs tag.
    pub tag: String,
    /// Path on the host.
    pub path: String,
}

/// How the daemon is started and recognised.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonConfig {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Added to its environment.
    pub env: Vec<(String, String)>,
}

/// The first frame of a connection to [`EXEC_PORT`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Runs a program.
    Exec(ExecSpec),
    /// Asks for a [`GuestStatus`].
    Status,
}

/// Which file tree a program sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Root {
    /// The machine's own: busybox, the daemon, the VMM.
    #[default]
    Machine,
    /// The host's files under a layer that takes writes and is lost when the machine stops.
    Host,
}

/// A program to run as root in the machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecSpec {
    /// Program (looked up in PATH) and arguments.
    pub argv: Vec<String>,
    /// Added to a small default environment.
    pub env: Vec<(String, String)>,
    /// Folder to start in; `/` when absent.
    pub cwd: Option<String>,
    /// Which tree.
    pub root: Root,
    /// A pseudo-terminal of this size instead of three pipes.
    pub tty: Option<WindowSize>,
}

/// Size of a terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    /// It returned this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
}

impl Exit {
    /// As a shell says it: the code, or 128 + the signal.
    #[must_use]
    pub fn shell_code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

/// What the machine says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestStatus {
    /// `uname -r`.
    pub kernel: String,
    /// Milliseconds since its kernel started.
    pub uptime_ms: u64,
    /// Online CPUs.
    pub cpus: u32,
    /// Whether `/dev/kvm` is there.
    pub kvm: bool,
    /// Whether its CPUs have SVM, and nested paging.
    pub svm: bool,
    /// Nested paging.
    pub npt: bool,
    /// Bytes of memory.
    pub memory_total_bytes: u64,
    /// Bytes that could be had without swapping.
    pub memory_available_bytes: u64,
    /// Bytes of the disk at /var/lib/dayfly.
    pub disk_total_bytes: u64,
    /// Free bytes of it.
    pub disk_free_bytes: u64,
    /// Whether the host's files are at /host.
    pub host_files: bool,
    /// The daemon, when one is configured.
    pub daemon: Option<DaemonStatus>,
}

/// The daemon as the machine's init sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// Its process in the machine, while it lives.
    pub pid: Option<u32>,
    /// How often it was started again.
    pub restarts: u32,
    /// Whether it has answered since it was last started.
    pub answering: bool,
    /// How it ended last.
    pub last_end: Option<String>,
}

/// What a frame's body is.
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
    /// JSON of an [`Exit`]; nothing follows.
    Exit = 12,
    /// Text: why the request was not done; nothing follows.
    Failed = 13,
    /// JSON of a [`GuestStatus`]; nothing follows.
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

/// Writes one frame in one call, so that frames of several threads do not mix when the caller holds a lock.
///
/// # Errors
/// The sink's, and `InvalidInput` for a body longer than [`MAX_FRAME_BYTES`].
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

/// Reads one frame; `None` when the stream ends before one begins.
///
/// # Errors
/// The source's, and `InvalidData` for an unknown kind or a length above [`MAX_FRAME_BYTES`].
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
    let kind = Kind::from_byte(kind).ok_or_else(|| bad(format!("frame kind at byte 0: unknown {kind}")))?;
    let length = u32::from_le_bytes([a, b, c, d]);
    let length = usize::try_from(length).ok().filter(|n| *n <= MAX_FRAME_BYTES).ok_or_else(|| {
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
