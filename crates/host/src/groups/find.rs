//! Where a daemon may have its groups.
//!
//! | host | base |
//! |---|---|
//! | v2 has a controller cpu, memory or pids | the daemon's own group, if that is the root |
//! | | the same, if it is the root of a cgroup namespace and no other process is in it |
//! | | the group around it, if it is `main` and the other is delegated |
//! | v1 | the daemon's own group in each hierarchy of cpu, cpuacct, memory and pids |
//! | a path is given | the group with that path, which is made |
//!
//! In v2 a group that gives controllers to others contains no process itself, unless it is the
//! root, and none can enter it (EBUSY). So the group of a service is used only if systemd puts the
//! daemon into a group `main` below it (`Delegate=yes` and `DelegateSubgroup=main`,
//! systemd.resource-control(5), from systemd 254 on): an older systemd could not start the daemon
//! again while VMs live. The unit of dayfly therefore gives a path that is not below that group.

use super::files::read;
use super::place::{Hierarchy, NoGroups, Place, Root, V2Place};
use super::tree::make_base;
use rustix::fs::getxattr;
use std::path::{Path, PathBuf};

/// A mounted hierarchy.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mount {
    /// Where it is mounted.
    point: PathBuf,
    /// Which of its groups is mounted there.
    root: PathBuf,
    /// The controllers of a v1 hierarchy; `None`: v2.
    controllers: Option<Vec<String>>,
}

/// The cgroup hierarchies in the text of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
pub(super) fn mounts(text: &str) -> Vec<Mount> {
    let of = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (root, point) = (left.next()?.into(), left.next()?.into());
        let mut right = right.split(' ');
        let controllers = match right.next()? {
            "cgroup2" => None,
            "cgroup" => Some(right.nth(1)?.split(',').map(ToOwned::to_owned).collect()),
            _ => return None,
        };
        Some(Mount { point, root, controllers })
    };
    text.lines().filter_map(of).collect()
}

impl Mount {
    /// Whether it is the hierarchy of v2.
    pub(super) const fn is_v2(&self) -> bool {
        self.controllers.is_none()
    }

    /// The path of this process's group in the hierarchy, from the text of `/proc/self/cgroup`.
    fn own(&self, cgroups: &str) -> Option<PathBuf> {
        cgroups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (names, path) = (fields.next()?, fields.next()?);
            let same = match &self.controllers {
                None => names.is_empty(),
                Some(own) => !names.is_empty() && names.split(',').all(|n| has(own, n)),
            };
            same.then(|| path.into())
        })
    }

    /// The folder of the group with this path; `None` if it is not below the mounted one.
    fn folder(&self, path: &Path) -> Option<PathBuf> {
        Some(self.point.join(path.strip_prefix(&self.root).ok()?))
    }
}

fn has(controllers: &[String], name: &str) -> bool {
    controllers.iter().any(|own| own == name)
}

/// The v1 hierarchies of the controllers that are used, with the groups in which the tree is made.
pub(super) fn v1(mounts: &[Mount], cgroups: &str, root: &Root) -> Vec<Hierarchy> {
    let used = ["cpu", "cpuacct", "memory", "pids"];
    let of = |mount: &Mount| {
        let own = mount.controllers.as_deref()?;
        let controllers: Vec<&str> = used.into_iter().filter(|name| has(own, name)).collect();
        if controllers.is_empty() {
            return None;
        }
        let own = mount.folder(&mount.own(cgroups)?)?;
        let base = match root {
            Root::At(path) => mount.folder(path)?,
            _ => own.clone(),
        };
        let controllers = controllers.into_iter().map(ToOwned::to_owned).collect();
        Some(Hierarchy { base, own, controllers, joins: *root == Root::Own })
    };
    let mut found: Vec<Hierarchy> = Vec::new();
    for hierarchy in mounts.iter().filter_map(of) {
        // A hierarchy may be mounted twice.
        if !found.iter().any(|other| other.controllers == hierarchy.controllers) {
            found.push(hierarchy);
        }
    }
    found
}

/// The v1 hierarchy of cpuset, with the group in which the tree is made; `None` if it has another
/// controller that is used, because a group without CPUs cannot be entered.
pub(super) fn v1_cpuset(mounts: &[Mount], cgroups: &str, root: &Root) -> Option<Hierarchy> {
    let used = ["cpu", "cpuacct", "memory", "pids"];
    let mount = mounts.iter().find(|mount| {
        let own = mount.controllers.as_deref().unwrap_or_default();
        has(own, "cpuset") && !used.iter().any(|name| has(own, name))
    })?;
    let own = mount.folder(&mount.own(cgroups)?)?;
    let base = match root {
        Root::At(path) => mount.folder(path)?,
        _ => own.clone(),
    };
    // The daemon stays where it is.
    Some(Hierarchy { base, own, controllers: vec!["cpuset".to_owned()], joins: false })
}

/// The v2 group in which the tree is made. `delegated` says of a folder whether systemd delegates
/// it.
pub(super) fn v2(
    mount: &Mount,
    cgroups: &str,
    root: &Root,
    delegated: impl FnOnce(&Path) -> bool,
) -> Result<V2Place, NoGroups> {
    let own_path = mount.own(cgroups).ok_or(NoGroups::Nowhere)?;
    let own = mount.folder(&own_path).ok_or(NoGroups::Nowhere)?;
    if let Root::At(path) = root {
        let base = mount.folder(path).ok_or(NoGroups::Nowhere)?;
        // From the mounted group on.
        let mut above: Vec<_> = base.ancestors().map(Path::to_owned).collect();
        above.retain(|folder| folder.starts_with(&mount.point));
        above.reverse();
        return Ok(V2Place { base, own, above, joins: false });
    }
    // The root, or that of a cgroup namespace: [`super::backend::Backend::shared`].
    if own_path == Path::new("/") {
        return Ok(V2Place { base: own.clone(), above: vec![own.clone()], own, joins: true });
    }
    let service = own.parent().filter(|_| own_path.ends_with("main"));
    match service {
        // The daemon is in `main` of the service already.
        Some(service) if delegated(service) => {
            let base = service.to_owned();
            Ok(V2Place { above: vec![base.clone()], base, own, joins: false })
        }
        _ => Err(NoGroups::NotDelegated(own_path)),
    }
}

/// Whether systemd says that a program may make groups in this one (systemd's
/// docs/CGROUP_DELEGATION.md).
fn is_delegated(folder: &Path) -> bool {
    let mut value = [0; 8];
    ["trusted.delegate", "user.delegate"]
        .into_iter()
        .any(|name| getxattr(folder, name, &mut value).is_ok_and(|n| value[..n] == *b"1"))
}

/// Whether the v2 hierarchy has a controller that is used. A host may mount it without, beside v1.
fn has_controllers(mount: &Mount) -> bool {
    let text = read(&mount.point.join("cgroup.controllers")).ok().flatten().unwrap_or_default();
    text.split_whitespace().any(|name| ["cpu", "memory", "pids"].contains(&name))
}

/// Chooses version and base.
pub(super) fn place(root: &Root) -> Result<Place, NoGroups> {
    if *root == Root::Nowhere {
        return Err(NoGroups::Off);
    }
    let text = std::fs::read_to_string("/proc/self/mountinfo").map_err(NoGroups::Proc)?;
    let cgroups = std::fs::read_to_string("/proc/self/cgroup").map_err(NoGroups::Proc)?;
    let mounts = mounts(&text);
    let unified = mounts.iter().find(|mount| mount.is_v2());
    let place = match unified.filter(|mount| has_controllers(mount)) {
        Some(mount) => Place::V2(v2(mount, &cgroups, root, is_delegated)?),
        None => Place::V1(v1(&mounts, &cgroups, root), v1_cpuset(&mounts, &cgroups, root)),
    };
    if place.bases().next().is_none() {
        return Err(NoGroups::Nowhere);
    }
    if matches!(root, Root::At(_)) {
        for base in place.bases() {
            make_base(base)?;
        }
    }
    Ok(place)
}
