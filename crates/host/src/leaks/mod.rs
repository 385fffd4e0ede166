//! What a crash left behind: found by a scan, decided without I/O, removed one by one.
//!
//! ```text
//! scan(places) ──▶ Found ──decide(found, known)──▶ [Leak] ──sweep──▶ gone
//! ```
//!
//! Only [`decide`] decides what is a leak: everything of dayfly's that names an unknown VM, or no
//! VM. A thing of a known VM is never a leak. So a sweep may run at any time. The daemon must
//! register a VM before creating anything for it, and forget the VM after removing everything.

use crate::groups::{GroupName, Groups};
use crate::process::{Process, ProcessId, VmProcess};
use crate::{mounts, process};
use dayfly_units::VmId;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where to look for things of VMs.
#[derive(Debug, Clone)]
pub struct Places {
    /// `argv[0]` of a VMM process, without its folder.
    pub program: String,
    /// Folders with one entry per VM, named by its [`VmId`], such as `/run/dayfly/vms` and the
    /// store's `vms`. A missing folder counts as empty.
    pub vm_folders: Vec<PathBuf>,
    /// Folders that hold only unfinished work, such as the store's `staging`. After a crash,
    /// everything in them is a leak except [`Known::temporary`].
    pub temporary: Vec<PathBuf>,
    /// Mounts at or below any of these paths count as dayfly's.
    pub mount_roots: Vec<PathBuf>,
}

/// What a scan found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// VMM processes.
    pub processes: Vec<VmProcess>,
    /// Mount points.
    pub mounts: Vec<PathBuf>,
    /// Control groups of VMs and templates in which no process is. One with a process is never a
    /// leak by itself: the process may be.
    pub groups: Vec<GroupName>,
    /// Entries of the VMs' folders.
    pub entries: Vec<PathBuf>,
    /// Entries of temporary folders.
    pub temporary: Vec<PathBuf>,
}

/// What is meant to exist: every VM, and its process if it has one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known {
    /// `None`: the VM is known and has no process now. Any other process than the one named is a
    /// leak.
    pub vms: BTreeMap<VmId, Option<ProcessId>>,
    /// Mount points that are meant to exist although they belong to no VM.
    pub mounts: BTreeSet<PathBuf>,
    /// Temporary entries that are in use.
    pub temporary: BTreeSet<PathBuf>,
    /// Control groups that are in use, or ready.
    pub groups: BTreeSet<GroupName>,
}

/// One thing that a crash left behind.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Leak {
    /// A VMM process. First in the order, because a process may keep the other kinds in use.
    Process(ProcessId, VmId),
    /// A mount point.
    Mount(PathBuf),
    /// A control group.
    Group(GroupName),
    /// A socket, by path.
    Socket(PathBuf),
    /// A file or folder, by path.
    File(PathBuf),
}

impl Leak {
    /// The kind as a word: `process`, `mount`, `cgroup`, `socket` or `file`.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Process(..) => "process",
            Self::Mount(_) => "mount",
            Self::Group(_) => "cgroup",
            Self::Socket(_) => "socket",
            Self::File(_) => "file",
        }
    }
}

impl fmt::Display for Leak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(process, vm) => write!(f, "process {} of VM {vm}", process.pid),
            Self::Group(group) => write!(f, "control group {group}"),
            Self::Mount(path) | Self::Socket(path) | Self::File(path) => {
                write!(f, "{}", path.display())
            }
        }
    }
}

/// Decides which of `found` are leaks, in the order in which to sweep them. Does no I/O: [`find`]
/// distinguishes sockets from files.
#[must_use]
pub fn decide(found: &Found, known: &Known) -> Vec<Leak> {
    let mut leaks = Vec::new();
    for p in &found.processes {
        if known.vms.get(&p.vm).copied().flatten() != Some(p.process) {
            leaks.push(Leak::Process(p.process, p.vm));
        }
    }
    // The deepest mount first, because a later mount in the table may lie inside an earlier one.
    for point in found.mounts.iter().rev() {
        if !known.mounts.contains(point) && !belongs(point, known) {
            leaks.push(Leak::Mount(point.clone()));
        }
    }
    let groups = found.groups.iter().filter(|group| !known.groups.contains(group));
    leaks.extend(groups.copied().map(Leak::Group));
    leaks.extend(
        found.entries.iter().filter(|path| !entry_of_known(path, known)).cloned().map(Leak::File),
    );
    leaks.extend(
        found
            .temporary
            .iter()
            .filter(|path| !known.temporary.contains(*path))
            .cloned()
            .map(Leak::File),
    );
    leaks
}

/// Whether a component of the path is the id of a known VM.
fn belongs(path: &Path, known: &Known) -> bool {
    path.components()
        .filter_map(|c| c.as_os_str().to_str()?.parse::<VmId>().ok())
        .any(|vm| known.vms.contains_key(&vm))
}

/// Whether the last component is the id of a known VM.
fn entry_of_known(path: &Path, known: &Known) -> bool {
    let vm = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.parse::<VmId>().ok());
    vm.is_some_and(|vm| known.vms.contains_key(&vm))
}

fn entries(folder: &Path, into: &mut Vec<PathBuf>) -> io::Result<()> {
    let list = match std::fs::read_dir(folder) {
        Ok(list) => list,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    for entry in list {
        into.push(entry?.path());
    }
    Ok(())
}

/// Lists everything of dayfly's on the host.
///
/// # Errors
/// `/proc` or one of the folders cannot be listed.
pub fn scan(places: &Places, groups: Option<&Groups>) -> io::Result<Found> {
    let mut found = Found { processes: process::scan(&places.program)?, ..Found::default() };
    for root in &places.mount_roots {
        found.mounts.extend(mounts::below(root)?);
    }
    if let Some(groups) = groups {
        found.groups = groups.list()?;
        // One that is removed at this moment is gone.
        found.groups.retain(|group| matches!(groups.is_used(*group), Ok(false)));
    }
    for folder in &places.vm_folders {
        entries(folder, &mut found.entries)?;
    }
    for folder in &places.temporary {
        entries(folder, &mut found.temporary)?;
    }
    Ok(found)
}

/// [`scan`] and [`decide`]; an entry that is a socket becomes [`Leak::Socket`].
///
/// # Errors
/// As [`scan`].
pub fn find(places: &Places, groups: Option<&Groups>, known: &Known) -> io::Result<Vec<Leak>> {
    use std::os::unix::fs::FileTypeExt;
    let mut leaks = decide(&scan(places, groups)?, known);
    for leak in &mut leaks {
        if let Leak::File(path) = leak
            && std::fs::symlink_metadata(&*path).is_ok_and(|m| m.file_type().is_socket())
        {
            *leak = Leak::Socket(std::mem::take(path));
        }
    }
    Ok(leaks)
}

/// Removes one leak. A leak that is already gone is no error.
///
/// # Errors
/// Names what was being removed, and the reason for the failure.
pub fn sweep(leak: &Leak, groups: Option<&Groups>) -> io::Result<()> {
    const TIMEOUT: Duration = Duration::from_secs(10);
    let named = |e: io::Error| io::Error::new(e.kind(), format!("sweeping {leak}: {e}"));
    match leak {
        Leak::Process(id, _) => {
            let Some(process) = Process::open(*id).map_err(named)? else { return Ok(()) };
            // A process that may hardly run ends late. One without a limit is not concerned.
            let _ = groups.map(|groups| groups.lift_rates_of(id.pid));
            process.kill().map_err(named)?;
            match process.wait(Some(TIMEOUT)).map_err(named)? {
                Some(_) => Ok(()),
                None => Err(named(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("still there {} s after SIGKILL", TIMEOUT.as_secs()),
                ))),
            }
        }
        Leak::Mount(path) => mounts::detach_below(path),
        // If a process has entered it meanwhile, it stays.
        Leak::Group(group) => {
            groups.map_or(Ok(()), |groups| groups.remove(*group).map(drop)).map_err(named)
        }
        Leak::Socket(path) | Leak::File(path) => {
            // Unmount first: removing a folder would otherwise delete the content of mounts inside
            // it.
            mounts::detach_below(path)?;
            remove(path).map_err(named)
        }
    }
}

/// Removes a file, a symbolic link itself, or a folder with its content (without following links).
fn remove(path: &Path) -> io::Result<()> {
    let result = match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(e) => Err(e),
    };
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
