//! The CPUs of groups (controller cpuset; kernel: Documentation/admin-guide/cgroup-v1/cpusets.rst
//! and cgroup-v2.rst).
//!
//! ```text
//!  v1: a hierarchy for cpuset alone          v2
//!   <base>/dayfly-<tag>/                      <base>/dayfly-<tag>/
//!     shared/       VMMs, relays, pagers        vms/, templates/   and all groups in them
//!     booked/<n>/   the VMM of one VM           booked/<n>/        the VMM of one VM
//! ```
//!
//! Nothing here exists before CPUs are booked, or before VMs are kept off some. All VMs that book
//! none follow one file in v1 and two in v2, so a booking costs as many writes with thousands of
//! VMs as with one. Therefore the VMM of a VM with booked
//! CPUs is in another folder, which it enters when it is forked.

use super::files::{named, read, write};
use super::name::BOOKED;
use super::place::{NoGroups, Place};
use super::tree;
use crate::cpus::{self, CpuList};
use crate::process::{self, Named};
use dayfly_units::sync::lock;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The folder of v1 with the processes of VMs that book no CPUs.
const SHARED: &str = "shared";
/// How often processes are looked for that are not in [`SHARED`] yet.
const PASSES: u32 = 100;

/// Where the groups of a tree have their CPUs.
#[derive(Debug)]
pub(super) struct Cpusets {
    base: PathBuf,
    tree: PathBuf,
    run: PathBuf,
    version: Version,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The locks of the tree's folder in v1, once it is made.
    locks: Vec<File>,
    /// Whether the shared groups have had their CPUs once.
    active: bool,
}

#[derive(Debug)]
enum Version {
    V1,
    /// The folders above the tree that need the controller.
    V2(Vec<PathBuf>),
}

impl Cpusets {
    /// The CPUs of the tree `name` in `place`; `None` without the controller, or if v1 has mounted
    /// it together with another controller that is used.
    pub(super) fn of(place: &Place, name: &str, run: &Path) -> Option<Self> {
        let (base, version) = match place {
            Place::V1(_, cpuset) => (cpuset.as_ref()?.base.clone(), Version::V1),
            Place::V2(place) => {
                let first = place.above.first()?;
                let has = read(&first.join("cgroup.controllers")).ok().flatten()?;
                has.split_whitespace().find(|name| *name == "cpuset")?;
                (place.base.clone(), Version::V2(place.above.clone()))
            }
        };
        let (tree, run) = (base.join(name), run.to_owned());
        Some(Self { base, tree, run, version, state: Mutex::default() })
    }

    /// The folder in v1 in which groups with booked CPUs have a folder too.
    pub(super) fn v1_tree(&self) -> Option<&Path> {
        matches!(self.version, Version::V1).then_some(self.tree.as_path())
    }

    /// Whether an earlier daemon has booked CPUs, or has kept VMs off some.
    pub(super) fn exists(&self) -> bool {
        match self.version {
            Version::V1 => self.tree.is_dir(),
            Version::V2(_) => self.tree.join("vms/cpuset.cpus").exists(),
        }
    }

    pub(super) fn is_active(&self) -> bool {
        lock(&self.state).active
    }

    /// The first of these files that is not empty, in the base or above it.
    fn inherited(&self, files: [&str; 2]) -> io::Result<Option<String>> {
        for folder in self.base.ancestors() {
            for file in files {
                let text = read(&folder.join(file))?.unwrap_or_default();
                if !text.trim().is_empty() {
                    return Ok(Some(text.trim().to_owned()));
                }
            }
        }
        Ok(None)
    }

    /// The CPUs that groups may have now.
    pub(super) fn host(&self) -> io::Result<CpuList> {
        match self.inherited(["cpuset.cpus.effective", "cpuset.effective_cpus"])? {
            Some(text) => text.parse().map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e)),
            None => cpus::online(),
        }
    }

    /// The memory nodes that groups may have now.
    fn mems(&self) -> io::Result<String> {
        let text = self.inherited(["cpuset.mems.effective", "cpuset.effective_mems"])?;
        Ok(text.unwrap_or_else(|| "0".to_owned()))
    }

    /// Gives a group of v1 these CPUs and nodes. Both must be there before a process enters.
    fn give(folder: &Path, cpus: &str, mems: &str) -> io::Result<()> {
        write(&folder.join("cpuset.cpus"), cpus)?;
        write(&folder.join("cpuset.mems"), mems)
    }

    /// Makes the folders, and gives them CPUs from the base on.
    fn prepare(&self, state: &mut State) -> io::Result<()> {
        match &self.version {
            Version::V1 => {
                let other = |e: NoGroups| io::Error::other(e.to_string());
                tree::make_base(&self.base).map_err(other)?;
                let (cpus, mems) = (self.host()?.to_string(), self.mems()?);
                // A new group has neither, and so have those that were just made above it.
                let above: Vec<&Path> = self.base.ancestors().collect();
                for folder in above.into_iter().rev() {
                    let own = read(&folder.join("cpuset.cpus"))?;
                    if own.is_some_and(|own| own.trim().is_empty()) {
                        Self::give(folder, &cpus, &mems)?;
                    }
                }
                if state.locks.is_empty() || !self.tree.is_dir() {
                    let folders = std::slice::from_ref(&self.tree);
                    state.locks = tree::make(folders, &self.run).map_err(other)?;
                }
                Self::give(&self.tree, &cpus, &mems)?;
                for folder in [SHARED, BOOKED].map(|name| self.tree.join(name)) {
                    make(&folder)?;
                    write(&folder.join("cpuset.mems"), &mems)?;
                }
                write(&self.tree.join(BOOKED).join("cpuset.cpus"), &cpus)
            }
            Version::V2(above) => {
                let tree = std::slice::from_ref(&self.tree);
                for folder in above.iter().chain(tree) {
                    write(&folder.join("cgroup.subtree_control"), "+cpuset")?;
                }
                Ok(())
            }
        }
    }

    /// The files with the CPUs of VMs that book none.
    fn shared(&self) -> Vec<PathBuf> {
        let folders: &[&str] = match self.version {
            Version::V1 => &[SHARED],
            Version::V2(_) => &["vms", "templates"],
        };
        folders.iter().map(|name| self.tree.join(name).join("cpuset.cpus")).collect()
    }

    /// Keeps VMs that book no CPUs, and pagers, on `cpus`; on all without.
    pub(super) fn share(&self, cpus: Option<&CpuList>) -> io::Result<()> {
        let mut state = lock(&self.state);
        let text = match (cpus, &self.version) {
            (Some(cpus), _) => cpus.to_string(),
            (None, Version::V1) => self.host()?.to_string(),
            // As those of the group above.
            (None, Version::V2(_)) => "\n".to_owned(),
        };
        let set = || self.shared().iter().try_for_each(|file| write(file, &text));
        if state.active && set().is_ok() {
            return Ok(());
        }
        // Not made yet; or another program removed a folder, or the host has other CPUs now.
        self.prepare(&mut state)?;
        set()?;
        state.active = true;
        Ok(())
    }

    /// Gives the new group `folder` of the tree CPUs, and all memory nodes that the tree has: a
    /// policy can prefer a node, but a group that is bound to one is out of memory with it.
    pub(super) fn book(&self, folder: &Path, cpus: &CpuList) -> io::Result<()> {
        let mems = match self.version {
            Version::V2(_) => "\n".to_owned(),
            Version::V1 => self.mems()?,
        };
        Self::give(&self.tree.join(folder), &cpus.to_string(), &mems)
    }

    /// The CPUs of the group `folder` of the tree.
    pub(super) fn cpus_of(&self, folder: &Path) -> io::Result<CpuList> {
        let path = self.tree.join(folder).join("cpuset.cpus");
        let missing = || named(&path)(io::ErrorKind::NotFound.into());
        let text = read(&path)?.ok_or_else(missing)?;
        text.parse().map_err(|e| named(&path)(io::Error::new(io::ErrorKind::InvalidData, e)))
    }

    /// The file `tasks` by which a new process enters `folder`, or the shared one; `None` in v2,
    /// and before anything is made.
    pub(super) fn tasks(&self, folder: Option<&Path>) -> io::Result<Option<OwnedFd>> {
        if self.v1_tree().is_none() || !self.is_active() {
            return Ok(None);
        }
        let path = self.tree.join(folder.unwrap_or(SHARED.as_ref())).join("tasks");
        let file = File::options().write(true).open(&path).map_err(named(&path))?;
        Ok(Some(file.into()))
    }

    /// Moves the processes with one of these `argv[0]`, of root or of the users beside it, that are
    /// in no group of the tree into the shared one. In v2 all are in a group that has its CPUs.
    ///
    /// The first move waits for a grace period (10 ms), the next ones take 50 us each. A process
    /// that one of them has forked meanwhile is found by another pass.
    pub(super) fn gather(&self, ours: &[(Named, Range<u32>)]) -> io::Result<()> {
        if self.v1_tree().is_none() {
            return Ok(());
        }
        let procs = self.tree.join(SHARED).join("cgroup.procs");
        for _ in 0..PASSES {
            let (inside, mut moved) = (self.inside()?, false);
            for pid in processes(ours)? {
                if inside.contains(&pid) {
                    continue;
                }
                match write(&procs, &pid.to_string()) {
                    // It has ended.
                    Err(_) if process::uid_of(pid).is_err() => {}
                    moves => {
                        moves?;
                        moved = true;
                    }
                }
            }
            if !moved {
                return Ok(());
            }
        }
        Err(io::Error::other(format!("{}: VMMs are forked too quickly", procs.display())))
    }

    /// The processes in the shared group of v1, and in those with booked CPUs. Not those in
    /// the folder that contains these: the kernel moves processes there if it takes the last CPU of
    /// their group away.
    fn inside(&self) -> io::Result<BTreeSet<u32>> {
        let mut groups = vec![self.tree.join(SHARED)];
        let booked = self.tree.join(BOOKED);
        for entry in std::fs::read_dir(&booked).map_err(named(&booked))? {
            groups.push(entry?.path());
        }
        let mut inside = BTreeSet::new();
        for group in groups {
            // `None`: a file, or a group that was removed meanwhile.
            let pids = read(&group.join("cgroup.procs")).or_else(|e| match e.kind() {
                io::ErrorKind::NotADirectory => Ok(None),
                _ => Err(e),
            })?;
            inside
                .extend(pids.unwrap_or_default().lines().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        Ok(inside)
    }
}

/// The processes with these names and users. Each user may give its processes any name.
fn processes(ours: &[(Named, Range<u32>)]) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for (name, uids) in ours {
        let is_ours = |uid: u32| uid == 0 || uids.contains(&uid);
        found.extend(
            name.pids()?.into_iter().filter(|pid| process::uid_of(*pid).is_ok_and(is_ours)),
        );
    }
    Ok(found)
}

fn make(folder: &Path) -> io::Result<()> {
    match std::fs::create_dir(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(named(folder)(e)),
        _ => Ok(()),
    }
}
