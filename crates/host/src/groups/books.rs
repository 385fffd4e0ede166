//! The part of [`Groups`] that books CPUs.

use super::limits::GroupError;
use super::name::{BOOKED, GroupName};
use super::{Cpusets, Groups, tree};
use crate::cpus::CpuList;
use crate::process::Named;
use dayfly_sys::group::Entry;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// The limit in errors.
const LIMIT: &str = "cpus_booked";

impl Groups {
    fn cpusets(&self) -> Result<&Cpusets, GroupError> {
        let missing = GroupError::NoController { limit: LIMIT, controller: "cpuset" };
        self.cpusets.as_ref().ok_or(missing)
    }

    /// The CPUs that groups may have now.
    ///
    /// # Errors
    /// The host has no controller cpuset, or the kernel does not say.
    pub fn host_cpus(&self) -> Result<CpuList, GroupError> {
        self.cpusets()?.host().map_err(GroupError::refused(LIMIT))
    }

    /// Whether an earlier daemon has booked CPUs, or has kept VMs off some.
    #[must_use]
    pub fn had_cpus(&self) -> bool {
        self.cpusets.as_ref().is_some_and(Cpusets::exists)
    }

    /// Keeps VMs that book no CPUs, and pagers, on `cpus`; on all CPUs without. Before the first
    /// call, processes of v1 are elsewhere ([`Self::gather`]).
    ///
    /// # Errors
    /// The host has no controller cpuset, or the kernel refuses.
    pub fn share_cpus(&self, cpus: Option<&CpuList>) -> Result<(), GroupError> {
        self.cpusets()?.share(cpus).map_err(GroupError::refused(LIMIT))
    }

    /// Moves processes to the CPUs of [`Self::share_cpus`]: those that have a name of `ours` as
    /// their `argv[0]`, and that are of root or of one of the users beside the name; except those
    /// that are in a group with CPUs. In v2 they are there.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn gather(&self, ours: &[(Named, Range<u32>)]) -> Result<(), GroupError> {
        self.cpusets()?.gather(ours).map_err(GroupError::refused(LIMIT))
    }

    /// Makes the new group `number` of a VM with these booked CPUs, which
    /// [`Self::share_cpus`] has taken from other VMs before.
    ///
    /// # Errors
    /// As [`Self::make`].
    pub fn book(&self, number: u32, cpus: &CpuList) -> io::Result<()> {
        let cpusets = self.cpusets().map_err(io::Error::other)?;
        let group = GroupName::Booked(number);
        let enabled = self.make_parent(Path::new(BOOKED))?;
        self.make(group)?;
        cpusets.book(&group.path(), cpus).map_err(|e| {
            // No process is in it yet.
            let _ = self.remove(group);
            // Says more than that a file is missing.
            enabled.err().unwrap_or(e)
        })
    }

    /// The groups with booked CPUs in which a process is; and an error, if there may be more.
    pub fn booked(&self) -> (Vec<(u32, CpuList)>, io::Result<()>) {
        let (mut found, mut all) = (Vec::new(), Ok(()));
        let Some(cpusets) = &self.cpusets else { return (found, all) };
        let groups = self.list().unwrap_or_else(|e| {
            all = Err(e);
            Vec::new()
        });
        for group in groups {
            let GroupName::Booked(number) = group else { continue };
            // A daemon that was killed may have made or removed it in some hierarchies.
            let used =
                self.places(group).iter().try_fold(false, |used, place| match tree::has_processes(
                    place,
                ) {
                    Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(used),
                    here => Ok(here? || used),
                });
            match used.and_then(|used| used.then(|| cpusets.cpus_of(&group.path())).transpose()) {
                Ok(cpus) => found.extend(cpus.map(|cpus| (number, cpus))),
                Err(e) => all = Err(e),
            }
        }
        (found, all)
    }

    /// Adds to the entry of a group without booked CPUs what was missing when it was made: the way
    /// to the CPUs of [`Self::share_cpus`].
    ///
    /// # Errors
    /// A file cannot be opened.
    pub fn complete(&self, entry: &mut Entry) -> io::Result<()> {
        let (Some(cpusets), Entry::Tasks(tasks)) = (&self.cpusets, entry) else { return Ok(()) };
        if tasks.len() == self.folders().len() {
            tasks.extend(cpusets.tasks(None)?);
        }
        Ok(())
    }

    /// The group's folders.
    pub(super) fn places(&self, group: GroupName) -> Vec<PathBuf> {
        let booked = match group {
            GroupName::Booked(_) => self.cpusets.as_ref().and_then(Cpusets::v1_tree),
            _ => None,
        };
        let trees = self.folders().iter().map(PathBuf::as_path).chain(booked);
        trees.map(|tree| tree.join(group.path())).collect()
    }

    /// Makes a folder that contains groups, unless it exists. Returns why a controller is missing
    /// in it.
    pub(super) fn make_parent(&self, parent: &Path) -> io::Result<io::Result<()>> {
        self.make_folder(parent)?;
        let enabled = self.backend.enable(parent);
        self.backend.weigh();
        Ok(enabled)
    }

    /// The file by which a process enters the CPUs of the group.
    pub(super) fn cpu_tasks(&self, group: GroupName) -> io::Result<Option<OwnedFd>> {
        let Some(cpusets) = &self.cpusets else { return Ok(None) };
        let own = matches!(group, GroupName::Booked(_)).then(|| group.path());
        cpusets.tasks(own.as_deref())
    }
}
