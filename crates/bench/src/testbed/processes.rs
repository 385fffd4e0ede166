//! VMM processes of a testbed, by the name that its daemon gives them.

use crate::proc::Stat;
use dayfly_host::process::ProcessId;
use dayfly_units::VmId;
use std::path::Path;

/// A VMM process, or a zygote.
#[derive(Debug, Clone, Copy)]
pub struct Vmm {
    /// Its identity.
    pub process: ProcessId,
    /// Its VM. A zygote and the process that the zygote has forked ahead have none.
    pub vm: Option<VmId>,
    /// Its parent's pid.
    pub parent: u32,
}

/// The pids of all processes.
pub fn pids() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

impl Vmm {
    /// All processes called `name`. A zombie has no name, so it is not among them.
    pub fn all(name: &Path) -> Vec<Self> {
        pids().filter_map(|pid| Self::at(pid, name)).collect()
    }

    /// The process with this pid, if it is called `name`.
    pub fn at(pid: u32, name: &Path) -> Option<Self> {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let mut words = line.split(|byte| *byte == 0);
        (words.next()? == name.as_os_str().as_encoded_bytes()).then_some(())?;
        let process = ProcessId::of(pid).ok()??;
        words.find(|word| *word == b"--id");
        let vm = words.next().and_then(|id| std::str::from_utf8(id).ok()?.parse().ok());
        Some(Self { process, vm, parent: Stat::of(pid)?.number(4)? })
    }
}
