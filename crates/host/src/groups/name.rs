//! Names of groups.

use std::ffi::OsStr;
use std::fmt;
use std::path::PathBuf;

/// A group of a daemon's tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GroupName {
    /// The daemon's own.
    Main,
    /// That of a pager.
    Template(u32),
    /// That of a VM.
    Vm(u32),
    /// That of a VM with booked CPUs.
    Booked(u32),
}

/// The folder that contains the groups with booked CPUs.
pub(super) const BOOKED: &str = "booked";
/// How a path in a hierarchy shows such a group.
const BOOKED_NAME: (&str, fn(u32) -> GroupName) = ("/booked/", GroupName::Booked);

/// The folders of the tree that contain groups.
pub(super) const PARENTS: [&str; 3] = ["templates", "vms", BOOKED];

impl GroupName {
    /// Its number; 0 for `main`.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            Self::Main => 0,
            Self::Template(number) | Self::Vm(number) | Self::Booked(number) => number,
        }
    }

    /// The group's path in the tree.
    #[must_use]
    pub fn path(self) -> PathBuf {
        self.to_string().into()
    }
}

/// The group of a VM in which a process is, by the text of its `/proc/<pid>/cgroup` and the name of
/// the tree.
pub(super) fn vm_of(cgroups: &str, tree: &OsStr) -> Option<GroupName> {
    cgroups.lines().find_map(|line| {
        let kinds = [("/vms/", GroupName::Vm as fn(u32) -> GroupName), BOOKED_NAME];
        kinds.into_iter().find_map(|(parent, name)| {
            let (above, number) = line.rsplit_once(parent)?;
            let above = above.rsplit('/').next()?;
            number.parse().ok().filter(|_| above == tree).map(name)
        })
    })
}

impl fmt::Display for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Main => f.write_str("main"),
            Self::Template(number) => write!(f, "templates/{number}"),
            Self::Vm(number) => write!(f, "vms/{number}"),
            Self::Booked(number) => write!(f, "{BOOKED}/{number}"),
        }
    }
}
