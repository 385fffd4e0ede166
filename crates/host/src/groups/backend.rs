//! What both versions have to do.

use super::limits::{Controllers, GroupError, IoMax, Limits, Usage};
use crate::disks::Disk;
use dayfly_sys::group::Entry;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// What the two versions of the interface do differently. `group` is a path in the tree.
pub(super) trait Backend: fmt::Debug + Send + Sync {
    /// The tree's folder in each hierarchy.
    fn folders(&self) -> &[PathBuf];
    /// What can be limited.
    fn controllers(&self) -> Controllers;
    /// Gives the folder `group` of the tree its controllers for the groups in it. One that the
    /// kernel does not give is left out; the first such error is returned.
    fn enable(&self, group: &Path) -> io::Result<()>;
    /// Sets the weights of the tree, of the folder of VMs, and of the groups above the tree that a
    /// daemon made.
    fn weigh(&self);
    /// Takes the limits of CPU time and of disks away.
    fn lift_rates(&self, group: &Path) -> io::Result<()>;
    /// Checks that rates of disks can be limited.
    fn check_io(&self) -> Result<(), GroupError>;
    /// Limits the rates of these disks.
    fn limit_io(&self, group: &Path, io_max: &IoMax, disks: &[Disk]) -> Result<(), GroupError>;
    /// How a new process enters the group.
    fn entry(&self, group: &Path) -> io::Result<Entry>;
    /// Sets the given limits; the others stay.
    fn set(&self, group: &Path, limits: &Limits) -> Result<(), GroupError>;
    /// What the group's processes have used.
    fn usage(&self, group: &Path) -> io::Result<Usage>;
    /// Bytes that are charged to the group and that the kernel cannot reclaim: not the page cache
    /// of files. `None` without the controller.
    fn unreclaimable_bytes(&self, group: &Path) -> io::Result<Option<u64>>;
    /// Makes a group without processes as a new one. `false`: it cannot be, and is to be removed.
    fn reset(&self, group: &Path) -> io::Result<bool>;
    /// Moves this process into `main`.
    fn join_main(&self) -> io::Result<()>;
    /// Moves this process back to where it was. `false`: the kernel lets no process in there any
    /// more.
    fn leave_main(&self) -> io::Result<bool>;
    /// The group that this process left for `main`, if another process is in it and no process may
    /// be.
    fn shared(&self) -> io::Result<Option<&Path>>;
}
