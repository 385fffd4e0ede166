//! Where a tree is, or why there is none.

use crate::spawn::SpawnError;
use std::io;
use std::path::{Path, PathBuf};

/// Where a daemon has its groups.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Root {
    /// It has none.
    #[default]
    Nowhere,
    /// In its own group.
    Own,
    /// In the group with this absolute path, as `/proc/<pid>/cgroup` shows paths.
    At(PathBuf),
}

/// Why a daemon has no groups.
#[derive(Debug, thiserror::Error)]
pub enum NoGroups {
    /// It was started without.
    #[error("dayflyd was started with --group-root none")]
    Off,
    /// No hierarchy has a controller that is used.
    #[error("no cgroup hierarchy with the controllers cpu, memory or pids is mounted")]
    Nowhere,
    /// The group that the daemon is in belongs to another program.
    #[error(
        "the group {} is not delegated to dayflyd: let systemd delegate it (Delegate=yes and \
         DelegateSubgroup=main), or name another with --group-root",
        .0.display()
    )]
    NotDelegated(PathBuf),
    /// Other processes are in the group that the daemon is in, which is not the root.
    #[error(
        "other processes are in the group {} of this cgroup namespace, so that it cannot give its \
         controllers to groups in it: start dayflyd as the only process of the container, or name \
         another group with --group-root",
        .0.display()
    )]
    Shared(PathBuf),
    /// Another daemon uses the tree.
    #[error(
        "{}: another dayflyd uses it, such as one of another container with the same run folder: \
         choose another folder with --run, or another group with --group-root",
        .0.display()
    )]
    Taken(PathBuf),
    /// `/proc` cannot be read.
    #[error("looking for cgroups: {0}")]
    Proc(#[source] io::Error),
    /// The groups of an earlier daemon cannot be listed.
    #[error("listing control groups: {0}")]
    Listing(#[source] io::Error),
    /// A new process cannot enter a group.
    #[error("entering a control group: {}", dayfly_units::error::chain(.0))]
    Entering(#[source] Box<SpawnError>),
    /// A folder cannot be made.
    #[error(
        "making control groups: {0}; dayflyd needs root and a cgroup file system that it may write"
    )]
    Making(#[source] io::Error),
}

impl NoGroups {
    pub(super) const fn making(source: io::Error) -> Self {
        Self::Making(source)
    }
}

/// The folders that the tree is made in.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The hierarchies in which each group has a folder; and that of cpuset, if it is mounted by
    /// itself ([`super::cpusets`]).
    V1(Vec<Hierarchy>, Option<Hierarchy>),
    V2(V2Place),
}

/// A folder of cgroup v2.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct V2Place {
    /// The folder in which the tree is made.
    pub(super) base: PathBuf,
    /// The folder of the group that this process is in.
    pub(super) own: PathBuf,
    /// The folders whose groups need controllers: `base`, and above it those that were given.
    pub(super) above: Vec<PathBuf>,
    /// Whether this process moves into `main`.
    pub(super) joins: bool,
}

impl Place {
    pub(super) fn bases(&self) -> impl Iterator<Item = &Path> {
        let (v1, v2) = match self {
            Self::V1(hierarchies, _) => (hierarchies.as_slice(), None),
            Self::V2(place) => (&[][..], Some(place.base.as_path())),
        };
        v1.iter().map(|hierarchy| hierarchy.base.as_path()).chain(v2)
    }
}

/// A hierarchy in which the tree is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hierarchy {
    /// The group in which the tree is made.
    pub(super) base: PathBuf,
    /// The group of this process.
    pub(super) own: PathBuf,
    /// Those of its controllers that are used.
    pub(super) controllers: Vec<String>,
    /// Whether this process moves into `main`.
    pub(super) joins: bool,
}
