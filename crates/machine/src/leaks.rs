//! Detects what a machine has left behind.

use crate::layout::Layout;
use crate::lock;
use crate::machine::Machine;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// A leftover of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Leak {
    /// A process that names the machine's folder although its supervisor is gone.
    Process {
        /// Process id.
        pid: i32,
        /// Command line, cut to 160 characters.
        command: String,
    },
    /// A mount below the machine's folder in the caller's mount namespace.
    Mount(String),
    /// A socket file on which no process listens.
    Socket(String),
}

impl std::fmt::Display for Leak {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Process { pid, command } => write!(f, "process {pid}: {command}"),
            Self::Mount(path) => write!(f, "mount {path}"),
            Self::Socket(path) => write!(f, "socket {path}"),
        }
    }
}

/// The leftovers of the machine below `home`. The list must be empty while the machine runs, and
/// after each kind of end. Stale sockets and unfinished files are removed first
/// ([`Machine::sweep`]), as a start and [`Machine::status`] do.
#[must_use]
pub fn leaks(home: &Path) -> Vec<Leak> {
    let Ok(home) = home.canonicalize() else { return Vec::new() };
    if let Ok(machine) = Machine::open(&home) {
        // A file that cannot be removed is reported below.
        drop(machine.sweep());
    }
    let layout = Layout::of_home(&home);
    let folder = layout.folder.display().to_string();
    // A running command may just be starting the supervisor.
    let command = layout
        .folder
        .exists()
        .then(|| lock::exclusive(&layout.command_lock(), Duration::ZERO, || {}));
    let busy = matches!(command, Some(Err(_)));
    let alive = lock::signer(&layout.life_lock()).is_some();
    let mut leaks = Vec::new();
    if !alive && !busy {
        for (pid, command) in processes() {
            // QEMU and virtiofsd name the folder with a slash behind it; the supervisor's orders
            // end it with a quote.
            let names_it =
                command.contains(&format!("{folder}/")) || command.contains(&format!("{folder}\""));
            if names_it && pid.cast_unsigned() != std::process::id() && is_ours(&command) {
                leaks.push(Leak::Process { pid, command: command.chars().take(160).collect() });
            }
        }
        for entry in fs::read_dir(&layout.folder).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|e| e == "sock") {
                leaks.push(Leak::Socket(entry.path().display().to_string()));
            }
        }
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    for at in mounts.lines().filter_map(|l| l.split(' ').nth(4)) {
        if at == folder || at.starts_with(&format!("{folder}/")) {
            leaks.push(Leak::Mount(at.to_owned()));
        }
    }
    leaks
}

/// Whether the command line is that of a machine's process. An editor or shell may name the folder
/// too, and does not count.
fn is_ours(command: &str) -> bool {
    let program = command.split('\0').next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or_default();
    program.starts_with("qemu-system") || program == "virtiofsd" || command.contains("build_digest")
}

/// All processes with their command lines, whose words are separated by NUL.
fn processes() -> Vec<(i32, String)> {
    let mut all = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        if let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok())
            && let Ok(command) = fs::read(entry.path().join("cmdline"))
        {
            all.push((pid, String::from_utf8_lossy(&command).into_owned()));
        }
    }
    all
}

/// The children of a process, with their names.
pub(crate) fn children(parent: i32) -> Vec<(i32, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else {
            continue;
        };
        let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        let field = |name: &str| {
            status.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_default().trim()
        };
        if field("PPid:").parse() == Ok(parent) {
            found.push((pid, field("Name:").to_owned()));
        }
    }
    found
}

/// Resident memory of a process, in bytes.
pub(crate) fn resident_bytes(pid: i32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}
