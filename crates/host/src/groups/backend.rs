//! What both versions have to do.

use super::limits::{Controllers, GroupError, Limits, Usage};
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
    /// kernel does not give is left out.
    fn enable(&self, group: &Path);
    /// Sets the weights of the tree and of the folder of VMs.
    fn weigh(&self);
    /// Takes the limit of CPU time away.
    fn lift_cpu_max(&self, group: &Path) -> io::Result<()>;
    /// How a new process enters the group.
    fn entry(&self, group: &Path) -> io::Result<Entry>;
    /// Sets the given limits; the others stay.
    fn set(&self, group: &Path, limits: &Limits) -> Result<(), GroupError>;
    /// What the group's processes have used.
    fn usage(&self, group: &Path) -> io::Result<Usage>;
    /// Makes a group without processes as a new one. `false`: it cannot be, and is to be removed.
    fn reset(&self, group: &Path) -> io::Result<bool>;
    /// Moves this process into `main`.
    fn join_main(&self) -> io::Result<()>;
    /// Moves this process back to where it was.
    fn leave_main(&self) -> io::Result<()>;
}
