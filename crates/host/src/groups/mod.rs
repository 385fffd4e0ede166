//! Control groups (cgroups(7)): one for each VM, one for each template, one for the daemon.
//!
//! Closer (section IV-B) splits the privileged VM into a *main* container, whose work does not
//! depend on any VM, and a *secondary* one, whose work is charged to the VM that it is done for.
//! Here the host is the privileged VM, and control groups are its containers:
//!
//! ```text
//!  <base>/dayfly-<tag>/       the tree of one daemon; the tag is a digest of its run folder
//!    main/                    the daemon and idle zygotes
//!    templates/<n>/           one pager
//!    vms/<n>/                 one VMM: vCPUs, devices
//!    booked/<n>/              the same, with booked CPUs ([`cpusets`])
//! ```
//!
//! Two back ends do the same: [`v2`] for the unified hierarchy, and [`v1`] for one hierarchy for
//! each controller. [`find`] chooses the back end and the base.
//!
//! Groups are made before they are needed, and a process is made in its group
//! ([`dayfly_sys::group`]), because moving one waits for a grace period. A group is removed only if
//! no process is in it: the kernel refuses otherwise, so that no mistake here ends a VM.

mod backend;
mod books;
mod cpusets;
mod files;
mod find;
mod limits;
mod name;
mod place;
mod tree;
mod v1;
mod v2;

pub use limits::{Controllers, CpuTime, GroupError, IoMax, Limits, Usage};
pub use name::GroupName;
pub use place::{NoGroups, Root};

use crate::disks::Disk;
use crate::spawn::{Program, Spawn};
use backend::Backend;
use cpusets::Cpusets;
use dayfly_sys::group::Entry;
use files::named;
use name::{BOOKED, PARENTS};
use place::Place;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// The group in which [`Groups::open`] tries whether a process can enter one.
const PROBE: &str = "vms/probe";

/// The tree of groups of one daemon. No other process of dayfly uses it meanwhile.
#[derive(Debug)]
pub struct Groups {
    backend: Box<dyn Backend>,
    /// The tree's folders, locked as long as the tree is in use ([`tree`]).
    _locks: Vec<File>,
    /// Whether this process moved into `main`, or why it did not; `None`: it should not.
    joined: Option<io::Result<()>>,
    /// Why a controller is missing that the kernel has.
    not_enabled: Option<io::Error>,
    /// CPUs of groups; `None` if the host has no such controller.
    cpusets: Option<Cpusets>,
}

impl Groups {
    /// Makes the tree of the daemon with the run folder `run`, or takes over that of a daemon
    /// before. Removes the trees of daemons whose run folders are gone, if no process is in them.
    /// With `join`, moves this process, and with it all that it starts later, into `main`.
    ///
    /// # Errors
    /// Why there can be no groups. This process is where it was, and nothing new is left but the
    /// group that `root` names.
    pub fn open(root: &Root, run: &Path, join: bool) -> Result<Self, NoGroups> {
        // So that a daemon finds its tree by each path of its run folder.
        let run = run.canonicalize().unwrap_or_else(|_| run.to_owned());
        Self::in_place(find::place(root)?, &run, join)
    }

    /// What this process could limit with groups in `root`. Makes a tree for that, and removes it.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn check(root: &Root) -> Result<Controllers, NoGroups> {
        // Threads and processes may check at the same time.
        static CHECKS: AtomicU32 = AtomicU32::new(0);
        let number = CHECKS.fetch_add(1, Ordering::Relaxed);
        let run = format!("/proc/{}/check-{number}", std::process::id());
        let groups = Self::open(root, Path::new(&run), false)?;
        let controllers = groups.controllers();
        groups.close().map_err(NoGroups::making)?;
        Ok(controllers)
    }

    fn in_place(place: Place, run: &Path, join: bool) -> Result<Self, NoGroups> {
        let bases: Vec<PathBuf> = place.bases().map(Path::to_owned).collect();
        tree::sweep(&bases);
        let name = tree::name(run);
        let folders: Vec<PathBuf> = bases.iter().map(|base| base.join(&name)).collect();
        let locks = tree::make(&folders, run)?;
        let cpusets = Cpusets::of(&place, &name, run);
        if let Place::V1(_, Some(cpuset)) = &place {
            tree::sweep(std::slice::from_ref(&cpuset.base));
        }
        let backend: Box<dyn Backend> = match place {
            Place::V1(hierarchies, _) => Box::new(v1::V1::new(hierarchies, &name)),
            Place::V2(base) => Box::new(v2::V2::new(base, &name)),
        };
        let mut groups = Self { backend, _locks: locks, joined: None, not_enabled: None, cpusets };
        match groups.prepare(join) {
            Ok(()) => Ok(groups),
            Err(why) => {
                // The first error says more than one of the removal.
                let _ = groups.leave(&groups.list().unwrap_or_default());
                Err(why)
            }
        }
    }

    /// Makes the folders of the tree, and tries whether it can be used.
    fn prepare(&mut self, join: bool) -> Result<(), NoGroups> {
        self.make_folder(&GroupName::Main.path()).map_err(NoGroups::making)?;
        if join {
            // Before controllers are enabled: a v2 group that is no root must have no process then.
            if self.joined.insert(self.backend.join_main()).is_ok()
                && let Some(shared) = self.backend.shared().map_err(NoGroups::making)?
            {
                return Err(NoGroups::Shared(shared.to_owned()));
            }
        }
        let enabled = self.backend.enable(Path::new(""));
        let parents = self.make_parents().map_err(NoGroups::making)?;
        self.not_enabled = enabled.and(parents).err();
        self.probe()?;
        self.list().map(drop).map_err(NoGroups::Listing)
    }

    /// Makes the folders that contain groups without booked CPUs, unless they exist. Returns why a
    /// controller is missing in them.
    fn make_parents(&self) -> io::Result<io::Result<()>> {
        let mut enabled = Ok(());
        for parent in PARENTS.iter().filter(|parent| **parent != BOOKED) {
            self.make_folder(Path::new(parent))?;
            enabled = enabled.and(self.backend.enable(Path::new(parent)));
        }
        self.backend.weigh();
        Ok(enabled)
    }

    /// Has a new process enter a group, because groups that none can enter are of no use.
    fn probe(&self) -> Result<(), NoGroups> {
        // It enters the group, and then cannot execute a folder.
        let probe = Path::new(PROBE);
        self.make_folder(probe).map_err(NoGroups::making)?;
        let entry = self.backend.entry(probe).map_err(NoGroups::making)?;
        let mut spawn = Spawn::new(Program::Path("/".into()), "probe");
        spawn.group = Some(entry);
        let entered = match spawn.run() {
            Err(e) if e.is_of_execution() => Ok(()),
            Err(e) => Err(NoGroups::Entering(Box::new(e))),
            Ok(_) => Ok(()),
        };
        for folder in self.folders() {
            let _ = tree::remove(&folder.join(probe));
        }
        entered
    }

    /// Why this process is not in `main`, although it should be.
    #[must_use]
    pub fn not_joined(&self) -> Option<&io::Error> {
        self.joined.as_ref()?.as_ref().err()
    }

    /// Why a controller is missing that the kernel has.
    #[must_use]
    pub const fn not_enabled(&self) -> Option<&io::Error> {
        self.not_enabled.as_ref()
    }

    /// What can be limited.
    #[must_use]
    pub fn controllers(&self) -> Controllers {
        self.backend.controllers()
    }

    /// The tree's folders, one for each hierarchy.
    #[must_use]
    pub fn folders(&self) -> &[PathBuf] {
        self.backend.folders()
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        for folder in self.folders() {
            let path = folder.join(path);
            match std::fs::create_dir(&path) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(named(&path)(e)),
                _ => {}
            }
        }
        Ok(())
    }

    /// Makes a new group, without limits.
    ///
    /// # Errors
    /// `AlreadyExists` if there is one of that name in any hierarchy; or the kernel refuses.
    /// Nothing of a new group is left.
    pub fn make(&self, group: GroupName) -> io::Result<()> {
        let mut made: Vec<PathBuf> = Vec::new();
        for path in self.places(group) {
            let made_it = std::fs::create_dir(&path).or_else(|e| match e.kind() {
                // Another program removed the folder that contains groups, when it was empty.
                io::ErrorKind::NotFound => {
                    self.make_parents().and_then(|_enabled| std::fs::create_dir(&path))
                }
                _ => Err(e),
            });
            if let Err(e) = made_it {
                for path in &made {
                    let _ = tree::remove(path);
                }
                return Err(named(&path)(e));
            }
            made.push(path);
        }
        Ok(())
    }

    /// How a new process enters the group.
    ///
    /// # Errors
    /// The group does not exist, or a file of it cannot be opened.
    pub fn entry(&self, group: GroupName) -> io::Result<Entry> {
        let mut entry = self.backend.entry(&group.path())?;
        if let Entry::Tasks(tasks) = &mut entry {
            tasks.extend(self.cpu_tasks(group)?);
        }
        Ok(entry)
    }

    /// Limits what the group's processes may read from and write to each of these disks.
    ///
    /// # Errors
    /// The host has no such limit, or the kernel refuses.
    pub fn limit_io(
        &self,
        group: GroupName,
        io_max: &IoMax,
        disks: &[Disk],
    ) -> Result<(), GroupError> {
        self.backend.limit_io(&group.path(), io_max, disks)
    }

    /// Checks that rates of disks can be limited.
    ///
    /// # Errors
    /// As [`Self::limit_io`].
    pub fn check_io(&self) -> Result<(), GroupError> {
        self.backend.check_io()
    }

    /// Sets the limits that are given; the others stay.
    ///
    /// # Errors
    /// [`GroupError`] names the limit.
    pub fn set(&self, group: GroupName, limits: &Limits) -> Result<(), GroupError> {
        self.controllers().check(limits)?;
        self.backend.set(&group.path(), limits)
    }

    /// What the group's processes have used, those that have ended included.
    ///
    /// # Errors
    /// The group does not exist.
    pub fn usage(&self, group: GroupName) -> io::Result<Usage> {
        self.backend.usage(&group.path())
    }

    /// Bytes that are charged to the group and that the kernel cannot reclaim: not the page cache
    /// of files. `None` without the controller.
    ///
    /// # Errors
    /// The group does not exist.
    pub fn unreclaimable_bytes(&self, group: GroupName) -> io::Result<Option<u64>> {
        self.backend.unreclaimable_bytes(&group.path())
    }

    /// Makes a group without processes as a new one: without limits, and its counters at zero.
    /// `false`: that is not possible, and the group is to be removed.
    ///
    /// # Errors
    /// The group does not exist, or the kernel refuses.
    pub fn reset(&self, group: GroupName) -> io::Result<bool> {
        Ok(!self.is_used(group)?
            && self.backend.reset(&group.path())?
            // Last, because a process may have entered it.
            && !self.is_used(group)?)
    }

    /// Takes the limits of CPU time and of disks away, so that its processes end quickly: one that
    /// waits for the disk ends when the disk has answered.
    ///
    /// # Errors
    /// The group does not exist, or the kernel refuses.
    pub fn lift_rates(&self, group: GroupName) -> io::Result<()> {
        self.backend.lift_rates(&group.path())
    }

    /// As [`Self::lift_rates`] of the VM's group in which this process is. Does nothing if it is
    /// in none of this tree.
    ///
    /// # Errors
    /// The process has ended, or the kernel refuses.
    pub fn lift_rates_of(&self, pid: u32) -> io::Result<()> {
        let cgroups = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let tree = self.folders().first().and_then(|folder| folder.file_name());
        let group = tree.and_then(|tree| name::vm_of(&cgroups, tree));
        group.map_or(Ok(()), |group| self.lift_rates(group))
    }

    /// Whether this process is in the group, in all hierarchies that each group is in.
    ///
    /// # Errors
    /// The group does not exist.
    pub fn contains(&self, group: GroupName, pid: u32) -> io::Result<bool> {
        let pid = pid.to_string();
        // Not the hierarchy of cpuset, in which the kernel may have moved it.
        for folder in self.folders() {
            let path = folder.join(group.path()).join("cgroup.procs");
            let text = std::fs::read_to_string(&path).map_err(named(&path))?;
            if !text.lines().any(|other| other == pid) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether a process is in the group.
    ///
    /// # Errors
    /// The group does not exist.
    pub fn is_used(&self, group: GroupName) -> io::Result<bool> {
        for folder in self.places(group) {
            if tree::has_processes(&folder)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes a group. `false`: a process is in it, and the group stays. A group that does not
    /// exist is removed already.
    ///
    /// # Errors
    /// The kernel refuses for another reason.
    pub fn remove(&self, group: GroupName) -> io::Result<bool> {
        let mut removed = true;
        for folder in self.places(group) {
            removed &= tree::remove(&folder)?;
        }
        Ok(removed)
    }

    /// The groups of VMs and of templates that exist, also those in one hierarchy only.
    ///
    /// # Errors
    /// A folder cannot be listed.
    pub fn list(&self) -> io::Result<Vec<GroupName>> {
        let mut found = Vec::new();
        let own = self.cpusets.as_ref().and_then(Cpusets::v1_tree);
        for (parent, name) in [
            (PARENTS[0], GroupName::Template as fn(u32) -> GroupName),
            (PARENTS[1], GroupName::Vm as fn(u32) -> GroupName),
            (PARENTS[2], GroupName::Booked as fn(u32) -> GroupName),
        ] {
            for folder in self.folders().iter().map(PathBuf::as_path).chain(own) {
                let path = folder.join(parent);
                let entries = match std::fs::read_dir(&path) {
                    // Another program removed it, when it was empty.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                    entries => entries.map_err(named(&path))?,
                };
                for entry in entries {
                    let number = entry?.file_name().to_str().and_then(|n| n.parse().ok());
                    found.extend(number.map(name));
                }
            }
        }
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Removes the tree, if no group of a VM or of a template is left in it. Moves this process out
    /// of it for that. The tree stays if this process cannot leave, as in a cgroup namespace of v2.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn close(&self) -> io::Result<()> {
        let left = self.list()?;
        if left.is_empty() { self.leave(&left) } else { Ok(()) }
    }

    /// Moves this process out of the tree, and removes the tree if no groups are `left`.
    fn leave(&self, left: &[GroupName]) -> io::Result<()> {
        // Also if it is in `main` of only some hierarchies.
        let outside = self.joined.is_none() || self.backend.leave_main()?;
        if !(outside && left.is_empty()) {
            return Ok(());
        }
        let own = self.cpusets.as_ref().and_then(Cpusets::v1_tree);
        for folder in self.folders().iter().map(PathBuf::as_path).chain(own) {
            tree::remove_all(folder)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;

#[cfg(test)]
mod cpuset_tests;
